"""FlashInfer's fused MoE for SM12x (``b12x_fused_moe``) as vLLM 0.33.0 locks it: the ends of its kernels, from their PTX.

Kernels are compiled without a GPU, with FlashInfer as released and with its patch: 50 s on one core,
after the download of an environment of 2.5 GB.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from shutil import copytree
from typing import Any

import parser_options
import pytest
from ptx_epilogue import Epilogue, epilogues

from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES
from sm120kit.recipes import target as targets
from sm120kit.sources.run_options import Options
from sm120kit.wheels._overlay import locked_wheels

RECIPE, FLASHINFER = "vllm-0.33.0", "flashinfer-python==0.7.2.post1"
LIBRARIES = re.compile(
    r"(apache-tvm-ffi|certifi|charset-normalizer|click|cuda-(bindings|core|pathfinder|python)|einops|idna|numpy|nvidia-cutlass-dsl.*"
    r"|nvidia-ml-py|packaging|requests|tabulate|tqdm|triton|urllib3)$"
)
"""Locked distributions that FlashInfer imports when it compiles these kernels, beside torch."""
PROGRAM = Path(__file__).parents[2] / "support" / "flashinfer_moe_inside.py"
PATCH = Path(__file__).parents[3] / "patches" / "flashinfer" / "micro-scatter-barrier.patch"
CHANGED = "flashinfer/fused_moe/cute_dsl/blackwell_sm12x/moe_micro_kernel.py"
LAYER = {"experts": 256, "hidden": 3072, "inner": 512, "top_k": 8}
CALLS = {
    "micro": LAYER | {"tokens": 4},
    "micro, small": {"experts": 8, "hidden": 256, "inner": 1024, "top_k": 2, "tokens": 8},
    "micro, ReLU2": LAYER | {"inner": 1024, "tokens": 4, "activation": "relu2"},
    "micro, MXFP4": LAYER | {"tokens": 2, "mode": "mxfp4"},
    "micro, 1 token": LAYER | {"inner": 1024, "tokens": 1},
    "micro, 1 token, ReLU2": LAYER | {"inner": 1024, "tokens": 1, "activation": "relu2"},
    "static": LAYER | {"tokens": 33},
    "static, top 1": LAYER | {"top_k": 1, "tokens": 64},
    "dynamic, 192 tokens": LAYER | {"tokens": 192},
    "dynamic, 600 tokens": LAYER | {"tokens": 600},
    "dynamic, 2048 tokens": LAYER | {"tokens": 2048},
    "dynamic, 4096 tokens": LAYER | {"tokens": 4096},
}
LAUNCHES = {
    "micro": ("MoEMicroKernel", "64x128x128", 2, 73_728),
    "micro, small": ("MoEMicroKernel", "64x128x128", 2, 73_728),
    "micro, ReLU2": ("MoEMicroKernel", "64x128x128", 2, 55_296),
    "micro, MXFP4": ("MoEMicroKernel", "64x128x128", 2, 70_656),
    "micro, 1 token": ("MoEMicroKernel", "64x128x128", 2, 73_728),
    "micro, 1 token, ReLU2": ("MoEMicroKernel", "64x128x128", 2, 55_296),
    "static": ("MoEStaticKernel", "64x128x128", 3, 101_376),
    "static, top 1": ("MoEStaticKernel", "128x128x128", 2, 90_112),
    "dynamic, 192 tokens": ("MoEDynamicKernel", "16x128x128", 3, 89_088),
    "dynamic, 600 tokens": ("MoEDynamicKernel", "32x128x128", 2, 65_536),
    "dynamic, 2048 tokens": ("MoEDynamicKernel", "64x128x128", 2, 74_752),
    "dynamic, 4096 tokens": ("MoEGatedDynamicKernel", "128x128x128", 3, 101_376),
}
"""Class, tile, stages and dynamic shared memory of each call's first launch, as in ``docs/measurements/backends.md``."""
MICRO = [name for name in CALLS if name.startswith("micro")]
STATIC = {"static": 64, "static, top 1": 128}
"""The rows of their tiles."""
FOUR_WARPS = (1, 128)
"""The named barrier of the MMA warps, and their threads."""


class Kernels:
    """The environment, and what FlashInfer compiles in it."""

    def __init__(self, scratch: Path) -> None:
        target = targets.resolve(RECIPE, Options(Workspace.open(None)))
        assert isinstance(target, targets.EngineTarget)
        wheels = [f"{each.name}=={each.version}" for each in locked_wheels(target).values() if LIBRARIES.match(each.name)]
        self.python = parser_options.environment(
            scratch, [*wheels, FLASHINFER], target.options.workspace, target.options.origin
        )
        self.scratch = scratch
        (self.package,) = self.python.parents[1].glob("lib/python*/site-packages/flashinfer")

    def compile(self, state: str, calls: dict[str, dict[str, Any]], **variables: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The launches of each call, and its PTX."""
        directory, request = self.scratch / state, self.scratch / f"{state}.json"
        (dump := directory / "dump").mkdir(parents=True)
        request.write_text(json.dumps([{"name": name, **call} for name, call in calls.items()]))
        settings = {
            "CUTE_DSL_ARCH": "sm_120a",
            "CUTE_DSL_KEEP_PTX": "1",
            "CUTE_DSL_DUMP_DIR": str(dump),
            "HOME": str(self.scratch),
        }
        argv = [self.python, PROGRAM, request, directory]
        done = subprocess.run(
            argv,
            env=os.environ | settings | {"HOME": str(self.scratch)} | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1]), {name: (directory / f"{name}.ptx").read_text() for name in calls}

    def patched(self) -> Path:
        """A directory with the package with the patch; other files are links to the released ones."""
        directory = self.scratch / "patched"
        copytree(self.package, directory / "flashinfer", copy_function=os.symlink, ignore=lambda *_: ["__pycache__"])
        text = (changed := directory / CHANGED).read_text()
        changed.unlink()
        changed.write_text(text)
        subprocess.run(["git", "apply", PATCH], cwd=directory, check=True)
        return directory


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("flashinfer"))


@pytest.fixture(scope="module")
def released(kernels: Kernels) -> tuple[dict[str, Any], dict[str, str]]:
    return kernels.compile("released", CALLS)


@pytest.fixture(scope="module")
def found(kernels: Kernels, released: tuple[dict[str, Any], dict[str, str]]) -> dict[tuple[str, str], list[Epilogue]]:
    _, patched = kernels.compile("patched-ptx", {name: CALLS[name] for name in MICRO}, PYTHONPATH=str(kernels.patched()))
    texts = {("released", name): released[1][name] for name in [*MICRO, *STATIC]}
    return {key: epilogues(text) for key, text in (texts | {("patched", name): text for name, text in patched.items()}).items()}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_fit_into_shared_memory(name: str, released: tuple[dict[str, Any], dict[str, str]]) -> None:
    first, *others = released[0][name]
    kernel, tile, stages, size = LAUNCHES[name]
    assert first == {"function": f"{kernel}.kernel", "tile": tile, "stages": stages, "shared_bytes": size}
    assert all(each["shared_bytes"] == 0 for each in others)
    assert size <= SMEM_CAPACITY_BYTES


@pytest.mark.parametrize("state", ["released", "patched"])
@pytest.mark.parametrize("name", MICRO)
def test_micro_kernel_reads_what_other_warps_stored(
    name: str, state: str, found: dict[tuple[str, str], list[Epilogue]]
) -> None:
    """All rows of the tile, or the first if there is one token."""
    read = 1 if "1 token" in name else 64
    assert len(found[state, name]) == (2 if "small" in name else 4)
    for each in found[state, name]:
        assert each.writers.shape == (64, 128)
        assert (each.readers[:read] >= 0).all() and (each.readers[read:] < 0).all()
        assert each.foreign == read * 128 * 3 // 4
        assert each.multiplied.all()


@pytest.mark.parametrize("name", MICRO)
def test_warps_wait_for_all_stores_with_the_patch_only(name: str, found: dict[tuple[str, str], list[Epilogue]]) -> None:
    assert {each.barrier for each in found["released", name]} == {None}
    assert {each.barrier for each in found["patched", name]} == {FOUR_WARPS}


@pytest.mark.parametrize("name", STATIC)
def test_static_kernel_waits_and_multiplies_half_of_the_rows(name: str, found: dict[tuple[str, str], list[Epilogue]]) -> None:
    """At least 32, which is as many as it gives to a tile (``moe_static_kernel.py``, 32-row virtual-expert split)."""
    rows = STATIC[name]
    for each in found["released", name]:
        assert each.writers.shape == (rows, 128) and each.foreign == each.readers.size * 3 // 4
        assert each.barrier == FOUR_WARPS
        assert each.multiplied[: rows // 2].all() and each.zero[rows // 2 :].all()
