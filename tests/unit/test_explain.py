"""Known errors in logs: every rule finds its own sample first, and any log is survived."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit import explain
from sm120kit.cli import app
from sm120kit.errors import LogUnreadable

RULES = explain.rules()
BY_ID = {rule.id: rule for rule in RULES}


def read(text: str | bytes) -> explain.Explanation:
    return explain.read(io.BytesIO(text.encode() if isinstance(text, str) else text))


def ids(explanation: explain.Explanation) -> list[str]:
    return [one.rule.id for one in explanation.found]


def test_there_are_many() -> None:
    assert len(RULES) >= 30
    assert all(rule.cause and rule.fix and rule.source for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_each_rule_explains_its_own_sample_and_nothing_else_does(rule: explain.Rule) -> None:
    assert ids(read(f"start\n{rule.sample}\nend\n")) == [rule.id]
    assert ids(read(f"INFO 09-10 [pid=1] \x1b[31m{rule.sample.upper()}\x1b[0m")) == [rule.id]


@pytest.mark.parametrize("rule", [rule for rule in RULES if len(rule.match) > 1], ids=lambda rule: rule.id)
def test_all_pieces_are_needed_in_their_order(rule: explain.Rule) -> None:
    backwards = " ".join(reversed(rule.match))
    for text in (*rule.match, backwards):
        assert rule.id not in ids(read(text))


def test_order_count_and_first_line() -> None:
    log = [
        "hello",
        BY_ID["illegal-instruction"].sample,
        "",
        BY_ID["grouped-gemm-smem"].sample,
        BY_ID["illegal-instruction"].sample,
    ]
    told = read("\r\n".join(log))
    assert [(one.rule.id, one.count, one.number) for one in told.found] == [
        ("grouped-gemm-smem", 1, 4),
        ("illegal-instruction", 2, 2),
    ]
    assert told.lines == 5 and told.known


def test_a_hang_is_one_only_at_the_end() -> None:
    line = BY_ID["hang-after-nccl"].sample
    assert ids(read(f"{line}\nshort\n")) == ["hang-after-nccl"]
    assert ids(read(line + "\n" + "loading\n" * explain.LAST_LINES)) == []


def test_progress_bars_colours_and_bytes_that_are_no_text() -> None:
    bar = b"Capturing CUDA graphs: 14%|\xe2\x96\x88| 1/7\r" * 50
    fault = (
        b"\xff\xfe(Worker_TP0)\x1b[0;36m Failed: Cuda error /w/custom_all_\x1b[1mreduce.cuh:164 'invalid argument'\x1b[0m\xff"
    )
    told = read(bar + fault + b"\n\x00\x00\n")
    assert ids(told) == ["custom-ar-invalid"] and told.found[0].number == 51
    assert "custom_all_reduce.cuh" in told.found[0].line and "\x1b" not in told.found[0].line


def test_unknown_says_so_and_shows_what_looks_like_an_error() -> None:
    told = read("fine\nRuntimeError: the moon is full\nValueError: error of a new kind\n")
    assert not told.known and told.found == () and told.errors == ("ValueError: error of a new kind",)
    assert not read(BY_ID["symm-mem"].sample).known
    assert read("").lines == 0


def test_a_line_across_pieces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "PIECE_BYTES", 64)
    text = "x" * 50 + "\n" + BY_ID["nccl-calloc"].sample + "\n" + "y" * 500 + "\n"
    assert [(one.rule.id, one.number) for one in read(text).found] == [("nccl-calloc", 2)]


LINE = b"INFO 11-21 12:00:00 [loggers.py:123] Engine 000: Avg generation throughput: 198.0 tokens/s, Running: 1 reqs\n"


def test_large_logs_take_little_time() -> None:
    log = io.BytesIO(LINE * 30_000 + BY_ID["no-devices"].sample.encode())
    started = time.process_time()
    told = explain.read(log)
    assert told.lines == 30_001 and ids(told) == ["no-devices"]
    assert time.process_time() - started < 3


class Long(io.RawIOBase):
    """A log of a given number of bytes that never lies in memory whole."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        size = min(self.left, size if size >= 0 else self.left)
        self.left -= size
        return (LINE * (size // len(LINE) + 1))[:size]


def test_large_logs_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "PIECE_BYTES", 64 << 10)
    tracemalloc.start()
    try:
        assert explain.read(Long(3 << 20)).lines > 20_000  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_command_line(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(BY_ID["w4a16-linear"].sample.encode() + b"\n" + BY_ID["symm-mem"].sample.encode())
    said = CliRunner().invoke(app, ["explain", str(log)])
    assert said.exit_code == 0 and "VLLM_DISABLED_KERNELS" in said.output and "expected: line 2" in said.output
    told = json.loads(CliRunner().invoke(app, ["explain", "-", "--json"], input=log.read_bytes()).stdout)
    assert told["known"] and [one["rule"]["id"] for one in told["found"]] == ["w4a16-linear", "symm-mem"]
    nothing = CliRunner().invoke(app, ["explain", "-"], input="all is well\n")
    assert nothing.exit_code == 1 and "unknown" in nothing.output
    for path in (tmp_path, tmp_path / "absent.log"):
        assert isinstance(CliRunner().invoke(app, ["explain", str(path)]).exception, LogUnreadable)


@pytest.mark.parametrize(
    "text",
    [
        "rule = 3",
        "[[rules]]\nid='a'",
        "[[rule]]\nid='a'\nmatch=['x']\ncause='c'\nfix='f'\nsource='s'",
        "[[rule]]\nid='a'\nmatch=[]\ncause='c'\nfix='f'\nsource='s'\nsample='x'",
        "[[rule]]\nid='a'\nmatch=['']\ncause='c'\nfix='f'\nsource='s'\nsample='x'",
        "[[rule]]\nid='A b'\nmatch=['x']\ncause='c'\nfix='f'\nsource='s'\nsample='x'",
        "[[rule]]\nid='a'\nmatch=['x']\ncause='c'\nfix='f'\nsource='s'\nsample='x'\nharmles=true",
        "[[rule]]\nid='a'\nmatch=['x']\ncause='c'\nfix='f'\nsource='s'\nsample='x'\n" * 2,
    ],
)
def test_rules_are_read_strictly(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules.toml").write_text(text)
    monkeypatch.setattr(explain, "RULES", tmp_path / "rules.toml")
    with pytest.raises((ValueError, KeyError)):
        explain.rules.__wrapped__()
