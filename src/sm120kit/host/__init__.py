"""Facts about this machine, no opinions: ``probe(root) -> Host``.

Everything is read below a root directory, so that a recorded host can be looked at elsewhere; on the real one, ``/``,
nvidia-smi and docker are asked as well.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from sm120kit.errors import HostUnreadable
from sm120kit.host import nvidia, pci, system
from sm120kit.host.facts import Bridge, Container, Cpu, Driver, Errors, Gpu, Host, Launched, Link, Pair, PeerCache
from sm120kit.host.source import COMMANDS, Source
from sm120kit.host.system import launcher

__all__ = [
    "COMMANDS",
    "Bridge",
    "Container",
    "Cpu",
    "Driver",
    "Errors",
    "Gpu",
    "Host",
    "Launched",
    "Link",
    "Pair",
    "PeerCache",
    "launcher",
    "probe",
]


def probe(root: Path = Path("/"), record: Path | None = None) -> Host:
    """Everything that can be known about the host below ``root``; what was read is also written to ``record``.

    Raises:
        HostUnreadable: there is no /proc or no /sys to read.
    """
    for needed in ("proc", "sys"):
        if not (root / needed).is_dir():
            raise HostUnreadable(
                f"{root / needed} is not there or not readable",
                "mount /proc and /sys, or name a recorded host with --root",
            )
    if record is not None:
        try:
            record.mkdir(parents=True)
        except OSError as error:
            raise HostUnreadable(
                f"cannot record to {record}: {error.strerror}", "name a directory that is not there yet"
            ) from error
    source = Source(root.resolve(), record)
    said, version, cuda = nvidia.gpus(source)
    values, names, home = system.environment(source)
    total, available = system.memory(source)
    gpus = _gpus(source, said)
    system_version = source.text("/proc/version") or ""
    ports = sorted({bus for gpu in gpus for bus in gpu.bridges})
    groups = source.names("/sys/class/iommu")
    return Host(
        kernel=source.text("/proc/sys/kernel/osrelease"),
        command_line=system.command_line(source),
        wsl="microsoft" in system_version.lower(),
        virtual=system.virtual(source),
        passthrough=pci.passthrough(source),
        iommu_active=None if groups is None else bool(groups),
        aspm_policy=source.text("/sys/module/pcie_aspm/parameters/policy"),
        memory_total=total,
        memory_available=available,
        cpu=system.cpu(source),
        gpus=gpus,
        bridges=tuple(pci.bridge(source, bus) for bus in ports),
        pairs=_pairs(source, gpus, list(said)),
        driver=nvidia.driver(source, version, cuda),
        container=system.container(source, total),
        launched=system.launched(source),
        environment=values,
        names=names,
        settings={name: value for name, path in system.SETTINGS.items() if (value := source.text(path)) is not None},
        file_systems=system.file_systems(source),
        raids=system.raids(source),
        guards=system.guards(source),
        peer_caches=system.peer_caches(source, home),
        kernel_caches=system.kernel_caches(source, home),
        unread=source.unread,
    )


def _gpus(source: Source, said: dict[str, nvidia.Said]) -> tuple[Gpu, ...]:
    """GPUs in nvidia-smi's order, then those that only the bus knows."""
    on_bus = pci.nvidia_gpus(source)
    nothing = nvidia.Said(*[None] * 11)
    found = []
    for bus in [*said, *(bus for bus in on_bus if bus not in said)]:
        words = said.get(bus, nothing)
        present = bus in on_bus
        root, bridges = pci.ancestry(source, bus) if present else ("", ())
        place = f"{pci.DEVICES}/{bus}"
        node = source.number(f"{place}/numa_node") if present else None
        aperture = words.aperture_mib
        if aperture is None and present:
            aperture = pci.aperture_mib(source, bus)
        found.append(
            Gpu(
                bus=bus,
                name=words.name or _model(source, bus),
                capability=words.capability,
                driver=source.target(f"{place}/driver"),
                root_complex=root,
                bridges=bridges,
                numa_node=None if node is None or node < 0 else int(node),
                link=pci.link(source, bus) if present else Link(None, None, None, None, None),
                iommu=pci.iommu_type(source, bus) if present else None,
                aperture_mib=aperture,
                memory_mib=words.memory_mib,
                power_limit=words.power_limit,
                power_max=words.power_max,
                persistence=words.persistence,
                state=words.state,
                temperature=words.temperature,
                active=words.active,
                processes=words.processes,
                errors=pci.errors(source, bus) if present else None,
            )
        )
    return tuple(found)


def _model(source: Source, bus: str) -> str | None:
    """The driver's name for a GPU; it has one also when nvidia-smi does not answer."""
    path = f"/proc/driver/nvidia/gpus/{bus}/information"
    lines = (source.text(path) or "").splitlines() if source.exists(path) else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), None)


def _pairs(source: Source, gpus: tuple[Gpu, ...], order: list[str]) -> tuple[Pair, ...]:
    if len(gpus) < 2:
        return ()
    kinds = nvidia.matrix(source.said("nvidia-smi-topo-m.txt"))
    grants = nvidia.matrix(source.said("nvidia-smi-topo-p2p-r.txt"))
    nodes = source.text("/sys/devices/system/node/online")
    found = []
    for one, other in combinations(gpus, 2):
        known = one.bus in order and other.bus in order
        cell = (order.index(one.bus), order.index(other.bus)) if known else (-1, -1)
        # A machine with one NUMA node may leave its devices' node at -1.
        places = [(gpu.root_complex, gpu.bridges, 0 if nodes == "0" else gpu.numa_node) for gpu in (one, other)]
        kind = pci.topology(places[0], places[1]) if one.root_complex and other.root_complex else None
        found.append(Pair(one.bus, other.bus, kind, kinds.get(cell), grants.get(cell)))
    return tuple(found)
