"""Run FlashInfer's own kernel generators for SM120: ``python _generate.py TREE``.

Standard output, last line: the text of each generated source file, by module (``fused_moe``, ``gemm_sm120``) and by name, as
JSON.

A separate program that loads only the generators, because FlashInfer's packages import torch. Of torch they need the names of
dtypes. The one function that the generator of ``fused_moe`` imports from them compares the CUDA version; every supported
toolchain (12.8 or newer) passes the comparison.
"""

import importlib
import json
import sys
import tempfile
import types
from pathlib import Path


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
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="sm120kit-tiles-") as output:
        texts = {"fused_moe": fused_moe(Path(output)), "gemm_sm120": gemm_sm120(Path(tree, "csrc"), Path(output))}
    print(json.dumps(texts), file=printed)


def fused_moe(output: Path) -> dict[str, str]:
    """The files of the grouped GEMMs of the fused MoE."""
    generator = importlib.import_module("flashinfer.jit.gemm.cutlass.generate_kernels")
    generator.generate_gemm_operations(str(output), "120;120-real")
    return {path.name: path.read_text() for path in sorted((output / "gemm_grouped" / "120").glob("*.cu"))}


def gemm_sm120(csrc: Path, output: Path) -> dict[str, str]:
    """The files of the groupwise GEMMs, without those that are copied from ``csrc``."""
    sys.modules["flashinfer.jit.env"].__dict__.update(FLASHINFER_CSRC_DIR=csrc, FLASHINFER_GEN_SRC_DIR=output)
    context = types.SimpleNamespace(get_nvcc_flags_list=lambda **of: [])
    core = sys.modules["flashinfer.jit.core"].__dict__
    core.update(current_compilation_context=context, gen_jit_spec=lambda *name, **flags: None)
    importlib.import_module("flashinfer.jit.gemm.core").gen_gemm_sm120_module()
    files = sorted((output / "gen_gemm_sm120").glob("*.cu"))
    return {path.name: path.read_text() for path in files if not (csrc / path.name).exists()}


if __name__ == "__main__":
    main(*sys.argv[1:])
