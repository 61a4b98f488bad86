"""Run FlashInfer's own kernel generator for SM120: ``python _generate.py TREE``.

Standard output, last line: the text of each generated file of SM120's grouped kernels, by name, as JSON.

A separate program that loads only the generator, because FlashInfer's packages import torch. The one function that the
generator imports from them compares the CUDA version; every supported toolchain (12.8 or newer) passes the comparison.
"""

import importlib
import json
import sys
import tempfile
import types
from pathlib import Path


def main(tree: str) -> None:
    printed, sys.stdout = sys.stdout, sys.stderr  # generators print
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.gemm", "flashinfer.jit.gemm.cutlass"):
        package = types.ModuleType(name)
        package.__path__ = [f"{tree}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    cpp_ext = types.ModuleType("flashinfer.jit.cpp_ext")
    cpp_ext.__dict__["is_cuda_version_at_least"] = lambda version: True
    sys.modules[cpp_ext.__name__] = cpp_ext
    sys.dont_write_bytecode = True
    generator = importlib.import_module("flashinfer.jit.gemm.cutlass.generate_kernels")
    with tempfile.TemporaryDirectory(prefix="sm120kit-tiles-") as output:
        generator.generate_gemm_operations(output, "120;120-real")
        files = sorted(Path(output, "gemm_grouped", "120").glob("*.cu"))
        print(json.dumps({path.name: path.read_text() for path in files}), file=printed)


if __name__ == "__main__":
    main(*sys.argv[1:])
