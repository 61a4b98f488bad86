"""Every configuration's command line against what the engine's own argument parser was seen to know."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit import lock, recipe
from sm120kit.cli import app
from sm120kit.errors import BadRecipe
from sm120kit.recipe import arguments, configuration
from sm120kit.recipe.arguments import Arguments, Option, refusal
from sm120kit.workspace import data_root

COLLECT = runpy.run_path(str(Path(__file__).parents[1] / "arguments" / "collect.py"))
VLLM = "vllm-0.19.1"
GOOD = (data_root() / "recipes" / "configurations" / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml").read_text()


def recorded(name: str) -> Arguments:
    found = arguments.load(name)
    assert found, f"{name}: ask its parser: nox -s arguments -- {name}"
    return found


@pytest.mark.parametrize("name", configuration.names())
def test_every_configuration_passes_its_engines_parser(name: str, tmp_path: Path) -> None:
    wanted = configuration.load(name)
    known = recorded(wanted.engine)
    argv = COLLECT["command_line"](wanted, recipe.load_engine(wanted.engine), tmp_path)
    assert set(wanted.arguments) < set(argv) and "--served-model-name" in argv
    if wanted.unreleased:
        first = wanted.unreleased.arguments[0].split()
        assert f"argument {first[0]}: invalid choice: '{first[1]}'" in known.answers[name]
        for phrase in wanted.unreleased.arguments:
            assert refusal(known, phrase.split()), f"{wanted.engine} knows {phrase}"
        assert refusal(known, arguments.released(wanted)) == ""
    else:
        assert refusal(known, argv) == known.answers[name] == ""


@pytest.mark.parametrize("name", sorted({configuration.load(name).engine for name in configuration.names()}))
def test_the_parser_was_that_of_the_locked_wheel(name: str) -> None:
    known, engine = recorded(name), recipe.load_engine(name)
    (wheel,) = [one for one in lock.read(recipe.lock_path(name)).closures[0].wheels if one.name == engine.engine]
    assert (known.recipe, known.wheel_sha256) == (name, wheel.sha256)
    assert set(known.answers) == {one for one in configuration.names() if configuration.load(one).engine == name}
    assert len(known.options) > 200


@pytest.mark.parametrize(
    ("argv", "said"),
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
def test_what_the_parser_refuses(argv: list[str], said: str) -> None:
    answer = refusal(recorded(VLLM), argv)
    assert said in answer and bool(said) == bool(answer)


def test_an_option_that_was_renamed_is_found() -> None:
    known = recorded(VLLM)
    renamed = tuple(replace(one, names=("--max-context",)) if "--max-model-len" in one.names else one for one in known.options)
    wanted = configuration.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
    assert "--max-model-len" in refusal(replace(known, options=renamed), wanted.arguments)
    assert refusal(known, wanted.arguments) == ""


def test_numbers_among_choices() -> None:
    known = Arguments("x", "", (Option(("--size",), None, "int", ("1", "16")),), {})
    assert refusal(known, ["--size", "16"]) == "" and "invalid choice" in refusal(known, ["--size", "2"])


def test_a_file_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml"
    file.write_text(GOOD)
    assert CliRunner().invoke(app, ["config", "check", str(file)]).exit_code == 0
    file.write_text(GOOD.replace("--max-model-len", "--max-model-length"))
    said = CliRunner().invoke(app, ["config", "check", str(file)])
    assert isinstance(said.exception, BadRecipe)
    assert "vllm-0.19.1 refuses" in said.exception.message and "did you mean '--max-model-len'?" in said.exception.message


def test_what_is_unreleased_is_not_launched(tmp_path: Path) -> None:
    wanted = configuration.load("qwen3.5-122b-nvfp4-2x-rtx-pro-6000")
    arguments.require_known(wanted)
    with pytest.raises(BadRecipe, match="would refuse --fp4-gemm-backend b12x, --moe-runner-backend b12x"):
        arguments.require_released(wanted)
    assert wanted.unreleased
    odd = wanted.unreleased.model_copy(update={"arguments": ("--page-size 64",)})
    with pytest.raises(BadRecipe, match="'--page-size 64' is not in arguments"):
        arguments.released(wanted.model_copy(update={"unreleased": odd}))


def test_evidence_is_as_it_is_written() -> None:
    for name in {configuration.load(name).engine for name in configuration.names()}:
        text = arguments.place_of(name).read_text()
        found = json.loads(text)
        assert COLLECT["written"](name, found["wheel"], found) == text
