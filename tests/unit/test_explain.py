"""Explain logs: each rule matches its own sample, and no log content causes an error."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import LogUnreadable
from sm120kit.hosts import log_rules

RULES = log_rules.rules()
BY_ID = {rule.id: rule for rule in RULES}


def explain(text: str | bytes) -> log_rules.Explanation:
    return log_rules.explain(io.BytesIO(text.encode() if isinstance(text, str) else text))


def ids(explanation: log_rules.Explanation) -> list[str]:
    return [match.rule.id for match in explanation.found]


def test_number_of_rules() -> None:
    assert len(RULES) >= 30
    assert all(rule.cause and rule.fix and rule.source for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_sample_matches_its_own_rule_only(rule: log_rules.Rule) -> None:
    assert ids(explain(f"start\n{rule.sample}\nend\n")) == [rule.id]
    assert ids(explain(f"INFO 09-10 [pid=1] \x1b[31m{rule.sample.upper()}\x1b[0m")) == [rule.id]


@pytest.mark.parametrize("rule", [rule for rule in RULES if len(rule.match) > 1], ids=lambda rule: rule.id)
def test_all_strings_are_required_in_order(rule: log_rules.Rule) -> None:
    reversed_strings = " ".join(reversed(rule.match))
    for text in (*rule.match, reversed_strings):
        assert rule.id not in ids(explain(text))


def test_matches_have_rule_order_count_and_first_line() -> None:
    log = [
        "hello",
        BY_ID["illegal-instruction"].sample,
        "",
        BY_ID["grouped-gemm-smem"].sample,
        BY_ID["illegal-instruction"].sample,
    ]
    explanation = explain("\r\n".join(log))
    assert [(match.rule.id, match.count, match.number) for match in explanation.found] == [
        ("grouped-gemm-smem", 1, 4),
        ("illegal-instruction", 2, 2),
    ]
    assert explanation.lines == 5 and explanation.known


def test_hang_rules_match_only_at_the_end() -> None:
    line = BY_ID["hang-after-nccl"].sample
    assert ids(explain(f"{line}\nshort\n")) == ["hang-after-nccl"]
    assert ids(explain(line + "\n" + "loading\n" * log_rules.LAST_LINES)) == []


def test_progress_bars_escape_sequences_and_invalid_utf8() -> None:
    bar = b"Capturing CUDA graphs: 14%|\xe2\x96\x88| 1/7\r" * 50
    fault = (
        b"\xff\xfe(Worker_TP0)\x1b[0;36m Failed: Cuda error /w/custom_all_\x1b[1mreduce.cuh:164 'invalid argument'\x1b[0m\xff"
    )
    explanation = explain(bar + fault + b"\n\x00\x00\n")
    assert ids(explanation) == ["custom-ar-invalid"] and explanation.found[0].number == 51
    assert "custom_all_reduce.cuh" in explanation.found[0].line and "\x1b" not in explanation.found[0].line


def test_unknown_log_lists_possible_errors() -> None:
    explanation = explain("fine\nRuntimeError: the moon is full\nValueError: error of a new kind\n")
    assert not explanation.known and explanation.found == ()
    assert explanation.errors == ("ValueError: error of a new kind",)
    assert not explain(BY_ID["symm-mem"].sample).known
    assert explain("").lines == 0


def test_line_across_blocks_is_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rules, "BLOCK_BYTES", 64)
    text = "x" * 50 + "\n" + BY_ID["nccl-calloc"].sample + "\n" + "y" * 500 + "\n"
    assert [(match.rule.id, match.number) for match in explain(text).found] == [("nccl-calloc", 2)]


LINE = b"INFO 11-21 12:00:00 [loggers.py:123] Engine 000: Avg generation throughput: 198.0 tokens/s, Running: 1 reqs\n"


def test_large_logs_take_little_time() -> None:
    log = io.BytesIO(LINE * 30_000 + BY_ID["no-devices"].sample.encode())
    started = time.process_time()
    explanation = log_rules.explain(log)
    assert explanation.lines == 30_001 and ids(explanation) == ["no-devices"]
    assert time.process_time() - started < 3


class GeneratedLog(io.RawIOBase):
    """A log of a given number of bytes that is generated while it is read."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        size = min(self.left, size if size >= 0 else self.left)
        self.left -= size
        return (LINE * (size // len(LINE) + 1))[:size]


def test_large_logs_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_rules, "BLOCK_BYTES", 64 << 10)
    tracemalloc.start()
    try:
        assert log_rules.explain(GeneratedLog(3 << 20)).lines > 20_000  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_command_line(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(BY_ID["w4a16-linear"].sample.encode() + b"\n" + BY_ID["symm-mem"].sample.encode())
    result = CliRunner().invoke(app, ["explain", str(log)])
    assert result.exit_code == 0 and "VLLM_DISABLED_KERNELS" in result.output and "harmless: line 2" in result.output
    record = json.loads(CliRunner().invoke(app, ["explain", "-", "--json"], input=log.read_bytes()).stdout)
    assert record["known"] and [match["rule"]["id"] for match in record["found"]] == ["w4a16-linear", "symm-mem"]
    unknown = CliRunner().invoke(app, ["explain", "-"], input="all is well\n")
    assert unknown.exit_code == 1 and "unknown" in unknown.output
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
def test_invalid_rules_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules.toml").write_text(text)
    monkeypatch.setattr(log_rules, "RULES", tmp_path / "rules.toml")
    with pytest.raises((ValueError, KeyError)):
        log_rules.rules.__wrapped__()
