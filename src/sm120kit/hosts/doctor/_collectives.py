"""Checks of NCCL and custom all-reduce: variables, the PyTorch allocator, and stale caches."""

from __future__ import annotations

from sm120kit.hosts.doctor import _linux, _p2p, _pcie
from sm120kit.hosts.doctor import _peers as peers
from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    Impact,
    Status,
    check,
    not_applicable,
    ok,
    problem,
    unknown,
)
from sm120kit.hosts.facts import Host
from sm120kit.hosts.facts._fact_records import PeerCache

SHIMS = {"libvgpu.so": "HAMi", "libvcuda.so": "gpu-manager", "libcuda-control.so": "gpu-manager"}
"""File name of a preloaded library that intercepts CUDA calls -> the program that installs it."""
CUSTOM_GPUS = 2
"""Number of GPUs without NVLink for which vLLM uses its custom all-reduce (custom_all_reduce.py)."""


@check("nccl-p2p-level")
def p2p_level(host: Host) -> Diagnosis:
    level = host.environment.get("NCCL_P2P_LEVEL")
    if level is None:
        return ok("not set: NCCL's default applies")
    if level in peers.LEVELS:
        return ok(f"NCCL_P2P_LEVEL={level}")
    kinds = [pair.kind for pair in host.pairs if pair.kind in peers.NEEDED]
    farthest = max(kinds, key=list(peers.NEEDED).index, default="SYS")
    fix = f"NCCL_P2P_LEVEL={peers.NEEDED[farthest]}, the name for this host's most distant pair ({farthest})"
    if peers.p2p_level(level):
        return problem(
            "nccl-p2p-level.numbered",
            Impact.MINOR,
            f"NCCL_P2P_LEVEL={level}, which NCCL reads as {peers.p2p_level(level)}",
            fix=fix,
        )
    return problem(
        "nccl-p2p-level.unknown", Impact.SLOWS, f"NCCL_P2P_LEVEL={level} is not a level: {', '.join(peers.LEVELS)}", fix=fix
    )


@check("nccl-p2p-disable")
def p2p_disable(host: Host) -> Diagnosis:
    value = host.environment.get("NCCL_P2P_DISABLE", "0")
    if value == "0":
        return ok("NCCL_P2P_DISABLE is not set")
    if not peers.p2p_disabled(value):
        return problem("nccl-p2p-disable.other", Impact.MINOR, f"NCCL_P2P_DISABLE={value}")
    if any(pair.granted not in ("OK", None) for pair in host.pairs):
        return ok("NCCL_P2P_DISABLE is set, and the driver refuses P2P on this host")
    return problem("nccl-p2p-disable", Impact.MINOR, "NCCL_P2P_DISABLE=1")


@check("allocator")
def allocator(host: Host) -> Diagnosis:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    expandable = [name for name in names if "expandable_segments:true" in host.environment.get(name, "").lower()]
    if expandable:
        custom = len(host.gpus) == CUSTOM_GPUS and not peers.p2p_unused(host)
        return problem(
            "allocator",
            Impact.BREAKS if custom else Impact.MINOR,
            f"{expandable[0]}: expandable_segments:True",
            fix=f"unset {expandable[0]}, or serve with --disable-custom-all-reduce",
        )
    return ok("no expandable segments")


@check("peer-cache")
def peer_cache(host: Host) -> Diagnosis:
    if not host.peer_caches:
        return not_applicable("no cached P2P results")
    stale = [cache.path for cache in host.peer_caches if _stale(cache, host)]
    if stale:
        return problem("peer-cache", Impact.BREAKS, ", ".join(stale), fix=f"rm {' '.join(stale)}")
    return ok("agrees with the driver")


def _stale(cache: PeerCache, host: Host) -> bool:
    """Whether a cache is unreadable, names GPUs that do not exist, or contradicts the driver."""
    if cache.verdicts is None:
        return True
    numbers = set(map(str, range(len(host.gpus))))
    if any(gpu not in numbers for pair in cache.verdicts for gpu in pair.split("->")):
        return True
    peers = [allowed for pair, allowed in cache.verdicts.items() if len(set(pair.split("->"))) == 2]
    refused = any(pair.granted not in ("OK", None) for pair in host.pairs)
    granted = all(pair.granted == "OK" for pair in host.pairs)
    return (refused and any(peers)) or (granted and not all(peers))


@check("preload")
def preload(host: Host) -> Diagnosis:
    shims = [name for name in host.preloaded if name.partition(".so")[0] + ".so" in SHIMS]
    if not shims:
        return ok(f"preloaded: {', '.join(host.preloaded) or 'nothing'}")
    owners = ", ".join(sorted({SHIMS[name.partition(".so")[0] + ".so"] for name in shims}))
    disabled = host.environment.get("CUDA_DISABLE_CONTROL", "").lower() == "true"
    return problem(
        "preload",
        Impact.MINOR if disabled or len(host.gpus) < 2 else Impact.BREAKS,
        f"{', '.join(shims)} ({owners}){', CUDA_DISABLE_CONTROL=true' if disabled else ''}",
    )


@check("pcie-ipc")
def pcie_ipc(host: Host) -> Diagnosis:
    verdicts = {each.name: each.diagnose(host) for each in (_p2p.grant, _linux.iommu, _pcie.acs)}
    lacking = [f"{name}: {verdict.fact}" for name, verdict in verdicts.items() if verdict.status is Status.PROBLEM]
    if lacking:
        return problem(
            "pcie-ipc",
            Impact.MINOR,
            "; ".join(lacking),
            fix=f"as for {', '.join(name for name, verdict in verdicts.items() if verdict.status is Status.PROBLEM)}; then "
            "sm120kit tune CONFIG measures it",
        )
    hidden = [name for name, verdict in verdicts.items() if verdict.status is Status.UNKNOWN]
    if hidden:
        return unknown(f"{' and '.join(hidden)} unknown", "sudo sm120kit doctor; sm120kit tune CONFIG measures it")
    return ok("P2P is granted, and neither IOMMU nor ACS redirects it; sm120kit tune CONFIG measures it")
