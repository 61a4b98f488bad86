"""Replace the instructions of SM120 that Hopper lacks by calls of software functions (``functions.cu``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm12x_lab.ptx.library import SoftwareFunctions
from sm12x_lab.ptx.syntax import PtxInstruction, elements, header, instructions, register_types
from sm120kit.core.errors import BadInput

BYTE_TYPES = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
"""Element types of m16n8k32; the index is the code that functions.cu uses."""

NARROW = {"e2m1x2": 4, "e2m3x2": 2, "e3m2x2": 3}
"""Types of pairs that Hopper cannot convert, with the code of their element."""

UNSUPPORTED = (
    r"tcgen05\..*",
    r"mma\.sp\b.*\.kind::.*",
    r"tensormap\.replace\..*\.elemtype\..*",
)
"""Opcodes that Hopper lacks, or treats otherwise, and that have no replacement."""

TENSOR_MAP_MARK, UNPACKING_MARK, TENSOR_MAP_MARK_OFFSET = 0x34753631303231, 0x64656B6361706E75, 120
"""The last word of a tensor map of a type that Hopper's driver rejects: a map of bytes that stands for one of packed 4-bit
elements, and a map of our own (functions.cu) for one that unpacks 4- or 6-bit elements. driver_shim.c writes both."""

UNPACKING_FIELDS = {"global_address": 16, "global_stride": 24, "global_dim": 56, "box_dim": 76}
"""Offsets of the fields of a map of our own that ``tensormap.replace`` changes."""

_L2_EVICTION = ("L2::evict_last", "L2::evict_normal", "L2::evict_first")

_REMEDY = "sm120kit verify ptx cannot run this kernel on Hopper; `sm120kit verify kernels --device native` needs an SM12x GPU"

Mutation = Callable[[PtxInstruction], PtxInstruction]


@dataclass(frozen=True)
class PtxReplacement:
    """An instruction in ``line`` of the source, and what computes it: a function of functions.cu, or ``inline`` PTX."""

    line: int
    opcode: str
    function: str


@dataclass(frozen=True)
class RewrittenPtx:
    """A module for sm_90a, and its replacements. ``source_target`` is the target that it was made for."""

    text: str
    source_target: str
    replacements: tuple[PtxReplacement, ...]
    instruction_count: int

    @property
    def counts(self) -> dict[str, int]:
        """Number of replacements by opcode, most frequent first."""
        return dict(Counter(replacement.opcode for replacement in self.replacements).most_common())


@dataclass(frozen=True)
class _Call:
    """A call: PTX types and operands of the arguments, and registers that receive the 32-bit words of the result."""

    function: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def rewrite(text: str, functions: Callable[[], SoftwareFunctions], mutate: Mutation | None = None) -> RewrittenPtx:
    """Rewrite a module made for sm_120a, sm_120f or sm_121a for sm_90a.

    ``functions`` is called once every instruction has a replacement. ``mutate`` seeds a fault: it changes every instruction
    that is replaced.

    Raises:
        BadInput: see :func:`source_target`; or an instruction that Hopper lacks has no replacement; the message names it.
    """
    target, directives = source_target(text), header(text)
    types = register_types(text)
    edits: list[tuple[int, int, str]] = []
    replacements: list[PtxReplacement] = []
    count = 0
    for instruction in instructions(text):
        count += 1
        changed = _replacement(instruction, types, mutate)
        if changed is None:
            continue
        function, code = changed
        edits.append((instruction.start, instruction.end, _guarded(instruction, code, len(replacements), mutate)))
        replacements.append(PtxReplacement(instruction.line, instruction.opcode, function or "inline"))
    library, rewritten = functions(), "\n".join(replacement for _, _, replacement in edits)
    used = sorted({replacement.function for replacement in replacements} - {"inline"})
    size_end = directives["address_size"].end()
    edits += [
        (*directives["version"].span("value"), library.version),
        (*directives["target"].span("value"), "sm_90a"),
        (size_end, size_end, "".join(f"\n{library.functions[name]}" for name in used) + "\n" + _messages(rewritten, text)),
    ]
    return RewrittenPtx(_edited(text, edits), target, tuple(replacements), count)


def source_target(text: str) -> str:
    """The target of a module for SM12x, such as ``sm_120a``.

    Raises:
        BadInput: not a module for SM12x.
    """
    directives = header(text)
    if {*directives} != {"version", "target", "address_size"} or directives["address_size"]["value"] != "64":
        raise BadInput("no .version, .target and .address_size 64: not a PTX module", "pass a file that `nvcc -ptx` writes")
    target = directives["target"]["value"].split(",")[0].strip()
    if not re.fullmatch(r"sm_12\d[af]?", target):
        raise BadInput(f".target {target} is not SM12x", "compile for sm_120a or sm_120f")
    return target


def _edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """``text`` with pieces ``[start, end)`` replaced."""
    pieces, at = [], 0
    for start, end, replacement in sorted(edits):
        pieces += [text[at:start], replacement]
        at = end
    return "".join([*pieces, text[at:]])


def _replacement(
    instruction: PtxInstruction, types: dict[str, set[str]], mutate: Mutation | None
) -> tuple[str, list[str]] | None:
    """Function and code for an instruction; None if it is kept."""
    if not _lacking(instruction):
        if any(re.fullmatch(pattern, instruction.opcode) for pattern in UNSUPPORTED):
            raise _unsupported(instruction)
        return None
    changed = mutate(instruction) if mutate else instruction
    if "f32x2" in changed.modifiers:
        return "", _f32x2(changed)
    if changed.modifiers[0] in ("add", "sub", "fma"):
        return "", _mixed(changed)
    if changed.modifiers[0] in ("ld", "st"):
        return "", _wide(changed)
    if changed.modifiers[0] == "clusterlaunchcontrol":
        return _launch_control(changed, types)
    if changed.modifiers[0] == "cp":
        return _tensor_copy(changed, types)
    if changed.modifiers[0] == "tensormap":
        return "", _tensor_map_change(changed)
    if changed.modifiers[0] == "prefetch":
        return "", _tensor_map_prefetch(changed)
    family = {"mma": _mma, "cvt": _cvt, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix}[changed.modifiers[0]]
    call = family(changed, types)
    return call.function, _code(call)


def _lacking(instruction: PtxInstruction) -> bool:
    """Whether an instruction belongs to a family that is replaced."""
    name, *rest = instruction.modifiers
    match name:
        case "mma":
            return rest[0] != "sp" and any(part.startswith("kind::") for part in rest)
        case "cvt":
            return bool({*NARROW, "ue8m0x2", "e2m1x4", "e2m3x4", "e3m2x4", "s2f6x2"} & {*rest})
        case "ldmatrix":
            return bool({"m8n16", "m16n16"} & {*rest})
        case "stmatrix":
            return "m16n8" in rest
        case "ld" | "st":
            return "v8" in rest or ("v4" in rest and rest[-1].endswith("64"))
        case "add" | "sub" | "fma" if rest[-2:] in (["f32", "f16"], ["f32", "bf16"]):
            return True
        case "clusterlaunchcontrol":
            return True
        case "cp":
            return "bulk" in rest and "tensor" in rest
        case "tensormap":
            return bool({*UNPACKING_FIELDS} & {*rest})
        case "prefetch":
            return "tensormap" in rest
        case _:
            return "f32x2" in rest


def _unsupported(instruction: PtxInstruction) -> BadInput:
    return BadInput(f"line {instruction.line}: no replacement on Hopper for: {instruction}", _REMEDY)


def _guarded(instruction: PtxInstruction, code: Sequence[str], number: int, mutate: Mutation | None) -> str:
    """The code as a block, skipped unless the instruction's predicate holds."""
    predicate = (mutate(instruction) if mutate else instruction).predicate
    block = ["{", *code, "}"]
    if predicate:
        opposite = predicate[1:] if predicate.startswith("!") else f"!{predicate}"
        block = [f"@{opposite} bra $sm120_skip_{number};", *block, f"$sm120_skip_{number}:"]
    comment = " ".join(str(instruction).split())  # operands may have line breaks
    return "\n".join([f"// {comment}", *block])


def _code(call: _Call) -> list[str]:
    """A call as PTX. Its names cannot occur in code of nvcc."""
    names = [f"sm120$a{index}" for index in range(len(call.arguments))]
    size = 4 * len(call.results)
    kind = ".b32 sm120$r" if size == 4 else f".align {size} .b8 sm120$r[{size}]"
    lines = [*call.before, f".param {kind};"]
    for name, (kind, operand) in zip(names, call.arguments, strict=True):
        lines += [f".param .b{kind[1:]} {name};", f"st.param.{kind} [{name}], {operand};"]
    lines.append(f"call (sm120$r), {call.function}, ({', '.join(names)});")
    lines += [
        f"ld.param.b32 {register}, [sm120$r+{4 * index}];" for index, register in enumerate(call.results) if register != "_"
    ]
    return [*lines, *call.after]


def _mma(instruction: PtxInstruction, types: dict[str, set[str]]) -> _Call:
    """mma with .block_scale, or of kind::f8f6f4."""
    parts = instruction.modifiers
    kind = next(part for part in parts if part.startswith("kind::")).removeprefix("kind::")
    scaled = "block_scale" in parts
    vectors = next((part.removeprefix("scale_vec::") for part in parts if part.startswith("scale_vec::")), "")
    vectors = vectors or {"mxf8f6f4": "1X", "mxf4": "2X"}.get(kind, "")
    shape = next((part for part in parts if re.fullmatch(r"m\d+n\d+k\d+", part)), "")
    element_types = [part for part in parts if part in (*BYTE_TYPES, "f16", "f32", "ue8m0", "ue4m3")]
    operands = [elements(operand) for operand in instruction.operands]
    if not {"sync", "aligned"} <= {*parts} or [part for part in parts if part in ("row", "col")] != ["row", "col"]:
        raise _unsupported(instruction)
    match (kind, shape, vectors, element_types):
        case ("mxf4" | "mxf4nvf4", "m16n8k64", "2X" | "4X", ["f32", "e2m1", "e2m1", "f32", "ue8m0" | "ue4m3" as scale]) if (
            scaled
        ):
            function, codes, counts = f"sm120_mma_e2m1_{vectors.lower()}_{scale}", [], [4, 4, 2, 4, 1, 2, 1, 2]
            if (vectors, scale) != ("2X", "ue8m0") and (kind == "mxf4" or vectors == "2X"):
                raise _unsupported(instruction)
        case ("mxf8f6f4", "m16n8k32", "1X", ["f32", a, b, "f32", "ue8m0"]) if scaled and {a, b} <= {*BYTE_TYPES}:
            function, codes, counts = "sm120_mma_bytes_1x_ue8m0", [a, b], [4, 4, 2, 4, 1, 2, 1, 2]
        case ("f8f6f4", "m16n8k32", "", ["f32", a, b, "f32"]) if {a, b} <= {*BYTE_TYPES}:
            function, codes, counts = "sm120_mma_bytes_f32", [a, b], [4, 4, 2, 4]
        case ("f8f6f4", "m16n8k32", "", ["f16", a, b, "f16"]) if {a, b} <= {*BYTE_TYPES}:
            function, codes, counts = "sm120_mma_bytes_f16", [a, b], [2, 4, 2, 2]
        case _:
            raise _unsupported(instruction)
    if [len(operand) for operand in operands] != counts:
        raise _unsupported(instruction)
    kinds = ["b32"] * 6 + (["f32"] * 4 if counts[3] == 4 else ["b32"] * 2)
    arguments = list(zip(kinds, [*operands[1], *operands[2], *operands[3]], strict=True))
    before: list[str] = []
    if scaled:
        before = [".reg .b16 sm120$h;", ".reg .b32 sm120$s<4>;"]
        for index, selector in enumerate([*operands[5], *operands[7]]):
            if selector.isdigit() and not _valid_selector(index, int(selector), vectors):
                raise _unsupported(instruction)
            before += [f"mov.b16 sm120$h, {selector};", f"cvt.u32.u16 sm120$s{index}, sm120$h;"]
        arguments += [("b32", operands[4][0]), ("b32", "sm120$s0"), ("b32", "sm120$s1")]
        arguments += [("b32", operands[6][0]), ("b32", "sm120$s2"), ("b32", "sm120$s3")]
    arguments += [("b32", str(BYTE_TYPES.index(code))) for code in codes]
    return _Call(function, tuple(arguments), tuple(operands[0]), tuple(before))


def _valid_selector(index: int, value: int, vectors: str) -> bool:
    """Whether a byte selector (index 0, 2) or thread selector (A: 1, B: 3) has a value that the PTX ISA defines."""
    if index % 2:
        return value < (2 if index == 1 else 4)
    return value in {"1X": (0, 1, 2, 3), "2X": (0, 2), "4X": (0,)}[vectors]


def _cvt(instruction: PtxInstruction, types: dict[str, set[str]]) -> _Call:
    """cvt from and to pairs of e2m1, e2m3, e3m2 and ue8m0."""
    *modifiers, to, of = instruction.modifiers[1:]
    destination, *sources = instruction.operands
    relu, finite = str(int("relu" in modifiers)), str(int("satfinite" in modifiers))
    rest = {*modifiers} - {"relu", "satfinite"}
    if to in NARROW and "satfinite" in modifiers and rest == {"rn"} and (of == "f32" or (of, to) == ("f16x2", "e2m1x2")):
        before, halves = _halves(of, sources)
        arguments = [("f32", halves[0]), ("f32", halves[1]), ("b32", str(NARROW[to])), ("b32", relu)]
        function, narrow = "sm120_to_narrow", 8 if to == "e2m1x2" else 16
    elif of in NARROW and to == "f16x2" and "satfinite" not in modifiers and rest == {"rn"}:
        before = [".reg .b32 sm120$s;", _widened("sm120$s", sources[0], 8 if of == "e2m1x2" else 16)]
        arguments = [("b32", "sm120$s"), ("b32", str(NARROW[of])), ("b32", relu)]
        function, narrow = "sm120_from_narrow", 32
    elif to == "ue8m0x2" and of in ("f32", "bf16x2") and rest in ({"rz"}, {"rp"}) and "relu" not in modifiers:
        before, halves = _halves(of, sources)
        arguments = [("f32", halves[0]), ("f32", halves[1]), ("b32", str(int(rest == {"rp"}))), ("b32", finite)]
        function, narrow = "sm120_to_ue8m0", 16
    elif of == "ue8m0x2" and to == "bf16x2" and modifiers == ["rn"]:
        before = [".reg .b32 sm120$s;", _widened("sm120$s", sources[0], 16)]
        arguments, function, narrow = [("b32", "sm120$s")], "sm120_from_ue8m0", 32
    else:
        raise _unsupported(instruction)
    if narrow == 32:
        return _Call(function, tuple(arguments), (destination,), tuple(before))
    fill = ", _, _, _" if narrow == 8 else ", _"
    after = f"mov.b32 {{{destination}{fill}}}, sm120$d;"
    return _Call(function, tuple(arguments), ("sm120$d",), (*before, ".reg .b32 sm120$d;"), (after,))


def _widened(register: str, source: str, bits: int) -> str:
    """Move a register of 8 or 16 bits into one of 32 bits."""
    return f"cvt.u32.u{bits} {register}, {source};"


def _halves(of: str, sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Code and registers of the two fp32 values that a conversion reads, the upper one first."""
    if of == "f32":
        return [], list(sources)
    convert = "cvt.f32.f16" if of == "f16x2" else "cvt.f32.bf16"
    lines = [".reg .b16 sm120$h<2>;", ".reg .f32 sm120$f<2>;", f"mov.b32 {{sm120$h0, sm120$h1}}, {sources[0]};"]
    lines += [f"{convert} sm120$f{index}, sm120$h{index};" for index in range(2)]
    return lines, ["sm120$f1", "sm120$f0"]


def _ldmatrix(instruction: PtxInstruction, types: dict[str, set[str]]) -> _Call:
    """ldmatrix.m8n16 of elements of 4 and 6 bits, and ldmatrix.m16n16, which transposes elements of 4, 6 and 8 bits."""
    parts = instruction.modifiers
    transposes = "m16n16" in parts
    bits = {"b4x16_p64": 4, "b6x16_p32": 6, "b8": 8 if transposes else 0}.get(parts[-1], 0)
    count, registers = _matrices(parts), elements(instruction.operands[0])
    fits = count < 4 and len(registers) == 2 * count if transposes else len(registers) == count
    before = _matrix_address(instruction, instruction.operands[-1], types)
    if not bits or not count or not fits or ("trans" in parts) != transposes or not before:
        raise _unsupported(instruction)
    arguments = (("b32", "sm120$p"), ("b32", str(count)), ("b32", str(bits)))
    results = (*registers, *["_"] * (4 - len(registers)))
    return _Call(f"sm120_ldmatrix_{'m16n16' if transposes else 'm8n16'}", arguments, results, tuple(before))


def _stmatrix(instruction: PtxInstruction, types: dict[str, set[str]]) -> _Call:
    """stmatrix.m16n8, which transposes elements of 8 bits."""
    parts = instruction.modifiers
    count, registers = _matrices(parts), elements(instruction.operands[1])
    before = _matrix_address(instruction, instruction.operands[0], types)
    if parts[-1] != "b8" or "trans" not in parts or not count or len(registers) != count or not before:
        raise _unsupported(instruction)
    words = [("b32", word) for word in (*registers, *["0"] * (4 - count))]
    return _Call("sm120_stmatrix_m16n8", (("b32", "sm120$p"), ("b32", str(count)), *words), ("_",), tuple(before))


def _matrices(parts: Sequence[str]) -> int:
    """Number of matrices of ldmatrix or stmatrix."""
    return {"x1": 1, "x2": 2, "x4": 4}.get(next((part for part in parts if part in ("x1", "x2", "x4")), ""), 0)


def _matrix_address(instruction: PtxInstruction, operand: str, types: dict[str, set[str]]) -> list[str]:
    """Code that moves an address into ``sm120$p``, as one of shared memory; none if that is not possible."""
    parts, address = instruction.modifiers, _address(operand)
    widths = _declared(address[0], types) if address else set()
    if not address or len(widths) != 1:
        return []
    register, offset = address
    wide = next(iter(widths)).endswith("64")
    if "shared" in parts or "shared::cta" in parts:
        move = [f"cvt.u32.u64 sm120$p, {register};" if wide else f"mov.b32 sm120$p, {register};"]
    elif wide:
        move = [".reg .b64 sm120$g;", f"cvta.to.shared.u64 sm120$g, {register};", "cvt.u32.u64 sm120$p, sm120$g;"]
    else:
        return []
    return [".reg .b32 sm120$p;", *move, f"add.s32 sm120$p, sm120$p, {offset};"]


def _wide(instruction: PtxInstruction) -> list[str]:
    """A load or store of 256 bits, as two of 128: the ISA defines no order of the elements of a vector.

    Evictions from L2 are hints that Hopper has only as policies. The address is moved first, because a load may replace it.
    """
    parts = [part for part in instruction.modifiers if part not in _L2_EVICTION]
    size = 8 if "v4" in parts else 4
    width = "v4" if size == 8 else "v8"
    load = parts[0] == "ld"
    if len(instruction.operands) not in (2, 3) or width not in parts or parts[-1][1:] != str(8 * size):
        raise _unsupported(instruction)
    at, vector, *policy = instruction.operands if not load else (*instruction.operands[1::-1], *instruction.operands[2:])
    match = re.fullmatch(r"(\[.*\])\s*((?:\.unified)?)", at)
    address, words = _address(match[1]) if match else None, elements(vector)
    if not match or not address or len(words) != 32 // size:
        raise _unsupported(instruction)
    code = [".reg .b64 sm120$g<2>;", f"mov.b64 sm120$g0, {address[0]};", *(f"mov.b64 sm120$g1, {each};" for each in policy)]
    hint = ", sm120$g1" if policy else ""
    half = len(words) // 2
    for first in (0, half):
        group = words[first : first + half]
        # Hopper has no vectors that leave out elements of a store.
        pieces = (
            [(first, group)] if "_" not in group else [(first + at, [word]) for at, word in enumerate(group) if word != "_"]
        )
        for index, piece in pieces:
            single = len(piece) == 1
            opcode = ".".join(f"v{half}" if part == width else part for part in parts if not (single and part == width))
            data = piece[0] if single else "{" + ", ".join(piece) + "}"
            place = f"[sm120$g0+{address[1] + size * index}]{match[2]}"
            code.append(f"{opcode} {data}, {place}{hint};" if load else f"{opcode} {place}, {data}{hint};")
    return code


def _launch_control(instruction: PtxInstruction, types: dict[str, set[str]]) -> tuple[str, list[str]]:
    """Cluster launch control: every request to cancel a CTA fails, which the ISA permits; each CTA then computes its own tile.

    A response of zeros is such a failure. It arrives as the PTX ISA defines: 16 bytes that complete a transaction of the
    mbarrier; with ``.multicast::cluster::all``, in each CTA of the cluster.
    """
    parts, operands = instruction.modifiers, instruction.operands
    if parts[1] == "try_cancel" and "multicast::cluster::all" in parts and len(operands) == 2:
        before, registers = _shared_addresses(operands, types)
        if "shared::cta" not in parts or not registers:
            raise _unsupported(instruction)
        arguments = tuple(("b32", register) for register in registers)
        call = _Call("sm120_refuse_cancel_in_cluster", arguments, ("_",), tuple(before))
        return call.function, _code(call)
    if parts[1] == "try_cancel" and "shared::cta" in parts and len(operands) == 2:
        return "", [
            ".reg .b32 sm120$z;",
            "mov.b32 sm120$z, 0;",
            f"st.shared.v4.b32 {operands[0]}, {{sm120$z, sm120$z, sm120$z, sm120$z}};",
            "fence.acq_rel.cta;",
            f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 {operands[1]}, 16;",
        ]
    words = [".reg .b64 sm120$w<2>;", f"mov.b128 {{sm120$w0, sm120$w1}}, {operands[-1]};"]
    if parts[1:3] == ("query_cancel", "is_canceled"):
        return "", [*words, f"setp.ne.b64 {operands[0]}, sm120$w1, 0;"]
    if parts[1:3] == ("query_cancel", "get_first_ctaid") and len(registers := elements(operands[0])) == 4:
        x, y, z, _ = registers
        return "", [*words, f"mov.b64 {{{x}, {y}}}, sm120$w0;", f"mov.b64 {{{z}, _}}, sm120$w1;"]
    raise _unsupported(instruction)


def _declared(register: str, types: dict[str, set[str]]) -> set[str]:
    """The types with which a register may be declared: ``%r1`` itself, or ``%r`` of ``%r<9>``."""
    return types.get(register) or types.get(re.sub(r"\d+$", "", register), set())


def _address(operand: str) -> tuple[str, int] | None:
    """Register and offset of an address ``[register+offset]``; None for other addresses."""
    match = re.fullmatch(r"\[\s*([%$\w]*[%$A-Za-z_][%$\w]*)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
    return (match[1], int(match[2] or 0)) if match else None


def _shared_addresses(operands: Sequence[str], types: dict[str, set[str]]) -> tuple[list[str], list[str]]:
    """Code that moves addresses of shared memory into registers of 32 bits, and these; none if a type is unknown."""
    code, registers = [f".reg .b32 sm120$p<{len(operands)}>;"], []
    for index, operand in enumerate(operands):
        address = _address(operand)
        widths = _declared(address[0], types) if address else set()
        if not address or len(widths) != 1:
            return [], []
        convert = "cvt.u32.u64" if next(iter(widths)).endswith("64") else "mov.b32"
        registers.append(f"sm120$p{index}")
        code += [f"{convert} sm120$p{index}, {address[0]};", f"add.s32 sm120$p{index}, sm120$p{index}, {address[1]};"]
    return code, registers


def _read_mark(register: str, offset: int = 0, space: str = "") -> list[str]:
    """Read the mark of a tensor map: predicate ``sm120$q`` of a packed map, ``sm120$u`` of an unpacking one."""
    return [
        ".reg .b64 sm120$m; .reg .pred sm120$q, sm120$u, sm120$p; .reg .b32 sm120$k;",
        f"ld{space}.b64 sm120$m, [{register}+{offset + TENSOR_MAP_MARK_OFFSET}];",
        f"setp.eq.b64 sm120$q, sm120$m, {TENSOR_MAP_MARK};",
        f"setp.eq.b64 sm120$u, sm120$m, {UNPACKING_MARK};",
    ]


def _tensor_copy(instruction: PtxInstruction, types: dict[str, set[str]]) -> tuple[str, list[str]]:
    """cp.async.bulk.tensor, also .prefetch and cp.reduce.async: with a packed map, the first coordinate counts bytes.

    With an unpacking map, the issuing thread copies the box itself, and a prefetch does nothing. What the ISA rules out for
    such maps stops the kernel with a message, see ``RULES``.
    """
    parts = instruction.modifiers
    index = next((at for at, operand in enumerate(instruction.operands) if "{" in operand), -1)
    match = re.fullmatch(r"\[\s*([%$\w]+)\s*,\s*\{\s*([^,}]+?)\s*((?:,[^}]*)?)\}\s*\]", instruction.operands[index])
    if not match or "im2col" in instruction.opcode or "tile::" in instruction.opcode:
        raise _unsupported(instruction)
    tensor_map, first, others = match.groups()
    copy = instruction.with_operand(index, f"[{tensor_map}, {{sm120$c{others}}}]")
    line = f"{copy.opcode} {', '.join(copy.operands)};"
    code = [*_read_mark(tensor_map), ".reg .b32 sm120$c;", f"mov.b32 sm120$c, {first};"]
    if "reduce" in parts:
        return "", [*code, *_stop(_EITHER_MAP, "reduction", instruction.line), line]
    halved = "@sm120$q shr.s32 sm120$c, sm120$c, 1;"
    if "prefetch" in parts:
        return "", [*code, halved, f"@!sm120$u {line}"]
    if "shared::cluster" in parts:
        return "", [*code, *_stop(_EITHER_MAP, "cluster", instruction.line), line]
    code += [*_stop(_has_bits("sm120$q", 1), "odd", instruction.line), halved]
    if index == 0:
        return "", [*code, *_stop(_UNPACKING_MAP, "store", instruction.line), line]
    code += [f"@!sm120$u {line}", "@!sm120$u bra sm120$done;"]
    before, registers = _shared_addresses((instruction.operands[0], instruction.operands[2]), types)
    if not registers:
        raise _unsupported(instruction)
    code += _stop(_has_bits("sm120$u", 127), "multiple", instruction.line)
    coordinates = [first, *(part.strip() for part in others.split(",")[1:])]
    coordinates += ["0"] * (5 - len(coordinates))
    arguments = [("b64", tensor_map), *(("b32", operand) for operand in (*registers, *coordinates))]
    call = _Call("sm120_unpacking_copy", tuple(arguments), ("_",), tuple(before))
    return call.function, [*code, *_code(call), "sm120$done:"]


RULES = {
    "reduction": "reductions have no tensor maps of 4- or 6-bit elements (PTX ISA, restrictions on tensor copies)",
    "cluster": "on sm_120a, copies to shared::cluster have no tensor maps of 4- or 6-bit elements (PTX ISA)",
    "store": "no store of 4-bit elements with padding (PTX ISA); stores of 6-bit elements are not done in software",
    "odd": "the first coordinate or extent of packed 4-bit elements is odd; only whole bytes are copied here",
    "multiple": "with elements that are unpacked, the first coordinate is a multiple of 128 (PTX ISA)",
}
"""What stops a kernel: its message on standard error is that of a failed assertion, with the line of the PTX."""

_ASSERT = ".extern .func __assertfail (.param .b64 f, .param .b64 g, .param .b32 h, .param .b64 i, .param .b64 j);"


def _has_bits(applies: str, mask: int) -> list[str]:
    """Predicate ``sm120$p``: the kind of map applies, and the first coordinate or extent has bits of a mask."""
    return [
        f"and.b32 sm120$k, sm120$c, {mask};",
        "setp.ne.u32 sm120$p, sm120$k, 0;",
        f"and.pred sm120$p, sm120$p, {applies};",
    ]


def _stop(condition: Sequence[str], rule: str, line: int) -> list[str]:
    """Stop the kernel if the code of ``condition`` sets predicate ``sm120$p``."""
    names = [f"sm120$a{index}" for index in range(5)]
    values = {"b64": ("sm120$w0", "sm120$w1", "", "sm120$w1", "1"), "b32": ("", "", str(line), "", "")}
    arguments = [(name, "b32" if index == 2 else "b64", index) for index, name in enumerate(names)]
    return [
        *condition,
        f"@!sm120$p bra sm120$ok_{rule};",
        "{ .reg .b64 sm120$w<2>;",
        f"mov.b64 sm120$w0, sm120$rule_{rule}; cvta.global.u64 sm120$w0, sm120$w0;",
        "mov.b64 sm120$w1, sm120$rule_; cvta.global.u64 sm120$w1, sm120$w1;",
        *(f".param .{kind} {name}; st.param.{kind} [{name}], {values[kind][index]};" for name, kind, index in arguments),
        f"call __assertfail, ({', '.join(names)}); }}",
        f"sm120$ok_{rule}:",
    ]


_EITHER_MAP, _UNPACKING_MAP = ("or.pred sm120$p, sm120$q, sm120$u;",), ("mov.pred sm120$p, sm120$u;",)


def _messages(code: str, text: str) -> str:
    """The declarations that the rules in ``code`` require; ``text`` is the module."""
    used = [rule for rule in RULES if f"sm120$rule_{rule};" in code]
    if not used:
        return ""
    strings = {"": "PTX", **{rule: RULES[rule] for rule in used}}
    lines = [
        f".global .align 1 .b8 sm120$rule_{name}[{len(value) + 1}] = {{{', '.join(map(str, value.encode()))}, 0}};"
        for name, value in strings.items()
    ]
    return "\n".join([*([] if "__assertfail" in text else [_ASSERT]), *lines, ""])


def _tensor_map_change(instruction: PtxInstruction) -> list[str]:
    """tensormap.replace: in a packed map, the first extent counts bytes; in a map of our own, the field is a word in memory."""
    field = next(part for part in instruction.modifiers if part in UNPACKING_FIELDS)
    address, *ordinal, value = instruction.operands
    base, size = _address(address), 64 if instruction.modifiers[-1] == "b64" else 32
    if not base or (field == "global_address") == bool(ordinal) or not all(number.isdigit() for number in ordinal):
        raise _unsupported(instruction)
    space = ".shared" if "shared::cta" in instruction.modifiers else ".global" if "global" in instruction.modifiers else ""
    number = int(ordinal[0]) if ordinal else 0
    at = UNPACKING_FIELDS[field] + number * size // 8
    first_extent = field in ("global_dim", "box_dim") and number == 0
    halved = [
        *_stop(_has_bits("sm120$q", 1), "odd", instruction.line),
        "@sm120$q shr.u32 sm120$c, sm120$c, 1;",
    ]
    return [
        *_read_mark(*base, f".volatile{space}"),
        f".reg .b{size} sm120$c;",
        f"mov.b{size} sm120$c, {value};",
        *(halved if first_extent else []),
        f"@!sm120$u {instruction.opcode} {', '.join([address, *ordinal, 'sm120$c'])};",
        f"@sm120$u st.volatile{space}.b{size} [{base[0]}+{base[1] + at}], sm120$c;",
    ]


def _tensor_map_prefetch(instruction: PtxInstruction) -> list[str]:
    """prefetch.tensormap: not of a map of our own, which is none of the hardware's."""
    base = _address(instruction.operands[0])
    if not base or len(instruction.modifiers) != 2:
        raise _unsupported(instruction)
    return [*_read_mark(*base), f"@!sm120$u {instruction.opcode} {instruction.operands[0]};"]


def _f32x2(instruction: PtxInstruction) -> list[str]:
    """Arithmetic on two fp32 values: the same operation on each."""
    name, *modifiers = instruction.modifiers
    inputs = {"add": 2, "sub": 2, "mul": 2, "fma": 3}.get(name, 0)
    if len(instruction.operands) != inputs + 1 or not {*modifiers} <= {"rn", "rz", "rm", "rp", "ftz", "f32x2"} or not inputs:
        raise _unsupported(instruction)
    operation = ".".join([name, *modifiers[:-1], "f32"])
    destination, *sources = instruction.operands
    lines = [f".reg .f32 sm120$l<{inputs + 1}>;", f".reg .f32 sm120$u<{inputs + 1}>;"]
    lines += [f"mov.b64 {{sm120$l{index}, sm120$u{index}}}, {source};" for index, source in enumerate(sources, start=1)]
    lines += [f"{operation} {', '.join(f'sm120${half}{index}' for index in range(inputs + 1))};" for half in "lu"]
    return [*lines, f"mov.b64 {destination}, {{sm120$l0, sm120$u0}};"]


def _mixed(instruction: PtxInstruction) -> list[str]:
    """fp32 arithmetic whose first operands, all but the last, are f16 or bf16: each fp32 value has them exactly."""
    *operation, of = instruction.modifiers
    destination, *narrow, last = instruction.operands
    if len(narrow) != (2 if operation[0] == "fma" else 1):
        raise _unsupported(instruction)
    code = [".reg .b16 sm120$h;", f".reg .f32 sm120$f<{len(narrow)}>;"]
    for index, operand in enumerate(narrow):
        code += [f"mov.b16 sm120$h, {operand};", f"cvt.f32.{of} sm120$f{index}, sm120$h;"]
    sources = ", ".join(f"sm120$f{index}" for index in range(len(narrow)))
    return [*code, f"{'.'.join(operation)} {destination}, {sources}, {last};"]
