"""Commands of README and guides: those that need neither GPU, server nor network are run, and all others say what they need."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pasted_commands
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.recipes import configurations

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "patches" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = sorted({line for page in PAGES for line in pasted_commands.of_blocks(page)})

NEEDS: Mapping[str, str] = {
    "build|image|verify image|publish|pull": "downloads and an image: tests/slow/containers",
    "serve|tune|ps|logs|stop|doctor --measure": "a GPU and Docker: tests/integration/test_launch.py",
    "bench|kld|verify server": "a server or its results: tests/integration/test_bench.py, test_published.py",
    "recipe check vlm@0.20.0": "an error that the page shows",
    "explain|doctor|config new|patch import|patch edit|patch export|init": "a file or directory of the reader",
    "recipe (new|lock|update)|patch": "the index, or minutes",
    "plan|tiles": "the Hub, or minutes of compiling",
    "verify|-C": "the laboratory, or a repository of the reader",
    "cache --clean": "what is there is removed: tests/unit/test_cache.py",
}
"""What commands need that are not run here, by their first words."""

RUN = re.compile(
    r"sm120kit (config (list|show)|recipe (list|show|check)|patch check|cache( --clean --dry-run)?$|plan \S+ --gpu)|.* --print$"
)


def runs(line: str) -> str | None:
    """The command that is run for a line, which for ``serve`` of a configuration only prints; None for no command."""
    serves = re.match(r"sm120kit serve (\S+)$", line)
    if serves and serves[1] in configurations.names():
        return f"{line} --print"
    return line if RUN.match(line) and not re.search(r"\bCONFIG\b|\[|vlm@|--model", line) else None


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty state directory, and no Hub: what recipes have on a model is used."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", [line for line in COMMANDS if runs(line)])
@pytest.mark.usefixtures("offline")
def test_pasted_command_succeeds(line: str) -> None:
    done = CliRunner().invoke(app, shlex.split(str(runs(line)))[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout


def test_every_other_command_has_what_it_needs() -> None:
    known = re.compile(rf"sm120kit ({'|'.join(NEEDS)})(?!\w)")
    assert [line for line in COMMANDS if not runs(line) and not known.match(line)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_commands_are_shell(page: Path) -> None:
    for block in pasted_commands.blocks(page):
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert not checked.stderr, block
