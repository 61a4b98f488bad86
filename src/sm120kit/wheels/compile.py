"""Compile the units of a plan: ninja decides which are stale, the memory gate when each starts."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from sm120kit.core import process, reporting
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import CompileFailed, ResourceUnavailable
from sm120kit.core.memory import LAUNCHER, Costs, FinishedUnit, Gate, RunningUnit, available_bytes, ran_out_of_memory
from sm120kit.core.process import own_python_path
from sm120kit.sources.run_options import Options
from sm120kit.wheels.build_records import BuildPlan, Generated, Unit

DISK_PER_UNIT = 60 * 2**20
"""Bytes that objects, temporary files of nvcc and the wheel take per unit, rounded up from measured builds."""

WATCH_SECONDS = 0.5

LOG = "compile.log"
"""Log of all compilers, in the work directory."""

_COMPILER_VARIABLES = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
"""Variables with which a user changes the work of compilers; units are compiled without them."""


_GATE = {"SM120KIT_GATE": f"{sys.executable} -m sm120kit.core.memory"}
"""What ninja's commands start a compiler with."""


@dataclass(frozen=True)
class Progress:
    """State of a running build: finished units, running units, and all ``units`` that this build compiles."""

    finished: tuple[FinishedUnit, ...]
    running: tuple[RunningUnit, ...]
    units: tuple[Unit, ...]

    def seconds_left(self, running: Mapping[str, float]) -> float:
        """Time left at the present parallelism: the estimates of the remaining units at the pace of this machine.

        The pace is that of the finished units, and of running ones that take longer than it predicts. ``running`` has the
        seconds that each running unit has taken already.
        """
        estimates = {unit.output: unit.estimate_seconds for unit in self.units}
        done = {event.output: event.seconds for event in self.finished if event.output in estimates}
        pace = _pace(done, estimates)
        overdue = {output: seconds for output, seconds in running.items() if seconds > estimates.get(output, seconds) * pace}
        pace = _pace(done | overdue, estimates)
        left = (max(estimates[output] * pace - running.get(output, 0.0), 0.0) for output in estimates if output not in done)
        return sum(left) / max(1, len(self.running))


def _pace(seconds: Mapping[str, float], estimates: Mapping[str, float]) -> float:
    """How many times their estimates units took; 1 without units."""
    expected = sum(estimates[output] for output in seconds)
    return sum(seconds.values()) / expected if expected else 1.0


@dataclass(frozen=True)
class CompileSettings:
    """Limits of a compile and what watches it: at most ``jobs`` compilers at once, in ``budget_bytes`` of memory.

    None for ``jobs`` means the number of cores, None for ``budget_bytes`` the memory that is available. ``costs`` are those
    of earlier compiles, which a compile through a ``launcher`` does not change: it may have compiled nothing.
    """

    costs: Costs
    jobs: int | None = None
    budget_bytes: int | None = None
    watch: Callable[[Progress], None] = lambda progress: None
    launcher: Path | None = None

    @classmethod
    def of(cls, options: Options, watch: Callable[[Progress], None]) -> CompileSettings:
        """The settings of a command."""
        return cls(Costs(options.workspace.cache / "costs.json"), options.jobs, options.memory_bytes, watch, options.launcher)

    @property
    def parallel(self) -> int:
        """How many compilers may run at the same time."""
        return self.jobs or len(os.sched_getaffinity(0))


def compile_units(plan: BuildPlan, generated: Sequence[Generated], work: Path, settings: CompileSettings) -> None:
    """Bring every unit and library of the plan up to date with ninja.

    Raises:
        ResourceUnavailable: the largest unit needs more than the budget.
        ResourceUnavailable: the file system is too small.
        CompileFailed: the compiler rejected a unit; all others that were running have ended.
    """
    units = longest_first(unit for module in plan.modules for unit in module.units)
    # Ninja starts what a library needs first: hence first the units, in their order, then the libraries.
    finished = _compile(units, generated, work, settings)
    if libraries := [module.library for module in plan.modules]:
        env = {**dict.fromkeys(_COMPILER_VARIABLES), **_GATE}
        done = process.run([*_ninja(settings), *libraries], cwd=work, env=env, logfile=work / LOG, check=False, tied=True)
        if done.returncode != 0:
            raise compile_error(done.stdout, finished, work / LOG)


def _ninja(settings: CompileSettings) -> list[str]:
    return [ninja_program(), "-f", "build.ninja", "-j", str(settings.parallel)]


def _compile(
    units: Sequence[Unit], generated: Sequence[Generated], work: Path, settings: CompileSettings
) -> tuple[FinishedUnit, ...]:
    """Write the ninja files of units and bring their outputs up to date, in this order."""
    for name, text in ninja_files(generated, units).items():
        write_atomic(work / name, text.encode())
    ninja = _ninja(settings)
    stale = _stale_units(ninja, work, units)
    if stale:
        reporting.info(f"compiling {len(stale)} of {len(units)} units of {len(generated)} modules")
    done, finished = run_gated([*ninja, *(unit.output for unit in units)], work, stale, units, settings, env=_GATE)
    if done.returncode != 0:
        raise compile_error(done.stdout, finished, work / LOG)
    return finished


def compile_ptx(
    units: Sequence[Unit], generated: Sequence[Generated], work: Path, settings: CompileSettings
) -> tuple[str, ...]:
    """Write the PTX of units with ninja, by the commands that compile them; returns the files, in order.

    Raises:
        ResourceUnavailable: the largest unit needs more than the budget.
        ResourceUnavailable: the file system is too small.
        CompileFailed: the compiler rejected a unit.
    """
    targets = {unit.output: replace(unit, output=_ptx_file(unit.output)) for unit in units}
    modules = [_ptx_rules(module, targets) for module in generated]
    _compile(longest_first(targets.values()), [module for module in modules if module.units], work, settings)
    return tuple(_ptx_file(unit.output) for unit in units)


def _ptx_file(output: str) -> str:
    return str(PurePosixPath(output).with_suffix("").with_suffix(".ptx"))


def _ptx_rules(module: Generated, units: Mapping[str, Unit]) -> Generated:
    """A module whose chosen units are compiled to PTX and that has no other targets."""
    compile_, to_ptx = " -c $in -o $out", " -ptx $in -o $out"
    rules, *rest = re.split(r"^(?=build |default )", module.ninja, flags=re.MULTILINE)
    if rules.count(compile_) == 0:
        raise CompileFailed(f"{module.name}: its ninja file has no rule with{compile_}", "report this version of the engine")
    chosen = [(source, output) for source, output in module.units if output in units]
    statements = []
    for statement in rest:
        output = statement.removeprefix("build ").split(":")[0]
        if output in units:
            statements.append(statement.replace(output, _ptx_file(output), 1))
    kept = tuple((source, _ptx_file(output)) for source, output in chosen)
    return replace(module, units=kept, ninja="".join([rules.replace(compile_, to_ptx), *statements]))


def longest_first(units: Iterable[Unit]) -> list[Unit]:
    """The order in which units start, so that none of the long ones runs alone at the end; units of equal time by name."""
    return sorted(units, key=lambda unit: (-unit.estimate_seconds, unit.output))


def ninja_files(generated: Sequence[Generated], units: Sequence[Unit]) -> dict[str, str]:
    """The ninja files of a build by path; ``build.ninja`` includes the others.

    Ninja starts units in the order in which it reads them, so each has a file of its own and they are included in the order of
    ``units``. The files of modules give the same variables different values; with subninja, each file has a scope of its own.
    """
    files = {"build.ninja": "ninja_required_version = 1.3\n"}
    statements: dict[str, tuple[str, str]] = {}
    for module in generated:
        rules, *rest = re.split(r"^(?=build |default )", module.ninja, flags=re.MULTILINE)
        files[f"ninja/{module.name}.rules.ninja"] = rules
        compiled = {output for _, output in module.units}
        links = []
        for statement in rest:
            output = statement.split(":")[0].removeprefix("build ")
            if output in compiled:
                statements[output] = (module.name, statement)
            else:
                links.append(statement)
        files[f"ninja/{module.name}.ninja"] = f"include ninja/{module.name}.rules.ninja\n{''.join(links)}"
    for number, unit in enumerate(units):
        module_name, statement = statements[unit.output]
        files[f"ninja/unit{number}.ninja"] = f"include ninja/{module_name}.rules.ninja\n{statement}"
    files["build.ninja"] += "".join(f"subninja {name}\n" for name in files if name.startswith("ninja/unit"))
    files["build.ninja"] += "".join(f"subninja ninja/{module.name}.ninja\n" for module in generated)
    return files


def run_gated(
    argv: Sequence[str | Path],
    work: Path,
    stale: Sequence[Unit],
    units: Sequence[Unit],
    settings: CompileSettings,
    *,
    env: process.Environment,
) -> tuple[process.Completed, tuple[FinishedUnit, ...]]:
    """Run a program in ``work`` whose compilers run through :mod:`sm120kit.core.memory`, and store what each unit cost.

    ``stale`` are the units that it compiles, of all ``units`` of the plan. Of units that wait for memory, the longest that fits
    starts first. The program's output is the log of the work directory.

    Raises:
        ResourceUnavailable: the largest unit needs more than the budget.
        ResourceUnavailable: the file system is too small.
    """
    budget_bytes = settings.budget_bytes or available_bytes()
    _require_resources(stale, work, budget_bytes)
    log = work / LOG
    log.unlink(missing_ok=True)
    gate = Gate(work / "gate")
    gate.open({unit.output: unit.estimate_bytes for unit in longest_first(units)}, budget_bytes)
    try:
        with _watched(gate, stale, settings.watch):
            done = process.run(
                argv,
                cwd=work,
                env={
                    **dict.fromkeys(_COMPILER_VARIABLES),
                    **env,
                    "SM120KIT_GATE_DIR": str(gate.directory),
                    "PYTHONPATH": own_python_path(),
                    **(_launcher_environment(settings.launcher, work) if settings.launcher else {}),
                },
                logfile=log,
                check=False,
                tied=True,
            )
    finally:
        keys = {unit.output: f"{unit.module}/{Path(unit.output).name}" for unit in units}
        for event in gate.events():
            if event.output in keys and not settings.launcher:  # CMake also compiles tests of the compilers
                settings.costs.record(keys[event.output], event)
        settings.costs.save()
    settings.watch(Progress(gate.events(), (), tuple(stale)))
    return done, gate.events()


def _launcher_environment(launcher: Path, work: Path) -> dict[str, str]:
    """Variables for the launcher, with those that make ccache find objects that another directory or machine compiled.

    Its key has the contents of nvcc; the programs that nvcc runs are added, and lists of included files replace a second run
    of the preprocessor (ccache 4.7: ``depend_mode``, ``extra_files_to_hash``).
    """
    programs = (work / "cuda" / "bin" / "nvcc").resolve().parent
    parts = [programs / "cudafe++", programs / "ptxas", programs / "fatbinary", programs.parent / "nvvm" / "bin" / "cicc"]
    return {
        LAUNCHER: str(launcher),
        "CCACHE_BASEDIR": str(work),
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_DEPEND": "1",
        "CCACHE_EXTRAFILES": os.pathsep.join(map(str, parts)),
        "CCACHE_NOHASHDIR": "1",
    }


def require_memory(what: str, needed_bytes: int, budget_bytes: int | None) -> None:
    """Require the memory for a unit; without a budget, what is available.

    Raises:
        ResourceUnavailable: it does not fit.
    """
    usable = budget_bytes or available_bytes()
    if needed_bytes > usable:
        raise ResourceUnavailable(
            f"{what} needs about {needed_bytes / 2**30:.1f} GiB to compile; {usable / 2**30:.1f} GiB can be used",
            "end other programs, raise --memory, or choose a smaller kernel group (sm120kit recipe list)",
        )


def _require_resources(stale: Sequence[Unit], work: Path, budget_bytes: int) -> None:
    if not stale:
        return
    largest = max(stale, key=lambda unit: unit.estimate_bytes)
    require_memory(Path(largest.source).name, largest.estimate_bytes, budget_bytes)
    require_disk(work, DISK_PER_UNIT * len(stale), f"compiling {len(stale)} units")


@contextmanager
def _watched(gate: Gate, stale: Sequence[Unit], watch: Callable[[Progress], None]) -> Iterator[None]:
    """Call ``watch`` at intervals from a thread while the block runs."""
    stop = threading.Event()

    def observe() -> None:
        killed = set[str]()
        while not stop.wait(WATCH_SECONDS):
            finished = gate.events()
            for unit in finished:
                signal = -unit.exit_code if unit.exit_code < 0 else unit.exit_code - 128  # of a shell around the compiler
                if 0 < signal <= 64 and unit.output not in killed:  # ninja shows it when the others end
                    killed.add(unit.output)
                    ended = f"was ended by signal {signal} at {unit.peak_bytes / 2**30:.1f} GiB"
                    reporting.warn(f"the compiler of {Path(unit.output).name} {ended}; the build ends with those that run")
            watch(Progress(finished, gate.running(), tuple(stale)))

    observer = threading.Thread(target=observe, daemon=True)
    observer.start()
    try:
        yield
    finally:
        stop.set()
        observer.join()


def ninja_program() -> str:
    """Path of the ninja in this environment's wheel."""
    import ninja

    return str(Path(ninja.BIN_DIR) / "ninja")


def _stale_units(ninja: Sequence[str], work: Path, units: Sequence[Unit]) -> list[Unit]:
    """Units that ninja would compile."""
    argv = [*ninja, "-n", "-v", *(unit.output for unit in units)]
    dry = process.run(argv, cwd=work, logfile=work / LOG, check=False)
    if dry.returncode != 0:
        raise CompileFailed(f"ninja cannot plan the build\n{(dry.stdout + dry.stderr).strip()[-500:]}", f"log: {work / LOG}")
    return [unit for unit in units if f" -o {unit.output} " in dry.stdout + " "]


def compile_error(output: str, finished: Sequence[FinishedUnit], log: Path) -> CompileFailed | ResourceUnavailable:
    """The error for the ``output`` of a failed ninja: the unit that failed and the first message of its compiler."""
    lines = output.splitlines()
    at = next((index for index, line in enumerate(lines) if line.startswith("FAILED: ")), 0)
    failed = lines[at].removeprefix("FAILED: ").strip() if lines else "ninja"
    failed = re.sub(r"^\[code=\d+\] ", "", failed).split(" ")[0]
    messages = lines[at + 1 :]
    first = next((line for line in messages if re.search(r"\berror\b", line, re.IGNORECASE)), "\n".join(messages[1:6]))
    event = next((event for event in finished if event.output == failed), None)
    if ran_out_of_memory(event.exit_code if event else 1, "\n".join(messages[:40])):
        peak = event.peak_bytes if event else 0
        return ResourceUnavailable(
            f"{Path(failed).name}: the compiler ran out of memory (it had reached {peak / 2**30:.1f} GiB; "
            f"{available_bytes() / 2**30:.1f} GiB are available now)",
            f"end other programs, or compile one unit at a time with --jobs 1; log: {log}",
        )
    return CompileFailed(f"{Path(failed).name} does not compile\n{first.strip()}", f"log: {log}")
