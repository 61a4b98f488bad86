"""The order in which units are compiled: real ninja and memory gate, with a shell script as compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit.core import reporting
from sm120kit.core.errors import ResourceUnavailable
from sm120kit.core.memory import Costs
from sm120kit.core.records import Arch, Toolchain
from sm120kit.wheels.build_records import BuildPlan, Generated, Module, Unit
from sm120kit.wheels.compile import CompileSettings, compile_units

TOOLCHAIN = Toolchain(Path(), "13.0.88", "c++", "12.2")
NINJA = """
flag = {module}
nvcc = $$SM120KIT_GATE $
    sh compiler
post_cflags =
rule cuda_compile
  command = $nvcc $flag -o $out $post_cflags
rule link
  command = cat $in > $out

{units}

build {module}.so: link {outputs}
default {module}.so
"""


def module_of(name: str, seconds: dict[str, float]) -> tuple[Module, Generated]:
    """A module with a unit for each name in ``seconds``, and its ninja file in the form of FlashInfer's."""
    outputs = {unit: f"{name}/{unit}.o" for unit in seconds}
    statements = "\n".join(f"build {output}: cuda_compile source" for output in outputs.values())
    ninja = NINJA.format(module=name, units=statements, outputs=" ".join(outputs.values()))
    units = tuple(Unit(name, "source", outputs[unit], 1, time) for unit, time in seconds.items())
    compiled = tuple(("source", output) for output in outputs.values())
    return Module(name, f"{name}.so", units, ()), Generated(name, f"{name}.so", (), compiled, ninja)


def compile_in(work: Path, modules: list[tuple[Module, Generated]], launcher: Path | None = None) -> list[str]:
    """Compile the modules with one job and return the lines of the compiler's log: flag and output of each call."""
    work.mkdir(exist_ok=True)
    if not (work / "source").exists():
        (work / "source").touch()
    (work / "compiler").write_text('echo "$1 $3" >> started; echo "$3" > "$3"\n')
    (work / "started").write_text("")
    plans, generated = zip(*modules, strict=True)
    plan = BuildPlan("r", "flashinfer", "1", "", "", (Arch.SM_120F,), ("g",), plans, (), TOOLCHAIN)
    compile_units(plan, generated, work, CompileSettings(Costs(work / "costs.json"), jobs=1, launcher=launcher))
    return (work / "started").read_text().splitlines()


def test_units_start_longest_first_across_modules(tmp_path: Path) -> None:
    first = module_of("first", {"a": 20, "b": 70, "c": 10})
    second = module_of("second", {"d": 120, "e": 15})
    order = ["second second/d.o", "first first/b.o", "first first/a.o", "second second/e.o", "first first/c.o"]
    assert compile_in(tmp_path / "work", [first, second]) == order
    assert (tmp_path / "work" / "first.so").read_text() == "first/a.o\nfirst/b.o\nfirst/c.o\n", "the order of its ninja file"


def test_units_are_not_compiled_again_when_their_order_changes(tmp_path: Path) -> None:
    first = module_of("packed", {"a": 20, "b": 70})
    assert len(compile_in(tmp_path / "work", [first])) == 2
    other_costs = module_of("packed", {"a": 90, "b": 70})
    assert compile_in(tmp_path / "work", [other_costs]) == []


def test_compilers_start_through_the_launcher(tmp_path: Path) -> None:
    """A unit that the launcher has is not compiled again, and its time is no estimate for a compile."""
    launcher, kept = tmp_path / "launcher", tmp_path / "kept"
    kept.mkdir()
    launcher.write_text(f'#!/bin/sh\no={kept}/$(basename "$5")\n[ -e "$o" ] || {{ "$@" && cp "$5" "$o"; }}\ncp "$o" "$5"\n')
    launcher.chmod(0o755)
    module = module_of("packed", {"a": 20, "b": 70})
    assert len(compile_in(tmp_path / "first", [module], launcher)) == 2
    assert compile_in(tmp_path / "second", [module], launcher) == []
    assert (tmp_path / "second" / "packed.so").read_bytes() == (tmp_path / "first" / "packed.so").read_bytes()
    assert Costs(tmp_path / "second" / "costs.json").of("packed/a.o") is None


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 137"])
def test_killed_compiler_is_reported_while_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A compiler that runs until there is a warning ends, and then ninja reports the other."""
    told = tmp_path / "told"
    monkeypatch.setattr(reporting, "warn", told.write_text)
    wait = f"for i in $(seq 300); do [ -e {told} ] && echo > b_ended && break; sleep 0.1; done"
    (tmp_path / "compiler").write_text(f'case "$3" in */a.o) {end};; esac\n{wait}\necho > "$3"\n')
    (tmp_path / "source").touch()
    module, generated = module_of("packed", {"a": 20, "b": 70})
    plan = BuildPlan("r", "flashinfer", "1", "", "", (Arch.SM_120F,), ("g",), (module,), (), TOOLCHAIN)
    with pytest.raises(ResourceUnavailable, match=r"a\.o"):
        compile_units(plan, [generated], tmp_path, CompileSettings(Costs(tmp_path / "costs.json"), jobs=2))
    assert "a.o was ended by signal 9" in told.read_text() and (tmp_path / "b_ended").exists()
