"""``pytest --sm12x``: run tests for SM120 on a Hopper GPU, and fail those whose kernels are not verified.

pytest starts again under ``sm12x-lab run --strict``. There, a test fails if a module was refused while it ran, or while its
fixtures did: one that SM120 cannot load, that has no replacement, or that would have run code for Hopper.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from sm12x_lab.ptx.images import RUN_DIRECTORY

_LABORATORY = "from sm12x_lab.cli import main; main()"
_STRICT = "SM120KIT_PTX_STRICT"
_REFUSED = ("refused ", "launch ", "shared ", "map ")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--sm12x``."""
    parser.getgroup("sm12x-lab").addoption(
        "--sm12x", action="store_true", help="Run for SM120 on a Hopper GPU; tests with unverified modules fail."
    )


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Start pytest again under ``sm12x-lab run``, unless a run has started it, which becomes strict."""
    if not config.getoption("--sm12x"):
        return None
    from sm12x_lab.ptx.interposed import LIBRARY
    from sm120kit.core import process

    if RUN_DIRECTORY in os.environ and LIBRARY in Path("/proc/self/maps").read_text(errors="replace"):
        os.environ[_STRICT] = "1"
        return None

    again = (sys.executable, "-m", "pytest", *config.invocation_params.args)
    return process.run_attached([sys.executable, "-c", _LABORATORY, "run", "--strict", "--", *again])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test that passed, or skips itself, although the preloaded driver refused something that it requested."""
    under_test = bool(item.config.getoption("--sm12x"))
    before = len(_refused()) if under_test else 0
    skipped = None
    try:
        yield
    except pytest.skip.Exception as reason:
        skipped = reason
    if under_test and (new := _refused()[before:]):
        pytest.fail(f"not verified for SM120; refused: {'; '.join(new)}", pytrace=False)
    if skipped:
        raise skipped


pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call


def _refused() -> list[str]:
    """The lines of the run's log about what was refused."""
    events = Path(os.environ[RUN_DIRECTORY]) / "events"
    lines = events.read_text(errors="replace").splitlines() if events.is_file() else []
    return [line for line in lines if line.startswith(_REFUSED)]
