"""PTX rewritten for Hopper: syntax, replacements, refusals, the scalar model, and faults seeded in the rewriter."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from sm12x_lab import RECEIPTS, gpu
from sm12x_lab.ptx import forms, images, interposed, library, model, perturb, races, selftest
from sm12x_lab.ptx.rewrite import RULES, TENSOR_MAP_MARK, UNPACKING_MARK, RewrittenPtx, rewrite
from sm12x_lab.ptx.syntax import instructions
from sm120kit.cli import app
from sm120kit.core import process
from sm120kit.core.errors import BadInput, CheckFailed, NotFound, ResourceUnavailable, SystemRefused
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.cubin import fatbin
from sm120kit.wheels import flashinfer
from sm120kit.wheels.build_records import BuildRequest

HEADER = ".version 8.8\n.target sm_120a\n.address_size 64\n"
NAMES = re.findall(r"^FUNCTION \w+ (\w+)\(", library.SOURCE.read_text(), re.MULTILINE)
FUNCTIONS = library.SoftwareFunctions({name: f".func {name}();" for name in NAMES}, "9.0")
EVERY = forms.all_forms()
FATBIN = Path(__file__).parents[1] / "unit" / "data" / "cubin" / "lz4.fatbin"
"""One image, machine code for SM12x."""


def rewritten(body: str, header: str = HEADER) -> RewrittenPtx:
    return rewrite(
        f"{header}.visible .entry k()\n{{\n.reg .b32 %r<9>;\n.reg .b64 %d<9>;\n{body}\nret;\n}}\n", lambda: FUNCTIONS
    )


# ---- syntax


def test_instructions_of_everything_that_surrounds_them() -> None:
    text = HEADER + (
        '.file 1 "a;b.cu"\n.extern .shared .align 16 .b8 smem[];\n.global .b8 x[2] = {1, 2};\n'
        ".visible .entry k(.param .u64 a) .maxntid 32, 1, 1\n{\n.reg .pred %p<2>; // mul.f32 in a comment;\n.loc 1 2 3\n"
        "/* add.f32\n; */ $L__BB0_1: @!%p1 bra $L__BB0_1;\n{ .reg .b32 t; mov.b32 t, 1; }\n"
        '.pragma "nounroll;";\ncall.uni (r), f, (a, b);\nld.global.v2.b32 {%r1, %r2}, [%rd1+8];\nret;\n}\n'
        ".section .debug_info\n{\n.b32 1\n}\n"
    )
    listed = [(instruction.line, str(instruction)) for instruction in instructions(text)]
    assert listed == [
        (12, "@!%p1 bra $L__BB0_1;"),
        (13, "mov.b32 t, 1;"),
        (15, "call.uni (r), f, (a, b);"),
        (16, "ld.global.v2.b32 {%r1, %r2}, [%rd1+8];"),
        (17, "ret ;"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a PTX module"),
        ("int main() {}", "not a PTX module"),
        (HEADER.replace("sm_120a", "sm_100a"), "sm_100a is not SM12x"),
        (HEADER + ".entry k()\n{\n???;\n}", r"line 6: not an instruction of PTX: '\?\?\?'"),
    ],
)
def test_what_is_no_ptx_for_sm120_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rewrite(text, lambda: FUNCTIONS)


# ---- replacements


def test_instructions_that_hopper_has_stay_as_they_are() -> None:
    body = (
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {a,b,c,d},{a,b,c,d},{a,b},{a,b,c,d};\n"
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5]; // a comment\n"
        "mul.rn.bf16x2 %r1, %r2, %r3;\n"
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d5];\n"
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1};"
    )
    module = rewritten(body)
    assert body in module.text
    assert (module.replacements, module.instruction_count, module.source_target) == ((), 7, "sm_120a")
    assert module.text.startswith(".version 9.0\n.target sm_90a\n.address_size 64\n")


def test_block_scaled_mma_becomes_a_call() -> None:
    module = rewritten(
        "@%p1 mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3\n"
        "  {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f5, %f6, %f7, 0f00000000}, {%r7}, {0, %rs1}, %r8, {0, 3};"
    )
    (replacement,) = module.replacements
    assert (replacement.line, replacement.function) == (8, "sm120_mma_e2m1_4x_ue4m3")
    code = module.text[module.text.index("@!%p1") : module.text.index("\nret;")].splitlines()
    names = ", ".join(f"sm120$a{index}" for index in range(16))
    arguments = [f"[sm120$a{index}], %r{index + 1}" for index in range(6)]
    floats = ["%f5", "%f6", "%f7", "0f00000000"]
    scales = ["%r7", "sm120$s0", "sm120$s1", "%r8", "sm120$s2", "sm120$s3"]
    assert code[:2] == ["@!%p1 bra $sm120_skip_0;", "{"]
    assert [line for line in code if line.startswith("mov.b16")] == [f"mov.b16 sm120$h, {x};" for x in ("0", "%rs1", "0", "3")]
    assert [line for line in code if line.startswith("st.param")] == [
        *(f"st.param.b32 {argument};" for argument in arguments),
        *(f"st.param.f32 [sm120$a{6 + index}], {operand};" for index, operand in enumerate(floats)),
        *(f"st.param.b32 [sm120$a{10 + index}], {operand};" for index, operand in enumerate(scales)),
    ]
    assert f"call (sm120$r), sm120_mma_e2m1_4x_ue4m3, ({names});" in code
    assert code[-6:] == [*(f"ld.param.b32 %f{index + 1}, [sm120$r+{4 * index}];" for index in range(4)), "}", "$sm120_skip_0:"]
    assert module.text.count(".func") == 1


@pytest.mark.parametrize(
    ("instruction", "code"),
    [
        (
            "fma.rz.ftz.f32x2 %d1, %d2, %d3, %d4;",
            ["fma.rz.ftz.f32 sm120$l0, sm120$l1, sm120$l2, sm120$l3;", "mov.b64 %d1, {sm120$l0, sm120$u0};"],
        ),
        (
            "cvt.rn.satfinite.relu.e2m1x2.f32 %b1, %f1, %f2;",
            ["st.param.f32 [sm120$a0], %f1;", "st.param.b32 [sm120$a3], 1;", "mov.b32 {%b1, _, _, _}, sm120$d;"],
        ),
        ("cvt.rn.f16x2.e3m2x2 %r1, %h1;", ["cvt.u32.u16 sm120$s, %h1;", "st.param.b32 [sm120$a1], 3;"]),
        ("cvt.rp.satfinite.ue8m0x2.bf16x2 %h1, %r1;", ["cvt.f32.bf16 sm120$f1, sm120$h1;", "mov.b32 {%h1, _}, sm120$d;"]),
        (
            "ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b6x16_p32 {%r1, %r2}, [%d3+32];",
            ["cvt.u32.u64 sm120$p, %d3;", "add.s32 sm120$p, sm120$p, 32;", "st.param.b32 [sm120$a2], 6;"],
        ),
        (
            "ldmatrix.sync.aligned.m16n16.x1.trans.b8x16.b6x16_p32 {%r1, %r2}, [%d3];",
            [
                "cvta.to.shared.u64 sm120$g, %d3;",
                "st.param.b32 [sm120$a1], 1;",
                "st.param.b32 [sm120$a2], 6;",
                "call (sm120$r), sm120_ldmatrix_m16n16, (sm120$a0, sm120$a1, sm120$a2);",
                "ld.param.b32 %r1, [sm120$r+0];",
                "ld.param.b32 %r2, [sm120$r+4];",
            ],
        ),
        (
            "stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r3+-64], {%r1, %r2};",
            [
                "mov.b32 sm120$p, %r3;",
                "add.s32 sm120$p, sm120$p, -64;",
                "st.param.b32 [sm120$a1], 2;",
                "st.param.b32 [sm120$a2], %r1;",
                "st.param.b32 [sm120$a3], %r2;",
                "st.param.b32 [sm120$a4], 0;",
            ],
        ),
        (
            "ld.global.nc.L1::no_allocate.L2::evict_last.L2::256B.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%d1+32];",
            [
                "mov.b64 sm120$g0, %d1;",
                "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%r1, %r2, %r3, %r4}, [sm120$g0+32];",
                "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%r5, %r6, %r7, %r8}, [sm120$g0+48];",
            ],
        ),
        (
            "ld.global.L2::cache_hint.v4.u64 {%d1, _, %d3, %d4}, [%d1], %d2;",
            [
                "mov.b64 sm120$g0, %d1;",
                "mov.b64 sm120$g1, %d2;",
                "ld.global.L2::cache_hint.u64 %d1, [sm120$g0+0], sm120$g1;",
                "ld.global.L2::cache_hint.v2.u64 {%d3, %d4}, [sm120$g0+16], sm120$g1;",
            ],
        ),
        (
            "st.global.L2::evict_first.v8.f32 [x+8], {a, b, _, c, d, e, f, 0f00000000};",
            [
                "mov.b64 sm120$g0, x;",
                "st.global.f32 [sm120$g0+8], a;",
                "st.global.f32 [sm120$g0+12], b;",
                "st.global.f32 [sm120$g0+20], c;",
                "st.global.v4.f32 [sm120$g0+24], {d, e, f, 0f00000000};",
            ],
        ),
        ("sub.rz.f32.bf16 %f1, %h1, %f2;", ["cvt.f32.bf16 sm120$f0, sm120$h;", "sub.rz.f32 %f1, sm120$f0, %f2;"]),
        (
            "fma.rn.sat.f32.f16 %f1, %h1, 0x3C00, 0f3F800000;",
            [
                "mov.b16 sm120$h, %h1;",
                "cvt.f32.f16 sm120$f0, sm120$h;",
                "mov.b16 sm120$h, 0x3C00;",
                "cvt.f32.f16 sm120$f1, sm120$h;",
                "fma.rn.sat.f32 %f1, sm120$f0, sm120$f1, 0f3F800000;",
            ],
        ),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {%r2, %r3}], [%r1];",
            [
                "ld.b64 sm120$m, [%d1+120];",
                "and.b32 sm120$k, sm120$c, 1;",
                "and.pred sm120$p, sm120$p, sm120$q;",
                "@!sm120$p bra sm120$ok_odd;",
                "@sm120$q shr.s32 sm120$c, sm120$c, 1;",
                "mov.pred sm120$p, sm120$u;",
                "@!sm120$p bra sm120$ok_store;",
                "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {sm120$c, %r3}], [%r1];",
            ],
        ),
        (
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];",
            [
                "st.shared.v4.b32 [%r1], {sm120$z, sm120$z, sm120$z, sm120$z};",
                "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 16;",
            ],
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1+16], [%d1, {%r2, %r3}], [%d2];",
            [
                "@!sm120$u cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
                " [%r1+16], [%d1, {sm120$c, %r3}], [%d2];",
                "@!sm120$u bra sm120$done;",
                "and.b32 sm120$k, sm120$c, 127;",
                "@!sm120$p bra sm120$ok_multiple;",
                "mov.b32 sm120$p0, %r1;",
                "add.s32 sm120$p0, sm120$p0, 16;",
                "cvt.u32.u64 sm120$p1, %d2;",
                "st.param.b64 [sm120$a0], %d1;",
                "st.param.b32 [sm120$a3], %r2;",
                "st.param.b32 [sm120$a7], 0;",
                "sm120$done:",
            ],
        ),
        (
            "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1, {0}],"
            " [%r2], %r3;",
            [
                "or.pred sm120$p, sm120$q, sm120$u;",
                "@!sm120$p bra sm120$ok_cluster;",
                "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1],"
                " [%d1, {sm120$c}], [%r2], %r3;",
            ],
        ),
        (
            "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {%r2, %r3}];",
            [
                "@sm120$q shr.s32 sm120$c, sm120$c, 1;",
                "@!sm120$u cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {sm120$c, %r3}];",
            ],
        ),
        (
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {%r2, %r3}], [%r1];",
            [
                "or.pred sm120$p, sm120$q, sm120$u;",
                "@!sm120$p bra sm120$ok_reduction;",
                "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {sm120$c, %r3}], [%r1];",
            ],
        ),
        (
            "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 0, %r2;",
            [
                "ld.volatile.shared.b64 sm120$m, [%r1+120];",
                "@!sm120$p bra sm120$ok_odd;",
                "@sm120$q shr.u32 sm120$c, sm120$c, 1;",
                "@!sm120$u tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 0, sm120$c;",
                "@sm120$u st.volatile.shared.b32 [%r1+56], sm120$c;",
            ],
        ),
        (
            "tensormap.replace.tile.global_stride.global.b1024.b64 [%d1+128], 2, %d2;",
            [
                "ld.volatile.global.b64 sm120$m, [%d1+248];",
                "@!sm120$u tensormap.replace.tile.global_stride.global.b1024.b64 [%d1+128], 2, sm120$c;",
                "@sm120$u st.volatile.global.b64 [%d1+168], sm120$c;",
            ],
        ),
        ("prefetch.tensormap [%d1];", ["ld.b64 sm120$m, [%d1+120];", "@!sm120$u prefetch.tensormap [%d1];"]),
        (
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%r1],"
            " [%r2];",
            [
                "st.param.b32 [sm120$a1], sm120$p1;",
                "call (sm120$r), sm120_refuse_cancel_in_cluster, (sm120$a0, sm120$a1);",
            ],
        ),
        (
            "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, _}, q;",
            ["mov.b128 {sm120$w0, sm120$w1}, q;", "mov.b64 {%r1, %r2}, sm120$w0;", "mov.b64 {%r3, _}, sm120$w1;"],
        ),
    ],
)
def test_other_families(instruction: str, code: list[str]) -> None:
    module = rewritten(instruction)
    assert len(module.replacements) == 1
    lines = module.text.splitlines()
    assert [line for line in lines if line in code] == code


def test_message_of_what_stops_a_kernel_has_the_line_of_the_ptx() -> None:
    """One declaration and one text for all copies; none where no copy needs them."""
    copy = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, %r3}], [%r4];"
    text = rewritten(f"{copy}\n{copy}").text
    assert [text.count(f"[sm120$a2], {line};") for line in (7, 8, 9, 10)] == [0, 2, 2, 0]
    assert text.count(".extern .func __assertfail") == 1
    for rule, count in {"odd": 1, "multiple": 1, "cluster": 1, "store": 0}.items():
        encoded = ", ".join(map(str, RULES[rule].encode()))
        assert text.count(f".b8 sm120$rule_{rule}[{len(RULES[rule]) + 1}] = {{{encoded}, 0}};") == (rule != "cluster") * count
    assert "__assertfail" not in rewritten("add.rn.f32x2 %d1, %d2, %d3;").text
    parameters = ", ".join(f".param .b{32 if name == 'c' else 64} {name}" for name in "abcde")
    declared = f"{HEADER}.extern .func __assertfail ({parameters});\n"
    assert rewritten(copy, declared).text.count(".extern .func __assertfail") == 1


def test_operands_with_line_breaks_are_one_comment() -> None:
    module = rewritten("fma.rn.f32x2 %d1,\n%d2, %d3,\n  %d4;")
    assert "// fma.rn.f32x2 %d1, %d2, %d3, %d4;" in module.text.splitlines()


def test_each_kernel_of_a_module_becomes_a_module() -> None:
    """Braces in comments, strings and inline assembly do not end a kernel."""
    head = ".version 9.0\n.target sm_120a\n.address_size 64\n.global .align 4 .b8 table[2] = {1, 2};\n"
    first = '.visible .entry first(\n.param .u64 p\n)\n.maxntid 32\n{\n// }\n{\n.reg .pred q;\n}\n.pragma "}";\nret;\n}\n'
    second = ".entry second()\n{\nret;\n}\n"
    tail = ".func helper()\n{\nret;\n}\n"
    assert interposed.single_kernels(head + first + tail + second) == {
        "first": f"{head}{first}{tail}\n",
        "second": f"{head}\n{tail}{second}",
    }


def test_preloaded_driver_and_functions_agree_with_the_rewriter() -> None:
    """Marks and layout of tensor maps, in three languages."""
    shim, functions = interposed.SHIM.read_text(), library.SOURCE.read_text()
    assert f"MARK_PACKED {TENSOR_MAP_MARK:#x}u" in shim and f"MARK_UNPACKING {UNPACKING_MARK:#x}u" in shim
    fields = "unused[2], address, stride[4];", "dim[5], box[5], swizzle_128, bits;"
    assert all(line in text for line in fields for text in (shim, functions))


@pytest.mark.parametrize(
    "instruction",
    [
        "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%d1], [%d2];",
        "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group [%d1, {a, b, c}], [%r1];",
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 {a}, {b}, {c}, {d}, e, 0;",
        "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 {a}, {b}, {c}, {d};",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 "
        "{a,b,c,d}, {a,b,c,d}, {a,b}, {a,b,c,d}, {e}, {1, 0}, {f}, {0, 0};",
        "mma.sync.aligned.m16n8k128.row.col.kind::mxf9.f32.e2m1.e2m1.f32 {a}, {b}, {c}, {d};",
        "cvt.rs.satfinite.e2m1x4.f32 %h1, {%f1, %f2, %f3, %f4}, %r1;",
        "cvt.rn.bf16x2.e2m1x2 %r1, %b1;",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1, %r2}, [%r3];",
        "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8 {%r1, %r2, %r3, %r4}, [%r3];",
        "ldmatrix.sync.aligned.m16n16.x1.trans.b8 {%r1, %r2}, [%r3];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [%r3];",
        "min.f32x2 %d1, %d2, %d3;",
        "ld.global.v8.b16 {a,b,c,d,e,f,g,h}, [%d1];",
        "ld.global.v8.b32 {a,b,c,d,e,f,g}, [%d1];",
        "ld.global.v8.b32 {a,b,c,d,e,f,g,h}, [4096];",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r1], {%r2};",
        "stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r1], {%r2};",
        "add.rn.f32.bf16 %f1, %h1, %h2, %f2;",
        "tensormap.replace.tile.elemtype.global.b1024.b32 [%d1], 13;",
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%d1], %r1, %r2;",
        "tcgen05.wait::ld.sync.aligned;",
    ],
)
def test_instruction_without_replacement_is_named(instruction: str) -> None:
    with pytest.raises(BadInput, match="line 8: no replacement on Hopper for: ") as caught:
        rewritten(instruction)
    assert instruction.split()[0].rstrip(";") in caught.value.message


# ---- the model

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", DTYPES)
def test_values_of_formats(name: str) -> None:
    table = model.values(name)
    other = np.arange(len(table), dtype=np.uint8).view(DTYPES[name]).astype(np.float64)
    np.testing.assert_array_equal(table, other)
    assert (np.signbit(table) == np.signbit(other))[~np.isnan(other)].all()


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_conversion_to_narrow_formats(name: str) -> None:
    largest = model.values(name)[len(model.values(name)) // 2 - 1]
    x = np.random.default_rng(1).uniform(-largest, largest, 20_000).astype(np.float32)
    x = np.concatenate(
        [x, *(np.array(forms._TIES, np.float32) * sign for sign in (1, -1)), np.float32([0, -0.0, 1e-30, -1e-40])]
    )
    inside = np.abs(x) <= largest
    expected = x.astype(DTYPES[name]).view(np.uint8)
    np.testing.assert_array_equal(model.to_narrow(x, name, False)[inside], expected[inside])
    top = len(model.values(name)) // 2 - 1
    special = np.float32([np.nan, np.inf, -np.inf, 1e9, -1e9])
    assert model.to_narrow(special, name, False).tolist() == [top, top, 2 * top + 1, top, 2 * top + 1]
    assert model.to_narrow(special, name, True).tolist() == [top, top, 0, top, 0]


@pytest.mark.parametrize("up", [False, True])
def test_conversion_to_exponents(up: bool) -> None:
    x = np.random.default_rng(2).integers(0, 0x7F800000, 5_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, 2.0 ** np.arange(-149, 128).astype(np.float32), np.float32([2.0**-127 * 1.5, 3e38])])
    codes = model.to_ue8m0(x, up, True)
    for value, code in zip(x.tolist(), codes.tolist(), strict=True):
        power = Fraction(2) ** (code - 127)
        exact = Fraction(value)
        if up:
            assert (exact <= power or code == 254) and (exact > power / 2 or code == 0)
        else:
            assert (exact >= power or code == 0) and exact < 2 * power
    special = np.float32([0, np.inf, -np.inf, np.nan, -1])
    assert model.to_ue8m0(special, up, False).tolist() == [0, 255, 255, 255, 127]
    assert model.to_ue8m0(special, up, True).tolist() == [0, 254, 254, 255, 127]


@pytest.mark.parametrize("form", [form for form in EVERY if form.family == "mma"][::23], ids=lambda form: form.name)
def test_mma_by_fractions(form: forms.InstructionForm) -> None:
    """One output of exact data, with the position of each element written out again."""
    half = ".f16." in form.name
    types = [part for part in form.name.split(" ")[0].split(".") if part in DTYPES]
    bits = 4 if "m16n8k64" in form.name else 8
    words = form.inputs(3)[-3:]
    row, column = 11, 5
    a, b = [], []
    for k in range(256 // bits):
        lane, place = k // (32 // bits) % 4, k % (32 // bits) * bits
        high = k * bits // 128
        a.append(words[:, row % 8 * 4 + lane, 2 * high + row // 8] >> place & (2**bits - 1))
        b.append(words[:, column * 4 + lane, 4 + high] >> place & (2**bits - 1))
    selectors = [int(x) for x in re.findall(r"\d+", form.name.partition(" ")[2])]
    vectors = int(re.search(r"scale_vec::(\d)X", form.name)[1]) if "scale_vec" in form.name else 1
    lane_d, register = row % 8 * 4 + column // 2, row // 8 * 2 + column % 2
    results = form.expected(words)
    for case in range(3):
        total = Fraction(0)
        for k in range(256 // bits):
            term = 1.0
            for codes, name in ((a, types[0]), (b, types[1])):
                code = int(codes[k][case])
                code = code >> 2 if bits == 8 and name == "e2m1" else code
                dtype = DTYPES[name]
                mask = 255 if name in ("e4m3", "e5m2") else 63 if name in ("e2m3", "e3m2") else 15
                term *= float(np.uint8(code & mask).view(dtype).astype(np.float64))
            exact = Fraction(term)
            if selectors:
                vector = k * vectors * bits // 256
                scale = "ue4m3" if "ue4m3" in form.name else "ue8m0"
                sa = words[case, row % 8 * 4 + 2 * selectors[1] + row // 8, 10] >> 8 * (selectors[0] + vector) & 255
                sb = words[case, column * 4 + selectors[3], 11] >> 8 * (selectors[2] + vector) & 255
                for code in (int(sa), int(sb)):
                    dtype = ml_dtypes.float8_e4m3fn if scale == "ue4m3" else ml_dtypes.float8_e8m0fnu
                    exact *= Fraction(float(np.uint8(code & (127 if scale == "ue4m3" else 255)).view(dtype).astype(np.float64)))
            total += exact
        if half:
            c = words[case, lane_d, 6 + register // 2 : 7 + register // 2].view(np.float16)[register % 2]
            got = np.ascontiguousarray(results[case, lane_d]).view(np.float16)[register]
            bound = 2**-10
        else:
            c = words[case, lane_d, 6 + register : 7 + register].view(np.float32)[0]
            got = np.ascontiguousarray(results[case, lane_d]).view(np.float32)[register]
            bound = 2**-23
        exact = total + Fraction(float(c))
        if form.predicate and not words[case, 0, -1]:
            continue
        if abs(exact) < 60_000 or not half:
            assert abs(Fraction(float(got)) - exact) <= abs(exact) * Fraction(bound) + Fraction(1, 2**40)


def exactly_rounded(terms: list[float]) -> tuple[float, float]:
    """The fp32 and f16 values nearest to the exact sum, by fractions."""
    exact = sum(map(Fraction, terms), Fraction(0))
    nearest = []
    for dtype in (np.float32, np.float16):
        start = dtype(math.fsum(terms))
        around = [start, np.nextafter(start, dtype(-np.inf)), np.nextafter(start, dtype(np.inf))]
        codes = np.dtype(f"u{start.nbytes}")
        nearest.append(float(min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(codes)) % 2))))
    return nearest[0], nearest[1]


def test_sums_are_rounded_once() -> None:
    """Of terms whose float64 sum lies between two fp32 values although the exact sum does not: a second rounding would show."""
    random = np.random.default_rng(7)
    terms = random.integers(-8, 9, (2000, 5)) * 2.0 ** random.integers(-60, 1, (2000, 5))
    terms[:, 0] = 1 + random.integers(0, 2**10, 2000) * 2.0**-10
    terms[:, 1] = random.choice([2.0**-24, 2.0**-11, 0], 2000) * random.choice([-1, 1], 2000)
    once = model._exact_sums(terms)
    expected = [exactly_rounded(row) for row in terms.tolist()]
    assert once.astype(np.float32).tolist() == [each[0] for each in expected]
    assert once.astype(np.float16).tolist() == [each[1] for each in expected]
    assert terms.sum(axis=1).astype(np.float32).tolist() != [each[0] for each in expected]
    special = np.array([[np.inf, 1.0], [np.inf, -np.inf], [np.nan, 0.0], [0.0, -0.0], [1.0, -1.0]])
    assert str(model._exact_sums(special)) == str(np.array([np.inf, np.nan, np.nan, 0.0, 0.0]))


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_pairs_rounded_to_nearest(operation: str) -> None:
    """numpy rounds add, subtract and multiply of fp32 to nearest; fma by exact doubles."""
    random = np.random.default_rng(4)
    x, y, z = (forms._floats(random, 1)[:40] for _ in range(3))
    with np.errstate(all="ignore"):
        a, b, c = (words.view(np.float32) for words in (x, y, z))
        if operation == "fma":
            exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
            expected = exact.astype(np.float32)
        else:
            expected = {"add": a + b, "sub": a - b, "mul": a * b}[operation]
    got = model.f32x2(operation, "rn", False, [x, y, z] if operation == "fma" else [x, y])
    nan = np.isnan(expected)
    assert (got[nan] == 0x7FFFFFFF).all()
    np.testing.assert_array_equal(got[~nan], expected.view(np.uint32)[~nan])


def test_transposing_loads_by_the_fragment_tables() -> None:
    """Lane 4g + p has elements g and g+8 of rows 4p to 4p+3 of each matrix."""
    random = np.random.default_rng(6)
    rows, lanes = random.integers(0, 256, (2, 32, 16), dtype=np.uint8), np.stack([random.permutation(32) for _ in range(2)])
    for bits in (4, 6, 8):
        result = model.ldmatrix_transposed(rows, lanes, 2, bits).view(np.uint8).reshape(2, 32, 4, 4)
        for case, lane, register, byte in itertools.product(range(2), range(32), range(4), range(4)):
            row = rows[case, lanes[case, 16 * (register // 2) + 4 * (lane % 4) + byte]]
            whole = int.from_bytes(row.tobytes(), "little")
            element = whole >> bits * (lane // 4 + 8 * (register % 2)) & (2**bits - 1)
            assert result[case, lane, register, byte] == element


def test_transposing_stores_are_undone_by_loads() -> None:
    """The accumulators' fragment of m16n8 in registers is a row of 16 bytes for each column; untouched rows stay."""
    random = np.random.default_rng(7)
    registers = random.integers(0, 2**32, (1, 32, 4), dtype=np.uint32)
    lanes, before = random.permutation(32)[None], np.full((1, 32, 16), 7, np.uint8)
    for count in (1, 2, 4):
        memory = model.stmatrix_transposed(registers[:, :, :count], lanes, before).view(np.uint8)
        for matrix, column, row in itertools.product(range(count), range(8), range(16)):
            word = int(registers[0, row % 8 * 4 + column // 2, matrix])
            assert memory[0, lanes[0, 8 * matrix + column], row] == word >> 8 * (row // 8 * 2 + column % 2) & 255
        assert (memory[0, lanes[0, 8 * count :]] == 7).all()


@pytest.mark.parametrize("of", ["f16", "bf16"])
def test_mixed_arithmetic(of: str) -> None:
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[of]
    random = np.random.default_rng(8)
    a, b = (random.standard_normal(500).astype(dtype) for _ in range(2))
    c = random.standard_normal(500).astype(np.float32)
    codes = [x.view(np.uint16).astype(np.uint32) for x in (a, b)]
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    for operation, inputs, exact in (
        ("add", [codes[0]], wide_a + c),
        ("sub", [codes[0]], wide_a - c),
        ("fma", codes, wide_a * wide_b + c),
    ):
        got = model.mixed(operation, "rn", False, [*inputs, c.view(np.uint32)], of).view(np.float32)
        np.testing.assert_array_equal(got, exact.astype(np.float32))
        clamped = model.mixed(operation, "rn", True, [*inputs, c.view(np.uint32)], of).view(np.float32)
        np.testing.assert_array_equal(clamped, np.clip(got, 0, 1))
    special = np.array([np.nan, np.inf, -np.inf], np.float32).view(np.uint32)
    one = np.full(3, np.array(1, dtype).view(np.uint16), np.uint32)
    assert model.mixed("add", "rn", True, [one, special], of).view(np.float32).tolist() == [0, 1, 0]


# ---- faults seeded in the rewriter


def evaluated(form: forms.InstructionForm, fault: selftest.RewriterFault | None) -> np.ndarray:
    """The results of a form's rewritten code with the model in place of the software functions."""
    module = rewrite(forms.module([form]), lambda: FUNCTIONS, fault.mutate if fault else None)
    words = form.inputs(5)
    lines = module.text.split("// ", 1)[1].splitlines()[1:]
    constants: dict[str, int] = {}
    for first, second in itertools.pairwise(lines):
        if moved := re.fullmatch(r"mov\.b16 sm120\$h, (\d+);", first):
            constants[second.split()[1].rstrip(",")] = int(moved[1])
    arguments = [re.fullmatch(r"st\.param\.\w+ \[sm120\$a\d+\], (\S+);", line) for line in lines]
    operands = [match[1] for match in arguments if match]

    def word(name: str) -> np.ndarray:
        return words[:, :, int(name.removeprefix("%i"))]

    def vector(names: list[str]) -> np.ndarray:
        return np.stack([word(name) for name in names], axis=2)

    outputs = np.full((*words.shape[:2], form.results), forms.UNTOUCHED, np.uint32)
    call = next((line.split(", ")[1] for line in lines if line.startswith("call ")), "")
    if not call:  # arithmetic on pairs
        operation = next(line for line in lines if re.match(r"(add|sub|mul|fma)\.", line)).split()[0].split(".")
        packed = [re.fullmatch(r"mov\.b64 \{sm120\$l\d, sm120\$u\d\}, %d(\d);", line) for line in lines]
        sources = [int(match[1]) for match in packed if match]
        rounding = next((part for part in operation if part in ("rn", "rz", "rm", "rp")), "rn")
        halves = [
            model.f32x2(operation[0], rounding, "ftz" in operation, [words[:, :, 2 * source + half] for source in sources])
            for half in (0, 1)
        ]
        result, targets = np.stack(halves, axis=2), ["%o0", "%o1"]
    else:
        result, targets = called(form, call, operands, word, vector, constants), []
        for line in lines:
            if loaded := re.fullmatch(r"ld\.param\.b32 (\S+), \[sm120\$r\+\d+\];", line):
                targets.append("%o0" if loaded[1] == "sm120$d" else loaded[1])
    for index, target in enumerate(targets):
        outputs[:, :, int(target.removeprefix("%o"))] = result[:, :, index]
    if form.predicate and any("bra $sm120_skip" in line for line in lines):
        outputs = np.where(words[:, :, -1:] != 0, outputs, np.uint32(forms.UNTOUCHED))
    return outputs


def called(form, call, operands, word, vector, constants):  # type: ignore[no-untyped-def]
    """The result words of a software function, by the model."""
    names = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
    if call.startswith("sm120_mma"):
        half = call.endswith("f16")
        a, b, c = operands[:6][:4], operands[4:6], operands[6 : 8 if half else 10]
        types, scales = ("e2m1", "e2m1"), None
        if "bytes" in call:
            types = (names[int(operands[-2])], names[int(operands[-1])])
        if scale := re.search(r"(\d)x_(u\w+)$", call):
            byte_a, thread_a, byte_b, thread_b = (constants[name] for name in (*operands[11:13], *operands[14:16]))
            scales = (
                model.scale_matrix(word(operands[10]), scale[2], int(scale[1]), 16, (byte_a, thread_a)),
                model.scale_matrix(word(operands[13]), scale[2], int(scale[1]), 8, (byte_b, thread_b)),
            )
        product = model.mma(vector(a), vector(b), model.accumulators(vector(c), half), types, scales)
        return model.fragments(product, half)
    raise NotImplementedError(call)


@pytest.mark.parametrize("fault", selftest.FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_forms(fault: selftest.RewriterFault) -> None:
    changed = selftest.changed_forms(fault, EVERY)
    assert changed
    for form in changed[:4]:
        right, wrong = (
            rewrite(forms.module([form]), lambda: FUNCTIONS, mutate).text.splitlines() for mutate in (None, fault.mutate)
        )
        assert [line for line in right if "//" not in line] != [line for line in wrong if "//" not in line]


EVALUATED = [form for form in EVERY if form.family == "mma" or "f32x2" in form.name]


@pytest.mark.parametrize("form", EVALUATED[:: len(EVALUATED) // 12], ids=lambda form: form.name)
def test_rewritten_code_computes_the_instruction(form: forms.InstructionForm) -> None:
    np.testing.assert_array_equal(evaluated(form, None), form.expected(form.inputs(5)))


# Faults in conversions, ldmatrix and others are detected by the self-test on a GPU; the receipt has them.
FAULTS_WITHOUT_GPU = [fault for fault in selftest.FAULTS if selftest.changed_forms(fault, EVALUATED)]


@pytest.mark.parametrize("fault", FAULTS_WITHOUT_GPU, ids=lambda fault: fault.name)
def test_model_detects_fault(fault: selftest.RewriterFault) -> None:
    changed = selftest.changed_forms(fault, EVALUATED)
    for form in (changed[0], changed[-1]):
        inputs = form.inputs(5)
        assert selftest.compare(form, inputs, evaluated(form, fault)).differ


# ---- command line


def run(*arguments: str) -> object:
    return CliRunner().invoke(app, ["verify", "ptx", *arguments])


def test_command_requires_a_file_or_the_self_test(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert run().exit_code == 2
    assert run(str(tmp_path / "a.ptx"), "--receipt", str(tmp_path / "r.json")).exit_code == 2
    for option in (("--capture", str(tmp_path)), ("--only", "x"), ("--kernels", "quick")):
        assert run(str(tmp_path / "a.ptx"), *option).exit_code == 2
    assert run("flashinfer", "--instructions").exit_code == 2 == run("flashinfer", "--ptx", str(tmp_path / "b.ptx")).exit_code


def test_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments in (
        ("verify", "ptx", "flashinfer", "--capture", str(file)),
        ("verify", "ptx", "--instructions", "--receipt", str(file / "r.json")),
        ("verify", "kernels", "flashinfer", "--receipt", str(tmp_path)),
        ("verify", "run", "--receipt", str(file / "r.json"), "--", "true"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, SystemRefused), (arguments, done.exception)


def test_kernel_group_without_kernels_has_no_ptx() -> None:
    with pytest.raises(NotFound, match="kernel group none has no units"):
        flashinfer.unit_ptx(None, BuildRequest(group="none"), "")  # type: ignore[arg-type]  # the recipe does not matter


def test_captured_ptx_and_state_directory_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "unit.ptx").write_bytes(b"// \xff")
    state = Workspace.open(tmp_path / "my state")
    tools = Toolchain(tmp_path, "", "", "")
    with pytest.raises(BadInput, match="cannot be read"), interposed.prepared(tmp_path, state, tools):
        pass
    with pytest.raises(SystemRefused, match=r"my state.* has a space or colon"), interposed.prepared(None, state, tools):
        pass


def test_libraries_that_the_user_preloads_stay_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    started = interposed.Interposition(Path("/run"), Toolchain(Path(), "", "", ""))
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2 /a.so")
    assert started.environment()["LD_PRELOAD"] == f"/run/{interposed.LIBRARY}:libjemalloc.so.2 /a.so"
    monkeypatch.delenv("LD_PRELOAD")
    assert started.environment()["LD_PRELOAD"] == f"/run/{interposed.LIBRARY}"


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF\xff", b"text"], ids=["missing", "empty", "cubin", "text"])
def test_file_that_is_no_ptx(tmp_path, content: bytes | None) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "kernel.ptx"
    if content is not None:
        path.write_bytes(content)
    result = run(str(path))
    assert isinstance(result.exception, BadInput)
    assert str(path) in result.exception.message and result.exception.hint


def test_self_test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "probe", lambda: None)
    assert isinstance(run("--instructions").exception, ResourceUnavailable)
    assert "verify ptx --instructions needs a GPU of compute capability 9.0" in str(run("--instructions").exception)


# ---- the receipt


EARLIER = re.compile(r"^\| `([\w./-]+\.json)` \| `([0-9a-f]{8})` \| `([0-9a-f]{8})` \|", re.MULTILINE)


def made_with_others() -> set[tuple[str, str, str]]:
    """Receipts of another rewriter or preloaded library than the present ones, and the first digits of both."""
    present, found = interposed.digests(), set()
    for path in RECEIPTS.rglob("*.json"):
        record = json.loads(path.read_text())
        if any(record.get(name, digest) != digest for name, digest in present.items()):
            found.add((str(path.relative_to(RECEIPTS)), record["rewriter"][:8], record["interposer"][:8]))
    return found


def test_receipts_of_an_earlier_library_are_listed() -> None:
    """Those and no others: a receipt that is made again leaves the list."""
    assert {*EARLIER.findall((RECEIPTS / "README.md").read_text())} == made_with_others()


def test_no_receipt_is_of_an_earlier_rewriter() -> None:
    records = [json.loads(path.read_text()) for path in RECEIPTS.rglob("*.json")]
    assert {record["rewriter"] for record in records if "rewriter" in record} == {library.rewriter_digest()}


def test_receipt_is_of_this_rewriter_and_complete() -> None:
    """`sm120kit verify ptx --instructions --receipt FILE` on a Hopper GPU writes it again."""
    receipt = json.loads((RECEIPTS / "ptx" / "instructions-nvidia-h100.json").read_text())
    assert receipt["rewriter"] == library.rewriter_digest(), "the rewriter has changed: run the self-test again"
    assert receipt["passed"] and not receipt["verified_on_sm120"]
    assert [(row["instruction"], row["verdict"]) for row in receipt["instructions"]] == [(form.name, "PASS") for form in EVERY]
    assert all(
        row["values"] == forms.CASES * 32 * form.results for row, form in zip(receipt["instructions"], EVERY, strict=True)
    )
    assert [(fault["name"], fault["missed"]) for fault in receipt["planted"]] == [(fault.name, []) for fault in selftest.FAULTS]
    assert all(fault["forms"] for fault in receipt["planted"])


def test_receipt_of_modules_for_several_gpus() -> None:
    """`tests/lab/gpu/run.sh DIRECTORY` on a Hopper GPU writes it."""
    receipt = json.loads((RECEIPTS / "ptx" / "modules-nvidia-h200.json").read_text())
    assert (receipt["exit_code"], receipt["refused_modules"], receipt["simulated"]["strict"]) == (0, 1, False)
    assert [(module["kernels"], module["also_for_sm120"]) for module in receipt["hopper_modules"]] == [(["arch_code"], True)]
    ran = sorted(kernel["name"] for module in receipt["modules"] for kernel in module["sm120"]["kernels"])
    assert ran == ["arch_both", "arch_sm120"]


def test_receipt_of_limits_has_the_launches_that_sm120_refuses() -> None:
    """`tests/lab/gpu/run.sh DIRECTORY` writes it: launches of one CTA more than 132 multiprocessors of SM120 have room for."""
    receipt = json.loads((RECEIPTS / "ptx" / "limits-nvidia-h200.json").read_text())
    assert (receipt["exit_code"], receipt["refused_modules"], receipt["hopper_modules"]) == (0, 0, [])
    room = {ctas: most for ctas, _, _, most in receipt["refused_launches"]}
    assert room == {132 * most + 1: most for most in (1, 2, 12)}


def test_receipt_of_races_has_no_alarm_and_the_faults_of_the_program() -> None:
    """`tests/lab/gpu/run.sh DIRECTORY` on a Hopper GPU writes it."""
    rows = json.loads((RECEIPTS / "ptx" / "races-nvidia-h200.json").read_text())["rows"]
    healthy = [row for row in rows if row["fault"] == "none"]
    faulty = [row for row in rows if row["fault"] != "none"]
    assert len(healthy) >= 20 and {row["seeds"] for row in healthy} == {50}
    assert not any(row["seen"] or row["without"] for row in healthy)
    assert len(faulty) >= 40 and sum(row["seen"] > 0 for row in faulty) == 30 and sum(row["without"] for row in faulty) == 19


@pytest.fixture
def named_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code that has no kernel, as the PTX of these tests."""
    monkeypatch.setattr(images, "_kernels", lambda cubin: set())


def test_ptx_of_other_kernels_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that compile one function may leave the PTX of one beside the machine code of the other."""
    monkeypatch.setattr(images, "_kernels", lambda cubin: {"a"})
    cubin = tmp_path / "kernel.cubin"
    cubin.with_suffix(".ptx").write_text(".visible .entry b()")
    cubin.write_bytes(b"code")
    assert images.kept_ptx(memoryview(b"code"), [cubin]) is None
    cubin.with_suffix(".ptx").write_text(".visible .entry a()")
    os.utime(cubin)
    assert images.kept_ptx(memoryview(b"code"), [cubin]) == ".visible .entry a()"


@pytest.mark.usefixtures("named_code")
def test_ptx_of_machine_code_is_that_beside_a_file_with_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("alone.cubin", "other.cubin", "kept.cubin")]
    files[2].with_suffix(".ptx").write_text(".version 9.0")
    for file, content in zip(files, (b"code", b"other code", b"code"), strict=True):
        file.write_bytes(content)
    assert images.kept_ptx(memoryview(b"code"), [tmp_path / "absent.cubin", *files]) == ".version 9.0"
    assert images.kept_ptx(memoryview(b"code"), files[:2]) is None


@pytest.mark.usefixtures("named_code")
def test_ptx_of_a_later_compile_is_not_used(tmp_path: Path) -> None:
    """A compile of the same function replaces the PTX first, and the machine code after it."""
    cubin = tmp_path / "kernel.cubin"
    cubin.with_suffix(".ptx").write_text("first")
    cubin.write_bytes(b"code")
    assert images.kept_ptx(memoryview(b"code"), [cubin]) == "first"
    cubin.with_suffix(".ptx").write_text("second")
    later = cubin.stat().st_mtime_ns + 1
    os.utime(cubin.with_suffix(".ptx"), ns=(later, later))
    assert images.kept_ptx(memoryview(b"code"), [cubin]) is None


def test_ptx_of_machine_code_in_a_fatbin(tmp_path: Path) -> None:
    """The host code of CuTe DSL loads a fatbin, whose only image has the bytes of the file."""
    image = memoryview(FATBIN.read_bytes())
    (part,) = fatbin.images(image)
    cubin = tmp_path / "kernel.cubin"
    text = "".join(f".visible .entry {name}()\n" for name in sorted(images._kernels(part.unpacked())))
    assert text
    cubin.with_suffix(".ptx").write_text(text)
    cubin.write_bytes(part.unpacked())
    assert images.module_ptx(image, {}, [cubin]) == (text, "PTX that CuTe DSL kept")
    cubin.write_bytes(bytes(part.unpacked())[:-1] + b"\1")
    with pytest.raises(BadInput, match="machine code only"):
        images.module_ptx(image, {}, [cubin])


@pytest.mark.parametrize(("option", "expected"), [("", "-arch=sm_90a"), (images.QUICKLY, f"{images.QUICKLY} -arch=sm_90a")])
def test_ptxas_gets_the_option(option: str, expected: str, tmp_path: Path) -> None:
    ptxas = tmp_path / "bin" / "ptxas"
    ptxas.parent.mkdir()
    ptxas.write_text('#!/bin/sh\necho "$@"\n')
    ptxas.chmod(0o700)
    with images._with_option(option, Toolchain(tmp_path, "13.0", "c++", "12")) as tools:
        done = process.run(["/bin/sh", str(tools.cuda_home / "bin" / "ptxas"), "-arch=sm_90a"])
    assert done.stdout.strip() == expected


def test_copies_of_one_dimension_get_a_second() -> None:
    load = "cp.async.bulk.tensor.{}.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+-8], [%rd1, {{{}}}], [%r2];"
    store = "cp.async.bulk.tensor.{}.global.shared::cta.tile.bulk_group [%rd3, {{{}}}], [%r4], %rd5;"
    before = "\n".join((load.format("1d", "%r5"), store.format("1d", "%r6"), load.format("2d", "%r5, %r7")))
    after = "\n".join((load.format("2d", "%r5, 0"), store.format("2d", "%r6, 0"), load.format("2d", "%r5, %r7")))
    assert images.with_two_dimensions(before) == after


# ---- delays


def test_sites_of_delays() -> None:
    """Before barriers, waits, copies and the first of several stores, atomics or loads; none where a barrier is polled."""
    body = [
        '.file 1 "a.cu"',
        ".loc 1 30 4",
        "st.shared.b32 [%r1], %r2;",
        "st.shared.b32 [%r1+4], %r2;",
        "bar.sync 0;",
        ".loc 1 31 4",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r5];",
        "ld.shared.b32 %r1, [%r5];",
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;",
        "mbarrier.arrive.shared::cta.b64 _, [%r1];",
        "cp.async.bulk.wait_group 0;",
        "st.param.b32 [a], %r1;",
        "@%p1 st.global.b32 [%d1], %r2;",
        "atom.global.add.u32 %r1, [%d1], 1;",
        "atom.global.add.u32 %r1, [%d1], 0;",
        "st.shared.b32 [%r1], %r2;",
        "st.global.b32 [%d1], %r2;",
    ]
    text = HEADER + ".visible .entry k()\n{\n.reg .b32 %r<9>;\n" + "\n".join(body) + "\nret;\n}\n"
    delayed, sites = perturb.with_delays(text)
    assert [(site.line, site.source) for site in sites] == [
        (9, "a.cu:30"),
        (11, "a.cu:30"),
        (13, "a.cu:31"),
        (16, "a.cu:31"),
        (17, "a.cu:31"),
        (19, "a.cu:31"),
        (20, "a.cu:31"),
        (22, "a.cu:31"),
        (23, "a.cu:31"),
    ]
    assert delayed.count("nanosleep") == len(sites) and delayed.count("sm120$delays[8]") == 1


def test_two_accesses_of_a_race() -> None:
    """Of a copy into a stage that is still read: addresses through registers, of two arrays and of another kernel."""
    body = [
        ".shared .align 16 .b8 stage[64];",
        ".shared .align 16 .b8 others[64];",
        "ld.param.b64 %d1, [from];",
        "mov.b32 %r1, stage;",
        "mov.b32 %r2, others;",
        "mov.u32 %r3, %tid.x;",
        "mad.lo.s32 %r4, %r3, 16, %r1;",
        "add.s64 %d2, %d1, 32;",
        "cp.async.cg.shared.global [%r4], [%d2], 16;",
        "st.shared.b32 [%r2], %r3;",
        "bar.sync 0;",
        ".loc 1 31 4",
        "ld.shared.b32 %r5, [%r1+8];",
        "ld.shared.b32 %r6, [%r2];",
        "cp.async.cg.shared.global [%r1], [%d1], 16;",
        "st.global.b32 [%d9], %r5;",
    ]
    kernel = ".visible .entry {}(.param .b64 from)\n{{\n.reg .b32 %r<9>;\n.reg .b64 %d<10>;\n{}\nret;\n}}\n"
    text = HEADER + '.file 1 "a.cu"\n' + kernel.format("k", "\n".join(body)) + kernel.format("l", "ld.shared.b32 %r5, [stage];")
    _, sites = perturb.with_delays(text)
    found = {site.instruction.split()[0]: site.accesses for site in reversed(sites[:5])}
    assert "cp.async.cg.shared.global [%r4]" in found["cp.async.cg.shared.global"].late
    assert (
        "(a.cu:31): ld.shared.b32 %r5" in found["cp.async.cg.shared.global"].other
        and found["cp.async.cg.shared.global"].others == 2
    )
    assert "ld.shared.b32 %r6" in found["st.shared.b32"].other and found["st.shared.b32"].others == 1
    assert found["bar.sync"] == found["ld.shared.b32"] and "[%r1+8]" in found["bar.sync"].late
    assert found["bar.sync"].others == 2 and "cp.async.cg.shared.global" in found["bar.sync"].other
    assert sites[-1].instruction.startswith("ld.shared") and sites[-1].accesses.others == 0


@pytest.mark.parametrize("where", [0, 6, 12])
def test_bisection_finds_the_site_in_few_runs(where: int) -> None:
    """Of the second of two modules; a race that needs two delays ends with a range that has both."""
    modules = [{"code": code, "origin": code, "sites": list(range(13))} for code in ("a", "b")]
    asked: list[str] = []

    def differs(delays: str, needed: tuple[int, ...] = (where,)) -> bool:
        asked.append(delays)
        _, first, last, module = delays.split()
        return module == "b" and all(int(first) <= site < int(last) for site in needed)

    assert races.bisect(differs, 3, modules) == ("b", [where]) and len(asked) <= 10
    both = races.bisect(lambda delays: differs(delays, (5, 7)), 3, modules)
    assert both == ("b", list(range(13)))
    assert races.bisect(lambda delays: False, 3, modules) == ("", ())


def test_program_that_hangs_with_delays_is_a_race() -> None:
    never = races.ObservedRun(None, "")
    usual = races.ObservedRun(0, "a" * 64)
    report = races.search(lambda delays: never if delays.startswith("9 ") else usual, [8, 9, 10], list)
    assert report.race and (report.race.seed, report.race.differs, report.seeds) == (9, "did not end", (8, 9))


def test_second_run_that_does_not_end_is_no_verdict() -> None:
    runs = iter([races.ObservedRun(0, "a" * 64), races.ObservedRun(None, "")])
    with pytest.raises(CheckFailed, match=r"no verdict.* time limit, 60 s"):
        races.search(lambda delays: next(runs), [8], list)
