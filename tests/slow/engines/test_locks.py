"""The lockfiles of this repository against the package index: every source is fetched and every series applied."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tile_records
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data_copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A state directory, and a copy of this repository's recipes, patches and headers."""
    root = tmp_path_factory.mktemp("ours")
    for name in ("recipes", "patches", "cutlass_overrides"):
        shutil.copytree(ROOT / name, root / "data" / name)
    return root / "state", root / "data"


def test_lockfiles_of_this_repository_are_current(data_copy: tuple[Path, Path]) -> None:
    """Includes the ids of trees and commits of pinned sources: every source is fetched and every series applied."""
    state, data = data_copy
    environment = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "--check"]
    checked = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    locked = [path for kind in ("bases", "engines") for path in (data / "recipes" / kind).glob("*.toml")]
    assert checked.stdout.count("ok ") == len(locked) > 0


def test_recorded_tiles_are_of_the_present_series(data_copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    state, data = data_copy
    monkeypatch.setenv("SM120KIT_DATA", str(data))
    records = [*(data / "recipes" / "engines").glob("*.tiles.json")]
    for record in records:
        name = record.name.removesuffix(".tiles.json")
        target = resolve_flashinfer(name, Options(Workspace.open(state)))
        assert tile_records.recorded(target), f"compile them again: sm120kit tiles {name} --write"
    assert records


def test_patch_of_the_series_touches_two_files(data_copy: tuple[Path, Path], tmp_path: Path) -> None:
    """Of vLLM for x86-64 and DGX Spark, and of the FlashInfer of both: a patch and its line in the series."""
    state, data = data_copy
    environment = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}

    def run(*argv: str | Path) -> str:
        done = subprocess.run([*argv], env=environment, capture_output=True, text=True, cwd=data)
        assert done.returncode == 0, done.stderr
        return done.stdout

    identity = ("-c", "user.name=A. B.", "-c", "user.email=a@example.invalid")
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "before"]):
        run("git", *identity, *words)
    tool = (sys.executable, "-m", "sm120kit")
    for recipe, path in (("vllm-0.33.0", "vllm/version.py"), ("flashinfer-0.7.2.post1", "flashinfer/jit/env.py")):
        diff = tmp_path / f"toy-{recipe}.diff"
        diff.write_text(f"--- /dev/null\n+++ b/{Path(path).with_name('toy.py')}\n@@ -0,0 +1 @@\n+toy = 1\n")
        run(*tool, "patch", "import", diff, "--recipe", recipe, "--name", "toy")
        run(*tool, "recipe", "lock", "vllm-0.33.0", "vllm-0.33.0-spark", "flashinfer-0.7.2.post1")
        project = path.partition("/")[0]
        status = run("git", "status", "--porcelain", "--untracked-files=all")
        assert sorted(line[3:] for line in status.splitlines()) == [f"patches/{project}/series", f"patches/{project}/toy.patch"]
        run("git", "add", "--all")
        run("git", *identity, "commit", "-q", "-m", recipe)


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
