"""Reading the generators and the compiler: listing on a small tree, messages, plain words, cache keys, comparing tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit.errors import CompileFailed, ExpectationFailed, NotEnoughMemory
from sm120kit.records import SMEM_CAPACITY_BYTES, Numbers, Proof, Tile, TileFacts, Toolchain
from sm120kit.tiles import compare, diagnostics, introspect, listing
from sm120kit.workspace import write_record

TILE = Tile("grouped", "nvfp4", 128, 128, 128, "finalize", False, "bf16")

GENERATOR = '''
import os
from ...cpp_ext import is_cuda_version_at_least
def generate_gemm_operations(output, architectures):
    assert architectures == "120;120-real" and is_cuda_version_at_least("12.8")
    os.makedirs(output + "/gemm_grouped/120")
    with open(output + "/gemm_grouped/120/a.cu", "w") as file:
        file.write("""#include "launcher.inl"
namespace a {
#if defined(ENABLE_FP4) && defined(ENABLE_FP4)
        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, SafeFP4, SafeFP4, half,
        void, EpilogueOpDefault, FINALIZE,
        128, 256, 128, 1, 1, 1,
        false, false, false, true);
#endif
#if defined(ENABLE_FP8) && defined(ENABLE_FP4)
        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, __nv_fp8_e4m3, SafeFP4, __nv_bfloat16,
        void, EpilogueOpDefault, NONE,
        128, 128, 128, 1, 1, 1,
        true, false, false, false);
#endif
} // namespace a
""")
'''
DENSE = """
def gen_gemm_sm120_module_cutlass_fp4():
    with open("fp4_gemm_cutlass_sm120.jinja") as f:
        dtype_list = ["__nv_bfloat16"]
        cta_m_n_k_list = [(128, 128, 128), (256, 128, 128)]
    return spec(extra_cuda_cflags=flags + ["-DENABLE_FP4"], extra_cflags=["-DFAST_BUILD"])
"""
MOE = 'def gen_cutlass_fused_moe_sm120_module():\n    flags = ["-DENABLE_FP4", "-O3"]\n'
TEMPLATE = """// text
#include <a.h>
namespace n {
INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER({{ type }}, {{ cta_m }}, {{ cta_n }}, {{ cta_k }}, 1, 1, 1, _1SM)
}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "flashinfer/jit/gemm/cutlass/generate_kernels.py": GENERATOR,
        "flashinfer/jit/gemm/core.py": DENSE,
        "flashinfer/jit/fused_moe.py": MOE,
        "csrc/fp4_gemm_cutlass_sm120.jinja": TEMPLATE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "flashinfer/__init__.py").write_text("raise ImportError('the engine itself must not be imported')")
    return tmp_path


def test_the_engines_generators_are_run_and_read(tree: Path) -> None:
    made = [one for one in listing.instantiations(tree) if one.generated]
    assert [one.tile for one in made] == [
        Tile("grouped", "nvfp4", 128, 256, 128, "finalize", True, "f16"),
        Tile("grouped", "fp8xmxfp4", 128, 128, 128, "none", False, "bf16"),
        Tile("dense", "nvfp4", 128, 128, 128, "none", False, "bf16"),
        Tile("dense", "nvfp4", 256, 128, 128, "none", False, "bf16"),
    ]
    assert made[0].head == '#include "launcher.inl"\nnamespace a {\n'
    assert made[0].tail == "}\n"
    assert made[0].definitions == ("-DENABLE_FP4",)
    assert made[2].definitions == ("-DENABLE_FP4",), "flags for the C++ compiler only do not reach kernels"
    assert made[2].call == "INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER(__nv_bfloat16, 128, 128, 128, 1, 1, 1, _1SM);"


def test_candidates_are_generated_calls_with_other_tile_numbers(tree: Path) -> None:
    extra = [one for one in listing.instantiations(tree) if not one.generated]
    assert {(one.tile.family, one.tile.dtype, one.tile.shape) for one in extra} == {
        (family, dtype, f"{m}x{n}x{k}") for family, dtype, m, n, k in listing.CANDIDATES
    }
    wide = next(one for one in extra if one.tile.dtype == "fp8xmxfp4")
    assert "NONE, 128, 128, 64, 1, 1, 1, true" in wide.call


def test_a_candidate_that_the_engine_generates_is_not_listed_twice(tree: Path) -> None:
    core = tree / "flashinfer/jit/gemm/core.py"
    core.write_text(core.read_text().replace("(256, 128, 128)", "(128, 128, 64)"))
    dense = [one for one in listing.instantiations(tree) if one.tile.family == "dense"]
    assert [(one.tile.k, one.generated) for one in dense] == [(128, True), (64, True)]


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("flashinfer/jit/gemm/core.py", "cta_m_n_k_list", "other_list", "cta_m_n_k_list"),
        ("flashinfer/jit/fused_moe.py", "sm120", "sm130", "gen_cutlass_fused_moe_sm120_module"),
        ("csrc/fp4_gemm_cutlass_sm120.jinja", "LAUNCHER", "STARTER", "INSTANTIATE_FP4_GEMM_KERNEL_STARTER"),
    ],
)
def test_an_unknown_generator_is_named(tree: Path, path: str, old: str, new: str, message: str) -> None:
    (tree / path).write_text((tree / path).read_text().replace(old, new))
    with pytest.raises(ExpectationFailed, match=message):
        listing.instantiations(tree)


def test_a_tree_that_is_no_flashinfer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExpectationFailed, match=r"fused_moe\.py"):
        listing.instantiations(tmp_path)


GCC = """\
probe.h:12:3: warning: 'constexpr bool sm120kit_probe::fact() [with Found = Values<1, 3, 102400, 1, 0, 2>]' is deprecated
probe.h:12:3: warning: 'constexpr bool sm120kit_probe::fact() [with Found = Values<0, 4, 93184, 1, 1, 2>]' is deprecated
probe.h:12:3: warning: 'constexpr bool sm120kit_probe::fact() [with Found = Values<0, 4, 93184, 1, 1, 2>]' is deprecated
"""
CLANG = (
    "probe.h:12:3: warning: 'fact<sm120kit_probe::Values<0, 9, 28672, 2, 0, 1>>' is deprecated [-Wdeprecated-declarations]\n"
)


def test_reports_of_both_compilers_are_read_once_and_in_order() -> None:
    assert diagnostics.reports(GCC) == [
        diagnostics.Report(0, 4, 93184, "cooperative", "stream-k", 2),
        diagnostics.Report(1, 3, 102400, "cooperative", "persistent", 2),
    ]
    assert diagnostics.reports(CLANG) == [diagnostics.Report(0, 9, 28672, "pingpong", "persistent", 1)]


@pytest.mark.parametrize(
    ("messages", "text", "where"),
    [
        ("/t/x/a.hpp:7:3: error: static assertion failed: Too small.\n", "Too small.", "x/a.hpp:7"),
        ('/t/x/a.hpp:7:3: error: static_assert failed "Too small."\n', "Too small.", "x/a.hpp:7"),
        (
            "/t/a.hpp:1:1: error: no type named 'X'\n/t/b.hpp:2:2: error: static assertion failed: Too small.\n",
            "Too small.",
            "b.hpp:2",
        ),
        ("/t/a.hpp:1:1: error: no type named 'X'\n", "no type named 'X'", "a.hpp:1"),
        (
            "/t/l.hpp:11:24: error: 'value' is not a member of 'bool'\n"
            ' 11 |   CUTE_STATIC_ASSERT_V(((a % b) == Int<0>{}), "Shape Divisibility Condition");\n',
            "Shape Divisibility Condition",
            "l.hpp:11",
        ),
    ],
)
def test_the_first_static_assertion_is_the_reason(messages: str, text: str, where: str) -> None:
    assert diagnostics.first_reason(GCC + messages, Path("/t")) == diagnostics.Reason(text, where, True)


def test_an_error_outside_of_the_tree_is_not_about_the_tile() -> None:
    def about_tile(message: str) -> bool:
        reason = diagnostics.first_reason(message, Path("/t"))
        assert reason
        return reason.about_tile

    assert not about_tile("/cache/unit.cpp:2:1: error: '__trap' was not declared in this scope\n")
    assert about_tile("/cache/unit.cpp:2:1: error: static assertion failed: from a launcher macro\n")


def test_warnings_are_no_reason() -> None:
    assert diagnostics.first_reason(GCC, Path("/t")) is None


def test_a_broken_compiler_is_no_verdict(tmp_path: Path) -> None:
    said = "c++: fatal error: Killed signal terminated program cc1plus"
    program = tmp_path / "c++"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(NotEnoughMemory, match="Killed"):
        introspect.Compiler(str(program), (), tmp_path).run("x.cpp")
    program.write_text("#!/bin/sh\necho 'a.h:1: internal compiler error: in f' >&2\nexit 1\n")
    with pytest.raises(CompileFailed, match="internal compiler error"):
        introspect.Compiler(str(program), (), tmp_path).run("x.cpp")


def test_plain_words() -> None:
    size = "TMA requires CTA_Tile and SLayout top-level size equivalence."
    wide = replace(TILE, dtype="fp8xmxfp4", k=64)
    assert diagnostics.plain(size, wide) == "a block of 4 scale factors covers K=128 at scale vector 32: it does not fit K=64"
    assert "128 rows" in diagnostics.plain(size, replace(TILE, n=64))
    assert str(SMEM_CAPACITY_BYTES) in diagnostics.plain("Specialization requires Stages set to value 2 or more.", TILE)
    assert diagnostics.plain("Something new.", TILE) == "Something new."


def test_fits_and_margin() -> None:
    fits = TileFacts(TILE, True, True, stages=4, smem_bytes=SMEM_CAPACITY_BYTES)
    over = replace(fits, smem_bytes=SMEM_CAPACITY_BYTES + 1024)
    assert (fits.fits, fits.margin_bytes) == (True, 0)
    assert (over.fits, over.margin_bytes) == (False, -1024)
    assert (TileFacts(TILE, True, False).fits, TileFacts(TILE, True, False).margin_bytes) == (False, None)


def call(tile: Tile, generated: bool = True) -> listing.Instantiation:
    return listing.Instantiation(tile, "m", '#include "a.h"\n', f"CALL({tile});", "}\n", (), generated)


def test_every_call_of_a_unit_reports_under_its_own_number() -> None:
    text = introspect.translation_unit([call(TILE), call(replace(TILE, output="f16"))])
    lines = text.splitlines()
    for number, output in enumerate(("bf16", "f16")):
        at = lines.index(f"#define GemmUniversalAdapter Line{number}")
        assert f"output='{output}'" in lines[at + 1]


def test_a_units_key_is_its_text_flags_compiler_and_headers(tmp_path: Path) -> None:
    cuda = tmp_path / "cuda"
    (cuda / "include").mkdir(parents=True)
    (cuda / "include" / "cuda_runtime_api.h").write_text("13.0")
    tools = Toolchain(cuda, "13.0.88", "c++", "c++ 12")
    number = 0

    def key(one: listing.Instantiation, tools: Toolchain = tools, headers: str = "h") -> Path:
        nonlocal number
        number += 1
        compiler = introspect.Compiler.of(tools, tmp_path, one.definitions)
        module = introspect.Module([one], compiler, tmp_path / str(number), tmp_path, tools)
        module.base.append(headers)
        return module.record(one)

    one = call(TILE)
    keys = [
        key(one),
        key(call(replace(TILE, output="f16"))),
        key(replace(one, definitions=("-DX",))),
        key(one, replace(tools, host_version="c++ 13")),
        key(one, headers="other"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(one) == keys[0]
    assert key(replace(one, generated=False)) == keys[0]


def test_a_kept_table_is_read_without_any_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sm120kit import tiles
    from sm120kit.workspace import digest_of

    tools = Toolchain(tmp_path, "13.0.88", "no-such-compiler", "c++ 12")
    key = digest_of(["tree", "0.6.6", introspect.toolchain_key(tools), introspect.own_sources()])
    facts = (
        TileFacts(TILE, True, True, schedule="cooperative", scheduler="persistent", stages=4, smem_bytes=93184, k_blocks=2),
    )
    write_record(tmp_path / "tiles" / "tables" / f"{key}.json", introspect.Kept(facts))
    monkeypatch.setenv("PATH", "")
    assert tiles.table(tmp_path / "absent", "tree", "0.6.6", tools, tmp_path) == facts


def test_comparing_pairs_kernels_and_merges_outputs() -> None:
    half = replace(TILE, output="f16")
    over = TileFacts(TILE, True, True, scheduler="persistent", stages=3, smem_bytes=102400)
    good = replace(over, stages=2, smem_bytes=74752)
    broken = TileFacts(replace(TILE, k=64), False, False, "no")
    works = TileFacts(replace(TILE, k=64), True, True, scheduler="persistent", stages=4, smem_bytes=90000)
    before = [over, replace(over, tile=half), broken]
    after = [good, replace(good, tile=half), works, replace(works, scheduler="stream-k")]
    found = compare.rows(before, after)
    assert [(row.tile.k, row.tile.output, row.changed) for row in found] == [
        (128, "bf16, f16", True),
        (64, "bf16", True),
        (64, "bf16", True),
    ]
    assert found[0].before and found[0].after and (found[0].before.stages, found[0].after.stages) == (3, 2)
    assert all(row.before and row.before.why_not == "no" for row in found[1:])
    assert not any(row.changed for row in compare.rows(after, after))


def test_numbers_are_a_change_only_where_both_sides_were_checked() -> None:
    unknown = TileFacts(TILE, True, True, scheduler="persistent", stages=4, smem_bytes=93184)
    proven = replace(unknown, numbers=Numbers(Proof.PROVEN, "", 9))
    wrong = replace(unknown, numbers=Numbers(Proof.WRONG, "k tile lost", 9, 9))
    for before, after, changed in [(wrong, proven, True), (unknown, proven, False), (proven, proven, False)]:
        (row,) = compare.rows([before], [after])
        assert row.changed is changed
