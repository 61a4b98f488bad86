"""Recipes, patches and locks are not written into an installation, whose next version deletes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from patch_series import PatchDirectory, two_projects
from typer.testing import CliRunner

import sm120kit
from sm120kit.cli import app
from sm120kit.core.atomic_writes import write_atomic, write_together
from sm120kit.core.data_roots import data_root, require_not_installed, writable_data_root
from sm120kit.core.errors import SystemRefused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data of an installation, with a small series."""
    package = tmp_path / "lib/python3.12/site-packages/sm120kit"
    directory = PatchDirectory(package / "data")
    two_projects(directory)
    shutil.copytree(ROOT / "recipes", directory.path / "recipes")
    monkeypatch.setenv("SM120KIT_DATA", str(directory.path))
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    return directory.path


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


WRITES = {
    "drop": ["patch", "drop", "cutlass/first"],
    "import": ["patch", "import", "absent.diff"],
    "export": ["patch", "export", "flashinfer-0.6.6", "--from", "absent"],
    "rebase": ["patch", "rebase", "flashinfer-0.6.6", "--onto", "flashinfer-0.7.2", "--into", "new"],
    "lock": ["recipe", "lock", "flashinfer-0.6.6", "--upgrade", "--offline"],
    "lock of a base": ["recipe", "lock", "debian-12", "--upgrade", "--offline"],
    "new": ["recipe", "new", "flashinfer@0.9.0", "--offline"],
}


@pytest.mark.parametrize("command", WRITES)
def test_command_refuses_to_write_into_an_installation(command: str, installed: Path, tmp_path: Path) -> None:
    before = files(installed)
    result = CliRunner().invoke(app, WRITES[command])
    assert isinstance(result.exception, SystemRefused)
    assert "part of an installation" in result.exception.message and "SM120KIT_DATA" in result.exception.hint
    assert files(installed) == before and not (tmp_path / "new").exists()


def test_no_file_is_written_into_an_installation(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(installed)
    for path in (installed / "recipes/new.toml", tmp_path / "link/recipes/new.toml"):
        with pytest.raises(SystemRefused):
            write_atomic(path, b"")
        with pytest.raises(SystemRefused):
            write_together({tmp_path / "own": b"", path: b""})
    assert not (installed / "recipes/new.toml").exists() and not (tmp_path / "own").exists()
    write_atomic(tmp_path / "own", b"")


def test_data_inside_the_package_is_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel may be installed below any directory."""
    data = Path(sm120kit.__file__).parent / "cli"
    monkeypatch.setattr("sm120kit.core.data_roots.data_root", lambda: data)
    with pytest.raises(SystemRefused):
        require_not_installed(data / "recipes")
    require_not_installed(tmp_path / "recipes")


def test_clone_and_copy_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert writable_data_root() == data_root()
    (tmp_path / "copy/recipes").mkdir(parents=True)
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "copy"))
    assert writable_data_root() == tmp_path / "copy"
