"""Heartbeat lines: the current activity is printed in a pipe after a while without other output."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sm120kit.core import _heartbeat, console

BEGIN = """
import sys, time
from sm120kit.core import console, _heartbeat, process, reporting
_heartbeat.SILENT_SECONDS, _heartbeat.LONG_SECONDS = 0.2, 0.1
console.quiet = "-q" in sys.argv
def pause():  # in parts: after a stall, the others leave time for a line
    for _ in range(20):
        time.sleep(0.1)

with console.heartbeat(), reporting.use(console):
"""
BODIES = {
    "step": ("    with console.step('resolving'): pause()", ["resolving\n", "resolving: "]),
    "program": (
        "    console.info('generating')\n    process.run(['/bin/sh', '-c', '" + "sleep 0.25; " * 8 + "'])",
        ["generating\n", "generating: "],
    ),
    "progress": (
        "    with console.progress() as display:\n"
        "        display.advance(display.add_task('tiles', total=3), 1)\n        pause()",
        ["tiles: 1 of 3, "],
    ),
    "transfer": (
        "    with console.progress(transfer=True) as display:\n"
        "        display.advance(display.add_task('wheel', total=3e9), 1e9)\n        pause()",
        ["wheel: 1,000 of 3,000 MB at ", " MB/s, "],
    ),
    "wait": ("    with console.working('inspecting'): pause()", ["inspecting: "]),
    "status": ("    with console.status() as show:\n        show('starting')\n        pause()", ["starting\n"]),
    "nothing": ("    console.info('serving')\n    pause()", ["serving\n"]),
}


@pytest.mark.parametrize("name", BODIES)
def test_line_in_pipe(name: str) -> None:
    body, expected = BODIES[name]
    done = subprocess.run([sys.executable, "-c", BEGIN + body], capture_output=True, text=True, check=True)
    for text in expected:
        assert text in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 if name in ("status", "nothing") else 1 <= len(lines) <= 12, "a status that stays is printed once"
    assert done.stdout == ""


def test_no_line_with_quiet() -> None:
    argv = [sys.executable, "-c", BEGIN + BODIES["step"][0], "-q"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stderr == ""


def test_no_line_on_terminal() -> None:
    parent, child = pty.openpty()
    body = BODIES["wait"][0]
    done = subprocess.Popen([sys.executable, "-c", BEGIN + body], stdin=child, stdout=child, stderr=child)
    os.close(child)
    with os.fdopen(parent, "rb") as stream, pytest.raises(OSError, match="Input/output error"):
        assert stream.read(1) == b""
    assert done.wait() == 0


def test_no_line_for_short_activity_or_after_output(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(_heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
    lines = _heartbeat.Heartbeat()
    lines.printed("serving\nsecond line")
    now = 4000.0
    with lines.during():
        now += 1
        assert lines.line() == ""
        now += _heartbeat.LONG_SECONDS
        assert lines.line() == "serving: 3906 s"
        now += _heartbeat.SILENT_SECONDS - 1
        assert lines.line() == ""
    now += 100
    assert lines.line() == ""


def test_messages_and_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(console._heartbeat, "printed", printed.append)
    console.info("message")
    with console.step("step"):
        pass
    assert printed == ["message", "step"]


def test_elapsed_time_begins_with_the_command_where_nothing_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_heartbeat, "LONG_SECONDS", 0)
    monkeypatch.setattr(_heartbeat, "time", SimpleNamespace(monotonic=iter([20446.0, 20446.5, 20450.0]).__next__))
    activities = _heartbeat.Heartbeat()
    with activities.during():
        assert activities.line() == "running: 4 s"
