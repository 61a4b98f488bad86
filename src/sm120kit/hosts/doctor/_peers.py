"""Whether NCCL uses P2P on a host: the driver's status and NCCL's variables.

Source: ncclGetLevel and ncclTopoCheckP2p in NCCL's src/graph/paths.cc.
"""

from __future__ import annotations

import re

from sm120kit.hosts.facts import Host

LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS")
"""Values of NCCL_P2P_LEVEL, nearest first."""
NEEDED = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
"""Topology class, nearest first -> the nearest level that includes it."""
_NUMBERED = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")


def p2p_level(value: str) -> str | None:
    """The level that NCCL reads from a value of NCCL_P2P_LEVEL; None if it ignores the value."""
    if value in LEVELS:
        return value
    number = re.match(r"0*([0-9]+)", value)
    return _NUMBERED[min(int(number[1][:4]), len(_NUMBERED) - 1)] if number else None


def p2p_disabled(value: str) -> bool:
    """Whether NCCL reads a value of NCCL_P2P_DISABLE as 1."""
    return re.match(r"\s*\+?(0[xX])?0*1(?![0-9])", value) is not None


def p2p_unused(host: Host) -> str:
    """The reason why NCCL does not use P2P between the GPUs of a host; "" if it does, or may.

    A status that is unknown counts as refused for GeForce, as by NVIDIA's driver, and as granted for other GPUs.
    """
    if all(pair.granted is None for pair in host.pairs) and any(gpu.consumer for gpu in host.gpus):
        return "NVIDIA's driver does not support P2P on GeForce"
    codes = {pair.granted for pair in host.pairs}
    if codes and not codes & {"OK", None}:
        return f"the driver refuses P2P ({', '.join(sorted(map(str, codes)))})"
    if p2p_disabled(host.environment.get("NCCL_P2P_DISABLE", "")):
        return "NCCL_P2P_DISABLE=1"
    level = p2p_level(host.environment.get("NCCL_P2P_LEVEL", ""))
    needed = {NEEDED[pair.kind] for pair in host.pairs if pair.kind in NEEDED}
    if level and needed and all(LEVELS.index(level) < LEVELS.index(name) for name in needed):
        return f"NCCL_P2P_LEVEL={level} excludes every pair"
    return ""
