"""Start compilers only when their units fit in memory. Ninja runs every compiler through this gate.

``python -m sm120kit.core.memory COMPILER ARGS...`` waits until the expected peak of the unit is free, in addition to what the
running units may still allocate. Then it runs the compiler and records seconds and peak. One CUTLASS unit takes 3 to 9 GB, so
memory limits the number of parallel compilers more than cores do. Of the units that wait, the one that starts is the first in
``expected.json`` that fits. The directory in ``SM120KIT_GATE_DIR`` contains

``expected.json``   output file -> expected peak in bytes, most urgent first; ``budget`` in bytes, for all units together
``waiting/PID``     one file per unit that does not fit yet: output and expected peak
``running/PID``     one file per running unit: the same
``events.jsonl``    one line per finished unit: output, seconds, cpu_seconds, peak_bytes, exit code
"""

import fcntl
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5

_OUT_OF_MEMORY = re.compile(
    r"""Killed\ signal\ terminated\ program       # gcc 8 and newer: the driver on cc1plus
    |   internal\ compiler\ error:\ Killed\b      # gcc 7 and older
    |   unable\ to\ execute\ command:\ Killed      # clang's driver
    |   terminated\ with\ signal\ 9\b              # collect2 on ld
    |   died\ due\ to\ signal\ 9\b                 # nvcc on cicc, ptxas, cudafe++
    |   was\ ended\ by\ signal\ 9\b                # the memory gate below
    |   ^(?:.*:\ line\ \d+:\ +\d+\ )?Killed\b      # the shell in which nvcc and ninja start programs
    |   out\ of\ memory\ allocating\ \d+\ bytes    # gcc, GNU as
    |   \bmemory\ exhausted\b                     # gcc, GNU ld
    |   (?:catastrophic|LLVM)\ error:\ out\ of\ memory   # cudafe++; clang, cicc
    |   fatal\ *:\ Memory\ allocation\ failure      # nvcc, ptxas, nvlink
    |   terminate\ called\ after\ throwing\ an\ instance\ of\ 'std::bad_alloc'
    |   :\ Cannot\ allocate\ memory$              # ENOMEM
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_ENDED_BY_SYSTEM = (-9, 137, -15, 143)
"""Exit codes after SIGKILL of the kernel, or SIGTERM of a daemon such as earlyoom; 128 + signal from a shell."""


@dataclass(frozen=True)
class FinishedUnit:
    """Time and memory of a compiled unit: ``seconds`` from start to end, ``cpu_seconds`` of all processes of the compiler.

    ``peak_bytes`` is the largest resident size of one of them.
    """

    output: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    exit_code: int


@dataclass(frozen=True)
class RunningUnit:
    """A unit that is being compiled."""

    output: str
    pid: int
    expected_bytes: int


class Gate:
    """The gate's directory, as used by its build and by the compilers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self, expected: dict[str, int], budget_bytes: int) -> None:
        """Reset the gate. ``expected`` is the peak of each output, in bytes, in the order in which waiting units start."""
        for state in ("running", "waiting"):
            (self.directory / state).mkdir(parents=True, exist_ok=True)
            for leftover in (self.directory / state).iterdir():
                leftover.unlink()
        (self.directory / "events.jsonl").write_text("")
        (self.directory / "expected.json").write_text(json.dumps({"budget": budget_bytes, "units": expected}))

    def events(self) -> tuple[FinishedUnit, ...]:
        """Units that finished since :meth:`open`."""
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return tuple(FinishedUnit(**json.loads(line)) for line in lines)

    def running(self) -> tuple[RunningUnit, ...]:
        """Units whose compiler runs. Files of processes that ended are removed."""
        return self._units("running")

    def _units(self, state: str) -> tuple[RunningUnit, ...]:
        import psutil

        units = []
        for file in (self.directory / state).iterdir():
            try:
                unit = RunningUnit(**json.loads(file.read_text()))
            except (FileNotFoundError, json.JSONDecodeError):
                continue  # it has just ended, or is being written
            if psutil.pid_exists(unit.pid):
                units.append(unit)
            else:
                file.unlink(missing_ok=True)
        return tuple(units)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def reserve(self, output: str) -> Path:
        """Wait until a unit fits, then reserve its memory. Without other units it always starts: waiting would free nothing."""
        settings = json.loads((self.directory / "expected.json").read_text())
        needed = int(settings["units"].get(output, 0))
        more_urgent = set(itertools.takewhile(lambda name: name != output, settings["units"]))
        waiting, reservation = (self.directory / state / str(os.getpid()) for state in ("waiting", "running"))
        with self._locked():
            waiting.write_text(json.dumps(asdict(RunningUnit(output, os.getpid(), needed))))
        try:
            while True:
                with self._locked():
                    running = self.running()
                    unallocated = sum(max(0, unit.expected_bytes - resident_bytes(unit.pid)) for unit in running)
                    free = min(
                        settings["budget"] - sum(unit.expected_bytes for unit in running), available_bytes() - unallocated
                    )
                    before = [unit.expected_bytes for unit in self._units("waiting") if unit.output in more_urgent]
                    if (not running or needed <= free) and all(running and size > free for size in before):
                        return waiting.rename(reservation)
                time.sleep(POLL_SECONDS)
        finally:
            waiting.unlink(missing_ok=True)

    def record(self, unit: FinishedUnit) -> None:
        """Append a finished unit to ``events.jsonl``."""
        with self._locked(), (self.directory / "events.jsonl").open("a") as log:
            log.write(json.dumps(asdict(unit)) + "\n")


def available_bytes() -> int:
    """Bytes that new processes can allocate without swapping: the least of machine, cgroup and address space limit."""
    import resource

    import psutil

    free = [psutil.virtual_memory().available]
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            free.append(int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text()))
        except (OSError, ValueError):
            continue  # no such cgroup file, or "max"
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        free.append(soft)
    return max(0, min(free))


def max_parallel(unit_bytes: int) -> int:
    """Number of programs of ``unit_bytes`` each that cores and memory allow at the same time; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), available_bytes() // unit_bytes))


def ran_out_of_memory(exit_code: int, output: str) -> bool:
    """Whether a failed compiler, of which this is the output (gcc, clang or nvcc, in English), lacked memory."""
    return exit_code in _ENDED_BY_SYSTEM or bool(_OUT_OF_MEMORY.search(output))


def resident_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants; 0 when it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(member.memory_info().rss for member in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


LAUNCHER = "SM120KIT_GATE_LAUNCHER"
"""Variable with the program that compilers are started through, such as ccache."""

_SHORT = {"--generate-dependencies-with-compile": "-MD", "--dependency-output": "-MF"}
"""Options of nvcc by the names that compiler caches know, too."""


def launched(argv: list[str], launcher: str) -> list[str]:
    """The command of a compiler, through the launcher if there is one."""
    return [launcher, *(_SHORT.get(argument, argument) for argument in argv)] if launcher else argv


def main(argv: list[str]) -> int:
    """Run one compiler under the gate and return its exit code."""
    argv = launched(argv, os.environ.get(LAUNCHER, ""))
    gate = Gate(Path(os.environ["SM120KIT_GATE_DIR"]))
    output = argv[argv.index("-o") + 1]
    reservation = gate.reserve(output)
    started = time.monotonic()
    try:
        child = os.posix_spawnp(argv[0], argv, os.environ)
        _, status, usage = os.wait4(child, 0)
    finally:
        reservation.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    seconds, cpu_seconds = time.monotonic() - started, usage.ru_utime + usage.ru_stime
    gate.record(FinishedUnit(output, round(seconds, 2), round(cpu_seconds, 2), usage.ru_maxrss * 1024, code))
    if code < 0:
        print(f"{argv[0]} was ended by signal {-code}; memory available now: {available_bytes() >> 20} MiB", file=sys.stderr)
        return 128 - code
    return code


class Costs:
    """Time and memory of units when they were last compiled, stored across builds.

    The time is that of the processors: of a unit on a busy machine it is the better estimate for the next compile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._units: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            self._units = {}

    def of(self, unit: str) -> tuple[int, float] | None:
        """Peak bytes and seconds of a unit, or None when it was never compiled here."""
        entry = self._units.get(unit)
        return (int(entry["peak_bytes"]), float(entry["seconds"])) if entry else None

    def record(self, unit: str, finished: FinishedUnit) -> None:
        """Set the costs of a unit, unless its compiler failed."""
        if finished.exit_code == 0:
            self._units[unit] = {"peak_bytes": finished.peak_bytes, "seconds": finished.cpu_seconds}

    def save(self) -> None:
        """Write the costs to their file."""
        from sm120kit.core.atomic_writes import write_atomic

        write_atomic(self.path, json.dumps(self._units, sort_keys=True, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
