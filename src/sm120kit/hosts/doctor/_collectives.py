"""Checks of NCCL and custom all-reduce: variables, tuning for AMD Turin, the PyTorch allocator, and stale caches."""

from __future__ import annotations

from sm120kit.hosts.doctor import _linux, _p2p, _pcie
from sm120kit.hosts.doctor import _peers as peers
from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    HostCheck,
    Impact,
    Scope,
    Status,
    check,
    not_applicable,
    ok,
    problem,
    unknown,
)
from sm120kit.hosts.doctor._machine import TURIN_FAMILY
from sm120kit.hosts.facts import Host
from sm120kit.hosts.facts._fact_records import PeerCache

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
SHIMS = {"libvgpu.so": "HAMi", "libvcuda.so": "gpu-manager", "libcuda-control.so": "gpu-manager"}
"""File name of a preloaded library that intercepts CUDA calls -> the program that installs it."""
TURIN_GPUS = 8
CUSTOM_GPUS = 2
"""Number of GPUs without NVLink for which vLLM uses its custom all-reduce (custom_all_reduce.py)."""


@check(
    "nccl-p2p-level",
    "NCCL_P2P_LEVEL is a name that NCCL accepts",
    Scope.PAIR,
    "ncclGetLevel in NCCL's src/graph/paths.cc: other names are ignored; NCCL manual, environment variables; " + WIKI,
)
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
            Impact.MINOR,
            f"NCCL_P2P_LEVEL={level}, which NCCL reads as {peers.p2p_level(level)}",
            cause="a number of NCCL before 2.4.7; other tables of these numbers exist, in which 4 is one NUMA node",
            consequence="P2P may be used between other GPUs than intended",
            fix=fix,
        )
    return problem(
        Impact.SLOWS,
        f"NCCL_P2P_LEVEL={level} is not a level: {', '.join(peers.LEVELS)}",
        cause="a typing error; names are in capitals, and NODE is called PHB",
        consequence="NCCL ignores the variable without a message; its default is P2P within PCIe switches, or between the only "
        "two GPUs of an AMD host",
        fix=fix,
    )


@check("nccl-p2p-disable", "P2P is not disabled in NCCL", Scope.PAIR, f"{WIKI} optimization/nccl-tuning.md")
def p2p_disable(host: Host) -> Diagnosis:
    value = host.environment.get("NCCL_P2P_DISABLE", "0")
    if value == "0":
        return ok("NCCL_P2P_DISABLE is not set")
    if not peers.p2p_disabled(value):
        return problem(
            Impact.MINOR,
            f"NCCL_P2P_DISABLE={value}",
            cause="NCCL compares the number with 1; other values have no effect",
            consequence="P2P remains enabled, and a hang that this was to prevent remains",
            fix="NCCL_P2P_DISABLE=1, or unset it",
        )
    if any(pair.granted not in ("OK", None) for pair in host.pairs):
        return ok("NCCL_P2P_DISABLE is set, and the driver refuses P2P on this host")
    return problem(
        Impact.MINOR,
        "NCCL_P2P_DISABLE=1",
        cause="a workaround for hangs that was not removed",
        consequence="70 instead of 90 tok/s for a single stream; large prefills and many streams may be faster with it",
        fix="unset NCCL_P2P_DISABLE; the findings iommu, acs and hmm list causes of such hangs",
    )


@check(
    "turin-graph",
    "NCCL is tuned for dual-socket AMD Turin",
    Scope.PAIR,
    f"NVIDIA/nccl#2127, #2113; {WIKI} optimization/nccl-tuning.md",
)
def turin_graph(host: Host) -> Diagnosis:
    if host.cpu.family != TURIN_FAMILY or (host.cpu.sockets or 1) < 2 or len(host.gpus) < TURIN_GPUS:
        return not_applicable("applies to 8 GPUs on dual-socket AMD Turin")
    tuning = [name for name in ("NCCL_GRAPH_FILE", "NCCL_PROTO") if name in host.names]
    if tuning:
        return ok(f"{' and '.join(tuning)} set")
    return problem(
        Impact.SLOWS,
        f"{len(host.gpus)} GPUs on {host.cpu.sockets} x {host.cpu.model}; neither NCCL_GRAPH_FILE nor NCCL_PROTO is set",
        cause="NCCL underestimates the links between Turin sockets and selects a ring of 2 channels without protocol LL",
        consequence="all-reduce of 32 to 256 KB takes 1.5 to 1.9 times as long; TTFT at 8K tokens is 9.1 instead of 1.1 s",
        fix="one of: NCCL_P2P_LEVEL=SYS NCCL_PROTO=LL,LL128,Simple (simplest; LL alone for decode only); NCCL_GRAPH_FILE with "
        "a graph for this board (not with DCP subgroups or 16 ranks, and gpu-memory-utilization at most 0.93); an NCCL with "
        "pull request 2127, which this check cannot detect",
    )


@check(
    "allocator",
    "the PyTorch allocator is compatible with custom all-reduce",
    Scope.PAIR,
    f"local-inference-lab/rtx6kpro models/glm47.md; {WIKI}",
)
def allocator(host: Host) -> Diagnosis:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    expandable = [name for name in names if "expandable_segments:true" in host.environment.get(name, "").lower()]
    if expandable:
        custom = len(host.gpus) == CUSTOM_GPUS and not peers.p2p_unused(host)
        return problem(
            Impact.BREAKS if custom else Impact.MINOR,
            f"{expandable[0]}: expandable_segments:True",
            cause="memory in expandable segments has no handle that another process can open",
            consequence="custom and one-shot all-reduce fail: invalid argument (custom_all_reduce.cuh, pcie_allreduce.cu)",
            fix=f"unset {expandable[0]}, or serve with --disable-custom-all-reduce",
        )
    return ok("no expandable segments")


@check(
    "peer-cache",
    "vLLM's cached P2P results agree with the driver",
    Scope.PAIR,
    "noonghunna/club-3090 docs/PCIE_P2P.md §7; vLLM's gpu_p2p_access_check",
)
def peer_cache(host: Host) -> Diagnosis:
    if not host.peer_caches:
        return not_applicable("no cached P2P results")
    stale = [cache.path for cache in host.peer_caches if _stale(cache, host)]
    if stale:
        return problem(
            Impact.BREAKS,
            ", ".join(stale),
            cause="written before the hardware or the driver changed: contradicts what the driver reports now",
            consequence="vLLM uses P2P that does not exist, or does not use P2P that does",
            fix=f"rm {' '.join(stale)}",
        )
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


@check(
    "preload",
    "no preloaded library intercepts CUDA",
    Scope.GPU,
    "Project-HAMi/HAMi#2641, #2760, #1834; ld.so(8)",
)
def preload(host: Host) -> Diagnosis:
    shims = [name for name in host.preloaded if name.partition(".so")[0] + ".so" in SHIMS]
    if not shims:
        return ok(f"preloaded: {', '.join(host.preloaded) or 'nothing'}")
    owners = ", ".join(sorted({SHIMS[name.partition(".so")[0] + ".so"] for name in shims}))
    disabled = host.environment.get("CUDA_DISABLE_CONTROL", "").lower() == "true"
    return problem(
        Impact.MINOR if disabled or len(host.gpus) < 2 else Impact.BREAKS,
        f"{', '.join(shims)} ({owners}){', CUDA_DISABLE_CONTROL=true' if disabled else ''}",
        cause="a library that shares GPUs between containers is loaded into every program and intercepts CUDA's calls",
        consequence='NCCL hangs in ncclCommInitRank, after the line "vLLM is using nccl" of vLLM; P2P may appear absent',
        fix="CUDA_DISABLE_CONTROL=true in containers with whole GPUs, or a scheduler that does not add the library",
    )


@check(
    "pcie-ipc",
    "an all-reduce by PCIe IPC has what it needs",
    Scope.PAIR,
    "FlashInfer 0.7.2.post1 comm/pcie_ipc_ar.py: ranks read and write each other's memory; docs/tune.md",
    generic=True,
)
def pcie_ipc(host: Host) -> Diagnosis:
    verdicts = {each.name: each.diagnose(host) for each in (_p2p.grant, _linux.iommu, _pcie.acs)}
    lacking = [f"{name}: {verdict.fact}" for name, verdict in verdicts.items() if verdict.status is Status.PROBLEM]
    if lacking:
        return problem(
            Impact.MINOR,
            "; ".join(lacking),
            cause="its ranks must reach each other's memory directly: P2P granted, and no IOMMU or ACS in between",
            consequence="VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC and SGLANG_ENABLE_PCIE_IPC_ALLREDUCE fail, hang, or are slower "
            "than NCCL",
            fix=f"as for {', '.join(name for name, verdict in verdicts.items() if verdict.status is Status.PROBLEM)}; then "
            "sm120kit tune CONFIG measures it",
        )
    hidden = [name for name, verdict in verdicts.items() if verdict.status is Status.UNKNOWN]
    if hidden:
        return unknown(f"{' and '.join(hidden)} unknown", "sudo sm120kit doctor; sm120kit tune CONFIG measures it")
    return ok("P2P is granted, and neither IOMMU nor ACS redirects it; sm120kit tune CONFIG measures it")


CHECKS: tuple[HostCheck, ...] = (preload, p2p_level, p2p_disable, pcie_ipc, turin_graph, allocator, peer_cache)
