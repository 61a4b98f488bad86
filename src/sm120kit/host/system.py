"""The machine around the GPUs: kernel, processors, memory, containers, environment, disks and caches."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from sm120kit.host.facts import Container, Cpu, Launched, PeerCache
from sm120kit.host.reduce import READ_VARIABLES
from sm120kit.host.source import Source

SETTINGS = {
    "swappiness": "/proc/sys/vm/swappiness",
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "nvme_latency": "/sys/module/nvme_core/parameters/default_ps_max_latency_us",
}
GUARDS = ("earlyoom", "systemd-oomd", "nohang")
"""Daemons that end a process before memory is exhausted."""


def command_line(source: Source) -> tuple[str, ...] | None:
    """The kernel's command line."""
    text = source.text("/proc/cmdline")
    return None if text is None else tuple(text.split())


def virtual(source: Source) -> str | None:
    """The hypervisor's product name for a guest, "" on bare metal. A processor says whether it is a guest's."""
    text = source.text("/proc/cpuinfo")
    if text is None:
        return None
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    product = source.text("/sys/class/dmi/id/product_name") or ""
    vendor = source.text("/sys/class/dmi/id/sys_vendor") or ""
    emulated = vendor == "QEMU" or product.startswith(("Standard PC", "KVM", "VMware"))
    if emulated or (flags and "hypervisor" in flags[1].split()):
        return product or vendor or "unnamed hypervisor"
    return ""


def memory(source: Source) -> tuple[int | None, int | None]:
    """Total and available memory in bytes."""
    text = source.text("/proc/meminfo") or ""
    found = [re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("MemTotal", "MemAvailable")]
    total, available = (int(each[1]) << 10 if each else None for each in found)
    return total, available


def cpu(source: Source) -> Cpu:
    """Processors, NUMA nodes and frequency governors."""
    text = source.text("/proc/cpuinfo") or ""
    place = "/sys/devices/system/cpu"
    packages = {source.text(path) for path in source.glob(f"{place}/cpu[0-9]*/topology/physical_package_id")}
    nodes = source.text("/sys/devices/system/node/online")
    governors = {source.text(path) or "" for path in source.glob(f"{place}/cpu[0-9]*/cpufreq/scaling_governor")}

    def of(name: str) -> str | None:
        found = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return found[1].strip() if found else None

    family = of("cpu family")
    return Cpu(
        of("vendor_id"),
        int(family) if family else None,
        of("model name"),
        len(packages) or None,
        _count(nodes),
        tuple(sorted(governors)) or None,
    )


def _count(ranges: str | None) -> int | None:
    """How many numbers ``0-3,8`` names."""
    if not ranges or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranges):
        return None
    ends = [part.partition("-") for part in ranges.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def file_systems(source: Source) -> tuple[tuple[str, str], ...] | None:
    """Mount points of disks with their types."""
    mounts = _mounts(source)
    return None if mounts is None else tuple(sorted({(point, kind) for point, kind, _ in mounts if kind != "tmpfs"}))


def _mounts(source: Source) -> list[tuple[str, str, str]] | None:
    text = source.text("/proc/self/mounts")
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()]
    return [(row[1], row[2], row[3]) for row in rows if len(row) >= 4]


def container(source: Source, memory_total: int | None) -> Container:
    """Whether this is a container and what it was given, or what a host has to start one with GPUs."""
    text = source.text("/etc/docker/daemon.json") if source.exists("/etc/docker/daemon.json") else None
    limits = source.text("/proc/self/limits") or ""
    return Container(
        inside=source.exists("/.dockerenv") or source.exists("/run/.containerenv"),
        toolkit=_program(source, "nvidia-ctk"),
        docker=_program(source, "docker"),
        runtime="nvidia-container-runtime" in (text or ""),
        cdi=bool(source.glob("/etc/cdi/*nvidia*") or source.glob("/var/run/cdi/*nvidia*")),
        shm_bytes=_shm_bytes(source, memory_total),
        memlock=_limit(limits, "Max locked memory"),
        stack=_limit(limits, "Max stack size"),
        compat=source.glob("/usr/local/cuda*/compat/libcuda.so*"),
        strange_cudart=tuple(
            path
            for path in source.glob("/usr/local/cuda-*/lib64/libcudart.so.*")
            if re.findall(r"\d+", path)[0] != path.rpartition("libcudart.so.")[2].split(".")[0]
        ),
    )


def launched(source: Source) -> tuple[Launched, ...]:
    """Containers that ``sm120kit launch`` started, by the labels that it gives them."""
    if not _program(source, "docker"):
        return ()
    rows = re.findall(r"^(\S+)\t(\S*)\t([\d,]*)\t(\S+)$", source.said("docker-ps.txt") or "", re.MULTILINE)
    return tuple(
        Launched(name, config, tuple(map(int, filter(None, gpus.split(",")))), _birth(source, by.partition(".")[0]) == by)
        for name, config, gpus, by in rows
    )


def launcher() -> str:
    """This process, as the label of what it launches: its number and, as numbers are used again, when it was started."""
    return _birth(Source(Path("/")), str(os.getpid()))


def _birth(source: Source, pid: str) -> str:
    """A running process as ``pid.start``, the start in clock ticks since boot (proc(5), stat field 22); "" when it is gone."""
    path = f"/proc/{pid}/stat"
    fields = (source.text(path) or "").rpartition(")")[2].split() if source.exists(path) else []
    return f"{pid}.{fields[19]}" if fields else ""


def _program(source: Source, name: str) -> bool:
    return any(source.exists(f"{place}/{name}") for place in ("/usr/bin", "/usr/local/bin", "/snap/bin"))


def _shm_bytes(source: Source, memory_total: int | None) -> int | None:
    """How large /dev/shm may grow: tmpfs takes half of memory when nothing is said."""
    for point, kind, options in _mounts(source) or ():
        if point == "/dev/shm" and kind == "tmpfs":
            found = re.search(r"\bsize=(\d+)([kmg]?)\b", options)
            if found:
                return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]
            return memory_total // 2 if memory_total else None
    return None


def _limit(limits: str, name: str) -> int | None:
    found = re.search(rf"^{name}\s+(\S+)", limits, re.MULTILINE)
    if not found:
        return None
    return -1 if found[1] == "unlimited" else int(found[1])


def environment(source: Source) -> tuple[dict[str, str], tuple[str, ...], str]:
    """Values of the few variables that judgement needs, names of more, and the home directory."""
    text = (source.raw("/proc/self/environ") or b"").decode(errors="replace")
    pairs = dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
    home = pairs.pop("HOME", "/root")
    return {name: value for name, value in pairs.items() if name in READ_VARIABLES}, tuple(pairs), home


def raids(source: Source) -> dict[str, dict[str, str]]:
    """RAID-5 and RAID-6 arrays: threads and stripe cache."""
    found = {}
    for path in source.glob("/sys/block/md*/md/level"):
        place = path.rpartition("/")[0]
        if source.text(path) in ("raid5", "raid6"):
            names = ("group_thread_cnt", "stripe_cache_size")
            found[path.split("/")[3]] = {name: source.text(f"{place}/{name}") or "" for name in names}
    return found


def guards(source: Source) -> tuple[str, ...] | None:
    """Which of ``GUARDS`` run, as systemd's control groups have it."""
    place = "/sys/fs/cgroup/system.slice"
    if not source.exists(place):
        return None
    return tuple(name for name in GUARDS if source.exists(f"{place}/{name}.service"))


def peer_caches(source: Source, home: str) -> tuple[PeerCache, ...]:
    """What vLLM remembers about P2P."""
    found = []
    for path in source.glob(f"{home}/.cache/vllm/gpu_p2p_access_cache_for_*.json"):
        try:
            said = json.loads(source.text(path) or "")
            verdicts = {str(pair): bool(allowed) for pair, allowed in said.items()}
        except (json.JSONDecodeError, AttributeError):
            verdicts = None
        found.append(PeerCache(path, verdicts))
    return tuple(found)


def kernel_caches(source: Source, home: str) -> tuple[str, ...]:
    """FlashInfer's caches of compiled kernels, as ``version/archs``."""
    place = f"{home}/.cache/flashinfer"
    return tuple(path.removeprefix(f"{place}/").removesuffix("/cached_ops") for path in source.glob(f"{place}/*/*/cached_ops"))
