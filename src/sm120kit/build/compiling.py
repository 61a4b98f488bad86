"""Bring every unit and library of a plan up to date: ninja decides what is stale, the memory gate when it starts."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CompileFailed, NotEnoughMemory
from sm120kit.memory import Costs, Event, Gate, Running, available
from sm120kit.records import BuildPlan, Generated, Unit
from sm120kit.workspace import require_disk, write_atomic

DISK_PER_UNIT = 60 * 2**20
"""Bytes that objects, temporary files of nvcc and the wheel take per unit, rounded up from measured builds."""
WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """A look at a running build: units that have finished, that run now, and all that this build compiles."""

    finished: tuple[Event, ...]
    running: tuple[Running, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Means:
    """With what units are compiled: what they cost before, ``jobs`` at once, ``budget_bytes`` of memory, and who watches.

    Without a number of jobs it is that of the cores; without a budget it is all memory that is available.
    """

    costs: Costs
    jobs: int | None
    budget_bytes: int | None
    watch: Callable[[Progress], None] = lambda progress: None

    @property
    def at_once(self) -> int:
        """How many compilers may run at the same time."""
        return self.jobs or len(os.sched_getaffinity(0))


def compile_units(plan: BuildPlan, generated: Sequence[Generated], work: Path, means: Means) -> None:
    """Bring every unit and library of the plan up to date with ninja.

    Raises:
        NotEnoughMemory: the largest unit needs more than the budget.
        NotEnoughDisk: the file system is too small.
        CompileFailed: the compiler refused a unit; all others that were running have ended.
    """
    units = [unit for module in plan.modules for unit in module.units]
    # Lines of ninja read their variables at the top of the file, hence one file per module.
    for made in generated:
        write_atomic(work / "ninja" / f"{made.name}.ninja", made.ninja.encode())
    main = "".join(f"subninja ninja/{made.name}.ninja\n" for made in generated)
    write_atomic(work / "build.ninja", ("ninja_required_version = 1.3\n" + main).encode())
    targets = [module.library for module in plan.modules if module.packed]
    targets += [unit.output for module in plan.modules if not module.packed for unit in module.units]
    ninja = ninja_program()
    log = work / "compile.log"
    stale = _stale(ninja, work, targets, units)
    log.unlink(missing_ok=True)
    words = [ninja, "-f", "build.ninja", "-j", str(means.at_once), *targets]
    gate = {"SM120KIT_GATE": f"{sys.executable} -m sm120kit.memory"}
    done, events = under_gate(words, work, stale, units, means, env=gate, log=log)
    if done.returncode != 0:
        raise compile_error(done.stdout, events, log)


def under_gate(
    words: Sequence[str | Path],
    work: Path,
    stale: Sequence[Unit],
    units: Sequence[Unit],
    means: Means,
    *,
    env: Mapping[str, str],
    log: Path,
    drop: Iterable[str] = (),
) -> tuple[process.Completed, tuple[Event, ...]]:
    """Run a program in ``work`` that compiles ``stale`` of ``units`` through :mod:`sm120kit.memory`; learn what they cost.

    Raises:
        NotEnoughMemory: the largest unit needs more than the budget.
        NotEnoughDisk: the file system is too small.
    """
    budget_bytes = means.budget_bytes or available()
    if stale:
        largest = max(stale, key=lambda unit: unit.estimate_bytes)
        if largest.estimate_bytes > budget_bytes:
            raise NotEnoughMemory(
                f"{Path(largest.source).name} needs about {largest.estimate_bytes / 2**30:.1f} GiB to compile; "
                f"{budget_bytes / 2**30:.1f} GiB can be used",
                "end other programs, raise --memory, or choose a smaller kernel group (sm120kit recipe show)",
            )
        require_disk(work, DISK_PER_UNIT * len(stale), f"compiling {len(stale)} units")
    gate = Gate(work / "gate")
    gate.open({unit.output: unit.estimate_bytes for unit in units}, budget_bytes)
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(WATCH_SECONDS):
            means.watch(Progress(gate.events(), gate.running(), tuple(stale)))

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        done = process.run(
            words,
            cwd=work,
            env={
                **env,
                "SM120KIT_GATE_DIR": str(gate.directory),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
            },
            drop=["NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", *drop],
            logfile=log,
            check=False,
            tied=True,
        )
    finally:
        stop.set()
        reporter.join()
        keys = {unit.output: f"{unit.module}/{Path(unit.output).name}" for unit in units}
        for event in gate.events():
            if event.output in keys:  # CMake tries compilers out as well
                means.costs.learn(keys[event.output], event)
        means.costs.save()
    means.watch(Progress(gate.events(), (), tuple(stale)))
    return done, gate.events()


def ninja_program() -> str:
    """The ninja of this environment's wheel."""
    import ninja

    return str(Path(ninja.BIN_DIR) / "ninja")


def _stale(ninja: str, work: Path, targets: Sequence[str], units: Sequence[Unit]) -> list[Unit]:
    """Units that ninja would compile now."""
    dry = process.run([ninja, "-f", "build.ninja", "-n", "-v", *targets], cwd=work, logfile=work / "compile.log", check=False)
    if dry.returncode != 0:
        raise CompileFailed(
            f"ninja cannot plan the build\n{(dry.stdout + dry.stderr).strip()[-500:]}", f"log: {work / 'compile.log'}"
        )
    return [unit for unit in units if f" -o {unit.output} " in dry.stdout + " "]


def compile_error(output: str, events: Sequence[Event], log: Path) -> CompileFailed | NotEnoughMemory:
    """The failed unit and the first thing its compiler said."""
    lines = output.splitlines()
    at = next((index for index, line in enumerate(lines) if line.startswith("FAILED: ")), 0)
    failed = lines[at].removeprefix("FAILED: ").strip() if lines else "ninja"
    failed = re.sub(r"^\[code=\d+\] ", "", failed).split(" ")[0]
    said = lines[at + 1 :]
    first = next((line for line in said if re.search(r"\berror\b", line, re.IGNORECASE)), "\n".join(said[1:6]))
    killed = next((event for event in events if event.output == failed and event.exit_code in (-9, 137)), None)
    if killed or re.search(
        r"Killed|bad_alloc|out of memory|virtual memory exhausted|Cannot allocate memory", "\n".join(said[:40])
    ):
        peak = next((event.peak_bytes for event in events if event.output == failed), 0)
        return NotEnoughMemory(
            f"{Path(failed).name}: the compiler ran out of memory (it had reached {peak / 2**30:.1f} GiB; "
            f"{available() / 2**30:.1f} GiB are available now)",
            f"end other programs, or compile one unit at a time with --jobs 1; log: {log}",
        )
    return CompileFailed(f"{Path(failed).name} does not compile\n{first.strip()}", f"log: {log}")
