"""Wheel and sdist of the laboratory: contents, and its program without sm120kit's checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAB = ROOT / "src" / "sm12x_lab"
OUTSIDE = ("README.md", "pyproject.toml", "docs/")
"""What the wheel has not."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, LAB]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def files() -> set[str]:
    """The files of the laboratory, relative to its folder."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=LAB, check=True, capture_output=True, text=True).stdout.split("\n")
    return {name for name in listed if name and (LAB / name).is_file()}


def test_wheel_contains_every_module_source_and_receipt(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("sm12x_lab/") for name in archive.namelist() if name.startswith("sm12x_lab/")}
    assert packed == {name for name in files() if not name.startswith(OUTSIDE)}


def test_sdist_contains_everything(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not files() - {name.partition("/")[2] for name in archive.getnames()}


def test_program_runs_from_the_wheel(dist: Path, tmp_path: Path) -> None:
    """In an environment with nothing but the wheel and what sm120kit requires; there is no GPU that programs see."""
    (wheel,) = dist.glob("*.whl")
    target = tmp_path / "installed"
    argv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--offline", "--target", target, wheel]
    subprocess.run(argv, check=True)
    code = "import sm12x_lab.cli as c; assert c.__file__.startswith(sys.argv[1]), c.__file__; sys.argv[1:2] = []; c.main()"
    environment = {"PYTHONPATH": str(target), "CUDA_VISIBLE_DEVICES": "", "SM120KIT_STATE": str(tmp_path / "state")}

    def program(*words: str) -> subprocess.CompletedProcess[str]:
        first = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Inplace' not in type(f).__name__ or "
        first += "'sm12x_lab' not in f.known_packages]; "
        argv = [sys.executable, "-c", first + code, str(target), *words]
        return subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True)

    assert "run " in program("--help").stdout
    done = program("run", "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (41, "") and "Hopper" in done.stderr
