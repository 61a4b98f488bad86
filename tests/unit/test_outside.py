"""Files, documents, numbers and dates from outside: what is malformed, endless or enormous is refused, and at once."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path

import pytest

from sm120kit.core import outside


@pytest.fixture(params=["fifo", "zero", "socket", "directory", "missing"])
def special(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path(request.param)
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "zero":
        path.symlink_to("/dev/zero")
    elif request.param == "socket":
        socket.socket(socket.AF_UNIX).bind(request.param)
    elif request.param == "directory":
        path.mkdir()
    return path


@pytest.mark.parametrize("read", [outside.read_found, outside.read_input, outside.read_input_text, outside.read_toml])
def test_special_files_are_refused_at_once(special: Path, read: object) -> None:
    started = time.monotonic()
    with pytest.raises(OSError):
        read(special)  # type: ignore[operator]
    assert time.monotonic() - started < 10


def test_anonymous_pipe_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"key\r\n")
    os.close(writer)
    assert outside.read_input_text(Path(f"/dev/fd/{reader}")) == "key\n"
    os.close(reader)


def test_silent_pipe_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "STREAM_SECONDS", 0.1)
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="it sent nothing"):
        outside.read_input(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    os.close(writer)


def test_file_over_the_limit(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(11))
    for read in (outside.read_found, outside.read_input):
        assert read(tmp_path / "large", 11) == bytes(11)
        with pytest.raises(OSError, match="it has more than"):
            read(tmp_path / "large", 10)


def test_files_of_proc_without_a_size() -> None:
    assert outside.read_found(Path("/proc/self/status")).startswith(b"Name:")


@pytest.mark.parametrize("content", ["", "{", b"\xff", "[" * 100_000, "[" * 101 + "]" * 101, '{"a": ' * 500 + "1" + "}" * 500])
def test_malformed_json(content: str | bytes) -> None:
    with pytest.raises(ValueError):
        outside.parse_json(content)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_json_numbers_without_a_value(value: str) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        outside.parse_json(f"[{value}]")
    assert outside.parse_json(f"[{value}, 1.5, 2]", lenient=True) == [None, 1.5, 2]


@pytest.mark.parametrize("digits", [41, 401, 5_000, 1_000_000])
def test_integers_of_too_many_digits(digits: int) -> None:
    with pytest.raises(ValueError):
        outside.parse_json(f"[{'9' * digits}]", lenient=True)
    with pytest.raises(ValueError):
        outside.parse_toml(f"a = [{'9' * digits}]")
    with pytest.raises(ValueError):
        outside.parse_toml(f"a = 0x{'f' * digits}")


def test_json_documents_are_kept() -> None:
    document = {"a": [1, -2.5, "x", None, True, {"b": []}], "largest": 2**64 - 1}
    assert outside.parse_json(json.dumps(document)) == document and outside.parse_json("3") == 3


ADVERSARIAL = {
    "dotted key": ".".join("a" * 50_000) + " = 1",
    "dotted header": f"[{'.'.join('a' * 50_000)}]",
    "quoted dotted key": " . ".join(['"a"'] * 50_000) + " = 1",
    "word": "a" * 1_000_000,
    "quotes": '"' * 1_000_000,
    "quoted": '"a' * 500_000,
    "lists": f"a = {'[' * 50_000}",
    "nested": f"a = {'[' * 101}{']' * 101}",
    "tables": f"a = {'{a = ' * 150}1{'}' * 150}",
    "size": "#" * 5_000_000,
    "zone": "a = 2026-01-01T00:00:00+99:99",
    "day": "a = 2026-02-31",
    "infinity": "a = inf",
    "nan": "a = nan",
    "overflow": "a = 1e999",
    "digits": f"a = {'9' * 5_000}",
    "underscores": f"a = {'9_' * 5_000}9",
    "NUL": 'a = ["\\u0000"]',
    "NUL in a key": '"a\\u0000".b = 1',
    "NUL after backslashes": f'a = "{chr(92) * 400_000}\\U00000000"',
}


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_adversarial_toml_takes_linear_time(kind: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError):
        outside.parse_toml(ADVERSARIAL[kind])
    assert time.process_time() - started < 5


def test_toml_documents_are_kept() -> None:
    text = '"a.b".c.d = 1.5\nurl = "https://a.b.c.d/e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t"\n[x]\ny = [0x1f, "2.11.0+cu130"]\n'
    text += "backslash = \"\\\\u0000\" # \\u0000\nliteral = '[^\\u0000-\\u001f]'\n"
    content = {
        "a.b": {"c": {"d": 1.5}},
        "x": {"y": [31, "2.11.0+cu130"], "backslash": "\\u0000", "literal": r"[^\u0000-\u001f]"},
    }
    assert outside.parse_toml(text).items() > content.items()


@pytest.mark.parametrize("text", ["", "²", "٣", " 1", "1_000", "1.0", "9" * 41, "9" * 100_000, "0x1", "--1"])
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError):
        outside.integer(text)


@pytest.mark.parametrize("text", ["", "nan", "inf", "-Infinity", "1e999", "٣", "1_0", " 1", "9" * 100_000, "1e", "."])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError):
        outside.number(text)


def test_numbers() -> None:
    assert [outside.integer(text) for text in ("0", "-12", "+7", "9" * 40)] == [0, -12, 7, 10**40 - 1]
    assert [outside.number(text) for text in ("0", "-1.5", ".5", "2.", "1e3", "1E-400")] == [0, -1.5, 0.5, 2, 1000, 0]
    assert math.isfinite(outside.number("9" * 300))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "Mon, 01 Jan 2026 00:00:00 +99999999999999999999",
        "Mon, 01 Jan 2026 00:00:00 +9999",
        "Mon, 01 Jan 9999 23:59:59 -2300",
        "Mon, 32 Jan 2026 00:00:00 +0000",
        "Mon, 01 Jan 2026 ²:00:00 +0000",
        f"Mon, 01 Jan {'9' * 5_000} 00:00:00 +0000",
    ],
)
def test_impossible_dates(text: str) -> None:
    with pytest.raises(ValueError):
        outside.mail_date(text)


def test_date() -> None:
    assert outside.mail_date("Mon, 5 Jan 2026 01:02:03 +0100").timestamp() == 1767571323


@pytest.mark.parametrize(
    "charset", ["hex", "rot13", "zlib", "undefined", "idna", "punycode", "unicode_escape", "", "²", "utf-8"]
)
def test_text_in_what_is_no_encoding_of_text(charset: str) -> None:
    assert outside.encoding(charset) == "utf-8"


def test_text_in_the_stated_encoding() -> None:
    assert b"\xb1".decode(outside.encoding("ISO-8859-1")) == "±" and outside.encoding(None) == "utf-8"
