"""Parse compiler messages: the probe's reports on kernels, and the reason why a tile does not compile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sm120kit.kernels.records import SMEM_CAPACITY_BYTES, Tile

SCHEDULES = ("", "cooperative", "pingpong")
SCHEDULERS = ("persistent", "stream-k")

REPORT = re.compile(r"warning:.*\bfact\b.*?Values<(-?\d+(?:, -?\d+)*)>")
ERROR = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?:fatal )?error: (?P<text>.+)$(?=(?P<source>\n.*)?)", re.MULTILINE)
ASSERTION = re.compile(r"static[_ ]assert(?:ion)? failed(?: due to requirement .*?)?(?:: )?(?P<text>.*)")
CUTE_ASSERTION = re.compile(r'CUTE_STATIC_ASSERT_V\(.*"(?P<text>[^"]*)"\)')
BROKEN = re.compile(r"internal compiler error.*")


@dataclass(frozen=True)
class ProbeReport:
    """The probe's report on one kernel. ``line`` is the number of the call in its translation unit."""

    line: int
    stages: int
    smem_bytes: int
    schedule: str
    scheduler: str
    k_blocks: int


@dataclass(frozen=True)
class Reason:
    """The error that explains a failed compile: message, file:line (relative to the tree if inside), and its cause.

    ``about_tile`` is true for a static assertion and for any error in a file of the tree. Otherwise the cause is the generated
    translation unit or the toolchain.
    """

    text: str
    where: str
    about_tile: bool


def reports(messages: str) -> list[ProbeReport]:
    """The distinct reports of the probe, in the order of the kernels."""
    distinct: dict[ProbeReport, None] = {}
    for match in REPORT.finditer(messages):
        line, stages, smem_bytes, schedule, scheduler, k_blocks = (int(value) for value in match[1].split(", "))
        distinct[ProbeReport(line, stages, smem_bytes, SCHEDULES[schedule], SCHEDULERS[scheduler], k_blocks)] = None
    return sorted(distinct, key=lambda report: (report.line, report.scheduler))


def breakdown(messages: str) -> str:
    """The message of an internal compiler error; empty when there is none."""
    match = BROKEN.search(messages)
    return match[0] if match else ""


def first_reason(messages: str, tree: Path) -> Reason | None:
    """The first static assertion that failed, else the first error; None when there was no error."""
    first = None
    for match in ERROR.finditer(messages):
        # An assertion whose condition does not compile, such as a division by an extent of 0, counts as failed.
        assertion = ASSERTION.search(match["text"]) or CUTE_ASSERTION.search(match["source"] or "")
        file = match["file"].removeprefix(f"{tree}/")
        text = (assertion["text"] if assertion else match["text"]).strip().strip('"')
        reason = Reason(text, f"{file}:{match['line']}", bool(assertion) or file != match["file"])
        if assertion:
            return reason
        first = first or reason
    return first


def plain(text: str, tile: Tile) -> str:
    """A compiler message in plain English; the message itself if there is no translation."""
    vector = 16 if tile.dtype == "nvfp4" else 32
    block = 4 * vector
    if "TMA requires CTA_Tile and SLayout top-level size equivalence" in text or "Shape Divisibility Condition" in text:
        if tile.k % block:
            return f"a block of 4 scale factors covers K={block} at scale vector {vector}: it does not fit K={tile.k}"
        return f"a block of scale factors covers 128 rows: it does not fit {tile.m}x{tile.n}"
    if "Specialization requires Stages set to value 2 or more" in text:
        return f"fewer than 2 stages fit in {SMEM_CAPACITY_BYTES} B"
    return text
