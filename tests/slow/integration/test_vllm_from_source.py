"""vLLM 0.33.0 from source, NVFP4 quantization only: its own files, the locked compiler and torch, CUTLASS, the upstream wheel.

It fetches 3 GB and needs the commit of CUTLASS: from its host, or kept by an earlier ``build --to fetch --mirror``. The GEMMs
would take 10 minutes and 9 GiB.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree

import pytest

from sm120kit.core.data_roots import data_root
from sm120kit.kernels import cubin

RECIPE, MEMBER = "vllm-0.33.0", "vllm/_C_sm12x.abi3.so"
FP4 = "csrc/quantization/fp4"
UNITS = (
    "csrc/sm12x_bindings.cpp",
    "csrc/cuda_utils_kernels.cu",
    f"{FP4}/activation_nvfp4_quant_fusion_kernels.cu",
    f"{FP4}/nvfp4_experts_quant.cu",
    f"{FP4}/nvfp4_quant_entry.cu",
    f"{FP4}/nvfp4_quant_kernels.cu",
)
OPERATORS = (
    "scaled_fp4_experts_quant",
    "scaled_fp4_quant",
    "scaled_fp4_quant.out",
    "silu_and_mul_nvfp4_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
)
NOT_FETCHED = 20


def with_quantization_only(data: Path) -> None:
    """Reduce the recipe in a copy of the built-in data to :data:`UNITS` and :data:`OPERATORS`."""
    files, path = data / "files" / RECIPE, data / "recipes" / "engines" / f"{RECIPE}.toml"
    text = path.read_text()

    def rewrite(name: str, pattern: str, replacement: str) -> None:
        nonlocal text
        before = (files / name).read_bytes()
        (files / name).write_text(re.sub(pattern, replacement, before.decode(), flags=re.DOTALL))
        digests = (hashlib.sha256(content).hexdigest() for content in (before, (files / name).read_bytes()))
        text = text.replace(*digests)

    rewrite("CMakeLists.txt", r"(USE_SABI 3 WITH_SOABI).*?\)", rf"\1 {' '.join(UNITS)})")
    kept = "|".join(map(re.escape, OPERATORS))
    rewrite("csrc/sm12x_bindings.cpp", rf'  ops\.impl\("(?!({kept})")[^;]*;\n', "")
    text = re.sub(r"^units = \[.*?^\]", f"units = {json.dumps(UNITS)}", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r'^(expect_kernels|"torch.ops._C.cutlass_scaled_mm_supports).*\n', "", text, flags=re.MULTILINE)
    path.write_text(re.sub(r'= """.*?"""', f'= "{" ".join(OPERATORS)}"', text, flags=re.DOTALL))


def test_quantization_of_vllm_is_compiled_and_overrides_the_upstream_one(tmp_path: Path) -> None:
    for name in ("recipes", "patches", "cutlass_overrides", "files"):
        copytree(data_root() / name, tmp_path / "data" / name)
    with_quantization_only(tmp_path / "data")

    def sm120kit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"SM120KIT_DATA": str(tmp_path / "data")}
        return subprocess.run([sys.executable, "-m", "sm120kit", *arguments], env=variables, capture_output=True, text=True)

    locked = sm120kit("recipe", "lock", RECIPE)
    assert locked.returncode == 0, locked.stderr
    build = ("build", RECIPE, "--from-source", "--kernels", "none")
    if (fetched := sm120kit(*build, "--to", "fetch")).returncode == NOT_FETCHED:
        pytest.skip(f"CUTLASS is not reachable: {fetched.stderr}")
    built = sm120kit(*build, "--to", "pack", "--jobs", "1", "-o", tmp_path / "out")
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "out").glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extract(MEMBER, tmp_path)
        assert packed.testzip() is None
        (record,) = (json.loads(packed.read(name)) for name in packed.namelist() if name.endswith("dist-info/sm120kit.json"))
    images = cubin.read(tmp_path / MEMBER)
    assert {image.arch for image in images} == {"sm_120f"}
    assert cubin.matching("*cvt_fp16_to_fp4*@sm_120f", images)
    assert record["replaced"][MEMBER]["official"] == "" and {*record["flags"]} == {*UNITS}
