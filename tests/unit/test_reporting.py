"""Messages of library code: passed to the reporter that is installed, dropped without one."""

from __future__ import annotations

import os
import pty
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


def test_reporter_is_used_until_the_block_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting.use(console):
        reporting.info("first")
        with reporting.task("task", 1) as advance:
            advance()
    reporting.info("second")
    assert capsys.readouterr().err == "first\n"


def test_step_is_shown_on_a_terminal() -> None:
    """A display inside it, such as the progress of a part, does not end it."""
    script = """
from sm120kit.core import console, reporting
with reporting.use(console), reporting.step("checking the image"):
    with reporting.task("unpacking", 2) as advance:
        advance(2)
"""
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=stderr, env=os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    )
    os.close(stderr)
    text = b""
    try:
        while chunk := os.read(terminal, 4096):
            text += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(terminal)
    assert process.wait() == 0
    assert b"checking the image" in text and b"unpacking" in text
