"""Every instruction form that is replaced: a kernel that executes it once, its cases, and what the model expects."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm12x_lab.ptx import model
from sm12x_lab.ptx.rewrite import BYTE_TYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[Any]  # of uint32

CASES = 240
"""Cases of a form, each with 32 lanes. A fifth of them has special values: zeros, largest values, infinities and NaN."""

UNTOUCHED = 0x5A5A5A5A
"""The content of a result register before the instruction."""

_SELECTORS = {
    "1X": ((0, 0, 0, 0), (1, 1, 3, 2), (2, 0, 1, 1), (3, 1, 2, 3)),
    "2X": ((0, 0, 0, 0), (2, 1, 2, 2), (0, 1, 2, 1), (2, 0, 0, 3)),
    "4X": ((0, 0, 0, 0), (0, 1, 0, 2), (0, 0, 0, 1), (0, 1, 0, 3)),
}
"""Byte and thread selectors of A and B."""


@dataclass(frozen=True)
class InstructionForm:
    """An instruction with its operands, as PTX with inputs ``%i0...`` and results ``%o0...``, all of 32 bits.

    ``draw`` makes the input words ``[case, lane, word]`` from a random generator; ``expect`` computes the results. A form with
    ``predicate`` has one more input word, and is executed by lanes where it is not 0. ``isa`` is the first PTX ISA that has it.
    """

    name: str
    code: str
    results: int
    draw: Callable[[np.random.Generator], Words]
    expect: Callable[[Words], Words]
    shared: bool = False
    predicate: bool = False
    isa: str = "8.8"

    @property
    def family(self) -> str:
        """The instruction's name: mma, cvt, ldmatrix, stmatrix, ld, st, or that of an arithmetic instruction."""
        return self.name.split(".")[0]

    def inputs(self, seed: int) -> Words:
        """The input words of all cases, with the predicate last."""
        import numpy as np

        random = np.random.default_rng(seed)
        words = self.draw(random)
        if self.predicate:
            # Warp-wide for instructions of a warp, by lane for others.
            shape = (CASES, 1, 1) if self.family in ("mma", "ldmatrix") else (CASES, 32, 1)
            words = np.concatenate([words, np.broadcast_to(random.integers(0, 2, shape), (CASES, 32, 1))], axis=2)
        return words.astype(np.uint32)

    def expected(self, inputs: Words) -> Words:
        """The result words."""
        import numpy as np

        if not self.predicate:
            return self.expect(inputs)
        executed = inputs[:, :, -1:] != 0
        return np.where(executed, self.expect(inputs[:, :, :-1]), np.uint32(UNTOUCHED))


def module(forms: list[InstructionForm], target: str = "sm_120a") -> str:
    """A PTX module with a kernel ``form_N(in, out)`` for each form; block b computes case b, thread t is lane t."""
    isa = max((form.isa for form in forms), default="8.8")
    lines = [f".version {isa}", f".target {target}", ".address_size 64"]
    for number, form in enumerate(forms):
        words = _input_count(form)
        lines += [
            f".visible .entry form_{number}(.param .u64 in, .param .u64 out)",
            "{",
            ".reg .b32 %i<32>; .reg .b32 %o<8>; .reg .b32 %t<4>; .reg .b64 %a<4>; .reg .pred %p<2>;",
            *([".shared .align 16 .b8 rows[512];"] if form.shared else []),
            "mov.u32 %t0, %tid.x; mov.u32 %t1, %ctaid.x; mad.lo.u32 %t0, %t1, 32, %t0;",
            "ld.param.u64 %a0, [in]; ld.param.u64 %a1, [out];",
            f"mul.wide.u32 %a2, %t0, {4 * words}; add.u64 %a0, %a0, %a2;",
            f"mul.wide.u32 %a2, %t0, {4 * form.results}; add.u64 %a1, %a1, %a2;",
            *(f"ld.global.b32 %i{word}, [%a0+{4 * word}];" for word in range(words)),
            *(f"mov.b32 %o{word}, {UNTOUCHED};" for word in range(form.results)),
            *([f"setp.ne.u32 %p0, %i{words - 1}, 0;"] if form.predicate else []),
            "{",
            form.code,
            "}",
            *(f"st.global.b32 [%a1+{4 * word}], %o{word};" for word in range(form.results)),
            "ret;",
            "}",
        ]
    return "\n".join([*lines, ""])


def _input_count(form: InstructionForm) -> int:
    import numpy as np

    return int(form.draw(np.random.default_rng(0)).shape[2]) + form.predicate


def all_forms() -> list[InstructionForm]:
    """Every form, in a fixed order."""
    matrices = [*_ldmatrix(), *_transposing_loads(), *_transposing_stores()]
    arithmetic = [*_arithmetic(), *_mixed_arithmetic()]
    return [*_scaled_mma(), *_plain_mma(), *_conversions(), *matrices, *arithmetic, *_wide_copies(), _launch_control()]


# ---- mma


def _scaled_mma() -> list[InstructionForm]:
    forms = []
    for kind, vectors, scale, isa in (
        ("mxf4", "2X", "ue8m0", "8.8"),
        ("mxf4nvf4", "2X", "ue8m0", "8.8"),
        ("mxf4nvf4", "4X", "ue4m3", "8.8"),
        ("mxf4nvf4", "4X", "ue8m0", "9.1"),
    ):
        forms += [_block_scaled(kind, vectors, ("e2m1", "e2m1"), scale, each, isa) for each in _SELECTORS[vectors]]
    for types in itertools.product(BYTE_TYPES, BYTE_TYPES):
        forms += [_block_scaled("mxf8f6f4", "1X", types, "ue8m0", each, "8.8") for each in _SELECTORS["1X"]]
    return forms


def _block_scaled(
    kind: str, vectors: str, types: tuple[str, str], scale: str, selectors: tuple[int, int, int, int], isa: str
) -> InstructionForm:
    shape = "m16n8k32" if kind == "mxf8f6f4" else "m16n8k64"
    opcode = (
        f"mma.sync.aligned.{shape}.row.col.kind::{kind}.block_scale.scale_vec::{vectors}.f32.{types[0]}.{types[1]}.f32.{scale}"
    )
    byte_a, thread_a, byte_b, thread_b = selectors
    predicate = selectors != (0, 0, 0, 0) and byte_a % 2 == 0 and thread_b == 1  # one set of selectors also has a predicate
    guard = "@%p0 " if predicate else ""
    code = (
        f"{guard}{opcode} {{%o0, %o1, %o2, %o3}}, {{%i0, %i1, %i2, %i3}}, {{%i4, %i5}}, {{%i6, %i7, %i8, %i9}}, "
        f"{{%i10}}, {{{byte_a}, {thread_a}}}, {{%i11}}, {{{byte_b}, {thread_b}}};"
    )
    count = int(vectors[0])

    def draw(random: np.random.Generator) -> Words:
        import numpy as np

        scales = _scales(random, scale)
        matrices = [_codes(random, types[0], 4), _codes(random, types[1], 2), _floats(random, 4)]
        return np.concatenate([*matrices, scales], 2)

    def expect(words: Words) -> Words:
        a = model.scale_matrix(words[:, :, 10], scale, count, 16, (byte_a, thread_a))
        b = model.scale_matrix(words[:, :, 11], scale, count, 8, (byte_b, thread_b))
        c = model.accumulators(words[:, :, 6:10], half=False)
        return model.fragments(model.mma(words[:, :, :4], words[:, :, 4:6], c, types, (a, b)), half=False)

    name = f"{opcode} {{{byte_a}, {thread_a}}} {{{byte_b}, {thread_b}}}"
    return InstructionForm(name, code, 4, draw, expect, predicate=predicate, isa=isa)


def _plain_mma() -> list[InstructionForm]:
    return [_f8f6f4(types, half) for half in (False, True) for types in itertools.product(BYTE_TYPES, BYTE_TYPES)]


def _f8f6f4(types: tuple[str, str], half: bool) -> InstructionForm:
    accumulator = "f16" if half else "f32"
    opcode = f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.{accumulator}.{types[0]}.{types[1]}.{accumulator}"
    c, d = ("{%i6, %i7}", "{%o0, %o1}") if half else ("{%i6, %i7, %i8, %i9}", "{%o0, %o1, %o2, %o3}")

    def draw(random: np.random.Generator) -> Words:
        import numpy as np

        c = _halves(random, 2) if half else _floats(random, 4)
        return np.concatenate([_codes(random, types[0], 4), _codes(random, types[1], 2), c], 2)

    def expect(words: Words) -> Words:
        c = model.accumulators(words[:, :, 6:], half)
        return model.fragments(model.mma(words[:, :, :4], words[:, :, 4:6], c, types), half)

    code = f"{opcode} {d}, {{%i0, %i1, %i2, %i3}}, {{%i4, %i5}}, {c};"
    return InstructionForm(opcode, code, 2 if half else 4, draw, expect)


def _codes(random: np.random.Generator, name: str, count: int) -> Words:
    """Registers of elements: any bits, and special codes in some cases; NaN and infinity of 8 bits are rare."""
    import numpy as np

    words = random.integers(0, 2**32, (CASES, 32, count), dtype=np.uint32)
    if name not in ("e4m3", "e5m2"):
        return words
    codes = words.view(np.uint8)
    special = np.array(
        [0, 0x80, 1, 0x7E, 0xFE, 0x7B, 0x7C, 0xFC, 0x7F, 0xFF] if name == "e5m2" else [0, 0x80, 1, 0x7E, 0xFE, 0x7F]
    )
    largest = 0x7B if name == "e5m2" else 0x7E
    codes[:] = np.where((codes & 0x7F) > largest, codes ^ 0x40, codes)  # finite
    replaced = random.random(codes.shape) < 0.01
    replaced[CASES // 5 :] = False
    codes[:] = np.where(replaced, random.choice(special, codes.shape), codes)
    return words


def _scales(random: np.random.Generator, kind: str) -> Words:
    """Registers with the scales of A and B: moderate ones, any ones in a fifth of the cases, NaN in a tenth."""
    import numpy as np

    low, high = (100, 155) if kind == "ue8m0" else (0, 127)
    codes = random.integers(low, high, (CASES, 32, 8)).astype(np.uint8)
    if kind == "ue4m3":
        codes |= random.integers(0, 2, codes.shape).astype(np.uint8) << 7  # no part of the value
    first = CASES // 5
    codes[:first] = random.integers(0, 256, codes[:first].shape)
    nan = (random.random(codes.shape) < 0.02) & (np.arange(CASES) < CASES // 10)[:, None, None]
    codes[nan] = 255
    return codes.view(np.uint32)


def _floats(random: np.random.Generator, count: int) -> Words:
    """fp32 values of many magnitudes; special ones in a fifth of the cases."""
    import numpy as np

    x = (random.standard_normal((CASES, 32, count)) * 2.0 ** random.integers(-12, 24, (CASES, 32, count))).astype(np.float32)
    special = np.array([0, -0.0, 1, -1, 3e38, -3e38, 1e-40, np.inf, -np.inf, np.nan], np.float32)
    chosen = (random.random(x.shape) < 0.2) & (np.arange(CASES) < CASES // 5)[:, None, None]
    return np.where(chosen, random.choice(special, x.shape), x).astype(np.float32).view(np.uint32)


def _halves(random: np.random.Generator, count: int) -> Words:
    """f16x2 values, special ones included."""
    import numpy as np

    with np.errstate(over="ignore"):
        x = _floats(random, 2 * count).view(np.float32).astype(np.float16)
    x = np.where(np.isinf(x) & (np.arange(CASES) >= CASES // 5)[:, None, None], np.float16(1.5), x)
    return np.ascontiguousarray(x).view(np.uint32)


# ---- cvt

_TIES = (
    0.25,
    0.75,
    1.25,
    1.75,
    2.5,
    3.5,
    5.0,
    6.0,
    6.5,
    7.0,
    7.25,
    7.5,
    7.75,
    28.0,
    30.0,
    31.9,
    0.0625,
    0.03125,
    0.09375,
    1.0625,
)


def _conversions() -> list[InstructionForm]:
    forms = []
    for name, relu in itertools.product(("e2m1", "e2m3", "e3m2"), (False, True)):
        sources = ("f32", "f16x2") if name == "e2m1" else ("f32",)
        forms += [_to_narrow(name, relu, source, False) for source in sources]
        forms.append(_from_narrow(name, relu))
    forms.append(_to_narrow("e2m1", False, "f32", True))
    for rounding, finite, source in itertools.product(("rz", "rp"), (False, True), ("f32", "bf16x2")):
        forms.append(_to_ue8m0(rounding, finite, source))
    forms.append(_from_ue8m0())
    return forms


def _values(random: np.random.Generator, source: str) -> Words:
    """Pairs of values: two fp32 words with the upper one first, or one word of f16x2 or bf16x2."""
    import numpy as np

    x = _floats(random, 2).view(np.float32).copy()
    middle = slice(CASES // 5, 4 * CASES // 5)
    steps = random.choice(np.array(_TIES, np.float32), x[middle].shape) * random.choice([-1, 1], x[middle].shape)
    jitter = random.choice(np.array([1, 1 + 2**-20, 1 - 2**-20, 0.99], np.float32), x[middle].shape)
    x[middle] = (steps * jitter).astype(np.float32)
    x[4 * CASES // 5 :] = 2.0 ** random.integers(-126, 127, x[4 * CASES // 5 :].shape).astype(np.float32)
    if source == "f32":
        return x.view(np.uint32)
    with np.errstate(over="ignore"):
        codes: Words = x.astype(np.float16).view(np.uint16) if source == "f16x2" else x.view(np.uint16)[:, :, 1::2]
    return np.ascontiguousarray(codes[:, :, ::-1]).view(np.uint32)


def _pair(words: Words, source: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Upper and lower value of what ``_values`` draws."""
    import numpy as np

    if source == "f32":
        x = np.ascontiguousarray(words).view(np.float32)
        return x[:, :, 0], x[:, :, 1]
    codes = np.ascontiguousarray(words).view(np.uint16)
    x = codes.view(np.float16).astype(np.float32) if source == "f16x2" else (codes.astype(np.uint32) << 16).view(np.float32)
    return x[:, :, 1], x[:, :, 0]


def _to_narrow(name: str, relu: bool, source: str, predicate: bool) -> InstructionForm:
    opcode = f"cvt.rn.satfinite{'.relu' * relu}.{name}x2.{source}"
    operands = "%i0, %i1" if source == "f32" else "%i0"
    guard = "@!%p0 bra skip;\n" if predicate else ""
    register, fill, shift = ("b8", ", %b, %b, %b", 4) if name == "e2m1" else ("b16", ", %b", 8)
    narrow = "cvt.u8.u32 %b, 0;" if name == "e2m1" else "mov.b16 %b, 0;"
    convert = f"{opcode} %c, {operands};"
    code = f"{guard}.reg .{register} %b, %c;\n{narrow}\n{convert}\nmov.b32 %o0, {{%c{fill}}};" + (
        "\nskip:" if predicate else ""
    )

    def expect(words: Words) -> Words:
        high, low = _pair(words, source)
        return (model.to_narrow(high, name, relu) << shift | model.to_narrow(low, name, relu))[:, :, None]

    return InstructionForm(
        opcode + " divergent" * predicate, code, 1, lambda random: _values(random, source), expect, predicate=predicate
    )


def _from_narrow(name: str, relu: bool) -> InstructionForm:
    opcode = f"cvt.rn{'.relu' * relu}.f16x2.{name}x2"
    register, rest, bits = ("b8", ", %x, %y, %z", 4) if name == "e2m1" else ("b16", ", %x", 8)
    code = f".reg .{register} %c, %x, %y, %z;\nmov.b32 {{%c{rest}}}, %i0;\n{opcode} %o0, %c;"
    mask = 15 if name == "e2m1" else 63

    def expect(words: Words) -> Words:
        low, high = words[:, :, 0] & mask, words[:, :, 0] >> bits & mask
        return (model.from_narrow(high, name, relu) << 16 | model.from_narrow(low, name, relu))[:, :, None]

    return InstructionForm(opcode, code, 1, lambda random: random.integers(0, 2**32, (CASES, 32, 1)), expect)


def _to_ue8m0(rounding: str, finite: bool, source: str) -> InstructionForm:
    opcode = f"cvt.{rounding}{'.satfinite' * finite}.ue8m0x2.{source}"
    operands = "%i0, %i1" if source == "f32" else "%i0"
    code = f".reg .b16 %b, %c;\nmov.b16 %b, 0;\n{opcode} %c, {operands};\nmov.b32 %o0, {{%c, %b}};"

    def expect(words: Words) -> Words:
        high, low = (model.to_ue8m0(half, rounding == "rp", finite) for half in _pair(words, source))
        return (high << 8 | low)[:, :, None]

    return InstructionForm(opcode, code, 1, lambda random: _values(random, source), expect)


def _from_ue8m0() -> InstructionForm:
    opcode = "cvt.rn.bf16x2.ue8m0x2"

    def expect(words: Words) -> Words:
        low, high = words[:, :, 0] & 255, words[:, :, 0] >> 8 & 255
        return (model.from_ue8m0(high) << 16 | model.from_ue8m0(low))[:, :, None]

    code = f".reg .b16 %c, %x;\nmov.b32 {{%c, %x}}, %i0;\n{opcode} %o0, %c;"
    return InstructionForm(opcode, code, 1, lambda random: random.integers(0, 2**32, (CASES, 32, 1)), expect)


# ---- ldmatrix


def _ldmatrix() -> list[InstructionForm]:
    return [
        _unpacking(count, bits, space)
        for bits, count in itertools.product((4, 6), (1, 2, 4))
        for space in (("shared", "generic") if count == 4 else ("shared",))
    ]


def _transposing_loads() -> list[InstructionForm]:
    forms = [_unpacking(count, bits, "shared", True) for bits, count in itertools.product((4, 6, 8), (1, 2))]
    return [*forms, _unpacking(2, 8, "generic", True)]


_SOURCES = {4: "b8x16.b4x16_p64", 6: "b8x16.b6x16_p32", 8: "b8"}


def _unpacking(count: int, bits: int, space: str, transposes: bool = False) -> InstructionForm:
    shape = f"m16n16.x{count}.trans" if transposes else f"m8n16.x{count}"
    results = 2 * count if transposes else count
    opcode = f"ldmatrix.sync.aligned.{shape}{'.shared' * (space == 'shared')}.{_SOURCES[bits]}"
    registers = ", ".join(f"%o{index}" for index in range(results))
    address = "%s+16" if space == "shared" else "%g"
    code = "\n".join(
        [
            ".reg .b32 %s, %u; .reg .b64 %g;",
            "mov.u32 %s, rows; mov.u32 %u, %tid.x; shl.b32 %u, %u, 4; add.u32 %s, %s, %u;",
            "st.shared.v4.b32 [%s], {%i0, %i1, %i2, %i3};",
            "bar.sync 0;",
            "mov.u32 %s, rows; shl.b32 %u, %i4, 4; add.u32 %s, %s, %u;",
            "cvt.u64.u32 %g, %s; cvta.shared.u64 %g, %g;",
            "sub.u32 %s, %s, 16;" if space == "shared" else "",
            f"{opcode} {{{registers}}}, [{address}];",
        ]
    )

    def draw(random: np.random.Generator) -> Words:
        import numpy as np

        rows = random.integers(0, 2**32, (CASES, 32, 4), dtype=np.uint32)
        order = random.permuted(np.tile(np.arange(32, dtype=np.uint32), (CASES, 1)), axis=1)
        return np.concatenate([rows, order[:, :, None]], axis=2)

    def expect(words: Words) -> Words:
        import numpy as np

        rows = np.ascontiguousarray(words[:, :, :4]).view(np.uint8)
        load = model.ldmatrix_transposed if transposes else model.ldmatrix
        return load(rows, words[:, :, 4], count, bits)

    return InstructionForm(f"{opcode} {space}", code, results, draw, expect, shared=True)


def _transposing_stores() -> list[InstructionForm]:
    return [*(_storing(count, "shared") for count in (1, 2, 4)), _storing(4, "generic")]


def _storing(count: int, space: str) -> InstructionForm:
    """A store to rows in any order, after which each lane reads one row."""
    opcode = f"stmatrix.sync.aligned.m16n8.x{count}.trans{'.shared' * (space == 'shared')}.b8"
    registers = ", ".join(f"%i{index}" for index in range(count))
    address = "[%s+16]" if space == "shared" else "[%g]"
    code = "\n".join(
        [
            ".reg .b32 %s, %u, %v; .reg .b64 %g;",
            "mov.u32 %v, rows; mov.u32 %u, %tid.x; shl.b32 %u, %u, 4; add.u32 %v, %v, %u;",
            "st.shared.v4.b32 [%v], {%i5, %i5, %i5, %i5};",
            "bar.sync 0;",
            "mov.u32 %s, rows; shl.b32 %u, %i4, 4; add.u32 %s, %s, %u;",
            "cvt.u64.u32 %g, %s; cvta.shared.u64 %g, %g;",
            "sub.u32 %s, %s, 16;" if space == "shared" else "",
            f"{opcode} {address}, {{{registers}}};",
            "bar.sync 0;",
            "ld.shared.v4.b32 {%o0, %o1, %o2, %o3}, [%v];",
        ]
    )

    def draw(random: np.random.Generator) -> Words:
        import numpy as np

        words = random.integers(0, 2**32, (CASES, 32, 6), dtype=np.uint32)
        words[:, :, 4] = random.permuted(np.tile(np.arange(32, dtype=np.uint32), (CASES, 1)), axis=1)
        return words

    def expect(words: Words) -> Words:
        import numpy as np

        before = np.repeat(words[:, :, 5:6], 4, axis=2)
        return model.stmatrix_transposed(words[:, :, :count], words[:, :, 4], np.ascontiguousarray(before).view(np.uint8))

    return InstructionForm(f"{opcode} {space}", code, 4, draw, expect, shared=True)


# ---- arithmetic on pairs


def _arithmetic() -> list[InstructionForm]:
    forms = [
        _f32x2(operation, rounding, ftz, False)
        for operation, rounding, ftz in itertools.product(("add", "sub", "mul", "fma"), ("rn", "rz", "rm", "rp"), (False, True))
    ]
    return [*forms, _f32x2("add", "", False, False), _f32x2("mul", "rn", False, True)]


def _f32x2(operation: str, rounding: str, ftz: bool, predicate: bool) -> InstructionForm:
    opcode = ".".join(filter(None, (operation, rounding, "ftz" * ftz, "f32x2")))
    count = 3 if operation == "fma" else 2
    packs = [f"mov.b64 %d{index}, {{%i{2 * index}, %i{2 * index + 1}}};" for index in range(count)]
    sources = ", ".join(f"%d{index}" for index in range(count))
    guard = "@%p0 " if predicate else ""
    code = "\n".join(
        [".reg .b64 %d<4>;", *packs, "mov.b64 %d3, {%o0, %o1};", f"{guard}{opcode} %d3, {sources};", "mov.b64 {%o0, %o1}, %d3;"]
    )

    def draw(random: np.random.Generator) -> Words:
        import numpy as np

        words = np.concatenate([_floats(random, 2) for _ in range(count)], axis=2)
        tiny = (
            random.integers(0, 2**23, words.shape, dtype=np.uint32) | random.integers(0, 2, words.shape, dtype=np.uint32) << 31
        )
        small = slice(CASES // 5, 3 * CASES // 10)
        words[small] = tiny[small]
        return words

    def expect(words: Words) -> Words:
        import numpy as np

        mode = rounding or "rn"
        halves = [model.f32x2(operation, mode, ftz, [words[:, :, half::2][:, :, i] for i in range(count)]) for half in (0, 1)]
        return np.stack(halves, axis=2)

    return InstructionForm(opcode + " predicated" * predicate, code, 2, draw, expect, predicate=predicate)


# ---- arithmetic of fp32 with f16 and bf16


def _mixed_arithmetic() -> list[InstructionForm]:
    forms = [
        _mixed(operation, rounding, False, of)
        for operation, of, rounding in itertools.product(("add", "sub", "fma"), ("f16", "bf16"), ("rn", "rz", "rm", "rp"))
    ]
    return [*forms, *(_mixed(operation, "rn", True, of) for operation, of in (("add", "bf16"), ("sub", "f16"), ("fma", "f16")))]


def _mixed(operation: str, rounding: str, saturate: bool, of: str) -> InstructionForm:
    opcode = ".".join(filter(None, (operation, rounding, "sat" * saturate, "f32", of)))
    count = 2 if operation == "fma" else 1
    code = "\n".join(
        [
            ".reg .b16 %h<3>; .reg .f32 %f<2>;",
            *(f"cvt.u16.u32 %h{index}, %i{index};" for index in range(count)),
            f"mov.b32 %f0, %i{count};",
            f"{opcode} %f1, {', '.join(f'%h{index}' for index in range(count))}, %f0;",
            "mov.b32 %o0, %f1;",
        ]
    )

    def draw(random: np.random.Generator) -> Words:
        import numpy as np

        narrow = [_halves(random, 1) if of == "f16" else _floats(random, 1) >> np.uint32(16) for _ in range(count)]
        last = _floats(random, 1)
        if saturate:  # the ISA leaves open whether -0 is clamped to 0
            last = np.where(last << np.uint32(1) == 0, np.uint32(0x3F800000), last)
        return np.concatenate([*narrow, last], axis=2)

    def expect(words: Words) -> Words:
        import numpy as np

        inputs = [words[:, :, index] & np.uint32(0xFFFF) for index in range(count)]
        return model.mixed(operation, rounding, saturate, [*inputs, words[:, :, count]], of)[:, :, None]

    return InstructionForm(opcode, code, 1, draw, expect)


# ---- loads and stores of 256 bits

_LOADS = (
    "ld.global.v8.b32",
    "ld.global.nc.L1::no_allocate.L2::evict_last.L2::256B.v8.f32",
    "ld.relaxed.gpu.global.L2::evict_first.v8.u32",
    "ld.v8.s32",
    "ld.global.v4.b64",
    "ld.volatile.global.v4.f64",
)
_STORES = (
    "st.global.v8.b32",
    "st.global.L1::no_allocate.L2::evict_first.v8.f32",
    "st.v4.b64",
    "st.release.gpu.global.v4.u64",
)


def _wide_copies() -> list[InstructionForm]:
    forms = [_wide(opcode, ()) for opcode in (*_LOADS, *_STORES)]
    return [*forms, _wide("ld.global.nc.v8.b32", (0, 5)), _wide("st.global.v8.b32", (2, 4, 5, 6, 7))]


def _wide(opcode: str, left_out: tuple[int, ...]) -> InstructionForm:
    """Eight words; a load's address is also one of its results. Words that are ``left_out`` stay as they were."""
    words = opcode.endswith(("32", "f32"))
    count, prefix = (8, "%w") if words else (4, "%x")
    names = [prefix + str(index) for index in range(count)]
    vector = ", ".join("_" if index in left_out else name for index, name in enumerate(names))
    pairs = [f"mov.b64 {name}, {{%i{2 * at}, %i{2 * at + 1}}};" for at, name in enumerate(names)]
    fill = [f"mov.b32 {name}, %i{at};" for at, name in enumerate(names)] if words else pairs
    code = [f".reg .{opcode.rsplit('.', 1)[1]} {prefix}<{count}>;"]
    if opcode.startswith("ld"):
        unpack = [
            f"mov.b32 %o{at}, {name};" if words else f"mov.b64 {{%o{2 * at}, %o{2 * at + 1}}}, {name};"
            for at, name in enumerate(names)
            if at not in left_out
        ]
        if opcode.endswith("b64"):
            vector, unpack = vector.replace("%x1", "%a0"), [line.replace("%x1;", "%a0;") for line in unpack]
        code += [f"{opcode} {{{vector}}}, [%a0];", *unpack]
    else:
        code += [f"st.global.b32 [%a1+{4 * at}], {UNTOUCHED};" for at in range(8)]
        code += ["sub.u64 %a1, %a1, 32;", *fill, f"{opcode} [%a1+32], {{{vector}}};", "add.u64 %a1, %a1, 32;"]
        code += [f"ld.volatile.global.b32 %o{at}, [%a1+{4 * at}];" for at in range(8)]

    def expect(inputs: Words) -> Words:
        import numpy as np

        kept = np.isin(np.arange(8), left_out)
        return np.where(kept, np.uint32(UNTOUCHED), inputs)

    name = f"{opcode} without {left_out}" if left_out else opcode
    return InstructionForm(name, "\n".join(code), 8, lambda random: random.integers(0, 2**32, (CASES, 32, 8)), expect)


# ---- cluster launch control


def _launch_control() -> InstructionForm:
    """A request to cancel a CTA, whose response arrives at an mbarrier: it must be a refusal."""
    opcode = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
    code = f"""
.shared .align 16 .b8 clc[32];
.reg .b32 %c, %m, %x; .reg .b64 %token; .reg .b128 %q; .reg .pred %e;
mov.u32 %c, clc; add.u32 %m, %c, 16; mov.u32 %x, %tid.x; setp.ne.u32 %e, %x, 0;
@%e bra started;
st.shared.v4.b32 [%c], {{%i0, %i0, %i0, %i0}};
mbarrier.init.shared::cta.b64 [%m], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 %token, [%m], 16;
{opcode} [%c], [%m];
started: bar.sync 0;
wait: mbarrier.try_wait.parity.shared::cta.b64 %e, [%m], 0;
@!%e bra wait;
ld.shared.b128 %q, [%c];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %e, %q;
selp.u32 %o0, 1, 0, %e;
@%e clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%o0, %x, %x, _}}, %q;"""

    def expect(words: Words) -> Words:
        import numpy as np

        return np.zeros((CASES, 32, 1), np.uint32)

    return InstructionForm(opcode, code, 1, lambda random: random.integers(1, 2**32, (CASES, 32, 1)), expect)
