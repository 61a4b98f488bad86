"""Checks of GB10 (DGX Spark), whose memory CPU and GPU share."""

from __future__ import annotations

from sm120kit.hosts.doctor._findings import Diagnosis, HostCheck, Impact, Scope, check, ok, problem, unknown
from sm120kit.hosts.facts import Host

FREE_SHARE, SCARCE_SHARE = 0.9, 0.7
"""Below the second share no model of a configuration fits, unless a running server occupies the memory."""

WITHOUT_CONTIGUOUS_MEMORY = ("7.0.0-1019-nvidia", "7.0.0-31-")
"""Releases of kernels of DGX OS on which owners report it."""


@check(
    "unified-headroom",
    "90 % of the unified memory is available",
    Scope.UNIFIED,
    "vllm-project/vllm#46307, #56824; eugr/spark-vllm-docker#321",
)
def headroom(host: Host) -> Diagnosis:
    total, available = host.memory_total, host.memory_available
    if total is None or available is None:
        return unknown(host.missing_reason("/proc/meminfo"), "free -h")
    fact = f"{available >> 30} of {total >> 30} GiB available"
    if available < FREE_SHARE * total:
        occupied = available < SCARCE_SHARE * total and not any(gpu.processes for gpu in host.gpus)
        return problem(
            Impact.SLOWS if occupied else Impact.MINOR,
            fact,
            cause="other programs or the page cache occupy memory that CPU and GPU share",
            consequence="gpu-memory-utilization is a share of the total: at 0.85 the host swaps or freezes",
            fix="stop the desktop and other servers; sync; echo 3 | sudo tee /proc/sys/vm/drop_caches; start with 0.70",
        )
    return ok(fact)


@check(
    "unified-guard",
    "a daemon that prevents memory exhaustion is running",
    Scope.UNIFIED,
    "vllm-project/vllm#46307; NVIDIA/dgx-spark-playbooks#97",
)
def guard(host: Host) -> Diagnosis:
    if host.guards is None:
        return unknown("systemd's control groups are not visible", "systemctl is-active earlyoom systemd-oomd")
    if not host.guards:
        return problem(
            Impact.MINOR,
            "none of earlyoom, systemd-oomd and nohang is running",
            cause="the kernel's OOM killer acts only when no memory is left, and it cannot reclaim the GPU's share",
            consequence="an engine that allocates too much freezes the whole machine until it is switched off",
            fix="sudo apt install earlyoom && sudo systemctl enable --now earlyoom",
        )
    return ok(f"{', '.join(host.guards)} is running")


@check(
    "unified-kernel",
    "the kernel has contiguous memory for RoCE",
    Scope.UNIFIED,
    "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#259; eugr/spark-vllm-docker#389",
)
def kernel(host: Host) -> Diagnosis:
    if host.kernel is None:
        return unknown(host.missing_reason("/proc/sys/kernel/osrelease"), "uname -r")
    if host.kernel.startswith(WITHOUT_CONTIGUOUS_MEMORY):
        return problem(
            Impact.MINOR,
            f"Linux {host.kernel}",
            cause="with kexec handover this kernel reserves no contiguous memory (CmaTotal is 0 kB in /proc/meminfo)",
            consequence="several machines: NCCL cannot register memory with RoCE (ibv_reg_mr: Cannot allocate memory)",
            fix="kho=off on the kernel command line, or boot kernel 6.17",
        )
    return ok(f"Linux {host.kernel}")


CHECKS: tuple[HostCheck, ...] = (headroom, guard, kernel)
