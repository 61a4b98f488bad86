"""The layer with kernels of b12x: a program in the image of the other layers writes its entries. Here that program is small."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from python_base import python_base
from small_assembly import SmallImage

from sm120kit.core.errors import CommandFailed
from sm120kit.images import _b12x as b12x
from sm120kit.images import image_inputs
from sm120kit.images.checks import _outside
from sm120kit.images.image_records import CheckResult, Image
from sm120kit.images.local_images import LocalImages

PROGRAM = """
import base64, json, os, sys
request = json.load(open(sys.argv[1]))
paths = [f"ab/ab{rows:062x}.o" for rows in request["gemm"][0]["rows"]]
launch = {"kernel": "Kernel", "tile": "64x64x128", "stages": 4, "k_blocks": 2, "shared_bytes": 50176}
call = {"call": os.environ["A"], "seconds": 1.5, "hit": False, "launches": [launch]}
kernels = [call | {"path": path} for path in paths]
print(json.dumps({"kernels": kernels, "entries": {path: base64.b64encode(b"code").decode() for path in paths}, "mib": 1}))
"""


class KernelImage(SmallImage):
    """A small image with a table of kernels."""

    def with_kernels(
        self, rows: list[int], program: str = PROGRAM, ours: bytes = b"patched = 1\n", patched: bytes = b"barrier = 1\n"
    ) -> Image:
        table: Mapping[str, Any] = {"sm_count": 188, "moe": [], "gemm": [{"n": 1, "k": 2, "rows": rows}]}

        def describe(setup: image_inputs.ImageSetup, *inputs: Any) -> Any:
            described, text, scripts = original(replace(setup, b12x=table), *inputs)
            return described, text, scripts | {b12x.PROGRAM: program}

        original, image_inputs.describe = image_inputs.describe, describe
        try:
            return self.assemble(ours, python_base(self.layout), [self.b12x(patched)])[0]
        finally:
            image_inputs.describe = original

    def last_layer(self, image: Image) -> dict[str, bytes]:
        with tarfile.open(self.layout.path(image.layers[-1])) as archive:
            files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
            return {name: file.read() for name, file in files.items() if file}


@pytest.fixture
def small(tmp_path: Path) -> KernelImage:
    return KernelImage(tmp_path)


def test_entries_are_a_layer_of_the_image(small: KernelImage, tmp_path: Path) -> None:
    image = small.with_kernels([8, 16])
    paths = [f"ab/ab{rows:062x}.o" for rows in (8, 16)]
    files = small.last_layer(image)
    assert {name: content for name, content in files.items() if name.endswith(".o")} == {
        f"{b12x.DIRECTORY}/entries/{path}": b"code" for path in paths
    }
    record = json.loads(files[f"{b12x.DIRECTORY}/kernels.json"])
    assert [record[path]["call"] for path in paths] == ['two "words" and $3'] * 2, "the environment is that of the image"
    assert [listed.id for listed, _ in LocalImages(small.workspace).images("sm120kit.kind")] == [image.id]
    request = LocalImages(small.workspace).file(image.id, "opt/sm120kit/b12x/request.json")
    assert request and json.loads(request.read_text())["sm_count"] == 188


def test_layer_is_written_again_only_for_other_inputs(small: KernelImage) -> None:
    fails = "raise SystemExit('compiled again')"
    image = small.with_kernels([8])
    assert small.with_kernels([8], ours=b"patched = 2\n").layers[-1] == image.layers[-1]
    assert small.with_kernels([8], ours=b"patched = 3\n").layers[-1] == image.layers[-1]
    with pytest.raises(CommandFailed, match="exit code 1: compiled again"):
        small.with_kernels([8], fails, ours=b"patched = 4\n")
    with pytest.raises(CommandFailed, match="exit code 1: compiled again"):
        small.with_kernels([8], fails, patched=b"barrier = 2\n")
    assert small.with_kernels([8], patched=b"barrier = 2\n").layers[-1] == image.layers[-1], "the same bytes"
    assert small.with_kernels([8, 16]).layers[-1] != image.layers[-1]


@pytest.mark.parametrize(
    "output",
    [
        "{}",
        '{"kernels": [], "entries": {}, "mib": 1}',
        '{"kernels": [{"path": "../x.o", "call": "", "seconds": 1, "launches": []}], "entries": {"../x.o": ""}, "mib": 1}',
    ],
)
def test_output_of_another_form_is_refused(small: KernelImage, output: str) -> None:
    with pytest.raises(CommandFailed, match="could not be compiled in the image: exit code 0"):
        small.with_kernels([8], f"print('''{output}''')")


def test_code_that_is_not_for_sm120_fails_the_checks(small: KernelImage, tmp_path: Path) -> None:
    cubin = Path(__file__).parents[2] / "unit" / "data" / "cubin" / "sm_120a.cubin"  # without FP4 instructions
    image = small.with_kernels([8], PROGRAM.replace('b"code"', repr(cubin.read_bytes())))
    (tmp_path / "files").mkdir()
    check, facts = _outside.b12x_code(image, LocalImages(small.workspace))
    assert check.verdict is CheckResult.FAILED and "or without FP4 instructions" in check.detail and not facts


def test_kernel_whose_launch_is_not_recorded_is_refused(small: KernelImage) -> None:
    with pytest.raises(CommandFailed, match=r'no launch of the kernel for two "words" and .* is recorded'):
        small.with_kernels([8], PROGRAM.replace("[launch]", "[]"))


def test_entry_that_is_no_code_fails_the_checks(small: KernelImage, tmp_path: Path) -> None:
    image = small.with_kernels([8])
    (tmp_path / "files").mkdir()
    check, _ = _outside.b12x_code(image, LocalImages(small.workspace))
    assert check.verdict is CheckResult.FAILED and "not an ELF, fatbin or cubin" in check.detail


def test_image_without_the_kernels_fails_the_checks(small: KernelImage, tmp_path: Path) -> None:
    image, _ = small.assemble(base=python_base(small.layout))
    check, _ = _outside.b12x_code(image, LocalImages(small.workspace))
    assert check.verdict is CheckResult.FAILED and "kernels.json" in check.detail
