"""The lockfiles of this repository against the package index: every source is fetched and every series applied."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data_copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A state directory, and a copy of this repository's recipes, patches and headers."""
    root = tmp_path_factory.mktemp("ours")
    for name in ("recipes", "patches", "cutlass_overrides"):
        shutil.copytree(ROOT / name, root / "data" / name)
    return root / "state", root / "data"


def test_lockfiles_of_this_repository_are_current(data_copy: tuple[Path, Path]) -> None:
    """Includes the ids of trees and commits: every source is fetched and every series applied."""
    state, data = data_copy
    environment = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "--check"]
    checked = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    locked = [path for kind in ("bases", "engines") for path in (data / "recipes" / kind).glob("*.toml")]
    assert checked.stdout.count("ok ") == len(locked) > 0


def test_engine_resolves_again_to_the_bytes_of_its_lockfile(data_copy: tuple[Path, Path]) -> None:
    """Without an existing lockfile: today's index is queried for the wheels of the day of the release.

    Not vllm-0.19.1: its lockfile has an earlier setuptools, because locking keeps versions that fit.
    """
    state, data = data_copy
    environment = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    path = data / "recipes" / "engines" / "vllm-0.20.0.lock.json"
    path.unlink()
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@0.20.0"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == (ROOT / "recipes" / "engines" / path.name).read_bytes()
