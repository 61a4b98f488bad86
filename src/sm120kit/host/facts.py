"""What there is to know about a host. Facts only: None is "could not be known", and ``Host.unread`` says why."""

from __future__ import annotations

from dataclasses import dataclass

SWITCHED = (PIX, PXB) = ("PIX", "PXB")
"""Topology classes whose path stays within PCIe switches."""


@dataclass(frozen=True)
class Link:
    """One end of a PCIe link. Widths in lanes, speeds in GT/s; an idle GPU lowers its speed."""

    width: int | None
    max_width: int | None
    speed: float | None
    max_speed: float | None
    aspm: bool | None


@dataclass(frozen=True)
class Errors:
    """A PCIe device's error counters (AER) since boot."""

    correctable: int
    nonfatal: int
    fatal: int


@dataclass(frozen=True)
class Bridge:
    """A PCIe port between a GPU and the CPU. ``acs`` is its ACS control register; ``has_acs`` is False where it has none."""

    bus: str
    vendor: str
    link: Link
    has_acs: bool | None
    acs: int | None
    errors: Errors | None


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as sysfs and nvidia-smi show it. Memory in MiB, power in W, temperature in degrees Celsius.

    ``bridges`` are the addresses of the ports above it, nearest the CPU first, below the root complex ``root_complex``.
    ``aperture_mib`` is the largest BAR, through which memory is seen; 0 is "not assigned". ``active`` are nvidia-smi's
    reasons for lowered clocks; ``processes`` counts compute processes that hold it.
    """

    bus: str
    name: str | None
    capability: str | None
    driver: str | None
    root_complex: str
    bridges: tuple[str, ...]
    numa_node: int | None
    link: Link
    iommu: str | None
    aperture_mib: int | None
    memory_mib: int | None
    power_limit: float | None
    power_max: float | None
    persistence: bool | None
    state: str | None
    temperature: int | None
    active: tuple[str, ...] | None
    processes: int | None
    errors: Errors | None

    @property
    def unified(self) -> bool:
        """GB10: its memory is the host's."""
        return self.capability == "12.1" or "GB10" in (self.name or "")

    @property
    def consumer(self) -> bool:
        """GeForce: NVIDIA's own driver refuses P2P."""
        return "GeForce" in (self.name or "")


@dataclass(frozen=True)
class Pair:
    """Two GPUs: the topology class in nvidia-smi's words, from sysfs and as nvidia-smi has it, and the driver's P2P grant."""

    first: str
    second: str
    kind: str | None
    said: str | None
    granted: str | None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's kernel module: version, flavour, the registry keys it was loaded with, and its newest CUDA."""

    version: str | None
    open_module: bool | None
    registry: dict[str, str] | None
    cuda: str | None
    hmm_disabled: bool | None


@dataclass(frozen=True)
class Cpu:
    """Processors. ``nodes`` counts NUMA nodes that are online."""

    vendor: str | None
    family: int | None
    model: str | None
    sockets: int | None
    nodes: int | None
    governors: tuple[str, ...] | None


@dataclass(frozen=True)
class Container:
    """What concerns containers, on the host or within one. ``memlock`` and ``stack`` in bytes, -1 is unlimited."""

    inside: bool
    toolkit: bool
    docker: bool
    runtime: bool
    cdi: bool
    shm_bytes: int | None
    memlock: int | None
    stack: int | None
    compat: tuple[str, ...]
    strange_cudart: tuple[str, ...]


@dataclass(frozen=True)
class Launched:
    """A container that ``sm120kit launch`` started and that runs. ``attended`` is false when that launcher is gone."""

    name: str
    configuration: str
    gpus: tuple[int, ...]
    attended: bool


@dataclass(frozen=True)
class PeerCache:
    """vLLM's remembered verdicts about P2P: ``"0->1"`` -> allowed."""

    path: str
    verdicts: dict[str, bool] | None


@dataclass(frozen=True)
class Host:
    """Everything known about one machine, in one record.

    ``environment`` holds values of the few variables that judgement needs; of all others only the name is kept, in ``names``.
    ``virtual`` is the hypervisor's product name, "" on bare metal; ``passthrough`` are devices held for guests (vfio-pci);
    ``iommu_active`` tells whether the kernel drives one.
    ``file_systems`` are (mount point, type) of disks; ``settings`` the kernel settings by their names in ``SETTINGS``.
    """

    kernel: str | None
    command_line: tuple[str, ...] | None
    wsl: bool
    virtual: str | None
    passthrough: tuple[str, ...]
    iommu_active: bool | None
    aspm_policy: str | None
    memory_total: int | None
    memory_available: int | None
    cpu: Cpu
    gpus: tuple[Gpu, ...]
    bridges: tuple[Bridge, ...]
    pairs: tuple[Pair, ...]
    driver: Driver
    container: Container
    launched: tuple[Launched, ...]
    environment: dict[str, str]
    names: tuple[str, ...]
    settings: dict[str, str]
    file_systems: tuple[tuple[str, str], ...] | None
    raids: dict[str, dict[str, str]]
    guards: tuple[str, ...] | None
    peer_caches: tuple[PeerCache, ...]
    kernel_caches: tuple[str, ...]
    unread: dict[str, str]

    def bridge(self, bus: str) -> Bridge:
        """The bridge at an address."""
        return next(bridge for bridge in self.bridges if bridge.bus == bus)

    def why(self, *paths: str) -> str:
        """Why facts are missing: the first of ``paths`` that could not be read, else that nothing says so."""
        for path in paths:
            if path in self.unread:
                return f"{path}: {self.unread[path]}"
        return f"{paths[0]} does not say"
