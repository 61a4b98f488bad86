"""Recipes: strict validation, every problem in one error, names and kinds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, NotFound
from sm120kit.core.records import Arch
from sm120kit.sources.source_records import SdistPin, VendoredProject

GOOD = recipes.path_of("flashinfer-0.6.6")


def edited(tmp_path: Path, *changes: tuple[str, str], add: str = "") -> Path:
    text = GOOD.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / GOOD.name
    path.write_text(text + add)
    return path


@pytest.mark.parametrize("name", recipes.names(recipes.FlashInferRecipe))
def test_every_flashinfer_recipe_is_well_formed(name: str) -> None:
    recipe = recipes.load_flashinfer(name)
    assert recipe.name == name
    assert isinstance(recipe.pin, SdistPin) and re.fullmatch("[0-9a-f]{64}", recipe.pin.sha256)


def test_forms_of_a_recipe_name() -> None:
    by_name = recipes.load_flashinfer("flashinfer-0.6.6")
    assert recipes.load_flashinfer("flashinfer@0.6.6") == by_name == recipes.load_flashinfer(str(GOOD))
    assert recipes.load_flashinfer("flashinfer") == by_name
    assert by_name.inside == (VendoredProject("cutlass", "3rdparty/cutlass", "4.2.1"),)


def test_unknown_recipe_suggests_similar_name() -> None:
    with pytest.raises(NotFound, match=r"did you mean 'flashinfer-0.6.6'"):
        recipes.load_flashinfer("flashinfer-0.6.66")


def test_all_problems_in_one_error(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        ('sha256 = "0730', 'sha25 = "0730'),
        ("edition = 1", 'edition = "1"'),
        ('summary = "the release', 'sumary = "the release'),
        ('path = "3rdparty/cutlass"', 'path = "../elsewhere"'),
        add='\n[sources.x]\ngit = "https://host.invalid/x"\nversion = "1"\ncommit = "main"\n[sources.y]\nversion = "1"\n',
    )
    with pytest.raises(BadInput) as caught:
        recipes.load_flashinfer(str(path))
    message = caught.value.message
    for part in (
        str(path),
        "sources.flashinfer.sha256: missing",
        "sources.flashinfer.sha25: unknown key; did you mean 'sha256'?",
        "edition: input should be 1; it is '1'",
        "sumary: unknown key; did you mean 'summary'?",
        "'../elsewhere' is not a path below the source",
        "'main' is not a commit (40 hexadecimal digits; a branch or tag can move)",
        "needs exactly one of the keys sdist, git, inside",
    ):
        assert part in message, part


def test_all_undefined_names_in_one_error(tmp_path: Path) -> None:
    path = edited(
        tmp_path,
        ('modules = ["fused_moe_120"]', 'modules = ["fused_mo_120"]'),
        ('default_group = "quick"', 'default_group = "quik"'),
        add=f'\n[sources.x]\ngit = "https://host.invalid/x"\nversion = "1"\ncommit = "{"0" * 40}"\n',
    )
    with pytest.raises(BadInput, match="3 problems") as caught:
        recipes.load_flashinfer(str(path))
    for part in (
        "no module 'fused_mo_120'",
        "no group 'quik'",
        "exactly one must have sdist or git; these have: flashinfer, x",
    ):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('sha256 = "0730', 'sha256 = "0731zz', "is not a sha256"),
        ('inside = "flashinfer"', 'inside = "flashinfe"', "'flashinfe' is not a fetched source; did you mean 'flashinfer'?"),
        ('default_group = "quick"', 'default_group = "quik"', "no group 'quik'; did you mean 'quick'?"),
        ('name = "flashinfer-0.6.6"', 'name = "flashinfer-0.6.5"', "is not the file's name"),
        ('archs = ["sm_120f"]', 'archs = ["sm_100a"]', "archs.0"),
        ("edition = 1", "edition = = 1", "not TOML"),
        ("edition = 1", f"edition = {'9' * 5000}", "not TOML"),
        ('default_group = "quick"', "default_group = {}", "default_group: input should be a valid string"),
        (r"LAUNCHER\(\w+", r"LAUNCHER(\w+", "fp4_gemm_cutlass_sm120.regroup.0.instantiation: is no regular expression"),
    ],
)
def test_single_problem_is_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        recipes.load_flashinfer(str(edited(tmp_path, (old, new))))


def test_group_and_arch_by_name() -> None:
    recipe = recipes.load_flashinfer("flashinfer")
    assert recipes.group(recipe, None) == recipe.groups["quick"]
    with pytest.raises(NotFound, match="did you mean 'fused-moe'"):
        recipes.group(recipe, "fused-mo")
    assert recipes.parse_arch("sm_121a") is Arch.SM_121A
    with pytest.raises(NotFound, match="did you mean 'sm_120"):
        recipes.parse_arch("sm_120")


@pytest.mark.filterwarnings("error")
def test_recipe_json_round_trip() -> None:
    recipe = recipes.load_flashinfer("flashinfer")
    assert recipes.FlashInferRecipe.model_validate_json(recipe.model_dump_json()) == recipe


ENGINE = recipes.path_of("sglang-0.5.11")


@pytest.mark.parametrize("name", recipes.names(recipes.EngineRecipe))
def test_every_engine_recipe_is_well_formed(name: str) -> None:
    recipe = recipes.load_engine(name)
    assert recipe.name == name and recipe.name.startswith(f"{recipe.engine}-{recipe.version}")
    assert recipe.kernels in recipes.load_flashinfer(recipe.flashinfer).groups
    assert recipe.built and recipe.upstream, "lists the parts that are built and those that stay upstream"


@pytest.mark.parametrize(
    ("old", "new", "message"),
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
        ('engine = "sglang"', 'engine = "llama"', "engine: 'llama' is none of flashinfer, vllm, sglang"),
        ('base = "', 'base_image = "', "base_image: an image is no base any more"),
        ('serve = ["python"', 'serv = ["python"', "serv: unknown key; did you mean 'serve'?"),
        ("[environment]", "[enviroment]", "enviroment: unknown key; did you mean 'environment'?"),
        ("as_of =", "asof =", "environment.asof: unknown key; did you mean 'as_of'?"),
    ],
)
def test_single_problem_of_engine_recipe_is_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = ENGINE.read_text()
    assert old in text
    path = tmp_path / ENGINE.name
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput, match=re.escape(message)):
        recipes.load(str(path))


def test_a_recipe_of_the_first_edition_may_have_the_source_of_kernels(tmp_path: Path) -> None:
    path = tmp_path / ENGINE.name
    path.write_text(f'{ENGINE.read_text()}\n[kernel_source]\nsha256 = "{"a" * 64}"\ncutlass = "4.2.1"\n')
    assert recipes.load(str(path)) == recipes.load(str(ENGINE))


def test_packages_to_patch_are_named_once(tmp_path: Path) -> None:
    text = (recipes.path_of("sglang-0.5.11-b12x")).read_text()
    path = tmp_path / "sglang-0.5.11-b12x.toml"
    path.write_text(text)
    (patched,) = recipes.load_engine(str(path)).patched
    assert (patched.pin.project, patched.pin.version, patched.pin.filename) == ("b12x", "0.8.3", patched.wheel)
    table = text[text.index("[[patched]]") :].partition("\n\n")[0]
    for again, name in ((table, "b12x"), (table.replace("b12x-0.8.3", "sglang-0.5.11"), "sglang")):
        path.write_text(text.replace(table, f"{table}\n{again}"))
        with pytest.raises(BadInput, match=f"patched: {name} twice"):
            recipes.load(str(path))


def test_files_left_out_decide_the_result_and_their_reasons_do_not(tmp_path: Path) -> None:
    text = (recipes.path_of("vllm-0.33.0")).read_text()
    path = tmp_path / "vllm-0.33.0.toml"

    def inputs(text: str) -> Any:
        path.write_text(text)
        read = recipes.load(str(path)).inputs()
        return read.get("leave_out"), read.get("wrong_record")

    without = text[: text.index("[[leave_out]]")]
    assert inputs(without) == (None, None)
    left, wrong = inputs(text)
    assert {"distribution": "vllm", "files": ["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]} in left
    assert wrong == [{"distribution": "pynvvideocodec", "files": ["PyNvVideoCodec/PyNvVideoCodec_*.so"]}]
    assert inputs(text.replace("code for sm_90a only", "others")) == (left, wrong)
    for pattern in ("../x.so", "/x.so", "a b.so", "a,b.so", "a:b.so"):
        with pytest.raises(BadInput, match=r"leave_out\.1\.files\.0: .* is not a path below site-packages"):
            inputs(text.replace("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", pattern))


@pytest.mark.parametrize("name", ["vllm-next", "forked"])
def test_file_whose_name_has_no_version_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named once, and others can be used: it may be a recipe that is used by its path."""
    directory = tmp_path / "recipes" / "engines"
    directory.mkdir(parents=True)
    for other in ("patches", "cutlass_overrides"):
        (tmp_path / other).mkdir()
    (directory / f"{name}.toml").write_text("")
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    (directory / "vllm-9.0.toml").write_text("")
    said: list[str] = []
    monkeypatch.setattr(reporting, "warn", said.append)
    assert recipes.names() == recipes.names() == ["vllm-9.0"]
    assert len(said) == 1 and f"{name}.toml" in said[0]


def test_bare_engine_name_is_its_newest_verified_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "recipes" / "engines"
    directory.mkdir(parents=True)
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    for version in ("0.9.0", "0.10.0", "0.11.0"):
        text = ENGINE.read_text().replace("0.5.11", version).replace('state = "verified"', 'state = "resolved"')
        (directory / f"sglang-{version}.toml").write_text(text)
    with pytest.raises(NotFound, match="none is verified yet") as caught:
        recipes.load_engine("sglang")
    assert caught.value.hint.endswith("sglang@0.9.0, sglang@0.10.0, sglang@0.11.0")
    for version in ("0.9.0", "0.10.0"):
        path = directory / f"sglang-{version}.toml"
        path.write_text(path.read_text().replace('state = "resolved"', 'state = "verified"'))
    assert recipes.load_engine("sglang").version == "0.10.0"
    variant = (directory / "sglang-0.10.0.toml").read_text().replace('name = "sglang-0.10.0"', 'name = "sglang-0.10.0-b12x"')
    (directory / "sglang-0.10.0-b12x.toml").write_text(variant)
    assert recipes.load_engine("sglang").name == "sglang-0.10.0", "a variant is named in full"


def test_load_rejects_recipe_of_other_kind() -> None:
    with pytest.raises(NotFound, match="lists no kernels") as caught:
        recipes.load_flashinfer("vllm@0.19.1")
    assert "FlashInfer are those of flashinfer-0.6.6" in caught.value.hint
    assert "vllm" in caught.value.hint, "the engine has kernels of its own"
    with pytest.raises(NotFound, match="a FlashInfer recipe, not a recipe of an engine"):
        recipes.load_engine("flashinfer")
    assert set(recipes.names()) == {*recipes.names(recipes.FlashInferRecipe), *recipes.names(recipes.EngineRecipe)}
