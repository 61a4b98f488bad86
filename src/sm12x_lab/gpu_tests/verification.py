"""Run every kernel of a matrix on the GPU, compare with integers, and check that seeded faults are detected."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from sm12x_lab.gpu import Backend
from sm12x_lab.gpu_tests import faults
from sm12x_lab.gpu_tests.faults import FaultResult, SeededFault
from sm12x_lab.gpu_tests.programs import TOO_BIG, EngineTree, Program, Programs
from sm12x_lab.gpu_tests.running import GemmRun, RunArguments, RunOutcome, run, run_with_timeout, worst
from sm12x_lab.gpu_tests.verified_kernels import KernelConfiguration, Matrix
from sm120kit.core import reporting
from sm120kit.core.errors import CheckFailed, CompileFailed
from sm120kit.core.records import LeftOut

LONG_JITTER_NS = 524_287
"""Delays in ns at which a missing barrier, a seeded fault, has an effect; correct kernels must pass with them."""

RUNS_AT_ONCE = max(4, len(os.sched_getaffinity(0)) // 2)
"""Programs that share the GPU; they spend most of their time on the CPU, on data and comparison."""

INSTRUCTIONS = Program("instructions", "instructions.cu")

CAPTURED_ORIGIN = "captured"
"""The first word of the origin of a module that was captured from a build, see ``Launcher.ptx``."""


@dataclass(frozen=True)
class KernelResult:
    """The result of one configuration. Errors are the largest of set inexact, see :class:`.running.GemmRun`.

    ``excused`` kernels cannot run on SM120 for a known reason, and no build contains them. ``runs`` counts runs by set. ``ptx``
    are origin and digest of the modules that were rewritten for it.
    """

    name: str
    verdict: RunOutcome
    why: str = ""
    generated: bool = False
    excused: bool = False
    runs: dict[str, int] = field(default_factory=dict)
    outputs: int = 0
    max_relative_error: float = 0.0
    error_bound: float = 0.0
    error_over_bound: float = 0.0
    stages: int = 0
    smem_bytes: int = 0
    milliseconds: float = 0.0
    seconds: float = 0.0
    ptx: tuple[str, ...] = ()


class Launcher:
    """What starts the programs of a verification: nothing but themselves.

    ``captured``: it has the kernels of a build, and their programs have no code for them.
    """

    captured = False
    seeds: Sequence[int] = ()
    """Of delays with which the kernels run again, see :mod:`sm12x_lab.ptx.races`."""

    def delayed(self, name: str, seed: int) -> Path:
        """The file to run for program ``name``, which was launched, with the delays of a seed."""
        raise NotImplementedError

    def launched(self, name: str, program: Path, captured: bool) -> Path:
        """The file to run for program ``name``. With ``captured``, its kernel is that of a build."""
        return program

    def ptx(self, name: str) -> tuple[str, ...]:
        """Origin and digest of the PTX that program ``name`` ran; empty for machine code of nvcc."""
        return ()


@dataclass(frozen=True)
class Instruction:
    """An instruction check: block-scaled mma, in software or natively in hardware, against an independent model."""

    instruction: str
    compared: str
    verdict: RunOutcome
    values: int
    max_error_over_magnitude: float | None


@dataclass
class VerificationReport:
    """The results of a verification. ``compile_seconds`` is the sum over all programs, including those compiled earlier."""

    rows: list[KernelResult] = field(default_factory=list)
    faults: list[FaultResult] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    left_out: tuple[LeftOut, ...] = ()
    compile_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """Seeded faults that were not detected, each with the kernels that missed it."""
        return [f"{fault.name} ({', '.join(fault.missed)})" for fault in self.faults if fault.missed]

    @property
    def passed(self) -> bool:
        """Whether every kernel that can run is correct; meaningless if a fault was missed."""
        outcomes = [row.verdict for row in self.rows if not row.excused]
        return bool(outcomes) and {*outcomes, *(row.verdict for row in self.instructions)} == {RunOutcome.PASS}


_ProgramResult = tuple[str, list[KernelResult], list[FaultResult], list[Instruction]]
"""The results of one program: a summary line, then kernels, faults and instructions."""


def plan(configuration: KernelConfiguration, backend: Backend, *, quick: bool) -> list[RunArguments]:
    """The runs of a configuration, one process each.

    Only the emulation has CLC workers and jitter. Stream-K's scheduler does not hand out tiles, so it has no CLC workers.
    """
    emulated = backend is Backend.EMULATE
    grouped = configuration.tile.family == "grouped"
    workers = (0,) if configuration.streamk or not (emulated or grouped) else (0, 5)
    if quick:
        return [RunArguments(("std", "moe", "inexact"), workers)]
    jitters = (0, 4095) if emulated else (0,)
    processes = [RunArguments(("std", "moe", "inexact"), workers, jitters, (1, 2)), RunArguments(("big", "nan", "pdl", "deep"))]
    processes.append(RunArguments(("groups",) if grouped else ("batch",), workers))
    if grouped and configuration.tile.epilogue == "none":  # the only kernels that read C
        processes.append(RunArguments(("c",)))
    if emulated:
        processes.append(RunArguments(("std",), (workers[-1],), (LONG_JITTER_NS,), (3,)))
    return processes


def verify(
    matrix: Matrix,
    seeded: Sequence[SeededFault],
    tree: EngineTree,
    compiler: Programs,
    backend: Backend,
    *,
    quick: bool,
    launcher: Launcher,
) -> VerificationReport:
    """Compile and run all programs, a few at a time; each runs as soon as it is compiled."""
    started = time.monotonic()
    report = VerificationReport(left_out=matrix.left_out)
    for outcome, lefts in ((RunOutcome.TOO_BIG, matrix.too_big), (RunOutcome.DOES_NOT_COMPILE, matrix.does_not_compile)):
        report.rows += [KernelResult(left.what, outcome, left.reason, excused=True) for left in lefts]
    configurations = {_program(configuration, tree, launcher.captured): configuration for configuration in matrix.run}
    seeded_by_program = {fault.program: fault for fault in seeded}
    programs = [*configurations, *seeded_by_program, INSTRUCTIONS]
    stop = threading.Event()

    def run_program(program: Program, built: Path | CompileFailed) -> _ProgramResult:
        if isinstance(built, Path):
            built = launcher.launched(program.name, built, program.captured)
        if program is INSTRUCTIONS:
            instructions = _instructions(built, stop)
            if backend is Backend.REWRITTEN:  # the program takes what it is compiled to for the hardware's
                instructions = [
                    replace(row, compared=row.compared.replace("hardware", "rewritten PTX")) for row in instructions
                ]
            return ", ".join(sorted({row.verdict for row in instructions})), [], [], instructions
        if program in seeded_by_program:
            fault = faults.in_program(seeded_by_program[program], built, stop)
            return faults.summary(fault), [], [fault], []
        row, detected = _row(configurations[program], built, backend, quick, stop)
        if row.verdict is RunOutcome.PASS:
            row = _delayed_row(row, configurations[program], launcher, stop)
        row = replace(row, ptx=launcher.ptx(program.name))
        if isinstance(built, Path) and program.captured and not any(line.startswith(CAPTURED_ORIGIN) for line in row.ptx):
            row = replace(row, verdict=RunOutcome.CRASH, why="the captured PTX does not have the kernel of the build")
        return f"{row.verdict}: {row.why}" if row.why else row.verdict, [row], detected, []

    with compiler.compile_all(programs) as compiled, ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        try:
            waiting: dict[Future[_ProgramResult], Program] = {}
            finished = count(1)

            def collect(done: Future[_ProgramResult]) -> None:
                """Add a program's results to the report. An exception of the program's thread ends the verification."""
                summary, rows, detected, instructions = done.result()
                report.rows += rows
                report.faults += detected
                report.instructions += instructions
                reporting.info(f"[{next(finished)}/{len(programs)}] {waiting.pop(done).name}: {summary}")

            for number, (program, built) in enumerate(compiled, start=1):
                reporting.info(f"[{number}/{len(programs)}] compiled {program.name}")
                waiting[pool.submit(run_program, program, built)] = program
                for done in [future for future in waiting if future.done()]:
                    collect(done)
            for done in as_completed(waiting):
                collect(done)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report.rows.sort(key=lambda row: row.name)
    report.faults = faults.merged(report.faults)
    report.compile_seconds = compiler.seconds(programs)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def compile_only(
    matrix: Matrix, seeded: Sequence[SeededFault], tree: EngineTree, compiler: Programs, *, captured: bool = False
) -> dict[Program, Path | CompileFailed]:
    """Compile all programs of a verification; returns each with its executable or compile error, by name."""
    programs = [
        *(_program(configuration, tree, captured) for configuration in matrix.run),
        *(fault.program for fault in seeded),
        INSTRUCTIONS,
    ]
    results: dict[Program, Path | CompileFailed] = {}
    with compiler.compile_all(programs) as compiled:
        for program, built in compiled:
            results[program] = built
            state = "does not compile" if isinstance(built, CompileFailed) else "compiled"
            reporting.info(f"[{len(results)}/{len(programs)}] {program.name}: {state}")
    return dict(sorted(results.items(), key=lambda result: result[0].name))


def _program(configuration: KernelConfiguration, tree: EngineTree, captured: bool = False) -> Program:
    shipped = captured and configuration.shipped
    return Program(configuration.name, "gemm.cu", configuration.definitions(), tree, shipped)


def _row(
    configuration: KernelConfiguration, built: Path | CompileFailed, backend: Backend, quick: bool, stop: threading.Event
) -> tuple[KernelResult, list[FaultResult]]:
    """Run a configuration, then the faults that its program seeds."""
    name, generated = configuration.name, configuration.generated
    if isinstance(built, CompileFailed):
        too_big = TOO_BIG in built.message
        outcome = RunOutcome.TOO_BIG if too_big else RunOutcome.DOES_NOT_COMPILE
        return KernelResult(name, outcome, built.message, generated, excused=too_big and not generated), []
    started = time.monotonic()
    runs = [each for arguments in plan(configuration, backend, quick=quick) for each in run(built, arguments, stop)]
    outcome = worst([each.verdict for each in runs])
    failed = next((each for each in runs if each.verdict is outcome and outcome is not RunOutcome.PASS), None)
    why = _why(failed) if failed else ""
    last, inexact = runs[-1], [each for each in runs if each.set == "inexact"]
    expected = (configuration.stages, configuration.smem_bytes)
    if not failed and configuration.stages and (last.stages, last.smem_bytes) != expected:
        outcome = RunOutcome.WRONG
        why = (
            f"not the engine's kernel: {last.stages} stages and {last.smem_bytes:,} B, "
            f"the tile table has {configuration.stages} and {configuration.smem_bytes:,} B"
        )
    ran = {each.set for each in runs}
    detected = faults.in_arguments(name, built, stop, ran)
    row = KernelResult(
        name,
        outcome,
        why,
        generated,
        False,
        dict(Counter(each.set for each in runs)),
        sum(each.outputs for each in runs),
        max((each.max_relative_error for each in inexact), default=0.0),
        max((each.error_bound for each in inexact), default=0.0),
        max((each.error_over_bound for each in inexact), default=0.0),
        last.stages,
        last.smem_bytes,
        round(sum(each.milliseconds for each in runs), 3),
        round(time.monotonic() - started, 1),
    )
    return row, detected


def _delayed_row(
    row: KernelResult, configuration: KernelConfiguration, launcher: Launcher, stop: threading.Event
) -> KernelResult:
    """A passed kernel after its runs with delays: their number as that of set ``delayed``; a seed that fails is a race."""
    (arguments, *_) = plan(configuration, Backend.REWRITTEN, quick=True)
    for number, seed in enumerate(launcher.seeds, start=1):
        runs = run(launcher.delayed(row.name, seed), arguments, stop)
        outcome = worst([each.verdict for each in runs])
        row = replace(row, runs=row.runs | {"delayed": number})
        if outcome is not RunOutcome.PASS:
            why = _why(next(each for each in runs if each.verdict is outcome))
            return replace(row, verdict=outcome, why=f"race: delays of seed {seed}: {why}")
    return row


def _why(failed: GemmRun) -> str:
    """The reason and environment of a failed run, as one line."""
    where = f"set {failed.set}, seed {failed.seed}, CLC {failed.clc}, jitter {failed.jitter_ns} ns"
    differ = f"{failed.mismatches:,} of {failed.outputs:,} outputs differ" if failed.mismatches else ""
    first = f"first: {failed.first_mismatch}" if failed.first_mismatch else ""
    return "; ".join(filter(None, (failed.signature, differ, first, failed.detail, where)))


def _instructions(built: Path | CompileFailed, stop: threading.Event) -> list[Instruction]:
    """Run the instruction probe and read its results."""
    if isinstance(built, CompileFailed):
        raise CheckFailed(f"the instruction probe does not compile: {built.message}", built.hint)
    done = run_with_timeout([built], stop)
    if done is None:
        raise CheckFailed("the instruction probe does not end", f"command: {built}")
    results = []
    for line in filter(None, done.stdout.splitlines()):
        try:
            fields = json.loads(line)
            results.append(
                Instruction(
                    fields["instruction"],
                    fields["compared"],
                    RunOutcome(fields["verdict"].upper()),
                    int(fields["values"]),
                    fields["max_error_over_magnitude"],
                )
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise CheckFailed(f"not a result of the instruction probe: {line[:200]!r}", f"command: {built}") from error
    if not results or (done.returncode == 0) != all(result.verdict is RunOutcome.PASS for result in results):
        raise CheckFailed(
            f"the instruction probe ended with exit code {done.returncode} after {len(results)} results",
            f"command: {built}; its messages: {done.stderr.strip()[-300:]}",
        )
    return results
