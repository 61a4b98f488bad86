"""Kernels of Triton that are compiled without a GPU, into an image as entries of Triton's cache.

``recipes/engines/<recipe>.triton.jsonl`` lists kernels that an engine launches when it starts. The image of all other layers
runs ``compile.py``, so that the entries have the key that Triton computes in it: its own files and ptxas, the source of the
kernel and of what that calls, types, constants, attributes and options (``triton/runtime/cache.py`` of 3.8.0). No path is part
of it, but groups of files name their files by path: the entrypoint adds these groups to Triton's cache, and they name files of
the image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sm120kit.core import data_roots, reporting
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_input
from sm120kit.core.workspace import Workspace
from sm120kit.images._compiled_ahead import Compiler

if TYPE_CHECKING:
    from sm120kit.images._layers import LayerWriter

PROGRAM, RECORD = "triton_ahead/compile.py", "triton_ahead/record.jsonl"
RECORDER = "triton_ahead/record/sitecustomize.py"
"""Programs of an image, below ``/opt/sm120kit``: the program, the recipe's record, and what records a server's kernels."""

DIRECTORY = "opt/sm120kit/triton_ahead"
_KEYS = {"function", "signature", "constants", "attributes", "options"}
_MAX_BYTES = 2**25


def record(recipe: str) -> str:
    """The record of a recipe as it is in its image, empty if there is none.

    Raises:
        BadInput: it is damaged.
    """
    path = data_roots.find("engines", f"{recipe}.triton.jsonl")
    if not path.is_file():
        return ""
    lines = sorted({*read_input(path, _MAX_BYTES).decode(errors="replace").splitlines()})
    for line in lines:
        try:
            kernel = parse_json(line)
            fits = isinstance(kernel, dict) and kernel.keys() == _KEYS and isinstance(kernel["function"], str)
        except ValueError:
            fits = False
        if not fits:
            raise BadInput(f"{path} is not a record of kernels of Triton: {line[:80]}", "restore it, or record it again")
    return "".join(f"{line}\n" for line in lines)


def _listed(result: dict[str, Any], contents: Mapping[str, bytes]) -> dict[str, list[str]]:
    """The functions of kernels that were compiled, and of those that could not be."""
    return {name: [kernel["function"] for kernel in result[name]] for name in ("kernels", "failed")}


COMPILER = Compiler(
    "Triton",
    DIRECTORY,
    (f"/opt/sm120kit/{PROGRAM}", f"/opt/sm120kit/{RECORD}", "SM12x"),
    re.compile(r"[A-Z2-7]{52}/[\w.-]+"),
    _listed,
    f"the record of the recipe, {RECORD}, lists them",
)


def write_kernels(layer: LayerWriter, image: str, workspace: Workspace) -> None:
    """Compile the kernels of the record in ``image``, and write them to a layer above it; see :meth:`Compiler.write`.

    One that cannot be compiled is reported; the image's checks require all, but with local patches.
    """
    for kernel in COMPILER.write(layer, image, workspace)["failed"]:
        problem = f"{kernel['function']}: {kernel['problem']}"
        remedy = "record it again, or remove its lines from recipes/engines/RECIPE.triton.jsonl"
        reporting.warn(f"the image's Triton cannot compile a recorded kernel: {problem}; {remedy}")
