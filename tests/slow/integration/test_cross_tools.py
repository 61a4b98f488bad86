"""The compiler and emulator for another machine: unpacked without root, a program and a library for it compiled and run."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.recipes.cross_tools import CrossTools, cross_tools
from sm120kit.sources.run_options import Options
from sm120kit.wheels._check import tvm_ffi_loader
from sm120kit.wheels.build_records import Module

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the tools are for x86_64")


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> CrossTools:
    options = Options(Workspace(tmp_path_factory.mktemp("state")))
    made = cross_tools("aarch64", options)
    assert cross_tools("aarch64", options) == made
    return made


def compiled(tools: CrossTools, source: str, path: Path, *flags: str) -> Path:
    subprocess.run([tools.compiler, "-x", "c++", "-", *flags, "-o", path], input=source, text=True, check=True)
    return path


def test_program_for_another_machine_is_compiled_and_run(tools: CrossTools, tmp_path: Path) -> None:
    source = (
        "#include <iostream>\n#include <sys/utsname.h>\nint main() { utsname name; uname(&name); std::cout << name.machine; }"
    )
    program = compiled(tools, source, tmp_path / "program")
    assert tools.compiler_version().startswith("aarch64-linux-gnu-g++")
    assert subprocess.run([*tools.emulation, program], capture_output=True, text=True).stdout == "aarch64"
    assert str(tools.root).encode() not in program.read_bytes()


@pytest.mark.parametrize(("body", "problem"), [("return 0;", ""), ("return absent();", "absent")])
def test_module_for_another_machine_is_loaded_by_the_emulator(
    body: str, problem: str, tools: CrossTools, tmp_path: Path
) -> None:
    library = compiled(tools, "int other() { return 1; }", tmp_path / "other.so", "-shared", "-fPIC")
    compiled(tools, f"int absent(); int call() {{ {body} }}", tmp_path / "module.so", "-shared", "-fPIC")
    toolchain = replace(Toolchain(Path(), "", str(tools.compiler), ""), machine="aarch64", emulator=tools.emulation)
    problems = tvm_ffi_loader(library, tmp_path, toolchain)(Module("module", "module.so", (), True, ()))
    assert bool(problems) == bool(problem) and all(problem in text for text in problems)
