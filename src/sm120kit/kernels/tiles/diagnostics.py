"""Parse compiler messages: the probe's reports on kernels, and the reason why a tile does not compile."""

import re
from dataclasses import dataclass
from pathlib import Path

from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES, Tile

SCHEDULES = ("", "cooperative", "pingpong")
SCHEDULERS = ("persistent", "stream-k")
TYPES = ("other", "fp4", "fp8", "fp8_e5m2", "f16", "bf16")
BLOCK_SCALED = {("fp4", 16): "nvfp4", ("fp4", 32): "mxfp4", ("fp8", 32): "mxfp8", ("fp8_e5m2", 32): "mxfp8_e5m2"}
"""Names of operand types with scale factors, by the elements of K that share one."""

REPORT = re.compile(r"warning:.*\bfact\b.*?Values<(-?\d+(?:, -?\d+)*)>")
ERROR = re.compile(r"^(?P<file>[^\n:]+):(?P<line>\d+):\d+: (?:fatal )?error: (?P<text>.+)$(?=(?P<source>\n.*)?)", re.MULTILINE)
ASSERTION = re.compile(r"static[_ ]assert(?:ion)? failed(?: due to requirement .*?)?(?:: )?(?P<text>.*)")
CUTE_ASSERTION = re.compile(r'CUTE_STATIC_ASSERT_V\(.*"(?P<text>[^"]*)"\)')
CALL = "sm120kit-call"
"""The file in which line i is call i of a translation unit with several."""

CONTEXT = re.compile(r"^[^\n:]*: (?:In|At) ")
HERE = re.compile(rf"^{CALL}:(\d+):\d+:\s+required from here$")
BROKEN = re.compile(r"internal compiler error.*")


@dataclass(frozen=True)
class ProbeReport:
    """The probe's report on one kernel. ``line`` is the number of the call in its translation unit.

    ``tile`` is what the kernel's types show: grouped or dense, swapped if the output is column-major, epilogue none.
    """

    line: int
    tile: Tile
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
        values = [int(value) for value in match[1].split(", ")]
        line, stages, smem_bytes, schedule, scheduler, k_blocks = values[:6]
        tile = _tile(*values[6:])
        distinct[ProbeReport(line, tile, stages, smem_bytes, SCHEDULES[schedule], SCHEDULERS[scheduler], k_blocks)] = None
    return sorted(distinct, key=lambda report: (report.line, report.scheduler))


def _tile(*values: int) -> Tile:
    """The tile of a report, from its values after the MMA k-blocks (``probe/``)."""
    m, n, k, a, b, output, vector, scale_m, scale_n, scale_k, grouped, swap = values
    operands = [TYPES[code] for code in ((b, a) if swap else (a, b))]  # activations, weights
    if vector:
        mixed = operands[0] != operands[1]  # MXFP4 with FP8 activations, whose name does not repeat their scales
        operands = [name if mixed and name != "fp4" else BLOCK_SCALED.get((name, vector), name) for name in operands]
    return Tile(
        family="grouped" if grouped else "dense",
        dtype="x".join(dict.fromkeys(operands)),
        m=m,
        n=n,
        k=k,
        epilogue="none",
        swap=bool(swap),
        output=TYPES[output],
        scales=f"{scale_m}x{scale_n}x{scale_k}" if scale_k else "",
    )


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


def first_reasons(messages: str, tree: Path) -> dict[int, Reason]:
    """The first reason of each call of a unit that has errors, by its number: of those in templates that it instantiates."""
    parts: dict[int, str] = {}
    number = None
    for line in messages.splitlines(keepends=True):
        here = HERE.match(line)
        if CONTEXT.match(line) or here:
            number = int(here[1]) if here else None
        if number is not None:
            parts[number] = parts.get(number, "") + line
    return {number: reason for number, part in parts.items() if (reason := first_reason(part, tree))}


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
