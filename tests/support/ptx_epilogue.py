"""Who stores and who reads the output tile in shared memory of b12x's fused MoE, from the PTX of its kernels.

After the MMAs of the second GEMM, the four MMA warps store the bf16 tile with ``st.shared.b32``. A loop reads it, two
elements with ``ld.shared.b16`` a turn, and adds them to the output with ``red...bf16x2``. Addresses are computed from the
number of the thread by integer instructions, which are evaluated here for all 128 threads and all turns of the loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
THREADS, COLUMNS, ELEMENT = 128, 128, 2
TURNS = 64
"""Turns of the loop for a tile of 128 rows, of whose elements each thread reads two a turn."""
SHARED = 1024
"""The address of dynamic shared memory: any multiple of its alignment, by which the tile is swizzled."""
OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov": lambda a: a,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "mad": lambda a, b, c: a * b + c,
}
_STATEMENT = re.compile(r"(?:(\$\w+):)|(@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);")
_OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^]]*\]|[^,{\[])+")
_REGISTER = re.compile(r"%[a-z]+\d+")


@dataclass(frozen=True)
class Statement:
    """An instruction, or a label, which has no ``opcode``."""

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""

    @property
    def address(self) -> str:
        """The register with the address of a load or store."""
        (operand,) = (each for each in self.operands if each.startswith("["))
        return operand.strip("[]")


def statements(text: str) -> Iterator[Statement]:
    """The instructions and labels of a module in order, those of inline assembly as well."""
    for label, guard, opcode, operands in _STATEMENT.findall(re.sub(r"//.*", "", text)):
        yield Statement(opcode, tuple(each.strip() for each in _OPERAND.findall(operands)) or (label,), guard.strip())


class Module:
    """The statements of a kernel, and those that write each register."""

    def __init__(self, text: str) -> None:
        self.statements = list(statements(text))
        self.writers: dict[str, list[int]] = defaultdict(list)
        for index, each in enumerate(self.statements):
            if not each.opcode.startswith(("st.", "bra", "bar.", "red.")):
                for register in _REGISTER.findall(each.operands[0]):
                    self.writers[register].append(index)

    @cached_property
    def multiplied(self) -> set[str]:
        """Registers that depend on the result of an MMA."""
        readers: dict[str, set[str]] = defaultdict(set)
        found: set[str] = set()
        for register, writers in self.writers.items():
            for writer in (self.statements[index] for index in writers):
                if writer.opcode.startswith("mma."):
                    found.add(register)
                for source in _REGISTER.findall(" ".join(writer.operands[1:])):
                    readers[source].add(register)
        waiting = [*found]
        while waiting:
            new = readers[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def is_zero(self, operand: str, at: int) -> bool:
        """Whether an operand of statement ``at`` is the constant 0, or a product with it, converted or packed."""
        if operand == "0f00000000":
            return True
        writer = self.statements[index := max(index for index in self.writers[operand] if index < at)]
        sources = [each for operand in writer.operands[1:] for each in re.findall(r"[%\w]+", operand)]
        zeros = [each == "0f00000000" or (each in self.writers and self.is_zero(each, index)) for each in sources]
        return any(zeros) if writer.opcode == "mul.f32" else writer.opcode.startswith(("mov.", "cvt.")) and all(zeros)


class Threads:
    """Values of registers for all threads, and in a loop for all of its turns; around it, those of the first turn."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.counters: dict[str, tuple[int, Words]] = {}
        self._known: dict[int, Words] = {}

    def count(self, register: str, loop: int, step: int) -> None:
        """Let a register count the turns of the loop at statement ``loop``."""
        turns = np.arange(TURNS, dtype=np.uint32)[:, None] * np.uint32(step)
        self.counters[register] = loop, self.value(register, loop) + turns

    def value(self, operand: str, at: int) -> Words:
        """The value of an operand of statement ``at``."""
        if re.fullmatch(r"-?\d+", operand):
            return np.array(int(operand) % 2**32, np.uint32)
        if operand == "__dynamic_shmem__0":
            return np.array(SHARED, np.uint32)
        if operand == "%tid.x":
            return np.arange(THREADS, dtype=np.uint32)
        loop, values = self.counters.get(operand, (at, None))
        if values is not None and at > loop:
            return values
        index = max(index for index in self.module.writers[operand] if index < at)
        if index not in self._known:
            self._known[index] = self._result(index)
        return self._known[index]

    def _result(self, index: int) -> Words:
        statement = self.module.statements[index]
        name, _, kind = statement.opcode.partition(".")
        plain = re.fullmatch(r"(lo\.)?[bsu]32", kind) and (name, kind) != ("shr", "s32")
        if name not in OPERATIONS or not plain or statement.guard:
            raise ValueError(f"an address is not computed from the number of the thread: {statement}")
        return OPERATIONS[name](*(self.value(operand, index) for operand in statement.operands[1:]))


@dataclass(frozen=True)
class Epilogue:
    """One copy of the epilogue: the loop over output tiles is unrolled.

    By row and column, ``writers`` has the warp that stores each element of the tile, ``multiplied`` whether what it stores
    depends on an MMA, and ``zero`` whether it is the constant 0; ``readers`` has the warp that reads it, -1 where none does.
    ``barrier`` has the number of the barrier at which every warp waits between its stores and its reads, and how many
    threads wait there; None if there is none.
    """

    writers: NDArray[np.int8]
    multiplied: NDArray[np.bool_]
    zero: NDArray[np.bool_]
    readers: NDArray[np.int8]
    barrier: tuple[int, int] | None

    @property
    def foreign(self) -> int:
        """How many elements are read by another warp than that which stored them."""
        return int(((self.readers != self.writers) & (self.readers >= 0)).sum())


def epilogues(text: str) -> list[Epilogue]:
    """The epilogues of a kernel."""
    module = Module(text)
    adds = (index for index, each in enumerate(module.statements) if re.match(r"red\..*\.bf16x2", each.opcode))
    return [_epilogue(module, index) for index in adds]


def _epilogue(module: Module, end: int) -> Epilogue:
    """The epilogue whose loop adds to the output at statement ``end``."""
    code, threads = module.statements, Threads(module)
    last = max(index for index in range(end) if code[index].opcode == "st.shared.b32")
    stores = list(takewhile(lambda index: code[index].opcode == "st.shared.b32", range(last, 0, -1)))
    addresses = [_unswizzled(threads.value(code[index].address, index)) for index in stores]
    base, rows = min(address.min() for address in addresses), len(stores) * THREADS * 2 // COLUMNS

    def places(address: Words) -> tuple[Words, Words]:
        """Rows and columns of elements: the tile's left and right half lie one behind the other."""
        half, rest = np.divmod((address - base) // ELEMENT, rows * COLUMNS // 2)
        return rest // (COLUMNS // 2), half * (COLUMNS // 2) + rest % (COLUMNS // 2)

    warps = np.broadcast_to(np.arange(THREADS, dtype=np.int8) // 32, (TURNS, THREADS))
    writers, readers = (np.full((rows, COLUMNS), -1, np.int8) for _ in range(2))
    multiplied, zero = (np.zeros((rows, COLUMNS), bool) for _ in range(2))
    for index, address in zip(stores, addresses, strict=True):
        for element in (0, ELEMENT):
            place, stored = places(address + np.uint32(element)), code[index].operands[1]
            writers[place] = warps[0]
            multiplied[place], zero[place] = stored in module.multiplied, module.is_zero(stored, index)
    if (writers < 0).any():
        raise ValueError("the stores do not fill a tile")

    back = next(index for index in range(end, len(code)) if code[index].opcode == "bra")
    (step,) = (each for each in code[end:back] if each.opcode == "add.s32" and each.operands[0] == each.operands[1])
    loop = code.index(Statement("", code[back].operands))
    threads.count(step.operands[0], loop, int(step.operands[2]))
    # Of a tile of 64 rows, two warps read only if an expert had rows beyond it. The table of tokens is read by row.
    tokens = [threads.value(code[index].address, index) for index in range(loop, end) if code[index].opcode == "ld.shared.s32"]
    row = (tokens[0] - tokens[0].min()) // 4 if tokens else np.zeros((TURNS, THREADS), np.uint32)
    inside = np.broadcast_to(row < rows, warps.shape)
    for index in range(loop, end):
        if code[index].opcode == "ld.shared.b16":
            address = np.broadcast_to(_unswizzled(threads.value(code[index].address, index)), warps.shape)
            readers[places(address[inside])] = warps[inside]
    straight = takewhile(lambda index: code[index].opcode not in ("", "bra"), range(last, end))
    bars = [index for index in straight if code[index].opcode == "bar.sync" and not code[index].guard]
    numbers = [int(threads.value(operand, bars[0])) for operand in code[bars[0]].operands] if bars else []
    return Epilogue(writers, multiplied, zero, readers, (numbers[0], numbers[1]) if bars else None)


def _unswizzled(address: Words) -> Words:
    """The address before the swizzle of 128 bytes, which changes bits 4 to 6 by bits 7 to 9."""
    linear: Words = address ^ (address >> np.uint32(3) & np.uint32(0x70))
    return linear
