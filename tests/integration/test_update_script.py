"""The script of the workflow `update`: what it leaves for a pull request, and what it refuses to propose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_engine import make_wheel

ROOT = Path(__file__).parents[2]


def update(action: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the workflow `update`; `propose` prints its commands."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "DRY_RUN": "1", "PATH": path, **environment}
    return subprocess.run([ROOT / "ci" / "update.sh", action, directory], env=variables, capture_output=True, text=True)


def proposal(directory: Path, releases: str, *files: str, body: str = "") -> Path:
    """A directory as `update.sh make` leaves it."""
    (directory / "engines").mkdir(parents=True)
    (directory / "releases").write_text(releases)
    (directory / "body.md").write_text(body)
    for name in files:
        (directory / "engines" / name).write_text("")
    return directory


def test_day_without_a_release_leaves_an_artifact_and_proposes_nothing(tmp_path: Path) -> None:
    mirror, engines, out = tmp_path / "mirror", tmp_path / "data" / "recipes" / "engines", tmp_path / "out"
    for directory in (mirror, engines, tmp_path / "data" / "patches", tmp_path / "data" / "cutlass_overrides"):
        directory.mkdir(parents=True)
    for engine, distribution in (("flashinfer", "flashinfer-python"), ("vllm", "vllm"), ("sglang", "sglang")):
        make_wheel(mirror, distribution, "1.0")
        (engines / f"{engine}-1.0.toml").write_text("")
    variables = {name: str(tmp_path / name.lower()) for name in ("SM120KIT_STATE", "SM120KIT_DATA")}
    variables["SM120KIT_DATA"], variables["SM120KIT_MIRROR"] = str(tmp_path / "data"), str(mirror)
    made = update("make", out, **variables)
    assert made.returncode == 0 and "no release is newer" in made.stdout, made.stderr
    assert [path.name for path in out.iterdir()] == ["releases"], "an artifact without files is none, and cannot be downloaded"
    assert update("propose", out).stdout == "nothing to propose\n"


@pytest.mark.parametrize(
    ("releases", "files", "refused"),
    [
        ("vllm-9.0:main\n", ("vllm-9.0.toml",), "releases is no release"),
        ("vllm-9.0\n--title=x\n", ("vllm-9.0.toml",), "releases is no release"),
        ("vllm-9.0\n", ("vllm-9.0.toml", "README.md"), "README.md is no new recipe"),
        ("vllm-9.0\n", ("vllm-9.0.toml", "vllm-0.19.1.lock.json"), "vllm-0.19.1.lock.json is no new recipe"),
        ("vllm-9.0\n", (), "is no new recipe"),
    ],
)
def test_only_new_recipes_are_proposed(tmp_path: Path, releases: str, files: tuple[str, ...], refused: str) -> None:
    done = update("propose", proposal(tmp_path / "out", releases, *files))
    assert done.returncode == 1 and f"{refused}\n" in done.stderr and not done.stdout, done.stdout


def test_text_title_and_branch_of_a_pull_request_are_within_their_limits(tmp_path: Path) -> None:
    versions = [f"0.{number}.0.post1" for number in range(900, 930)]
    releases = "".join(f"flashinfer-{version}\n" for version in versions)
    directory = proposal(tmp_path / "out", releases, *(f"flashinfer-{v}.toml" for v in versions), body="\u00e4" * 70000)
    done = update("propose", directory)
    assert done.returncode == 0, done.stderr
    assert "--title recipes: add 30 releases" in done.stdout
    (branch,) = re.findall(r"git switch --create (\S+)", done.stdout)
    assert len(branch) < 60
    assert len((directory / "body.md").read_text()) < 65536
