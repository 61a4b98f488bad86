"""Check of the kernel log: errors of the host since boot, by the rules of :mod:`sm120kit.hosts.log_rules`, the first first."""

from __future__ import annotations

import io

from sm120kit.hosts.doctor._findings import Diagnosis, Impact, check, ok, problem, unknown
from sm120kit.hosts.facts import Host
from sm120kit.hosts.log_rules import explain


@check("kernel-log")
def kernel_log(host: Host) -> Diagnosis:
    if host.kernel_log is None:
        return unknown(host.missing_reason("dmesg.txt"), "sudo dmesg | sm120kit explain -")
    context = [gpu.name for gpu in host.gpus if gpu.name]
    log = "\n".join([*context, *host.kernel_log]).encode()
    for match in explain(io.BytesIO(log), ended=True).found:
        if match.rule.consequence:
            count = f" ({match.count} lines)" if match.count > 1 else ""
            return problem(
                "kernel-log",
                Impact.BREAKS,
                f"{match.line}{count}",
                cause=match.cause,
                consequence=match.rule.consequence,
                fix=" ".join(match.fixes),
            )
    return ok("no known error")
