"""GB10 (DGX Spark): one memory for processor and GPU."""

from __future__ import annotations

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, ok, problem, unknown
from sm120kit.host import Host

FREE_SHARE = 0.9


@check(
    "unified-headroom",
    "memory is free before a server starts",
    Scope.UNIFIED,
    "vllm-project/vllm#46307, #56824; eugr/spark-vllm-docker#321",
)
def headroom(host: Host) -> Verdict:
    total, available = host.memory_total, host.memory_available
    if total is None or available is None:
        return unknown(host.why("/proc/meminfo"), "free -h")
    fact = f"{available >> 30} of {total >> 30} GiB available"
    if available < FREE_SHARE * total:
        return problem(
            Impact.SLOWS,
            fact,
            cause="other programs or the page cache hold memory that GPU and processor share",
            consequence="gpu-memory-utilization counts from the whole: at 0.85 the host swaps or freezes",
            fix="stop the desktop and other servers; sync; echo 3 | sudo tee /proc/sys/vm/drop_caches; begin with 0.70",
        )
    return ok(fact)


@check(
    "unified-guard",
    "something ends a process before memory does",
    Scope.UNIFIED,
    "vllm-project/vllm#46307; NVIDIA/dgx-spark-playbooks#97",
)
def guard(host: Host) -> Verdict:
    if host.guards is None:
        return unknown("no process is visible", "systemctl is-active earlyoom systemd-oomd")
    if not host.guards:
        return problem(
            Impact.SLOWS,
            "neither earlyoom, systemd-oomd nor nohang runs",
            cause="the kernel acts only when nothing is left, and the GPU's share is not the kernel's to take",
            consequence="an engine that asks for too much freezes the whole machine until it is switched off",
            fix="sudo apt install earlyoom && sudo systemctl enable --now earlyoom",
        )
    return ok(f"{', '.join(host.guards)} runs")


CHECKS: tuple[Check, ...] = (headroom, guard)
