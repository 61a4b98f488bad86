"""Run a verification program and check that its results support the outcome that it reports."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.errors import CheckFailed

RUN_TIMEOUT_SECONDS = 120.0
"""Time limit of one process. A run takes well below a second; the programs' own watchdog ends a hung kernel after 20 s."""


class RunOutcome(StrEnum):
    """The outcome of a run, or of all runs of a kernel."""

    PASS = "PASS"
    WRONG = "WRONG"
    HANG = "HANG"
    CRASH = "CRASH"
    TOO_BIG = "TOO BIG"
    DOES_NOT_COMPILE = "DOES NOT COMPILE"


SEVERITY = (RunOutcome.CRASH, RunOutcome.HANG, RunOutcome.WRONG, RunOutcome.PASS)
"""Outcomes of runs, worst first; the outcome of several runs is the worst of them."""


@dataclass(frozen=True)
class RunArguments:
    """The runs of one process: all combinations of the values."""

    sets: tuple[str, ...]
    clc: tuple[int, ...] = (0,)
    jitter_ns: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (1,)
    faults: tuple[str, ...] = ("none",)

    def combinations(self) -> list[tuple[str, str, int, int, int]]:
        """Set, fault, CLC workers, jitter and seed of each run."""
        return list(product(self.sets, self.faults, self.clc, self.jitter_ns, self.seeds))

    def argv(self) -> list[str]:
        """Command-line arguments of the program."""
        values = {
            "--set": self.sets,
            "--clc": self.clc,
            "--jitter": self.jitter_ns,
            "--seed": self.seeds,
            "--fault": self.faults,
        }
        return [argument for name, value in values.items() for argument in (name, ",".join(map(str, value)))]


@dataclass(frozen=True)
class GemmRun:
    """One run: a set of GEMMs on one kernel. Errors are relative to the sum of magnitudes of an output's terms.

    ``error_over_bound`` is the largest over all outputs. Above 1, an output's error is larger than fp32 arithmetic explains.
    """

    set: str
    fault: str
    clc: int
    jitter_ns: int
    seed: int
    verdict: RunOutcome
    detail: str = ""
    signature: str = ""
    first_mismatch: str = ""
    outputs: int = 0
    mismatches: int = 0
    max_relative_error: float = 0.0
    error_bound: float = 0.0
    error_over_bound: float = 0.0
    nan_expected: int = 0
    mma_count: int | None = None
    mma_expected: int = 0
    guard_intact: bool = True
    stages: int = 0
    smem_bytes: int = 0
    milliseconds: float = 0.0


class InvalidOutput(ValueError):
    """An output line that is not a result of a verification program."""


def parse(line: str) -> GemmRun:
    """Parse a line of ``gemm``'s output.

    Raises:
        InvalidOutput: the line is not a result.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        fields = json.loads(line)
        fields["verdict"] = str(fields["verdict"]).upper()
        for name in ("max_relative_error", "error_bound", "error_over_bound"):
            if fields[name] is None:  # NaN, which JSON cannot express
                fields[name] = float("inf")
        missing = GemmRun.__dataclass_fields__.keys() - fields.keys()
        if missing:
            raise InvalidOutput(f"no {', '.join(sorted(missing))} in {line[:200]!r}")
        run = TypeAdapter(GemmRun).validate_python({name: fields[name] for name in GemmRun.__dataclass_fields__})
    except (json.JSONDecodeError, ValidationError, KeyError, TypeError) as error:
        raise InvalidOutput(f"not a result: {line[:200]!r}") from error
    if run.verdict not in SEVERITY:
        raise InvalidOutput(f"unknown verdict: {line[:200]!r}")
    return run


def contradiction(run: GemmRun) -> str:
    """How the figures of a run contradict its reported pass; empty if they do not, or if it did not pass."""
    if run.verdict is not RunOutcome.PASS:
        return ""
    problems = {
        "nothing was compared": run.outputs == 0,
        f"{run.mismatches:,} outputs differ": run.mismatches != 0,
        "guard bytes were overwritten": not run.guard_intact,
        f"{run.mma_count} MMAs, expected {run.mma_expected}": run.mma_count is not None and run.mma_count != run.mma_expected,
        f"an error {run.error_over_bound:g} times the bound": not run.error_over_bound <= 1,
        "no NaN in set nan": run.set == "nan" and run.nan_expected == 0,
        "no error to measure in set inexact": run.set == "inexact" and not 0 < run.error_bound < float("inf"),
    }
    return "; ".join(text for text, applies in problems.items() if applies)


def run_with_timeout(
    argv: Sequence[str | Path], stop: threading.Event, timeout_seconds: float = RUN_TIMEOUT_SECONDS
) -> process.Completed | None:
    """Run a program; None if it was ended at the time limit.

    Raises:
        Stopped: another thread set ``stop``.
    """
    try:
        return process.run_within(argv, timeout_seconds, stop)
    except process.Stopped:
        if stop.is_set():
            raise
        return None


def run(
    program: Path, arguments: RunArguments, stop: threading.Event | None = None, *, timeout_seconds: float = RUN_TIMEOUT_SECONDS
) -> list[GemmRun]:
    """The runs of one process, in order. A hang or a crash ends the process: it is the last run of the result.

    Raises:
        CheckFailed: the program rejects the arguments.
        Stopped: another thread set ``stop``.
    """
    done = run_with_timeout([program, *arguments.argv()], stop or threading.Event(), timeout_seconds)
    if done is None:
        return [_failed(arguments, 0, RunOutcome.HANG, f"no result after {timeout_seconds:g} s")]
    if done.returncode == 2:
        raise CheckFailed(
            f"{program} rejects its arguments: {done.stderr.strip()[:300]}", f"command: {process.shell_line(done.argv)}"
        )
    expected = arguments.combinations()
    runs: list[GemmRun] = []

    def crash(detail: str) -> list[GemmRun]:
        return [*runs, _failed(arguments, len(runs), RunOutcome.CRASH, detail)]

    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        try:
            result = parse(line)
        except InvalidOutput as error:
            return crash(str(error))
        if (result.set, result.fault, result.clc, result.jitter_ns, result.seed) not in expected[len(runs) : len(runs) + 1]:
            return crash(f"a result of another run: {line[:200]!r}")
        problem = contradiction(result)
        runs.append(_contradicted(result, problem) if problem else result)
    ended = runs and runs[-1].verdict in (RunOutcome.HANG, RunOutcome.CRASH)
    if len(runs) < len(expected) and not ended:
        messages = done.stderr.strip().splitlines()
        ending = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return crash(f"{ending} without a result{': ' + messages[-1] if messages else ''}")
    return runs


def _contradicted(run: GemmRun, problem: str) -> GemmRun:
    from dataclasses import replace

    return replace(run, verdict=RunOutcome.WRONG, detail=f"reported as passed, but: {problem}")


def _failed(arguments: RunArguments, at: int, outcome: RunOutcome, detail: str) -> GemmRun:
    expected = arguments.combinations()
    name, fault, clc, jitter_ns, seed = expected[min(at, len(expected) - 1)]
    return GemmRun(name, fault, clc, jitter_ns, seed, outcome, detail)


def worst(outcomes: Sequence[RunOutcome]) -> RunOutcome:
    """The outcome of several runs."""
    return min(outcomes, key=SEVERITY.index)
