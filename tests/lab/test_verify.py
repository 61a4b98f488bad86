"""``verify kernels`` on recorded output of its programs (H200), and on programs that hang, crash or print invalid lines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import stored_receipts
from typer.testing import CliRunner

from sm12x_lab import RECEIPTS, gpu, gpu_tests
from sm12x_lab.gpu import Backend, CudaDevice
from sm12x_lab.gpu_tests import compiled, faults, gpu_session, programs, receipt, running, verification, verified_kernels
from sm12x_lab.gpu_tests.programs import Compiler, EngineTree, Program
from sm12x_lab.gpu_tests.rewriting import RewritingLauncher
from sm12x_lab.gpu_tests.running import GemmRun, RunArguments, RunOutcome
from sm12x_lab.gpu_tests.verified_kernels import KernelConfiguration, VerificationScope
from sm12x_lab.ptx import interposed, library
from sm120kit import patches
from sm120kit.cli import app
from sm120kit.core import console, reporting
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput, BadRecord, CheckFailed, CompileFailed, NotFound, ResourceUnavailable
from sm120kit.core.records import LeftOut, Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import Tile, TileFacts
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options

RECORDED = Path(__file__).with_name("recorded")
PASSED = (RECORDED / "passed.jsonl").read_text().splitlines()
FAILED = (RECORDED / "failed.jsonl").read_text().splitlines()


COMPILED = {"ce53744b8ed222bfb82272c263e4a09834b4b90a": "d1fd7c4233c7e7c3c93aa6ac7f1349df03eff226"}
"""The tree of a series, and that without its patches that no program compiles; tests/slow/compilers computes it."""


def receipts() -> list[Path]:
    """The committed receipts; there must be at least one."""
    paths = sorted(RECEIPTS.glob("*/verify-*.json"))
    assert paths, "no receipt of verify kernels"
    return paths


# ---- one line of output


def test_parse_recorded_lines() -> None:
    runs = [running.parse(line) for line in PASSED]
    assert {run.verdict for run in runs} == {RunOutcome.PASS}
    assert {run.set for run in runs} == {"std", "moe", "inexact", "nan", "big"}
    assert not any(running.contradiction(run) for run in runs)
    assert [running.parse(line).verdict for line in FAILED] == [RunOutcome.WRONG] * 3 + [RunOutcome.CRASH]


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": 0},
        {"mismatches": 1},
        {"guard_intact": False},
        {"mma_count": 7},
        {"error_over_bound": 1.01},
        {"error_over_bound": None},
        {"set": "nan"},
        {"set": "inexact"},
    ],
    ids=str,
)
def test_pass_with_contradicting_figures_is_rejected(change: dict[str, object]) -> None:
    run = running.parse(json.dumps(json.loads(PASSED[0]) | change))
    assert run.verdict is RunOutcome.PASS
    assert running.contradiction(run)


@pytest.mark.parametrize("line", ["", "{}", "[1]", "Segmentation fault", PASSED[0][:-9], '{"verdict": "pass"}', "null", "1"])
def test_parse_rejects_invalid_lines(line: str) -> None:
    with pytest.raises(running.InvalidOutput):
        running.parse(line)


def test_parse_rejects_unknown_verdicts() -> None:
    with pytest.raises(running.InvalidOutput):
        running.parse(PASSED[0].replace('"pass"', '"fine"'))
    with pytest.raises(running.InvalidOutput):
        running.parse(PASSED[0].replace('"pass"', '"too big"'))


# ---- one process


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def printing(path: Path, lines: list[str], ending: str = "exit 0") -> Path:
    output = path.with_suffix(".output")
    output.write_text("".join(f"{line}\n" for line in lines))
    return script(path, f"cat {output}\n{ending}")


TWO = RunArguments(("std",), clc=(0, 5))


def test_run_returns_a_result_for_each_combination(tmp_path: Path) -> None:
    runs = running.run(printing(tmp_path / "p", PASSED[:2]), TWO)
    assert [(run.clc, run.verdict) for run in runs] == [(0, RunOutcome.PASS), (5, RunOutcome.PASS)]


@pytest.mark.parametrize(
    ("lines", "ending", "verdicts", "detail"),
    [
        (PASSED[:1], "exit 0", ["PASS", "CRASH"], "exit code 0 without a result"),
        (PASSED[:1], "kill -SEGV $$", ["PASS", "CRASH"], "signal 11 without a result"),
        ([], "echo lost >&2; exit 9", ["CRASH"], "exit code 9 without a result: lost"),
        (["nonsense"], "exit 0", ["CRASH"], "not a result: 'nonsense'"),
        (PASSED[2:4], "exit 0", ["CRASH"], "a result of another run"),
        (PASSED[:3], "exit 0", ["PASS", "PASS", "CRASH"], "a result of another run"),
        ([FAILED[3]], "exit 1", ["CRASH"], "an illegal memory access"),
    ],
    ids=["missing result", "segmentation fault", "no result", "invalid line", "another run", "too many results", "crash"],
)
def test_missing_or_unexpected_results_are_crashes(
    tmp_path: Path, lines: list[str], ending: str, verdicts: list[str], detail: str
) -> None:
    runs = running.run(printing(tmp_path / "p", lines, ending), TWO)
    assert [run.verdict for run in runs] == verdicts
    assert detail in runs[-1].detail


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_hanging_program_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    runs = running.run(script(tmp_path / "p", f"sleep 600 &\necho $! > {pid}\nwait"), TWO, timeout_seconds=0.3)
    assert [(run.verdict, run.detail) for run in runs] == [(RunOutcome.HANG, "no result after 0.3 s")]
    until = time.monotonic() + 60
    while not ended(int(pid.read_text())):  # SIGKILL was sent; a busy machine may take a while
        assert time.monotonic() < until
        time.sleep(0.01)


def test_rejected_arguments_raise_expectation_failed(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="no such set"):
        running.run(script(tmp_path / "p", "echo no such set >&2; exit 2"), TWO)


def test_contradicted_pass_counts_as_wrong(tmp_path: Path) -> None:
    lines = [PASSED[0].replace('"mismatches": 0', '"mismatches": 3'), PASSED[1]]
    runs = running.run(printing(tmp_path / "p", lines), TWO)
    assert [run.verdict for run in runs] == [RunOutcome.WRONG, RunOutcome.PASS]
    assert runs[0].detail == "reported as passed, but: 3 outputs differ"


# ---- a complete verification with scripts as programs

PROGRAM = """#!{python}
import itertools, json, sys
faults = [{{"name": "none", "class": "", "what": "", "set": "std"}},
          {{"name": "scale-stride", "class": "scales", "what": "too long", "set": "std"}},
          {{"name": "group-k", "class": "groups", "what": "too short", "set": "std"}}]
if sys.argv[1] == "--list":
    print(json.dumps({{"faults": faults}}))
    sys.exit()
options = {{name: value.split(",") for name, value in zip(sys.argv[1::2], sys.argv[2::2])}}
recorded = {recorded!r}
for run in itertools.product(options["--set"], options["--fault"], options["--clc"], options["--jitter"], options["--seed"]):
    name, fault, clc, jitter, seed = run
    line = dict(recorded[name], fault=fault, clc=int(clc), jitter_ns=int(jitter), seed=int(seed))
    line.update({changes!r}.get(fault, {{}}) or {changes!r}.get(f"{{fault}} in {{name}}", {{}}))
    print(json.dumps(line))
    if line["verdict"] in ("hang", "crash"):
        sys.exit(1)
"""
DETECTED: dict[str, dict[str, object]] = {
    "scale-stride": {"verdict": "crash"},
    "group-k": {"verdict": "wrong", "mismatches": 9},
}
INSTRUCTION = (
    '{"instruction": "m16n8k64 e2m1 e2m1 ue4m3 4X", "compared": "software with model", "verdict": "pass", "values": 512000, '
    '"differ_exact": 0, "differ_random": 0, "differ_extreme": 0, "differ_nan": 0, "max_error_over_magnitude": 5.96e-08}'
)
GROUPED = KernelConfiguration(
    Tile("grouped", "nvfp4", 128, 128, 128, "none", False, "bf16"), generated=True, stages=4, smem_bytes=89_088
)
TREE = EngineTree(Path("/nowhere"), "a" * 40, "3rdparty/cutlass")
H200 = CudaDevice("NVIDIA H200", (9, 0), "580.159.03", "13.0")


class Bench:
    """A compiler whose cache contains scripts as programs."""

    def __init__(self, root: Path) -> None:
        toolchain = Toolchain(Path("/nowhere"), "13.0.88", "/nowhere/g++", "g++ 13")
        self.compiler = Compiler("sm_90a", True, toolchain, root, jobs=1, budget_bytes=None)
        self.stock = faults.stock_fault(replace(TREE, tree="b" * 40))
        self.put(verification.INSTRUCTIONS, f"#!/bin/sh\necho '{INSTRUCTION}'\n")
        self.gemm(verification._program(GROUPED, TREE), DETECTED)
        self.gemm(self.stock.program, {"none": {"verdict": "wrong", "mismatches": 5, "signature": faults.STOCK_SIGNATURE}})

    def put(self, program: Program, text: str) -> None:
        path = self.compiler.directory(program) / "program"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def gemm(self, program: Program, changes: dict[str, dict[str, object]]) -> None:
        recorded = {line["set"]: line for line in map(json.loads, PASSED)}
        self.put(program, PROGRAM.format(python=sys.executable, recorded=recorded, changes=changes))

    def run(self, *several: KernelConfiguration) -> verification.VerificationReport:
        return verification.verify(
            verified_kernels.Matrix(several or (GROUPED,)),
            [self.stock],
            TREE,
            self.compiler,
            Backend.EMULATE,
            quick=True,
            launcher=verification.Launcher(),
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_correct_kernel_passes_and_all_faults_are_detected(bench: Bench) -> None:
    report = bench.run()
    assert report.passed and not report.missed
    (row,) = report.rows
    assert (row.verdict, row.runs, row.stages) == (RunOutcome.PASS, {"std": 2, "moe": 2, "inexact": 2}, 4)
    assert 0 < row.max_relative_error < row.error_bound
    outcomes = {fault.name: (set(fault.seen.values()), fault.signature) for fault in report.faults}
    assert outcomes == {
        "scale-stride": ({RunOutcome.CRASH}, ""),
        "group-k": ({RunOutcome.WRONG}, ""),
        faults.STOCK: ({RunOutcome.WRONG}, faults.STOCK_SIGNATURE),
    }


class ImmediatePool:
    """An executor that runs each call in ``submit``."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> ImmediatePool:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(function(*arguments))
        return done


def test_results_are_reported_while_other_programs_compile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verification, "ThreadPoolExecutor", ImmediatePool)
    with reporting.use(console):
        bench.run()
    assert capsys.readouterr().err.splitlines() == [
        f"[1/3] compiled {GROUPED.name}",
        f"[1/3] {GROUPED.name}: PASS",
        f"[2/3] compiled {faults.STOCK}",
        f"[2/3] {faults.STOCK}: detected (WRONG: {faults.STOCK_SIGNATURE})",
        "[3/3] compiled instructions",
        "[3/3] instructions: PASS",
    ]


def test_missed_fault_is_listed_with_its_kernel(bench: Bench) -> None:
    bench.gemm(verification._program(GROUPED, TREE), {"group-k": DETECTED["group-k"]})
    other = replace(GROUPED, tile=replace(GROUPED.tile, dtype="mxfp4"))
    bench.gemm(verification._program(other, TREE), DETECTED)
    report = bench.run(other, GROUPED)
    assert report.missed == [f"scale-stride ({GROUPED.name})"]
    (stride,) = (fault for fault in report.faults if fault.name == "scale-stride")
    assert stride.seen == {GROUPED.name: RunOutcome.PASS, other.name: RunOutcome.CRASH}


@pytest.mark.parametrize("change", [{}, {"verdict": "wrong", "mismatches": 5}, {"verdict": "hang"}], ids=str)
def test_stock_fault_needs_its_signature(bench: Bench, change: dict[str, object]) -> None:
    bench.gemm(bench.stock.program, {"none": change})
    assert bench.run().missed == [f"{faults.STOCK} ({faults.STOCK})"]


@pytest.mark.parametrize("verdict", ["wrong", "hang", "crash"])
def test_one_failed_run_fails_the_kernel(bench: Bench, verdict: str) -> None:
    bench.gemm(verification._program(GROUPED, TREE), DETECTED | {"none in inexact": {"verdict": verdict, "mismatches": 4}})
    report = bench.run()
    assert not report.passed
    assert report.rows[0].verdict == verdict.upper()
    assert "4 of 154,600 outputs differ" in report.rows[0].why


def test_kernel_that_differs_from_the_tile_table_is_wrong(bench: Bench) -> None:
    report = bench.run(replace(GROUPED, stages=3))
    assert not report.passed
    assert "4 stages and 89,088 B, the tile table has 3 and 89,088 B" in report.rows[0].why


def test_wrong_instruction_fails_the_verification(bench: Bench) -> None:
    bench.put(verification.INSTRUCTIONS, f"#!/bin/sh\necho '{INSTRUCTION.replace('pass', 'wrong')}'\nexit 1\n")
    assert not bench.run().passed


@pytest.mark.parametrize("text", ["exit 0", "echo nonsense", f"echo '{INSTRUCTION}'; exit 1"])
def test_invalid_instruction_probe_output_is_an_error(bench: Bench, text: str) -> None:
    bench.put(verification.INSTRUCTIONS, f"#!/bin/sh\n{text}\n")
    with pytest.raises(CheckFailed, match="instruction probe"):
        bench.run()


def test_compile_error_is_excused_only_for_too_big_candidates() -> None:
    broken, too_big = CompileFailed("error: x"), CompileFailed("error: the kernel does not fit into the shared memory of SM120")
    assert (
        verification._row(GROUPED, broken, Backend.EMULATE, False, threading.Event())[0].verdict is RunOutcome.DOES_NOT_COMPILE
    )
    for configuration, failure, excused in (
        (GROUPED, broken, False),
        (GROUPED, too_big, False),
        (replace(GROUPED, generated=False), too_big, True),
    ):
        row, _ = verification._row(configuration, failure, Backend.EMULATE, False, threading.Event())
        assert row.excused is excused
        assert (
            verification.VerificationReport(rows=[row, verification.KernelResult("right", RunOutcome.PASS)]).passed is excused
        )


def test_report_without_kernels_does_not_pass() -> None:
    assert not verification.VerificationReport().passed
    assert not verification.VerificationReport(
        instructions=[verification.Instruction("mma", "with model", RunOutcome.PASS, 1, 0.0)]
    ).passed
    assert not verification.VerificationReport(rows=[verification.KernelResult("x", RunOutcome.TOO_BIG, excused=True)]).passed


def test_clc_workers_and_jitter_are_emulated_only() -> None:
    def clc_and_jitter(configuration: KernelConfiguration, backend: Backend) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(arguments.clc, arguments.jitter_ns) for arguments in verification.plan(configuration, backend, quick=False)]

    dense = KernelConfiguration(Tile("dense", "nvfp4", 128, 128, 128, "none", False, "bf16"))
    long_jitter = ((5,), (verification.LONG_JITTER_NS,))
    assert clc_and_jitter(dense, Backend.EMULATE) == [((0, 5), (0, 4095)), ((0,), (0,)), ((0, 5), (0,)), long_jitter]
    assert clc_and_jitter(dense, Backend.NATIVE) == [((0,), (0,))] * 3
    assert clc_and_jitter(GROUPED, Backend.NATIVE) == [((0, 5), (0,)), ((0,), (0,)), ((0, 5), (0,)), ((0,), (0,))]
    assert {clc for clc, _ in clc_and_jitter(replace(dense, streamk=True), Backend.EMULATE)} == {(0,)}


def test_complete_runs_have_the_sets_that_a_kernel_can_run() -> None:
    def sets(family: str, epilogue: str) -> set[str]:
        configuration = KernelConfiguration(Tile(family, "nvfp4", 128, 128, 128, epilogue, False, "bf16"))
        return {
            name for arguments in verification.plan(configuration, Backend.REWRITTEN, quick=False) for name in arguments.sets
        }

    common = {"std", "moe", "inexact", "big", "nan", "pdl", "deep"}
    assert sets("dense", "none") == common | {"batch"}
    assert sets("grouped", "none") == common | {"groups", "c"}
    assert sets("grouped", "finalize") == common | {"groups"}


def test_faults_run_with_the_set_that_detects_them(tmp_path: Path) -> None:
    listed = (
        '[{"name": "few", "class": "x", "what": "", "set": "std"}, {"name": "many", "class": "x", "what": "", "set": "big"}]'
    )
    wrong = {"jitter_ns": 0, "clc": 0, "seed": 1, "verdict": "wrong", "mismatches": 1, "detail": "outputs differ"}
    lines = {line["set"]: line | wrong for line in map(json.loads, PASSED)}
    program = script(
        tmp_path / "p",
        f"""[ "$1" = --list ] && echo '{{"faults": {listed}}}' && exit
case "$2 $4" in
"std 0") echo '{json.dumps(lines["std"] | {"fault": "few"})}';;
"big 0") echo '{json.dumps(lines["big"] | {"fault": "many"})}';;
esac""",
    )
    results = faults.in_arguments("k", program, threading.Event(), {"std", "big"})
    assert [(result.name, result.seen) for result in results] == [
        ("few", {"k": RunOutcome.WRONG}),
        ("many", {"k": RunOutcome.WRONG}),
    ]
    (only,) = faults.in_arguments("k", program, threading.Event(), {"std"})
    assert only.name == "few"


# ---- the matrix


def facts() -> list[TileFacts]:
    facts = []
    for epilogue in ("none", "finalize"):
        for swap in (False, True):
            for output in ("bf16", "f16"):
                for shape in ((128, 128, 128), (128, 128, 64)):
                    tile = Tile("grouped", "nvfp4", *shape, epilogue, swap, output)
                    facts.append(TileFacts(tile, True, True, "", "", "", "cooperative", "persistent", 4, 90_000, 2))
    big = TileFacts(Tile("grouped", "nvfp4", 256, 256, 128, "none", False, "bf16"), True, True, stages=3, smem_bytes=120_000)
    mixed = Tile("grouped", "fp8xmxfp4", 128, 128, 64, "none", False, "bf16")
    return [*facts, big, TileFacts(mixed, False, False, "boxes of 128", "error", "x.hpp:3")]


def test_matrix_runs_each_tile_or_has_a_reason() -> None:
    full = verified_kernels.matrix_of(facts())
    names = [configuration.name for configuration in full.run]
    excluded = [left for lefts in (full.too_big, full.does_not_compile, full.left_out) for left in lefts]
    aside = [left.what for left in excluded]
    assert len(set(names + aside)) == len(names + aside)
    assert {KernelConfiguration(fact.tile).name for fact in facts()} <= {*names, *aside}
    assert all(left.reason for left in excluded)
    assert [left.what for left in full.too_big] == ["grouped-nvfp4-256x256x128-bf16"]
    assert full.does_not_compile[0].reason == "boxes of 128 (x.hpp:3)"
    assert {"dense-mxfp8-128x128x128-bf16", "grouped-mxfp4-256x128x64-bf16", "dense-nvfp4-128x128x64-pingpong-bf16"} <= {*names}
    refused = {left.what: left.reason for left in full.does_not_compile}
    assert "grouped GEMM" in refused["dense-mxfp8-128x128x64-bf16"] and "dense-mxfp4-256x128x64-bf16" in refused
    assert "grouped-nvfp4-128x128x64-f16" in aside and "grouped-nvfp4-128x128x128-finalize-f16" in names


def test_pattern_selects_kernels_by_name() -> None:
    selected = verified_kernels.matrix_of(facts(), pattern="128x128x64-finalize").run
    assert [configuration.name for configuration in selected] == [
        "grouped-nvfp4-128x128x64-finalize-bf16",
        "grouped-nvfp4-128x128x64-finalize-swap-bf16",
        "grouped-mxfp4-128x128x64-finalize-bf16",
        "grouped-mxfp8-128x128x64-finalize-swap-bf16",
    ]
    assert len(verified_kernels.matrix_of(facts(), pattern="dense-mxfp8-128x128x128-bf16").run) == 1
    with pytest.raises(NotFound, match="no configuration matches 'int8'") as failure:
        verified_kernels.matrix_of(facts(), pattern="int8")
    assert "grouped-nvfp4-128x128x128-bf16" in failure.value.hint


def test_definitions_are_distinct_for_distinct_kernels() -> None:
    kernels = {configuration.name: configuration.definitions() for configuration in verified_kernels.matrix_of(facts()).run}
    assert len(set(kernels.values())) == len(kernels)
    definitions = kernels["grouped-nvfp4-128x128x64-finalize-swap-bf16"]
    assert {"-DDTYPE=nvfp4", "-DTILE_K=64", "-DGROUPED=1", "-DSWAP=1", "-DFINALIZE=1", "-DOUTPUT=bf16"} <= {*definitions}


# ---- the GPU


def test_probe_without_driver_finds_no_gpu() -> None:
    assert gpu.probe("libsm120kit-no-such-driver.so") is None


@pytest.mark.parametrize(
    ("capability", "backend", "hint"),
    [
        ((8, 0), Backend.EMULATE, "CUDA_VISIBLE_DEVICES"),
        ((10, 0), Backend.EMULATE, "CUDA_VISIBLE_DEVICES"),
        ((12, 0), Backend.EMULATE, "--device native"),
        ((9, 0), Backend.NATIVE, "--device emulate"),
        ((8, 9), Backend.NATIVE, "CUDA_VISIBLE_DEVICES"),
    ],
    ids=str,
)
def test_unsuitable_gpu_is_refused_with_a_hint(capability: tuple[int, int], backend: Backend, hint: str) -> None:
    with pytest.raises(ResourceUnavailable, match=f"compute capability {capability[0]}.{capability[1]}") as failure:
        gpu.require(replace(H200, capability=capability), backend)
    assert hint in failure.value.hint


def test_suitable_gpus_and_their_targets() -> None:
    assert gpu_tests.arch(Backend.EMULATE, gpu.require(H200, Backend.EMULATE)) == "sm_90a"
    for minor in (0, 1):
        card = replace(H200, capability=(12, minor))
        assert gpu_tests.arch(Backend.NATIVE, gpu.require(card, Backend.NATIVE)) == f"sm_12{minor}a"
    with pytest.raises(ResourceUnavailable, match=r"compute capability 9\.0"):
        gpu.require(None, Backend.EMULATE)


# ---- the receipt


def written(bench: Bench, path: Path, *, only: str = "") -> Path:
    report = bench.run()
    record = gpu_tests.record(
        report, VerificationScope(Backend.EMULATE, only), engine="x", tree=TREE.tree, gpu=H200, compiler=bench.compiler
    )
    path.write_text(json.dumps(record))
    return path


def test_fresh_receipt_is_not_stale(bench: Bench, tmp_path: Path) -> None:
    path = written(bench, tmp_path / "r.json")
    assert stored_receipts.stale(path, TREE.tree) == []
    assert receipt.receipt_name(H200, Backend.EMULATE) == "verify-nvidia-h200.json"
    record = json.loads(path.read_text())
    assert record["verified_on_sm120"] is False and record["cannot_show"]
    assert record["gpu"] == {"name": "NVIDIA H200", "capability": "9.0", "driver": "580.159.03", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sources": "0"}, "have changed"),
        ({"tree": "c" * 40}, "it is of tree cccccccccccc"),
        ({"only": "k64"}, "a part of the matrix"),
        ({"quick": True}, "a part of the matrix"),
        ({"instructions": []}, "did not pass: nothing was run"),
        ({"configurations": [{"name": "x", "verdict": "WRONG", "excused": False}]}, "did not pass: x"),
        ({"configurations": [{"name": "x", "verdict": "DOES NOT COMPILE", "excused": False}]}, "did not pass: x"),
        ({"passed": False}, "its field passed is false"),
        ({"planted": []}, "none was seeded"),
        ({"planted": [{"name": "x", "seen": {"a": "PASS"}, "missed": ["a"]}]}, "not detected: x"),
        ({"format": 0}, "format 0"),
    ],
    ids=str,
)
def test_stale_receipt_is_detected(bench: Bench, tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = written(bench, tmp_path / "r.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (reason,) = stored_receipts.stale(path, TREE.tree)
    assert problem in reason


def test_committed_receipts_match_programs_and_series() -> None:
    for path in receipts():
        record = json.loads(path.read_text())
        tree = json.loads((data_root() / "recipes" / "engines" / f"{record['engine']}.tiles.json").read_text())["tree"]
        assert stored_receipts.stale(path, tree, COMPILED.get(tree, tree)) == [], path.name


def test_patches_of_other_python_change_no_program() -> None:
    names = {
        patch.name for patch in patches.load(data_root() / "patches", "flashinfer") if not stored_receipts.is_compiled(patch)
    }
    assert names == {"flashinfer/micro-scatter-barrier"}


def test_program_output_has_every_field() -> None:
    """Otherwise a field would silently keep its default."""
    assert GemmRun.__dataclass_fields__.keys() <= json.loads(PASSED[0]).keys()


def test_correct_kernels_run_with_the_arguments_of_seeded_faults() -> None:
    """Otherwise a fault could be detected by arguments under which every kernel fails."""
    for mutant in json.loads(faults.MUTANTS.read_text()):
        configuration = faults._configuration(mutant["config"])
        seeded = faults._arguments(mutant["arguments"])
        plan = verification.plan(configuration, Backend.EMULATE, quick=False)
        assert {*seeded.sets} <= {name for arguments in plan for name in arguments.sets}
        assert max(seeded.jitter_ns) in {jitter for arguments in plan for jitter in arguments.jitter_ns}
        assert max(seeded.clc) in {clc for arguments in plan for clc in arguments.clc}
        assert configuration.name in {other.name for other in verified_kernels.matrix_of(facts()).run}


def test_printed_table_lists_limitations(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    from sm12x_lab.cli import verify_kernels as cli

    report = bench.run(GROUPED)
    report.left_out = (LeftOut("grouped-nvfp4-128x256x128-f16", "differs from its bf16 twin"),)
    report.rows.append(verification.KernelResult("mixed", RunOutcome.DOES_NOT_COMPILE, "boxes of 128", excused=True))
    record = gpu_tests.record(
        report, VerificationScope(Backend.EMULATE, ""), engine="x", tree=TREE.tree, gpu=H200, compiler=bench.compiler
    )
    cli._show(report, record)
    output = capsys.readouterr().out
    assert "1 of 2 kernels pass on NVIDIA H200 (driver 580.159.03, CUDA 13.0; nvcc 13.0.88, sm_90a)" in output
    assert "mixed: DOES NOT COMPILE: boxes of 128" in output
    assert "left out: 1 kernels: differs from its bf16 twin" in output
    assert f"WRONG: {faults.STOCK_SIGNATURE}" in output
    assert "unverified on SM120; not shown by this run:" in output
    assert "  the block-scaled mma instruction itself" in output
    cli._show(report, {**record, "verified_on_sm120": True})
    assert "unverified" not in capsys.readouterr().out


# ---- the table of seeded faults in src/sm12x_lab/docs/kernels.md

ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (RECEIPTS.parent / "docs" / "kernels.md")
    .read_text()
    .split("| class | fault |")[1]
    .split("\n\n")[0]
    .splitlines()[2:]
]


def test_docs_list_every_seeded_fault() -> None:
    mutants = {(mutant["class"], mutant["name"], mutant["what"]) for mutant in json.loads(faults.MUTANTS.read_text())}
    stock = faults.stock_fault(TREE)
    assert {*mutants, (stock.kind, stock.name, stock.what)} <= {row[:3] for row in ROWS}


def test_docs_table_equals_receipts() -> None:
    for path in receipts():
        record = json.loads(path.read_text())
        rows = sorted(
            (fault["kind"], fault["name"], fault["what"], ", ".join(sorted(set(fault["seen"].values()))))
            for fault in record["planted"]
        )
        expected = [row for row in ROWS if record["device"] == "emulate" or row[0] != faults.RACE]
        assert rows == expected, "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_rewritten_kernels_have_their_ptx_in_the_receipt() -> None:
    """`sm120kit verify kernels flashinfer-VERSION --device rewritten [--ptx DIR] --receipt FILE` on a Hopper GPU writes it."""
    path = RECEIPTS / "flashinfer-0.7.2.post1" / "verify-rewritten-nvidia-h200.json"
    record = json.loads(path.read_text())
    assert record["rewriter"] == library.rewriter_digest()
    passed = [row for row in record["configurations"] if row["verdict"] == RunOutcome.PASS]
    assert record["passed"] and len(passed) == 121 and all(row["ptx"] for row in passed)
    emulated = json.loads((path.parent / "verify-nvidia-h100.json").read_text())
    errors = [
        {row["name"]: row["max_relative_error"] for row in run["configurations"] if row["verdict"] == RunOutcome.PASS}
        for run in (record, emulated)
    ]
    assert errors[0] == errors[1] and emulated["passed"] and emulated["sources"] == record["sources"]


class Recorder(verification.Launcher):
    """A launcher that has the kernels of a build, unless ``origin`` is that of the program's own module."""

    captured = True

    def __init__(self, origin: str = "captured unit.0.ptx") -> None:
        self.origin = origin
        self.started: dict[str, bool] = {}

    def launched(self, name: str, program: Path, captured: bool) -> Path:
        self.started[name] = captured
        return program

    def ptx(self, name: str) -> tuple[str, ...]:
        return (f"{self.origin}: {name}",)


def run_rewritten(bench: Bench, launcher: Recorder, configuration: KernelConfiguration) -> verification.VerificationReport:
    """A verification whose program of ``configuration`` passes all runs and detects all faults."""
    bench.put(verification.INSTRUCTIONS, f"#!/bin/sh\necho '{INSTRUCTION.replace('software', 'hardware')}'\n")
    bench.gemm(verification._program(configuration, TREE, captured=True), DETECTED)
    kernels = verified_kernels.Matrix((configuration,))
    return verification.verify(kernels, [bench.stock], TREE, bench.compiler, Backend.REWRITTEN, quick=True, launcher=launcher)


def test_programs_of_a_verification_run_with_the_preloaded_driver(bench: Bench) -> None:
    """Programs with a seeded fault get no captured kernels, which would hide the fault."""
    launcher = Recorder()
    report = run_rewritten(bench, launcher, GROUPED)
    assert launcher.started == {GROUPED.name: True, bench.stock.program.name: False, "instructions": False}
    assert [row.ptx for row in report.rows] == [(f"captured unit.0.ptx: {GROUPED.name}",)]
    assert [row.compared for row in report.instructions] == ["rewritten PTX with model"]
    assert report.passed and not report.missed


def test_kernel_of_a_build_needs_its_captured_ptx(bench: Bench) -> None:
    """Its program has no code for it. Whatever it prints, it did not run the kernel."""
    (row,) = run_rewritten(bench, Recorder("compute_120a in a fatbin"), GROUPED).rows
    assert (row.verdict, row.why) == (RunOutcome.CRASH, "the captured PTX does not have the kernel of the build")
    own = replace(GROUPED, generated=False)
    (row,) = run_rewritten(bench, Recorder("compute_120a in a fatbin"), own).rows
    assert row.verdict is RunOutcome.PASS


def test_programs_without_kernel_code_are_only_those_of_the_build(bench: Bench) -> None:
    dense = replace(GROUPED.tile, family="dense", dtype="mxfp8")
    for configuration, captured, expected in (
        (GROUPED, True, True),
        (GROUPED, False, False),
        (replace(GROUPED, generated=False), True, False),
        (replace(GROUPED, tile=dense), True, False),
    ):
        program = verification._program(configuration, TREE, captured)
        assert program.captured is expected
        prelude = str(programs.CAPTURED_KERNEL)
        assert (prelude in bench.compiler.command(program, Path("/nowhere"))) is expected
    own, stub = (verification._program(GROUPED, TREE, captured) for captured in (False, True))
    assert bench.compiler.directory(own) != bench.compiler.directory(stub)
    assert not bench.stock.program.captured and not verification.INSTRUCTIONS.captured


class Delayer(Recorder):
    """A launcher whose programs compute wrong numbers with the delays of seed 2."""

    seeds = (1, 2, 3)

    def launched(self, name: str, program: Path, captured: bool) -> Path:
        self.program = program if name == GROUPED.name else self.program
        return super().launched(name, program, captured)

    def delayed(self, name: str, seed: int) -> Path:
        wrong = self.program.with_name("wrong")
        wrong.write_text(
            self.program.read_text().replace("print(json", "line.update(verdict='wrong', mismatches=7)\n    print(json")
        )
        wrong.chmod(0o700)
        return wrong if seed == 2 else self.program

    program = Path()


def test_kernel_that_is_wrong_with_delays_has_a_race(bench: Bench) -> None:
    (row,) = run_rewritten(bench, Delayer(), GROUPED).rows
    assert row.verdict is RunOutcome.WRONG and row.why.startswith("race: delays of seed 2: 7 of ")
    assert row.runs["delayed"] == 2


def test_delays_are_those_of_the_seed_at_all_sites(bench: Bench, tmp_path: Path) -> None:
    """The script that runs a program with delays starts that without, with its environment and arguments."""
    printing = tmp_path / "program"
    printing.write_text('#!/bin/sh\necho "$SM120KIT_PTX_DELAYS|$1|$SM120KIT_PTX_RUN"\n')
    printing.chmod(0o700)
    for name in (interposed.LIBRARY, "rewriter", "ptxas", "functions.ptx", "perturbed"):
        (tmp_path / name).touch()
    (tmp_path / "captured.list").touch()
    launcher = RewritingLauncher(interposed.Interposition(tmp_path, bench.compiler.toolchain), False, range(5, 7))
    launcher.launched("one", printing, False)
    assert (tmp_path / "one" / "perturbed").exists()
    done = subprocess.run([launcher.delayed("one", 5), "x y"], capture_output=True, text=True, check=True)
    assert done.stdout == f"5 0 {2**32 - 1} -|x y|{tmp_path / 'one'}\n"


@pytest.mark.parametrize("options", [("--device", "emulate"), ("--device", "rewritten", "--compile-only")])
def test_delays_are_for_rewritten_kernels_that_run(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["verify", "kernels", "flashinfer-0.6.6", "--perturb", "1", *options])
    assert done.exit_code == 2


def test_seeds_that_a_shell_left_out_are_an_error() -> None:
    """``--perturb "$SEED"``: a run without delays would pass for one with them."""
    done = CliRunner().invoke(app, ["verify", "kernels", "flashinfer-0.6.6", "--device", "rewritten", "--perturb", ""])
    assert isinstance(done.exception, BadInput) and "--perturb ''" in str(done.exception)


# ---- programs that another machine compiled


INPUTS = "b" * 64


def test_compiled_programs_need_neither_network_nor_sources(bench: Bench, tmp_path: Path) -> None:
    """An empty state directory, offline: the recipe and its series decide whether they are those of its tree."""
    options = Options(Workspace.open(tmp_path / "state"), Origin(offline=True))
    scope = VerificationScope(Backend.EMULATE, quick=True)
    target = resolve_flashinfer("flashinfer-0.6.6", options)
    save(bench, tmp_path / "programs", target.recipe.name, gpu_session.source_inputs(target))
    given = gpu_session.given_programs(target, scope, tmp_path / "programs", "sm_90a", captured=False)
    assert given.record.tree == TREE and not list((tmp_path / "state" / "checkouts").glob("*"))
    other = resolve_flashinfer("flashinfer-0.7.2.post1", options)
    changed = replace(target, files={**target.files, f"patches/{target.recipe.pin.project}/new.patch": "d" * 64})
    for wrong in (other, changed):
        with pytest.raises(BadRecord, match="another version of the source, or other patches"):
            gpu_session.given_programs(wrong, scope, tmp_path / "programs", "sm_90a", captured=False)
    elsewhere = replace(target, files={**target.files, "patches/vllm/new.patch": "d" * 64})
    assert gpu_session.given_programs(elsewhere, scope, tmp_path / "programs", "sm_90a", captured=False)


def save(bench: Bench, directory: Path, engine: str = "x", inputs: str = "b" * 64) -> None:
    scope = VerificationScope(Backend.EMULATE, quick=True)
    built = verification.compile_only(verified_kernels.Matrix((GROUPED,)), [bench.stock], TREE, bench.compiler)
    broken = replace(verification._program(GROUPED, TREE), name="broken")
    compiled.save(
        directory,
        compiled.CompiledVerification(
            compiled.FORMAT,
            engine,
            gpu_tests.sources_digest(),
            scope,
            False,
            bench.compiler.arch,
            bench.compiler.toolchain,
            inputs,
            TREE,
            verified_kernels.Matrix((GROUPED,)),
            (bench.stock,),
            {},
            {},
            12.5,
        ),
        {**built, broken: CompileFailed("error: x", "command: y")},
    )


def test_compiled_programs_run_on_another_machine(bench: Bench, tmp_path: Path) -> None:
    save(bench, tmp_path / "programs")
    loaded = compiled.load(
        tmp_path / "programs", "x", INPUTS, VerificationScope(Backend.EMULATE, quick=True), "sm_90a", captured=False
    )
    record = loaded.record
    assert loaded.toolchain == bench.compiler.toolchain and loaded.arch == "sm_90a"
    assert set(record.digests) == {GROUPED.name, faults.STOCK, "instructions"}
    assert record.failed == {"broken": ("error: x", "command: y")}
    report = verification.verify(
        record.matrix, list(record.seeded), record.tree, loaded, Backend.EMULATE, quick=True, launcher=verification.Launcher()
    )
    assert report.passed and not report.missed and report.compile_seconds == 12.5
    receipt = gpu_tests.record(report, record.scope, engine="x", tree=record.tree.tree, gpu=H200, compiler=loaded)
    assert receipt["toolchain"] == {"nvcc": "13.0.88", "host": "g++ 13"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine": "y"}, "recipe x"),
        ({"scope": VerificationScope(Backend.EMULATE)}, "--device, --only and --quick"),
        ({"captured": True}, "--ptx"),
        ({"inputs": "c" * 64}, "another version of the source, or other patches"),
        ({"arch": "sm_121a"}, "target sm_90a, and this GPU's is sm_121a"),
    ],
    ids=["recipe", "scope", "ptx", "inputs", "arch"],
)
def test_programs_of_another_verification_are_refused(
    bench: Bench, tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    save(bench, tmp_path)
    scope = VerificationScope(Backend.EMULATE, quick=True)
    required = {"engine": "x", "inputs": INPUTS, "scope": scope, "arch": "sm_90a", "captured": False} | changed
    with pytest.raises(BadRecord, match=f"another verification: {reason}"):
        compiled.load(tmp_path, **required)  # type: ignore[arg-type]


def test_changed_programs_are_refused(bench: Bench, tmp_path: Path) -> None:
    scope = VerificationScope(Backend.EMULATE, quick=True)
    with pytest.raises(BadRecord, match="no record"):
        compiled.load(tmp_path, "x", INPUTS, scope, "sm_90a", captured=False)
    save(bench, tmp_path)
    record = tmp_path / compiled.RECORD
    record.write_text(record.read_text().replace(gpu_tests.sources_digest(), "0" * 64))
    with pytest.raises(BadRecord, match="other programs than this version"):
        compiled.load(tmp_path, "x", INPUTS, scope, "sm_90a", captured=False)
    record.write_text(record.read_text()[:-9])
    with pytest.raises(BadRecord, match="is damaged"):
        compiled.load(tmp_path, "x", INPUTS, scope, "sm_90a", captured=False)
    save(bench, tmp_path)
    loaded, program = (
        compiled.load(tmp_path, "x", INPUTS, scope, "sm_90a", captured=False),
        verification._program(GROUPED, TREE),
    )
    (tmp_path / GROUPED.name).write_text("#!/bin/sh\n")
    with pytest.raises(BadRecord, match="not the program that was compiled"), loaded.compile_all([program]) as given:
        list(given)


def test_programs_in_the_present_directory_are_started_by_their_path(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(bench, tmp_path)
    monkeypatch.chdir(tmp_path)
    scope = VerificationScope(Backend.EMULATE, quick=True)
    loaded = compiled.load(Path(), "x", INPUTS, scope, "sm_90a", captured=False)
    program = verification._program(GROUPED, TREE)
    with loaded.compile_all([program]) as given:
        assert list(given) == [(program, tmp_path.resolve() / GROUPED.name)]
    (tmp_path / GROUPED.name).chmod(0o600)
    with pytest.raises(BadRecord, match="is not executable"), loaded.compile_all([program]) as given:
        list(given)
