"""Explain excerpts of public threads. Half of the threads are held back: no rule is written from them."""

from __future__ import annotations

import hashlib
import io
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sm120kit.hosts import log_rules

THREADS = sorted(Path(__file__).with_name("data").glob("threads*.toml"))
NOW = datetime(2026, 11, 22, 12)
INDEPENDENT = {
    "independent-held": 20,
    "independent-B": 54,
    "second-held": 7,
    "vllm-held": 21,
    "systems-held": 13,
    "blind": 75,
    "fourth": 50,
}
"""Collections that were kept from the writer of the rules until they were measured, or from which no rule was written, and how
many of their threads are right at least, since rules for their classes were written."""


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
    def held_back(self) -> bool:
        return self.collected == "first" and hashlib.sha256(self.url.encode()).digest()[0] % 2 == 1

    @property
    def independent(self) -> bool:
        """Of a collection that somebody else labelled; not counted among the threads that rules were written from."""
        return self.collected in INDEPENDENT

    @property
    def verdict(self) -> str:
        """``right``, ``partly``, ``misleading``, ``wrong`` or ``silent``."""
        explanation = log_rules.explain(io.BytesIO("\n".join(self.lines).encode()), now=NOW)
        judged = {"right": self.rules, "partly": self.partly, "misleading": self.misleading}
        for verdict, rules in judged.items():
            if explanation.found and explanation.found[0].rule.id in rules:
                return verdict
        return "wrong" if explanation.known else "silent"

    @property
    def measured(self) -> str:
        """The verdict that counts: a thread that was held back keeps that of the first measurement."""
        return self.first if self.first and self.held_back else self.verdict


def threads() -> list[Thread]:
    tables = [table for path in THREADS for table in tomllib.loads(path.read_text())["thread"]]
    return [
        Thread(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}) for table in tables
    ]


def measured(held_back: bool) -> Counter[str]:
    return Counter(thread.measured for thread in threads() if thread.held_back is held_back and not thread.independent)


@pytest.mark.parametrize("thread", threads(), ids=lambda thread: re.sub(r"https://(github.com/)?", "", thread.url))
def test_no_thread_is_explained_wrongly(thread: Thread) -> None:
    assert thread.url.startswith("https://") and thread.hardware and thread.versions and thread.cause and thread.fix
    assert thread.verdict != "wrong"


def test_recall_on_threads_that_were_held_back() -> None:
    half = measured(held_back=True)
    assert half.total() >= 75
    assert half["right"] / half.total() >= 0.8


def test_recall_on_threads_that_rules_are_written_from() -> None:
    assert measured(held_back=False)["right"] / measured(held_back=False).total() >= 0.9


@pytest.mark.parametrize(("collection", "right"), INDEPENDENT.items())
def test_threads_of_independent_collections_stay_explained(collection: str, right: int) -> None:
    assert sum(thread.collected == collection and thread.verdict == "right" for thread in threads()) >= right


@pytest.mark.parametrize("thread", threads(), ids=lambda thread: re.sub(r"https://(github.com/)?", "", thread.url))
def test_unexplained_threads_show_a_line_of_theirs(thread: Thread) -> None:
    """Unless a line is known as a consequence, or none is of an error; the log goes on with warnings."""
    lines = [*thread.lines, *(f"WARNING [registry.py:5] {chr(97 + number)}: falling back to another" for number in range(9))]
    explanation = log_rules.explain(io.BytesIO("\n".join(lines).encode()), now=NOW)
    shown = {error.line for error in explanation.errors}
    silent = (
        thread.verdict == "silent"
        and not explanation.found
        and not thread.without_error
        and any("INFO" not in line and "DEBUG" not in line for line in thread.lines)
    )
    assert not silent or shown & {line.strip()[:400] for line in thread.lines}


def healthy() -> list[dict[str, Any]]:
    return tomllib.loads((Path(__file__).with_name("data") / "healthy_logs.toml").read_text())["log"]


@pytest.mark.parametrize("log", healthy(), ids=lambda log: str(log["shows"]))
def test_a_healthy_log_has_no_failure(log: dict[str, Any]) -> None:
    """``notes``: rules that may match, because they say that the line is harmless or only slows the engine."""
    explanation = log_rules.explain(io.BytesIO("\n".join(log["lines"]).encode()), now=NOW)
    assert [found.rule.id for found in explanation.found] == log.get("notes", [])


def test_threads_are_distinct() -> None:
    urls = [thread.url for thread in threads() if thread.collected != "second-known"]
    assert len(urls) == len(set(urls)) >= 150
    excerpts = [(thread.url, thread.lines) for thread in threads()]
    assert len(excerpts) == len(set(excerpts))


PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "explain.md"
GENERATED = "<!-- generated: python tests/unit/test_explain_threads.py -->"


def table() -> str:
    """The measurement page's table: verdicts by class, the first rule that would be right."""
    rows = ["| class | held back: right | wrong | silent | others: right | wrong | silent |", "|---|---|---|---|---|---|---|"]
    cells: dict[str, Counter[tuple[bool, str]]] = {}
    for thread in threads():
        if thread.independent:
            continue
        for name in (thread.rules[0], "**all**"):
            cells.setdefault(name, Counter())[thread.held_back, thread.measured] += 1
    for name in sorted(cells, key=lambda name: (name == "**all**", name)):
        counts = [cells[name][held_back, verdict] for held_back in (True, False) for verdict in ("right", "wrong", "silent")]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} |")
    half = measured(held_back=True)
    explained = half["right"] + half["wrong"]
    summary = (
        f"Held back: {half.total()} threads, precision {half['right'] / explained:.0%} "
        f"({half['right']} of {explained} explained), recall {half['right'] / half.total():.0%}."
    )
    return "\n".join([summary, "", *rows, "", *collections()])


def collections() -> list[str]:
    """Table of the collections that were measured before rules were written from them."""
    rows = [
        "| collection | threads | right | partly | wrong | silent | right with the current rules |",
        "|---|---|---|---|---|---|---|",
    ]
    found: dict[str, list[Thread]] = {}
    for thread in threads():
        found.setdefault(thread.collected, []).append(thread)
    for name, members in found.items():
        if all(thread.first for thread in members):
            before = Counter(thread.first for thread in members)
            counts = [before[verdict] for verdict in ("right", "partly", "wrong", "silent")]
            now = sum(thread.verdict == "right" for thread in members)
            share = f"{before['right']} ({before['right'] / len(members):.0%})"
            rows.append(f"| {name} | {len(members)} | {share} | {' | '.join(map(str, counts[1:]))} | {now} |")
    return rows


def test_measurement_page_has_the_current_table() -> None:
    assert PAGE.read_text().split(GENERATED)[1].strip() == table()


if __name__ == "__main__":
    PAGE.write_text(f"{PAGE.read_text().split(GENERATED)[0]}{GENERATED}\n\n{table()}\n")
    for thread in threads():
        if thread.verdict != "right":
            print(f"{thread.verdict:<11}{'held back ' if thread.held_back else ''}{thread.url} {thread.rules}")
