"""What verify kernels makes of what its programs say, recorded on an H200, and of programs that hang, die or talk nonsense."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit import verify
from sm120kit.errors import CompileFailed, ExpectationFailed, NoGpu, UnknownName, WrongGpu
from sm120kit.records import LeftOut, Tile, TileFacts, Toolchain
from sm120kit.verify import controls, gpu, kernels, matrix, receipt, running
from sm120kit.verify.gpu import Device, Gpu
from sm120kit.verify.matrix import Configuration
from sm120kit.verify.programs import Compiler, Program, Tree
from sm120kit.verify.running import Arguments, Run, Verdict
from sm120kit.workspace import data_root

RECORDED = Path(__file__).with_name("data") / "verify"
PASSED = (RECORDED / "passed.jsonl").read_text().splitlines()
FAILED = (RECORDED / "failed.jsonl").read_text().splitlines()


def receipts() -> list[Path]:
    """Those that are kept. There must be one."""
    found = sorted((data_root() / "patches" / "evidence").glob("verify-*.json"))
    assert found, "no receipt of verify kernels"
    return found


# ---- what one line says


def test_recorded_lines_are_read() -> None:
    runs = [running.parse(line) for line in PASSED]
    assert {run.verdict for run in runs} == {Verdict.PASS}
    assert {run.set for run in runs} == {"std", "moe", "inexact", "nan", "big"}
    assert not any(running.contradiction(run) for run in runs)
    assert [running.parse(line).verdict for line in FAILED] == [Verdict.WRONG] * 3 + [Verdict.CRASH]


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
def test_a_pass_that_its_own_figures_contradict_is_none(change: dict[str, object]) -> None:
    run = running.parse(json.dumps(json.loads(PASSED[0]) | change))
    assert run.verdict is Verdict.PASS
    assert running.contradiction(run)


@pytest.mark.parametrize("line", ["", "{}", "[1]", "Segmentation fault", PASSED[0][:-9], '{"verdict": "pass"}', "null", "1"])
def test_garbage_is_no_result(line: str) -> None:
    with pytest.raises(running.Garbage):
        running.parse(line)


def test_unknown_verdicts_are_garbage() -> None:
    with pytest.raises(running.Garbage):
        running.parse(PASSED[0].replace('"pass"', '"fine"'))
    with pytest.raises(running.Garbage):
        running.parse(PASSED[0].replace('"pass"', '"too big"'))


# ---- what one process does


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def printing(path: Path, lines: list[str], ending: str = "exit 0") -> Path:
    said = path.with_suffix(".said")
    said.write_text("".join(f"{line}\n" for line in lines))
    return script(path, f"cat {said}\n{ending}")


TWO = Arguments(("std",), clc=(0, 5))


def test_every_asked_run_is_answered(tmp_path: Path) -> None:
    runs = running.run(printing(tmp_path / "p", PASSED[:2]), TWO)
    assert [(run.clc, run.verdict) for run in runs] == [(0, Verdict.PASS), (5, Verdict.PASS)]


@pytest.mark.parametrize(
    ("lines", "ending", "verdicts", "words"),
    [
        (PASSED[:1], "exit 0", ["PASS", "CRASH"], "exit code 0 without a result"),
        (PASSED[:1], "kill -SEGV $$", ["PASS", "CRASH"], "signal 11 without a result"),
        ([], "echo lost >&2; exit 9", ["CRASH"], "exit code 9 without a result: lost"),
        (["nonsense"], "exit 0", ["CRASH"], "not a result: 'nonsense'"),
        (PASSED[2:4], "exit 0", ["CRASH"], "an answer that was not asked for"),
        (PASSED[:3], "exit 0", ["PASS", "PASS", "CRASH"], "an answer that was not asked for"),
        ([FAILED[3]], "exit 1", ["CRASH"], "an illegal memory access"),
    ],
    ids=["one missing", "segmentation fault", "dies", "nonsense", "another run", "one too many", "crash"],
)
def test_what_a_program_does_not_say_is_no_pass(
    tmp_path: Path, lines: list[str], ending: str, verdicts: list[str], words: str
) -> None:
    runs = running.run(printing(tmp_path / "p", lines, ending), TWO)
    assert [run.verdict for run in runs] == verdicts
    assert words in runs[-1].detail


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    runs = running.run(script(tmp_path / "p", f"sleep 100 &\necho $! > {pid}\nwait"), TWO, patience_seconds=0.3)
    assert [(run.verdict, run.detail) for run in runs] == [(Verdict.HANG, "no end after 0.3 s")]
    child = Path("/proc", pid.read_text().strip(), "stat")
    assert not child.exists() or " Z " in child.read_text()  # ended; who reaps it is not ours to say


def test_a_program_that_refuses_its_arguments_is_our_fault(tmp_path: Path) -> None:
    with pytest.raises(ExpectationFailed, match="no such set"):
        running.run(script(tmp_path / "p", "echo no such set >&2; exit 2"), TWO)


def test_a_contradicted_pass_is_wrong(tmp_path: Path) -> None:
    lines = [PASSED[0].replace('"mismatches": 0', '"mismatches": 3'), PASSED[1]]
    runs = running.run(printing(tmp_path / "p", lines), TWO)
    assert [run.verdict for run in runs] == [Verdict.WRONG, Verdict.PASS]
    assert runs[0].detail == "says pass, but: 3 outputs differ"


# ---- a whole verification, of programs that are there already

PROGRAM = """#!{python}
import itertools, json, sys
faults = [{{"name": "none", "class": "", "what": ""}}, {{"name": "scale-stride", "class": "scales", "what": "too long"}},
          {{"name": "group-k", "class": "groups", "what": "too short"}}]
if sys.argv[1] == "--list":
    print(json.dumps({{"faults": faults}}))
    sys.exit()
given = {{name: value.split(",") for name, value in zip(sys.argv[1::2], sys.argv[2::2])}}
recorded = {recorded!r}
for run in itertools.product(given["--set"], given["--fault"], given["--clc"], given["--jitter"], given["--seed"]):
    name, fault, clc, jitter, seed = run
    line = dict(recorded[name], fault=fault, clc=int(clc), jitter_ns=int(jitter), seed=int(seed))
    line.update({changes!r}.get(fault, {{}}) or {changes!r}.get(f"{{fault}} in {{name}}", {{}}))
    print(json.dumps(line))
    if line["verdict"] in ("hang", "crash"):
        sys.exit(1)
"""
FOUND: dict[str, dict[str, object]] = {"scale-stride": {"verdict": "crash"}, "group-k": {"verdict": "wrong", "mismatches": 9}}
INSTRUCTION = (
    '{"instruction": "m16n8k64 e2m1 e2m1 ue4m3 4X", "compared": "software with model", "verdict": "pass", "values": 512000, '
    '"differ_exact": 0, "differ_random": 0, "differ_extreme": 0, "differ_nan": 0, "max_error_over_magnitude": 5.96e-08}'
)
GROUPED = Configuration(
    Tile("grouped", "nvfp4", 128, 128, 128, "none", False, "bf16"), generated=True, stages=4, smem_bytes=89_088
)
TREE = Tree(Path("/nowhere"), "a" * 40, "3rdparty/cutlass")
H200 = Gpu("NVIDIA H200", (9, 0), "580.159.03", "13.0")


class Bench:
    """A compiler whose programs are made by the test."""

    def __init__(self, root: Path) -> None:
        toolchain = Toolchain(Path("/nowhere"), "13.0.88", "/nowhere/g++", "g++ 13")
        self.compiler = Compiler("sm_90a", True, toolchain, root, jobs=1, budget_bytes=None)
        self.stock = controls.stock_control(replace(TREE, tree="b" * 40))
        self.put(kernels.INSTRUCTIONS, f"#!/bin/sh\necho '{INSTRUCTION}'\n")
        self.gemm(kernels._program(GROUPED, TREE), FOUND)
        self.gemm(self.stock.program, {"none": {"verdict": "wrong", "mismatches": 5, "signature": controls.STOCK_SIGNATURE}})

    def put(self, program: Program, text: str) -> None:
        path = self.compiler.place(program) / "program"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def gemm(self, program: Program, changes: dict[str, dict[str, object]]) -> None:
        recorded = {line["set"]: line for line in map(json.loads, PASSED)}
        self.put(program, PROGRAM.format(python=sys.executable, recorded=recorded, changes=changes))

    def run(self, *several: Configuration) -> kernels.Report:
        return kernels.verify(
            matrix.Matrix(several or (GROUPED,)), [self.stock], TREE, self.compiler, Device.EMULATE, quick=True
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_right_kernel_passes_and_every_fault_is_found(bench: Bench) -> None:
    report = bench.run()
    assert report.passed and not report.missed
    (row,) = report.rows
    assert (row.verdict, row.runs, row.stages) == (Verdict.PASS, {"std": 2, "inexact": 2}, 4)
    assert 0 < row.max_relative_error < row.error_bound
    seen = {one.name: (set(one.seen.values()), one.signature) for one in report.faults}
    assert seen == {
        "scale-stride": ({Verdict.CRASH}, ""),
        "group-k": ({Verdict.WRONG}, ""),
        controls.STOCK: ({Verdict.WRONG}, controls.STOCK_SIGNATURE),
    }


class AtOnce:
    """A pool that does what it is given at once."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(function(*arguments))
        return done


def test_a_verdict_is_told_while_others_compile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ThreadPoolExecutor", AtOnce)
    said: list[str] = []
    kernels.verify(matrix.Matrix((GROUPED,)), [bench.stock], TREE, bench.compiler, Device.EMULATE, quick=True, tell=said.append)
    assert said == [
        f"[1/3] compiled {GROUPED.name}",
        f"[1/3] {GROUPED.name}: PASS",
        f"[2/3] compiled {controls.STOCK}",
        f"[2/3] {controls.STOCK}: found (WRONG: {controls.STOCK_SIGNATURE})",
        "[3/3] compiled instructions",
        "[3/3] instructions: PASS",
    ]


def test_a_fault_that_is_not_found_is_named(bench: Bench) -> None:
    bench.gemm(kernels._program(GROUPED, TREE), {"group-k": FOUND["group-k"]})
    other = replace(GROUPED, tile=replace(GROUPED.tile, dtype="mxfp4"))
    bench.gemm(kernels._program(other, TREE), FOUND)
    report = bench.run(other, GROUPED)
    assert report.missed == [f"scale-stride ({GROUPED.name})"]
    (stride,) = (one for one in report.faults if one.name == "scale-stride")
    assert stride.seen == {GROUPED.name: Verdict.PASS, other.name: Verdict.CRASH}


@pytest.mark.parametrize("change", [{}, {"verdict": "wrong", "mismatches": 5}, {"verdict": "hang"}], ids=str)
def test_stock_cutlass_must_be_wrong_in_the_known_way(bench: Bench, change: dict[str, object]) -> None:
    bench.gemm(bench.stock.program, {"none": change})
    assert bench.run().missed == [f"{controls.STOCK} ({controls.STOCK})"]


@pytest.mark.parametrize("verdict", ["wrong", "hang", "crash"])
def test_one_bad_run_fails_the_kernel(bench: Bench, verdict: str) -> None:
    bench.gemm(kernels._program(GROUPED, TREE), FOUND | {"none in inexact": {"verdict": verdict, "mismatches": 4}})
    report = bench.run()
    assert not report.passed
    assert report.rows[0].verdict == verdict.upper()
    assert "4 of 154,600 outputs differ" in report.rows[0].why


def test_a_kernel_that_is_not_the_one_in_the_tile_table_is_wrong(bench: Bench) -> None:
    report = bench.run(replace(GROUPED, stages=3))
    assert not report.passed
    assert "4 stages and 89,088 B, the tile table says 3 and 89,088 B" in report.rows[0].why


def test_a_wrong_instruction_fails_the_verification(bench: Bench) -> None:
    bench.put(kernels.INSTRUCTIONS, f"#!/bin/sh\necho '{INSTRUCTION.replace('pass', 'wrong')}'\nexit 1\n")
    assert not bench.run().passed


@pytest.mark.parametrize("text", ["exit 0", "echo nonsense", f"echo '{INSTRUCTION}'; exit 1"])
def test_an_instruction_probe_that_makes_no_sense_is_an_error(bench: Bench, text: str) -> None:
    bench.put(kernels.INSTRUCTIONS, f"#!/bin/sh\n{text}\n")
    with pytest.raises(ExpectationFailed, match="instruction probe"):
        bench.run()


def test_a_program_that_does_not_compile_fails_unless_it_is_a_candidate_that_is_too_big() -> None:
    broken, too_big = CompileFailed("error: x"), CompileFailed("error: the kernel does not fit into the shared memory of SM120")
    assert kernels._row(GROUPED, broken, Device.EMULATE, False, threading.Event())[0].verdict is Verdict.DOES_NOT_COMPILE
    for one, failure, excused in (
        (GROUPED, broken, False),
        (GROUPED, too_big, False),
        (replace(GROUPED, generated=False), too_big, True),
    ):
        row, _ = kernels._row(one, failure, Device.EMULATE, False, threading.Event())
        assert row.excused is excused
        assert kernels.Report(rows=[row, kernels.Row("right", Verdict.PASS)]).passed is excused


def test_nothing_run_is_no_pass() -> None:
    assert not kernels.Report().passed
    assert not kernels.Report(instructions=[kernels.Instruction("mma", "with model", Verdict.PASS, 1, 0.0)]).passed
    assert not kernels.Report(rows=[kernels.Row("x", Verdict.TOO_BIG, excused=True)]).passed


def test_runs_that_only_emulation_has() -> None:
    def words(one: Configuration, device: Device) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [(arguments.clc, arguments.jitter_ns) for arguments in kernels.plan(one, device, quick=False)]

    dense = Configuration(Tile("dense", "nvfp4", 128, 128, 128, "none", False, "bf16"))
    assert words(dense, Device.EMULATE) == [((0, 5), (0, 4095)), ((0,), (0,)), ((5,), (kernels.LONG_JITTER_NS,))]
    assert words(dense, Device.NATIVE) == [((0,), (0,)), ((0,), (0,))]
    assert words(GROUPED, Device.NATIVE) == [((0, 5), (0,)), ((0,), (0,))]
    assert {clc for clc, _ in words(replace(dense, streamk=True), Device.EMULATE)} == {(0,)}


# ---- the matrix


def facts() -> list[TileFacts]:
    found = []
    for epilogue in ("none", "finalize"):
        for swap in (False, True):
            for output in ("bf16", "f16"):
                for shape in ((128, 128, 128), (128, 128, 64)):
                    tile = Tile("grouped", "nvfp4", *shape, epilogue, swap, output)
                    found.append(TileFacts(tile, True, True, "", "", "", "cooperative", "persistent", 4, 90_000, 2))
    big = TileFacts(Tile("grouped", "nvfp4", 256, 256, 128, "none", False, "bf16"), True, True, stages=3, smem_bytes=120_000)
    mixed = Tile("grouped", "fp8xmxfp4", 128, 128, 64, "none", False, "bf16")
    return [*found, big, TileFacts(mixed, False, False, "boxes of 128", "error", "x.hpp:3")]


def test_every_tile_is_run_or_has_its_reason() -> None:
    whole = matrix.matrix_of(facts())
    names = [one.name for one in whole.run]
    aside = [left.what for lefts in (whole.too_big, whole.does_not_compile, whole.left_out) for left in lefts]
    assert len(set(names + aside)) == len(names + aside)
    assert {Configuration(fact.tile).name for fact in facts()} <= {*names, *aside}
    assert all(left.reason for lefts in (whole.too_big, whole.does_not_compile, whole.left_out) for left in lefts)
    assert [left.what for left in whole.too_big] == ["grouped-nvfp4-256x256x128-bf16"]
    assert whole.does_not_compile[0].reason == "boxes of 128 (x.hpp:3)"
    assert {"dense-mxfp8-128x128x128-bf16", "grouped-mxfp4-256x128x64-bf16", "dense-nvfp4-128x128x64-pingpong-bf16"} <= {*names}
    refused = {left.what: left.reason for left in whole.does_not_compile}
    assert "grouped GEMM" in refused["dense-mxfp8-128x128x64-bf16"] and "dense-mxfp4-256x128x64-bf16" in refused
    assert "grouped-nvfp4-128x128x64-f16" in aside and "grouped-nvfp4-128x128x128-finalize-f16" in names


def test_names_choose_kernels() -> None:
    chosen = [one.name for one in matrix.matrix_of(facts(), pattern="128x128x64-finalize").run]
    assert chosen == [
        "grouped-nvfp4-128x128x64-finalize-bf16",
        "grouped-nvfp4-128x128x64-finalize-swap-bf16",
        "grouped-mxfp4-128x128x64-finalize-bf16",
        "grouped-mxfp8-128x128x64-finalize-swap-bf16",
    ]
    assert len(matrix.matrix_of(facts(), pattern="dense-mxfp8-128x128x128-bf16").run) == 1
    with pytest.raises(UnknownName, match="no configuration matches 'int8'") as failure:
        matrix.matrix_of(facts(), pattern="int8")
    assert "grouped-nvfp4-128x128x128-bf16" in failure.value.hint


def test_definitions_say_everything_that_distinguishes_two_kernels() -> None:
    whole = matrix.matrix_of(facts()).run
    assert len({one.definitions() for one in whole}) == len(whole)
    one = next(one for one in whole if one.name == "grouped-nvfp4-128x128x64-finalize-swap-bf16")
    assert {"-DDTYPE=nvfp4", "-DTILE_K=64", "-DGROUPED=1", "-DSWAP=1", "-DFINALIZE=1", "-DOUTPUT=bf16"} <= {*one.definitions()}


# ---- the GPU


def test_no_driver_is_no_gpu() -> None:
    assert gpu.probe("libsm120kit-no-such-driver.so") is None


@pytest.mark.parametrize(
    ("capability", "device", "hint"),
    [
        ((8, 0), Device.EMULATE, "CUDA_VISIBLE_DEVICES"),
        ((10, 0), Device.EMULATE, "CUDA_VISIBLE_DEVICES"),
        ((12, 0), Device.EMULATE, "--device native"),
        ((9, 0), Device.NATIVE, "--device emulate"),
        ((8, 9), Device.NATIVE, "CUDA_VISIBLE_DEVICES"),
    ],
    ids=str,
)
def test_a_gpu_that_cannot_do_it(capability: tuple[int, int], device: Device, hint: str) -> None:
    with pytest.raises(WrongGpu, match=f"compute capability {capability[0]}.{capability[1]}") as failure:
        gpu.require(replace(H200, capability=capability), device)
    assert hint in failure.value.hint


def test_suitable_gpus_and_their_targets() -> None:
    assert verify.arch(Device.EMULATE, gpu.require(H200, Device.EMULATE)) == "sm_90a"
    for minor in (0, 1):
        card = replace(H200, capability=(12, minor))
        assert verify.arch(Device.NATIVE, gpu.require(card, Device.NATIVE)) == f"sm_12{minor}a"
    with pytest.raises(NoGpu, match=r"compute capability 9\.0"):
        gpu.require(None, Device.EMULATE)


# ---- the receipt


def written(bench: Bench, path: Path, *, only: str = "") -> Path:
    report = bench.run()
    record = verify.record(
        report, engine="x", tree=TREE.tree, device=Device.EMULATE, gpu=H200, compiler=bench.compiler, only=only, quick=False
    )
    path.write_text(json.dumps(record))
    return path


def test_a_receipt_holds_for_what_it_was_made_of(bench: Bench, tmp_path: Path) -> None:
    path = written(bench, tmp_path / "r.json")
    assert receipt.stale(path, TREE.tree) == []
    assert receipt.receipt_name("flashinfer-0.6.6", H200) == "verify-flashinfer-0.6.6-nvidia-h200.json"
    kept = json.loads(path.read_text())
    assert kept["verified_on_sm120"] is False and kept["cannot_show"]
    assert kept["gpu"] == {"name": "NVIDIA H200", "capability": "9.0", "driver": "580.159.03", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sources": "0"}, "have changed"),
        ({"tree": "c" * 40}, "it is about tree cccccccccccc"),
        ({"only": "k64"}, "a part of the matrix"),
        ({"quick": True}, "a part of the matrix"),
        ({"instructions": []}, "did not pass: nothing was run"),
        ({"configurations": [{"name": "x", "verdict": "WRONG", "excused": False}]}, "did not pass: x"),
        ({"configurations": [{"name": "x", "verdict": "DOES NOT COMPILE", "excused": False}]}, "did not pass: x"),
        ({"passed": False}, "did not pass, by its own word"),
        ({"planted": []}, "none was planted"),
        ({"planted": [{"name": "x", "seen": {"a": "PASS"}, "missed": ["a"]}]}, "not found: x"),
        ({"format": 0}, "format 0"),
    ],
    ids=str,
)
def test_stale_evidence_is_recognised(bench: Bench, tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = written(bench, tmp_path / "r.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (found,) = receipt.stale(path, TREE.tree)
    assert problem in found


def test_committed_receipts_are_of_the_present_programs_and_series() -> None:
    for path in receipts():
        engine = json.loads(path.read_text())["engine"]
        lock = json.loads((data_root() / "recipes" / "engines" / f"{engine}.lock.json").read_text())
        (tree,) = (source["patched_tree"] for source in lock["sources"] if source["commit"])
        assert receipt.stale(path, tree) == [], path.name


def test_runs_have_distinct_fields() -> None:
    """A line of the program has a key for every field, so that none silently keeps its default."""
    assert Run.__dataclass_fields__.keys() <= json.loads(PASSED[0]).keys()


def test_right_kernels_stand_what_planted_faults_are_run_with() -> None:
    """Else a fault could be found that is none: by arguments under which every kernel fails."""
    for mutant in json.loads(controls.MUTANTS.read_text()):
        one = controls._configuration(mutant["config"])
        asked = controls._arguments(mutant["arguments"])
        plan = kernels.plan(one, Device.EMULATE, quick=False)
        assert {*asked.sets} <= {name for arguments in plan for name in arguments.sets}
        assert max(asked.jitter_ns) in {jitter for arguments in plan for jitter in arguments.jitter_ns}
        assert max(asked.clc) in {clc for arguments in plan for clc in arguments.clc}
        assert one.name in {other.name for other in matrix.matrix_of(facts()).run}


def test_the_table_says_what_was_not_shown(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    from sm120kit.cli import verify_kernels as cli

    report = bench.run(GROUPED)
    report.left_out = (LeftOut("grouped-nvfp4-128x256x128-f16", "differs from its bf16 twin"),)
    report.rows.append(kernels.Row("mixed", Verdict.DOES_NOT_COMPILE, "boxes of 128", excused=True))
    record = verify.record(
        report, engine="x", tree=TREE.tree, device=Device.EMULATE, gpu=H200, compiler=bench.compiler, only="", quick=False
    )
    cli._show(report, record)
    said = capsys.readouterr().out
    assert "1 of 2 kernels pass on NVIDIA H200 (driver 580.159.03, CUDA 13.0; nvcc 13.0.88, sm_90a)" in said
    assert "mixed: DOES NOT COMPILE: boxes of 128" in said
    assert "left out: 1 kernels: differs from its bf16 twin" in said
    assert f"WRONG: {controls.STOCK_SIGNATURE}" in said
    assert "unverified on SM120. What this cannot show:" in said
    assert "  the block-scaled mma instruction itself" in said
    cli._show(report, {**record, "verified_on_sm120": True})
    assert "unverified" not in capsys.readouterr().out


# ---- the table of planted faults in the docs

ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (data_root() / "docs" / "verify.md").read_text().split("| class | fault |")[1].split("\n\n")[0].splitlines()[2:]
]


def test_the_docs_list_every_fault_that_is_planted() -> None:
    mutants = {(one["class"], one["name"], one["what"]) for one in json.loads(controls.MUTANTS.read_text())}
    stock = controls.stock_control(TREE)
    assert {*mutants, (stock.kind, stock.name, stock.what)} <= {row[:3] for row in ROWS}


def test_the_docs_say_what_the_receipts_saw() -> None:
    for path in receipts():
        planted = json.loads(path.read_text())["planted"]
        seen = [(one["kind"], one["name"], one["what"], ", ".join(sorted(set(one["seen"].values())))) for one in planted]
        assert sorted(seen) == ROWS, "\n".join(f"| {' | '.join(row)} |" for row in sorted(seen))
