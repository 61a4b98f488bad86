"""Records of host facts. None means "could not be read"; ``Host.unread`` has the reason."""

from dataclasses import dataclass

from sm120kit.hosts.facts._reader import COMMANDS

SWITCHED = (PIX, PXB) = ("PIX", "PXB")
"""Topology classes whose path stays within PCIe switches."""


@dataclass(frozen=True)
class Link:
    """One end of a PCIe link. Widths in lanes, speeds in GT/s; an idle GPU lowers its speed."""

    width: int | None = None
    max_width: int | None = None
    speed: float | None = None
    max_speed: float | None = None
    aspm: bool | None = None


@dataclass(frozen=True)
class ErrorCounters:
    """Error counters of a PCIe device (AER) since boot."""

    correctable: int
    nonfatal: int
    fatal: int


@dataclass(frozen=True)
class Bridge:
    """A PCIe port between a GPU and the CPU. ``acs`` is the ACS control register; ``has_acs`` is False without ACS."""

    bus: str
    link: Link
    has_acs: bool | None
    acs: int | None
    errors: ErrorCounters | None


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU by sysfs and nvidia-smi. Memory in MiB, power in W, temperature in degrees Celsius.

    ``bridges`` are the addresses of the ports above it, nearest the CPU first, below the root complex ``root_complex``.
    ``aperture_mib`` is the size of the largest BAR, through which GPU memory is accessed; 0 means "not assigned". ``active``
    are nvidia-smi's reasons for lowered clocks; ``processes`` is the number of compute processes, ``used_mib`` the memory that
    these, or a desktop, have.
    """

    bus: str
    name: str | None = None
    capability: str | None = None
    driver: str | None = None
    root_complex: str = ""
    bridges: tuple[str, ...] = ()
    numa_node: int | None = None
    link: Link = Link()
    iommu: str | None = None
    aperture_mib: int | None = None
    memory_mib: int | None = None
    power_limit: float | None = None
    power_max: float | None = None
    persistence: bool | None = None
    state: str | None = None
    temperature: int | None = None
    active: tuple[str, ...] | None = None
    processes: int | None = None
    errors: ErrorCounters | None = None
    used_mib: int | None = None

    @property
    def unified(self) -> bool:
        """Whether CPU and GPU share memory (GB10)."""
        return self.capability == "12.1" or "GB10" in (self.name or "")

    @property
    def consumer(self) -> bool:
        """Whether this is a GeForce; NVIDIA's driver does not support P2P on GeForce."""
        return "GeForce" in (self.name or "")


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs: topology class by sysfs, else by nvidia-smi (``kind``), by nvidia-smi (``smi``), P2P status (``granted``)."""

    first: str
    second: str
    kind: str | None
    smi: str | None
    granted: str | None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's kernel module: version, flavour, registry keys, and the newest CUDA version that it supports."""

    version: str | None
    open_module: bool | None
    registry: dict[str, str] | None
    cuda: str | None
    hmm_disabled: bool | None


@dataclass(frozen=True)
class Cpu:
    """CPUs. ``nodes`` is the number of NUMA nodes that are online."""

    model: str | None
    sockets: int | None
    nodes: int | None
    governors: tuple[str, ...] | None


@dataclass(frozen=True)
class ContainerFacts:
    """Container support of a host, and shared memory inside a container, in bytes."""

    inside: bool
    toolkit: bool
    docker: bool
    runtime: bool
    cdi: bool
    shm_bytes: int | None


@dataclass(frozen=True)
class LaunchedContainer:
    """A running container that ``sm120kit serve`` started. ``attended`` is False when that process was killed."""

    name: str
    configuration: str
    gpus: tuple[int, ...]
    attended: bool


@dataclass(frozen=True)
class PeerCache:
    """vLLM's cached P2P results: ``"0->1"`` -> whether GPU 0 can access GPU 1. None when the file is not readable as such."""

    path: str
    verdicts: dict[str, bool] | None


@dataclass(frozen=True)
class Host:
    """All facts about one machine.

    ``environment`` has the values of the few variables that the checks use, unless empty; ``names`` are those of NCCL, CUDA and
    the engines. ``preloaded`` are file names of libraries that every program loads; ``kernel_log`` its lines on PCI.
    ``wsl`` is whether this is a kernel of WSL2.
    ``virtual`` is the hypervisor's product name, "" on bare metal; ``passthrough`` are devices bound to vfio-pci;
    ``iommu_active`` is whether the kernel uses an IOMMU.
    Memory in bytes.
    """

    kernel: str | None
    wsl: bool | None
    virtual: str | None
    passthrough: tuple[str, ...]
    iommu_active: bool | None
    aspm_policy: str | None
    memory_total: int | None
    memory_available: int | None
    cpu: Cpu
    gpus: tuple[Gpu, ...]
    bridges: tuple[Bridge, ...]
    pairs: tuple[GpuPair, ...]
    driver: Driver
    container: ContainerFacts
    launched: tuple[LaunchedContainer, ...]
    environment: dict[str, str]
    names: tuple[str, ...]
    preloaded: tuple[str, ...]
    kernel_log: tuple[str, ...] | None
    guards: tuple[str, ...] | None
    peer_caches: tuple[PeerCache, ...]
    unread: dict[str, str]

    def bridge(self, bus: str) -> Bridge:
        """The bridge at an address."""
        return next(bridge for bridge in self.bridges if bridge.bus == bus)

    def missing_reason(self, *paths: str) -> str:
        """Why a fact is missing: the error of the first of ``paths`` that could not be read, else that it has no such value."""
        for path in paths:
            if path in self.unread:
                return f"{_label(path)}: {self.unread[path]}"
        return f"{_label(paths[0])}: no such value"


def _label(path: str) -> str:
    """A path, or the command line whose output is recorded under this name."""
    return " ".join(COMMANDS.get(path, (path,)))
