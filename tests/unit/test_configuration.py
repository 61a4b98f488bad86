"""Configurations load strictly, and what they name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit import recipe
from sm120kit.doctor import CHECKS
from sm120kit.errors import BadRecipe, UnknownName
from sm120kit.recipe import configuration
from sm120kit.workspace import data_root

GOOD = (data_root() / "recipes" / "configurations" / "qwen3.5-122b-nvfp4-2x-rtx-pro-6000.toml").read_text()


@pytest.mark.parametrize("name", configuration.names())
def test_every_configuration_names_what_exists(name: str) -> None:
    item = configuration.load(name)
    assert set(item.host) <= {check.name for check in CHECKS}
    engine = recipe.load_engine(item.engine)
    bad = {(one.distribution, one.version) for one in item.known_bad}
    assert not bad & {tuple(pin.split("==")) for pin in engine.environment.requires}
    if item.speculation:
        assert any(word.startswith("--speculative") for word in item.arguments)
    flags = [word for word in item.arguments if word.startswith("--")]
    assert len(flags) == len(set(flags))
    size = str(item.tensor_parallel)
    named = [
        item.arguments[at + 1] for at, word in enumerate(item.arguments) if word in ("--tp-size", "--tensor-parallel-size")
    ]
    assert named == ([size] if item.tensor_parallel > 1 else [])


def broken(tmp_path: Path, old: str, new: str) -> str:
    assert old in GOOD
    file = tmp_path / "qwen3.5-122b-nvfp4-2x-rtx-pro-6000.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadRecipe) as caught:
        configuration.load(str(file))
    assert str(file) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('revision = "unpinned"', 'revision = "main"', "model.revision"),
        ("why_unpinned", "why_unpined", "did you mean"),
        ("why_unpinned", "why_unpined", "model.why_unpinned: missing; say why no revision is pinned"),
        ("tensor_parallel = 2", "tensor_parallel = 4", "tensor_parallel: 4, but hardware.gpus is 2"),
        ("tensor_parallel = 2", 'tensor_parallel = "2"', "tensor_parallel: input should be a valid integer"),
        ("[speculation]", "[speculation_]", "model.needs_mtp: true, but there is no speculation"),
        ('reproducibility = "withdrawn"', 'reproducibility = "sure"', "reference.0.reproducibility"),
        ('name = "qwen', 'name = "other-qwen', "is not the file's name"),
        ("edition = 1", "edition = ", "not TOML"),
        ("value = 198.0\n", "", "reference.0.value: missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in broken(tmp_path, old, new)


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    said = broken(tmp_path, "tensor_parallel = 2", "tensor_parallel = 3\nfoo = 1")
    assert "2 problems" in said


def test_a_name_that_is_none() -> None:
    with pytest.raises(UnknownName, match=r"did you mean .*qwen3\.5-397b-nvfp4-4x"):
        configuration.load("qwen3.5-397b-nvfp4-4x-rtx-pro")
