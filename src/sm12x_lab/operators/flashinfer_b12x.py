"""Compare FlashInfer 0.7's fused MoE of CuTe DSL kernels for SM12x, ``b12x_fused_moe``, with float64.

Needs torch, FlashInfer and its CuTe DSL.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
from dataclasses import dataclass, fields, replace

import b12x_nvfp4
import reference
import torch
from b12x_nvfp4 import KEPT, B12xMoeCall, attempt_moe, moe_faults
from reference import MoeLayer, MoeShape
from report import OperatorReport

Tensor = torch.Tensor

CALLS = {
    MoeShape("qwen3.5-122b-tp2", 256, 3072, 512, 8): (1, 2, 4, 33, 192, 600),
    MoeShape("qwen3.5-122b", 256, 3072, 1024, 8): (1,),
    MoeShape("small", 8, 256, 1024, 2): (8,),
}
"""Tokens of each layer. FlashInfer selects its kernel `direct_micro` for 1 and 2 tokens of the first, `micro` for 4 and for the
other layers, `static` for 33, and `dynamic` for more."""
FAULTY_TOKENS = (4, 33, 192)
REPEATS = 4


@dataclass(frozen=True)
class FlashInferMoeCall(B12xMoeCall):  # type: ignore[misc]
    """The arguments of ``b12x_fused_moe``. The scales of inputs are factors here, and divisors there."""

    def run(self) -> Tensor:
        module, utils = importlib.import_module("flashinfer"), importlib.import_module("flashinfer.cute_dsl.utils")
        experts, hidden, inner = len(self.w1), self.x.shape[1], 2 * self.w2.shape[2]
        weights_scale = self.alpha1 * self.scale1  # FlashInfer folds the input's scale into it
        s1, s2 = (
            utils.convert_sf_to_mma_layout(scales.view(torch.uint8).flatten(), rows, columns, experts)
            for scales, rows, columns in ((self.s1, 2 * inner, hidden), (self.s2, hidden, inner))
        )
        output = torch.full_like(self.x, float("nan"))
        KEPT.append((self, s1, s2, weights_scale, output))
        module.b12x_fused_moe(
            *(self.x, self.w1, s1, self.w2, s2, self.experts, self.weights, experts, self.experts.shape[1]),
            w1_alpha=weights_scale,
            w2_alpha=self.alpha2,
            fc2_input_scale=1 / self.scale2,
            input_global_scale=1 / self.scale1,
            output=output,
            quant_mode="nvfp4",
        )
        return output


def check(report: OperatorReport, pattern: str) -> None:
    for shape, counts in CALLS.items():
        selected = [tokens for tokens in counts if fnmatch.fnmatch(f"{shape.name}-{tokens}", pattern)]
        if not selected:
            continue
        layer = MoeLayer.random(shape)
        scale1 = 448.0 * (0.75 + 0.5 * torch.rand(shape.experts, device=reference.DEVICE))
        for tokens in selected:
            b12x_call, expected = b12x_nvfp4.moe_case(layer, scale1, tokens, hot=False)
            call = FlashInferMoeCall(**{field.name: getattr(b12x_call, field.name) for field in fields(b12x_call)})
            rows = [attempt_moe(expected, call.run) for _ in range(REPEATS)]
            wrong = [row for row in rows if row.verdict != "right"]
            worst = max(wrong or rows, key=lambda row: row.error_over_bound)
            case = f"{shape.name}, {tokens} tokens, {len(rows) - len(wrong)} of {len(rows)} right"
            report.add(replace(worst, operator="b12x_fused_moe", case=case))
            for fault, changed in moe_faults(call, layer).items() if tokens in FAULTY_TOKENS else ():
                report.fault(f"b12x_fused_moe, {tokens} tokens: {fault}", reference.attempt("", "", expected, changed.run))


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    check(report, options.only)
