"""Verdicts on published figures: each of them, each field that can differ, and what is told beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit import reproducing
from sm120kit.bench import receipt as receipts
from sm120kit.bench import workload as workloads
from sm120kit.bench.clocks import Clocks
from sm120kit.bench.receipt import Acceptance, Circumstances, Machine, Measured, Receipt, Served
from sm120kit.bench.sample import Sample
from sm120kit.doctor import Finding, Impact
from sm120kit.doctor import Verdict as Answer
from sm120kit.doctor.model import ok, problem
from sm120kit.recipe import configuration
from sm120kit.recipe.configuration import Configuration
from sm120kit.reproducing import HONEST, Judgement, Verdict
from sm120kit.reproducing.judging import drafted

A = configuration.load("qwen3.5-122b-nvfp4-2x-rtx-pro-6000")
B = configuration.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5")
PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
CHUNKS = 64


def sample(user: int, rate: float, tokens: int, **changed: Any) -> Sample:
    """One answer that decodes at ``rate``, its first chunk after 0.1 s."""
    times = tuple(0.1 + tokens / CHUNKS / rate * at for at in range(CHUNKS))
    plain = Sample(
        user=user,
        prompt=0,
        started=0.0,
        ended=times[-1],
        status=200,
        error="",
        chunk_seconds=times,
        answer_chunks=CHUNKS,
        first_token=times[0],
        first_answer=times[0],
        prompt_tokens=20,
        cached_tokens=None,
        completion_tokens=tokens,
        reasoning_tokens=None,
        finish_reason="length",
        model=None,
        text_sha256="",
    )
    return replace(plain, **changed)


def cell(users: int, tok_s: float, tokens: int, restart: int = 0, **changed: Any) -> Measured:
    """So many users who together decode at ``tok_s``."""
    samples = tuple(sample(user, tok_s / users, tokens, **changed) for user in range(users))
    return Measured(users, tokens, 0, (), samples, 0.0, None, restart)


def receipt(wanted: Configuration, cells: Sequence[Measured], workload: str = "sustained-decode") -> Receipt:
    """A receipt of everything as the configuration says."""
    asked = workloads.load(workload)
    about = Circumstances(
        url="http://127.0.0.1:8000",
        model=wanted.model.repository,
        workload=asked.name,
        workload_sha256=asked.sha256,
        thinking=asked.workload.thinking,
        temperature=0.0,
        order_seed=0,
        client={},
        given={},
        served=Served(
            configuration=wanted.name,
            engine=wanted.engine,
            argv=("docker", "run", "image", "serve", *wanted.arguments),
        ),
        machine=Machine(
            gpus=(PRO,) * wanted.hardware.gpus,
            power_limits_watts=(600.0 if wanted is A else 300.0,) * wanted.hardware.gpus,
        ),
    )
    return Receipt(receipts.FORMAT, "2026-11-21T12:00:00+00:00", True, about, tuple(cells))


def judged(wanted: Configuration, value: float, *made: Receipt) -> Judgement:
    (one,) = (one for one in reproducing.judge(wanted, made).judgements if one.reference.value == value)
    return one


def about(made: Receipt, **changed: Any) -> Receipt:
    return replace(made, circumstances=replace(made.circumstances, **changed))


GOOD = receipt(A, [cell(1, 195.0, 4096), cell(32, 1500.0, 4096)])


# ---- verdicts


@pytest.mark.parametrize(
    ("measured", "verdict", "words"),
    [
        (250.0, Verdict.REPRODUCED, "REPRODUCED"),
        (194.0, Verdict.REPRODUCED, "REPRODUCED"),
        (191.3, Verdict.REPRODUCED, "REPRODUCED"),  # the published spread is 2.8
        (191.1, Verdict.WITHIN, "WITHIN 1.5%"),
        (165.0, Verdict.WITHIN, "WITHIN 14.9%"),
        (164.8, Verdict.BELOW, "BELOW by 15.1%"),
        (97.0, Verdict.BELOW, "BELOW by 50.0%"),
    ],
)
def test_verdicts(measured: float, verdict: Verdict, words: str) -> None:
    one = judged(A, 194.0, receipt(A, [cell(1, measured, 4096)]))
    assert (one.verdict, one.words, one.differences) == (verdict, words, ())
    assert one.measured and one.measured.tok_s == pytest.approx(measured)
    assert one.share == pytest.approx(measured / 194)


def test_many_users_are_judged_by_what_they_have_together() -> None:
    one = judged(A, 1411.5, GOOD)
    assert one.measured and one.measured.tok_s == pytest.approx(1500)
    assert one.verdict is Verdict.REPRODUCED


def test_wall_time_is_not_decoding() -> None:
    # 1000 tokens at 300 tok/s come within 3.38 s with the first token's 0.1: 296 tok/s of wall time.
    made = receipt(B, [cell(1, 300.0, 1000)], "seed-short-thinking-on")
    one = judged(B, 278.0, made)
    assert one.measured and one.measured.tok_s == pytest.approx(1000 / (0.1 + 63 / 64 * 1000 / 300))
    assert one.verdict is Verdict.REPRODUCED


def test_several_starts_count_by_their_median() -> None:
    made = receipt(A, [cell(1, rate, 4096, restart) for restart, rate in enumerate((150.0, 196.0, 193.0))])
    one = judged(A, 194.0, made)
    assert one.measured
    rates = (one.measured.starts, one.measured.lowest, one.measured.tok_s, one.measured.highest)
    assert rates == pytest.approx((3, 150, 193, 196))
    assert one.words == "REPRODUCED"


def test_the_report_is_as_bad_as_what_could_be_compared() -> None:
    def all_of(one: float, many: float) -> Verdict:
        return reproducing.judge(A, [receipt(A, [cell(1, one, 4096), cell(32, many, 4096)])]).verdict

    assert all_of(200, 1500) is Verdict.REPRODUCED
    assert all_of(195, 1500) is Verdict.WITHIN  # of the withdrawn 198
    assert all_of(200, 1000) is Verdict.BELOW
    assert reproducing.judge(A, [receipt(A, [cell(1, 200, 4096)])]).verdict is Verdict.REPRODUCED  # 32 users: not measured
    assert reproducing.judge(A, [about(GOOD, model="schedule")]).verdict is Verdict.NOT_COMPARABLE
    assert reproducing.judge(A, []).verdict is Verdict.NOT_MEASURED


# ---- what differs


def served(**changed: Any) -> Receipt:
    return about(GOOD, served=replace(GOOD.circumstances.served, **changed))


def machine(**changed: Any) -> Receipt:
    return about(GOOD, machine=replace(GOOD.circumstances.machine, **changed))


def given(made: Receipt, **values: str) -> Receipt:
    return about(made, given=values)


def arguments(old: str, *new: str) -> tuple[str, ...]:
    argv = GOOD.circumstances.served.argv or ()
    at = argv.index(old)
    return (*argv[:at], *new, *argv[at + 2 :])


BARE = machine(gpus=None, power_limits_watts=None)
ALIEN = served(engine=None, configuration=None)
TWO = "2 x RTX PRO 6000 Blackwell"


@pytest.mark.parametrize(
    ("made", "field", "published", "here"),
    [
        (machine(gpus=()), "gpus", TWO, "none"),
        (BARE, "gpus", TWO, "unknown"),
        (machine(gpus=("NVIDIA H200",) * 2), "gpus", TWO, "NVIDIA H200"),
        (machine(gpus=(PRO,)), "gpus", TWO, "1 x RTX PRO 6000 Blackwell"),
        (about(machine(gpus=(PRO,) * 4), served=Served(engine=A.engine)), "gpus", TWO, "4 x RTX PRO 6000 Blackwell"),
        (given(BARE, gpu="1x RTX PRO 6000"), "gpus", TWO, "1 x RTX PRO 6000 Blackwell"),
        (machine(power_limits_watts=(600.0, 300.0)), "power limit", "600 W", "300 W, 600 W"),
        (given(machine(power_limits_watts=None), power_limit="300 W"), "power limit", "600 W", "300 W"),
        (about(GOOD, model="schedule"), "model", A.model.repository, "schedule"),
        (given(GOOD, quantization="FP8"), "quantization", A.model.quantization, "FP8"),
        (served(engine="vllm-0.19.1"), "engine", A.engine, "vllm-0.19.1"),
        (ALIEN, "engine", A.engine, "unknown"),
        (about(ALIEN, said={"version": "0.5.12"}), "engine", A.engine, "version 0.5.12"),
        (given(ALIEN, engine="sglang-0.5.23"), "engine", A.engine, "sglang-0.5.23"),
        (
            served(argv=arguments("--speculative-num-steps")),
            "arguments",
            "--speculative-num-steps 5",
            "not there",
        ),
        (
            served(argv=arguments("--kv-cache-dtype", "--kv-cache-dtype", "bf16")),
            "arguments",
            "--kv-cache-dtype fp8_e4m3",
            "--kv-cache-dtype bf16",
        ),
        (about(GOOD, thinking="off"), "thinking", "as the server does", "off"),
        (about(GOOD, workload_sha256="0"), "workload", "sustained-decode", "sustained-decode with other contents"),
        (about(GOOD, workload="quick", workload_sha256="0"), "workload", "sustained-decode", "quick"),
        (replace(GOOD, cells=(cell(2, 300.0, 4096),)), "users", "1", "2"),
        (replace(GOOD, cells=(replace(GOOD.cells[0], complete=False),)), "users", "1", "no complete cell"),
        (replace(GOOD, cells=(cell(1, 195.0, 4096, error="HTTP 500"),)), "requests", "ended well", "all failed: HTTP 500"),
        (
            replace(GOOD, cells=(cell(1, 195.0, 4096, completion_tokens=None),)),
            "tokens",
            "counted",
            "the server does not count them",
        ),
        (replace(GOOD, cells=(cell(1, 195.0, 4096, completion_tokens=2000),)), "output tokens", "4096", "2000"),
        (
            replace(GOOD, cells=(cell(1, 195.0, 4096, chunk_seconds=(1.0,)),)),
            "rate",
            "194 tok/s",
            "none: too few chunks, or users who never decoded at once",
        ),
    ],
)
def test_every_field_that_differs_is_named(made: Receipt, field: str, published: str, here: str) -> None:
    one = judged(A, 194.0, made)
    assert one.verdict is Verdict.NOT_COMPARABLE
    assert [(found.field, found.published, found.here) for found in one.differences] == [(field, published, here)]
    assert one.words == f"NOT COMPARABLE: {field}"


@pytest.mark.parametrize(
    "made",
    [
        machine(gpus=(PRO,) * 4, power_limits_watts=(600.0,) * 4),  # launch chose two of them
        machine(gpus=("NVIDIA T400", PRO, PRO)),
        machine(power_limits_watts=(None, 600.4)),
        given(BARE, gpu="2x RTX PRO 6000"),
        about(GOOD, model=f"/models/{A.model.repository.rpartition('/')[2]}"),
        about(ALIEN, said={"version": "0.5.11+cu130"}),
        given(ALIEN, engine="sglang-0.5.11"),
        given(GOOD, quantization="nvfp4"),
        served(argv=None),
    ],
)
def test_what_does_not_differ(made: Receipt) -> None:
    assert judged(A, 194.0, made).words == "REPRODUCED"


def test_a_pinned_revision_must_be_known_and_the_same() -> None:
    commit = "a" * 40
    pinned = A.model_copy(update={"model": A.model.model_copy(update={"revision": commit, "why_unpinned": ""})})
    for revision, here in ((None, "unknown"), ("b" * 40, "b" * 40)):
        (found,) = judged(pinned, 194.0, served(revision=revision)).differences
        assert (found.field, found.published, found.here) == ("revision", commit, here)
    assert judged(pinned, 194.0, served(revision=commit)).words == "REPRODUCED"


def test_reasoning_in_answers_without_thinking_is_told() -> None:
    wanted = configuration.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000")
    made = receipt(wanted, [cell(1, 140.0, 1000, answer_chunks=CHUNKS - 20)], "seed-short-thinking-off")
    (found,) = judged(wanted, 135.9, made).differences
    assert (found.field, found.here) == ("thinking", "the server sends reasoning all the same")


def test_all_differing_fields_are_told_at_once() -> None:
    made = about(machine(gpus=(), power_limits_watts=()), model="schedule", served=Served())
    assert judged(A, 194.0, made).words == "NOT COMPARABLE: gpus, model, engine"


def test_figures_that_nobody_can_compare() -> None:
    wanted = configuration.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000")
    assert judged(wanted, 130.0).words == "NOT COMPARABLE: method"
    assert judged(wanted, 278.0).words == "NOT COMPARABLE: configuration"
    assert judged(wanted, 135.9).words == "not measured"


def test_a_rate_that_the_memory_cannot_give_is_no_measurement() -> None:
    one = judged(A, 194.0, receipt(A, [cell(1, 16_000.0, 4096)]))
    (found,) = one.differences
    assert found.field == "roofline"
    assert "above what the memory bandwidth allows" in found.here


def test_a_published_figure_above_the_ceiling_is_told() -> None:
    high = A.reference[1].model_copy(update={"value": 5000.0})
    one = judged(A.model_copy(update={"reference": (high,)}), 5000.0)
    assert one.bound and one.bound.ceiling < 5000
    assert "above what the memory bandwidth allows" in one.reasons[0]
    assert judged(A, 194.0).reasons == ()


# ---- beside the verdict


def test_the_honest_figure_stands_beside() -> None:
    honest = receipt(A, [cell(1, 120.0, 900), cell(32, 1100.0, 900)], HONEST)
    report = reproducing.judge(A, [GOOD, honest])
    assert [round(one.honest.tok_s) for one in report.judgements if one.honest] == [120, 120, 1100]
    assert len(report.judgements) == len(A.reference)


def test_acceptance_moves_the_roofline() -> None:
    taken = replace(cell(1, 195.0, 4096), acceptance=Acceptance(drafted=5000, accepted=1000))
    one, without = judged(A, 194.0, replace(GOOD, cells=(taken,))), judged(A, 194.0, GOOD)
    assert one.bound and without.bound
    assert (one.bound.acceptance, without.bound.acceptance, without.bound.at_most) == (0.2, None, 6)
    assert one.bound.roofline == pytest.approx(without.bound.roofline * (1 + 5 * 0.2) / 6)
    assert 1 < one.bound.needs < 6


def test_reasons_of_the_run() -> None:
    bad = sample(0, 195.0, 4096, error="HTTP 500: no memory")
    slow = Clocks(1, 10, None, None, 90.0, {"sw_power_cap": 0.8, "sync_boost": 0.01})
    base = cell(1, 180.0, 4096, completion_tokens=3000, cached_tokens=7)
    made = replace(GOOD, cells=(replace(base, samples=(*base.samples, bad), clocks=(slow,)),))
    assert judged(A, 194.0, made).reasons == (
        "1 of 2 requests failed; the first: HTTP 500: no memory",
        "answers ended after 3000 of 4096 tokens",
        "a prefix cache answered a part of the prompts",
        "GPU 1 was slowed by sw_power_cap in 80% of the looks",
    )


def test_reasons_of_the_host_and_what_is_not_as_published() -> None:
    def finding(name: str, answer: Answer) -> Finding:
        return Finding(name, name, answer, "")

    slow = problem(Impact.SLOWS, "translates", cause="", consequence="decode halves", fix="iommu=pt")
    minor = problem(Impact.MINOR, "old", cause="", consequence="", fix="x")
    report = reproducing.judge(A, [GOOD], [finding("iommu", slow), finding("acs", ok("off")), finding("cache", minor)])
    assert report.host == ("iommu: translates; decode halves",)
    assert any("revision is not pinned" in line for line in report.caveats)
    assert any(line.startswith("ours, not published: engine") for line in report.caveats)
    assert any(line.startswith("no released engine takes --fp4-gemm-backend b12x") for line in report.caveats)


# ---- what is run


def test_the_plan_is_the_published_methods_and_the_honest_one() -> None:
    asked = reproducing.plan(A)
    assert [(one.name, one.workload.users) for one in asked] == [("sustained-decode", (1, 32)), (HONEST, (1, 32))]
    assert asked[0].sha256 == workloads.load("sustained-decode").sha256
    quick = reproducing.plan(A, quick=True)
    assert [(one.workload.users, one.workload.requests_per_user) for one in quick] == [((1,), 1), ((1,), 1)]
    nothing = configuration.load("glm-5-nvfp4-8x-rtx-pro-6000")
    assert [one.name for one in reproducing.plan(nothing)] == [HONEST]
    assert reproducing.place_of(Path("r"), A, asked[0]) == Path("r/qwen3.5-122b-nvfp4-2x-rtx-pro-6000.sustained-decode.json")


@pytest.mark.parametrize("name", configuration.names())
def test_published_methods_are_one_cell_for_each_number_of_users(name: str) -> None:
    for one in configuration.load(name).reference:
        if one.workload:
            asked = workloads.load(one.workload).workload
            assert (len(asked.output_tokens), len(asked.context_tokens)) == (1, 1)
        else:
            assert one.figure == "decode"


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("qwen3.5-122b-nvfp4-2x-rtx-pro-6000", 5),  # of SGLang's 6 one is the step's own
        ("qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5", 5),
        ("qwen3.5-397b-nvfp4-4x-rtx-pro-6000", 3),
        ("qwen3.5-27b-fp8-1x-rtx-pro-6000", 0),
    ],
)
def test_drafted_tokens(name: str, drafts: int) -> None:
    assert drafted(configuration.load(name)) == drafts


# ---- what the authors published later, against what they published first


def again(wanted: Configuration, value: float, workload: str, users: int, rate: float, watts: float = 0) -> str:
    tokens = workloads.load(workload).workload.output_tokens[0]
    made = receipt(wanted, [cell(users, rate, tokens)], workload)
    if watts:
        made = about(made, machine=replace(made.circumstances.machine, power_limits_watts=(watts,) * wanted.hardware.gpus))
    return judged(wanted, value, made).words


B3 = configuration.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000")
DECODE = "sustained-decode"


@pytest.mark.parametrize(
    ("row", "published_and_measured"),
    [
        ("198, withdrawn | 181, ", (A, 198.0, DECODE, 1, 181.0)),
        ("198, withdrawn | 194.0 ± 2.8, ", (A, 198.0, DECODE, 1, 194.0)),
        ("198, withdrawn | 195.5, limited to 300 W", (A, 198.0, DECODE, 1, 195.5, 300)),
        ("198, withdrawn | 96.6, ", (A, 198.0, DECODE, 1, 96.6)),
        ("198, withdrawn | 34.0, ", (A, 198.0, DECODE, 1, 34.0)),
        ("1411.5 ± 2.7, 32 users | 1421, ", (A, 1411.5, DECODE, 32, 1421.0)),
        ("1411.5 ± 2.7, 32 users | 709.2, ", (A, 1411.5, DECODE, 32, 709.2)),
        ("278-283, withdrawn | 135.9, ", (B, 278.0, "seed-short-thinking-off", 1, 135.9)),
        ("161, stock kernels | 171, ", (B3, 161.0, "random-128-in-256-out", 1, 180.4)),  # 171 of wall time
        ("135.9, K=64 patches | 139.2, ", (B3, 135.9, HONEST, 1, 139.2)),
    ],
)
def test_the_document_has_the_verdicts_of_the_rules(row: str, published_and_measured: Any) -> None:
    document = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    (line,) = [line for line in document.splitlines() if line.startswith(f"| {row}")]
    assert line.endswith(f" | {again(*published_and_measured)} |")


def test_the_document_has_the_ceilings() -> None:
    document = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    for wanted, value in ((A, 198.0), (B, 278.0)):
        bound = judged(wanted, value).bound
        assert bound and f"ceiling of {bound.ceiling:,.0f} tok/s" in document
