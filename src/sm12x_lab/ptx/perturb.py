"""Delays in PTX, drawn from a seed: before barriers, waits, copies and stores, per CTA, warp or lane group.

Odd seeds delay at each fourth site, the next odd seed at the next, so that a store can be later than all that does not wait for
it. Where a bulk copy reads shared memory, the copy engine is kept busy as well, so that the copy itself is late.
Delays change no result of a kernel whose threads wait for each other where they have to. The preloaded driver writes seed and
range of sites into the module's machine code before it is loaded (driver_shim.c): a module is assembled once for all seeds.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sm12x_lab.ptx.accesses import NO_PAIR, Pair, pairs
from sm12x_lab.ptx.syntax import PtxInstruction, blank_comments, header, instructions

MAGIC = (0x32316D73, 0x6C656478, 0x73796179, 0x0AB12039)
"""The words in machine code after which the driver finds seed, first and last site, and the number of lengths of a delay."""

LENGTHS = 15
"""Delays are 32 ns times a power of two below 2 to the power of this; the longest is half a millisecond."""

FLAG = "perturbed"
"""A file in the directory of a run: modules get sites for delays."""


@dataclass(frozen=True)
class DelaySite:
    """A place for delays, before an instruction in ``line`` of the module. ``source`` is ``FILE:LINE``, if the PTX has it.

    ``accesses`` are those that race if such a delay shows a race.
    """

    line: int
    instruction: str
    source: str = ""
    accesses: Pair = NO_PAIR


def with_delays(text: str) -> tuple[str, tuple[DelaySite, ...]]:
    """A module with a delay at each site, and the sites by their number. No site is delayed before the driver says so."""
    listed = list(instructions(text))
    found, sources = list(_sites(iter(listed))), _sources(text)
    bodies = [body.end() for body in _BODY.finditer(blank_comments(text))]
    accesses = pairs(listed, bodies, sources)
    edits = [(header(text)["address_size"].end(), _CONFIGURATION)]
    edits += [(body, _PROLOGUE) for body in bodies]
    edits += [(site.start, _delay(number, _busy(site))) for number, site in enumerate(found)]
    pieces, at = [], 0
    for place, insertion in sorted(edits, key=lambda edit: edit[0]):
        pieces += [text[at:place], insertion]
        at = place
    sites = (DelaySite(site.line, str(site), sources(site.line), accesses(site.start)) for site in found)
    return "".join([*pieces, text[at:]]), tuple(sites)


_BODY = re.compile(r"\.(?:entry|func)\b[^{};]*\{")
_LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)


def _sites(listed: Iterator[PtxInstruction]) -> Iterator[PtxInstruction]:
    """Instructions that threads wait at, or that other threads wait for; of stores, atomics or loads in a row the first.

    Polls of a barrier have none: their number depends on time, and with it the delays that follow.
    """
    last = ""
    for instruction in listed:
        kind = _kind(instruction.modifiers)
        if kind and not (kind == last and kind in ("store", "shared", "atomic", "load")):
            yield instruction
        last = kind or last


def _kind(parts: tuple[str, ...]) -> str:
    match parts[0]:
        case "bar" | "barrier" | "griddepcontrol" | "fence" | "membar":
            return "barrier"
        case "mbarrier":
            return "" if parts[1] in ("try_wait", "test_wait", "pending_count") else "barrier"
        case "cp":
            return "wait" if {"wait_group", "wait_all", "commit_group"} & {*parts} else "copy"
        case "stmatrix":
            return "shared"
        case "st":
            return "" if {"param", "local"} & {*parts} else "shared" if "shared" in " ".join(parts) else "store"
        case "red" | "atom":
            return "atomic"
        case "ldmatrix":
            return "load"
        case "ld":
            return "load" if parts[1].startswith("shared") else ""
        case _:
            return ""


def _sources(text: str) -> Callable[[int], str]:
    """A function from a line of the module to ``FILE:LINE`` of the source; empty without line information."""
    files, lines, places = dict(_FILE.findall(text)), [], []
    for number, line in enumerate(text.splitlines(), 1):
        if place := _LOCATION.match(line):
            lines.append(number)
            places.append(f"{files.get(place[1], '?')}:{place[2]}")
    return lambda line: places[at - 1] if (at := bisect.bisect_right(lines, line)) else ""


_WORDS = ", ".join(map(str, (*MAGIC, 0, 0, 0, LENGTHS)))
_CONFIGURATION = f"\n.global .align 16 .u32 sm120$delays[8] = {{{_WORDS}}};"

_PROLOGUE = """
.reg .b32 sm120$seed, sm120$first, sm120$last, sm120$lengths, sm120$count, sm120$cta, sm120$warp, sm120$lanes;
{
.reg .b64 sm120$g; .reg .b32 sm120$x<3>;
mov.u64 sm120$g, sm120$delays;
ld.global.v4.u32 {sm120$seed, sm120$first, sm120$last, sm120$lengths}, [sm120$g+16];
mov.u32 sm120$count, 0;
mov.u32 sm120$cta, %ctaid.z; mov.u32 sm120$x1, %nctaid.y; mov.u32 sm120$x2, %ctaid.y;
mad.lo.u32 sm120$cta, sm120$cta, sm120$x1, sm120$x2;
mov.u32 sm120$x1, %nctaid.x; mov.u32 sm120$x2, %ctaid.x;
mad.lo.u32 sm120$cta, sm120$cta, sm120$x1, sm120$x2;
mov.u32 sm120$x0, %tid.z; mov.u32 sm120$x1, %ntid.y; mov.u32 sm120$x2, %tid.y;
mad.lo.u32 sm120$x0, sm120$x0, sm120$x1, sm120$x2;
mov.u32 sm120$x1, %ntid.x; mov.u32 sm120$x2, %tid.x;
mad.lo.u32 sm120$x0, sm120$x0, sm120$x1, sm120$x2;
shr.u32 sm120$warp, sm120$x0, 5;
shr.u32 sm120$lanes, sm120$x0, 3;
}
"""


def _mixed(register: str, other: str) -> str:
    """Mix the bits of a register, so that each depends on all (a multiply and shift hash)."""
    step = f"shr.u32 {other}, {register}, 16; xor.b32 {register}, {register}, {other};"
    return f"{step} mul.lo.u32 {register}, {register}, 2146121005; {step} mul.lo.u32 {register}, {register}, 2221713035; {step}"


_TENSOR = re.compile(r"cp\.(?:reduce\.)?async\.bulk\.tensor\.(\dd)\.global\.shared")


def _busy(site: PtxInstruction) -> str:
    """Where a bulk copy reads shared memory: prefetches of what it writes, which the copy engine does before it."""
    if tensor := _TENSOR.match(site.opcode):
        prefetch = f"cp.async.bulk.prefetch.tensor.{tensor[1]}.L2.global.tile {site.operands[0]};"
    elif re.match(r"cp\.(?:reduce\.)?async\.bulk\.global\.shared", site.opcode):
        prefetch = f"cp.async.bulk.prefetch.L2.global {site.operands[0]}, {site.operands[2]};"
    else:
        return ""
    guard = site.predicate[1:] if site.predicate.startswith("!") else f"!{site.predicate}"
    return f"""{f"@{guard} bra sm120$end;" if site.predicate else ""}
@!sm120$p bra sm120$end;
mov.u32 sm120$t, 0;
sm120$again:
{prefetch}
add.u32 sm120$t, sm120$t, 1; setp.lt.u32 sm120$p, sm120$t, 128;
@sm120$p bra sm120$again;
sm120$end:"""


def _delay(number: int, busy: str) -> str:
    """One site. Seed and site decide who is delayed: a CTA, a warp or eight lanes; an eighth of them are, each time."""
    return f"""{{
.reg .b32 sm120$h, sm120$t, sm120$v; .reg .pred sm120$on, sm120$p;
add.u32 sm120$count, sm120$count, 1;
setp.le.u32 sm120$on, sm120$first, {number};
setp.gt.and.u32 sm120$on, sm120$last, {number}, sm120$on;
mad.lo.u32 sm120$h, {number}, 2246822507, sm120$seed;
{_mixed("sm120$h", "sm120$t")}
shr.u32 sm120$t, sm120$seed, 1; xor.b32 sm120$t, sm120$t, {number % 4}; and.b32 sm120$t, sm120$t, 3;
and.b32 sm120$v, sm120$seed, 1; mul.lo.u32 sm120$v, sm120$v, sm120$t;
setp.eq.and.u32 sm120$on, sm120$v, 0, sm120$on;
and.b32 sm120$t, sm120$h, 3; setp.ge.u32 sm120$p, sm120$t, 1;
selp.b32 sm120$v, sm120$warp, 0, sm120$p; setp.ge.u32 sm120$p, sm120$t, 3;
selp.b32 sm120$v, sm120$lanes, sm120$v, sm120$p;
mad.lo.u32 sm120$h, sm120$v, 2654435769, sm120$h;
mad.lo.u32 sm120$h, sm120$cta, 3266489917, sm120$h;
mad.lo.u32 sm120$h, sm120$count, 668265263, sm120$h;
{_mixed("sm120$h", "sm120$t")}
and.b32 sm120$t, sm120$h, 7; setp.eq.and.u32 sm120$p, sm120$t, 0, sm120$on;
shr.u32 sm120$h, sm120$h, 3; rem.u32 sm120$h, sm120$h, sm120$lengths;
mov.u32 sm120$t, 32; shl.b32 sm120$t, sm120$t, sm120$h;
@sm120$p nanosleep.u32 sm120$t;
{busy}
}}
"""
