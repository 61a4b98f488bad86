"""The two accesses of a race: what a delay makes late, and what in the same kernel touches the same variable or parameter.

Addresses are followed back through the instructions that compute them: an access may touch another element.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from sm12x_lab.ptx.syntax import PtxInstruction, elements

Memory = frozenset[str]  # variables and parameters from which an address is computed

_NAME = re.compile(r"[%$_A-Za-z][\w$.]*")
_COMPUTED = re.compile(r"(mov|add|sub|mad|mul|cvta|cvt|or|and|xor|shl|shr|selp|lop3|bfi|bfe|shf|min|max|prmt|ld\.param)\b")


@dataclass(frozen=True)
class Access:
    """An instruction that reads or writes memory; one that copies does both."""

    number: int
    writes: Memory
    reads: Memory

    def conflicts(self, other: Access) -> bool:
        """Whether both touch a memory, and at least one of them writes it."""
        return bool(self.writes & (other.writes | other.reads) or other.writes & self.reads)


def accesses(listed: Sequence[PtxInstruction]) -> Iterator[Access]:
    """The accesses to shared and global memory of one kernel, by the number of their instruction."""
    sources: dict[str, list[str]] = {}
    for instruction in listed:
        operands = instruction.operands
        if len(operands) > 1 and _COMPUTED.match(instruction.opcode):
            for register in elements(operands[0]):
                sources.setdefault(register, []).extend(name for each in operands[1:] for name in _NAME.findall(each))

    @cache
    def roots(register: str) -> Memory:
        found, seen, waiting = set(), set(), [register]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                found |= {name} if not name.startswith("%") else set()
                waiting += sources.get(name, [])
        return frozenset(found)

    for number, instruction in enumerate(listed):
        places = [operand for operand in instruction.operands if operand.startswith("[")]
        written, read = _places(instruction.modifiers, places)
        memory = [frozenset().union(*(roots(name) for name in _NAME.findall(place))) for place in (*written, *read)]
        access = Access(number, frozenset().union(*memory[: len(written)]), frozenset().union(*memory[len(written) :]))
        if access.writes or access.reads:
            yield access


def _places(opcode: Sequence[str], places: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The address operands that an instruction writes and reads; none of barriers, parameters and local memory."""
    if not places or {"param", "local", "const", "prefetch"} & {*opcode}:
        return (), ()
    match opcode[0]:
        case "ld" | "ldmatrix":
            return (), places[:1]
        case "st" | "stmatrix" | "red" | "atom":
            return places[:1], ()
        case "cp" if len(places) > 1:
            return places[:1], places[1:2]
        case _:
            return (), ()


@dataclass(frozen=True)
class Pair:
    """What a delay makes late, and the nearest of ``others`` in its kernel that conflict with it; empty if none does."""

    late: str = ""
    other: str = ""
    others: int = 0


NO_PAIR = Pair()


def pairs(listed: Iterable[PtxInstruction], bodies: Sequence[int], source: Callable[[int], str]) -> Callable[[int], Pair]:
    """A function from the place of an instruction, its ``start``, to what a delay before it makes late.

    ``bodies`` are the places where the bodies of functions begin, ``source`` gives ``FILE:LINE`` of a line of the module.
    """
    kernels = [(kernel, list(accesses(kernel))) for kernel in _divided(listed, bodies)]

    def described(instruction: PtxInstruction) -> str:
        where = source(instruction.line)
        return f"line {instruction.line}{f' ({where})' if where else ''}: {str(instruction)[:160]}"

    def pair(start: int) -> Pair:
        kernel, found = kernels[bisect.bisect_right(bodies, start)]
        late = next((access for access in found if kernel[access.number].start >= start), None)
        if late is None:
            return NO_PAIR
        mine = kernel[late.number]
        others = [other for other in found if other is not late and late.conflicts(other)]
        # One that does something else is the likelier partner than the same copy of another stage.
        others.sort(key=lambda other: (kernel[other.number].opcode == mine.opcode, abs(other.number - late.number)))
        return Pair(described(mine), described(kernel[others[0].number]) if others else "", len(others))

    return pair


def _divided(listed: Iterable[PtxInstruction], bodies: Sequence[int]) -> list[list[PtxInstruction]]:
    kernels: list[list[PtxInstruction]] = [[] for _ in range(len(bodies) + 1)]
    for instruction in listed:
        kernels[bisect.bisect_right(bodies, instruction.start)].append(instruction)
    return kernels
