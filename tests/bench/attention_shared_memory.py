"""Shared memory of FlashInfer's attention kernels for SM12x.

    python tests/bench/attention_shared_memory.py flashinfer@0.7.2.post1

The modules ``nvfp4_attention_sm120`` and ``sparse_mla_sm120`` are no CUTLASS GEMMs, so ``sm120kit tiles`` does not list them.
Their own headers, compiled for the host, have the bytes of dynamic shared memory that their launchers request; static shared
memory is what their kernels declare (``sm_p_full``, by reading decode.cuh), which counts to the same limit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from sm120kit.core import toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES
from sm120kit.kernels.tables import export_tree
from sm120kit.kernels.tiles import introspect
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options

SPARSE_MLA = """
#include <cstdio>
#include <flashinfer/attention/sparse_mla_sm120/kernels/dsv32_fp8/resources.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/dsv41_bf16/resources.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/dsv41_fp8/resources.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/dsv4_nvfp4/resources.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/fp8_decode/resources.cuh>
#include <flashinfer/attention/sparse_mla_sm120/kernels/fp8_prefill/resources.cuh>
using namespace flashinfer::sparse_mla_sm120;
using namespace flashinfer::sparse_mla_sm120::kernels;
using M = ModelType;
template <M model, class Mixed = void>
using Prefill = Fp8PrefillResources<model, QkComputeMode::FP8, Mixed>;
constexpr int P_FULL = HPB * DSV32_BI * sizeof(bf16), P_SMALL = HPB * sizeof(bf16);  // sm_p_full of the decode kernels
static_assert(DSV32_BI == DecodeTileCfg<M::DSV4>::BI && DSV32_BI == nvfp4::DECODE_CAND_WINDOW);
void print(char const* name, size_t dynamic, int fixed = 0) { std::printf("%s|%zu|%d\\n", name, dynamic, fixed); }
int main() {
  print("decode, DSV3_2", Dsv32DecodeSmem<M::DSV3_2>::LAUNCH_BYTES, P_FULL);
  print("decode, GLM_NSA", Dsv32DecodeSmem<M::GLM_NSA>::LAUNCH_BYTES, P_FULL);
  print("decode, GLM53_NOPE", Dsv32DecodeSmem<M::GLM53_NOPE>::LAUNCH_BYTES, P_FULL);
  print("decode, DSV4", Fp8DecodeSharedLayout<M::DSV4>::TOTAL_BYTES, P_FULL);
  print("decode, DSV4 NVFP4", nvfp4::DecodeNVFP4Smem<M::DSV4>::SIZE, P_FULL);
  print("decode and prefill, DSV4 NVFP4 streaming", nvfp4::StreamingNVFP4Smem::SIZE);
  print("decode, DOTS3_SWA", Fp8DecodeSharedLayout<M::DOTS3_SWA>::TOTAL_BYTES, P_SMALL);
  print("decode, DSV4_1", Fp8DecodeSharedLayout<M::DSV4_1>::TOTAL_BYTES, P_SMALL);
  print("decode, DSV4_1 with FP4 cache", Fp8DecodeSharedLayout<M::DSV4_1, true>::TOTAL_BYTES, P_SMALL);
  print("decode and prefill, DSV4_1 BF16", sizeof(dsv41_bf16::Dsv41Bf16Smem));
  print("prefill SG, DSV3_2 and GLM_NSA", Prefill<M::DSV3_2>::SHARED_BYTES);
  print("prefill SG, GLM53_NOPE", Prefill<M::GLM53_NOPE>::SHARED_BYTES);
  print("prefill SG, DOTS3_SWA", Prefill<M::DOTS3_SWA>::SHARED_BYTES);
  print("prefill SG, DSV4_1", Prefill<M::DSV4_1>::SHARED_BYTES);
  print("prefill SG, DSV4_1 with FP4 cache", Prefill<M::DSV4_1, dsv41_fp8::Dsv41MixedCachePrefillResources>::SHARED_BYTES);
  print("prefill swapped, DSV3_2 and GLM_NSA", SmemLayoutSwapAB<M::DSV3_2>::TOTAL);
  print("prefill swapped, GLM53_NOPE", SmemLayoutSwapAB<M::GLM53_NOPE>::TOTAL);
  print("prefill MG, DSV3_2, GLM_NSA, GLM53_NOPE", SmemLayoutMG<M::DSV3_2, QkComputeMode::FP8>::TOTAL);
  print("prefill MG, DSV4", SmemLayoutMG<M::DSV4, QkComputeMode::FP8>::TOTAL);
  print("prefill MG, DSV4 with BF16 QK", SmemLayoutMG<M::DSV4, QkComputeMode::BF16>::TOTAL);
}
"""
NVFP4_ATTENTION = """
#include <cmath>
#include <cstdio>
#include <flashinfer/attention/sm120/nvfp4_attention_sm120/kernel/traits.h>
template <int head>  // the other arguments are those of run_mha_fwd_ in api/launcher.h
using Traits = nvfp4_attention::Flash_fwd_kernel_traits<head, 128, 128, 3, 1, true, cutlass::nv_float4_t<cutlass::float_e2m1_t>,
                                                        cutlass::bfloat16_t, float>;
template <int head>
void print() { std::printf("head size %d|%zu|0\\n", head, sizeof(typename Traits<head>::SharedStorage)); }
int main() { print<64>(), print<128>(); }
"""


def main(engine: str) -> None:
    """Print a row per kernel: name, dynamic and static bytes, and what is left of SM12x's limit."""
    with tempfile.TemporaryDirectory() as scratch:
        target = resolve_flashinfer(engine, Options(Workspace.open(Path(scratch, "state"))))
        tree = export_tree(target.source.unpatched_tree, target.options.workspace)
        compiler = introspect.HostCompiler.of(toolchain.find(), tree, ())
        for module, text in (("nvfp4_attention_sm120", NVFP4_ATTENTION), ("sparse_mla_sm120", SPARSE_MLA)):
            source, program = Path(scratch, f"{module}.cpp"), Path(scratch, module)
            source.write_text('#include "sm120kit_probe.hpp"\n' + text)
            linked = ("-w", "-O1", "-ffunction-sections", "-Wl,--gc-sections")  # device code is never linked
            done = compiler.run(*linked, source, "-o", program)
            if done.returncode:
                sys.exit(done.stderr)
            for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines():
                name, dynamic, static = line.split("|")
                left = SMEM_CAPACITY_BYTES - int(dynamic) - int(static)
                print(f"| `{module}` | {name} | {int(dynamic):,} | {int(static):,} | {left:,} |")


if __name__ == "__main__":
    main(sys.argv[1])
