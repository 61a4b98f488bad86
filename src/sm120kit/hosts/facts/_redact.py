"""Leave out what may identify a person or a machine, or be a secret: the facts of a host are for strangers."""

import re

READ_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_DISABLE_CONTROL",
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
"""Variables of which only the name is kept."""
KERNEL_LOG = re.compile(
    r"NVRM|nvidia|AMD-Vi|DMAR|IO_PAGE_FAULT|pcieport|AER|BAR \d|Unknown option|Unknown kernel command line"
    r"|out of memory|oom-kill|mlx5.*(?:fail|err\b)",
    re.IGNORECASE,
)
LINE_CHARACTERS = 1000
"""Part of a line of the kernel's log that is kept."""
_KILLED = re.compile(r"Killed process \d+ \(([^)]{0,40})\)")
_ENGINE = re.compile(r"vllm|sglang|python|ray|trtllm|ptxas|cicc|nvcc|ninja", re.IGNORECASE)
_IDENTIFIERS = (
    (re.compile(r"(?i)\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"), "MAC"),
    (re.compile(r"(?i)\b(?:(?:GPU|MIG)-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"/(home|media)/[^/\s:\0]+"), r"/\1/user"),
)


def without_identifiers(text: str) -> str:
    """A text without MAC addresses, UUIDs and names of home directories."""
    for identifier, replacement in _IDENTIFIERS:
        text = identifier.sub(replacement, text)
    return text


def kernel_lines(text: str) -> tuple[str, ...]:
    """The lines of the kernel's log on NVIDIA's driver, PCI, the IOMMU and memory, without processes but engines."""
    lines = [line[:LINE_CHARACTERS] for line in text.splitlines() if KERNEL_LOG.search(line[:LINE_CHARACTERS])]
    named = (_KILLED.sub(_killed, re.sub(r"(pid|name)=('[^']*'|[^,\s]+)", r"\1=", line)) for line in lines)
    return tuple(map(without_identifiers, named))


def _killed(match: re.Match[str]) -> str:
    """A process that the kernel killed, with its name only if it is an engine's."""
    return f"Killed process 1 ({match[1] if _ENGINE.match(match[1]) else 'process'})"
