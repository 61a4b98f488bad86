"""Triton kernels of vLLM and SGLang: ``engine_kernels.py DIRECTORY [NAME...] [SEED...]`` prints a digest of each's results.

``engine_kernels.py DIRECTORY compare [FILE]`` compares them with float64 (engine_references.py), with the programs of
``src/sm12x_lab/operators`` on ``PYTHONPATH``, and writes a receipt.

DIRECTORY has the Python files of both wheels, ``vllm/`` and ``sglang/``. Only the modules of the kernels are executed: others
that they import are stand-ins, so that neither the engines' machine code nor their requirements are needed. Each kernel
computes the same bits in each run: none adds with atomics. Without a GPU: ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import hunt
import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"

OWN = (
    "vllm.v1.attention.ops.",
    "vllm.v1.sample.ops.topk_topp_triton",
    "vllm.third_party.flash_linear_attention.",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.model_executor.layers.quantization.utils.fp8_utils",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.utils.math_utils",
    "sglang.kernels.ops.attention.",
    "sglang.kernels.ops.gemm.fp8_kernel",
    "sglang.kernels.ops.moe.fused_moe_triton_kernels",
)
"""Modules that are executed, or packages whose modules are."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``OWN`` in a directory, and stand-ins for all others of the engines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("vllm", "sglang", "sgl_kernel"):
            return None
        file = self.directory.joinpath(*name.split(".")).with_suffix(".py")
        if name.startswith(OWN) and file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in KNOWN.get(module.__name__, {}).items():
            setattr(module, name, value)


class StandIn(ModuleType):
    """A module that has every name; decorators among them return what they decorate."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def unchanged(*arguments: Any, **keywords: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not keywords else lambda function: function


PLATFORM = MagicMock(
    fp8_dtype=lambda: torch.float8_e4m3fn,
    is_cuda=lambda: True,
    is_cuda_alike=lambda: True,
    is_rocm=lambda: False,
    is_xpu=lambda: False,
    is_cpu=lambda: False,
    has_device_capability=lambda *_: True,
    is_device_capability_family=lambda family: family == 120,
    get_device_capability=lambda *_: (12, 0),
)
NOT = dict.fromkeys(
    ("is_hip", "is_npu", "is_xpu", "is_cpu", "is_musa", "is_gfx95_supported", "is_gfx1250_supported", "is_sm90_supported"),
    lambda: False,
)
MODES = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD NVFP4 TURBOQUANT_K8V4"
KNOWN: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True, "tldevice": None},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
    "vllm.utils.platform_utils": {"num_compute_units": lambda *_: 132},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": IntEnum("KVQuantMode", MODES, start=0)},
    "vllm.utils.torch_utils": {"direct_register_custom_op": lambda *_, **__: None},
    "sglang.srt.utils": {
        **NOT,
        "is_cuda": lambda: True,
        "get_device_core_count": lambda *_: 132,
        "direct_register_custom_op": None,
    },
    "sglang.srt.utils.custom_op": {"register_custom_op": unchanged},
    "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
    "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
    "sglang.kernels.ops.attention.score_mod": {},
}


def found(name: str) -> Any:
    """A function of an engine by its module and name."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def values(*size: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def numbers(*elements: int) -> Tensor:
    return torch.tensor(elements, dtype=torch.int32, device=DEVICE)


HEADS, KEY_HEADS, WIDTH, PAGE, LENGTHS = 8, 2, 128, 16, (33, 200, 517)


def paged() -> tuple[Tensor, Tensor, Tensor]:
    """Caches of keys and values, and the pages of each sequence."""
    pages = max(-(-length // PAGE) for length in LENGTHS)
    table = torch.randperm(pages * len(LENGTHS), generator=torch.Generator().manual_seed(3)).int().view(len(LENGTHS), pages)
    keys, contents = (values(pages * len(LENGTHS), PAGE, KEY_HEADS, WIDTH, seed=seed) for seed in (1, 2))
    return keys, contents, table.to(DEVICE)


def vllm_unified(queries: tuple[int, ...]) -> Tensor:
    keys, contents, table = paged()
    starts = numbers(0, *(sum(queries[: i + 1]) for i in range(len(queries))))
    q = values(sum(queries), HEADS, WIDTH)
    out, one = torch.zeros_like(q), torch.ones(len(queries), KEY_HEADS, device=DEVICE)
    found("vllm.v1.attention.ops.triton_unified_attention.unified_attention")(
        *(
            q,
            keys,
            contents,
            out,
            starts,
            max(queries),
            numbers(*LENGTHS),
            max(LENGTHS),
            WIDTH**-0.5,
            True,
            (-1, -1),
            table,
            0.0,
        ),
        *(None, one, one),
    )
    return out


def vllm_decode() -> Tensor:
    keys, contents, table = paged()
    q, splits = values(len(LENGTHS), HEADS, WIDTH), 4
    out, sums = torch.zeros_like(q), torch.zeros(len(LENGTHS), HEADS, device=DEVICE)
    parts = torch.zeros(len(LENGTHS), HEADS, splits, WIDTH + 1, device=DEVICE)
    found("vllm.v1.attention.ops.triton_decode_attention.decode_attention_fwd")(
        q, keys, contents, out, sums, table, numbers(*LENGTHS), parts, splits, WIDTH**-0.5, PAGE
    )
    return out


def vllm_prefill() -> Tensor:
    q, k, v = (values(sum(LENGTHS), heads, WIDTH, seed=seed) for seed, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
    out = torch.zeros_like(q)
    starts = numbers(0, *(sum(LENGTHS[:i]) for i in range(1, len(LENGTHS))))
    found("vllm.v1.attention.ops.triton_prefill_attention.context_attention_fwd")(
        q, k, v, out, starts, numbers(*LENGTHS), max(LENGTHS)
    )
    return out


def scaled_by_blocks(function: str) -> Tensor:
    """An FP8 product of 200 x 384 x 512 with scales by blocks of 128."""
    a, b = (values(size, 512, seed=size).to(torch.float8_e4m3fn) for size in (200, 384))
    scales = (values(200, 4, seed=5, dtype=torch.float32).abs(), values(3, 4, seed=6, dtype=torch.float32).abs())
    result: Tensor = found(function)(a, b, *scales, [128, 128], torch.bfloat16)
    return result


def vllm_experts() -> Tensor:
    """A GEMM of 4 experts, two for each of 64 tokens."""
    block, tokens = 16, 64
    x, w = values(tokens, 256), values(4, 384, 256, seed=1)
    pairs = torch.arange(tokens * 2).view(4, 32)  # pair i is token i // 2; each expert has 32
    out = torch.zeros(tokens, 2, 384, dtype=torch.bfloat16, device=DEVICE)
    experts = numbers(*(expert for expert in range(4) for _ in range(32 // block)))
    config = {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    module.resolve_moe_use_td = lambda: False
    module.invoke_fused_moe_triton_kernel(
        *(x, w, out, None, None, None, pairs.flatten().int().to(DEVICE), experts, numbers(tokens * 2), False, 2, config),
        *(tl.bfloat16, False, False, False, False, False),
    )
    return out


def vllm_top() -> Tensor:
    logits = values(16, 32_000, dtype=torch.float32)
    k, p = numbers(*range(10, 170, 10)), torch.linspace(0.5, 0.95, 16, device=DEVICE)
    result: Tensor = found("vllm.v1.sample.ops.topk_topp_triton.apply_top_k_top_p_triton")(logits, k, p)
    return result.nan_to_num()


def vllm_delta_rule() -> Tensor:
    """The chunked gated delta rule of Qwen3.5."""
    q, k, v = (values(1, 512, 4, 128, seed=seed) for seed in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    gate, beta = (values(1, 512, 4, seed=seed, dtype=torch.float32) for seed in (4, 5))
    function = found("vllm.third_party.flash_linear_attention.ops.chunk.chunk_gated_delta_rule")
    state = torch.zeros(1, 4, 128, 128, device=DEVICE)
    out, _ = function(q, k, v, torch.nn.functional.logsigmoid(gate), beta.sigmoid().bfloat16(), initial_state=state)
    result: Tensor = out
    return result


def sglang_decode() -> Tensor:
    total, splits = sum(LENGTHS), 4
    k, v = (values(total, KEY_HEADS, WIDTH, seed=seed) for seed in (1, 2))
    q = values(len(LENGTHS), HEADS, WIDTH)
    out, parts = torch.zeros_like(q), torch.zeros(len(LENGTHS), HEADS, splits, WIDTH, device=DEVICE)
    sums = torch.zeros(len(LENGTHS), HEADS, splits, device=DEVICE)
    starts = numbers(0, *(sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))))
    found("sglang.kernels.ops.attention.decode_attention.decode_attention_fwd")(
        *(q, k, v, out, starts, torch.arange(total, device=DEVICE), parts, sums, numbers(splits, splits, splits), splits),
        *(WIDTH**-0.5, 1.0, 1.0),
    )
    return out


def sglang_extend() -> Tensor:
    """Each sequence has 32 new tokens behind those in the cache."""
    new, total = 32, sum(LENGTHS)
    k, v = (values(total, KEY_HEADS, WIDTH, seed=seed) for seed in (1, 2))
    q, new_k, new_v = (values(new * 3, heads, WIDTH, seed=seed) for seed, heads in ((3, HEADS), (4, KEY_HEADS), (5, KEY_HEADS)))
    out, starts = torch.zeros_like(q), numbers(0, *(sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))))
    found("sglang.kernels.ops.attention.extend_attention.extend_attention_fwd")(
        *(q, new_k, new_v, out, k, v, numbers(0, new, 2 * new, 3 * new), starts, torch.arange(total, device=DEVICE)),
        *(None, True, None, new, 1.0, 1.0),
    )
    return out


FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils.w8a8_triton_block_scaled_mm"
CALLS: dict[str, Callable[[], Tensor]] = {
    "vLLM unified attention, prefill": lambda: vllm_unified((33, 64, 100)),
    "vLLM unified attention, decode": lambda: vllm_unified((1, 1, 1)),
    "vLLM decode attention": vllm_decode,
    "vLLM prefill attention": vllm_prefill,
    "vLLM FP8 GEMM": lambda: scaled_by_blocks(FP8),
    "vLLM experts": vllm_experts,
    "vLLM top-k and top-p": vllm_top,
    "vLLM gated delta rule": vllm_delta_rule,
    "SGLang decode attention": sglang_decode,
    "SGLang extend attention": sglang_extend,
    "SGLang FP8 GEMM": lambda: scaled_by_blocks("sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton"),
}


def lines(names: list[str]) -> Iterator[str]:
    """A line for each kernel."""
    for name in names:
        try:
            result = CALLS[name]()
        except Exception as error:  # the others run all the same
            yield f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        content = result.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        odd = int((~result.isfinite()).sum())
        yield f"{name}: {hashlib.sha256(content).hexdigest()[:16]}{f', {odd} not finite' if odd else ''}"


def compared(receipt: Path | None) -> int:
    """Compare each kernel with its reference, and with that of inputs with a fault, which must differ."""
    import engine_references as references
    from reference import Expected, attempt
    from report import OperatorReport

    report = OperatorReport("engine-kernels", ("triton", "torch"))
    for name, call in CALLS.items():
        outputs, bound = references.expected(name)
        row = attempt(name, f"{'x'.join(map(str, outputs.shape))}", Expected(outputs, bound, outputs), call)
        report.add(row)
        outputs, bound = references.expected(name, fault=True)
        report.fault(f"{name}: rows are those of the row before", attempt("", "", Expected(outputs, bound, outputs), call))
    return int(report.finish(receipt))


def main() -> int:
    directory, *words = sys.argv[1:]
    autotune = triton.autotune  # which measures, so that its choice differs from run to run
    triton.autotune = lambda configs, *rest, **keywords: autotune(configs[:1], *rest, **keywords)
    sys.meta_path.insert(0, StandIns(Path(directory).resolve()))
    seeds = [int(word) for word in words if word.isdecimal()]
    chosen = [name for name in CALLS if name in words] or list(CALLS)
    if words[:1] == ["compare"]:
        return compared(Path(words[1]) if words[1:] else None)
    if seeds:
        return hunt.forked(seeds, lambda: lines(chosen))
    for line in lines(chosen):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
