"""What integration tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_image import base, daemon, debian, image, place, registry, verified

__all__ = ["base", "daemon", "debian", "image", "place", "registry", "verified"]

ROOT = Path(__file__).parents[2]
TINY = """
[groups.tiny]
summary = "the smallest module"
modules = ["fp4_quantization_120f"]
"""


@pytest.fixture(scope="session")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of emulations for all tests, so that each is compiled once."""
    return tmp_path_factory.mktemp("emulations")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes, patches and overrides, with a tiny kernel group, for which the recipe is not locked."""
    root = tmp_path_factory.mktemp("data")
    for name in ("recipes", "patches", "cutlass_overrides"):
        shutil.copytree(ROOT / name, root / name)
    with (root / "recipes" / "engines" / "flashinfer-0.6.6.toml").open("a") as recipe:
        recipe.write(TINY)
    (root / "recipes" / "engines" / "flashinfer-0.6.6.lock.json").unlink()
    return root


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, fetched once for all tests here, as a mirror directory."""
    state = tmp_path_factory.mktemp("fetch")
    _sm120kit(state, ROOT, "build", "flashinfer@0.6.6", "--to", "fetch")
    mirror = state / "mirror"
    mirror.mkdir()
    (sdist,) = state.rglob("flashinfer_python-0.6.6.tar.gz")
    shutil.copyfile(sdist, mirror / sdist.name)
    return mirror


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, data: Path, downloads: Path) -> tuple[Path, Path]:
    """A state directory with a finished build of the tiny kernel group, and its wheel. One nvcc compile of half a minute."""
    state = tmp_path_factory.mktemp("state")
    words = ["build", "flashinfer@0.6.6", "--kernels", "tiny", "--mirror", downloads, "--output", state / "out", "--offline"]
    return state, Path(_sm120kit(state, data, *words).strip())


def _sm120kit(state: Path, data: Path, *words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sm120kit", *map(str, words)],
        env={**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
