"""Run every kernel of a matrix on the GPU and compare with integers, then plant faults and see that each is found."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from sm120kit.errors import CompileFailed, ExpectationFailed
from sm120kit.records import LeftOut
from sm120kit.verify import controls
from sm120kit.verify.controls import Caught, Control
from sm120kit.verify.gpu import Device
from sm120kit.verify.matrix import Configuration, Matrix
from sm120kit.verify.programs import TOO_BIG, Compiler, Program, Tree
from sm120kit.verify.running import Arguments, Run, Verdict, run, watched, worst

LONG_JITTER_NS = 524_287
"""The delays with which the planted fault of a missing barrier shows: right kernels must stand them."""

RUNS_AT_ONCE = 4
"""Programs that share the GPU: most of their time they prepare data and compare, on the CPU."""

INSTRUCTIONS = Program("instructions", "instructions.cu")


@dataclass(frozen=True)
class Row:
    """What was found of one configuration. Errors are the largest of set inexact, see :class:`running.Run`.

    ``excused``: it is known why this kernel cannot run on SM120, and no build contains it. ``runs`` counts by set.
    """

    name: str
    verdict: Verdict
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


@dataclass(frozen=True)
class Instruction:
    """The block-scaled mma in software, or natively the hardware's, against an independent model."""

    instruction: str
    compared: str
    verdict: Verdict
    values: int
    max_error_over_magnitude: float | None


@dataclass
class Report:
    """Everything that a verification found. ``compile_seconds`` is the sum over all programs, whenever they were compiled."""

    rows: list[Row] = field(default_factory=list)
    faults: list[Caught] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    left_out: tuple[LeftOut, ...] = ()
    compile_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """Planted faults that were not found, with the kernels on which they were not."""
        return [f"{one.name} ({', '.join(one.missed)})" for one in self.faults if one.missed]

    @property
    def passed(self) -> bool:
        """Whether every kernel that can run is right. Says nothing when a fault was missed."""
        judged = [one.verdict for one in self.rows if not one.excused]
        return bool(judged) and {*judged, *(one.verdict for one in self.instructions)} == {Verdict.PASS}


_Shown = tuple[str, list[Row], list[Caught], list[Instruction]]
"""What one program showed, in words first."""


def plan(one: Configuration, device: Device, *, quick: bool) -> list[Arguments]:
    """The runs of a configuration, one process each.

    CLC workers and jitter are made by the emulation. Stream-K has a scheduler of its own, which hands out no tiles.
    """
    emulated = device is Device.EMULATE
    workers = (0,) if one.streamk or not (emulated or one.tile.family == "grouped") else (0, 5)
    if quick:
        return [Arguments(("std", "inexact"), workers)]
    jitters = (0, 4095) if emulated else (0,)
    found = [Arguments(("std", "moe", "inexact"), workers, jitters, (1, 2)), Arguments(("big", "nan", "pdl"))]
    if emulated:
        found.append(Arguments(("std",), (workers[-1],), (LONG_JITTER_NS,), (3,)))
    return found


def verify(
    matrix: Matrix,
    planted: Sequence[Control],
    tree: Tree,
    compiler: Compiler,
    device: Device,
    *,
    quick: bool,
    tell: Callable[[str], None] = lambda message: None,
) -> Report:
    """Compile and run it all; a program runs as soon as it is compiled, a few at a time."""
    started = time.monotonic()
    report = Report(left_out=matrix.left_out)
    for verdict, lefts in ((Verdict.TOO_BIG, matrix.too_big), (Verdict.DOES_NOT_COMPILE, matrix.does_not_compile)):
        report.rows += [Row(left.what, verdict, left.reason, excused=True) for left in lefts]
    configurations = {_program(one, tree): one for one in matrix.run}
    faults = {one.program: one for one in planted}
    programs = [*configurations, *faults, INSTRUCTIONS]
    stop = threading.Event()

    def judge(program: Program, built: Path | CompileFailed) -> _Shown:
        """What one program shows, and that in words."""
        if program is INSTRUCTIONS:
            found = _instructions(built, stop)
            return ", ".join(sorted({one.verdict for one in found})), [], [], found
        if program in faults:
            caught = controls.in_program(faults[program], built, stop)
            return controls.words(caught), [], [caught], []
        row, all_caught = _row(configurations[program], built, device, quick, stop)
        return f"{row.verdict}: {row.why}" if row.why else row.verdict, [row], all_caught, []

    with compiler.compile_all(programs) as compiled, ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        try:
            waiting: dict[Future[_Shown], Program] = {}
            judged = count(1)

            def take(done: Future[_Shown]) -> None:
                """Note and tell what a program showed. What is no verdict ends it at once."""
                said, rows, caught, instructions = done.result()
                report.rows += rows
                report.faults += caught
                report.instructions += instructions
                tell(f"[{next(judged)}/{len(programs)}] {waiting.pop(done).name}: {said}")

            for number, (program, built) in enumerate(compiled, start=1):
                tell(f"[{number}/{len(programs)}] compiled {program.name}")
                waiting[pool.submit(judge, program, built)] = program
                for done in [one for one in waiting if one.done()]:
                    take(done)
            for done in as_completed(waiting):
                take(done)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    report.rows.sort(key=lambda row: row.name)
    report.faults = controls.merged(report.faults)
    costs = [compiler.costs.of(one.name) for one in programs]
    report.compile_seconds = round(sum(cost[1] for cost in costs if cost), 1)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def compile_only(
    matrix: Matrix, planted: Sequence[Control], tree: Tree, compiler: Compiler, tell: Callable[[str], None]
) -> list[tuple[str, CompileFailed | None]]:
    """Compile all that a verification would run: every program with its error, if it has one."""
    programs = [*(_program(one, tree) for one in matrix.run), *(one.program for one in planted), INSTRUCTIONS]
    found: list[tuple[str, CompileFailed | None]] = []
    with compiler.compile_all(programs) as compiled:
        for program, built in compiled:
            found.append((program.name, built if isinstance(built, CompileFailed) else None))
            tell(f"[{len(found)}/{len(programs)}] {program.name}: {'does not compile' if found[-1][1] else 'compiled'}")
    return sorted(found, key=lambda one: one[0])


def _program(one: Configuration, tree: Tree) -> Program:
    return Program(one.name, "gemm.cu", one.definitions(), tree)


def _row(
    one: Configuration, built: Path | CompileFailed, device: Device, quick: bool, stop: threading.Event
) -> tuple[Row, list[Caught]]:
    """A configuration's runs, and the planted faults of its program."""
    if isinstance(built, CompileFailed):
        too_big = TOO_BIG in built.message
        verdict = Verdict.TOO_BIG if too_big else Verdict.DOES_NOT_COMPILE
        return Row(one.name, verdict, built.message, one.generated, excused=too_big and not one.generated), []
    started = time.monotonic()
    runs = [each for arguments in plan(one, device, quick=quick) for each in run(built, arguments, stop)]
    verdict = worst([each.verdict for each in runs])
    bad = next((each for each in runs if each.verdict is verdict and verdict is not Verdict.PASS), None)
    why = _why(bad) if bad else ""
    last, inexact = runs[-1], [each for each in runs if each.set == "inexact"]
    if not bad and one.stages and (last.stages, last.smem_bytes) != (one.stages, one.smem_bytes):
        verdict = Verdict.WRONG
        why = (
            f"not the engine's kernel: {last.stages} stages and {last.smem_bytes:,} B, "
            f"the tile table says {one.stages} and {one.smem_bytes:,} B"
        )
    caught = controls.in_arguments(one.name, built, stop)
    row = Row(
        one.name,
        verdict,
        why,
        one.generated,
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
    return row, caught


def _why(bad: Run) -> str:
    """The first bad run, in words."""
    where = f"set {bad.set}, seed {bad.seed}, CLC {bad.clc}, jitter {bad.jitter_ns} ns"
    differ = f"{bad.mismatches:,} of {bad.outputs:,} outputs differ" if bad.mismatches else ""
    first = f"first: {bad.first_mismatch}" if bad.first_mismatch else ""
    return "; ".join(filter(None, (bad.signature, differ, first, bad.detail, where)))


def _instructions(built: Path | CompileFailed, stop: threading.Event) -> list[Instruction]:
    """What the instruction probe says."""
    if isinstance(built, CompileFailed):
        raise ExpectationFailed(f"the instruction probe does not compile: {built.message}", built.hint)
    done = watched([built], stop)
    if done is None:
        raise ExpectationFailed("the instruction probe does not end", f"command: {built}")
    found = []
    for line in filter(None, done.stdout.splitlines()):
        try:
            said = json.loads(line)
            verdict = Verdict(said["verdict"].upper())
            found.append(
                Instruction(
                    said["instruction"], said["compared"], verdict, int(said["values"]), said["max_error_over_magnitude"]
                )
            )
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ExpectationFailed(f"the instruction probe says {line[:200]!r}", f"command: {built}") from error
    if not found or (done.returncode == 0) != all(one.verdict is Verdict.PASS for one in found):
        raise ExpectationFailed(
            f"the instruction probe ended with exit code {done.returncode} after {len(found)} results",
            f"command: {built}; it said: {done.stderr.strip()[-300:]}",
        )
    return found
