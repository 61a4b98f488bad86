"""What operators must return: formats, the float64 reference of fused MoE with its bounds and planted faults, and comparisons.

Each output has a bound of its own: the reference keeps the interval of every intermediate value that fp32 accumulation permits,
through the rounding to bf16, SwiGLU and the quantization to NVFP4.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75 - 1e-12, 1.25, 1.75 - 1e-12, 2.5, 3.5 - 1e-12, 5.0)
"""Above the midpoint the next value is nearest; at it, the one with an even code."""

ACCUMULATION = 2.0**-21
"""Error of fp32 accumulation, relative to the sum of magnitudes."""
FUNCTIONS = 2.0**-18
"""Error of the fast exponential and reciprocals of the kernels, relative to the result."""
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Error of a rounding, relative to the result."""

DEVICE = "cuda"


@dataclass(frozen=True)
class OperatorRow:
    """A comparison. ``error_over_bound`` above 1 is wrong; ``cosine`` is to the operator without quantized activations."""

    operator: str
    case: str
    verdict: str
    error_over_bound: float = 0.0
    relative_rms: float = 0.0
    cosine: float = 0.0
    outputs: int = 0
    why: str = ""


@dataclass(frozen=True)
class Expected:
    """What an operator must return, the bound of each output's error, and the result without quantized activations."""

    values: Tensor
    bound: Tensor
    plain: Tensor


# ---- formats


def decode(codes: Tensor) -> Tensor:
    """Packed e2m1 as float64; the low four bits are the first element."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    return torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=codes.device)[nibbles]


def scale_values(scales: Tensor) -> Tensor:
    """Bytes of e4m3 as float64."""
    return scales.contiguous().view(torch.uint8).view(torch.float8_e4m3fn).double()


def unswizzled(scales: Tensor, rows: int, columns: int, fold: int = 128) -> Tensor:
    """Row-major scales of the layouts 128x4 (folds of 32 rows) and 8x4."""
    flat = scales.contiguous().view(torch.uint8).flatten()
    tiles_m, tiles_k = -(-rows // fold), -(-columns // 4)
    flat = flat[: tiles_m * tiles_k * fold * 4]
    if fold == 128:
        plain = flat.view(tiles_m, tiles_k, 32, 4, 4).permute(0, 3, 2, 1, 4)
    else:
        plain = flat.view(tiles_m, tiles_k, fold, 4).permute(0, 2, 1, 3)
    return plain.reshape(tiles_m * fold, tiles_k * 4)[:rows, :columns]


def interleaved(scales: Tensor) -> Tensor:
    """Row-major block scales ``[..., rows, columns]`` in the layout 128x4, padded with zeros."""
    *batch, rows, columns = scales.shape
    tiles_m, tiles_k = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros(*batch, tiles_m * 128, tiles_k * 4, dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    folds = padded.view(-1, tiles_m, 4, 32, tiles_k, 4).permute(0, 1, 4, 3, 2, 5)
    return folds.reshape(padded.shape)


def dequantized(codes: Tensor, linear_scales: Tensor) -> Tensor:
    """Elements times block scales, without the scale of the tensor; float64."""
    elements = decode(codes)
    return elements * scale_values(linear_scales).repeat_interleave(16, dim=-1)


def nearest_e2m1(values: Tensor) -> Tensor:
    table = torch.tensor(E2M1, dtype=torch.float64, device=values.device)
    at = torch.bucketize(values.abs(), torch.tensor(MIDPOINTS, dtype=torch.float64, device=values.device))
    return table[at] * values.sign()


def nearest_e4m3(values: Tensor) -> Tensor:
    return values.clamp(max=448.0).float().to(torch.float8_e4m3fn).double()


def quantized_interval(low: Tensor, high: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """The least and the greatest dequantized value of elements in [low, high]; ``scale`` is that of the tensor."""
    low, high = (values.reshape(*values.shape[:-1], values.shape[-1] // 16, 16) for values in (low, high))
    crosses = (low <= 0) & (high >= 0)
    nearest_zero = torch.where(crosses, torch.zeros_like(low), torch.minimum(low.abs(), high.abs()))
    ends = ((nearest_zero, 1 - FUNCTIONS), (torch.maximum(low.abs(), high.abs()), 1 + FUNCTIONS))
    least, greatest = (nearest_e4m3(values.amax(-1, keepdim=True) * scale / 6 * slack) for values, slack in ends)
    first, last = (values.float().to(torch.float8_e4m3fn).view(torch.uint8).int() for values in (least, greatest))
    blocks = []
    for step in range(
        int((last - first).max()) + 1 if first.numel() else 1
    ):  # every block scale between the least and the greatest
        block_scale = scale_values(torch.minimum(first + step, last).to(torch.uint8))
        for end, sign in ((low, -1), (high, 1)):
            value = end + sign * end.abs() * FUNCTIONS
            steps = torch.where(block_scale > 0, value * scale / block_scale.clamp(min=1e-30), torch.zeros_like(value))
            blocks.append(nearest_e2m1(steps) * block_scale / scale)
    stacked = torch.stack(blocks)
    return stacked.amin(0).flatten(-2), stacked.amax(0).flatten(-2)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.float().to(dtype).double()


# ---- comparisons


def compare(got: Tensor, expected: Expected, operator: str, case: str) -> OperatorRow:
    values = got.double()
    errors = (values - expected.values).abs()
    if values.shape != expected.values.shape:
        return OperatorRow(
            operator, case, "WRONG", float("inf"), why=f"{tuple(values.shape)}, expected {tuple(expected.values.shape)}"
        )
    finite = bool(torch.isfinite(values).all() and torch.isfinite(expected.bound).all())
    ratio = float((errors / expected.bound).max()) if finite else float("inf")
    rms = float(errors.square().mean().sqrt() / expected.values.square().mean().sqrt())
    cosine = float(torch.nn.functional.cosine_similarity(values.flatten(), expected.plain.flatten(), dim=0))
    verdict = "right" if finite and ratio <= 1 else "WRONG"
    return OperatorRow(operator, case, verdict, ratio, rms, cosine, values.numel(), "" if finite else "not finite")


def attempt(operator: str, case: str, expected: Expected, call: Callable[[], Tensor]) -> OperatorRow:
    """Run and compare; an operator that raises is refused, with the beginning of its message."""
    try:
        got = call()
        torch.cuda.synchronize()
    except Exception as error:  # every library raises its own types
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return (
            OperatorRow(operator, case, "refused", why=why)
            if usable()
            else OperatorRow(operator, case, "WRONG", float("inf"), why=why)
        )
    return compare(got, expected, operator, case)


def usable() -> bool:
    """Whether the GPU still works: a kernel that crashed is not a call that was refused, and ends all that follows."""
    try:
        torch.cuda.synchronize()
    except Exception:  # of CUDA, by whichever library it comes
        return False
    return True


# ---- fused MoE


@dataclass(frozen=True)
class MoeShape:
    """One layer of a model on one GPU; ``width`` is that of an expert divided by the GPUs."""

    name: str
    experts: int
    hidden: int
    width: int
    active: int


MOE_SHAPES = (
    MoeShape("qwen3.5-122b-tp2", 256, 3072, 512, 8),
    MoeShape("qwen3.5-397b-tp4", 512, 4096, 256, 10),
)


@dataclass(frozen=True)
class MoeLayer:
    """Weights as a checkpoint has them: packed elements, row-major block scales, one scale for each expert's tensors."""

    shape: MoeShape
    w1: Tensor
    s1: Tensor
    g1: Tensor
    w2: Tensor
    s2: Tensor
    g2: Tensor
    scale1: Tensor
    scale2: Tensor

    @classmethod
    def random(cls, shape: MoeShape) -> MoeLayer:
        """Elements of any code; block scales of all mantissas in [0.125, 4). The first half of w1 is up, the second gate."""

        def weights(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = torch.randint(0, 256, (shape.experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
            scales = torch.randint(0x20, 0x48, (shape.experts, rows, columns // 16), dtype=torch.uint8, device=DEVICE)
            return codes, scales

        def globals_(typical: float) -> Tensor:
            return typical * (0.5 + torch.rand(shape.experts, device=DEVICE))

        w1, w2 = weights(2 * shape.width, shape.hidden), weights(shape.hidden, shape.width)
        g1, g2 = globals_(0.4 / shape.hidden**0.5), globals_(0.4 / shape.width**0.5)
        scale2 = 40.0 * (0.75 + 0.5 * torch.rand(shape.experts, device=DEVICE))
        return cls(shape, *w1, g1, *w2, g2, torch.tensor(448.0 * 6 / 6.0, device=DEVICE), scale2)


@dataclass(frozen=True)
class MoeCall:
    """The arguments of a call of ``cutlass_fused_moe``; planted faults replace them."""

    tokens: Tensor
    input_scales: Tensor | None
    experts: Tensor
    routing: Tensor
    w1: Tensor
    w2: Tensor
    scales: tuple[Tensor, ...]
    hidden: int

    def run(self) -> Tensor:
        fused_moe = importlib.import_module("flashinfer.fused_moe")
        output = torch.full((len(self.experts), self.hidden), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        fused_moe.cutlass_fused_moe(
            self.tokens,
            self.experts,
            self.routing,
            self.w1.view(torch.long),
            self.w2.view(torch.long),
            torch.bfloat16,
            quant_scales=list(self.scales),
            input_sf=self.input_scales,
            output=output,
        )
        return output


def router_logits(tokens: int, shape: MoeShape, skewed: bool) -> Tensor:
    """The router's output for each token; ``skewed`` prefers few experts."""
    logits = torch.randn(tokens, shape.experts, device=DEVICE)
    if skewed:
        logits[:, : shape.active // 2] += 8.0
    return logits


def routed(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, by softmax and top-k as the engines do."""
    weights, experts = torch.topk(torch.softmax(logits, dim=-1), active, dim=-1)
    return experts.int(), weights / weights.sum(-1, keepdim=True)


def moe_call(layer: MoeLayer, x: Tensor, route: tuple[Tensor, Tensor], quantized_input: bool) -> MoeCall:
    """Arguments as vLLM and SGLang make them: block scales interleaved, ``alpha`` the product of both tensors' scales."""
    flashinfer = importlib.import_module("flashinfer")
    tokens, input_scales = (x, None)
    if quantized_input:
        tokens, input_scales = flashinfer.fp4_quantize(x, layer.scale1, is_sf_swizzled_layout=True)
    w1_scales, w2_scales = (
        flashinfer.block_scale_interleave(scales).reshape(scales.shape).view(torch.int32) for scales in (layer.s1, layer.s2)
    )
    alpha1, alpha2 = layer.g1 / layer.scale1, layer.g2 / layer.scale2
    scales = (layer.scale1, w1_scales, alpha1, layer.scale2, w2_scales, alpha2)
    return MoeCall(tokens, input_scales, *route, layer.w1, layer.w2, scales, layer.shape.hidden)


def moe_expected(
    layer: MoeLayer, x: Tensor, route: tuple[Tensor, Tensor], inputs: Callable[[int], tuple[Tensor, Tensor]], rounds: bool
) -> Expected:
    """The layer in float64, expert by expert.

    ``inputs`` returns the activations as an expert gets them quantized, and how much each may differ; ``rounds``: intermediate
    values are rounded to bf16.
    """

    def to_bf16(value: Tensor) -> Tensor:
        return rounded(value, torch.bfloat16) if rounds else value

    experts, weights = route[0].long(), route[1].double()
    width = layer.shape.width
    values, plain, bound, magnitudes = (
        torch.zeros(len(x), layer.shape.hidden, dtype=torch.float64, device=DEVICE) for _ in range(4)
    )
    for expert in sorted(set(experts.flatten().tolist())):
        token, slot = torch.where(experts == expert)
        factor = weights[token, slot].unsqueeze(-1)
        w1 = dequantized(layer.w1[expert], layer.s1[expert]) * layer.g1[expert].double()
        w2 = dequantized(layer.w2[expert], layer.s2[expert]) * layer.g2[expert].double()
        activations, unsure = (tensor[token] for tensor in inputs(expert))
        sums, error = activations @ w1.T, (activations.abs() * ACCUMULATION + unsure) @ w1.abs().T
        ends = [to_bf16(sums + sign * error) for sign in (-1, 1)]
        products = torch.stack([a[:, :width] * torch.nn.functional.silu(b[:, width:]) for a in ends for b in ends])
        low, high = products.amin(0), products.amax(0)
        low, high = to_bf16(low - low.abs() * FUNCTIONS), to_bf16(high + high.abs() * FUNCTIONS)
        least, greatest = quantized_interval(low, high, layer.scale2[expert].double())
        middle = (least + greatest) / 2
        part = middle @ w2.T
        values.index_add_(0, token, part * factor)
        magnitudes.index_add_(0, token, part.abs() * factor)
        slack = (greatest - least) / 2 @ w2.abs().T + middle.abs() @ w2.abs().T * ACCUMULATION
        bound.index_add_(0, token, slack * factor)
        exact = x[token].double() @ w1.T
        plain.index_add_(0, token, (exact[:, :width] * torch.nn.functional.silu(exact[:, width:])) @ w2.T * factor)
    # An epilogue that finalizes rounds each contribution and each of their sums.
    roundings = (layer.shape.active + 1) * HALF_ULP[torch.bfloat16]
    return Expected(values, bound + roundings * magnitudes * 1.01 + 1e-30, plain)


def moe_faults(call: MoeCall, layer: MoeLayer) -> dict[str, MoeCall]:
    """Calls with a planted fault."""
    scales = call.scales

    def with_scale(at: int, value: Tensor) -> MoeCall:
        return replace(call, scales=(*scales[:at], value, *scales[at + 1 :]))

    halves = torch.cat(call.w1.chunk(2, dim=1)[::-1], dim=1)
    return {
        "gate and up change places": replace(call, w1=halves),
        "w1's scales are those of the expert before": with_scale(1, scales[1].roll(1, 0)),
        "w2's scales are those of the expert before": with_scale(4, scales[4].roll(1, 0)),
        "w1's scales are not interleaved": with_scale(1, layer.s1.contiguous().view(torch.int32)),
        "alpha of GEMM 1 is that of the expert before": with_scale(2, scales[2].roll(1)),
        "alpha of GEMM 2 is that of the expert before": with_scale(5, scales[5].roll(1)),
        "intermediate scale of the expert before": with_scale(3, scales[3].roll(1)),
        "routing weights of the slot before": replace(call, routing=call.routing.roll(1, 1).contiguous()),
        "one token's experts are those of the token before": replace(call, experts=call.experts.roll(1, 0).contiguous()),
    }
