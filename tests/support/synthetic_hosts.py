"""Synthetic hosts: for each a root directory of small files, as the kernel and nvidia-smi would show it.

``HOSTS`` has one entry per host: its differences from ``GOOD``, a correctly configured workstation with two RTX PRO 6000 on
separate root ports, or from the host named by ``like``. ``build(name, root)`` writes the tree; tests/unit/hosts/<name>.txt has
the findings that doctor must report for it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
GEFORCE = "NVIDIA GeForce RTX 5090"
FORCED = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
SERIAL, UUID, MAC = b"\xa1serial\xa2", "GPU-0a1b2c3d-0102-0304-0506-0a0b0c0d0e0f", "3c:ec:ef:01:02:03"
"""Identifiers of the synthetic hosts, which no recording may contain."""
ROOT_PORTS = ("pci0000:00/0000:00:01.1/0000:01:00.0", "pci0000:40/0000:40:01.1/0000:41:00.0")
SWITCH = tuple(f"pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:{port:02x}.0/0000:{port + 3:02x}:00.0" for port in range(2))
TWO_SWITCHES = tuple(
    f"pci0000:{base:02x}/0000:{base:02x}:01.1/0000:{base + 1:02x}:00.0/0000:{base + 2:02x}:{port:02x}.0/"
    f"0000:{base + 3 + port:02x}:00.0"
    for base in (0x00, 0x80)
    for port in range(4)
)

GOOD: dict[str, Any] = {
    "paths": ROOT_PORTS,
    "nodes": (0, 0),
    "product": PRO,
    "capability": "12.0",
    "memory": 97887,
    "bar1": 131072,
    "limits": (600, 600),
    "width": (16, 16),
    "speed": 32.0,
    "port": (16, 32.0),
    "state": "P0",
    "persistence": "Enabled",
    "temperature": 48,
    "active": (),
    "processes": 0,
    "aspm": False,
    "acs": 0x0011,
    "aer": (0, 0, 0),
    "iommu": "identity",
    "root_reads": True,
    "class": lambda first, second: "NODE",
    "grant": "OK",
    "smi": True,
    "driver": ("580.126.09", "13.0"),
    "module": "Open Kernel Module",
    "registry": FORCED,
    "hmm": "Y",
    "bound": "nvidia",
    "cmdline": "BOOT_IMAGE=/vmlinuz root=UUID=5f1c pcie_aspm=off iommu=pt token=hunter2",
    "version": "Linux version 6.17.0",
    "kernel": "6.17.0-5-generic",
    "cpu": ("AuthenticAMD", 25, "AMD Ryzen Threadripper PRO 7975WX", "fpu sse"),
    "sockets": 1,
    "numa": "0",
    "governor": "performance",
    "product_name": "WS WRX90E-SAGE",
    "vendor_name": "ASUS",
    "total": 256 << 20,
    "available": 250 << 20,
    "environment": {"HOME": "/root", "HF_TOKEN": "hunter2"},
    "mounts": ("/dev/nvme0n1p2 / ext4 rw 0 0", "tmpfs /dev/shm tmpfs rw 0 0"),
    "dmesg": ("NVRM: loading NVIDIA UNIX Open Kernel Module",),
    "files": (),
}

HOSTS: dict[str, dict[str, Any]] = {
    "node-forced": {},
    "node-pair": {"registry": "", "iommu": "DMA-FQ", "cmdline": "root=/dev/sda1", "hmm": "N"},
    "pix-pair": {"paths": SWITCH, "class": lambda first, second: "PIX", "registry": "", "acs": 0x001D},
    "pix-forced": {"paths": SWITCH, "class": lambda first, second: "PIX", "root_reads": False},
    "turin-8": {
        "paths": TWO_SWITCHES,
        "nodes": (0, 0, 0, 0, 1, 1, 1, 1),
        "product": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "class": lambda first, second: "PIX" if first // 4 == second // 4 else "SYS",
        "registry": "",
        "cpu": ("AuthenticAMD", 26, "AMD EPYC 9575F 64-Core Processor", "fpu sse"),
        "sockets": 2,
        "numa": "0-1",
        "kernel": "6.14.0-37-generic",
        "version": "Linux version 6.14.0",
    },
    "wsl2": {
        "paths": (),
        "nodes": (),
        "product": GEFORCE,
        "memory": 32607,
        "bar1": 32768,
        "limits": (575, 600),
        "wsl": ("00000000:01:00.0", "00000000:02:00.0"),
        "persistence": "N/A",
        "version": "Linux version 6.6.87.2-microsoft-standard-WSL2",
        "kernel": "6.6.87.2-microsoft-standard-WSL2",
        "cpu": ("GenuineIntel", 6, "Intel(R) Core(TM) Ultra 9 285K", "fpu hypervisor"),
        "module": "",
        "smi_topo": False,
        "governor": "",
        "product_name": "",
        "vendor_name": "",
    },
    "vfio-guest": {
        "paths": ("pci0000:00/0000:00:10.0", "pci0000:00/0000:00:11.0"),
        "class": lambda first, second: "PHB",
        "grant": "CNS",
        "bar1": 256,
        "cpu": ("AuthenticAMD", 25, "AMD EPYC 7302 16-Core Processor", "fpu sse"),
        "product_name": "Standard PC (Q35 + ICH9, 2009)",
        "vendor_name": "QEMU",
        "registry": "",
    },
    "rebar-off": {"bar1": 256, "grant": "NS"},
    "x4-link": {"width": (4, 16), "port": (4, 32.0), "speed": 2.5, "state": "P8", "aer": (12, 0, 0), "paths": ROOT_PORTS[:1]},
    "gb10": {
        "paths": ("pci000f:00/000f:00:00.0/000f:01:00.0",),
        "product": "NVIDIA GB10",
        "capability": "12.1",
        "memory": "N/A",
        "bar1": "N/A",
        "limits": ("N/A", "N/A"),
        "width": (1, 1),
        "cpu": ("", None, "", ""),
        "total": 122 << 20,
        "available": 96 << 20,
        "kernel": "7.0.0-1019-nvidia",
        "product_name": "NVIDIA_DGX_Spark",
        "vendor_name": "NVIDIA",
    },
    "gb10-ready": {
        "like": "gb10",
        "kernel": "6.17.0-1032-nvidia",
        "available": 117 << 20,
        "files": ("/sys/fs/cgroup/system.slice/earlyoom.service/cgroup.procs",),
    },
    "no-gpu": {"paths": (), "nodes": (), "smi": False, "module": "", "registry": None, "hmm": None},
    "neglected": {
        "driver": ("570.86.15", "12.8"),
        "limits": (300, 600),
        "port": (16, 16.0),
        "speed": 16.0,
        "persistence": "Disabled",
        "temperature": 91,
        "active": ("hw_power_brake_slowdown", "sw_power_cap"),
        "processes": 1,
        "aspm": True,
        "aer": (90, 3, 0),
        "numa": "0-3",
        "governor": "powersave",
        "environment": {
            "HOME": "/home/ann",
            "NCCL_P2P_LEVEL": "4",
            "NCCL_P2P_DISABLE": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "VLLM_API_KEY": "hunter2",
        },
        "mounts": ("/dev/sda2 / ext4 rw 0 0", "tank/models /models zfs rw 0 0", "tmpfs /dev/shm tmpfs rw 0 0"),
        "files": (
            ("/home/ann/.cache/vllm/gpu_p2p_access_cache_for_0,1,2,3.json", '{"0->0": true, "0->3": true}'),
            "/usr/bin/docker",
            ("/commands/docker-ps.txt", "sm120kit-a-4711\ta\t0,1\t4711.99\nsm120kit-b-4712\tb\t0\t4712.99\n"),
            ("/proc/4711/stat", "4711 (x y) S " + "0 " * 18 + "100 0"),
            ("/proc/4712/stat", "4712 (x y) S " + "0 " * 18 + "99 0"),
        ),
    },
    "geforce-patched": {
        "product": GEFORCE,
        "memory": 32607,
        "bar1": 32768,
        "limits": (575, 600),
        "registry": "",
        "files": (
            "/usr/bin/docker",
            "/usr/bin/nvidia-ctk",
            ("/etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}, "proxies": "hunter2"}'),
            ("/root/.cache/vllm/gpu_p2p_access_cache_for_0,1.json", '{"0->0": true, "0->1": true, "1->0": true}'),
        ),
    },
    "container": {
        "product": GEFORCE,
        "memory": 32607,
        "bar1": 32768,
        "limits": (575, 600),
        "grant": "GNS",
        "registry": "RMForceStaticBar1=1;PeerMappingOverride=1",
        "environment": {"HOME": "/root", "NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "PHB", "VLLM_SKIP_P2P_CHECK": "0"},
        "mounts": ("overlay / overlay rw 0 0", "shm /dev/shm tmpfs rw,nosuid,size=65536k 0 0"),
        "files": (
            "/.dockerenv",
            "/usr/local/cuda-13.0/compat/libcuda.so.1",
        ),
    },
    "tuned": {
        "paths": TWO_SWITCHES,
        "nodes": (0, 0, 0, 0, 1, 1, 1, 1),
        "class": lambda first, second: "PIX" if first // 4 == second // 4 else "SYS",
        "registry": "",
        "cpu": ("AuthenticAMD", 26, "AMD EPYC 9575F 64-Core Processor", "fpu sse"),
        "sockets": 2,
        "numa": "0-1",
        "environment": {"HOME": "/root", "NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL,LL128,Simple", "VLLM_SKIP_P2P_CHECK": "0"},
        "mounts": ("/dev/md0 / xfs rw 0 0", "shm /dev/shm tmpfs rw,size=32g 0 0"),
        "files": (
            "/.dockerenv",
            "/usr/local/cuda-13.0/compat/libcuda.so.1",
        ),
    },
    "geforce-careful": {
        "product": GEFORCE,
        "memory": 32607,
        "bar1": 32768,
        "limits": (575, 600),
        "registry": "RMForceStaticBar1=1;PeerMappingOverride=1",
        "environment": {"HOME": "/root", "VLLM_SKIP_P2P_CHECK": "0"},
    },
    "odd-values": {
        "driver": ("580.105.06", "Not Found"),
        "environment": {
            "HOME": "",
            "NCCL_P2P_LEVEL": "BOGUS",
            "NCCL_P2P_DISABLE": "true",
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "LD_PRELOAD": "/usr/local/vgpu/libvgpu.so",
        },
        "files": (("/root/.cache/vllm/gpu_p2p_access_cache_for_0,1.json", '{"a->b": 1}'),),
    },
    "empty-values": {
        "environment": {
            "HOME": "/root",
            "NCCL_P2P_LEVEL": "",
            "NCCL_P2P_DISABLE": "",
            "VLLM_SKIP_P2P_CHECK": "",
            "LD_PRELOAD": "",
            "PYTORCH_CUDA_ALLOC_CONF": "",
        },
        "files": (("/etc/ld.so.preload", "\n"),),
    },
    "closed-module": {
        "dmesg": (
            "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2bb1) installed in this system requires use of the NVIDIA open "
            "kernel modules.",
            "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:884)",
        ),
        "smi": False,
        "module": "Kernel Module",
        "bar1": 131072,
    },
}


def writers(root: Path) -> tuple[Callable[..., None], Callable[[str, str], None]]:
    """Functions that write a file and a symbolic link of a host whose root directory is ``root``."""

    def put(path: str, content: str | bytes = "") -> None:
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def link(path: str, target: str) -> None:
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(root / target.lstrip("/"), file.parent))

    return put, link


def build(name: str, root: Path) -> Path:
    """Write a host's tree below ``root`` and return it."""
    host = GOOD | HOSTS.get(HOSTS[name].get("like", ""), {}) | HOSTS[name]

    put, link = writers(root)
    put("/proc/version", host["version"])
    put("/proc/cmdline", host["cmdline"])
    put("/proc/sys/kernel/osrelease", host["kernel"])
    put("/proc/meminfo", f"MemTotal: {host['total']} kB\nMemFree: 1 kB\nMemAvailable: {host['available']} kB\n")
    put("/proc/self/mounts", "\n".join(host["mounts"]))
    put("/proc/self/environ", "\0".join(f"{key}={value}" for key, value in host["environment"].items()))
    vendor, family, model, flags = host["cpu"]
    put(
        "/proc/cpuinfo",
        f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: {model}\nflags\t\t: {flags}\n" if vendor else "",
    )
    for cpu in range(4):
        directory = f"/sys/devices/system/cpu/cpu{cpu}"
        put(f"{directory}/topology/physical_package_id", str(cpu % host["sockets"]))
        if host["governor"]:
            put(f"{directory}/cpufreq/scaling_governor", host["governor"])
    put("/sys/devices/system/node/online", host["numa"])
    put("/sys/class/dmi/id/product_name", host["product_name"])
    put("/sys/class/dmi/id/sys_vendor", host["vendor_name"])
    put("/sys/module/pcie_aspm/parameters/policy", "[default] performance powersave")
    put("/sys/class/iommu/ivhd0/uevent")
    lines = [*host["dmesg"], f"NVRM: GPU at PCI:0000:01:00: {UUID}", f"eth0 NIC Link is Up {MAC}", f"NVRM: {MAC}"]
    put("/commands/dmesg.txt", "\n".join(f"[ 1.0] {line}" for line in lines))
    put("/sys/fs/cgroup/system.slice/ssh.service/cgroup.procs")
    if host["module"]:
        banner = "NVIDIA UNIX Open Kernel Module for x86_64" if "Open" in host["module"] else "NVIDIA UNIX x86_64 Kernel Module"
        put("/proc/driver/nvidia/version", f"NVRM version: {banner}  {host['driver'][0]}  Release Build\n")
    if host["registry"] is not None and host["module"]:
        put("/proc/driver/nvidia/params", f'DynamicPowerManagement: 3\nRegistryDwords: "{host["registry"]}"\nRmMsg: ""\n')
    if host["hmm"] and host["module"]:
        put("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", host["hmm"])
    for entry in host["files"]:
        put(*((entry,) if isinstance(entry, str) else entry))

    devices = {part for path in host["paths"] for part in _prefixes(path)}
    put("/sys/devices/pci0000:ff/0000:ff:00.0/vendor", "0x8086")
    link("/sys/bus/pci/devices/0000:ff:00.0", "/sys/devices/pci0000:ff/0000:ff:00.0")
    for path in sorted(devices):
        gpu = path in host["paths"]
        directory, bus = f"/sys/devices/{path}", path.rpartition("/")[2]
        lanes, speed = (host["width"][1], 32.0) if gpu else host["port"]
        put(f"{directory}/vendor", "0x10de" if gpu else "0x1022")
        put(f"{directory}/class", "0x030000" if gpu else "0x060400")
        put(f"{directory}/config", _config(host["aspm"], None if gpu else host["acs"])[: 4096 if host["root_reads"] else 64])
        put(f"{directory}/current_link_width", str(host["width"][0]))
        put(f"{directory}/max_link_width", str(lanes))
        put(f"{directory}/current_link_speed", f"{host['speed']} GT/s PCIe")
        put(f"{directory}/max_link_speed", f"{speed} GT/s PCIe")
        for kind, suffix, count in zip(
            ("correctable", "nonfatal", "fatal"), ("COR", "NONFATAL", "FATAL"), host["aer"], strict=True
        ):
            put(f"{directory}/aer_dev_{kind}", f"RxErr 0\nTOTAL_ERR_{suffix} {count if gpu else 0}\n")
        link(f"/sys/bus/pci/devices/{bus}", directory)
        if gpu:
            put(f"{directory}/numa_node", str(host["nodes"][host["paths"].index(path)]))
            end = (host["bar1"] << 20) - 1 if isinstance(host["bar1"], int) else 0xFFFFFF
            put(
                f"{directory}/resource",
                f"0xb0000000 0xb3ffffff 0x40200\n{1 << 44:#x} {(1 << 44) + end:#x} 0x14220c\n" + "0x0 0x0 0x0\n" * 11,
            )
            link(f"{directory}/iommu_group", f"/sys/kernel/iommu_groups/{bus[-7:-5]}")
            put(f"/sys/kernel/iommu_groups/{bus[-7:-5]}/type", host["iommu"])
            link(f"{directory}/driver", f"/sys/bus/pci/drivers/{host['bound']}")
            put(f"/sys/bus/pci/drivers/{host['bound']}/bind")
            if host["module"]:
                put(f"/proc/driver/nvidia/gpus/{bus}/information", f"Model: \t\t {host['product']}\nGPU UUID: {UUID}\n")
    if host["smi"]:
        _nvidia_smi(host, put)
    return root


def _prefixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: end + 1]) for end in range(1, len(parts))]


def _config(aspm: bool, acs: int | None) -> bytes:
    """Configuration space: a PCI Express capability at 0x40; AER at 0x100, a serial number, then ACS at 0x150 for ports."""
    space = bytearray(4096)
    space[0x34], space[0x40], space[0x50] = 0x40, 0x10, 0x02 if aspm else 0x00
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | 0x140 << 20)
    struct.pack_into("<I8s", space, 0x140, 0x0003 | 1 << 16 | (0x150 << 20 if acs is not None else 0), SERIAL)
    if acs is not None:
        struct.pack_into("<IHH", space, 0x150, 0x000D | 1 << 16, 0x001F, acs)
    return bytes(space)


def port_space(acs: int) -> bytes:
    """Configuration space of a port with an ACS control register."""
    return _config(False, acs)


def _nvidia_smi(host: dict[str, Any], put: Any) -> None:
    buses = host.get("wsl") or [f"{path.rpartition('/')[2]:0>16}" for path in host["paths"]]
    reasons = "".join(f"<clocks_event_reason_{reason}>Active</clocks_event_reason_{reason}>" for reason in host["active"])
    process = "<process_info><pid>4711</pid><type>C</type><process_name>/home/ann/hunter2</process_name></process_info>"
    gpus = "".join(
        f"""<gpu id="{bus}"><product_name>{host["product"]}</product_name><uuid>GPU-hunter2</uuid>
        <persistence_mode>{host["persistence"]}</persistence_mode><performance_state>{host["state"]}</performance_state>
        <clocks_event_reasons><clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
        {reasons}</clocks_event_reasons>
        <fb_memory_usage><total>{host["memory"]} MiB</total></fb_memory_usage>
        <bar1_memory_usage><total>{host["bar1"]} MiB</total></bar1_memory_usage>
        <temperature><gpu_temp>{host["temperature"]} C</gpu_temp></temperature>
        <gpu_power_readings><current_power_limit>{host["limits"][0]} W</current_power_limit>
        <max_power_limit>{host["limits"][1]} W</max_power_limit></gpu_power_readings>
        <processes>{process * host["processes"]}</processes></gpu>"""
        for bus in buses
    )
    version, cuda = host["driver"]
    put(
        "/commands/nvidia-smi-q.xml",
        f"""<?xml version="1.0" ?>
        <!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
        <nvidia_smi_log><driver_version>{version}</driver_version><cuda_version>{cuda}</cuda_version>{gpus}</nvidia_smi_log>""",
    )
    put("/commands/nvidia-smi-compute-cap.csv", "".join(f"{bus}, {host['capability']}\n" for bus in buses))
    if len(buses) > 1 and host.get("smi_topo", True):
        put("/commands/nvidia-smi-topo-m.txt", _matrix(len(buses), host["class"]) + "\nLegend:\n\n  X    = Self\n")
        put(
            "/commands/nvidia-smi-topo-p2p-r.txt",
            _matrix(len(buses), lambda first, second: host["grant"]) + "\n  X    = Self\n",
        )


def _matrix(count: int, cell: Any) -> str:
    lines = ["\t" + "\t".join(f"\x1b[4mGPU{column}" for column in range(count)) + "\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for row in range(count):
        cells = [" X " if row == column else cell(row, column) for column in range(count)]
        lines.append(f"GPU{row}\t" + "\t".join(cells) + "\t0-63\t0")
    return "\n".join(lines) + "\n"
