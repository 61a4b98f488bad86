"""Messages of library code: logged by default, passed to the reporter that is installed."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from sm120kit.core import console, reporting

MESSAGES = """
from sm120kit.core import reporting
reporting.info("info")
reporting.warn("warning")
with reporting.step("step"), reporting.working("wait"), reporting.task("task", 2) as advance:
    advance()
    advance(1)
"""


def test_library_prints_nothing_without_reporter() -> None:
    done = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_library_logs_without_credentials(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="sm120kit"):
        reporting.detail("fetching https://user:secret@host/x")
        reporting.warn("50 % full")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "fetching https://host/x"),
        ("WARNING", "50 % full"),
    ]


def test_reporter_is_used_until_the_block_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting.use(console):
        reporting.info("first")
        with reporting.task("task", 1) as advance:
            advance()
    reporting.info("second")
    assert capsys.readouterr().err == "first\n"
