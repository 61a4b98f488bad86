"""Who stores and who reads the output tile in shared memory of the fused MoE of b12x and FlashInfer, from their kernels' PTX.

After the MMAs of the second GEMM, four warps store the bf16 tile with ``st.shared.b32``. A loop reads it, two elements with
``ld.shared.b16`` a turn, and adds them to the output with ``red...bf16x2``, or eight with ``ld.shared.v4.u32``, and writes
products with ``st.global.v4.u32``. Addresses are computed from the number of the thread by integer instructions, which are
evaluated here for all 128 threads and all turns of the loop.
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
    "not": np.invert,
    "max": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
}
COMPARISONS: dict[str, Callable[..., NDArray[np.bool_]]] = {"setp.ge.u32": np.greater_equal}
TABLE = {"ld.shared.s32": 4, "ld.shared.v2.u32": 8}
"""Loads of a row's token, alone or with its weight, and the bytes of a row of the table."""
ELEMENTS = {"ld.shared.b16": 1, "ld.shared.v4.u32": 8}
"""Loads of elements of the tile, and how many each has."""
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
            if not each.opcode.startswith(("bra", "bar.")) and not each.operands[0].startswith("["):
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
        if operand in ("0", "0f00000000"):
            return True
        writer = self.statements[index := max(index for index in self.writers[operand] if index < at)]
        if not writer.opcode.startswith(("mul.f32", "mov.", "cvt.")):
            return False
        sources = [each for operand in writer.operands[1:] for each in re.findall(r"[%\w]+", operand)]
        zeros = [each == "0f00000000" or (each in self.writers and self.is_zero(each, index)) for each in sources]
        return any(zeros) if writer.opcode == "mul.f32" else all(zeros)


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

    def entered(self, start: int, ends: list[int], labels: dict[str, int]) -> NDArray[np.bool_]:
        """Threads that no branch from ``start`` on leads past all ``ends``, as far as their numbers decide about it."""
        found = np.ones(THREADS, bool)
        for index in range(start, ends[0]):
            branch = self.module.statements[index]
            if branch.opcode == "bra" and labels[branch.operands[0]] > ends[-1]:
                compare = self.module.statements[max(each for each in self.module.writers[branch.guard[1:]] if each < index)]
                try:
                    left, right = (self.value(operand, index) for operand in compare.operands[1:])
                except ValueError:
                    continue
                found &= ~COMPARISONS[compare.opcode](left, right)
        return found

    def _result(self, index: int) -> Words:
        statement = self.module.statements[index]
        if statement.opcode == "shfl.sync.idx.b32" and not statement.guard:
            source, lane = (self.value(operand, index) for operand in statement.operands[1:3])
            warps = np.broadcast_to(source, (*source.shape[:-1], THREADS)).reshape(*source.shape[:-1], -1, 32)
            return np.repeat(warps[..., int(lane)], 32, axis=-1)
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
    module, ends = Module(text), defaultdict[int, list[int]](list)
    last = load = -1
    for index, each in enumerate(module.statements):
        if each.opcode == "st.shared.b32":
            last = index
        elif each.opcode.startswith("ld."):
            load = index
        elif re.match(r"red\..*\.bf16x2", each.opcode) or (
            each.opcode == "st.global.v4.u32" and module.statements[load].opcode == "ld.shared.v4.u32"
        ):
            ends[last].append(index)
    return [_epilogue(module, stores, outputs) for stores, outputs in ends.items()]


def _epilogue(module: Module, last: int, ends: list[int]) -> Epilogue:
    """The epilogue with the store to shared memory at statement ``last``, whose loops write to the output at ``ends``."""
    code, threads = module.statements, Threads(module)
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

    labels = {each.operands[0]: index for index, each in enumerate(code) if not each.opcode}
    for end in ends:
        back = next(index for index in range(end, len(code)) if code[index].opcode == "bra")
        loop = labels[code[back].operands[0]]
        for each in code[loop:back] if loop > last else []:  # else the end is in no loop, but that over tiles
            if each.opcode == "add.s32" and each.operands[0] == each.operands[1]:
                threads.count(each.operands[0], loop, int(each.operands[2]))
    # The table of tokens is read by row. No row beyond the tile is read, nor, if warps do not take turns at rows, beyond the
    # first of the next warp; and with a single token, nothing by the warps that branch past the loop.
    inside = np.broadcast_to(threads.entered(last, ends, labels), warps.shape)
    tokens = [index for index in range(last, ends[-1]) if code[index].opcode in TABLE]
    if tokens:
        row = (address := threads.value(code[tokens[0]].address, tokens[0])) - address.min()
        row //= TABLE[code[tokens[0]].opcode]
        step, span = row[1, 0] - row[0, 0], row[0, 64] - row[0, 0]
        inside = (row < rows) & ((row - row[0] < span) | (step > span))
    for index in range(last, ends[-1]):
        for element in range(ELEMENTS.get(code[index].opcode, 0)):
            address = _unswizzled(threads.value(code[index].address, index)) + np.uint32(element * ELEMENT)
            readers[places(np.broadcast_to(address, warps.shape)[inside])] = warps[inside]
    straight = takewhile(lambda index: code[index].opcode not in ("", "bra"), range(last, ends[0]))
    bars = [index for index in straight if code[index].opcode == "bar.sync" and not code[index].guard]
    numbers = [int(threads.value(operand, bars[0])) for operand in code[bars[0]].operands] if bars else []
    return Epilogue(writers, multiplied, zero, readers, (numbers[0], numbers[1]) if bars else None)


def _unswizzled(address: Words) -> Words:
    """The address before the swizzle of 128 bytes, which changes bits 4 to 6 by bits 7 to 9."""
    linear: Words = address ^ (address >> np.uint32(3) & np.uint32(0x70))
    return linear
