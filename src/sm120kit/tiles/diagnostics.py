"""What a compiler's messages say about kernels: the probe's reports, and the first reason why a tile does not compile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sm120kit.records import SMEM_CAPACITY_BYTES, Tile

SCHEDULES = ("", "cooperative", "pingpong")
SCHEDULERS = ("persistent", "stream-k")

REPORT = re.compile(r"warning:.*\bfact\b.*?Values<(-?\d+(?:, -?\d+)*)>")
ERROR = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?:fatal )?error: (?P<text>.+)$(?=(?P<source>\n.*)?)", re.MULTILINE)
ASSERTION = re.compile(r"static[_ ]assert(?:ion)? failed(?: due to requirement .*?)?(?:: )?(?P<text>.*)")
CUTE_ASSERTION = re.compile(r'CUTE_STATIC_ASSERT_V\(.*"(?P<text>[^"]*)"\)')
BROKEN = re.compile(r"internal compiler error.*|Killed signal.*|out of memory.*")


@dataclass(frozen=True)
class Report:
    """One kernel as the probe saw it: ``line`` is the call's number in its translation unit."""

    line: int
    stages: int
    smem_bytes: int
    schedule: str
    scheduler: str
    k_blocks: int


@dataclass(frozen=True)
class Reason:
    """The first error: the compiler's words, file:line (below the tree where it is there), and whether it is about the tile.

    That is a static assertion, or any error in a file of the tree. Else our own text or the toolchain is at fault.
    """

    text: str
    where: str
    about_tile: bool


def reports(messages: str) -> list[Report]:
    """The probe's reports, each once, in the order of the kernels."""
    found: dict[Report, None] = {}
    for match in REPORT.finditer(messages):
        line, stages, smem_bytes, schedule, scheduler, k_blocks = (int(word) for word in match[1].split(", "))
        found[Report(line, stages, smem_bytes, SCHEDULES[schedule], SCHEDULERS[scheduler], k_blocks)] = None
    return sorted(found, key=lambda report: (report.line, report.scheduler))


def breakdown(messages: str) -> str:
    """What the compiler says when it itself broke or was ended; empty when it did its work."""
    found = BROKEN.search(messages)
    return found[0] if found else ""


def first_reason(messages: str, tree: Path) -> Reason | None:
    """The first static assertion that failed, else the first error; None when there was no error."""
    first = None
    for match in ERROR.finditer(messages):
        # An assertion whose condition cannot even be formed, such as a division by an extent of 0, is one that failed.
        assertion = ASSERTION.search(match["text"]) or CUTE_ASSERTION.search(match["source"] or "")
        file = match["file"].removeprefix(f"{tree}/")
        text = (assertion["text"] if assertion else match["text"]).strip().strip('"')
        reason = Reason(text, f"{file}:{match['line']}", bool(assertion) or file != match["file"])
        if assertion:
            return reason
        first = first or reason
    return first


def plain(text: str, tile: Tile) -> str:
    """A compiler's reason in plain words; its own where we know none."""
    vector = 16 if tile.dtype == "nvfp4" else 32
    block = 4 * vector
    if "TMA requires CTA_Tile and SLayout top-level size equivalence" in text or "Shape Divisibility Condition" in text:
        if tile.k % block:
            return f"a block of 4 scale factors covers K={block} at scale vector {vector}: it does not fit K={tile.k}"
        return f"a block of scale factors covers 128 rows: it does not fit {tile.m}x{tile.n}"
    if "Specialization requires Stages set to value 2 or more" in text:
        return f"fewer than 2 stages fit in {SMEM_CAPACITY_BYTES} B"
    return text
