"""Unit tests run no foreign programs but those that a test makes itself, git, and the Python they run in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ALLOWED = {"git", sys.executable, "/bin/sh"}


@pytest.fixture(autouse=True)
def _only_registered_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = subprocess.Popen

    def guarded(argv: Any, *args: Any, **kwargs: Any) -> Any:
        program = str(argv[0])
        if program not in ALLOWED and not program.startswith(str(tmp_path)):
            raise AssertionError(f"a unit test runs {program}: use a program of its own, or make it an integration test")
        return real(argv, *args, **kwargs)

    monkeypatch.setattr("sm120kit.process.subprocess.Popen", guarded)
