"""The memory gate: compilers start when they fit, are measured, and leave no reservation behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm120kit.core.memory import Costs, FinishedUnit, Gate, available_bytes, ran_out_of_memory

MIB = 2**20


def start(gate: Gate, output: str, program: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "sm120kit.core.memory", sys.executable, "-c", program, "-o", output]
    return subprocess.Popen(argv, env={**os.environ, "SM120KIT_GATE_DIR": str(gate.directory)}, stderr=subprocess.PIPE)


def test_units_over_budget_run_one_by_one(tmp_path: Path) -> None:
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


def test_units_within_budget_run_in_parallel(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    outputs = [tmp_path / "a.o", tmp_path / "b.o"]
    gate.open({str(path): MIB for path in outputs}, budget_bytes=100 * MIB)
    meet = f"""
import pathlib, sys, time
directory = pathlib.Path({str(tmp_path)!r})
(directory / (pathlib.Path(sys.argv[2]).name + '.running')).touch()
until = time.time() + 60
while len(list(directory.glob('*.running'))) < 2:
    if time.time() > until:
        sys.exit(9)
    time.sleep(0.02)
"""
    children = [start(gate, str(path), meet) for path in outputs]
    assert [child.wait() for child in children] == [0, 0]


def test_waiting_units_start_in_order_if_they_fit(tmp_path: Path) -> None:
    """Beside a running unit of 60 MiB in a budget of 100: one of 60 waits, one of 30 does not."""
    gate, release, log = Gate(tmp_path / "gate"), tmp_path / "release", tmp_path / "log"
    sizes = {"running": 60, "long": 60, "middle": 60, "short": 60, "small": 30}
    gate.open({name: size * MIB for name, size in sizes.items()}, budget_bytes=100 * MIB)
    program = f"""
import pathlib, sys, time
with open({str(log)!r}, "a") as log:
    log.write(sys.argv[2] + " ")
until = time.monotonic() + 60
while sys.argv[2] == "running" and not pathlib.Path({str(release)!r}).exists() and time.monotonic() < until:
    time.sleep(0.02)
"""

    def count(state: str, expected: int) -> None:
        until = time.monotonic() + 60
        while len(list((gate.directory / state).iterdir())) != expected:
            assert time.monotonic() < until
            time.sleep(0.02)

    children = [start(gate, "running", program)]
    count("running", 1)
    children += [start(gate, name, program) for name in ("short", "middle", "long")]
    count("waiting", 3)
    assert start(gate, "small", program).wait() == 0
    release.touch()
    assert [child.wait() for child in children] == [0] * 4
    assert log.read_text().split() == ["running", "small", "long", "middle", "short"]
    assert not list((gate.directory / "waiting").iterdir())


def test_peak_seconds_and_exit_code_are_recorded(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({}, budget_bytes=1)
    assert start(gate, "x.o", "data = bytearray(150 << 20); raise SystemExit(3)").wait() == 3
    (event,) = gate.events()
    assert event.output == "x.o" and event.exit_code == 3
    assert 150 * MIB < event.peak_bytes < 400 * MIB
    assert 0 < event.seconds < 30


def test_costs_are_processor_time_of_all_processes(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({}, budget_bytes=1)
    program = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 0.4: pass"], check=True)
time.sleep(1)
"""
    assert start(gate, "x.o", program).wait() == 0
    (event,) = gate.events()
    assert 0.4 <= event.cpu_seconds <= event.seconds - 0.9
    costs = Costs(tmp_path / "costs.json")
    costs.record("m/x.o", event)
    assert costs.of("m/x.o") == (event.peak_bytes, event.cpu_seconds)


def test_killed_compiler_is_reported(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({}, budget_bytes=1)
    child = start(gate, "x.o", "import os; os.kill(os.getpid(), 9)")
    assert child.wait() == 137
    assert child.stderr is not None and b"ended by signal 9" in child.stderr.read()
    assert gate.events()[0].exit_code == -9


def test_reservation_of_ended_process_is_ignored(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open({"a.o": 60 * MIB}, budget_bytes=100 * MIB)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (gate.directory / "running" / str(child.pid)).write_text(
        f'{{"output": "dead.o", "pid": {child.pid}, "expected_bytes": {90 * MIB}}}'
    )
    gate.reserve("a.o").unlink()  # otherwise it waits for ever


def test_costs_are_stored_for_successful_units(tmp_path: Path) -> None:
    costs = Costs(tmp_path / "costs.json")
    costs.record("m/a.o", FinishedUnit("a.o", 9.0, 2.0, 100, 0))
    costs.record("m/b.o", FinishedUnit("b.o", 9.0, 2.0, 100, 1))
    costs.save()
    again = Costs(tmp_path / "costs.json")
    assert again.of("m/a.o") == (100, 2.0)
    assert again.of("m/b.o") is None
    (tmp_path / "costs.json").write_text("{half")
    assert Costs(tmp_path / "costs.json").of("m/a.o") is None


def test_available_bytes_with_address_space_limit() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
        "from sm120kit.core.memory import available_bytes; print(available_bytes())"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, env={**os.environ})
    assert 0 < int(shown.stdout) <= 2 << 30 and available_bytes() > 0


@pytest.mark.parametrize(
    "output",
    [
        "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n",
        "c++: internal compiler error: Killed (program cc1plus)\nPlease submit a full bug report,\n",
        "collect2: fatal error: ld terminated with signal 9 [Killed]\ncompilation terminated.\n",
        "virtual memory exhausted: Cannot allocate memory\n",
        "\ncc1plus: out of memory allocating 65536 bytes after a total of 7086080 bytes\n",
        "/usr/bin/ld: final link failed: memory exhausted\ncollect2: error: ld returned 1 exit status\n",
        "clang: error: unable to execute command: Killed\nclang: error: clang frontend command failed due to signal\n",
        "LLVM ERROR: out of memory\nAllocation failed\n",
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        "Killed\n",
        "/bin/sh: line 1: 41592 Killed                  cicc --c++17 --orig_src_file_name probe.cu\n",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n",
        "/usr/include/c++/12/bits/stl_function.h(257): catastrophic error: out of memory\n   { return 1; }\n   ^\n",
        "ptxas fatal   : Memory allocation failure\nptxas fatal   : Ptx assembly aborted due to errors\n",
        "unary.cuh:45:33: error: ../../util_device.cuh: Cannot allocate memory\n",
        "g++ was ended by signal 9; memory available now: 212 MiB\n",
    ],
)
def test_out_of_memory_messages_are_detected(output: str) -> None:
    assert ran_out_of_memory(1, output)


@pytest.mark.parametrize(
    "output",
    [
        "a.hpp:12:3: error: 'struct Killed' has no member named 'signal'\n   12 |   Killed k; throw std::bad_alloc();\n",
        'moe.cuh:8:1: error: static assertion failed: out of memory of one CTA\n    8 | assert(fits, "out of memory");\n',
        "nvcc error   : 'ptxas' died due to signal 11 (Invalid memory reference)\n",
        "c++: fatal error: cannot execute 'cc1plus': execvp: No such file or directory\ncompilation terminated.\n",
        'a.cu(5): error: excessive recursion at instantiation of function "float F<N>::f(float) [with N=200]"\n',
    ],
)
def test_other_compiler_errors_are_not_out_of_memory(output: str) -> None:
    assert not ran_out_of_memory(1, output)


@pytest.mark.parametrize(
    ("exit_code", "expected"), [(-9, True), (137, True), (143, True), (1, False), (-11, False), (139, False)]
)
def test_exit_code_of_a_killed_compiler(exit_code: int, expected: bool) -> None:
    assert ran_out_of_memory(exit_code, "") is expected
