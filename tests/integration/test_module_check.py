"""Check of linked modules: whether they load, with real libraries and the C++ compiler of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sm120kit.core.records import Toolchain
from sm120kit.wheels._check import tvm_ffi_loader
from sm120kit.wheels.build_records import Module

TOOLS = Toolchain(Path(), "", "c++", "")
SOURCE = """
extern "C" int contained(int);
extern "C" int tile_of_32(int);
extern "C" int run(int tile) { return tile == 32 ? tile_of_32(tile) : contained(tile); }
"""


def link(directory: Path, name: str, text: str) -> Path:
    source, library = directory / f"{name}.cpp", directory / f"{name}.so"
    source.write_text(text)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize(
    ("undefined", "problem"),
    [
        (("tile_of_*",), None),
        ((), "undefined symbol: "),
        (("tile_of_64",), "undefined symbol: tile_of_32"),
        (("tile_of_*", "run"), None),
    ],
)
def test_only_functions_that_the_recipe_names_may_be_undefined(
    undefined: tuple[str, ...], problem: str | None, tmp_path: Path
) -> None:
    ffi = link(tmp_path, "ffi", 'extern "C" int contained(int tile) { return tile; }')
    link(tmp_path, "module", SOURCE)
    module = Module("module", "module.so", (), (), undefined)
    problems = tvm_ffi_loader(ffi, tmp_path, TOOLS)(module)
    assert (problem in problems[0]) if problem else problems == ()


def test_a_function_of_no_library_is_a_problem_beside_one_that_may_be_undefined(tmp_path: Path) -> None:
    ffi = link(tmp_path, "ffi", "int unrelated;")
    link(tmp_path, "module", SOURCE)
    module = Module("module", "module.so", (), (), ("tile_of_32",))
    assert tvm_ffi_loader(ffi, tmp_path, TOOLS)(module) == ("does not load: undefined symbol: contained",)
