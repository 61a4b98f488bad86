"""The strings that lines are searched for change the time of an explanation, and no finding."""

from __future__ import annotations

import io
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sm120kit.hosts import log_rules
from sm120kit.hosts.log_rules.strings import Expression, Strings

DATA = Path(__file__).with_name("data")
NOW = datetime(2026, 11, 22, 12)
EXPRESSIONS = {
    **{name: getattr(log_rules, name) for name in ("FRAME", "RAISED", "DOUBTFUL", "ERROR", "NOISE")},
    **log_rules.VERSIONS,
}


def logs() -> list[bytes]:
    """Excerpts of threads, healthy logs, and the samples of all rules, each for itself and in one log."""
    tables = [table for path in sorted(DATA.glob("threads*.toml")) for table in tomllib.loads(path.read_text())["thread"]]
    tables += tomllib.loads((DATA / "healthy_logs.toml").read_text())["log"]
    samples = [rule.sample for rule in log_rules.rules()]
    return [text.encode() for text in (*("\n".join(table["lines"]) for table in tables), *samples, "\r\n".join(samples))]


def explained(logs: Sequence[bytes]) -> list[log_rules.Explanation]:
    return [log_rules.explain(io.BytesIO(log), now=NOW) for log in logs]


class Marked(Strings):
    """Searches each line for each string, and has a string that every line has."""

    def of_lines(self, lines: Sequence[bytes]) -> Iterator[frozenset[bytes]]:
        return (frozenset((b"", *(text for text in self.texts if text in line.lower()))) for line in lines)


def test_findings_are_those_without_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each condition and expression is tried on each line."""
    corpus = logs()
    filtered = explained(corpus)
    search = log_rules._search()
    complete = replace(search, strings=Marked(search.strings.texts), noted=frozenset((b"",)))
    monkeypatch.setattr(log_rules, "_search", lambda: complete)
    monkeypatch.setattr(log_rules, "_candidates", lambda found: [rule for rule in search.conditions if rule.requires(found)])
    monkeypatch.setattr(Expression, "search", lambda self, line, found: self.pattern.search(line))
    for log, with_search, without in zip(corpus, filtered, explained(corpus), strict=True):
        assert with_search == without, log.decode()
    assert sum(explanation.known for explanation in filtered) > 1000


@pytest.mark.parametrize("name", EXPRESSIONS)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_each_line_of_an_expression_has_one_of_its_strings(name: str, data: st.DataObject) -> None:
    expression = EXPRESSIONS[name]
    line = data.draw(st.from_regex(expression.pattern.pattern)).lower()
    assert not line.strip() or any(text in line for text in expression.texts)


def test_strings_are_found_in_their_lines() -> None:
    strings = Strings([b"ab", b"b", b"bc d", b"xyz"])
    lines = [b"", b"AB", b"a", b"b", b"abc d abc d", b"", b"xy", b"z", b"xyz"]
    expected = [set(), {b"ab", b"b"}, set(), {b"b"}, {b"ab", b"b", b"bc d"}, set(), set(), set(), {b"xyz"}]
    assert list(strings.of_lines(lines)) == expected
    assert list(strings.of_lines([])) == []


def test_the_time_does_not_grow_with_the_number_of_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the rules, most of which match nothing: a search for one string after the other takes ten times as long."""
    line = b"INFO 11-21 12:00:00 [loggers.py:123] Engine 000: Avg generation throughput: 198.0 tokens/s, Running: 1 reqs\n"

    def seconds() -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            assert not log_rules.explain(io.BytesIO(line * 20_000)).found
            times.append(time.process_time() - started)
        return min(times)

    rules = log_rules.rules()
    seconds()
    before = seconds()
    more = [
        replace(rule, id=f"{rule.id}-{copy}", match=(*(f"{text}-{copy}" for text in rule.match), f"q{copy}q"), any=())
        for rule in rules
        for copy in range(9)
    ]
    search = log_rules._Search.of((*rules, *more))
    log_rules._candidates.cache_clear()
    monkeypatch.setattr(log_rules, "_search", lambda: search)
    try:
        assert seconds() < 3 * before
    finally:
        log_rules._candidates.cache_clear()
