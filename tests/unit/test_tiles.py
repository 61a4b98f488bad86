"""Tiles: listing calls of a small tree, parsing compiler messages, cache keys, comparing tables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import CheckFailed, CompileFailed, NotFound, ResourceUnavailable
from sm120kit.core.record_files import write_record
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tables
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES, Tile, TileFacts
from sm120kit.kernels.tables import export_tree
from sm120kit.kernels.tiles import diagnostics, introspect, listing
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin

ROOT = Path(__file__).parents[2]
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
GEMM = """
import jinja2
import torch
from ...artifacts import ArtifactPath
from .. import env as jit_env
from ..core import current_compilation_context, gen_jit_spec
def gen_gemm_sm120_module_cutlass_fp4():
    directory = jit_env.FLASHINFER_GEN_SRC_DIR / "gen_gemm_sm120_cutlass_fp4"
    directory.mkdir()
    template = jinja2.Template((jit_env.FLASHINFER_CSRC_DIR / "fp4_gemm_cutlass_sm120.jinja").read_text())
    for m, n, k in [(128, 128, 128), (256, 128, 128)]:
        (directory / f"fp4_{m}_{n}_{k}.cu").write_text(template.render(type="__nv_bfloat16", cta_m=m, cta_n=n, cta_k=k))
    return gen_jit_spec("fp4_gemm_cutlass_sm120", [], extra_cuda_cflags=["-DENABLE_FP4"], extra_cflags=["-DFAST_BUILD"])
def gen_gemm_sm120_module():
    directory = jit_env.FLASHINFER_GEN_SRC_DIR / "gen_gemm_sm120"
    directory.mkdir()
    with open(jit_env.FLASHINFER_CSRC_DIR / "groupwise.jinja") as f:
        template = jinja2.Template(f.read())
    for dtype in [torch.float8_e4m3fn, torch.float8_e5m2]:
        (directory / f"{dtype.__name__}.cu").write_text(template.render(dtype=dtype.__name__))
    (directory / "binding.cu").write_text((jit_env.FLASHINFER_CSRC_DIR / "binding.cu").read_text())
    flags = current_compilation_context.get_nvcc_flags_list(supported_major_versions=[12])
    return gen_jit_spec("gemm_sm120", [], extra_cuda_cflags=flags + ["-DGDC=1"])
"""
GROUPWISE_TEMPLATE = "#include <groupwise.cuh>\ntemplate void launch<{{ dtype }}>(int);\nvoid f() { g<<<1, n>>>(3); }\n"
MOE = """
from . import env as jit_env
from .core import gen_jit_spec
from .gemm.cutlass.generate_kernels import generate_gemm_operations
def gen_cutlass_fused_moe_sm120_module():
    output = jit_env.FLASHINFER_GEN_SRC_DIR / "cutlass_instantiations/120"
    generate_gemm_operations(str(output), "120;120-real")
    return gen_jit_spec("fused_moe_120", [], extra_cuda_cflags=["-DENABLE_FP4", "-O3"])
"""
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
        "flashinfer/jit/gemm/core.py": GEMM,
        "csrc/groupwise.jinja": GROUPWISE_TEMPLATE,
        "csrc/binding.cu": "#include <binding.h>\n",
        "flashinfer/jit/fused_moe.py": MOE,
        "csrc/fp4_gemm_cutlass_sm120.jinja": TEMPLATE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "flashinfer/__init__.py").write_text("raise ImportError('the engine itself must not be imported')")
    return tmp_path


def test_instantiations_of_the_engines_generators(tree: Path) -> None:
    calls = [call for call in listing.instantiations(tree) if call.generated and not call.whole_files]
    assert [call.tile for call in calls] == [
        Tile("grouped", "nvfp4", 128, 256, 128, "finalize", True, "f16"),
        Tile("grouped", "fp8xmxfp4", 128, 128, 128, "none", False, "bf16"),
        Tile("dense", "nvfp4", 128, 128, 128, "none", False, "bf16"),
        Tile("dense", "nvfp4", 256, 128, 128, "none", False, "bf16"),
    ]
    assert calls[0].head == '#include "launcher.inl"\nnamespace a {\n'
    assert calls[0].tail == "}\n"
    assert calls[0].definitions == ("-DENABLE_FP4",)
    assert calls[2].definitions == ("-DENABLE_FP4",), "flags for the C++ compiler only do not reach kernels"
    assert calls[2].call == "INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER(__nv_bfloat16, 128, 128, 128, 1, 1, 1, _1SM);"


def test_groupwise_files_with_the_same_includes_are_one_text(tree: Path) -> None:
    (files,) = (call for call in listing.instantiations(tree) if call.whole_files)
    assert (files.tile.family, files.module, files.definitions) == ("groupwise", "gemm_sm120-0", ("-DGDC=1",))
    assert files.head == "#include <groupwise.cuh>\n"
    assert "<float8_e4m3fn>(int)" in files.call and "<float8_e5m2>(int)" in files.call
    assert files.call.count("{ g(3); }") == 2, "kernels are launched as functions are called"


def test_tiles_of_engines_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiles", "vllm-0.33.0", "--state", str(tmp_path)])
    assert isinstance(result.exception, NotFound) and "flashinfer-0.7.2.post1" in result.exception.hint


def test_candidates_are_generated_calls_with_another_tile_shape(tree: Path) -> None:
    candidates = [call for call in listing.instantiations(tree) if not call.generated]
    assert {(call.tile.family, call.tile.dtype, call.tile.shape) for call in candidates} == {
        (family, dtype, f"{m}x{n}x{k}") for family, dtype, m, n, k in listing.CANDIDATES
    }
    wide = next(call for call in candidates if call.tile.dtype == "fp8xmxfp4")
    assert "NONE, 128, 128, 64, 1, 1, 1, true" in wide.call


def test_mx_candidates_are_calls_of_nvfp4_with_other_types(tree: Path) -> None:
    generator = tree / "flashinfer/jit/gemm/cutlass/generate_kernels.py"
    text = generator.read_text().replace("SafeFP4, half,", "SafeFP4, __nv_bfloat16,").replace("FINALIZE", "NONE")
    generator.write_text(text.replace("false, false, false, true", "false, false, false, false"))
    calls = [call for call in listing.instantiations(tree) if call.tile.dtype in ("mxfp4", "mxfp8")]
    assert [call.tile for call in calls] == [
        Tile("grouped", dtype, m, n, 64, "none", False, "bf16")
        for dtype in ("mxfp4", "mxfp8")
        for m, n in ((128, 128), (256, 128), (128, 256))
    ]
    assert not any(call.generated for call in calls)
    assert calls[-1].call == (
        "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, __nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16, void, "
        "EpilogueOpDefault, NONE, 128, 256, 64, 1, 1, 1, true, false, false, false);"
    )


def test_generated_candidate_is_listed_once(tree: Path) -> None:
    core = tree / "flashinfer/jit/gemm/core.py"
    core.write_text(core.read_text().replace("(256, 128, 128)", "(128, 128, 64)"))
    dense = [call for call in listing.instantiations(tree) if call.tile.family == "dense"]
    assert [(call.tile.k, call.generated) for call in dense] == [(128, True), (64, True)]


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("flashinfer/jit/gemm/core.py", "gen_gemm_sm120_module()", "other()", "gen_gemm_sm120_module"),
        ("flashinfer/jit/fused_moe.py", "sm120", "sm130", "gen_cutlass_fused_moe_sm120_module"),
        ("csrc/fp4_gemm_cutlass_sm120.jinja", "LAUNCHER", "STARTER", "INSTANTIATE_FP4_GEMM_KERNEL_STARTER"),
    ],
)
def test_unsupported_generator_is_named_in_the_error(tree: Path, path: str, old: str, new: str, message: str) -> None:
    (tree / path).write_text((tree / path).read_text().replace(old, new))
    with pytest.raises(CheckFailed, match=message):
        listing.instantiations(tree)


def test_tree_without_flashinfer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"fused_moe\.py"):
        listing.instantiations(tmp_path)


FACT = "probe.h:12:3: warning: 'constexpr bool sm120kit_probe::fact() [with Found = Values<{}>]' is deprecated\n"
GCC = FACT.format("1, 3, 102400, 1, 0, 2, 256, 128, 128, 1, 1, 5, 16, 0, 0, 0, 0, 0") + 2 * FACT.format(
    "0, 4, 93184, 1, 1, 2, 128, 32, 128, 1, 2, 4, 32, 0, 0, 0, 1, 1"
)
CLANG = (
    "probe.h:12:3: warning: 'fact<sm120kit_probe::Values<0, 9, 28672, 2, 0, 1, 64, 128, 128, 2, 2, 5, 0, 1, 128, 128, 0, 0>>'"
    " is deprecated [-Wdeprecated-declarations]\n"
)


def test_reports_of_gcc_and_clang_are_parsed_in_order() -> None:
    mixed = Tile("grouped", "fp8xmxfp4", 128, 32, 128, "none", True, "f16")
    dense = Tile("dense", "nvfp4", 256, 128, 128, "none", False, "bf16")
    assert diagnostics.reports(GCC) == [
        diagnostics.ProbeReport(0, mixed, 4, 93184, "cooperative", "stream-k", 2),
        diagnostics.ProbeReport(1, dense, 3, 102400, "cooperative", "persistent", 2),
    ]
    groupwise = Tile("dense", "fp8", 64, 128, 128, "none", False, "bf16", "1x128x128")
    assert diagnostics.reports(CLANG) == [diagnostics.ProbeReport(0, groupwise, 9, 28672, "pingpong", "persistent", 1)]


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
def test_first_static_assertion_is_the_reason(messages: str, text: str, where: str) -> None:
    assert diagnostics.first_reason(GCC + messages, Path("/t")) == diagnostics.Reason(text, where, True)


def test_error_outside_of_the_tree_is_not_about_the_tile() -> None:
    def about_tile(message: str) -> bool:
        reason = diagnostics.first_reason(message, Path("/t"))
        assert reason
        return reason.about_tile

    assert not about_tile("/cache/unit.cpp:2:1: error: '__trap' was not declared in this scope\n")
    assert about_tile("/cache/unit.cpp:2:1: error: static assertion failed: from a launcher macro\n")


def test_errors_belong_to_the_call_that_instantiates_their_template() -> None:
    """Context lines of gcc come before an error, and only if they differ from those of the error before it."""
    messages = f"""/t/a.hpp: In instantiation of 'struct A<1>':
/t/b.hpp:7:3:   required from 'struct B<1>'
{diagnostics.CALL}:2:1:   required from here
/t/a.hpp:5:2: error: no type named 'X'
/t/a.hpp:6:2: error: static assertion failed: too small
/t/a.hpp: In instantiation of 'struct A<2>':
{diagnostics.CALL}:4:1:   required from here
/t/a.hpp:6:2: error: static assertion failed: too big
/t/c.hpp: In function 'void f()':
/t/c.hpp:1:1: error: static assertion failed: of no call
/t/a.hpp: In instantiation of 'struct A<3>':
/t/d.hpp:9:9:   required from here
/t/a.hpp:6:2: error: static assertion failed: of no call either
"""
    assert diagnostics.first_reasons(messages, Path("/t")) == {
        2: diagnostics.Reason("too small", "a.hpp:6", True),
        4: diagnostics.Reason("too big", "a.hpp:6", True),
    }


def test_warnings_are_not_a_reason() -> None:
    assert diagnostics.first_reason(GCC, Path("/t")) is None


def test_crashed_compiler_raises(tmp_path: Path) -> None:
    message = "c++: fatal error: Killed signal terminated program cc1plus"
    program = tmp_path / "c++"
    program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ResourceUnavailable, match="ran out of memory"):
        introspect.HostCompiler(str(program), (), tmp_path).run("x.cpp")
    program.write_text("#!/bin/sh\necho 'a.h:1: internal compiler error: in f' >&2\nexit 1\n")
    with pytest.raises(CompileFailed, match="internal compiler error"):
        introspect.HostCompiler(str(program), (), tmp_path).run("x.cpp")


def test_plain_translates_known_messages() -> None:
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


def launcher_call(tile: Tile, generated: bool = True) -> listing.Instantiation:
    return listing.Instantiation(tile, "m", '#include "a.h"\n', f"CALL({tile});", "}\n", (), generated)


def test_each_call_of_a_unit_reports_its_number() -> None:
    text = introspect.translation_unit([launcher_call(TILE), launcher_call(replace(TILE, output="f16"))])
    lines = text.splitlines()
    for number, output in enumerate(("bf16", "f16")):
        at = lines.index(f"#define GemmUniversalAdapter Line{number}")
        assert lines[at + 1] == f'#line {number} "{diagnostics.CALL}"'
        assert f"output='{output}'" in lines[at + 2]
    assert "#line" not in introspect.translation_unit([launcher_call(TILE)])


def test_cache_key_covers_text_flags_compiler_and_headers(tmp_path: Path) -> None:
    cuda = tmp_path / "cuda"
    (cuda / "include").mkdir(parents=True)
    (cuda / "include" / "cuda_runtime_api.h").write_text("13.0")
    tools = Toolchain(cuda, "13.0.88", "c++", "c++ 12")
    number = 0

    def key(call: listing.Instantiation, tools: Toolchain = tools, headers: str = "h") -> Path:
        nonlocal number
        number += 1
        compiler = introspect.HostCompiler.of(tools, tmp_path, call.definitions)
        module = introspect.LauncherModule([call], compiler, tmp_path / str(number), tmp_path, tools)
        module.base.append(headers)
        return module.record(call)

    bf16 = launcher_call(TILE)
    keys = [
        key(bf16),
        key(launcher_call(replace(TILE, output="f16"))),
        key(replace(bf16, definitions=("-DX",))),
        key(bf16, replace(tools, host_version="c++ 13")),
        key(bf16, headers="other"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(bf16) == keys[0]
    assert key(replace(bf16, generated=False)) == keys[0]


def test_calls_belong_to_the_modules_of_a_recipe(tree: Path) -> None:
    """A build measures the tiles of the modules that it compiles."""
    calls = listing.instantiations(tree)
    for module, families in (
        ("fp4_gemm_cutlass_sm120", {"dense"}),
        ("fused_moe_120", {"grouped"}),
        ("gemm_sm120", {"groupwise"}),
    ):
        assert {call.tile.family for call in calls if call.is_in([module, "cascade"])} == families


def test_cached_table_is_read_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, workspace = Toolchain(tmp_path, "13.0.88", "no-such-compiler", "c++ 12"), Workspace.open(tmp_path)
    recipe, tree = recipes.load_flashinfer("flashinfer-0.6.6"), SimpleNamespace(tree="tree")
    key = digest_of(["tree", recipe.name, introspect.toolchain_key(tools), introspect.own_sources()])
    facts = (
        TileFacts(TILE, True, True, schedule="cooperative", scheduler="persistent", stages=4, smem_bytes=93184, k_blocks=2),
    )
    write_record(workspace.cache / "tiles" / "tables" / f"{key}.json", introspect.TileFactsRecord(facts))
    monkeypatch.setenv("PATH", "")
    assert tables.tile_table(recipe, tree, tools, workspace) == facts  # type: ignore[arg-type]  # its id is all that matters


MEASURE = """
import sys
from pathlib import Path
from sm120kit.core import signals
from sm120kit.core.records import Toolchain
from sm120kit.kernels.kernel_records import Tile
from sm120kit.kernels.tiles import introspect, listing
signals.handle()
home = Path(sys.argv[1])
tile = Tile("grouped", "nvfp4", 128, 128, 128, "finalize", False, "bf16")
call = listing.Instantiation(tile, "fused_moe", "#include <a.h>", "CALL", "", ())
introspect.measure([call], home, Toolchain(home, "13.0.88", str(home / "c++"), "c++ 12"), home / "cache", print)
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_work_directory_of_a_terminated_or_killed_measurement(tmp_path: Path, kind: signal.Signals) -> None:
    """SIGTERM removes the directory and ends the compiler; after SIGKILL, the next measurement removes the directory."""
    (tmp_path / "c++").write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 600"
    )
    (tmp_path / "c++").chmod(0o755)
    measure = subprocess.Popen([sys.executable, "-c", MEASURE, str(tmp_path)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    measure.send_signal(kind)
    measure.wait(timeout=60)
    left = list((tmp_path / "cache").glob(".work-*"))
    if kind is signal.SIGTERM:
        assert not left and not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
        return
    assert left
    (tmp_path / "c++").write_text("#!/bin/sh\necho no >&2; exit 1")
    with pytest.raises(CompileFailed):
        call = listing.Instantiation(TILE, "fused_moe", "#include <a.h>", "CALL", "", ())
        tools = Toolchain(tmp_path, "13.0.88", str(tmp_path / "c++"), "c++ 12")
        introspect.measure([call], tmp_path, tools, tmp_path / "cache", lambda done: None)
    assert not list((tmp_path / "cache").glob(".work-*"))


@pytest.mark.parametrize("change", ["edited", "same size and time", "added file", "removed file"])
def test_tree_changed_on_disk_is_written_again(tmp_path: Path, change: str) -> None:
    """Headers of the tree are compiled long after they were written."""
    repository = Repository.init(tmp_path / "r")
    with repository.index() as index:
        index.add("include/x.h", b"one\n")
        index.add("setup.py", b"two\n")
        tree = index.write_tree()
    commit = repository.commit_tree(tree, None, "base")
    checkout = Checkout(GitPin("p", "https://git.invalid/p", commit, "1"), repository.path, commit, tree)
    workspace = Workspace.open(tmp_path / "state")
    patched = PatchedTree(checkout, (), commit, tree, ())
    directory = export_tree(patched, workspace)
    header = directory / "include/x.h"
    before = header.stat()
    if change == "edited":
        header.write_text("evil\n")
    elif change == "same size and time":
        header.write_text("ONE\n")
        os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "added file":
        (directory / "include/evil.h").write_text("evil\n")
    else:
        header.unlink()
    assert export_tree(patched, workspace) == directory
    assert {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()} == {
        "include/x.h": "one\n",
        "setup.py": "two\n",
    }


def test_tables_are_needed_for_modules_of_launcher_calls_only() -> None:
    """Modules of quantization, attention and sampling have no tile in a table."""
    for path in sorted((ROOT / "recipes" / "engines").glob("flashinfer-*.toml")):
        recipe = recipes.load_flashinfer(path.stem)
        tiled = {name for name, module in recipe.modules.items() if listing.generates_tiles(module.generator)}
        assert {"fused_moe_120", "fp4_gemm_cutlass_sm120", "gemm_sm120"} <= tiled, path.stem
        assert tiled <= {"fused_moe_120", "fp4_gemm_cutlass_sm120", "mxfp8_gemm_cutlass_sm120", "gemm_sm120"}, path.stem
