"""What integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of emulations for all tests, so that each is compiled once."""
    return tmp_path_factory.mktemp("emulations")
