"""Find races: run a program with delays from seeds, compare with its undelayed run, and bisect to the delayed site."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sm12x_lab.ptx.interposed import Interposition
from sm120kit.core import process, reporting
from sm120kit.core.errors import BadInput, CheckFailed

DELAYS = "SM120KIT_PTX_DELAYS"
"""The variable that the preloaded driver reads: seed, first and last site, and a module's machine code or ``-`` for all."""

EVERY_SITE, EVERY_MODULE = 2**32 - 1, "-"
SLOWEST, LEAST_SECONDS = 50, 60.0
"""A delayed run is ended, as one that hangs, after this many times the undelayed one, and at least this time."""


def seeds_of(text: str) -> range:
    """The seeds that ``SEED[,N]`` names; N is 8 by default.

    Raises:
        BadInput: it is something else, or N is not 1 to 1000.
    """
    first, _, count = text.partition(",")
    if not (first.isdecimal() and (not count or count.isdecimal()) and int(first) < 2**31 and 0 < int(count or 8) <= 1000):
        raise BadInput(f"--perturb {text[:40]!r} is not SEED or SEED,N with N of 1 to 1000", "write --perturb 1,20")
    return range(int(first), int(first) + int(count or 8))


@dataclass(frozen=True)
class ObservedRun:
    """What a program's run shows: exit code, and sha256 of its standard output; None if it did not end."""

    exit_code: int | None
    output: str

    def __str__(self) -> str:
        return "did not end" if self.exit_code is None else f"exit code {self.exit_code}, output {self.output[:12]}"


@dataclass(frozen=True)
class Race:
    """A seed whose run differs, and the least range of ``sites`` found whose delays alone make a run differ."""

    seed: int
    differs: str
    module: str
    sites: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class RaceReport:
    """The undelayed run, its seconds, the seeds that were run, and the first race; ``runs`` counts all runs."""

    undelayed: ObservedRun
    seconds: float
    seeds: tuple[int, ...]
    runs: int
    race: Race | None = None


Runner = Callable[[str], ObservedRun]
"""Runs the program with a value of ``DELAYS``; empty: without delays."""


def runner(command: Sequence[str], interposition: Interposition) -> Runner:
    """A runner of a program with the preloaded driver. The first run sets the time limit of the others."""
    limit = 0.0

    def run(delays: str) -> ObservedRun:
        nonlocal limit
        started, environment = time.monotonic(), interposition.environment() | {DELAYS: delays}
        if not limit:
            done = process.run(command, check=False, env=environment)
            limit = _limit(time.monotonic() - started)
        else:
            try:
                done = process.run_within(command, limit, env=environment)
            except process.Stopped:
                return ObservedRun(None, "")
        return ObservedRun(done.returncode, hashlib.sha256(done.stdout.encode()).hexdigest())

    return run


def _limit(seconds: float) -> float:
    """The time limit of a run after one of ``seconds``."""
    return max(LEAST_SECONDS, SLOWEST * seconds)


def search(run: Runner, seeds: Iterable[int], modules: Callable[[], Sequence[dict[str, Any]]]) -> RaceReport:
    """Run the program undelayed twice, then with each seed until a run differs; then bisect.

    Raises:
        CheckFailed: the undelayed runs differ from each other, fail or do not end, so that a comparison shows nothing.
    """
    started, runs = time.monotonic(), 0

    def counted(delays: str) -> ObservedRun:
        nonlocal runs
        runs += 1
        return run(delays)

    undelayed = counted("")
    seconds = round(time.monotonic() - started, 1)
    if (again := counted("")).exit_code is None:
        took = f"the first run took {seconds} s, the second was ended at the time limit, {_limit(seconds):.0f} s"
        raise CheckFailed(
            f"no verdict, because no two runs without delays ended: {took}",
            "end other programs on this machine, or find out why the program hangs at times; then run it again",
        )
    if again != undelayed:
        raise CheckFailed(
            f"two runs without delays differ: {undelayed}; {again}",
            "fix the program's seeds, and let it print results only, not times or addresses",
        )
    if undelayed.exit_code:
        raise CheckFailed(
            f"the program fails without delays: {undelayed}", "let it run as it should: a failure may come before any kernel"
        )
    report, ran = RaceReport(undelayed, seconds, (), 2), []
    for seed in seeds:
        ran.append(seed)
        delayed = counted(f"{seed} 0 {EVERY_SITE} {EVERY_MODULE}")
        reporting.info(f"seed {seed}: {'as without delays' if delayed == undelayed else delayed}")
        if delayed != undelayed:
            module, sites = bisect(lambda delays: counted(delays) != undelayed, seed, modules())
            report = replace(report, race=Race(seed, str(delayed), module, tuple(sites)))
            break
    return replace(report, seeds=tuple(ran), runs=runs)


def unperturbed(interposition: Interposition) -> tuple[list[str], int]:
    """Modules that no delay reached in any run: the files of those that ran code for Hopper, and the number of refused ones."""
    events = interposition.directory / "events"
    logged = {tuple(line.split()) for line in events.read_text(errors="replace").splitlines()} if events.is_file() else ()
    files = {" ".join(words[4:]) for words in logged if words[0] == "hopper"}
    return sorted(files), len({words[1:3] for words in logged if words[0] == "refused"})


def bisect(
    differs: Callable[[str], bool], seed: int, modules: Sequence[dict[str, Any]]
) -> tuple[str, Sequence[dict[str, Any]]]:
    """The module and the least range of its sites, by halves, whose delays alone make a run differ; empty if none does."""
    for module in modules:
        sites = module["sites"]
        if not sites or not differs(f"{seed} 0 {len(sites)} {module['code']}"):
            continue
        first, last = 0, len(sites)
        while last - first > 1:
            middle = (first + last) // 2
            if differs(f"{seed} {first} {middle} {module['code']}"):
                last = middle
            elif differs(f"{seed} {middle} {last} {module['code']}"):
                first = middle
            else:
                break
        return module["origin"], sites[first:last]
    return "", ()
