"""Exact counts of the tiles that a build has compiled: instructions, registers, spills, CTAs a multiprocessor, waves, bytes.

Counts come from the machine code and the tile table. They do not order tiles by speed: tiles whose counts are alike differ by
more than 15 % in what was measured elsewhere, and nothing here ran on SM12x.
"""

from __future__ import annotations

import re
import struct
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.errors import BadInput, NotFound, RequirementMissing
from sm120kit.kernels import tables
from sm120kit.kernels.cubin import device, elf, fatbin
from sm120kit.kernels.kernel_records import TileFacts
from sm120kit.recipes.target import FlashInferTarget

MULTIPROCESSORS = {"RTX PRO 6000": 188, "RTX 5090": 170, "DGX Spark": 48}
SHARED_BYTES, RESERVED_BYTES, REGISTERS, THREADS, CTAS = 102_400, 1024, 65_536, 1536, 24
"""Of a multiprocessor of SM120, and what each CTA takes of shared memory for the system (docs/ptx.md, limits)."""

NOT_AN_ORDER = "counts, not speed: they cannot order tiles within 15 %; unverified on SM120"
MMA = frozenset({"OMMA", "QMMA", "HMMA", "IMMA"})
LOADS, STORES, LOCAL = frozenset({"LDS", "LDSM"}), frozenset({"STS", "STSM"}), frozenset({"LDL", "STL"})
_BITS = {"nvfp4": (4.5, 4.5), "mxfp4": (4.25, 4.25), "mxfp8": (8.25, 8.25), "fp8xmxfp4": (8.25, 4.25), "fp8": (8.0, 8.0)}
"""Bits of an element of A and B with its share of a scale factor."""


@dataclass(frozen=True)
class Counts:
    """Instructions of a kernel or of its main loop; ``local`` are accesses to local memory, which are mostly spills."""

    instructions: int = 0
    mma: int = 0
    shared_loads: int = 0
    shared_stores: int = 0
    local: int = 0

    @classmethod
    def of(cls, opcodes: Sequence[str]) -> Counts:
        kinds = (sum(opcode in kind for opcode in opcodes) for kind in (MMA, LOADS, STORES, LOCAL))
        return cls(len(opcodes), *kinds)


@dataclass(frozen=True)
class TileKernel:
    """A CUTLASS kernel by its name: tile, pipeline ``stages``, and ``dtype`` as in the tile table."""

    dtype: str
    shape: tuple[int, int, int]
    stages: int
    grouped: bool
    finalize: bool
    pingpong: bool
    streamk: bool


@dataclass(frozen=True)
class TileCost:
    """A compiled kernel. Registers are per thread, ``shared_bytes`` per CTA; None if the tile table has no size for it."""

    unit: str
    kernel: TileKernel
    registers: int
    threads: int
    whole: Counts
    loop: Counts
    shared_bytes: int | None = None

    @property
    def ctas(self) -> int:
        """CTAs for which a multiprocessor has room."""
        return resident(self.registers, self.threads, self.shared_bytes or 0)


def resident(registers: int, threads: int, shared_bytes: int) -> int:
    """CTAs of a kernel for which a multiprocessor of SM120 has room; registers are allocated by warp in units of 256."""
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = REGISTERS // 4 // per_warp * 4 // warps
    return min(CTAS, THREADS // (warps * 32), SHARED_BYTES // (shared_bytes + RESERVED_BYTES), by_registers)


@dataclass(frozen=True)
class Problem:
    m: int
    n: int
    k: int

    @classmethod
    def parse(cls, text: str) -> Problem:
        """
        Raises:
            BadInput: it is not three numbers of 1 to 10 million.
        """
        sizes = text.split(",")
        if len(sizes) != 3 or not all(size.isascii() and size.isdecimal() and 0 < int(size) <= 10**7 for size in sizes):
            raise BadInput(
                f"--problem {text[:60]!r} is not M,N,K with numbers of 1 to 10,000,000", "write --problem 512,3072,1024"
            )
        return cls(*map(int, sizes))

    def tiles(self, shape: tuple[int, int, int]) -> int:
        return -(-self.m // shape[0]) * -(-self.n // shape[1])

    def waves(self, cost: TileCost, multiprocessors: int) -> float:
        """Tiles for each CTA that runs at a time. Without stream-K, the last wave takes as long as a whole one."""
        return self.tiles(cost.kernel.shape) / (multiprocessors * max(1, cost.ctas))

    def megabytes(self, cost: TileCost) -> tuple[float, float]:
        """Read and written: from L2, where every tile reads its rows and columns, and at least from DRAM, each byte once."""
        a, b = _BITS[cost.kernel.dtype]
        rows, columns, _ = cost.kernel.shape
        read = self.tiles(cost.kernel.shape) * (rows * a + columns * b) * self.k / 8
        least = (self.m * a + self.n * b) * self.k / 8
        return (read + 2 * self.m * self.n) / 1e6, (least + 2 * self.m * self.n) / 1e6


_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(@!?U?P[\dT]+\s+)?([A-Z][A-Z0-9_]*)\S*\s*([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"^(.*?)0x([0-9a-f]+)\s*$")


def kernel_counts(sass: str) -> tuple[Counts, Counts]:
    """The counts of a kernel, by ``cuobjdump -sass``, and of its main loop: the innermost with most MMA; empty if none has."""
    code = _INSTRUCTION.findall(sass)
    opcodes = [opcode for _, _, opcode, _ in code]
    loops = [loop for loop in _loops(code) if any(opcodes[at] in MMA for at in loop)]
    innermost = [loop for loop in loops if not any(other < loop for other in loops)]
    counts = (Counts.of([opcodes[at] for at in loop]) for loop in innermost)
    return Counts.of(opcodes), max(counts, key=lambda each: each.mma, default=Counts())


def _loops(code: Sequence[tuple[str, str, str, str]]) -> Iterator[set[int]]:
    """The instructions of each loop, by number: those from which a jump back is reached before its target."""
    numbers = {int(address, 16): number for number, (address, *_) in enumerate(code)}
    before: list[list[int]] = [[] for _ in code]
    back = []
    for number, (_, predicate, opcode, operands) in enumerate(code):
        jump = _TARGET.match(operands) if opcode == "BRA" else None
        target = numbers.get(int(jump[2], 16)) if jump else None
        if target is not None:
            before[target].append(number)
            back += [(number, target)] if target < number else []
        always = not predicate.strip() and (opcode in ("EXIT", "RET") or (jump and not jump[1].strip()))
        if not always and number + 1 < len(code):
            before[number + 1].append(number)
    for last, first in back:
        loop, waiting = {first}, [last]
        while waiting:
            if (number := waiting.pop()) not in loop:
                loop.add(number)
                waiting += before[number]
        yield loop


_NAME = re.compile(
    r"CollectiveMma<cutlass::gemm::(?P<mainloop>MainloopSm120\w+)<(?P<stages>\d+), .*?>, "
    r"cute::tuple<cute::C<(?P<m>\d+)>, cute::C<(?P<n>\d+)>, cute::C<(?P<k>\d+)> ?>, (?P<rest>.*)"
)
_ELEMENT = re.compile(r"cutlass::(?:detail::)?(?:type_erased_dynamic_)?float_(e2m1|e4m3|e5m2|ue4m3|ue8m0)\w*")


def tile_kernel(name: str) -> TileKernel | None:
    """The tile of a kernel by its demangled name; None if it is no GEMM of SM120's collectives."""
    if not (match := _NAME.search(name)):
        return None
    text = match["rest"].split("TiledMMA")[0]
    types = [kind for kind in _ELEMENT.findall(text) if kind in ("e2m1", "e4m3", "e5m2")][:2]
    scales = set(_ELEMENT.findall(text)) & {"ue4m3", "ue8m0"}
    groupwise = "Blockwise" in match["mainloop"] or not scales
    narrow = types.count("e2m1")
    dtype = (
        "fp8"
        if groupwise
        else ("nvfp4" if "ue4m3" in scales else "mxfp4")
        if narrow == 2
        else "fp8xmxfp4"
        if narrow
        else "mxfp8"
    )
    shape = (int(match["m"]), int(match["n"]), int(match["k"]))
    flags = ("Array" in match["mainloop"], "Scatter" in name, "Pingpong" in name, "StreamK" in name)
    return TileKernel(dtype, shape, int(match["stages"]), *flags)


def costs(path: Path) -> Iterator[TileCost]:
    """The tiles' kernels for SM120 in an object file, shared object or cubin."""
    data = memoryview(path.read_bytes())
    for code in _cubins(data):
        kernels = {kernel.name: kernel for kernel in device.kernels(code, device.arch(code))}
        named = {name: tile_kernel(text) for name, text in zip(kernels, demangled(kernels), strict=True)}
        if not any(named.values()):
            continue
        sass = _FUNCTION.split(_sass(bytes(code.data)))
        for name, text in zip(sass[1::2], sass[2::2], strict=True):
            if tile := named.get(name):
                kernel = kernels[name]
                yield TileCost(
                    path.stem, tile, kernel.registers, max_threads(code, name), *kernel_counts(text), kernel.shared_bytes
                )


def _cubins(data: memoryview) -> Iterator[elf.Elf]:
    host = elf.Elf(data)
    if host.machine == elf.MACHINE_CUDA:
        yield host
        return
    section = host.bytes_of(".nv_fatbin") or host.bytes_of("__nv_relfatbin")
    for image in fatbin.images(section) if section else ():
        if image.is_cubin and image.arch.startswith("sm_12"):
            yield device.cubin(image.unpacked())


def max_threads(code: elf.Elf, kernel: str) -> int:
    """The most threads of a CTA of a kernel (EIATTR_MAX_THREADS); 1024 if it states none."""
    info, at = bytes(code.bytes_of(f".nv.info.{kernel}")), 0
    while at + 4 <= len(info):
        kind, key, size = struct.unpack_from("<BBH", info, at)
        if (kind, key, size) == (4, 5, 12):
            x, y, z = struct.unpack_from("<III", info, at + 4)
            return int(x * y * z)
        at += 4 + (size if kind == 4 else 0)
    return 1024


def demangled(names: Iterable[str]) -> list[str]:
    """The names as C++ text; c++filt's own limit of recursion is too small for CUTLASS."""
    if not (program := process.find_program("c++filt")):
        raise RequirementMissing("c++filt is not on PATH", "install binutils")
    return process.run([program, "-r"], stdin="".join(f"{name}\n" for name in names).encode()).stdout.splitlines()


def _sass(code: bytes) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernels.cubin"
        path.write_bytes(code)
        return process.run([_cuobjdump(), "-sass", path]).stdout


def _cuobjdump() -> Path:
    carried = Path(sysconfig.get_path("purelib")) / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    if program := process.find_program("cuobjdump") or (carried if carried.is_file() else None):
        return program
    raise RequirementMissing("cuobjdump is not on PATH", "put the CUDA toolkit's bin on PATH, or pip install triton")


def tile_costs(target: FlashInferTarget) -> tuple[tuple[TileCost, ...], tuple[TileFacts, ...]]:
    """The tiles that builds of a recipe have compiled, and the facts of those that SM120 cannot launch.

    Raises:
        NotFound: no build has compiled one.
    """
    name = target.recipe.name
    work = target.options.workspace.work(name)
    objects = sorted(path for path in work.parent.glob(f"{work.name}-*/**/*.o") if path.is_file())
    compiled = [cost for path in objects for cost in costs(path)]
    if not compiled:
        raise NotFound(f"no tile of {name} is compiled in {work.parent}", f"compile some: sm120kit build {name}")
    facts = tables.tiles(target, patched=True)
    found = [with_shared_bytes(cost, facts) for cost in compiled]
    order = sorted(dict.fromkeys(found), key=lambda cost: (cost.kernel.dtype, cost.kernel.shape, cost.unit))
    return tuple(order), tuple(fact for fact in facts if fact.generated and not fact.fits)


def with_shared_bytes(cost: TileCost, facts: Sequence[TileFacts]) -> TileCost:
    """A kernel with its static shared memory and that of the tile table; None if the table has no or several sizes for it."""
    kernel = cost.kernel
    sizes = {fact.smem_bytes for fact in facts if fact.compiles and _is(kernel, fact)}
    return replace(cost, shared_bytes=(cost.shared_bytes or 0) + sizes.pop() if len(sizes) == 1 else None)


def _is(kernel: TileKernel, fact: TileFacts) -> bool:
    tile = fact.tile
    return (
        (tile.m, tile.n, tile.k) == kernel.shape
        and (tile.grouped, tile.epilogue == "finalize", fact.stages) == (kernel.grouped, kernel.finalize, kernel.stages)
        and tile.dtype.removesuffix("_e5m2") == kernel.dtype
        and (fact.schedule == "pingpong", fact.scheduler == "stream-k") == (kernel.pingpong, kernel.streamk)
    )


def counted(target: FlashInferTarget, problem_text: str) -> tuple[list[dict[str, str]], list[str], dict[str, object]]:
    """For ``tiles --cost``: the cells of each compiled tile, lines below the table, and both as JSON data."""
    problem = Problem.parse(problem_text) if problem_text else None
    found, too_big = tile_costs(target)
    lines = notes(too_big)
    return [cells(cost, problem) for cost in found], lines, {"tiles": [data(cost, problem) for cost in found], "notes": lines}


def cells(cost: TileCost, problem: Problem | None) -> dict[str, str]:
    kernel, whole, loop = cost.kernel, cost.whole, cost.loop
    kinds = {"grouped": kernel.grouped, "finalize": kernel.finalize, "pingpong": kernel.pingpong, "stream-k": kernel.streamk}
    row = {
        "tile": f"{kernel.dtype} {'x'.join(map(str, kernel.shape))}",
        "kind": " ".join(name for name, on in kinds.items() if on) or "dense",
        "stages": str(kernel.stages),
        "registers": str(cost.registers),
        "shared B": f"{cost.shared_bytes:,}" if cost.shared_bytes is not None else "unknown",
        "CTAs/SM": f"{'' if cost.shared_bytes is not None else 'at most '}{cost.ctas}",
        "instr.": f"{whole.instructions:,}",
        "loop": f"{loop.instructions:,}",
        "MMA": str(loop.mma),
        "LDS/STS": f"{loop.shared_loads}/{loop.shared_stores}",
        "spills": f"{loop.local} in the loop, {whole.local} in all" if whole.local else "",
    }
    if problem:
        row |= {f"waves {count}": f"{problem.waves(cost, count):.2f}" for count in MULTIPROCESSORS.values()}
        row |= dict(zip(("L2 MB", "DRAM MB"), (f"{size:,.1f}" for size in problem.megabytes(cost)), strict=True))
    return row


def notes(too_big: Sequence[TileFacts]) -> list[str]:
    """What does not fit, and what the counts cannot show."""
    lines = [
        f"does not fit: {fact.tile.family} {fact.tile.dtype} {fact.tile.shape}: "
        + (f"{fact.smem_bytes:,} B of shared memory" if fact.compiles else f"does not compile: {fact.why_not}")
        for fact in too_big
    ]
    return [*dict.fromkeys(lines), NOT_AN_ORDER]


def data(cost: TileCost, problem: Problem | None) -> Mapping[str, object]:
    """A kernel as a JSON object."""
    figures: dict[str, object] = {**asdict(cost), "ctas": cost.ctas}
    if problem:
        figures["waves"] = {name: problem.waves(cost, count) for name, count in MULTIPROCESSORS.items()}
        figures["l2_mb"], figures["dram_mb"] = problem.megabytes(cost)
    return figures
