"""Run a verification program and read what it says, without believing it further than it proves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

from sm120kit import process
from sm120kit.errors import ExpectationFailed

PATIENCE_SECONDS = 120.0
"""How long one process may take. A run takes well below a second; the programs' own watchdog ends a hung kernel after 20."""


class Verdict(StrEnum):
    """What a run, and the sum of a tile's runs, came to."""

    PASS = "PASS"
    WRONG = "WRONG"
    HANG = "HANG"
    CRASH = "CRASH"
    TOO_BIG = "TOO BIG"
    DOES_NOT_COMPILE = "DOES NOT COMPILE"


GRAVITY = (Verdict.CRASH, Verdict.HANG, Verdict.WRONG, Verdict.PASS)
"""The verdict of several runs is the first of these that one of them has."""


@dataclass(frozen=True)
class Arguments:
    """The runs of one process: all combinations of these."""

    sets: tuple[str, ...]
    clc: tuple[int, ...] = (0,)
    jitter_ns: tuple[int, ...] = (0,)
    seeds: tuple[int, ...] = (1,)
    faults: tuple[str, ...] = ("none",)

    def combinations(self) -> list[tuple[str, str, int, int, int]]:
        """Set, fault, CLC workers, jitter and seed of each run."""
        return list(product(self.sets, self.faults, self.clc, self.jitter_ns, self.seeds))

    def words(self) -> list[str]:
        """As the program takes them."""
        values = {
            "--set": self.sets,
            "--clc": self.clc,
            "--jitter": self.jitter_ns,
            "--seed": self.seeds,
            "--fault": self.faults,
        }
        return [word for name, value in values.items() for word in (name, ",".join(map(str, value)))]


@dataclass(frozen=True)
class Run:
    """One run: a set of GEMMs on one kernel. Errors are relative to the sum of magnitudes of an output's terms.

    ``error_over_bound`` is the largest of all outputs: above 1, some output is further off than fp32 arithmetic explains.
    """

    set: str
    fault: str
    clc: int
    jitter_ns: int
    seed: int
    verdict: Verdict
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


class Garbage(ValueError):
    """A line that no verification program prints."""


def parse(line: str) -> Run:
    """A line of ``gemm``.

    Raises:
        Garbage: it is not one.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        said = json.loads(line)
        said["verdict"] = str(said["verdict"]).upper()
        for name in ("max_relative_error", "error_bound", "error_over_bound"):
            if said[name] is None:  # not a number
                said[name] = float("inf")
        missing = Run.__dataclass_fields__.keys() - said.keys()
        if missing:
            raise Garbage(f"no {', '.join(sorted(missing))} in {line[:200]!r}")
        run = TypeAdapter(Run).validate_python({name: said[name] for name in Run.__dataclass_fields__})
    except (json.JSONDecodeError, ValidationError, KeyError, TypeError) as error:
        raise Garbage(f"not a result: {line[:200]!r}") from error
    if run.verdict not in GRAVITY:
        raise Garbage(f"no such verdict: {line[:200]!r}")
    return run


def contradiction(run: Run) -> str:
    """Why a run that calls itself passed is not, from its own figures; empty when it is, or does not claim to be."""
    if run.verdict is not Verdict.PASS:
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
    return "; ".join(text for text, is_so in problems.items() if is_so)


class _Deadline(threading.Event):
    """Set when a time has passed, or when ``stop`` is."""

    def __init__(self, seconds: float, stop: threading.Event) -> None:
        super().__init__()
        self.at, self.stop = time.monotonic() + seconds, stop

    def is_set(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.at


def watched(
    argv: Sequence[str | Path], stop: threading.Event, patience_seconds: float = PATIENCE_SECONDS
) -> process.Completed | None:
    """A program's end, or None when it has none in time and was ended.

    Raises:
        Stopped: another thread set ``stop``.
    """
    try:
        return process.run(argv, check=False, tied=True, stop=_Deadline(patience_seconds, stop))
    except process.Stopped:
        if stop.is_set():
            raise
        return None


def run(
    program: Path, arguments: Arguments, stop: threading.Event | None = None, *, patience_seconds: float = PATIENCE_SECONDS
) -> list[Run]:
    """The runs of one process in their order. A hang or a crash ends it: the result ends with that run, the rest was not run.

    Raises:
        ExpectationFailed: the program does not take these arguments.
        Stopped: another thread set ``stop``.
    """
    done = watched([program, *arguments.words()], stop or threading.Event(), patience_seconds)
    if done is None:
        return [_failed(arguments, 0, Verdict.HANG, f"no end after {patience_seconds:g} s")]
    if done.returncode == 2:
        raise ExpectationFailed(
            f"{program} does not take its arguments: {done.stderr.strip()[:300]}", f"command: {process.paste_line(done.argv)}"
        )
    wanted = arguments.combinations()
    found: list[Run] = []
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        try:
            one = parse(line)
        except Garbage as garbage:
            return [*found, _failed(arguments, len(found), Verdict.CRASH, str(garbage))]
        if len(found) == len(wanted) or (one.set, one.fault, one.clc, one.jitter_ns, one.seed) != wanted[len(found)]:
            return [*found, _failed(arguments, len(found), Verdict.CRASH, f"an answer that was not asked for: {line[:200]!r}")]
        why = contradiction(one)
        found.append(_judged(one, why) if why else one)
    ended = found and found[-1].verdict in (Verdict.HANG, Verdict.CRASH)
    if len(found) < len(wanted) and not ended:
        said = done.stderr.strip().splitlines()
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        found.append(_failed(arguments, len(found), Verdict.CRASH, f"{how} without a result{': ' + said[-1] if said else ''}"))
    return found


def _judged(one: Run, why: str) -> Run:
    from dataclasses import replace

    return replace(one, verdict=Verdict.WRONG, detail=f"says pass, but: {why}")


def _failed(arguments: Arguments, at: int, verdict: Verdict, detail: str) -> Run:
    wanted = arguments.combinations()
    name, fault, clc, jitter_ns, seed = wanted[min(at, len(wanted) - 1)]
    return Run(name, fault, clc, jitter_ns, seed, verdict, detail)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several runs."""
    return min(verdicts, key=GRAVITY.index)
