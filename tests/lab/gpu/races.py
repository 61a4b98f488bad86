"""How many seeded faults of synchronisation delays find: ``races.py DIRECTORY [JSON]`` with the programs of races.cu.

On a Hopper GPU, it prints for each fault of races.cu and triton_kernels.py whether it is seen without delays, and with those of
8 seeds; kernels without a fault run with 50. A row is printed, and the file written, as soon as its runs have ended. Exit code
0: no such kernel was ever wrong. ``PYTHONPATH`` has sm12x_lab, torch and Triton; state is that of sm120kit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton_kernels

from sm12x_lab import gpu
from sm12x_lab.ptx import interposed, races
from sm120kit.core import process, toolchain
from sm120kit.core.workspace import Workspace

FAULTS = {
    "pipeline (cp.async)": [
        "wait_group too large",
        "no wait_group",
        "no barrier after the wait",
        "copy into the stage that is read",
        "last wait left out",
        "a group not committed",
        "copy issued after the read, without a barrier",
    ],
    "bulk copies (mbarrier)": [
        "no wait for a full stage",
        "wait for the other parity",
        "stage released before it is read",
        "no wait for an empty stage",
        "one arrival empties a stage",
        "a part of the bytes is not expected",
        "no __syncwarp before the release",
    ],
    "bulk store": [
        "no proxy fence",
        "no barrier before the store",
        "no wait before the buffer is overwritten",
        "wait_group.read too large",
        "no barrier after the wait",
        "barrier of half of the threads",
        "another thread waits than the one that stored",
    ],
    "attention (maxima of warps)": [
        "no barrier after the maxima",
        "no barrier before the next block",
        "maxima reset before others have read them",
        "barrier of half of the threads",
        "no __syncwarp",
        "arrive in place of sync",
    ],
    "split-K": [
        "no barrier before the ticket",
        "no fence before the ticket",
        "ticket before the stores",
        "no barrier after the ticket",
        "last but one takes itself for the last",
        "barrier of half of the threads",
    ],
    "phases (all CTAs meet)": [
        "first meeting left out",
        "one CTA too few",
        "no barrier before the arrival",
        "no barrier after it",
        "the second meeting counts as the first",
        "no fence before the arrival",
        "second meeting left out",
    ],
}
"""Faults of each kernel, numbered from 1."""

TRITON = Path(__file__).with_name("triton_kernels.py")
SEEDS, HEALTHY_SEEDS, AT_ONCE = range(1, 9), range(1, 51), 16
FIRST_SECONDS, SECONDS = 240.0, 20.0
"""The time limits of a program's first run, in which modules are compiled, and of the others, which end those that hang."""

Results = dict[str, str]
"""What a program prints of each kernel, by the kernel's name."""


@dataclass(frozen=True)
class Program:
    """A command with what it is expected to compute: that of ``healthy``, the same program without a fault."""

    kernel: str
    fault: str
    command: tuple[str, ...]
    healthy: tuple[str, ...]

    @property
    def seeds(self) -> range:
        return HEALTHY_SEEDS if self.command == self.healthy else SEEDS


def programs(cuda: str) -> list[Program]:
    """All programs: those with a fault, kernel by kernel, before those without, which have more seeds."""
    healthy = [(name, (f"{cuda}/races-{kernel}", "0")) for kernel, name in enumerate(FAULTS)]
    triton = (sys.executable, str(TRITON))
    listed = []
    for name, command in healthy:
        listed += [Program(name, fault, (command[0], str(i)), command) for i, fault in enumerate(FAULTS[name], 1)]
    listed += [Program("Triton", fault, (*triton, str(i)), triton) for i, fault in enumerate(triton_kernels.FAULTS, 1)]
    return listed + [Program(name, "none", command, command) for name, command in (*healthy, ("Triton", triton))]


def results(program: Program, text: str) -> Results:
    """The results of a program by kernel; programs of CUDA C++ print one line without a name."""
    named = [line.partition(": ") for line in text.splitlines() if line]
    return {name if colon else program.kernel: value or name for name, colon, value in named}


@dataclass(frozen=True)
class Row:
    """A kernel, its fault, whether it is seen without delays, and how many seeds' delays show it, of how many."""

    kernel: str
    fault: str
    without: bool
    seen: int
    seeds: int


def main() -> int:
    with interposed.prepared(None, Workspace.open(None), toolchain.find(), perturbed=True) as interposition:

        def run(program: Program, seed: int | None = None, seconds: float = SECONDS) -> Results:
            delays = f"{seed} 0 {races.EVERY_SITE} {races.EVERY_MODULE}" if seed else ""
            environment = interposition.environment() | {races.DELAYS: delays}
            try:
                done = process.run_within(program.command, seconds, env=environment)
            except process.Stopped:
                return {program.kernel: "did not end"}
            if done.returncode:
                return {program.kernel: f"exit code {done.returncode}: {done.stderr[-300:]}"}
            return results(program, done.stdout)

        listed, rows = programs(str(Path(sys.argv[1]).resolve())), []
        first, pool = ThreadPoolExecutor(AT_ONCE), ThreadPoolExecutor(AT_ONCE)
        commands = dict.fromkeys(program.healthy for program in listed)
        firsts = {each: first.submit(run, Program("", "none", each, each), seconds=FIRST_SECONDS) for each in commands}
        jobs = []
        for program in listed:
            right = firsts[program.healthy]
            jobs.append((program, right, [pool.submit(after, right, run, program, seed) for seed in (0, *program.seeds)]))
        for program, right, runs in jobs:
            found = dict(zip((0, *program.seeds), (each.result() for each in runs), strict=True))
            new = rows_of(program, named(right.result(), program.kernel), found)
            rows += new
            report(new, rows, sys.argv[2:])
    return summary(rows)


def after(right: Future[Results], run: Callable[..., Results], *arguments: object) -> Results:
    """Run once the first run has ended, which has the module assembled."""
    right.result()
    return run(*arguments)


def named(found: Results, kernel: str) -> Results:
    """Results of the first run, which knows no name of a kernel of CUDA C++."""
    return {name or kernel: value for name, value in found.items()}


def rows_of(program: Program, expected: Results, runs: dict[int, Results]) -> list[Row]:
    """A row for each kernel of a program, from its results by seed, 0 without delays."""
    wrong = {seed: {name for name in each if expected.get(name) != each[name]} for seed, each in runs.items()}
    names = {*expected, *runs[0]} if program.fault == "none" else {*runs[0]}
    return [
        Row(name, program.fault, name in wrong[0], sum(name in wrong[seed] for seed in program.seeds), len(program.seeds))
        for name in sorted(names.union(*wrong.values()))
    ]


def report(new: list[Row], rows: list[Row], files: list[str]) -> None:
    """Print new rows, and write all to the file if one is named."""
    for row in new:
        print(f"| {row.kernel} | {row.fault} | {'seen' if row.without else ''} | {row.seen} of {row.seeds} |", flush=True)
    for file in files:
        data = {**interposed.digests(), "gpu": describe(DEVICE), "rows": [asdict(row) for row in rows]}
        Path(file).write_text(json.dumps(data, indent=1) + "\n")


def summary(rows: list[Row]) -> int:
    """Print how many faults were seen; returns whether a kernel without a fault was wrong."""
    faults = [row for row in rows if row.fault != "none"]
    healthy = [row for row in rows if row.fault == "none"]
    without, alarms = sum(row.without for row in faults), sum(row.without or bool(row.seen) for row in healthy)
    print(f"{without} of {len(faults)} faults seen without delays, {sum(bool(row.seen) for row in faults)} with")
    print(f"{alarms} alarms on {len(healthy)} kernels without a fault, {len(HEALTHY_SEEDS)} seeds each")
    return min(alarms, 1)


DEVICE = gpu.probe()


def describe(device: gpu.CudaDevice | None) -> dict[str, object]:
    return asdict(device) if device else {}


if __name__ == "__main__":
    sys.exit(main())
