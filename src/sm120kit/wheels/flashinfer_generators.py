"""Run FlashInfer's own generators and print their modules and ninja files. A program, for the tree that is to be built.

Standard input: ``{"tree", "modules": {name: {"generator", "leave_out": [pattern], "only": [pattern] | null}}}``.
Standard output, last line: ``{"modules": {name: {"sources", "library", "ninja"}}, "tvm_ffi", "includes"}``; paths are absolute.

Only the modules of the generators are imported (``flashinfer.jit`` and below): the package's ``__init__`` would import every
kernel wrapper, which needs a CUDA build of torch in some releases.
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
    request = json.load(sys.stdin)
    tree = Path(request["tree"])
    output, sys.stdout = sys.stdout, sys.stderr  # generators print
    package = types.ModuleType("flashinfer")
    package.__path__ = [str(tree / "flashinfer")]
    sys.modules["flashinfer"] = package
    sys.path.insert(0, str(tree))

    modules = {}
    for name, options in request["modules"].items():
        module, function = options["generator"].split(":")
        spec = getattr(importlib.import_module(module), function)()
        if spec.name != name:
            raise SystemExit(f"{options['generator']} makes module {spec.name!r}, not {name!r}")
        # Generators list directories, in an order that differs between machines; the order of objects is that of the library.
        spec = dataclasses.replace(spec, sources=sorted(spec.sources, key=str))
        names = [Path(source).name for source in spec.sources]
        compiled = [
            source
            for source, file in zip(spec.sources, names, strict=True)
            if not any(fnmatch.fnmatch(file, pattern) for pattern in options["leave_out"])
            and (options["only"] is None or any(fnmatch.fnmatch(file, pattern) for pattern in options["only"]))
        ]
        spec = dataclasses.replace(spec, sources=compiled)
        spec.build_dir.mkdir(parents=True, exist_ok=True)
        spec.write_ninja()
        modules[name] = {
            "sources": names,
            "library": str(spec.jit_library_path),
            "ninja": spec.ninja_path.read_text(),
        }
    import tvm_ffi

    sys.stdout = output
    print(
        json.dumps(
            {
                "modules": modules,
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
