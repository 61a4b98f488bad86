"""Syntax of CI scripts and workflows, and the artifact by which CI hands a checked image to the job that publishes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import layout_images
import pytest
import yaml

from sm120kit.core.workspace import Workspace
from sm120kit.images.checks import require_verified
from sm120kit.images.local_images import LocalImages

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci" / "hand_over.sh"


def hand_over(state: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"SM120KIT_STATE": str(state)}
    return subprocess.run([SCRIPT, *map(str, arguments)], env=env, capture_output=True, text=True)


def test_image_is_handed_over_with_its_records(tmp_path: Path) -> None:
    manifest, name = layout_images.add_image(Workspace.open(tmp_path / "built"), (1,))
    assert hand_over(tmp_path / "built", "pack", name, tmp_path / "handed").returncode == 0
    assert hand_over(tmp_path / "publisher", "unpack", tmp_path / "handed").stdout == f"{name}\n"
    workspace = Workspace.open(tmp_path / "publisher")
    assert require_verified(name, LocalImages(workspace), workspace).reference == name
    LocalImages(workspace).layout.verify(manifest)


@pytest.mark.parametrize("name", ["--json", "sm120kit/vllm:1 --key=x", "sm120kit/vllm:1\n--json"])
def test_handed_name_is_not_an_option(tmp_path: Path, name: str) -> None:
    layout_images.add_image(Workspace.open(tmp_path / "built"), (1,))
    hand_over(tmp_path / "built", "pack", name, tmp_path / "handed")
    done = hand_over(tmp_path / "publisher", "unpack", tmp_path / "handed")
    assert done.returncode == 1 and not (tmp_path / "publisher").exists()


def test_handed_link_is_refused(tmp_path: Path) -> None:
    _, name = layout_images.add_image(Workspace.open(tmp_path / "built"), (1,))
    (tmp_path / "built" / "images" / "link").symlink_to("/etc/passwd")
    hand_over(tmp_path / "built", "pack", name, tmp_path / "handed")
    assert hand_over(tmp_path / "publisher", "unpack", tmp_path / "handed").returncode == 1


def test_scripts_and_commands_of_workflows_are_valid_bash() -> None:
    commands = [path.read_text() for path in (ROOT / "ci").glob("*.sh")]
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            commands += [step["run"] for step in job["steps"] if "run" in step]
    assert len(commands) > 8
    for command in commands:
        done = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{command}"
