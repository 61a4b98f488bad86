"""Configurations with an ablation, and what it changes: gains of paired starts with their interval, and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose, isfinite

import pytest
from typer.testing import CliRunner

from sm120kit.bench import ablation, compare_results
from sm120kit.bench.result_file import FORMAT, Environment, MeasuredCase, Result
from sm120kit.bench.sample import Exchange, parse_sample
from sm120kit.cli import app
from sm120kit.core.errors import Mismatch
from sm120kit.recipes import configurations, reported

CONFIGURATION = configurations.load("qwen3.8-27b-fp8-1x-rtx-pro-6000")
ABOUT = Environment("http://h", "m", "w", "0" * 64, "off", 0.0, {}, {})
OPTION = reported.ablations_named(CONFIGURATION, ["no-speculation"])[0]


def case(interval: float, text: str, restart: int, context: int = 0) -> MeasuredCase:
    """A request of 11 chunks of a token each, one every ``interval`` seconds."""
    reads = []
    for number in range(11):
        event = {"choices": [{"delta": {"content": text}}]}
        reads.append((1 + number * interval, f"data: {json.dumps(event)}\n\n".encode()))
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 11}}
    reads.append((1 + 10 * interval, f"data: {json.dumps(end)}\n\n".encode()))
    sample = parse_sample(reads, Exchange(0, 0, 0.0, 1 + 10 * interval, 200))
    return MeasuredCase(1, 11, context, (), (sample,), 0.0, None, restart)


def result(*cases: MeasuredCase, temperature: float = 0.0) -> Result:
    return Result(FORMAT, "2026-01-01T00:00:00+00:00", True, replace(ABOUT, temperature=temperature), cases)


def test_gain_is_that_of_paired_starts() -> None:
    """Every start is twice as fast, whatever the machine does meanwhile: the interval has no width."""
    slow, fast = (result(*(case(each * factor, "a", n) for n, each in enumerate((0.1, 0.2, 0.4)))) for factor in (1, 0.5))
    effect = ablation.effect(OPTION, slow, fast)
    (decode,) = [gain for gain in effect.gains if gain.figure == "decode_tok_s"]
    assert isclose(decode.ratio, 2) and decode.interval and all(isclose(end, 2) for end in decode.interval)
    assert effect.answers == ablation.AnswerChanges(0, 3, 0, 2) and effect.answers.text.startswith("answers unchanged")


def test_option_that_the_engine_refuses_is_not_measured() -> None:
    """As recorded; not of a configuration with other arguments than those of the record."""
    name = "gpt-oss-120b-1x-rtx-pro-6000"
    argv = ["bench", "run", name, "--ablate", "b12x-linear,nvfp4-kv", "--model", "absent"]
    refused = CliRunner().invoke(app, argv).exception
    assert isinstance(refused, Mismatch) and "nvfp4-kv: ValueError" in refused.message and "b12x-linear" not in refused.message
    configuration = configurations.load(name)
    assert [each.name for each in ablation.options(configuration, ["b12x-linear"])] == ["b12x-linear"]
    changed = configuration.model_copy(update={"arguments": (*configuration.arguments, "--block-size", "32")})
    assert ablation.options(changed, ["nvfp4-kv"])


def test_interval_is_students() -> None:
    """The logarithms of the ratios are 0 and ln 4: their mean is ln 2, their standard error ln 2, and t is 12.706."""
    gain = compare_results.Gain(1, 1, 0, "decode_tok_s", (10.0, 10.0), (10.0, 40.0))
    assert gain.interval and isclose(gain.ratio, 2)
    assert isclose(gain.interval[0], 2 * 2**-12.706) and isclose(gain.interval[1], 2 * 2**12.706)
    assert replace(gain, before=(10.0,), after=(20.0,)).interval is None
    extreme = replace(gain, before=(1e-300, 1.0), after=(1e300, 1.0)).interval
    assert extreme and extreme[0] == 0 and isfinite(extreme[1])


@pytest.mark.parametrize(
    ("before", "after", "begin"),
    [
        ("aaa", "bbb", "answers changed: 3 of 3"),
        ("aba", "bab", "answers change no more"),
        ("a", "b", "answers changed: 1 of 1"),
    ],
)
def test_answers_are_compared_with_those_of_another_start(before: str, after: str, begin: str) -> None:
    first, second = (result(*(case(0.1, text, start) for start, text in enumerate(texts))) for texts in (before, after))
    assert ablation.effect(OPTION, first, second).answers.text.startswith(begin)


def test_answers_that_cannot_be_compared_are_unknown() -> None:
    random, deep = result(case(0.1, "a", 0), temperature=0.7), result(case(0.1, "a", 0, context=9))
    assert "temperature 0.7" in ablation.effect(OPTION, random, random).answers.text
    assert "random tokens" in ablation.effect(OPTION, deep, deep).answers.text


def test_configuration_with_an_option() -> None:
    known = {each.name: each for each in reported.ablations(CONFIGURATION)}
    sampled = ablation.configured(CONFIGURATION, known["sampled-drafts"])
    drafts = json.loads(sampled.option("--speculative-config") or "")
    assert drafts == {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    assert ablation.configured(CONFIGURATION, known["no-speculation"]).speculation is None
    drafting = [
        configurations.load(f"qwen3.{name}") for name in ("5-122b-nvfp4-2x-rtx-pro-6000-b12x", "8-27b-nvfp4-1x-rtx-5090")
    ]
    having = [{each.name for each in reported.ablations(one)} & {"sampled-drafts"} for one in drafting]
    assert having == [{"sampled-drafts"}, set()], "SGLang samples drafts of MTP layers, and ignores the option with DFLASH"
    four = configurations.load("glm-5.3-flash-nvfp4-4x-rtx-pro-6000")
    ipc = ablation.configured(four, reported.ablations_named(four, ["pcie-ipc"])[0])
    assert ipc.environment == {**four.environment, "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}
    assert ipc.arguments == four.arguments
