"""Kernels of b12x that are compiled without a GPU, into an image as entries of b12x's cache.

The image of all other layers runs ``compile.py``, so that the entries have the key that b12x computes in it: bytes of b12x,
versions of Python, torch, the DSL and cuda-bindings, and variables such as ``CUDA_HOME`` and ``CUTE_DSL_ARCH``
(``b12x/cute/runtime_patches.py`` of 0.8.3). Entries lie beside the entrypoint, which copies them to b12x's cache.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sm120kit.core import reporting
from sm120kit.core.errors import CommandFailed
from sm120kit.core.outside import parse_json
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.cubin.cubin_records import Kernel
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES

if TYPE_CHECKING:
    from sm120kit.images._layers import LayerWriter

PROGRAM, REQUEST = "b12x/compile.py", "b12x/request.json"
"""Programs of an image, below ``/opt/sm120kit``: the program, and the recipe's table."""

DIRECTORY = "opt/sm120kit/b12x"
"""Where an image has both, the entries, and ``kernels.json`` with the call, sha256 and launches of each."""

ARCH = "sm_120a"
NAME = "b12x"
"""The distribution, its package, and the project of its patch series."""

_ENTRY = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}\.o")
_HINT = "`b12x` in the recipe lists them; its locked b12x and CuTe DSL must belong together"


@dataclass(frozen=True)
class Launch:
    """A launch in the host code of an entry, by the DSL's object of the kernel.

    ``kernel`` is its class; ``tile`` is ``MxNxK`` in elements, ``k_blocks`` the MMA steps along K in one tile; ``shared_bytes``
    is the dynamic shared memory that the launch requests.
    """

    kernel: str
    tile: str
    stages: int
    k_blocks: int
    shared_bytes: int


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: the call that it was compiled for, its sha256, and the launches of its host code, at least one."""

    call: str
    sha256: str
    launches: tuple[Launch, ...]

    def __post_init__(self) -> None:
        if not self.launches:
            raise ValueError(f"no launch of the kernel for {self.call} is recorded")

    def too_big(self, kernels: Sequence[Kernel]) -> str:
        """Why SM120 cannot launch this entry; empty if it can. Of its ``kernels``, the most static shared memory counts."""
        static = max((kernel.shared_bytes for kernel in kernels), default=0)
        return "; ".join(
            f"{launch.kernel} for {self.call} requests {size:,} bytes of shared memory, SM120 has {SMEM_CAPACITY_BYTES:,}"
            for launch in self.launches
            if (size := static + launch.shared_bytes) > SMEM_CAPACITY_BYTES
        )


@dataclass(frozen=True)
class Compiled:
    """What ``compile.py`` printed: kernels by path, the content of each, CPU seconds, and the memory of its process."""

    kernels: dict[str, Entry]
    contents: dict[str, bytes]
    seconds: float
    mib: int

    @classmethod
    def of(cls, code: int, stdout: str, stderr: str) -> Compiled:
        """The result of a run that compiled all kernels, by its exit code and output.

        Raises:
            ValueError: it failed, or its output is of another form; with its last messages.
        """
        try:
            result: dict[str, Any] = parse_json(stdout)
            contents = {path: base64.b64decode(text, validate=True) for path, text in result["entries"].items()}
            calls = {kernel["path"]: kernel for kernel in reversed(result["kernels"])}
            if code or not contents or {*calls} != {*contents} or not all(map(_ENTRY.fullmatch, contents)):
                raise ValueError("its output is not that of a complete run")
            kernels = {
                path: Entry(
                    calls[path]["call"],
                    hashlib.sha256(content).hexdigest(),
                    tuple(Launch(**launch) for launch in calls[path]["launches"]),
                )
                for path, content in sorted(contents.items())
            }
            return cls(kernels, contents, sum(kernel["seconds"] for kernel in result["kernels"]), result["mib"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            last = " | ".join(stderr.strip().splitlines()[-5:])
            raise ValueError(f"exit code {code}: {last or error}") from error


def write_kernels(layer: LayerWriter, image: str, workspace: Workspace) -> None:
    """Compile the kernels of the request in ``image``, and write them to a layer above it.

    Raises:
        CommandFailed: the program failed, or found no kernel.
        RequirementMissing: this system does not permit to run programs in an image.
    """
    from sm120kit.images.local_images import LocalImages

    reporting.info("compiling kernels of b12x in the image")
    argv = ["python", f"/{DIRECTORY}/compile.py", f"/{DIRECTORY}/request.json"]
    try:
        done = LocalImages(workspace).run(image, argv, {})
        compiled = Compiled.of(done.code, done.stdout, done.stderr)
    except ValueError as error:
        raise CommandFailed(f"kernels of b12x could not be compiled in the image: {error}", _HINT) from error
    used = f"{compiled.seconds:.0f} s of CPU time, {compiled.mib} MiB"
    reporting.info(f"compiled {len(compiled.kernels)} kernels of b12x: {used}")
    kernels = {path: asdict(entry) for path, entry in compiled.kernels.items()}
    record = (json.dumps(kernels, indent=1) + "\n").encode()
    layer.file(f"{DIRECTORY}/kernels.json", [record], len(record))
    for path, content in sorted(compiled.contents.items()):
        layer.file(f"{DIRECTORY}/entries/{path}", [content], len(content))
