"""Read facts of the system: kernel, CPUs, memory, containers, environment, disks and caches."""

import os
import re
from pathlib import Path

from sm120kit.core.outside import parse_json
from sm120kit.hosts.facts._fact_records import ContainerFacts, Cpu, LaunchedContainer, PeerCache
from sm120kit.hosts.facts._reader import HostReader
from sm120kit.hosts.facts._redact import NAMED_VARIABLES, READ_VARIABLES, kernel_lines

PRELOAD = "/etc/ld.so.preload"
"""Libraries that the dynamic loader adds to every program (ld.so(8))."""
GUARDS = ("earlyoom", "systemd-oomd", "nohang")
"""Daemons that kill a process before memory is exhausted."""


def wsl(reader: HostReader) -> bool | None:
    """Whether the kernel is that of WSL2, by its version or release; None if neither is readable."""
    read = [reader.text(path) for path in ("/proc/version", "/proc/sys/kernel/osrelease")]
    known = [text for text in read if text is not None]
    return any("microsoft" in text.lower() for text in known) if known else None


def virtual(reader: HostReader) -> str | None:
    """The hypervisor's product name, "" on bare metal. Detected by the CPU flag ``hypervisor`` or by the board's name."""
    text = reader.text("/proc/cpuinfo")
    if text is None:
        return None
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    product = reader.text("/sys/class/dmi/id/product_name") or ""
    vendor = reader.text("/sys/class/dmi/id/sys_vendor") or ""
    emulated = vendor == "QEMU" or product.startswith(("Standard PC", "KVM", "VMware"))
    if emulated or (flags and "hypervisor" in flags[1].split()):
        return product or vendor or "unnamed hypervisor"
    return ""


def memory(reader: HostReader) -> tuple[int | None, int | None]:
    """Total and available memory in bytes."""
    text = reader.text("/proc/meminfo") or ""
    matches = [re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("MemTotal", "MemAvailable")]
    total, available = (int(match[1]) << 10 if match else None for match in matches)
    return total, available


def cpu(reader: HostReader) -> Cpu:
    """CPUs, NUMA nodes and frequency governors."""
    text = reader.text("/proc/cpuinfo") or ""
    directory = "/sys/devices/system/cpu"
    packages = {reader.text(path) for path in reader.glob(f"{directory}/cpu[0-9]*/topology/physical_package_id")}
    nodes = reader.text("/sys/devices/system/node/online")
    governors = {reader.text(path) or "" for path in reader.glob(f"{directory}/cpu[0-9]*/cpufreq/scaling_governor")}

    def value(name: str) -> str | None:
        match = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        return match[1].strip() if match else None

    return Cpu(value("model name"), len(packages) or None, _count(nodes), tuple(sorted(governors)) or None)


def _count(ranges: str | None) -> int | None:
    """Length of a list of ranges such as ``0-3,8``; None for any other text."""
    if not ranges or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranges):
        return None
    ends = [part.partition("-") for part in ranges.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _mounts(reader: HostReader) -> list[tuple[str, str, str]] | None:
    text = reader.text("/proc/self/mounts")
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()]
    return [(row[1], row[2], row[3]) for row in rows if len(row) >= 4]


def container(reader: HostReader, memory_total: int | None) -> ContainerFacts:
    """Shared memory inside a container, and a host's support for containers with GPUs."""
    text = reader.text("/etc/docker/daemon.json") if reader.exists("/etc/docker/daemon.json") else None
    return ContainerFacts(
        inside=reader.exists("/.dockerenv") or reader.exists("/run/.containerenv"),
        toolkit=reader.program("nvidia-ctk"),
        docker=reader.program("docker"),
        runtime="nvidia-container-runtime" in (text or ""),
        cdi=bool(reader.glob("/etc/cdi/*nvidia*") or reader.glob("/var/run/cdi/*nvidia*")),
        shm_bytes=_shm_bytes(reader, memory_total),
    )


LAUNCHER_LABEL, DETACHED = "sm120kit.launcher", "detached"
"""The label of containers that ``sm120kit serve`` starts, and its value for those that outlive it."""


def launched(reader: HostReader) -> tuple[LaunchedContainer, ...]:
    """Running containers that ``sm120kit serve`` started, identified by their labels."""
    if not reader.program("docker"):
        return ()
    rows = re.findall(r"^(\S+)\t(\S*)\t([\d,]*)\t(\S+)$", reader.command_output("docker-ps.txt") or "", re.MULTILINE)
    return tuple(
        LaunchedContainer(
            name,
            configuration,
            gpus=tuple(map(int, filter(None, gpus.split(",")))),
            attended=launcher in (DETACHED, _process_id(reader, launcher.partition(".")[0])),
        )
        for name, configuration, gpus, launcher in rows
    )


def launcher_label() -> str:
    """Value of ``LAUNCHER_LABEL`` for containers that end with this process.

    The process id and, because process ids are reused, the start time of the process.
    """
    return _process_id(HostReader(Path("/")), str(os.getpid()))


def _process_id(reader: HostReader, pid: str) -> str:
    """``pid.start`` of a running process, with start in clock ticks since boot (proc(5), stat field 22); "" if it ended."""
    path = f"/proc/{pid}/stat"
    fields = (reader.text(path) or "").rpartition(")")[2].split() if reader.exists(path) else []
    return f"{pid}.{fields[19]}" if fields else ""


def _shm_bytes(reader: HostReader, memory_total: int | None) -> int | None:
    """Maximum size of /dev/shm in bytes; the default of tmpfs is half of the memory."""
    for point, kind, options in _mounts(reader) or ():
        if point == "/dev/shm" and kind == "tmpfs":
            match = re.search(r"\bsize=(\d+)([kmg]?)\b", options)
            if match:
                return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]]
            return memory_total // 2 if memory_total else None
    return None


def environment(reader: HostReader) -> tuple[dict[str, str], tuple[str, ...]]:
    """Values of ``READ_VARIABLES`` that are not empty, and the names of further variables."""
    text = reader.text("/proc/self/environ") or ""
    variables = dict(variable.split("=", 1) for variable in text.split("\0") if "=" in variable)
    values = {name: value.strip() for name, value in variables.items() if name in READ_VARIABLES and value.strip()}
    return values, tuple(sorted(name for name in variables if NAMED_VARIABLES.fullmatch(name)))


def preloaded(reader: HostReader) -> tuple[str, ...]:
    """File names of the libraries that the dynamic loader adds to every program: LD_PRELOAD and /etc/ld.so.preload."""
    text = reader.text("/proc/self/environ") or ""
    paths = next((value for value in text.split("\0") if value.startswith("LD_PRELOAD=")), "=").partition("=")[2]
    if reader.exists(PRELOAD):
        paths += f":{reader.text(PRELOAD) or ''}"
    return tuple(dict.fromkeys(path.rpartition("/")[2] for path in re.split(r"[\s:]+", paths) if path))


def kernel_log(reader: HostReader) -> tuple[str, ...] | None:
    """Lines of the kernel log since boot, see :func:`kernel_lines`."""
    text = reader.command_output("dmesg.txt")
    return None if text is None else kernel_lines(text)


def guards(reader: HostReader) -> tuple[str, ...] | None:
    """The ``GUARDS`` that have a control group of systemd, and therefore run; None when control groups are not visible."""
    slice_ = "/sys/fs/cgroup/system.slice"
    if not reader.exists(slice_):
        return None
    return tuple(name for name in GUARDS if reader.exists(f"{slice_}/{name}.service"))


def peer_caches(reader: HostReader) -> tuple[PeerCache, ...]:
    """vLLM's caches of P2P results."""
    caches = []
    for path in reader.glob_home(".cache/vllm/gpu_p2p_access_cache_for_*.json"):
        try:
            content = parse_json(reader.text(path.replace("~", reader.home, 1)) or "")
            verdicts = {str(pair): bool(allowed) for pair, allowed in content.items()}
        except (ValueError, AttributeError):
            verdicts = None
        caches.append(PeerCache(path, verdicts))
    return tuple(caches)
