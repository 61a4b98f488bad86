"""Configurations that are made from how servers are started elsewhere: scripts, compose files and recipes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import BadInput
from sm120kit.recipes import configurations, new_repository

LAUNCHES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "data" / "launches.toml").read_text())["launch"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository, in which commands run."""
    own = new_repository.make(tmp_path / "own")
    monkeypatch.chdir(own)
    return own


def import_(launch: dict[str, Any], repository: Path, *options: str) -> Any:
    source = repository / "launch.txt"
    source.write_bytes(launch["text"].encode())
    for name, text in launch.get("files", {}).items():
        (repository / name).write_text(text)
    return CliRunner().invoke(app, ["config", "new", "--from", str(source), "--name", "imported", *options])


@pytest.mark.parametrize("launch", [each for each in LAUNCHES if "refused" not in each], ids=lambda each: each["name"])
def test_launch_becomes_a_configuration(launch: dict[str, Any], repository: Path) -> None:
    result = import_(launch, repository)
    assert result.exit_code == 0, (result.output, result.exception)
    made = configurations.load("imported")
    assert (made.engine, made.model.repository, made.hardware.gpus) == (launch["engine"], launch["model"], launch["gpus"])
    assert list(made.arguments) == launch["arguments"] and made.environment == launch.get("environment", {})
    mounts = {target: source.replace("$HERE", str(repository)) for target, source in launch.get("mounts", {}).items()}
    assert made.hardware.nodes == launch.get("nodes", 1) and made.container.mounts == mounts
    assert made.container.ipc_host == launch.get("ipc_host", False) and made.container.ulimits == launch.get("ulimits", {})
    assert made.container.shm_gib == launch.get("shm_gib", 16)
    assert list(made.container.caches) == launch.get("caches", list(configurations.DEFAULT_CACHES))
    assert (made.speculation.method if made.speculation else None) == launch.get("speculation")
    written = (repository / "configurations" / "imported.toml").read_text()
    for part in launch.get("left_out", ()):
        assert part in result.stderr and f"left out: {part}".split()[-1] in written, part
    assert "hf_" not in written and "sk-123" not in written, "secrets are not copied"
    checked = CliRunner().invoke(app, ["config", "check", "imported"])
    assert checked.exit_code == 0 and checked.stdout == "ok imported\n"


@pytest.mark.parametrize("launch", [each for each in LAUNCHES if "refused" in each], ids=lambda each: each["name"])
def test_launch_is_refused_with_every_problem(launch: dict[str, Any], repository: Path) -> None:
    result = import_(launch, repository)
    assert isinstance(result.exception, BadInput), result.output
    assert "launch.txt" in result.exception.message and result.exception.hint
    for part in launch["refused"]:
        assert part in result.exception.message
    assert not [*(repository / "configurations").glob("*.toml")], "nothing is half done"
