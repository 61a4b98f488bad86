"""Redact what may identify a person or a machine, or be a secret, while it is read: neither facts nor recordings contain it."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from sm120kit.hosts.facts._capabilities import extended

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
"""Variables of which only the name is kept, with an empty value."""
HOME = "/home/user"
"""Home directory in recordings."""
KERNEL_OPTIONS = re.compile(r"(amd_|intel_)?iommu(=|$)|pcie?[_=]|nvme_core\.|vfio|nvidia|nouveau|numa_|mitigations")
KERNEL_LOG = re.compile(
    r"NVRM|nvidia|AMD-Vi|DMAR|IO_PAGE_FAULT|pcieport|AER|BAR \d|Unknown option|Unknown kernel command line"
    r"|out of memory|oom-kill|mlx5.*(?:fail|err\b)",
    re.IGNORECASE,
)
DISKS = frozenset({"ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "nfs", "nfs4", "overlay"})
LINE_CHARACTERS = 1000
"""Part of a line of the kernel's log that is kept."""
_KILLED = re.compile(r"Killed process \d+ \(([^)]{0,40})\)")
_ENGINE = re.compile(r"vllm|sglang|python|ray|trtllm|ptxas|cicc|nvcc|ninja", re.IGNORECASE)
PERSONAL = r"\w{0,40}(?:serial|uuid|guid|hostname|part_number)\w{0,40}|pid|process_name|board_id|platformInfo"
_IDENTIFIERS = (
    (re.compile(rb"(?i)\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"), b"MAC"),
    (re.compile(rb"(?i)\b(?:(?:GPU|MIG)-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), b"UUID"),
    (re.compile(rb"/(home|media)/[^/\s:\0]+"), rb"/\1/user"),
)
_SERIAL_NUMBER = 0x0003
"""Extended capability with a device's serial number (PCI Express Base Specification, Device Serial Number)."""


def _environment(text: str) -> str:
    pairs = [variable.partition("=") for variable in text.split("\0") if variable]
    values = {name: value for name, _, value in pairs if name in READ_VARIABLES}
    values |= {name: "" for name, _, _ in pairs if name not in values and NAMED_VARIABLES.fullmatch(name)}
    values |= {name: _file_names(value) for name, _, value in pairs if name == "LD_PRELOAD"}
    values |= {name: HOME for name, _, value in pairs if name == "HOME"}
    return "\0".join(f"{name}={values[name]}" for name in sorted(values))


def _file_names(text: str) -> str:
    return ":".join(path.rpartition("/")[2] for path in re.split(r"[\s:]+", text) if path)


def _kernel_options(text: str) -> str:
    return " ".join(option for option in text.split() if KERNEL_OPTIONS.match(option))


def _kernel_log(text: str) -> str:
    lines = [line[:LINE_CHARACTERS] for line in text.splitlines() if KERNEL_LOG.search(line[:LINE_CHARACTERS])]
    return "\n".join(_KILLED.sub(_killed, re.sub(r"(pid|name)=('[^']*'|[^,\s]+)", r"\1=", line)) for line in lines)


def _killed(match: re.Match[str]) -> str:
    """A process that the kernel killed, with its name only if it is an engine's."""
    return f"Killed process 1 ({match[1] if _ENGINE.match(match[1]) else 'process'})"


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
    return re.sub(rf"<({PERSONAL})>.{{0,4096}}?</\1>", "", text, flags=re.DOTALL)


def _model(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("Model:"))


def _process(text: str) -> str:
    return re.sub(r"\(.*\)", "()", text, flags=re.DOTALL)


def _builder(text: str) -> str:
    return re.sub(r"(?<!\S)\S*@\S*", "", text)


_REDACTIONS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("/proc/self/environ", _environment),
    ("/proc/cmdline", _kernel_options),
    ("/proc/version", _builder),
    ("/proc/self/mounts", _mounts),
    ("/proc/*/stat", _process),
    ("/proc/driver/nvidia/gpus/*/information", _model),
    ("/etc/ld.so.preload", _file_names),
    ("/etc/docker/daemon.json", _docker),
    ("commands/nvidia-smi-q.xml", _smi),
    ("commands/dmesg.txt", _kernel_log),
)
"""Path or command -> function that returns the part to keep. Idempotent, so that a recording can be read like a host."""


def redacted(path: str, content: bytes) -> bytes:
    """The part of a file, or of a command's output, that is kept."""
    if path.endswith("/config"):
        return _without_serial_number(content)
    for pattern, keep in _REDACTIONS:
        if fnmatchcase(path, pattern):
            content = keep(content.decode(errors="replace")).encode()
    for identifier, replacement in _IDENTIFIERS:
        content = identifier.sub(replacement, content)
    return content


def _without_serial_number(config: bytes) -> bytes:
    offset = extended(config, _SERIAL_NUMBER)
    if not offset:
        return config
    space = bytearray(config)
    space[offset + 4 : offset + 12] = bytes(len(space[offset + 4 : offset + 12]))
    return bytes(space)
