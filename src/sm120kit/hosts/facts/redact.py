"""Redact files and outputs that may contain secrets, while they are read: neither facts nor recordings contain the rest."""

from __future__ import annotations

import re
from collections.abc import Callable

READ_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "HOME",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_PROTO",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "VLLM_SKIP_P2P_CHECK",
    }
)
"""Variables whose values the checks use; none of them can contain a secret."""
NAMED_VARIABLES = re.compile(r"(NCCL|CUDA|NVIDIA|PYTORCH|TORCH|VLLM|SGLANG|FLASHINFER|TRITON|OMP)_\w+")
"""Variables of which only the name is kept, with an empty value."""
KERNEL_OPTIONS = re.compile(r"(amd_|intel_)?iommu(=|$)|pcie?[_=]|nvme_core\.|vfio|nvidia|nouveau|numa_|mitigations")
DISKS = frozenset({"ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "nfs", "nfs4", "overlay"})
PERSONAL = ("serial", "uuid", "gpu_uuid", "pid", "process_name", "gpu_part_number", "board_id", "hostname", "platformInfo")


def _environment(text: str) -> str:
    pairs = [variable.partition("=") for variable in text.split("\0") if variable]
    kept = [(name, value if name in READ_VARIABLES else "") for name, _, value in pairs]
    return "\0".join(
        f"{name}={value}" for name, value in sorted(kept) if name in READ_VARIABLES or NAMED_VARIABLES.fullmatch(name)
    )


def _kernel_options(text: str) -> str:
    return " ".join(option for option in text.split() if KERNEL_OPTIONS.match(option))


def _mounts(text: str) -> str:
    rows = [line.split() for line in text.splitlines()]
    sizes = {row[1]: re.search(r"\bsize=\w+", row[3]) for row in rows if len(row) > 3}
    return "\n".join(
        f"- {row[1]} {row[2]} {size[0] if (size := sizes[row[1]]) else '-'}"
        for row in rows
        if len(row) > 3 and (row[2] in DISKS or row[1] == "/dev/shm")
    )


def _docker(text: str) -> str:
    return "nvidia-container-runtime" if "nvidia-container-runtime" in text else ""


def _smi(text: str) -> str:
    return re.sub(rf"<({'|'.join(PERSONAL)})>.*?</\1>", "", text, flags=re.DOTALL)


REDACTIONS: dict[str, Callable[[str], str]] = {
    "/proc/self/environ": _environment,
    "/proc/cmdline": _kernel_options,
    "/proc/self/mounts": _mounts,
    "/etc/docker/daemon.json": _docker,
    "commands/nvidia-smi-q.xml": _smi,
}
"""Path or command -> function that returns the part to keep. Idempotent, so that a recording can be read like a host."""
