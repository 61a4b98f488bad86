"""Explain excerpts of public threads: most answers are right, none is wrong, and few threads have none."""

from __future__ import annotations

import io
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sm120kit.hosts import log_rules

THREADS = sorted(Path(__file__).with_name("data").glob("threads*.toml"))
NOW = datetime(2026, 11, 22, 12)
RIGHT = 0.95
"""Least share of right answers among those that name a cause."""
NAMED = 0.7
"""Least share of threads for which a cause is named."""


@dataclass(frozen=True)
class Thread:
    """An excerpt. ``rules``: one of them must be the first finding; a rule that does not exist marks an unexplained thread."""

    url: str
    hardware: str
    versions: str
    rules: tuple[str, ...]
    cause: str
    fix: str
    lines: tuple[str, ...]
    collected: str = "first"
    first: str = ""
    """Verdict before rules were written from this thread, which was held back or is of a collection that was measured before.
    May be ``partly`` too."""
    partly: tuple[str, ...] = ()
    """Rules that are correct and do not name this thread's cause, or whose remedy does not help."""
    misleading: tuple[str, ...] = ()
    """Rules that match and are wrong here, which no other text of the excerpt tells apart."""
    criterion: str = ""
    """What a right explanation contains, written before the thread was explained."""
    note: str = ""
    """What the stored text of the thread does not show, and the excerpt has nevertheless."""
    without_error: bool = False
    """The excerpt has no line of an error: wrong output, a hang, a version."""

    @property
    def verdict(self) -> str:
        """``right``, ``partly``, ``misleading``, ``wrong`` or ``silent``."""
        explanation = explained(self.lines)
        judged = {"right": self.rules, "partly": self.partly, "misleading": self.misleading}
        for verdict, rules in judged.items():
            if explanation.found and explanation.found[0].rule.id in rules:
                return verdict
        return "wrong" if explanation.known else "silent"


def explained(lines: Sequence[str]) -> log_rules.Explanation:
    return log_rules.explain(io.BytesIO("\n".join(lines).encode()), now=NOW)


@cache
def threads() -> list[Thread]:
    tables = [table for path in THREADS for table in tomllib.loads(path.read_text())["thread"]]
    return [
        Thread(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}) for table in tables
    ]


def verdicts() -> Counter[str]:
    return Counter(thread.verdict for thread in threads())


@pytest.mark.parametrize("thread", threads(), ids=lambda thread: re.sub(r"https://(github.com/)?", "", thread.url))
def test_no_thread_is_explained_wrongly(thread: Thread) -> None:
    assert thread.url.startswith("https://") and thread.hardware and thread.versions and thread.cause and thread.fix
    assert thread.verdict != "wrong"


def test_answers_that_name_a_cause_are_right() -> None:
    counts = verdicts()
    named = counts.total() - counts["silent"]
    assert counts["right"] / named >= RIGHT and named / counts.total() >= NAMED


REPORTED = {
    "attention-none-kv-dtype",
    "command-repeated",
    "compile-cache-stale",
    "drafter-scale-not-loaded",
    "drafter-weight-unexpected",
    "kernel-launch-configuration",
    "mixed-files-call",
    "mixed-files-import",
    "nccl-watchdog-after-compilation",
    "oom-kill-cgroup",
    "option-after-blank",
    "option-value",
    "triton-370-pass-manager",
    "unified-memory-guard",
}
"""Rules from reports without a public thread, whose lines ``test_explain.py`` has."""


def test_each_rule_has_a_thread() -> None:
    """Except rules for the kernel's log, which doctor uses."""
    logs = [thread.lines for thread in threads()] + [log["lines"] for log in healthy()]
    found = {match.rule.id for lines in logs for match in explained(lines).found}
    assert [rule.id for rule in log_rules.rules() if rule.id not in found | REPORTED and not rule.consequence] == []


@pytest.mark.parametrize("thread", threads(), ids=lambda thread: re.sub(r"https://(github.com/)?", "", thread.url))
def test_unexplained_threads_show_a_line_of_theirs(thread: Thread) -> None:
    """Unless a line is known as a consequence, or none is of an error; the log goes on with warnings."""
    lines = [*thread.lines, *(f"WARNING [registry.py:5] {chr(97 + number)}: falling back to another" for number in range(9))]
    explanation = explained(lines)
    shown = {error.line for error in explanation.errors}
    silent = (
        thread.verdict == "silent"
        and not explanation.found
        and not thread.without_error
        and any("INFO" not in line and "DEBUG" not in line for line in thread.lines)
    )
    assert not silent or shown & {line.strip()[:600] for line in thread.lines}


def healthy() -> list[dict[str, Any]]:
    logs: list[dict[str, Any]] = tomllib.loads((Path(__file__).with_name("data") / "healthy_logs.toml").read_text())["log"]
    return logs


@pytest.mark.parametrize("log", healthy(), ids=lambda log: str(log["shows"]))
def test_a_healthy_log_has_no_failure(log: dict[str, Any]) -> None:
    """``notes``: rules that may match, because they say that the line is harmless or only slows the engine."""
    explanation = explained(log["lines"])
    assert [found.rule.id for found in explanation.found] == log.get("notes", [])


def test_threads_are_distinct() -> None:
    urls = [thread.url for thread in threads() if thread.collected != "second-known"]
    assert len(urls) == len(set(urls)) >= 150
    excerpts = [(thread.url, thread.lines) for thread in threads()]
    assert len(excerpts) == len(set(excerpts))


if __name__ == "__main__":
    print(f"{len(log_rules.rules())} rules, {dict(verdicts())}")
    for thread in threads():
        if thread.verdict != "right":
            print(f"{thread.verdict:<11}{thread.url} {thread.rules}")
