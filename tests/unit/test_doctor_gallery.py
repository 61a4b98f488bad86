"""Doctor on hosts of public threads: the first problem is what the thread ended with, and hosts that work are fit.

``python tests/unit/test_doctor_gallery.py`` prints the tables of docs/measurements/doctor.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import recorded_hosts

from sm120kit.hosts import doctor
from sm120kit.hosts.doctor import Finding, Status
from sm120kit.hosts.doctor._findings import Impact, ok
from sm120kit.hosts.facts import probe
from sm120kit.recipes import configurations

HOSTS = recorded_hosts.load()
PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "doctor.md"


def findings_on(entry: dict[str, Any], root: Path) -> tuple[Finding, ...]:
    """Findings on a host, for its configuration if it has a published one."""
    name = entry.get("configuration")
    checks = doctor.checks_for(configurations.load(name)) if name else doctor.CHECKS
    findings = doctor.diagnose(probe(recorded_hosts.build(entry, root)), checks)
    works = {finding.check: finding.verdict.impact for finding in findings if finding.check in entry.get("works", ())}
    assert set(works.values()) <= {Impact.MINOR}, works
    measured = [Finding("measure-bytes", "", ok("unchanged"), "")] if entry.get("measured") else []
    return doctor.with_measurements(findings, measured)


def first_problem(findings: Sequence[Finding]) -> str:
    """The most likely cause; "" if no problem breaks or slows the host."""
    return "" if doctor.fit(findings) else doctor.ranked(findings)[0].check


@pytest.mark.parametrize("entry", HOSTS, ids=lambda entry: entry["name"])
def test_host_of_a_thread(entry: dict[str, Any], tmp_path: Path) -> None:
    findings = findings_on(entry, tmp_path / "host")
    first = first_problem(findings)
    assert first in entry["causes"] if entry["causes"] else not first, [finding.check for finding in doctor.ranked(findings)]
    if first:
        assert entry.get("explains", "") in doctor.ranked(findings)[0].verdict.cause
    statuses = {finding.check: finding.status for finding in findings}
    assert {name for name in entry.get("unknown", ()) if statuses[name] is not Status.UNKNOWN} == set()
    assert not [finding for finding in findings if finding.verdict.fact.startswith("the check failed")]


def test_gallery_has_sources_and_every_state() -> None:
    assert len(HOSTS) >= 25 and len({entry["name"] for entry in HOSTS}) == len(HOSTS)
    assert {entry["state"] for entry in HOSTS} == {"failing", "solved", "benchmarked", "elsewhere"}
    for entry in HOSTS:
        assert entry["url"].startswith("https://") and entry["ended"]
        assert bool(entry["causes"]) == (entry["state"] == "failing"), entry["name"]


def tables() -> str:
    """Markdown: each host with its first problem, and how often each cause was found."""
    rows, counts = [], Counter[tuple[str, str]]()
    with TemporaryDirectory() as directory:
        for number, entry in enumerate(HOSTS):
            first = first_problem(findings_on(entry, Path(directory, str(number))))
            expected = " or ".join(entry["causes"])
            counts[expected or "none", (entry["causes"] and first in entry["causes"] and expected) or first or "none"] += 1
            rows.append(f"| [{entry['name']}]({entry['url']}) | {entry['state']} | {expected or 'none'} | {first or 'none'} |")
    expectations = list(dict.fromkeys(expected for expected, _ in counts))
    found = list(dict.fromkeys([*expectations, *(first for _, first in counts)]))
    matrix = [f"| thread ended with | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}"]
    matrix += [f"| {name} | {' | '.join(str(counts[name, first] or '') for first in found)} |" for name in expectations]
    right = sum(count for (expected, first), count in counts.items() if expected == first)
    head = ["| host | state | thread ended with | first problem |", "|---|---|---|---|"]
    return "\n".join([f"{right} of {len(HOSTS)} as the thread.", "", *matrix, "", *head, *rows]) + "\n"


def test_page_has_the_tables() -> None:
    assert tables() in PAGE.read_text()


if __name__ == "__main__":
    print(tables(), end="")
