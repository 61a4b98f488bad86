"""``verify ptx`` with nvcc and ptxas: PTX that nvcc makes of CUDA code, rewritten and assembled for Hopper."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core import process, toolchain
from sm120kit.core.errors import BadInput

CODE = r"""
extern "C" __global__ void kernel(unsigned* out, unsigned const* in, float2 scale, unsigned long long pair) {
  unsigned short const zero = 0;
  float d[4];
  asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"
    " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, {%14}, {%15, %15}, {%16}, {%15, %15};"
    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
    : "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]), "f"(0.f), "f"(0.f), "f"(0.f), "f"(0.f),
      "r"(in[6]), "h"(zero), "r"(in[7]));
  unsigned short code;
  asm("{ .reg .b8 c; cvt.rn.satfinite.e2m1x2.f32 c, %1, %2; cvt.u16.u8 %0, c; }" : "=h"(code) : "f"(d[0]), "f"(d[1]));
  if (threadIdx.x == 3) asm("mul.rn.f32x2 %0, %0, %1;" : "+l"(pair) : "l"(pair + 1));
  out[threadIdx.x] = code + unsigned(pair >> 32) + EXTRA;
}
"""


def ptx(directory: Path, extra: str) -> Path:
    tools = toolchain.find()
    source, output = directory / "kernel.cu", directory / "kernel.ptx"
    source.write_text(CODE)
    nvcc = [
        tools.cuda_home / "bin" / "nvcc",
        "-ccbin",
        tools.host_compiler,
        "-ptx",
        "-gencode",
        "arch=compute_120f,code=sm_120f",
    ]
    process.run([*nvcc, f"-DEXTRA={extra}", source, "-o", output])
    return output


def test_kernel_of_nvcc_is_rewritten_and_assembled(tmp_path: Path) -> None:
    rewritten, cubin = tmp_path / "hopper.ptx", tmp_path / "hopper.cubin"
    arguments = [str(ptx(tmp_path, "0")), "--ptx", str(rewritten), "--cubin", str(cubin), "--json"]
    result = CliRunner().invoke(app, ["verify", "ptx", *arguments])
    assert result.exit_code == 0, result
    module = json.loads(result.stdout)["module"]
    assert (module["source_target"], module["target"]) == ("sm_120f", "sm_90a")
    functions = [(row["function"], row["opcode"].split(".")[0]) for row in module["replacements"]]
    assert functions == [("sm120_mma_e2m1_4x_ue4m3", "mma"), ("sm120_to_narrow", "cvt"), ("inline", "mul")]
    assert [kernel["name"] for kernel in module["kernels"]] == ["kernel"]
    assert ".target sm_90a" in rewritten.read_text() and cubin.read_bytes()[:4] == b"\x7fELF"


def test_instruction_that_only_ptxas_rejects_is_named(tmp_path: Path) -> None:
    asm = 'asm("{ .reg .f32 f; max.f32 f, 0f00000000, 0f3F800000, 0f40000000; mov.b32 %0, f; }" : "=r"(x));'
    extra = f"[]{{ unsigned x; {asm} return x; }}()"
    result = CliRunner().invoke(app, ["verify", "ptx", str(ptx(tmp_path, extra)), "--cubin", str(tmp_path / "out.cubin")])
    assert isinstance(result.exception, BadInput)
    assert "max.f32" in result.exception.message and not (tmp_path / "out.cubin").exists()
