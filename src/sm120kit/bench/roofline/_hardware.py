"""Published properties of the hardware: memory bandwidth, arithmetic rate, duration of all-reduces."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

BYTES_PER_CLOCK = 2 * 512 / 8
"""GB202's memory: two transfers per clock as nvidia-smi shows it, 512 bits wide."""


@dataclass(frozen=True)
class GpuKind:
    """A GPU: ``bandwidth`` in bytes per second, ``fp4_flops`` dense; its name contains one of ``markers``."""

    name: str
    markers: tuple[str, ...]
    bandwidth: float
    fp4_flops: float
    source: str


GPUS = (
    GpuKind(
        "RTX PRO 6000 Blackwell Server Edition",
        ("RTX PRO 6000 Blackwell Server",),
        12481e6 * BYTES_PER_CLOCK,
        2000e12,
        "memory clock 12,481 MHz under load: github.com/Visual-Synthesizer/rtx6kpro hardware/blackwell-power-limit-sweep.md; "
        "4,000 TOPS of FP4 with sparsity, half of it without: NVIDIA",
    ),
    GpuKind(
        "RTX PRO 6000 Blackwell",
        ("RTX PRO 6000",),
        14001e6 * BYTES_PER_CLOCK,
        2000e12,
        "1,792 GB/s, and 4,000 TOPS of FP4 with sparsity: NVIDIA; 14,001 MHz: MarcoPizeta/flash-next-rtxpro6000-bench",
    ),
    GpuKind(
        "GeForce RTX 5090",
        ("RTX 5090",),
        14001e6 * BYTES_PER_CLOCK,
        1676e12,
        "1,792 GB/s and 3,352 TOPS of FP4 with sparsity: NVIDIA",
    ),
    GpuKind("GB10", ("GB10",), 273e9, 500e12, "273 GB/s and 1,000 TOPS of FP4 with sparsity: NVIDIA, DGX Spark"),
)


def gpu_kind(text: str) -> GpuKind | None:
    """The GPU named in ``text``, by the first matching row; None if it is not in the table."""
    return next((gpu for gpu in GPUS if any(marker in text for marker in gpu.markers)), None)


ONE_NODE_US = ((1 << 10, 6.1), (16 << 10, 7.7), (64 << 10, 11.8), (256 << 10, 28.7), (1 << 20, 85.2))
"""(bytes, microseconds) of an all-reduce over 4 GPUs of one NUMA node: the faster of one-shot and NCCL at each size.

github.com/local-inference-lab/rtx6kpro@e2c2b95 optimization/pcie-oneshot-allreduce.md. Two GPUs are assumed to be as fast.
"""

EIGHT_GPUS_US = 26.2
"""The minimum for 8 GPUs: 32 KB over a ring of 2 channels, same wiki, optimization/nccl-tuning.md."""


def all_reduce_seconds(size: float, gpus: int) -> float:
    """Seconds of an all-reduce of ``size`` bytes by the published times.

    Linear between the published sizes; proportional to the size beyond the largest.
    """
    if gpus == 1:
        return 0.0
    return max(EIGHT_GPUS_US if gpus > 4 else 0.0, _published_us(size)) / 1e6


def _published_us(size: float) -> float:
    first, last = ONE_NODE_US[0], ONE_NODE_US[-1]
    if size <= first[0]:
        return first[1]
    for (low, low_us), (high, high_us) in pairwise(ONE_NODE_US):
        if size <= high:
            return low_us + (high_us - low_us) * (size - low) / (high - low)
    return last[1] * size / last[0]
