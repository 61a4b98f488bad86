"""Run FlashInfer's own generators and print their modules and ninja files. A program, for the tree that is to be built.

Standard input: ``{"tree", "modules": {name: {"generator", "arguments"?, "regroup"?: [{"units", "instantiation", "into"}],
"leave_out": [pattern]}}, "tvm_ffi"}``, the last the directory of tvm-ffi's headers; an argument
``torch.<name>`` is a data type. Standard output, last line: ``{"modules": {name: {"sources", "library", "ninja"}},
"includes"}``; paths are absolute.

Only the modules of the generators are imported (``flashinfer.jit`` and below): the package's ``__init__`` would import every
kernel wrapper. Of torch, generators use names of data types and whether torch has the C++11 ABI, which all releases since 2.7
have; of tvm-ffi, the directory of its headers. Stand-ins give these, so that neither needs to be installed, nor a Python that
has wheels of them; any other use of them ends with an AttributeError. The stand-in for requests has nothing: generators fetch
nothing.
"""

import dataclasses
import fnmatch
import importlib
import json
import os
import re
import sys
import sysconfig
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DTYPES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "short", "float16", "half", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "int", "float32", "float"), 4),
    **dict.fromkeys(("uint64", "int64", "long", "float64", "double"), 8),
}
"""Data types of torch with their sizes in bytes."""

ALIASES = {"half": "float16", "short": "int16", "int": "int32", "long": "int64", "float": "float32", "double": "float64"}
"""Data types with two names in torch."""


@dataclasses.dataclass(frozen=True)
class DType:
    """Stand-in for ``torch.dtype``: printed, compared and hashed by its name."""

    name: str
    itemsize: int

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class StandInDevice:
    """Stand-in for ``torch.device`` in annotations."""


class StandInTensor:
    """Stand-in for ``torch.Tensor`` in annotations."""


def stand_in(name: str, **members: object) -> types.ModuleType:
    """Make ``name`` importable as a module with ``members`` only."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def install_stand_ins(headers: str) -> None:
    """Stand in for torch, tvm-ffi with its ``headers``, and requests."""
    version = stand_in("torch.version", cuda=None)
    dtypes = {name: DType(ALIASES.get(name, name), size) for name, size in DTYPES.items()}
    abi = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
    stand_in("torch", dtype=DType, device=StandInDevice, Tensor=StandInTensor, version=version, _C=abi, **dtypes)
    libinfo = stand_in("tvm_ffi.libinfo", find_include_path=lambda: headers, find_dlpack_include_path=lambda: headers)
    stand_in("tvm_ffi", libinfo=libinfo)
    stand_in("requests")


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a generator, with dtypes for their names."""
    import torch

    values = options.get("arguments", {})
    return {
        name: getattr(torch, value.removeprefix("torch.")) if str(value).startswith("torch.") else value
        for name, value in values.items()
    }


def main() -> None:
    request = json.load(sys.stdin)
    tree = Path(request["tree"])
    output, sys.stdout = sys.stdout, sys.stderr  # generators print
    install_stand_ins(request["tvm_ffi"])
    stand_in("flashinfer", __path__=[str(tree / "flashinfer")])
    sys.path.insert(0, str(tree))

    modules = {}
    for name, options in request["modules"].items():
        module, function = options["generator"].split(":")
        spec = getattr(importlib.import_module(module), function)(**arguments(options))
        if spec.name != name:
            raise SystemExit(f"{options['generator']} makes module {spec.name!r}, not {name!r}")
        spec.build_dir.mkdir(parents=True, exist_ok=True)
        # Generators list directories, in an order that differs between machines; the order of objects is that of the library.
        sources = sorted((Path(source) for source in spec.sources), key=str)
        spec = dataclasses.replace(spec, sources=regrouped(sources, options.get("regroup", []), spec.build_dir))
        names = [Path(source).name for source in spec.sources]
        compiled = [
            source
            for source, file in zip(spec.sources, names, strict=True)
            if not any(fnmatch.fnmatch(file, pattern) for pattern in options["leave_out"])
        ]
        spec = dataclasses.replace(spec, sources=compiled)
        spec.write_ninja()
        modules[name] = {
            "sources": names,
            "library": str(spec.jit_library_path),
            "ninja": spec.ninja_path.read_text(),
        }
    sys.stdout = output
    includes = {"tvm_ffi": request["tvm_ffi"], "dlpack": request["tvm_ffi"], "python": sysconfig.get_path("include")}
    print(json.dumps({"modules": modules, "includes": includes}))


def regrouped(sources: Sequence[Path], tables: Sequence[dict[str, str]], directory: Path) -> list[Path]:
    """Write to ``directory`` the units that the recipe's ``regroup`` tables describe, and return the sources with them.

    Each instantiation in a source that matches ``units`` is compiled in the unit that ``into`` names. Such a unit is the text
    of these sources, in the order of their names, without the instantiations of other units. Equal files are not written.
    """
    for table in tables:
        matching = [source for source in sources if fnmatch.fnmatch(source.name, table["units"])]
        if not matching:
            raise SystemExit(f"no source is named like {table['units']}; they are {', '.join(path.name for path in sources)}")
        units: dict[str, list[str]] = {}
        for source in sorted(matching, key=lambda path: path.name):
            text = source.read_text()
            matches = list(re.finditer(table["instantiation"], text))
            if not matches:
                raise SystemExit(f"{source.name} has no instantiation like {table['instantiation']}")
            for name in sorted({match.expand(table["into"]) for match in matches}):
                other = [match.span() for match in matches if match.expand(table["into"]) != name]
                units.setdefault(name, []).append(_without(other, text))
        for name, texts in units.items():
            file, text = directory / name, "".join(texts)
            if not file.is_file() or file.read_text() != text:
                file.write_text(text)
        sources = [*(source for source in sources if source not in matching), *(directory / name for name in units)]
    return sorted(sources, key=str)


def _without(spans: Sequence[tuple[int, int]], text: str) -> str:
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    return "".join(text[start:end] for start, end in zip(starts, ends, strict=True)).rstrip() + "\n"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    main()
