"""Commands of other distributions: found by their entry points, and named with the remedy where they are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sm12x_lab.cli import app as laboratory
from sm12x_lab.cli.commands import COMMANDS
from sm120kit.cli import app, plugins
from sm120kit.core.errors import RequirementMissing, ResourceUnavailable

TOY = """
from sm120kit.cli.tree import Leaf
from sm120kit.core import console

def toy(name: str = "nobody") -> None:
    '''Print a name.'''
    console.data(f"toy of {name}")

COMMANDS = {path: Leaf("toy.plugin:toy", "Print a name") for path in (("verify", "toy"), ("verify", "image"))}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_commands_of_an_installed_distribution(tmp_path: Path) -> None:
    """A distribution of somebody else adds a command, and replaces none."""
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "plugin.py").write_text(TOY)
    (tmp_path / "toy-1.dist-info").mkdir()
    (tmp_path / "toy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (tmp_path / "toy-1.dist-info" / "entry_points.txt").write_text("[sm120kit.commands]\ntoy = toy.plugin:COMMANDS\n")

    def sm120kit(*words: str, **variables: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
        done = subprocess.run([sys.executable, "-m", "sm120kit", *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Print a name" in sm120kit("verify", "--help")
    assert sm120kit("verify", "toy", SM120KIT_VERIFY_TOY_NAME="a variable") == "toy of a variable\n"
    assert "--name" not in sm120kit("verify", "image", "--help")


def test_distribution_of_which_only_the_metadata_is_found_is_not_installed(tmp_path: Path) -> None:
    """As in an environment without `site`, which finds no editable install."""
    (tmp_path / "gone-1.dist-info").mkdir()
    (tmp_path / "gone-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    groups = "[sm120kit.commands]\na = gone.cli:COMMANDS\n[sm120kit.laboratory]\ntoy = gone.tiles:add\nbroken = toy:add\n"
    (tmp_path / "gone-1.dist-info" / "entry_points.txt").write_text(groups)
    (tmp_path / "toy.py").write_text("import gone_too\n")
    program = "from sm120kit.cli import plugins; plugins.commands(); print(plugins.function('toy')); plugins.function('broken')"
    argv, environment = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.stdout == "None\n" and "No module named 'gone_too'" in done.stderr, "an error inside a plugin is not hidden"


@pytest.fixture
def _without_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(plugins, "commands", plugins.commands.__wrapped__)


@pytest.mark.usefixtures("_without_laboratory")
def test_without_the_laboratory_its_commands_are_not_listed_and_name_the_remedy() -> None:
    assert {*COMMANDS} == plugins.ELSEWHERE
    for group, name in plugins.ELSEWHERE:
        assert f"\n  {name} " not in run(group, "--help").stdout
        error = run(group, name, "x").exception
        assert isinstance(error, RequirementMissing) and error.hint.startswith("pip install sm12x-lab")
    assert run("verify", "nothing").exit_code == 2


@pytest.mark.usefixtures("_without_laboratory")
def test_without_the_laboratory_tiles_are_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm120kit.cli.tiles._tile_numbers", lambda: None)
    error = run("tiles", "flashinfer", "--emulate").exception
    assert isinstance(error, RequirementMissing) and "--emulate" in error.message


@pytest.mark.usefixtures("_without_laboratory")
def test_configuration_file_may_have_tables_of_the_laboratory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[verify.run]\nfast = true\n")
    monkeypatch.setenv("SM120KIT_CONFIG", str(tmp_path / "config.toml"))
    assert run("config", "list", "--all").exit_code == 0


def test_program_of_the_laboratory_has_variables_and_tables_of_sm120kit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("[verify.run]\nreceipt = '/nowhere/receipt.json'\n[build]\njobs = 1\n")
    monkeypatch.setenv("SM120KIT_CONFIG", str(tmp_path / "config.toml"))
    done = CliRunner().invoke(laboratory, ["run", "--", "true"])
    assert "/nowhere/receipt.json" in str(done.exception), "the table is read, and the rest of the file accepted"
    monkeypatch.delenv("SM120KIT_CONFIG")
    done = CliRunner().invoke(laboratory, ["run", "--", "true"])
    assert isinstance(done.exception, ResourceUnavailable)
    assert CliRunner().invoke(laboratory, ["--version"]).stdout.startswith("sm12x-lab ")


def test_laboratory_without_costs_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed before it had them."""
    every = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **named: () if named.get("name") == "tile_costs" else every(**named))
    error = run("tiles", "flashinfer-0.6.6", "--cost").exception
    assert isinstance(error, RequirementMissing) and "--cost" in error.message
