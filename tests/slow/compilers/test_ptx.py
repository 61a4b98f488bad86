"""ptxas accepts every instruction form for SM120, and its rewritten form for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit.core import toolchain
from sm120kit.core.errors import BadPtx
from sm120kit.core.records import Toolchain
from sm120kit.kernels.ptx import forms, library
from sm120kit.kernels.ptx.rewrite import rewrite

EVERY = forms.all_forms()


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return toolchain.find()


def test_forms_are_instructions_of_sm120(tools: Toolchain, tmp_path: Path) -> None:
    """The forms that the PTX ISA of the toolkit has."""
    chosen = [form for form in EVERY if form.isa == "8.8"]
    assert len(chosen) >= 228
    assert len(library.assemble(forms.module(chosen), tmp_path / "native.cubin", tools, "sm_120a")) == len(chosen)


def test_hopper_lacks_every_form(tools: Toolchain, tmp_path: Path) -> None:
    chosen = [form for form in EVERY if form.isa == "8.8"]
    for form in chosen[:: len(chosen) // 30]:
        with pytest.raises(BadPtx, match="ptxas rejects for sm_90a"):
            library.assemble(forms.module([form], "sm_90a"), tmp_path / "hopper.cubin", tools)


def test_every_rewritten_form_is_assembled_for_hopper(tools: Toolchain, tmp_path: Path) -> None:
    module = rewrite(forms.module(EVERY), lambda: library.compile_functions(tools))
    assert len(module.replacements) == len(EVERY) + 2  # that of cluster launch control has three
    kernels = library.assemble(module.text, tmp_path / "hopper.cubin", tools)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(EVERY)
