"""A compile starts only when it fits in memory: ninja runs every compiler through this gate.

``python -m sm120kit.memory COMPILER ARGS...`` waits until the peak that this unit is expected to need is free beside what the
units that run now may still take, runs the compiler, and notes seconds and peak. One CUTLASS unit takes 3 to 9 GB, so the
number of cores says little about how many may run at once. The directory that ``SM120KIT_GATE_DIR`` names holds

``expected.json``   output file -> expected peak in bytes; ``budget`` in bytes, for all units together
``running/PID``     one file per unit that runs: output and expected peak
``events.jsonl``    one line per finished unit: output, seconds, peak_bytes, exit code
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Event:
    """What one unit cost. ``peak_bytes`` is the largest resident size that one process of the compiler reached."""

    output: str
    seconds: float
    peak_bytes: int
    exit_code: int


@dataclass(frozen=True)
class Running:
    """A unit that is being compiled."""

    output: str
    pid: int
    expected_bytes: int


class Gate:
    """The gate's directory, seen from the build that owns it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self, expected: dict[str, int], budget_bytes: int) -> None:
        """Forget the last build and set what each output is expected to need."""
        self.directory.mkdir(parents=True, exist_ok=True)
        running = self.directory / "running"
        running.mkdir(exist_ok=True)
        for left_over in running.iterdir():
            left_over.unlink()
        (self.directory / "events.jsonl").write_text("")
        (self.directory / "expected.json").write_text(json.dumps({"budget": budget_bytes, "units": expected}))

    def events(self) -> tuple[Event, ...]:
        """Units that have finished since the gate was opened."""
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return tuple(Event(**json.loads(line)) for line in lines)

    def running(self) -> tuple[Running, ...]:
        """Units that run now. One whose process is gone is forgotten."""
        found = []
        for file in (self.directory / "running").iterdir():
            try:
                entry = Running(**json.loads(file.read_text()))
            except (FileNotFoundError, json.JSONDecodeError):
                continue  # it ended, or is being written, this very moment
            if psutil.pid_exists(entry.pid):
                found.append(entry)
            else:
                file.unlink(missing_ok=True)
        return tuple(found)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def enter(self, output: str) -> Path:
        """Wait until a unit fits, then reserve its memory. A unit alone always runs: waiting longer would not help it."""
        settings = json.loads((self.directory / "expected.json").read_text())
        needed = int(settings["units"].get(output, 0))
        while True:
            with self._locked():
                others = self.running()
                within_budget = needed + sum(other.expected_bytes for other in others) <= settings["budget"]
                still_to_come = sum(max(0, other.expected_bytes - resident(other.pid)) for other in others)
                if not others or (within_budget and needed + still_to_come <= available()):
                    reservation = self.directory / "running" / str(os.getpid())
                    reservation.write_text(json.dumps(asdict(Running(output, os.getpid(), needed))))
                    return reservation
            time.sleep(POLL_SECONDS)

    def note(self, event: Event) -> None:
        """Write down what a unit cost."""
        with self._locked(), (self.directory / "events.jsonl").open("a") as log:
            log.write(json.dumps(asdict(event)) + "\n")


def available() -> int:
    """Bytes that new processes can take without swapping: of the machine, of our cgroup, and of our address space limit."""
    import resource

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


def at_once(unit_bytes: int) -> int:
    """How many programs of ``unit_bytes`` each to run at the same time: as many as there are cores and memory for."""
    return max(1, min(len(os.sched_getaffinity(0)), available() // unit_bytes))


def resident(pid: int) -> int:
    """Bytes that a process and its descendants hold now; 0 when it is gone."""
    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


def main(argv: list[str]) -> int:
    """Run one compiler under the gate and return its exit code."""
    gate = Gate(Path(os.environ["SM120KIT_GATE_DIR"]))
    output = argv[argv.index("-o") + 1]
    reservation = gate.enter(output)
    started = time.monotonic()
    try:
        child = os.posix_spawnp(argv[0], argv, os.environ)
        _, status, usage = os.wait4(child, 0)
    finally:
        reservation.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    gate.note(Event(output, round(time.monotonic() - started, 2), usage.ru_maxrss * 1024, code))
    if code < 0:
        print(f"{argv[0]} was ended by signal {-code}; memory available now: {available() >> 20} MiB", file=sys.stderr)
        return 128 - code
    return code


class Costs:
    """What units cost when they were last compiled, kept across builds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._known: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            self._known = {}

    def of(self, unit: str) -> tuple[int, float] | None:
        """Peak bytes and seconds of a unit, or None when it has never been compiled here."""
        entry = self._known.get(unit)
        return (int(entry["peak_bytes"]), float(entry["seconds"])) if entry else None

    def learn(self, unit: str, event: Event) -> None:
        """Remember a finished unit."""
        if event.exit_code == 0:
            self._known[unit] = {"peak_bytes": event.peak_bytes, "seconds": event.seconds}

    def save(self) -> None:
        """Write what was learned."""
        from sm120kit.workspace import write_atomic

        write_atomic(self.path, json.dumps(self._known, sort_keys=True, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
