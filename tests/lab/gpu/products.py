"""FlashInfer's `mm_fp4` by CUTLASS, once each: ``products.py M,N,K...``. ncu counts the bytes that ``tiles --cost`` states:

``sm12x-lab run -- ncu --clock-control none -k regex:device_kernel --csv --metrics METRICS python products.py 4096,4096,4096``
with the metrics of ``METRICS``. FlashInfer's module has PTX.
"""

from __future__ import annotations

import sys

import flashinfer
import torch

METRICS = (
    "l1tex__m_xbar2l1tex_read_bytes.sum,lts__t_sectors_srcunit_tex_op_write.sum,"
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum,dram__bytes_read.sum,dram__bytes_write.sum"
)
"""Bytes that multiprocessors read from L2, sectors that they write to it, those of local memory among these, and of DRAM."""


def product(m: int, n: int, k: int) -> None:
    operands = []
    for rows in (m, n):
        values = torch.randn(rows, k, device="cuda").bfloat16()
        scale = 448 * 6 / values.abs().amax().float()
        operands.append((*flashinfer.nvfp4_quantize(values, scale), scale))
    (a, a_scales, a_scale), (b, b_scales, b_scale) = operands
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    alpha = 1 / (a_scale * b_scale)
    flashinfer.mm_fp4(a, b.T, a_scales, b_scales.T, alpha, torch.bfloat16, out, backend="cutlass")
    torch.cuda.synchronize()


for word in sys.argv[1:]:
    product(*map(int, word.split(",")))
