"""Terminal output: JSON, tables, and no escape sequences from untrusted text."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm120kit.core import console
from sm120kit.core.record_files import record_json
from sm120kit.kernels.kernel_records import Tile
from sm120kit.patches.patch_records import AppliedPatch


def test_json_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    patch = AppliedPatch("cutlass", "slug", "0" * 64, "1" * 40)
    console.json_data({"patches": [patch], "at": Path("x/y"), "tile": Tile("dense", "nvfp4", 1, 2, 3, "none", False, "bf16")})
    record = json.loads(capsys.readouterr().out)
    assert record["patches"] == [{"project": "cutlass", "slug": "slug", "sha256": "0" * 64, "commit": "1" * 40}]
    assert record["at"] == "x/y"
    assert record["tile"]["k"] == 3


OBEYED = {
    "colour": ("\x1b[31mred\x1b[0m", "red"),
    "cursor up and erase": ("\x1b[2A\x1b[2Kok", "ok"),
    "title": ("\x1b]0;owned\x07text", "text"),
    "clipboard": ("\x1b]52;c;Y3VybA==\x1b\\text", "text"),
    "link": ("\x1b]8;;http://x.invalid\x1b\\here\x1b]8;;\x1b\\", "here"),
    "device string": ('\x1bP$q"p\x1b\\text', "text"),
    "reset": ("\x1bctext", "text"),
    "character set": ("\x1b(0lqqk", "lqqk"),
    "one byte introducers": ("\x9b31mred\x9d0;owned\x9c", "red"),
    "a string that does not end": ("\x1b]0;shown", "0;shown"),
    "a lone escape": ("a\x1b", "a"),
    "overwritten": ("bad\rgood", "badgood"),
    "erased": ("bad\x08\x08\x08good", "badgood"),
    "bell, null, delete": ("a\x07\x00\x7fb", "ab"),
    "reordered": ("a\u202ecba\u202c\u2066x\u2069", "acbax"),
    "text": ("ä ± →\tx\n[bold]y[/] :smile: \u200d", "ä ± →\tx\n[bold]y[/] :smile: \u200d"),
}


@pytest.mark.parametrize("name", OBEYED)
def test_printable_removes_escape_sequences(name: str) -> None:
    text, left = OBEYED[name]
    assert console.printable(text) == left


@pytest.mark.parametrize("text", ["\x1b]" * 300_000, "\x9d" * 600_000, "\x1b[" + "0" * 600_000, "\x1b" * 600_000])
def test_printable_takes_linear_time(text: str) -> None:
    start = time.process_time()
    assert "\x1b" not in console.printable(text)
    assert time.process_time() - start < 5


EVERYTHING = """
import time
from sm120kit.core import console
from sm120kit.core.record_files import record_json
evil = "<\\x1b]0;owned\\x07\\x1b[2J[red]\\x9b31m\\u202e>"
console.info(evil)
console.error(evil, evil)
console.data(evil)
console.table((evil,), [(evil,)])
console.json_data({evil: evil})
with console.progress() as display:
    display.add_task(evil, total=None)
    display.refresh()
with console.status() as show:
    show(evil)
    time.sleep(0.3)
"""


def test_all_output_functions_remove_escape_sequences(tmp_path: Path) -> None:
    """On a terminal, where progress and status are drawn: with our own colours, and no sequence of the text."""
    parent, child = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.Popen([sys.executable, "-c", EVERYTHING], stdin=child, stdout=child, stderr=child, env=env)
    os.close(child)
    output = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # the other side is closed
            break
        output += chunk
    os.close(parent)
    assert done.wait() == 0, output
    text = output.decode()
    assert text.count("<[red]>") >= 8, text
    for order in ("\x1b]0;", "\x1b[2J", "\x9b", "\u202e"):
        assert order not in text, text
    assert json.loads(re.findall(r"\{.*?\}", text, re.DOTALL)[0]) == {EVIL: EVIL}


def test_message_without_end_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (console.info, console.error, console.warn):
        show("x" * 10**6)
        printed = capsys.readouterr().err
        assert "980,000 characters more" in printed and len(printed) < 21_000


EVIL = "<\x1b]0;owned\x07\x1b[2J[red]\x9b31m\u202e>"


NAMES = ("configuration", "engine", "published")
ROWS = (
    ("qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5", "vllm-0.33.0-spark", "278-283 tok/s ± 4"),
    ("glm-5", None, "withdrawn by its author, who measured again\nsecond line"),
)
WORDS = {word for row in (NAMES, *ROWS) for cell in row if cell for word in cell.split()}


def table(columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    console.table(NAMES, ROWS)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [60, 70, 80, 90, 100, 120])
def test_table_fits_and_cuts_no_word(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(columns, monkeypatch, capsys)
    assert max(map(len, lines)) <= columns
    assert {word for line in lines for word in line.split()} - {lines[2].strip()} == WORDS
    as_lists = any(line.startswith("configuration  glm-5") for line in lines)
    assert as_lists == (columns < 80)


def test_table_in_pipe_has_a_line_per_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(None, monkeypatch, capsys)
    assert "  ".join(ROWS[0]) in lines[3]
    assert "withdrawn by its author, who measured again" in lines[4]
    monkeypatch.delenv("COLUMNS", raising=False)
    console.table(("kernel",), [("k" * 3000,)])
    assert "k" * 3000 in capsys.readouterr().out


def test_table_in_pipe_is_that_of_a_wide_terminal_without_padding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (*ROWS, ("漢字", "a\n\nb", "e\u0301"), ("", " x ", None), ("short", "last", "detail " * 40))
    outputs = []
    for columns in ("1000", ""):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS")
        console.table(NAMES, rows)
        console.table(NAMES, [])
        outputs.append(capsys.readouterr().out.splitlines())
    wide, piped = outputs
    rule = [line.strip(" ─") == "" != line.strip() for line in piped]
    assert sum(rule) == 2 and [(line.rstrip(), cut) for line, cut in zip(wide, rule, strict=True) if not cut] == [
        (line, cut) for line, cut in zip(piped, rule, strict=True) if not cut
    ]
    assert not any(line.endswith(" ") for line in piped)
    assert max(len(line) for line, cut in zip(piped, rule, strict=True) if "detail" not in line) < 120


def test_word_wider_than_terminal_is_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.table(("sha256", "what"), [("0" * 64, "a tree")])
    assert capsys.readouterr().out.split() == ["sha256", "0" * 64, "what", "a", "tree"]
    console.table(("sha256", "what"), [])
    assert capsys.readouterr().out.split() == ["sha256", "what", "─" * 12]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_lacks_are_null(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    console.json_data({"rate": value, "known": [1.5, (value,)]})
    expected = {"rate": None, "known": [1.5, [None]]}
    for document in (capsys.readouterr().out, record_json({"rate": value, "known": [1.5, (value,)]})):
        assert json.loads(document, parse_constant=pytest.fail) == expected
