"""Recipes are read strictly and every problem is told at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sm120kit import recipe
from sm120kit.errors import BadRecipe, UnknownName
from sm120kit.records import Arch, Inside, SdistPin

GOOD = recipe.directory() / "flashinfer-0.6.6.toml"


def edited(tmp_path: Path, *changes: tuple[str, str], add: str = "") -> Path:
    text = GOOD.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / GOOD.name
    path.write_text(text + add)
    return path


@pytest.mark.parametrize("name", recipe.names(recipe.Recipe))
def test_every_recipe_of_kernels_is_well_formed(name: str) -> None:
    item = recipe.load(name)
    assert item.name == name
    assert isinstance(item.pin, SdistPin) and re.fullmatch("[0-9a-f]{64}", item.pin.sha256)


def test_spellings_of_one_recipe() -> None:
    by_name = recipe.load("flashinfer-0.6.6")
    assert recipe.load("flashinfer@0.6.6") == by_name == recipe.load(str(GOOD))
    assert recipe.load("flashinfer") == by_name
    assert by_name.inside == (Inside("cutlass", "3rdparty/cutlass", "4.2.1"),)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'flashinfer-0.6.6'"):
        recipe.load("flashinfer-0.6.7")


def test_all_problems_in_one_error(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        ('sha256 = "0730', 'sha25 = "0730'),
        ("edition = 1", 'edition = "1"'),
        ('summary = "the release', 'sumary = "the release'),
        ('modules = ["fused_moe_120"]', 'modules = ["fused_mo_120"]'),
        ('path = "3rdparty/cutlass"', 'path = "../elsewhere"'),
        add='\n[sources.x]\ngit = "https://host.invalid/x"\nversion = "1"\ncommit = "main"\n[sources.y]\nversion = "1"\n',
    )
    with pytest.raises(BadRecipe) as caught:
        recipe.load(str(path))
    message = caught.value.message
    for part in (
        str(path),
        "sources.flashinfer.sha256: missing",
        "sources.flashinfer.sha25: unknown key; did you mean 'sha256'?",
        "edition: input should be 1; it is '1'",
        "sumary: unknown key; did you mean 'summary'?",
        "no module 'fused_mo_120'; did you mean 'fused_moe_120'?",
        "'../elsewhere' is not a path below the source",
        "'main' is not a commit (40 hexadecimal digits; a branch or tag can move)",
        "needs exactly one of the keys sdist, git, inside",
        "exactly one must be fetched",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('sha256 = "0730', 'sha256 = "0731zz', "is not a sha256"),
        ('inside = "flashinfer"', 'inside = "flashinfe"', "'flashinfe' is not a fetched source; did you mean 'flashinfer'?"),
        ('default_group = "quick"', 'default_group = "quik"', "no group 'quik'; did you mean 'quick'?"),
        ('name = "flashinfer-0.6.6"', 'name = "flashinfer-0.6.5"', "is not the file's name"),
        ('archs = ["sm_120f"]', 'archs = ["sm_100a"]', "archs.0"),
        ("edition = 1", "edition = = 1", "not TOML"),
    ],
)
def test_one_problem(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(BadRecipe, match=re.escape(said)):
        recipe.load(str(edited(tmp_path, (old, new))))


def test_group_and_arch_by_name() -> None:
    item = recipe.load("flashinfer")
    assert recipe.group(item, None) == item.groups["quick"]
    with pytest.raises(UnknownName, match="did you mean 'fused-moe'"):
        recipe.group(item, "fused-mo")
    assert recipe.parse_arch("sm_121a") is Arch.SM_121A
    with pytest.raises(UnknownName, match="did you mean 'sm_120"):
        recipe.parse_arch("sm_120")


@pytest.mark.filterwarnings("error")
def test_a_recipe_can_be_printed_and_read_again() -> None:
    item = recipe.load("flashinfer")
    assert recipe.Recipe.model_validate_json(item.model_dump_json()) == item


def test_schema_knows_every_key() -> None:
    schema = json.loads(recipe.json_schema())
    assert [item["$ref"] for item in schema["anyOf"]] == ["#/$defs/Recipe", "#/$defs/EngineRecipe"]
    kernels, engine = schema["$defs"]["Recipe"], schema["$defs"]["EngineRecipe"]
    assert kernels["additionalProperties"] is engine["additionalProperties"] is False
    assert set(kernels["required"]) >= {"edition", "engine", "sources", "modules", "groups"}
    assert set(engine["required"]) >= {"edition", "engine", "flashinfer", "environment", "state"}


ENGINE = recipe.directory() / "sglang-0.5.11.toml"


@pytest.mark.parametrize("name", recipe.names(recipe.EngineRecipe))
def test_every_recipe_of_an_engine_is_well_formed(name: str) -> None:
    item = recipe.load_engine(name)
    assert item.name == name and item.name.startswith(f"{item.engine}-{item.version}")
    assert item.kernels in recipe.load(item.flashinfer).groups
    assert item.built and item.official, "says what is built, what stays official, and why"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"b12x==0.8.3"', '"b12x"', "environment.requires.1: 'b12x' is not pinned: write name==version"),
        ('"b12x==0.8.3"', '"b12x>=0.8.3"', "is not pinned: write name==version"),
        ('"b12x==0.8.3"', '"b12x==0.8.*"', "is not pinned: write name==version"),
        ('"b12x==0.8.3"', '"b12x==0.7.4"', "b12x 0.7.4 is known to be bad: its author reverted it"),
        ('"b12x==0.8.3"', '"b12x==0.9.5"', "b12x 0.9.5 is known to be bad: a tile heuristic"),
        ('"sglang==0.5.11"', '"sglang==0.5.10"', "has no 'sglang==0.5.11', the engine itself"),
        ("manylinux_2_35_x86_64", "linux_x86_64", "'linux_x86_64' is not a platform: write manylinux_2_<glibc>_x86_64"),
        ("manylinux_2_35_x86_64", "win_amd64", "is not a platform"),
        ('as_of = "2026-05-08"', 'as_of = "May"', "'May' is not a day: write YYYY-MM-DD"),
        ('state = "verified"', 'state = "tested"', "state: input should be 'resolved' or 'verified'; it is 'tested'"),
        ('engine = "sglang"', 'engine = "llama"', "engine: input should be 'flashinfer'"),
        ('serve = ["python"', 'serv = ["python"', "serv: unknown key; did you mean 'serve'?"),
        ("[environment]", "[enviroment]", "enviroment: unknown key; did you mean 'environment'?"),
        ("as_of =", "asof =", "environment.asof: unknown key; did you mean 'as_of'?"),
        (
            'name = "sglang-0.5.11"',
            'name = "sglang-0.5.11"\nbase_image = "debian:12"',
            "base_image: 'debian:12' is not well-formed",
        ),
    ],
)
def test_one_problem_of_an_engine(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = ENGINE.read_text()
    assert old in text
    path = tmp_path / ENGINE.name
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadRecipe, match=re.escape(said)):
        recipe.load_any(str(path))


def test_an_engine_alone_means_the_newest_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "recipes" / "engines"
    place.mkdir(parents=True)
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    for version in ("0.9.0", "0.10.0", "0.11.0"):
        text = ENGINE.read_text().replace("0.5.11", version).replace('state = "verified"', 'state = "resolved"')
        (place / f"sglang-{version}.toml").write_text(text)
    with pytest.raises(UnknownName, match="none is verified yet") as caught:
        recipe.load_engine("sglang")
    assert caught.value.hint == "name one with its version: sglang@0.9.0, sglang@0.10.0, sglang@0.11.0"
    for version in ("0.9.0", "0.10.0"):
        path = place / f"sglang-{version}.toml"
        path.write_text(path.read_text().replace('state = "resolved"', 'state = "verified"'))
    assert recipe.load_engine("sglang").version == "0.10.0"


def test_kinds_are_not_mixed_up() -> None:
    with pytest.raises(UnknownName, match="has no kernels of its own") as caught:
        recipe.load("vllm@0.19.1")
    assert caught.value.hint == "it rests on flashinfer-0.6.6"
    with pytest.raises(UnknownName, match="a recipe of kernels, not of an engine"):
        recipe.load_engine("flashinfer")
    assert set(recipe.names()) == {*recipe.names(recipe.Recipe), *recipe.names(recipe.EngineRecipe)}
