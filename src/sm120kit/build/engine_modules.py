"""Asks FlashInfer's own generators for modules and ninja files. Run as a program, in the tree that is to be built.

Standard input: ``{"tree", "modules": {name: {"generator", "leave_out": [pattern], "only": [pattern] | null}}}``.
Standard output, last line: ``{"modules": {name: {"sources", "library", "ninja"}}, "tvm_ffi", "includes"}``; paths are absolute.

FlashInfer is imported piece by piece (``flashinfer.jit`` and below): its package's ``__init__`` would import every kernel
wrapper, which needs a CUDA build of torch in some releases.
"""

import dataclasses
import fnmatch
import importlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import types
from pathlib import Path


def main() -> None:
    order = json.load(sys.stdin)
    tree = Path(order["tree"])
    talk, sys.stdout = sys.stdout, sys.stderr  # generators print
    data = tree / "flashinfer" / "data"
    data.mkdir(exist_ok=True)
    # The layout that FlashInfer's build backend makes for an editable install.
    for source in ("3rdparty/cutlass", "3rdparty/spdlog", "3rdparty/cccl", "csrc", "include"):
        link = data / Path(source).name
        if (tree / source).is_dir() and not link.is_symlink():
            link.symlink_to(Path("../..") / source)
    package = types.ModuleType("flashinfer")
    package.__path__ = [str(tree / "flashinfer")]
    sys.modules["flashinfer"] = package
    sys.path.insert(0, str(tree))

    answer = {}
    for name, wanted in order["modules"].items():
        module, function = wanted["generator"].split(":")
        spec = getattr(importlib.import_module(module), function)()
        if spec.name != name:
            raise SystemExit(f"{wanted['generator']} makes module {spec.name!r}, not {name!r}")
        # Generators list directories, in an order that differs between machines; the order of objects is that of the library.
        spec = dataclasses.replace(spec, sources=sorted(spec.sources, key=str))
        names = [Path(source).name for source in spec.sources]
        kept = [
            source
            for source, file in zip(spec.sources, names, strict=True)
            if not any(fnmatch.fnmatch(file, pattern) for pattern in wanted["leave_out"])
            and (wanted["only"] is None or any(fnmatch.fnmatch(file, pattern) for pattern in wanted["only"]))
        ]
        spec = dataclasses.replace(spec, sources=kept)
        spec.build_dir.mkdir(parents=True, exist_ok=True)
        spec.write_ninja()
        answer[name] = {
            "sources": names,
            "library": str(spec.jit_library_path),
            "ninja": spec.ninja_path.read_text(),
        }
    import tvm_ffi

    sys.stdout = talk
    print(
        json.dumps(
            {
                "modules": answer,
                "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
                "includes": {
                    "tvm_ffi": tvm_ffi.libinfo.find_include_path(),
                    "dlpack": tvm_ffi.libinfo.find_dlpack_include_path(),
                    "python": sysconfig.get_path("include"),
                },
            }
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
