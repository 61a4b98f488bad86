"""The fused MoE of b12x as released and with ``patches/b12x``: what the ends of its kernels store and read, from their PTX.

Kernels are compiled without a GPU. One compile of six kernels takes 40 s on one core.
"""

from __future__ import annotations

import re

import pytest
from b12x_library import Library
from ptx_epilogue import Epilogue, epilogues

LAYER = {"experts": 256, "hidden": 3072, "inner": 512, "top_k": 8, "tokens": [192, 72, 33, 6, 5]}
REQUEST = {"sm_count": 188, "moe": [LAYER, LAYER | {"top_k": 2, "tokens": [48]}], "gemm": []}
KERNELS = {
    "dynamic": (r"DynamicMoELaunch", 128),
    "static, 72 tokens": (r"MoEStaticKernel.*BFloat16_72_", 128),
    "static, 33 tokens": (r"MoEStaticKernel.*BFloat16_33_", 128),
    "static, 48 tokens": (r"MoEStaticKernel.*BFloat16_48_", 64),
    "static, 6 tokens": (r"MoEStaticKernel.*BFloat16_6_", 64),
    "micro": (r"MoEMicroKernel.*BFloat16_5_", 64),
}
"""How the DSL names the file of each kernel of the request, and the rows of its tile."""
STATIC = {name: int(name.split()[1]) for name in KERNELS if name.startswith("static")}
"""The tokens of kernels static, which none of their experts exceeds."""
FOUR_WARPS = (1, 128)
"""The named barrier of the MMA warps, and their threads."""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """The PTX of each kernel, ``released`` and ``patched``."""
    found = {}
    for state in ("released", "patched"):
        scratch = tmp_path_factory.mktemp(state)
        dump = scratch / "ptx"
        dump.mkdir()
        library = Library(scratch, REQUEST, patched=state == "patched")
        library.compile(CUTE_DSL_KEEP_PTX="1", CUTE_DSL_DUMP_DIR=str(dump))
        for name, (pattern, _) in KERNELS.items():
            (file,) = (path for path in dump.glob("*.ptx") if re.search(pattern, path.name))
            found[state, name] = file.read_text()
    return found


@pytest.fixture(scope="module")
def found(ptx: dict[tuple[str, str], str]) -> dict[tuple[str, str], list[Epilogue]]:
    return {key: epilogues(text) for key, text in ptx.items()}


@pytest.mark.parametrize("state", ["released", "patched"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_three_quarters_of_the_tile_are_read_by_another_warp(
    kernel: str, state: str, found: dict[tuple[str, str], list[Epilogue]]
) -> None:
    assert len(found[state, kernel]) == 4
    for each in found[state, kernel]:
        assert each.writers.shape == (KERNELS[kernel][1], 128)
        assert (each.readers >= 0).all(), "every element is read"
        assert each.foreign == each.readers.size * 3 // 4


@pytest.mark.parametrize("kernel", ["dynamic", *STATIC])
def test_patched_warps_wait_for_all_stores_before_they_read(kernel: str, found: dict[tuple[str, str], list[Epilogue]]) -> None:
    assert [each.barrier for each in found["released", kernel]] == [None] * 4
    assert [each.barrier for each in found["patched", kernel]] == [FOUR_WARPS] * 4


def test_released_micro_kernel_waits(found: dict[tuple[str, str], list[Epilogue]]) -> None:
    assert [each.barrier for each in found["released", "micro"]] == [FOUR_WARPS] * 4


@pytest.mark.parametrize("kernel", STATIC)
def test_patched_static_kernel_multiplies_all_rows_with_tokens(
    kernel: str, found: dict[tuple[str, str], list[Epilogue]]
) -> None:
    """The patched one rounds up to the 32 rows of an MMA of two warps."""
    tokens, rows = STATIC[kernel], KERNELS[kernel][1]
    for state, multiplied in ("released", rows // 2), ("patched", -(-tokens // 32) * 32):
        for each in found[state, kernel]:
            assert each.multiplied[:multiplied].all() and not each.multiplied[multiplied:].any()
            assert each.zero[multiplied:].all() and not each.zero[:multiplied].any()


def test_dynamic_kernel_multiplies_all_rows(found: dict[tuple[str, str], list[Epilogue]]) -> None:
    for each in found["released", "dynamic"] + found["patched", "dynamic"]:
        assert each.multiplied.all()


def test_micro_kernel_stays_as_released(ptx: dict[tuple[str, str], str]) -> None:
    assert ptx["patched", "micro"] == ptx["released", "micro"]
