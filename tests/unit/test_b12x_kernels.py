"""Shared memory of kernels of b12x: refused at the compilation, checked in an image, listed as tiles. Without b12x."""

from __future__ import annotations

import base64
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import CommandFailed
from sm120kit.images import b12x
from sm120kit.images.checks import _device_code
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

    def fetch(self, image: str, path: str, into: Path) -> bool:
        entry = into / "b12x" / "entries" / PATHS[0]
        entry.parent.mkdir(parents=True)
        entry.write_bytes(CUBIN.read_bytes())
        (into / "b12x" / "kernels.json").write_text(json.dumps(self.record))
        return True

    def check(self, directory: Path) -> str:
        image = cast(Image, SimpleNamespace(id="sha256:0"))
        check, facts = _device_code.b12x_code(image, cast(LocalImages, self), directory)
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


def output(*launches: dict[str, object], hits: int = 0) -> str:
    """What ``compile.py`` prints for kernels with these launches, of which the first ``hits`` are looked up again."""
    kernels = [
        {"path": path, "call": f"{rows} x 1024 x 3072", "seconds": 1.5, "hit": False, "launches": [launch]}
        for rows, (path, launch) in enumerate(zip(PATHS, launches, strict=False), 1)
    ]
    again = [kernel | {"call": "again", "hit": True, "launches": []} for kernel in kernels[:hits]]
    code = base64.b64encode(CUBIN.read_bytes()).decode()
    return json.dumps({"kernels": kernels + again, "entries": dict.fromkeys((k["path"] for k in kernels), code), "mib": 1})


class Environment:
    """In place of an environment with b12x: a program that prints ``printed`` whatever it shall compile."""

    def __init__(self, printed: str, message: str = "", code: int = 0) -> None:
        self.printed, self.message, self.code = printed, message, code
        self.runs: list[bool] = []

    def __call__(self, target: object, scratch: Path, *, patched: bool) -> Path:
        self.runs.append(patched)
        (scratch / "printed").write_text(self.printed)
        python = scratch / "python"
        python.write_text(f"#!/bin/sh\ncat {scratch}/printed\necho '{self.message}' >&2\nexit {self.code}\n")
        python.chmod(0o755)
        return python


def tiles(monkeypatch: pytest.MonkeyPatch, state: Path, environment: Environment, *options: str) -> Any:
    monkeypatch.setattr(b12x, "environment", environment)
    return CliRunner().invoke(app, ["tiles", "sglang-0.5.11-b12x", "--state", str(state), *options])


def test_tiles_of_a_recipe_with_kernels_of_b12x(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(output(LAUNCH, LAUNCH | {"tile": "64x64x128", "shared_bytes": 50_176}, hits=1))
    result = tiles(monkeypatch, tmp_path, environment, "--json")
    (small, large) = json.loads(result.stdout)["patched"]
    assert (small["tile"]["family"], small["tile"]["n"], small["smem_bytes"]) == ("DenseGemmKernel", 64, 50_176 + STATIC_BYTES)
    assert (large["tile"]["m"], large["tile"]["n"], large["stages"], large["k_blocks"]) == (64, 128, 4, 2)
    assert large["fits"] and large["margin_bytes"] == SMEM_CAPACITY_BYTES - 74_752 - STATIC_BYTES
    shown = tiles(monkeypatch, tmp_path, environment)
    assert "2 generated: 2 fit, 0 too big" in shown.stdout and "the patches change 0 of 2 rows" in shown.stdout
    assert environment.runs == [False, True], "the tables are cached"
    assert "the patches change" not in tiles(monkeypatch, tmp_path, environment, "--unpatched").stdout


def test_kernels_with_equal_tiles_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tiles(monkeypatch, tmp_path, Environment(output(LAUNCH, LAUNCH)), "--json")
    assert len(json.loads(result.stdout)["patched"]) == 1


def test_kernel_that_cannot_be_launched_is_an_error_of_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "error: kernel of b12x for 8 x 1024 x 3072: DenseGemmKernel requests 107,520 bytes"
    result = tiles(monkeypatch, tmp_path, Environment("", message, 1))
    assert isinstance(result.exception, CommandFailed)
    assert result.exception.message == (f"kernels of b12x of sglang-0.5.11-b12x could not be compiled: exit code 1: {message}")
