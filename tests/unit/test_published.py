"""Verdicts on published figures: each verdict, each field that can differ, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit.bench import configured_rates as configured
from sm120kit.bench import published
from sm120kit.bench import result_file as results
from sm120kit.bench import workload as workloads
from sm120kit.bench._differences import gpu_names
from sm120kit.bench.published import Judgement
from sm120kit.bench.result_file import Acceptance, Environment, Machine, MeasuredCase, Result, Served
from sm120kit.bench.roofline import expected_step
from sm120kit.bench.sample import Sample
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration

A = configurations.load("qwen3.5-122b-nvfp4-2x-rtx-pro-6000")
B = configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5")
PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
CHUNKS = 64


def sample(user: int, rate: float, tokens: int, **changed: Any) -> Sample:
    """One answer that decodes at ``rate``, its first chunk after 0.1 s."""
    per_chunk = (tokens - 1) // (CHUNKS - 1)
    times = tuple(0.1 + per_chunk / rate * at for at in range(CHUNKS))
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
        chunk_tokens=(tokens - (CHUNKS - 1) * per_chunk, *(per_chunk,) * (CHUNKS - 1)),
    )
    return replace(plain, **changed)


def case(concurrency: int, tok_s: float, tokens: int, restart: int = 0, **changed: Any) -> MeasuredCase:
    """So many users who together decode at ``tok_s``, with at least three requests."""
    plain = sample(0, tok_s / concurrency, tokens)
    turns = range(1 if concurrency >= 3 else 3)
    samples = tuple(
        replace(_later(plain, turn * plain.ended), user=user, **changed) for user in range(concurrency) for turn in turns
    )
    return MeasuredCase(concurrency, tokens, 0, (), samples, 0.0, None, restart)


def _later(plain: Sample, seconds: float) -> Sample:
    moved = {name: getattr(plain, name) + seconds for name in ("started", "ended", "first_token", "first_answer")}
    return replace(plain, chunk_seconds=tuple(time + seconds for time in plain.chunk_seconds), **moved)


def result_of(
    configuration: Configuration, cases: Sequence[MeasuredCase], workload: str = "sustained-decode", starts: int = 1
) -> Result:
    """A result whose environment is that of the configuration, with the same cases after each start."""
    cases = [replace(case, restart=start) for start in range(starts) for case in cases] if starts > 1 else cases
    named = workloads.load(workload)
    about = Environment(
        url="http://127.0.0.1:8000",
        model=configuration.model.repository,
        workload=named.name,
        workload_sha256=named.sha256,
        thinking=named.workload.thinking,
        temperature=0.0,
        client={},
        given={},
        served=Served(
            configuration=configuration.name,
            engine=configuration.engine,
            argv=("docker", "run", "image", "serve", *configuration.arguments),
        ),
        machine=Machine(
            gpus=(PRO,) * configuration.hardware.gpus,
            power_limits_watts=(600.0 if configuration is A else 300.0,) * configuration.hardware.gpus,
        ),
    )
    return Result(results.FORMAT, "2026-11-21T12:00:00+00:00", True, about, tuple(cases))


def judged(configuration: Configuration, value: float, result: Result) -> Judgement:
    judgements = published.judge(configuration, result)
    (judgement,) = (judgement for judgement in judgements if judgement.reference.value == value)
    return judgement


def about(result: Result, **changed: Any) -> Result:
    return replace(result, environment=replace(result.environment, **changed))


GOOD = result_of(A, [case(1, 195.0, 4096), case(32, 1500.0, 4096)], starts=3)


# ---- verdicts


@pytest.mark.parametrize(
    ("measured", "reached", "text"),
    [
        (250.0, True, "REACHED in 3 starts"),
        (194.0, True, "REACHED in 3 starts"),
        (191.3, True, "REACHED in 3 starts"),  # the published spread is 2.8
        (191.1, False, "BELOW by 1.5%"),
        (97.0, False, "BELOW by 50.0%"),
    ],
)
def test_verdicts(measured: float, reached: bool, text: str) -> None:
    judgement = judged(A, 194.0, result_of(A, [case(1, measured, 4096)], starts=3))
    assert (judgement.reached, judgement.text, judgement.differences) == (reached, text, ())
    assert judgement.measured and judgement.measured.tok_s == pytest.approx(measured)


def test_many_users_are_judged_by_their_total_rate() -> None:
    judgement = judged(A, 1411.5, GOOD)
    assert judgement.measured and judgement.measured.tok_s == pytest.approx(1500)
    assert judgement.reached


def test_wall_figures_include_the_time_to_the_first_token() -> None:
    # 1000 tokens, 945 of them after the first chunk at 300 tok/s, take 3.25 s with the first token's 0.1.
    result = result_of(B, [case(1, 300.0, 1000)], "seed-short-thinking-on", starts=3)
    judgement = judged(B, 278.0, result)
    assert judgement.measured and judgement.measured.tok_s == pytest.approx(1000 / (0.1 + 63 * 15 / 300))
    assert judgement.reached


def test_several_starts_count_by_their_median() -> None:
    result = result_of(A, [case(1, rate, 4096, restart) for restart, rate in enumerate((150.0, 196.0, 193.0))])
    judgement = judged(A, 194.0, result)
    assert judgement.measured
    rates = (judgement.measured.starts, judgement.measured.lowest, judgement.measured.tok_s, judgement.measured.highest)
    assert rates == pytest.approx((3, 150, 193, 196))
    assert judgement.text == "REACHED in 3 starts"


# ---- what differs


def served(**changed: Any) -> Result:
    return about(GOOD, served=replace(GOOD.environment.served, **changed))


def machine(**changed: Any) -> Result:
    return about(GOOD, machine=replace(GOOD.environment.machine, **changed))


def given(result: Result, **values: str) -> Result:
    return about(result, given=values)


def arguments(old: str, *new: str) -> tuple[str, ...]:
    argv = GOOD.environment.served.argv or ()
    at = argv.index(old)
    return (*argv[:at], *new, *argv[at + 2 :])


BARE = machine(gpus=None, power_limits_watts=None)
ALIEN = served(engine=None, configuration=None)
TWO = "2 x RTX PRO 6000 Blackwell"
LEAST = "at least 3 successful requests"


@pytest.mark.parametrize(
    ("result", "field", "published", "here"),
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
        (about(ALIEN, reported={"version": "0.5.12"}), "engine", A.engine, "version 0.5.12"),
        (given(ALIEN, engine="sglang-0.5.23"), "engine", A.engine, "sglang-0.5.23"),
        (
            served(argv=arguments("--speculative-num-steps")),
            "arguments",
            "--speculative-num-steps 5",
            "absent",
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
        (replace(GOOD, cases=(replace(GOOD.cases[0], samples=GOOD.cases[0].samples[:2]),)), "samples", LEAST, "2"),
        (replace(GOOD, cases=(case(1, 195.0, 4096, error="HTTP 500"),)), "requests", "successful", "all failed: HTTP 500"),
        (
            replace(GOOD, cases=(case(1, 195.0, 4096, completion_tokens=None),)),
            "tokens",
            "counted",
            "the server does not count them",
        ),
        (replace(GOOD, cases=(case(1, 195.0, 4096, completion_tokens=2000),)), "output tokens", "4096", "2000"),
        (
            replace(GOOD, cases=(case(1, 195.0, 4096, chunk_seconds=(1.0,)),)),
            "rate",
            "194 tok/s",
            "none: too few chunks, or the requests never decoded at the same time",
        ),
    ],
)
def test_every_differing_field_is_reported(result: Result, field: str, published: str, here: str) -> None:
    judgement = judged(A, 194.0, result)
    assert judgement.reached is None
    assert [(difference.field, difference.published, difference.here) for difference in judgement.differences] == [
        (field, published, here)
    ]
    assert judgement.text == f"NOT COMPARABLE: {field}"


@pytest.mark.parametrize(
    "result",
    [
        machine(gpus=(PRO,) * 4, power_limits_watts=(600.0,) * 4),  # launch chose two of them
        machine(gpus=("NVIDIA T400", PRO, PRO)),
        machine(power_limits_watts=(None, 600.4)),
        given(BARE, gpu="2x RTX PRO 6000"),
        about(GOOD, model=f"/models/{A.model.repository.rpartition('/')[2]}"),
        about(ALIEN, reported={"version": "0.5.11+cu130"}),
        given(ALIEN, engine=A.engine),
        given(GOOD, quantization="nvfp4"),
        served(argv=None),
    ],
)
def test_equivalent_setups_do_not_differ(result: Result) -> None:
    assert judged(A, 194.0, result).text == "REACHED in 3 starts"


def test_pinned_revision_must_be_known_and_equal() -> None:
    commit = "a" * 40
    pinned = A.model_copy(update={"model": A.model.model_copy(update={"revision": commit, "why_unpinned": ""})})
    for revision, here in ((None, "unknown"), ("b" * 40, "b" * 40)):
        (difference,) = judged(pinned, 194.0, served(revision=revision)).differences
        assert (difference.field, difference.published, difference.here) == ("revision", commit, here)
    assert judged(pinned, 194.0, served(revision=commit)).text == "REACHED in 3 starts"


def test_reasoning_without_thinking_is_a_difference() -> None:
    configuration = configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000")
    result = result_of(configuration, [case(1, 140.0, 1000, answer_chunks=CHUNKS - 20)], "seed-short-thinking-off")
    (difference,) = judged(configuration, 135.9, result).differences
    assert (difference.field, difference.here) == ("thinking", "the server sends reasoning")


def test_all_differing_fields_are_reported_together() -> None:
    result = about(machine(gpus=(), power_limits_watts=()), model="schedule", served=Served())
    judgement = judged(A, 194.0, result)
    fields = dict.fromkeys(each.field for each in judgement.differences)
    assert judgement.reached is None and list(fields) == ["gpus", "model", "engine"] and ", ".join(fields) in judgement.text


def test_figures_without_method_or_configuration_are_not_comparable() -> None:
    configuration = configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000")
    result = result_of(configuration, [case(1, 130.0, 1000)], "seed-short-thinking-off")
    assert judged(configuration, 130.0, result).text == "NOT COMPARABLE: method"
    assert "configuration" in judged(configuration, 278.0, result).text
    assert judged(configuration, 135.9, result).reached is False


def test_only_measured_concurrencies_are_judged() -> None:
    for cases in ((case(2, 300.0, 4096),), (replace(GOOD.cases[0], complete=False),)):
        assert published.judge(A, replace(GOOD, cases=cases)) == ()


def test_rate_above_the_ceiling_is_not_comparable() -> None:
    judgement = judged(A, 194.0, result_of(A, [case(1, 16_000.0, 4096)]))
    (difference,) = judgement.differences
    assert difference.field == "roofline"


def test_rate_above_the_ceiling_at_the_measured_acceptance_is_not_comparable() -> None:
    """380 tok/s are possible with every draft accepted, not with a fifth of them."""
    slow = replace(case(1, 380.0, 4096), acceptance=Acceptance(5000, 1000))
    judgement = judged(A, 194.0, result_of(A, [slow]))
    (difference,) = judgement.differences
    assert difference.field == "roofline"
    assert judged(A, 194.0, result_of(A, [replace(slow, acceptance=None)])).text == "REACHED in 1 start"
    fast = replace(slow, acceptance=Acceptance(5000, 4900))
    assert judged(A, 194.0, result_of(A, [fast])).text == "REACHED in 1 start"


def test_verdict_without_counts_is_on_the_tokens_that_the_text_suggests() -> None:
    """64 chunks of equal length without counts: the first has 1.5 % of the tokens."""
    uncounted = result_of(A, [case(1, 192.0, 4096, chunk_tokens=None)], starts=3)
    judgement = judged(A, 194.0, uncounted)
    assert judgement.measured and judgement.measured.tok_s == pytest.approx(192 * 63 / 64, rel=1e-3)
    assert judgement.text == "BELOW by 2.6%"


# ---- rates and reasons


# ---- the expected rate

DENSE = configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")


def expected_lines(result: Result) -> list[str]:
    return [line for line in published.comparisons(result) if line.startswith("expected: ")]


@pytest.mark.parametrize(
    ("tok_s", "share", "relation"), [(46.3, "1.00", "within 26%"), (23.2, "0.50", "below that"), (64.9, "1.40", "above that")]
)
def test_measured_rate_is_compared_with_the_expected_one(tok_s: float, share: str, relation: str) -> None:
    (line,) = expected_lines(result_of(DENSE, [case(1, tok_s, 300)]))
    # 27.2 GB at 1,792 GB/s, the state, and 64 layers of 100 us.
    assert line == (
        f"expected: concurrency 1: {tok_s} tok/s, {share} of the expected 46.33 with a mean error of 13%: {relation}; "
        f"expected step of 21.6 ms, 70% of it weights"
    )


def test_show_compares_each_case_with_the_expected_rate_and_the_published_figures() -> None:
    lines = published.comparisons(GOOD)
    assert {line.partition(": ")[2].partition(":")[0] for line in expected_lines(GOOD)} == {"concurrency 1", "concurrency 32"}
    assert any("concurrency 1: 194 tok/s; measured 195.0 tok/s; REACHED in 3 starts" in line for line in lines)
    assert any(line.startswith("deviation from the publication: engine") for line in lines)
    assert not any("concurrency 8:" in line for line in lines), "was not measured"
    for configuration in (None, "of-another-machine"):
        assert published.comparisons(about(GOOD, served=Served(configuration=configuration))) == []
    stated = about(GOOD, served=Served(), given={"configuration": A.name})
    assert any("NOT COMPARABLE: engine" in line for line in published.comparisons(stated))
    another = published.comparisons(about(GOOD, model="another/model"))
    assert any("expected: unknown, the result is of another/model" in line for line in another)
    assert f"model: published {A.model.repository}, here another/model" in another


def test_expected_rate_requires_the_acceptance_of_drafts() -> None:
    taken = replace(case(1, 195.0, 4096), acceptance=Acceptance(drafted=5000, accepted=1000))
    setup, load = configured.modelled(A), configured.work(A, 1, 2048)
    assert setup
    seconds = expected_step(*setup, load).seconds
    assert seconds > 53 * 100e-6, "the floor of 53 layers"
    (known,) = expected_lines(replace(GOOD, cases=(taken,)))
    assert f"of the expected {(1 + 5 * 0.2) / seconds:.4g} with" in known
    (unknown,) = expected_lines(replace(GOOD, cases=(case(1, 195.0, 4096),)))
    assert f" 195 tok/s take {195 * seconds:.1f} of at most 6 tokens in an expected step of " in unknown
    assert not unknown.endswith("impossible")
    (high,) = expected_lines(replace(GOOD, cases=(case(1, 900.0, 4096),)))
    assert high.endswith(": impossible")


def test_what_is_not_modelled_has_no_expected_rate() -> None:
    assert configured.modelled(DENSE)
    unlisted = DENSE.model_copy(update={"model": DENSE.model.model_copy(update={"repository": "some/model"})})
    several = DENSE.model_copy(update={"hardware": DENSE.hardware.model_copy(update={"gpus": 2, "nodes": 2})})
    assert configured.modelled(unlisted) is configured.modelled(several) is None


# ---- what is run


def test_published_methods_are_measured_at_the_published_concurrency() -> None:
    (named,) = published.workloads(A)
    assert (named.name, named.workload.concurrency) == ("sustained-decode", (1, 32))
    assert named.sha256 == workloads.load("sustained-decode").sha256
    two = published.workloads(configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000"))
    assert [(each.name, each.workload.concurrency) for each in two] == [
        ("seed-short-thinking-off", (1,)),
        ("random-128-in-256-out", (1,)),
    ]
    assert published.workloads(configurations.load("glm-5-nvfp4-8x-rtx-pro-6000")) == ()
    for each in two:  # `bench run` names these options
        options = {"concurrency": each.workload.concurrency}
        assert workloads.changed(workloads.load(each.name), **options).sha256 == each.sha256
        assert workloads.changed(workloads.load(each.name), **options, output_tokens=(7,)).sha256 != each.sha256


@pytest.mark.parametrize("name", configurations.names())
def test_published_methods_have_a_case_per_number_of_users(name: str) -> None:
    for reference in configurations.load(name).reference:
        if reference.workload:
            published = workloads.load(reference.workload).workload
            assert (len(published.output_tokens), len(published.context_tokens)) == (1, 1)
        else:
            assert reference.figure == "decode"


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("qwen3.5-122b-nvfp4-2x-rtx-pro-6000", 5),  # SGLang's 6 include the verified token
        ("qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5", 5),
        ("qwen3.5-397b-nvfp4-4x-rtx-pro-6000", 3),
        ("qwen3.5-27b-fp8-1x-rtx-pro-6000", 0),
    ],
)
def test_drafts_per_step(name: str, drafts: int) -> None:
    assert configured.drafts_per_step(configurations.load(name)) == drafts


def test_stated_number_of_gpus_has_a_limit() -> None:
    """A result is a file of somebody else: its text makes no list of a billion names."""
    for text, count in (("2x A", 2), ("999 x A", 999), ("9999999999 x A", 1), ("\u0663x A", 1)):
        assert len(gpu_names(about(result_of(A, []), given={"gpu": text}, machine=Machine())) or ()) == count


# ---- what the authors published later, against what they published first


def again(configuration: Configuration, value: float, workload: str, concurrency: int, rate: float, watts: float = 0) -> str:
    tokens = workloads.load(workload).workload.output_tokens[0]
    result = result_of(configuration, [case(concurrency, rate, tokens)], workload)
    if watts:
        result = about(
            result, machine=replace(result.environment.machine, power_limits_watts=(watts,) * configuration.hardware.gpus)
        )
    return judged(configuration, value, result).text


B3 = configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000")
DECODE = "sustained-decode"


@pytest.mark.parametrize(
    ("row", "published_and_measured"),
    [
        ("198, withdrawn | 181, ", (A, 198.0, DECODE, 1, 181.0)),
        ("198, withdrawn | 194.0 ± 2.8, ", (A, 198.0, DECODE, 1, 194.0)),
        ("198, withdrawn | 195.5, limited to 300 W", (A, 198.0, DECODE, 1, 195.5, 300)),
        ("198, withdrawn | 96.6, ", (A, 198.0, DECODE, 1, 96.6)),
        ("198, withdrawn | 34.0, ", (A, 198.0, DECODE, 1, 34.0)),
        ("1411.5 ± 2.7, concurrency 32 | 1421, ", (A, 1411.5, DECODE, 32, 1421.0)),
        ("1411.5 ± 2.7, concurrency 32 | 709.2, ", (A, 1411.5, DECODE, 32, 709.2)),
        ("278-283, withdrawn | 135.9, ", (B, 278.0, "seed-short-thinking-off", 1, 135.9)),
        ("161, stock kernels | 171, ", (B3, 161.0, "random-128-in-256-out", 1, 180.4)),  # 171 of wall time
        ("135.9, K=64 patches | 139.2, ", (B3, 135.9, "real-prompts-thinking-off", 1, 139.2)),
    ],
)
def test_documentation_has_the_verdicts(row: str, published_and_measured: Any) -> None:
    document = (Path(__file__).parents[2] / "docs" / "measurements" / "rates.md").read_text()
    (line,) = [line for line in document.splitlines() if line.startswith(f"| {row}")]
    assert line.endswith(f" | {again(*published_and_measured)} |")


def test_documentation_has_the_ceilings() -> None:
    document = (Path(__file__).parents[2] / "docs" / "measurements" / "rates.md").read_text()
    for configuration, value in ((A, 198.0), (B, 278.0)):
        planned = configured.planned_rates(configuration)
        assert planned and f"ceiling of {planned.ceiling:,.0f} tok/s" in document, value


SPEEDS = (0.25, 0.5, 0.9, 1.0, 1.1, 5.0)
FLAGSHIPS = ((A, 198.0, DECODE), (A, 1411.5, DECODE), (B, 278.0, "seed-short-thinking-on"))


def verdicts_by_speed() -> list[str]:
    """The table of verdicts on streams that are slower and faster than published, as the documentation has it."""
    lines = [
        "| published | speed | `--quick` | one start | three starts | three starts, 20% accepted |",
        "|---|---|---|---|---|---|",
    ]
    for configuration, value, workload in FLAGSHIPS:
        (reference,) = (reference for reference in configuration.reference if reference.value == value)
        tokens = workloads.load(workload).workload.output_tokens[0]
        for speed in SPEEDS:
            rate = speed * value
            if reference.figure == "wall":  # the first token takes 0.1 s of the whole time
                rate = (tokens - 1) // (CHUNKS - 1) * (CHUNKS - 1) / (tokens / rate - 0.1)
            plain = case(reference.concurrency, rate, tokens)
            quick = replace(plain, samples=plain.samples[:1])
            drafts = replace(plain, acceptance=Acceptance(5000, 1000))
            runs = [(quick, 1)] * (reference.concurrency == 1) + [(plain, 1), (plain, 3), (drafts, 3)]
            columns = ["not measured"] * (reference.concurrency > 1)
            columns += [
                judged(configuration, value, result_of(configuration, [run], workload, starts)).text for run, starts in runs
            ]
            concurrency = f", concurrency {reference.concurrency}" if reference.concurrency > 1 else ""
            lines.append(f"| {value:g}{concurrency} | {speed:g} | {' | '.join(columns)} |")
    return lines


def test_documentation_has_the_verdicts_by_speed() -> None:
    document = (Path(__file__).parents[2] / "docs" / "measurements" / "rates.md").read_text()
    assert "\n".join(verdicts_by_speed()) in document


if __name__ == "__main__":
    print(*verdicts_by_speed(), sep="\n")


def test_short_answers_and_cached_prompts_are_named() -> None:
    result = replace(GOOD, cases=(case(1, 195.0, 4096, completion_tokens=3000, cached_tokens=7),))
    judgement = judged(A, 194.0, result)
    assert judgement.reached
    assert [("3000" in text, "cache" in text) for text in judgement.reasons] == [(True, False), (False, True)]
    assert set(judgement.reasons) <= set(published.comparisons(result))
    assert judged(A, 194.0, GOOD).reasons == ()
