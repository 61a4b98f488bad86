"""ptxas accepts every instruction form for SM120, and its rewritten form for Hopper; PTX of a build's units."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sm12x_lab import tile_costs
from sm12x_lab.ptx import forms, library
from sm12x_lab.ptx.rewrite import rewrite
from sm120kit.core import toolchain
from sm120kit.core.errors import BadInput
from sm120kit.core.records import Toolchain
from sm120kit.kernels import cubin
from sm120kit.wheels.compile import ninja_program

EVERY = forms.all_forms()


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return toolchain.find()


def test_forms_are_instructions_of_sm120(tools: Toolchain, tmp_path: Path) -> None:
    """The forms that the PTX ISA of the toolkit has."""
    chosen = [form for form in EVERY if form.isa == "8.8"]
    assert len(chosen) >= 278
    assert len(library.assemble(forms.module(chosen), tmp_path / "native.cubin", tools, "sm_120a")) == len(chosen)


def test_hopper_lacks_every_form(tools: Toolchain, tmp_path: Path) -> None:
    chosen = [form for form in EVERY if form.isa == "8.8"]
    for form in chosen[:: len(chosen) // 30]:
        with pytest.raises(BadInput, match="ptxas rejects for sm_90a"):
            library.assemble(forms.module([form], "sm_90a"), tmp_path / "hopper.cubin", tools)


def test_every_rewritten_form_is_assembled_for_hopper(tools: Toolchain, tmp_path: Path) -> None:
    module = rewrite(forms.module(EVERY), lambda: library.compile_functions(tools))
    assert len(module.replacements) == len(EVERY) + 2  # that of cluster launch control has three
    kernels = library.assemble(module.text, tmp_path / "hopper.cubin", tools)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(EVERY)


def test_fast_functions_replace_exact_ones_and_are_assembled(tools: Toolchain, tmp_path: Path) -> None:
    exact, fast = (library.functions_ptx(tools, source) for source in (library.SOURCE, library.FAST))
    both, own = library.read_functions(f"{exact}\n{fast}").functions, library.read_functions(fast).functions
    assert {*own} < {*library.read_functions(exact).functions} == {*both}
    assert all(both[name] == text and "mma.sync.aligned.m16n8k16.row.col.f32.f16" in text for name, text in own.items())
    chosen = [form for form in EVERY if form.family == "mma"]
    module = rewrite(forms.module(chosen), lambda: library.SoftwareFunctions(both, "9.0"))
    used = {replacement.function for replacement in module.replacements}
    assert {*own} <= used
    kernels = library.assemble(module.text, tmp_path / "fast.cubin", tools)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(chosen)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def verify_ptx(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sm120kit", "verify", "ptx", "flashinfer-0.6.6", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def test_captured_ptx_is_what_the_build_assembles(state: Path, tmp_path: Path) -> None:
    """The unit's own compile command, with the PTX kept, gives the same text."""
    done = verify_ptx("--state", state, "--only", "quantization.cu", "--capture", tmp_path / "captured", "--json")
    assert done.returncode == 0, done.stderr
    (unit,) = json.loads(done.stdout)["units"]
    assert unit["unit"] == "fp4_quantization_120f/quantization.cu" and not unit["refused"]
    assert unit["module"]["source_target"] == "sm_120f" and len(unit["module"]["kernels"]) >= 20
    captured = (tmp_path / "captured" / "fp4_quantization_120f.quantization.ptx").read_text()

    (work,) = (state / "work").iterdir()
    argv = [ninja_program(), "-f", "build.ninja", "-t", "commands"]
    line = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=True).stdout.strip()
    words = [word for word in shlex.split(line.replace("$SM120KIT_GATE", "")) if word != "-ptx"]
    words[words.index("-o") + 1] = str(tmp_path / "unit.o")
    kept = tmp_path / "kept"
    kept.mkdir()
    subprocess.run([*words, "-c", "--keep", "--keep-dir", kept], cwd=work, check=True)
    (text,) = (path.read_text() for path in kept.glob("*.ptx"))
    assert without_hash(text) == without_hash(captured)


def without_hash(ptx: str) -> str:
    """PTX without the hash of the output file's name, which nvcc gives to symbols of internal linkage."""
    return re.sub(r"[0-9a-f]{8}(?=_15_quantization_cu_)", "", ptx)


def test_costs_of_a_compiled_tile(state: Path, tools: Toolchain, tmp_path: Path) -> None:
    """One unit is compiled, and no tile table. Two readers of machine code count the same MMA, ptxas the same registers."""
    done = verify_ptx("--state", state, "--kernels", "all", "--only", "fp4_gemm_cutlass_128x128x128", "--capture", tmp_path)
    assert done.returncode == 0 and not (state / "cache" / "tiles").exists(), done.stderr
    (text,) = tmp_path.glob("*.ptx")
    assembled = library.assemble(text.read_text(), tmp_path / "unit.cubin", tools, "sm_120f")
    found = list(tile_costs.costs(tmp_path / "unit.cubin"))
    assert {cost.kernel.shape for cost in found} == {(128, 128, 128)} and {cost.kernel.dtype for cost in found} == {"nvfp4"}
    assert {cost.kernel.streamk for cost in found} == {False, True}
    assert {cost.loop.mma for cost in found} == {128**3 // (16 * 8 * 64) // 8}  # of a warp in a k tile
    (image,) = cubin.read(tmp_path / "unit.cubin")
    gemms = [kernel for kernel in image.kernels if kernel.fp4_mma]
    assert sorted(cost.whole.mma for cost in found) == sorted(kernel.fp4_mma for kernel in gemms)
    assert {cost.registers for cost in found} <= {kernel.registers for kernel in assembled}


def test_unknown_unit_is_refused(state: Path) -> None:
    done = verify_ptx("--state", state, "--only", "x.cu")
    assert done.returncode == 10 and "fp4_quantization_120f/quantization.cu" in done.stderr
