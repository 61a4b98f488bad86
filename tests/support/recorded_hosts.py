"""Hosts of public threads, rebuilt as recordings from the facts that these state; what a thread does not state is absent.

tests/unit/data/hosts.toml has the facts. ``build(entry, root)`` writes them as the kernel, nvidia-smi and dmesg show them, for
``sm120kit doctor --root``.
"""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import synthetic_hosts

FILE = Path(__file__).parents[1] / "unit" / "data" / "hosts.toml"
ACS_BITS = {"SrcValid": 0x01, "TransBlk": 0x02, "ReqRedir": 0x04, "CmpltRedir": 0x08, "UpstreamFwd": 0x10, "EgressCtrl": 0x20}
"""Names that lspci prints for the bits of the ACS control register; "+" marks a bit that is set."""
FILES = {
    "kernel": "/proc/sys/kernel/osrelease",
    "cmdline": "/proc/cmdline",
    "hmm": "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    "numa": "/sys/devices/system/node/online",
    "board": "/sys/class/dmi/id/product_name",
    "preload": "/etc/ld.so.preload",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "mounts": "/proc/self/mounts",
}
BANNERS = {"open": "NVIDIA UNIX Open Kernel Module for x86_64", "proprietary": "NVIDIA UNIX x86_64 Kernel Module"}


def load() -> list[dict[str, Any]]:
    """The hosts of hosts.toml."""
    with FILE.open("rb") as file:
        return list(tomllib.load(file)["host"])


def acs_control(text: str) -> int:
    """The ACS control register of a line such as ``ACSCtl: SrcValid+ TransBlk- ReqRedir+``."""
    return sum(bit for name, bit in ACS_BITS.items() if f"{name}+" in text)


def build(host: dict[str, Any], root: Path) -> Path:
    """Write the facts of a host below ``root`` and return it."""

    put, link = synthetic_hosts.writers(root)
    for directory in ("proc", "sys"):
        (root / directory).mkdir(parents=True)
    for name, path in FILES.items():
        if name in host:
            put(path, str(host[name]))
    if "environment" in host:
        put("/proc/self/environ", "\0".join(f"{name}={value}" for name, value in host["environment"].items()))
    if "dmesg" in host:
        put("/commands/dmesg.txt", "\n".join(host["dmesg"]))
    if "module" in host:
        put(
            "/proc/driver/nvidia/version", f"NVRM version: {BANNERS[host['module']]}  {host.get('driver', '')}  Release Build\n"
        )
    if "registry" in host:
        put("/proc/driver/nvidia/params", f'RegistryDwords: "{host["registry"]}"\n')
    if "memory" in host:
        total, available = host["memory"]
        put("/proc/meminfo", f"MemTotal: {total} kB\n" + (f"MemAvailable: {available} kB\n" if available else ""))
    if "cpu" in host:
        vendor, family, model = host["cpu"]
        put("/proc/cpuinfo", f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: {model}\nflags\t\t: fpu\n")
    for socket in range(host.get("sockets", 0)):
        put(f"/sys/devices/system/cpu/cpu{socket}/topology/physical_package_id", str(socket))
    if host.get("iommu") == "off":
        (root / "sys/class/iommu").mkdir(parents=True)
    for gpu in host["gpu"]:
        _gpu(host, gpu, put, link)
    if host.get("smi", True):
        _nvidia_smi(host, put)
    return root


def _gpu(host: dict[str, Any], gpu: dict[str, Any], put: Any, link: Any) -> None:
    """The GPU in sysfs, below its ports if the thread names them."""
    ports = gpu.get("ports", "unknown")
    parts = ports.split("/")
    for end, port in enumerate(parts[1:], start=2):
        directory = f"/sys/devices/{'/'.join(parts[:end])}"
        put(f"{directory}/vendor", "0x1022")
        put(f"{directory}/class", "0x060400")
        if "acs" in host:
            put(f"{directory}/config", synthetic_hosts.port_space(acs_control(host["acs"])))
        with contextlib.suppress(FileExistsError):  # a port above several GPUs
            link(f"/sys/bus/pci/devices/{port}", directory)
    directory = f"/sys/devices/{ports}/{gpu['bus']}"
    put(f"{directory}/vendor", "0x10de")
    put(f"{directory}/class", "0x030000")
    link(f"/sys/bus/pci/devices/{gpu['bus']}", directory)
    for name in ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed", "numa_node"):
        if name in gpu:
            put(f"{directory}/{name}", str(gpu[name]))
    if "iommu" in host and host["iommu"] != "off":
        group = f"/sys/kernel/iommu_groups/{gpu['bus']}"
        put(f"{group}/type", host["iommu"])
        link(f"{directory}/iommu_group", group)


def _nvidia_smi(host: dict[str, Any], put: Any) -> None:
    elements = {
        "persistence_mode": "persistence",
        "performance_state": "state",
        "fb_memory_usage/total": "memory",
        "bar1_memory_usage/total": "bar1",
        "temperature/gpu_temp": "temperature",
        "gpu_power_readings/current_power_limit": "power_limit",
        "gpu_power_readings/max_power_limit": "power_max",
    }
    gpus = ""
    for gpu in host["gpu"]:
        gpus += f'<gpu id="0000{gpu["bus"]}"><product_name>{gpu["name"]}</product_name>'
        for path, name in elements.items():
            if name in gpu:
                outer, _, inner = path.partition("/")
                value = f"<{inner}>{gpu[name]}</{inner}>" if inner else gpu[name]
                gpus += f"<{outer}>{value}</{outer}>"
        gpus += "</gpu>"
    version = "".join(f"<{name}_version>{host[name]}</{name}_version>" for name in ("driver", "cuda") if name in host)
    # ElementTree finds the first of several equal elements: merge the power readings.
    gpus = gpus.replace("</gpu_power_readings><gpu_power_readings>", "")
    put("/commands/nvidia-smi-q.xml", f"<nvidia_smi_log>{version}{gpus}</nvidia_smi_log>")
    put("/commands/nvidia-smi-compute-cap.csv", "".join(f"0000{gpu['bus']}, {gpu['capability']}\n" for gpu in host["gpu"]))
    for name, command in (("topo", "nvidia-smi-topo-m.txt"), ("p2p", "nvidia-smi-topo-p2p-r.txt")):
        if name in host:
            text = host[name]
            put(f"/commands/{command}", text if "GPU0" in text else _uniform(len(host["gpu"]), text))


def _uniform(count: int, cell: str) -> str:
    """A matrix with the same class or status for every pair, for threads that state it in words."""
    rows = ["\t" + "\t".join(f"GPU{column}" for column in range(count))]
    for row in range(count):
        rows.append(f"GPU{row}\t" + "\t".join("X" if row == column else cell for column in range(count)))
    return "\n".join(rows) + "\n"
