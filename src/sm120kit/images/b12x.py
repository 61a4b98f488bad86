"""Kernels of b12x that are compiled into an image, without a GPU, as entries of b12x's cache.

The image of all other layers runs ``compile.py``, so that the entries have the key that b12x computes in it: bytes of b12x,
versions of Python, torch, the DSL and cuda-bindings, and variables such as ``CUDA_HOME`` and ``CUTE_DSL_ARCH``
(``b12x/cute/runtime_patches.py`` of 0.8.3). Entries lie beside the entrypoint, which copies them to b12x's cache.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from sm120kit.core import reporting
from sm120kit.core.errors import ImageBuildFailed
from sm120kit.core.state import Workspace, parse_json

if TYPE_CHECKING:
    from sm120kit.images.layers import LayerWriter

PROGRAM, REQUEST = "engine/b12x/compile.py", "engine/b12x/request.json"
"""Files of a build context: the program, and the recipe's table."""

DIRECTORY = "opt/sm120kit/b12x"
"""Where an image has both, the entries, and ``kernels.json`` with the call and sha256 of each."""

ARCH = "sm_120a"
_ENTRY = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}\.o")


def write_kernels(layer: LayerWriter, image: str, workspace: Workspace) -> None:
    """Compile the kernels of the request in ``image``, and write them to a layer above it.

    Raises:
        ImageBuildFailed: the program failed, or found no kernel.
        NamespacesMissing: this system does not permit to run programs in an image.
    """
    from sm120kit.images.local import LocalImages

    reporting.info("compiling kernels of b12x in the image")
    argv = ["python", f"/{DIRECTORY}/compile.py", f"/{DIRECTORY}/request.json"]
    done = LocalImages(workspace).run(image, argv, {})
    try:
        result: dict[str, Any] = parse_json(done.stdout)
        entries = {path: base64.b64decode(text, validate=True) for path, text in result["entries"].items()}
        calls = {kernel["path"]: kernel["call"] for kernel in reversed(result["kernels"])}
        if done.code or not entries or {*calls} != {*entries} or not all(map(_ENTRY.fullmatch, entries)):
            raise ValueError("its output is not that of a complete run")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        last = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise ImageBuildFailed(
            f"kernels of b12x could not be compiled in the image: exit code {done.code}: {last or error}",
            "`b12x` in the recipe lists them; its locked b12x and CuTe DSL must belong together",
        ) from error
    seconds = sum(kernel["seconds"] for kernel in result["kernels"])
    reporting.info(f"compiled {len(entries)} kernels of b12x: {seconds:.0f} s of CPU time, {result['mib']} MiB")
    kernels = {
        path: {"call": calls[path], "sha256": hashlib.sha256(content).hexdigest()} for path, content in sorted(entries.items())
    }
    record = (json.dumps(kernels, indent=1) + "\n").encode()
    layer.file(f"{DIRECTORY}/kernels.json", [record], len(record))
    for path, content in sorted(entries.items()):
        layer.file(f"{DIRECTORY}/entries/{path}", [content], len(content))


def read_record(text: str) -> dict[str, str]:
    """The sha256 of each entry, by path, from ``kernels.json``."""
    kernels: dict[str, dict[str, str]] = parse_json(text)
    return {path: kernel["sha256"] for path, kernel in kernels.items()}
