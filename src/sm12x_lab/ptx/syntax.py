"""The statements of a PTX module: where each instruction is, and its parts."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sm120kit.core.errors import BadInput

_IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|#[^\n]*', re.DOTALL)
_LINE_DIRECTIVES = (".file", ".loc")
_HEADER = re.compile(r"\.(?P<name>version|target|address_size)\s+(?P<value>[\w.]+(?:\s*,\s*\w+)*)")
_LABEL = re.compile(r"[%$_A-Za-z][\w$]*\s*:(?!:)")
_INSTRUCTION = re.compile(
    r"(?:@(?P<predicate>!?\s*[%$_A-Za-z][\w$]*)\s*)?(?P<opcode>[a-z]\w*(?:(?:\.|::)\w+)*)\s*(?P<operands>[^;]*);"
)
_REGISTERS = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+([^;]+);")


@dataclass(frozen=True)
class PtxInstruction:
    """An instruction of a module: ``text[start:end]``, which begins in ``line``.

    ``predicate`` is empty or a register such as ``%p1`` or ``!%p1``. Vectors are single ``operands``, with their braces.
    """

    opcode: str
    operands: tuple[str, ...]
    predicate: str = ""
    line: int = 0
    start: int = 0
    end: int = 0

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode: ``("mma", "sync", "aligned", "kind::mxf4", ...)``."""
        return tuple(self.opcode.split("."))

    def without(self, modifier: str) -> PtxInstruction:
        """This instruction without one of its modifiers."""
        return replace(self, opcode=".".join(part for part in self.modifiers if part != modifier))

    def with_operand(self, index: int, operand: str) -> PtxInstruction:
        """This instruction with another operand."""
        return replace(self, operands=(*self.operands[:index], operand, *self.operands[index + 1 :]))

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)};"


def blank_comments(text: str) -> str:
    """``text`` with comments, strings and lines of a preprocessor replaced by spaces, so that offsets and lines stay."""
    return _IGNORED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def header(text: str) -> dict[str, re.Match[str]]:
    """The first ``.version``, ``.target`` and ``.address_size`` of a module, by name; group ``value`` is their argument."""
    found: dict[str, re.Match[str]] = {}
    for match in _HEADER.finditer(blank_comments(text)):
        found.setdefault(match["name"], match)
    return found


def instructions(text: str) -> Iterator[PtxInstruction]:
    """The instructions of a module, in order.

    Raises:
        BadInput: a statement that is neither an instruction, a directive nor a label.
    """
    code = blank_comments(text)
    lines = [match.start() for match in re.finditer("\n", code)]
    at = 0
    while at < len(code):
        character = code[at]
        if character.isspace() or character in "{};":
            at += 1
        elif character == ".":
            at = _after_directive(code, at)
        elif label := _LABEL.match(code, at):
            at = label.end()
        elif match := _INSTRUCTION.match(code, at):
            line = bisect.bisect_left(lines, at) + 1
            yield PtxInstruction(
                match["opcode"],
                tuple(split_operands(match["operands"])),
                (match["predicate"] or "").replace(" ", ""),
                line,
                at,
                match.end(),
            )
            at = match.end()
        else:
            line = bisect.bisect_left(lines, at) + 1
            statement = code[at:].split(";", 1)[0].split("\n", 1)[0].strip()
            raise BadInput(
                f"line {line}: not an instruction of PTX: {statement[:80]!r}", "pass the PTX that nvcc or ptxas accepts"
            )


def _after_directive(code: str, at: int) -> int:
    """The end of a directive: of its line, of its statement, or the brace that opens a function's body."""
    if match := _HEADER.match(code, at):
        return match.end()
    end_of_line = code.find("\n", at)
    if code.startswith(_LINE_DIRECTIVES, at):
        return len(code) if end_of_line < 0 else end_of_line
    if code.startswith(".section", at):
        return _end(code.find("}", at), code)
    semicolon = _end(code.find(";", at), code)
    declaration = code[at:semicolon]
    if re.search(r"\.(entry|func)\b", declaration):
        body = code.find("{", at)
        return semicolon if body < 0 or body > semicolon else body + 1
    return semicolon


def _end(index: int, code: str) -> int:
    return len(code) if index < 0 else index + 1


def split_operands(text: str) -> list[str]:
    """Operands at commas outside of braces, brackets and parentheses, without white space at their ends."""
    operands, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            operands.append(text[start:at].strip())
            start = at + 1
    operands.append(text[start:].strip())
    return [operand for operand in operands if operand]


def elements(operand: str) -> list[str]:
    """The registers of a vector ``{a, b}``; a scalar operand is a vector of one."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


def register_types(text: str) -> dict[str, set[str]]:
    """The types with which a module declares registers, by name; ``%r<9>`` is listed as ``%r``."""
    types: dict[str, set[str]] = {}
    for declaration in _REGISTERS.finditer(blank_comments(text)):
        for name in declaration[2].split(","):
            types.setdefault(re.sub(r"<\d+>$", "", name.strip()), set()).add(declaration[1])
    return types
