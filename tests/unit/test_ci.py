"""Workflows run scripts that are here, on actions that cannot move, with no secret in them. GitHub itself is not asked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sm120kit import recipe

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted((ROOT / "ci").glob("*.sh"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
SECRET = re.compile(r"gh[pousr]_\w{20,}|AKIA\w{16}|-----BEGIN|://[^/\s$]+:[^/\s$]+@")


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


def test_there_are_some() -> None:
    assert {path.name for path in WORKFLOWS} == {"tests.yml", "images.yml"} and len(SCRIPTS) >= 5


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used and all(PINNED.fullmatch(action) for action in used), used
    # Whoever renews a pin must see which release it is.
    assert len(re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", path.read_text(), re.M)) == len(used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_is_run_is_here(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    called = [word for command in commands for word in re.findall(r"(?:^|(?<=\s))\.?ci/[\w./-]+", command)]
    assert commands and called
    for command in commands:
        assert "${{" not in command, f"an expression in a script is code of whoever sets it: {command}"
    for word in called:
        assert os.access(ROOT / word, os.X_OK), f"{path.name} runs {word}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_rights_are_few_and_secrets_are_elsewhere(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert not SECRET.search(text)
    for step in steps(path):
        for name, value in step.get("env", {}).items():
            if re.search("PASSWORD|KEY|TOKEN", name):
                assert value in (f"${{{{ secrets.{name} }}}}", "${{ github.token }}"), f"{path.name}: {name}"


def test_every_locked_engine_has_its_image() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())["jobs"]
    built = {one["recipe"]: one.get("runner", "") for one in jobs["image"]["strategy"]["matrix"]["include"]}
    locks = (ROOT / "recipes" / "engines").glob("*.lock.json")
    engines = {path.name.removesuffix(".lock.json") for path in locks if path.name.startswith(("vllm-", "sglang-"))}
    assert {*built} == engines
    assert {name for name, runner in built.items() if runner == "spark"} == {name for name in engines if "spark" in name}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_failure(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text and os.access(path, os.X_OK)
    assert not SECRET.search(text)


def test_each_recipe_gets_a_base_with_its_python() -> None:
    images = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())["jobs"]["image"]
    for entry in images["strategy"]["matrix"]["include"]:
        wanted = recipe.load_engine(entry["recipe"]).environment.python
        assert entry.get("python", "3_12") == wanted.replace(".", "_"), entry
