"""NCCL and what stands beside it: variables, the graph problem on AMD Turin, allocators, and caches that are out of date."""

from __future__ import annotations

from sm120kit.doctor.machine import TURIN_FAMILY
from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, not_applicable, ok, problem
from sm120kit.host import Host

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
DISTANCE = ("PIX", "PXB", "PHB", "NODE", "SYS")
LEVEL_FOR = {"NODE": "PHB"}
"""NCCL's word for a class: PHB means one NUMA node there."""
TURIN_GPUS = 8


@check(
    "nccl-p2p-level",
    "NCCL_P2P_LEVEL is a name",
    Scope.PAIR,
    "NCCL manual, environment variables (its integers changed in 2.4.7); " + WIKI,
)
def p2p_level(host: Host) -> Verdict:
    level = host.environment.get("NCCL_P2P_LEVEL")
    if level is None:
        return ok("not set: NCCL decides")
    if level.isdigit():
        kinds = [pair.kind for pair in host.pairs if pair.kind]
        farthest = max(kinds, key=DISTANCE.index, default="SYS")
        return problem(
            Impact.BREAKS,
            f"NCCL_P2P_LEVEL={level}",
            cause="numbers mean different things in different tables: 4 is SYS in one, one NUMA node in another",
            consequence="P2P is not used, or used too far, where NCCL deadlocks: GPUs at 100 % and 140 W, nothing happens",
            fix=f"NCCL_P2P_LEVEL={LEVEL_FOR.get(farthest, farthest)}, the name for the farthest pair here ({farthest})",
        )
    return ok(f"NCCL_P2P_LEVEL={level}")


@check("nccl-p2p-disable", "P2P is not turned off for NCCL", Scope.PAIR, f"{WIKI} optimization/nccl-tuning.md")
def p2p_disable(host: Host) -> Verdict:
    if host.environment.get("NCCL_P2P_DISABLE", "0") == "0":
        return ok("NCCL_P2P_DISABLE is not set")
    if any(pair.granted not in ("OK", None) for pair in host.pairs):
        return ok("NCCL_P2P_DISABLE is set, and the driver refuses P2P here")
    return problem(
        Impact.SLOWS,
        "NCCL_P2P_DISABLE is set",
        cause="a last resort against hangs that was left in place",
        consequence="70 instead of 90 tok/s for a single stream; large prefills and many streams may gain by it",
        fix="unset NCCL_P2P_DISABLE and look at the findings iommu, acs and hmm, which cause such hangs",
    )


@check(
    "turin-graph",
    "NCCL plans well on dual AMD Turin",
    Scope.PAIR,
    f"NVIDIA/nccl#2127, #2113; {WIKI} optimization/nccl-tuning.md",
)
def turin_graph(host: Host) -> Verdict:
    if host.cpu.family != TURIN_FAMILY or (host.cpu.sockets or 1) < 2 or len(host.gpus) < TURIN_GPUS:
        return not_applicable("concerns 8 GPUs on two sockets of AMD Turin")
    set_here = [name for name in ("NCCL_GRAPH_FILE", "NCCL_PROTO") if name in host.names]
    if set_here:
        return ok(f"{' and '.join(set_here)} set")
    return problem(
        Impact.SLOWS,
        f"{len(host.gpus)} GPUs on {host.cpu.sockets} x {host.cpu.model}, neither NCCL_GRAPH_FILE nor NCCL_PROTO set",
        cause="NCCL underestimates the links between Turin sockets and settles for a ring of 2 channels without protocol LL",
        consequence="all-reduce of 32 to 256 KB takes 1.5 to 1.9 times as long; first token at 8K after 9.1, not 1.1 s",
        fix="one of: NCCL_P2P_LEVEL=SYS NCCL_PROTO=LL,LL128,Simple (simplest; LL alone for decode only); NCCL_GRAPH_FILE with "
        "a graph for this board (not with DCP subgroups or 16 ranks, and gpu-memory-utilization at most 0.93); an NCCL with "
        "pull request 2127, which this check cannot see",
    )


@check(
    "allocator",
    "the allocator and custom all-reduce agree",
    Scope.PAIR,
    f"local-inference-lab/rtx6kpro models/glm47.md; {WIKI}",
)
def allocator(host: Host) -> Verdict:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    expandable = [name for name in names if "expandable_segments:true" in host.environment.get(name, "").lower()]
    if expandable:
        return problem(
            Impact.BREAKS,
            f"{expandable[0]}: expandable_segments:True",
            cause="memory in expandable segments has no handle that another process can open",
            consequence="custom and one-shot all-reduce end with: invalid argument (custom_all_reduce.cuh, pcie_allreduce.cu)",
            fix=f"unset {expandable[0]}, or serve with --disable-custom-all-reduce",
        )
    return ok("no expandable segments")


@check(
    "peer-cache",
    "vLLM's memory of P2P is true",
    Scope.PAIR,
    "noonghunna/club-3090 docs/PCIE_P2P.md §7; vLLM's gpu_p2p_access_check",
)
def peer_cache(host: Host) -> Verdict:
    if not host.peer_caches:
        return not_applicable("no cached P2P verdicts")
    count = len(host.gpus)
    refused = any(pair.granted not in ("OK", None) for pair in host.pairs)
    granted = all(pair.granted == "OK" for pair in host.pairs)
    stale = []
    for cache in host.peer_caches:
        pairs = cache.verdicts or {}
        strange = any(int(end) >= count for pair in pairs for end in pair.split("->"))
        apart = [allowed for pair, allowed in pairs.items() if len(set(pair.split("->"))) == 2]
        if cache.verdicts is None or strange or (refused and any(apart)) or (granted and not all(apart)):
            stale.append(cache.path)
    if stale:
        return problem(
            Impact.BREAKS,
            ", ".join(stale),
            cause="written before hardware or driver changed: it contradicts what the driver says now",
            consequence="vLLM uses P2P that is not there, or does not use what is",
            fix=f"rm {' '.join(stale)}",
        )
    return ok("agrees with the driver")


@check("kernel-cache", "compiled kernels are of one version", Scope.GPU, f"{WIKI} daily-summaries 2026-03-17, 2026-05-03")
def kernel_cache(host: Host) -> Verdict:
    if not host.kernel_caches:
        return not_applicable("no cached FlashInfer kernels")
    versions = sorted({place.partition("/")[0] for place in host.kernel_caches})
    if len(versions) > 1:
        return problem(
            Impact.MINOR,
            f"FlashInfer kernels of {', '.join(versions)}",
            cause="an upgrade leaves the old kernels behind",
            consequence="a start that waits for a stale lock, or kernels of another build; disk space",
            fix="remove the versions that you do not use from ~/.cache/flashinfer/",
        )
    return ok(f"FlashInfer kernels of {versions[0]}")


CHECKS: tuple[Check, ...] = (p2p_level, p2p_disable, turin_graph, allocator, peer_cache, kernel_cache)
