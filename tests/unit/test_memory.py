"""Compiles start only when they fit, are measured, and leave no reservation behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from sm120kit.memory import Costs, Event, Gate, available

MIB = 2**20


def start(gate: Gate, output: str, program: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "sm120kit.memory", sys.executable, "-c", program, "-o", output]
    return subprocess.Popen(argv, env={**os.environ, "SM120KIT_GATE_DIR": str(gate.directory)}, stderr=subprocess.PIPE)


def test_units_that_do_not_fit_together_run_one_after_the_other(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    span = """
import pathlib, sys, time
started = time.time()
time.sleep(0.4)
pathlib.Path(sys.argv[2]).write_text(f"{started} {time.time()}")
"""
    outputs = [tmp_path / "a.o", tmp_path / "b.o"]
    gate.open({str(path): 60 * MIB for path in outputs}, budget_bytes=100 * MIB)
    children = [start(gate, str(path), span) for path in outputs]
    assert [child.wait() for child in children] == [0, 0]
    spans = sorted(tuple(map(float, path.read_text().split())) for path in outputs)
    assert spans[0][1] <= spans[1][0], "they overlapped"
    assert gate.running() == ()


def test_units_that_fit_run_at_once(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    outputs = [tmp_path / "a.o", tmp_path / "b.o"]
    gate.open({str(path): MIB for path in outputs}, budget_bytes=100 * MIB)
    meet = f"""
import pathlib, sys, time
here = pathlib.Path({str(tmp_path)!r})
(here / (pathlib.Path(sys.argv[2]).name + '.here')).touch()
until = time.time() + 10
while len(list(here.glob('*.here'))) < 2:
    if time.time() > until:
        sys.exit(9)
    time.sleep(0.02)
"""
    children = [start(gate, str(path), meet) for path in outputs]
    assert [child.wait() for child in children] == [0, 0]


def test_peak_seconds_and_exit_code_are_noted(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({}, budget_bytes=1)
    assert start(gate, "x.o", "data = bytearray(150 << 20); raise SystemExit(3)").wait() == 3
    (event,) = gate.events()
    assert event.output == "x.o" and event.exit_code == 3
    assert 150 * MIB < event.peak_bytes < 400 * MIB
    assert 0 < event.seconds < 30


def test_a_killed_compiler_is_told_as_such(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({}, budget_bytes=1)
    child = start(gate, "x.o", "import os; os.kill(os.getpid(), 9)")
    assert child.wait() == 137
    assert child.stderr is not None and b"ended by signal 9" in child.stderr.read()
    assert gate.events()[0].exit_code == -9


def test_a_reservation_of_a_dead_process_does_not_block(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({"a.o": 60 * MIB}, budget_bytes=100 * MIB)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (gate.directory / "running" / str(child.pid)).write_text(
        f'{{"output": "dead.o", "pid": {child.pid}, "expected_bytes": {90 * MIB}}}'
    )
    started = time.monotonic()
    gate.enter("a.o").unlink()
    assert time.monotonic() - started < 5


def test_costs_survive_and_failed_units_teach_nothing(tmp_path: Path) -> None:
    costs = Costs(tmp_path / "costs.json")
    costs.learn("m/a.o", Event("a.o", 2.0, 100, 0))
    costs.learn("m/b.o", Event("b.o", 2.0, 100, 1))
    costs.save()
    again = Costs(tmp_path / "costs.json")
    assert again.of("m/a.o") == (100, 2.0)
    assert again.of("m/b.o") is None
    (tmp_path / "costs.json").write_text("{half")
    assert Costs(tmp_path / "costs.json").of("m/a.o") is None


def test_available_respects_an_address_space_limit() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
        "from sm120kit.memory import available; print(available())"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, env={**os.environ})
    assert 0 < int(said.stdout) <= 2 << 30 and available() > 0
