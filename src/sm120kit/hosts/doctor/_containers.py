"""Checks of containers: whether a host can start one with GPUs, and the shared memory inside one."""

from __future__ import annotations

from sm120kit.hosts.doctor._findings import Diagnosis, Impact, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.facts import Host

SHM_FLOOR = 8 << 30


@check("container-toolkit")
def toolkit(host: Host) -> Diagnosis:
    if host.container.inside:
        return not_applicable("doctor runs in a container")
    if not host.container.docker:
        return not_applicable("Docker is not installed")
    if not host.container.toolkit:
        return problem("container-toolkit", Impact.BREAKS, "docker is installed, nvidia-ctk is not")
    modes = (("docker runtime", host.container.runtime), ("CDI", host.container.cdi))
    configured = " and ".join(name for name, present in modes if present)
    return ok(f"NVIDIA Container Toolkit{f': {configured}' if configured else ''}")


@check("shm")
def shm(host: Host) -> Diagnosis:
    size = host.container.shm_bytes
    if size is None:
        return unknown(host.missing_reason("/proc/self/mounts"), "df -h /dev/shm")
    if size < SHM_FLOOR:
        return problem("shm", Impact.BREAKS, f"/dev/shm has {size >> 20} MiB")
    return ok(f"/dev/shm has {size >> 30} GiB")


@check("left-behind")
def left_behind(host: Host) -> Diagnosis:
    orphans = [container for container in host.launched if not container.attended]
    if orphans:
        names = [f"{orphan.name} ({orphan.configuration}, GPU {', '.join(map(str, orphan.gpus))})" for orphan in orphans]
        return problem(
            "left-behind",
            Impact.BREAKS,
            f"running without the sm120kit serve that started it: {', '.join(names)}",
            fix=f"docker stop {' '.join(orphan.name for orphan in orphans)}",
        )
    return ok(f"{len(host.launched) or 'no'} containers of sm120kit serve")
