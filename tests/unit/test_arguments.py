"""Every configuration's command line against the recorded options of its engine's argument parser."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.core.errors import BadRecipe
from sm120kit.core.state import data_root
from sm120kit.recipes import arguments, configurations, lockfile
from sm120kit.recipes.arguments import Arguments, Option, rejection
from sm120kit.wheels import parser_options

COLLECT = runpy.run_path(str(Path(__file__).parents[1] / "arguments" / "collect.py"))
VLLM = "vllm-0.19.1"
GOOD = (data_root() / "recipes" / "configurations" / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml").read_text()


def recorded(name: str) -> Arguments:
    record = arguments.load(name)
    assert record, f"{name}: record its options: nox -s arguments -- {name}"
    return record


@pytest.mark.parametrize("name", configurations.names())
def test_every_configuration_is_accepted_by_its_engines_parser(name: str, tmp_path: Path) -> None:
    configuration = configurations.load(name)
    known = recorded(configuration.engine)
    argv = COLLECT["command_line"](configuration, recipes.load_engine(configuration.engine), tmp_path)
    assert set(configuration.arguments) < set(argv) and "--served-model-name" in argv
    assert rejection(known, argv) == known.answers[name] == ""


@pytest.mark.parametrize("name", sorted({configurations.load(name).engine for name in configurations.names()}))
def test_options_were_recorded_from_the_locked_wheel(name: str) -> None:
    known, engine = recorded(name), recipes.load_engine(name)
    (wheel,) = [
        wheel
        for wheel in lockfile.read(recipes.lock_path(recipes.locate(name))).closures[0].wheels
        if wheel.name == engine.engine
    ]
    assert (known.recipe, known.wheel_sha256) == (name, wheel.sha256)
    served = {configuration for configuration in configurations.names() if configurations.load(configuration).engine == name}
    assert set(known.answers) == served
    assert len(known.options) > 200


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-model-len", "4096", "--enable-prefix-caching"], ""),
        (["/model", "--max-model-length", "4096"], "unknown argument --max-model-length; did you mean '--max-model-len'?"),
        (["--max_model_len", "4096"], "did you mean '--max-model-len'?"),
        (["--tensor-parallel-siz", "4"], "did you mean '--tensor-parallel-size'?"),
        (["--kv-cache-dtype", "fp9"], "invalid choice: 'fp9'"),
        (["--gpu-memory-utilization", "most"], "invalid"),
        (["--max-num-seqs"], "expected one argument"),
        (["--enable-prefix-caching", "--no-such-thing", "x"], "unknown argument --no-such-thing"),
    ],
)
def test_unknown_and_invalid_arguments_are_rejected(argv: list[str], message: str) -> None:
    reason = rejection(recorded(VLLM), argv)
    assert message in reason and bool(message) == bool(reason)


def test_renamed_option_is_detected() -> None:
    known = recorded(VLLM)
    renamed = tuple(
        replace(option, names=("--max-context",)) if "--max-model-len" in option.names else option for option in known.options
    )
    configuration = configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
    assert "--max-model-len" in rejection(replace(known, options=renamed), configuration.arguments)
    assert rejection(known, configuration.arguments) == ""


def test_choices_of_numbers() -> None:
    known = Arguments("x", "", (Option(("--size",), None, "int", ("1", "16")),), {})
    assert rejection(known, ["--size", "16"]) == "" and "invalid choice" in rejection(known, ["--size", "2"])


def test_config_check_of_user_file(tmp_path: Path) -> None:
    file = tmp_path / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml"
    file.write_text(GOOD)
    assert CliRunner().invoke(app, ["config", "check", str(file)]).exit_code == 0
    file.write_text(GOOD.replace("--max-model-len", "--max-model-length"))
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert isinstance(result.exception, BadRecipe)
    assert "vllm-0.19.1 rejects" in result.exception.message and "did you mean '--max-model-len'?" in result.exception.message


def test_argument_that_needs_an_extra_requires_it_of_the_lockfile() -> None:
    loading = configurations.load("minimax-m2.5-nvfp4-2x-rtx-pro-6000")
    assert "fastsafetensors" in loading.arguments and arguments.missing_extras(loading) == ()
    streamed = loading.model_copy(update={"arguments": ("--load-format=runai_streamer",)})
    assert arguments.missing_extras(streamed) == ("runai-model-streamer",)
    with pytest.raises(BadRecipe, match=r"need runai-model-streamer, which the lockfile of vllm-0\.19\.1 lacks"):
        arguments.require_known(streamed)
    for option in ("--moe-backend", "--linear-backend"):
        fused = loading.model_copy(update={"engine": "vllm-0.20.0", "arguments": (option, "b12x")})
        assert arguments.missing_extras(fused) == ("b12x",)


@pytest.mark.parametrize(("changed", "kept"), [({}, True), ({"wheel": {}}, False), ({"options": []}, False)])
def test_answers_stay_if_the_parser_is_the_same(changed: dict[str, Any], kept: bool) -> None:
    text = arguments.record_path("vllm-0.19.1").read_text()
    record = json.loads(text)
    new = parser_options.record_text(record["recipe"], record["wheel"], record | {"answers": {}})
    before = json.dumps(record | changed)
    assert parser_options.with_answers(new, before) == (text if kept else new)


def test_committed_records_are_in_written_form() -> None:
    for name in {configurations.load(name).engine for name in configurations.names()}:
        text = arguments.record_path(name).read_text()
        record = json.loads(text)
        assert parser_options.record_text(name, record["wheel"], record) == text
