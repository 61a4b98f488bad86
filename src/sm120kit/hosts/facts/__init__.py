"""Facts about a machine, without judgement: ``probe(root) -> Host``.

All files are read below a root directory. For the real root, ``/``, nvidia-smi and docker are run as well. The facts of another
machine are read from what doctor printed there.
"""

import os
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_input
from sm120kit.core.record_files import first_problem
from sm120kit.hosts.facts import _nvidia, _pci, _system
from sm120kit.hosts.facts._fact_records import Gpu, GpuPair, Host
from sm120kit.hosts.facts._reader import HostReader
from sm120kit.hosts.facts._system import DETACHED, LAUNCHER_LABEL, launcher_label

__all__ = ["DETACHED", "LAUNCHER_LABEL", "Gpu", "GpuPair", "Host", "launcher_label", "probe"]


@dataclass(frozen=True)
class _Recorded:
    """What is read of the output of ``doctor --json``."""

    host: Host


def probe(root: Path = Path("/")) -> Host:
    """Read all facts of the host below ``root``, or those in a file with the output of ``sm120kit doctor --json``.

    Raises:
        BadInput: /proc or /sys does not exist, or the file is no such output.
    """
    if root.is_file():
        try:
            recorded: _Recorded = TypeAdapter(_Recorded).validate_python(parse_json(read_input(root)))
            _require_devices(recorded.host)
        except (OSError, ValueError) as error:
            reason = first_problem(error) if isinstance(error, ValidationError) else error
            raise BadInput(f"{root} is no output of sm120kit doctor --json: {reason}", "write it on that host") from error
        return recorded.host
    for directory in ("proc", "sys"):
        if not (root / directory).is_dir():
            raise BadInput(
                f"{root / directory} does not exist or is not readable",
                "mount /proc and /sys, or name the output of sm120kit doctor --json of another host with --root",
            )
    reader = HostReader(Path(os.path.realpath(root)))
    smi_gpus, version, cuda = _nvidia.gpus(reader)
    values, names = _system.environment(reader)
    total, available = _system.memory(reader)
    gpus = _gpus(reader, smi_gpus)
    ports = sorted({bus for gpu in gpus for bus in gpu.bridges})
    groups = reader.names("/sys/class/iommu")
    return Host(
        kernel=reader.text("/proc/sys/kernel/osrelease"),
        wsl=_system.wsl(reader),
        virtual=_system.virtual(reader),
        passthrough=_pci.passthrough(reader),
        iommu_active=None if groups is None else bool(groups),
        aspm_policy=reader.text("/sys/module/pcie_aspm/parameters/policy"),
        memory_total=total,
        memory_available=available,
        cpu=_system.cpu(reader),
        gpus=gpus,
        bridges=tuple(_pci.bridge(reader, bus) for bus in ports),
        pairs=_pairs(reader, gpus, list(smi_gpus)),
        driver=_nvidia.driver(reader, version, cuda),
        container=_system.container(reader, total),
        launched=_system.launched(reader),
        environment=values,
        names=names,
        preloaded=_system.preloaded(reader),
        kernel_log=_system.kernel_log(reader),
        guards=_system.guards(reader),
        peer_caches=_system.peer_caches(reader),
        unread=reader.unread,
    )


def _require_devices(host: Host) -> None:
    """Raise ValueError for a pair of GPUs, or a port above one, that the host does not have."""
    named = {bus for gpu in host.gpus for bus in gpu.bridges}.union(*((pair.first, pair.second) for pair in host.pairs))
    if absent := named - {gpu.bus for gpu in host.gpus} - {port.bus for port in host.bridges}:
        raise ValueError(f"it has no device {min(absent)[:80]!r}, which a pair or a GPU of it names")


def _gpus(reader: HostReader, smi_gpus: dict[str, _nvidia.GpuFields]) -> tuple[Gpu, ...]:
    """GPUs in nvidia-smi's order, then those that only the PCI bus lists."""
    on_bus = _pci.nvidia_gpus(reader)
    gpus = []
    for bus in [*smi_gpus, *(bus for bus in on_bus if bus not in smi_gpus)]:
        smi = smi_gpus.get(bus, {})
        stated = {name: value for name, value in smi.items() if value is not None}
        driver = reader.target(f"{_pci.DEVICES}/{bus}/driver")
        found = _pci.gpu_fields(reader, bus, aperture="aperture_mib" not in stated) if bus in on_bus else {}
        gpus.append(Gpu(bus, driver=driver, **{"name": stated.get("name") or _model(reader, bus), **found, **stated}))
    return tuple(gpus)


def _model(reader: HostReader, bus: str) -> str | None:
    """The driver's name for a GPU, which is available even when nvidia-smi fails."""
    path = f"/proc/driver/nvidia/gpus/{bus}/information"
    lines = (reader.text(path) or "").splitlines() if reader.exists(path) else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), None)


def _pairs(reader: HostReader, gpus: tuple[Gpu, ...], order: list[str]) -> tuple[GpuPair, ...]:
    """All pairs of GPUs. ``order`` has the addresses in the order of nvidia-smi's matrices."""
    if len(gpus) < 2:
        return ()
    classes = _nvidia.matrix(reader.command_output("nvidia-smi-topo-m.txt"))
    grants = _nvidia.matrix(reader.command_output("nvidia-smi-topo-p2p-r.txt"))
    nodes = reader.text("/sys/devices/system/node/online")
    pairs = []
    for first, second in combinations(gpus, 2):
        listed = first.bus in order and second.bus in order
        cell = (order.index(first.bus), order.index(second.bus)) if listed else (-1, -1)
        # On a machine with a single NUMA node, the numa_node of devices may be -1.
        positions = [(gpu.root_complex, gpu.bridges, 0 if nodes == "0" else gpu.numa_node) for gpu in (first, second)]
        kind = _pci.topology(positions[0], positions[1]) if first.root_complex and second.root_complex else None
        smi = classes.get(cell)
        if kind is None and smi in _pci.CLASSES:
            kind = smi
        pairs.append(GpuPair(first.bus, second.bus, kind, smi, grants.get(cell)))
    return tuple(pairs)
