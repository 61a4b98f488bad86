"""Shared memory of kernels of b12x: refused at the compilation, checked in an image. Without b12x."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.images import _b12x as b12x
from sm120kit.images.checks import _outside
from sm120kit.images.image_records import CheckResult, Image
from sm120kit.images.local_images import LocalImages
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES

CUBIN = Path(__file__).parent / "data" / "cubin" / "sm_120a.cubin"
STATIC_BYTES = 128
"""Static shared memory of a kernel in it; it has no FP4 instructions."""
LAUNCH = {"kernel": "DenseGemmKernel", "tile": "64x128x128", "stages": 4, "k_blocks": 2, "shared_bytes": 74_752}
PATHS = [f"ab/ab{number:062x}.o" for number in range(2)]
KERNEL = SimpleNamespace(tile_shape_mnk=(128, 128, 128), ab_stage=4, num_k_blocks=2)


@pytest.fixture
def program() -> dict[str, Any]:
    return runpy.run_path(str(data_root() / "image_programs" / b12x.PROGRAM))


def test_program_refuses_launches_that_exceed_the_limit(program: dict[str, Any]) -> None:
    limit, launch_of = program["SHARED_MEMORY_BYTES"], program["launch_of"]
    assert limit == SMEM_CAPACITY_BYTES
    assert launch_of("Dense", KERNEL, limit) == {
        "kernel": "Dense",
        "tile": "128x128x128",
        "stages": 4,
        "k_blocks": 2,
        "shared_bytes": limit,
    }
    refused = program["CannotLaunch"]
    with pytest.raises(refused, match=r"Dense, tile 128x128x128, 4 stages, requests 101,377 bytes .* SM120 has 101,376"):
        launch_of("Dense", KERNEL, limit + 1)
    with pytest.raises(refused, match="Dense, tile 128x128x128, 4 stages, computes its shared memory at the launch"):
        launch_of("Dense", KERNEL, None)


class OneImage:
    """A store with the directory of b12x in an image."""

    def __init__(self, record: Any) -> None:
        self.record = record
        self.listed = Path()

    def files(self, image: str, path: str) -> dict[str, Path]:
        return {PATHS[0]: CUBIN}

    def file(self, image: str, path: str) -> Path:
        return self.listed

    def check(self, directory: Path) -> str:
        self.listed = directory / "kernels.json"
        self.listed.write_text(json.dumps(self.record))
        image = cast(Image, SimpleNamespace(id="sha256:0"))
        check, facts = _outside.b12x_code(image, cast(LocalImages, self))
        assert check.verdict is CheckResult.FAILED and not facts
        return check.detail


def recorded(**launch: object) -> Any:
    return {PATHS[0]: {"call": "8 x 1024 x 3072", "sha256": file_sha256(CUBIN), "launches": [LAUNCH | launch]}}


@pytest.mark.parametrize("excess", [0, 1])
def test_check_of_an_image_adds_static_and_dynamic_shared_memory(tmp_path: Path, excess: int) -> None:
    detail = OneImage(recorded(shared_bytes=SMEM_CAPACITY_BYTES - STATIC_BYTES + excess)).check(tmp_path)
    too_big = f"{PATHS[0]}: DenseGemmKernel for 8 x 1024 x 3072 requests 101,377 bytes of shared memory, SM120 has 101,376; "
    assert detail == too_big * excess + f"{PATHS[0]} has a kernel for another arch than sm_120a, or without FP4 instructions"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({PATHS[0]: {"call": "8 x 1024 x 3072", "sha256": file_sha256(CUBIN)}}, f"{PATHS[0]}.launches: Field required"),
        ({PATHS[0]: recorded()[PATHS[0]] | {"launches": []}}, "no launch of the kernel for 8 x 1024 x 3072 is recorded"),
        (recorded(shared_bytes="few"), f"{PATHS[0]}.launches.0.shared_bytes: Input should be a valid integer"),
        ([], "opt/sm120kit/b12x/kernels.json is not a list of kernels of b12x"),
    ],
)
def test_check_of_an_image_requires_the_launches_of_every_kernel(tmp_path: Path, record: Any, problem: str) -> None:
    assert problem in OneImage(record).check(tmp_path)


@pytest.mark.parametrize("manifests", [[], [0], [0, 1]])
def test_kernels_with_manifests_have_one_each(manifests: list[int]) -> None:
    """Of b12x 1.5.1: it does not find a kernel without."""
    launch = {"kernel": "DenseGemmKernel", "shared_bytes": 50_176}
    result = {"kernels": [{"call": "8 x 1024 x 3072", "path": path, "launches": [launch]} for path in PATHS]}
    contents = dict.fromkeys([*PATHS, *(f"{PATHS[number][:-1]}json" for number in manifests)], b"content")
    if len(manifests) == 1:
        with pytest.raises(ValueError, match="its entries are not those of its kernels"):
            b12x.COMPILER.listed(result, contents)
    else:
        assert {*cast(Any, b12x.COMPILER.listed(result, contents))} == {*PATHS}


@pytest.mark.parametrize(("kernel", "problem"), [(b12x.WITHOUT_MMA, False), ("_DynamicMoELaunch", True)])
def test_only_kernels_for_few_tokens_lack_fp4_instructions(tmp_path: Path, kernel: str, problem: bool) -> None:
    image = OneImage(recorded(kernel=kernel))
    image.listed = tmp_path / "kernels.json"
    image.listed.write_text(json.dumps(image.record))
    check, _ = _outside.b12x_code(cast(Image, SimpleNamespace(id="sha256:0")), cast(LocalImages, image))
    assert ("without FP4 instructions" in check.detail) is problem
