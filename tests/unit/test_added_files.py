"""``[[files]]`` of a recipe: texts that are added to the image, by hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from small_engine import ENGINE, KERNELS
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.core.errors import BadInput, Mismatch, Sm120kitError
from sm120kit.recipes.added_files import MAX_BYTES, read_added

TEXT = "{{ messages }}\n"


class Site:
    def __init__(self, root: Path) -> None:
        self.engines, self.files = root / "recipes" / "engines", root / "files"
        self.engines.mkdir(parents=True)
        (self.files / "chat").mkdir(parents=True)
        self.template = self.files / "chat/x.jinja"
        self.template.write_text(TEXT)
        (self.engines / "flashinfer-1.0.toml").write_text(KERNELS.format(sha256="0" * 64))

    def recipe(self, path: str = "chat/x.jinja", sha256: str = "", again: int = 1) -> recipes.EngineRecipe:
        digest = sha256 or hashlib.sha256(TEXT.encode()).hexdigest()
        table = f'[[files]]\npath = "{path}"\nsha256 = "{digest}"\nreason = "a template"\n' * again
        (self.engines / "vllm-9.0.toml").write_text(f"{ENGINE}\n{table}")
        return recipes.load_engine("vllm-9.0")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    return Site(tmp_path)


def test_files_are_read_by_hash_and_are_inputs(site: Site) -> None:
    recipe = site.recipe()
    assert read_added(recipe) == {"chat/x.jinja": TEXT}
    (entry,) = recipe.inputs()["files"]
    assert entry == {"path": "chat/x.jinja", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    assert "files" not in site.recipe(again=0).inputs(), "other lockfiles stay as they are"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", ".hidden", "a/../b", "x" + "/y" * 8, ""])
def test_path_that_leaves_the_directory_is_refused(path: str, site: Site) -> None:
    with pytest.raises(BadInput, match="files"):
        site.recipe(path)


def test_file_named_twice_is_refused(site: Site) -> None:
    with pytest.raises(BadInput, match="twice"):
        site.recipe(again=2)


@pytest.mark.parametrize("change", ["edited", "absent", "directory", "binary", "large", "fifo"])
def test_file_that_is_another_is_refused(change: str, site: Site) -> None:
    recipe = site.recipe()
    site.template.unlink()
    if change == "edited":
        site.template.write_text(TEXT + "\n")
    elif change == "directory":
        site.template.mkdir()
    elif change == "binary":
        site.template.write_bytes(b"\xff\xfe\x00")
    elif change == "large":
        site.template.write_bytes(b"x" * (MAX_BYTES + 1))
    elif change == "fifo":
        os.mkfifo(site.template)
    error: type[Sm120kitError] = Mismatch if change == "edited" else BadInput
    with pytest.raises(error, match=r"x\.jinja") as caught:
        read_added(recipe)
    assert caught.value.hint
    checked = CliRunner().invoke(app, ["recipe", "check", "vllm-9.0"]).exception
    assert type(checked) is error and checked.message == caught.value.message
