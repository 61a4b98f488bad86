"""Options and fixtures of all tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from layout_images import address, publisher, user
from small_image import daemon, image_host

from sm120kit.core import console

__all__ = ["address", "daemon", "image_host", "publisher", "user"]

ROOT = Path(__file__).parents[1]
os.environ["SM120KIT_CONFIG"] = os.devnull  # tests do not read the user's configuration file
too_slow = [hypothesis.HealthCheck.too_slow]  # of a machine that stalls
hypothesis.settings.register_profile("repeatable", derandomize=True, suppress_health_check=too_slow)  # the same for a commit
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))  # "default" has random inputs

# COLUMNS limits the width of tables. pytest-xdist sets it, and readline, which Transformers imports, for child processes only.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

_DEADLINE = pytest.StashKey[float | None]()
TINY = """
[groups.tiny]
summary = "the smallest module"
modules = ["fp4_quantization_120f"]
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-budget",
        type=float,
        metavar="SECONDS",
        help="skip tests that have not started SECONDS after the start, and list them",
    )


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--time-budget")
    config.stash[_DEADLINE] = None if seconds is None else time.monotonic() + seconds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = item.config.stash[_DEADLINE]
    if deadline is not None and time.monotonic() > deadline:
        pytest.skip("left out: the time budget is spent")
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_terminal() -> None:
    """Restore signals that a shell (SIGINT of background jobs) or nohup (SIGHUP) ignores, as child processes inherit that."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(kind) is signal.SIG_IGN:
            signal.signal(kind, signal.default_int_handler if kind is signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore the signal handlers that a command sets in this process."""
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.fixture(autouse=True)
def _console_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what ``--quiet`` and ``--verbose`` of a command in this process set."""
    for name in ("quiet", "verbose"):
        monkeypatch.setattr(console, name, getattr(console, name))


@pytest.fixture(scope="session")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of emulations for all tests, so that each is compiled once."""
    return tmp_path_factory.mktemp("emulations")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes, patches and overrides with a tiny kernel group; without the lockfile, which does not match that recipe."""
    root = tmp_path_factory.mktemp("data")
    for name in ("recipes", "patches", "cutlass_overrides"):
        shutil.copytree(ROOT / name, root / name)
    with (root / "recipes" / "engines" / "flashinfer-0.6.6.toml").open("a") as recipe:
        recipe.write(TINY)
    (root / "recipes" / "engines" / "flashinfer-0.6.6.lock.json").unlink()
    return root


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror directory with the sdist, which is downloaded once for all tests."""
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
    arguments = [
        "build",
        "flashinfer@0.6.6",
        "--kernels",
        "tiny",
        "--mirror",
        downloads,
        "--output",
        state / "out",
        "--offline",
    ]
    return state, Path(_sm120kit(state, data, *arguments).strip())


def _sm120kit(state: Path, data: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sm120kit", *map(str, arguments)],
        env={**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
