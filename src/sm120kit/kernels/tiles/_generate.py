"""Run FlashInfer's own kernel generators for SM120: ``python _generate.py TREE``.

Standard output, last line: by generator the name of its ``module``, the ``flags`` of nvcc, and the texts of its generated
``files`` by name, as JSON.

A separate program that loads only the generators, because FlashInfer's packages import torch. Of torch they need the names of
dtypes. They ask whether the CUDA version is new enough; every supported toolchain (12.8 or newer) is.
"""

import importlib
import json
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


class UnusedModule(types.ModuleType):
    """A module that generators import and that has no part in the files they write: each attribute is a stand-in, too."""

    def __getattr__(self, name: str) -> "UnusedModule":
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, UnusedModule(name))
        attribute: UnusedModule = getattr(self, name)
        return attribute


def main(tree: str) -> None:
    printed, sys.stdout = sys.stdout, sys.stderr  # generators print
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.gemm", "flashinfer.jit.gemm.cutlass"):
        package = types.ModuleType(name)
        package.__path__ = [f"{tree}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    names = ("torch", "flashinfer.artifacts", "flashinfer.jit.core", "flashinfer.jit.cpp_ext", "flashinfer.jit.cubin_loader")
    for name in (*names, "flashinfer.jit.env"):
        sys.modules[name] = UnusedModule(name)
    sys.modules["flashinfer.jit.cpp_ext"].__dict__["is_cuda_version_at_least"] = lambda version: True
    context = types.SimpleNamespace(get_nvcc_flags_list=lambda **of: [])
    sys.modules["flashinfer.jit.core"].__dict__.update(current_compilation_context=context, gen_jit_spec=specified)
    sys.dont_write_bytecode = True
    moe, gemm = (importlib.import_module(f"flashinfer.jit.{name}") for name in ("fused_moe", "gemm.core"))
    dense = [function for name, function in vars(gemm).items() if name.startswith("gen_gemm_sm120_module_cutlass_")]
    patterns = {moe.gen_cutlass_fused_moe_sm120_module: "gemm_grouped/120/*.cu"}
    patterns |= dict.fromkeys((*dense, gemm.gen_gemm_sm120_module), "*.cu")
    outputs = {each.__name__: generated(each, pattern, Path(tree, "csrc")) for each, pattern in patterns.items()}
    print(json.dumps(outputs), file=printed)


def specified(name: str, sources: object, extra_cuda_cflags: object = (), **others: object) -> tuple[str, object]:
    """What a generator returns instead of a specification of its module."""
    return name, extra_cuda_cflags


def generated(generator: Callable[[], Any], pattern: str, csrc: Path) -> dict[str, Any]:
    """The output of a generator, of its files those that match a pattern and are not copied from ``csrc``."""
    with tempfile.TemporaryDirectory(prefix="sm120kit-tiles-") as output:
        sys.modules["flashinfer.jit.env"].__dict__.update(FLASHINFER_CSRC_DIR=csrc, FLASHINFER_GEN_SRC_DIR=Path(output))
        module, flags = generator()
        files = sorted(path for path in Path(output).rglob(pattern) if not (csrc / path.name).exists())
        texts = {path.name: path.read_text() for path in files}
    return {"module": module, "flags": flags, "files": texts}


if __name__ == "__main__":
    main(*sys.argv[1:])
