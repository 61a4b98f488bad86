"""Facts of synthetic hosts: values, recordings and redaction. Invalid content of a file does not affect other facts."""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_hosts

from sm120kit.core.errors import BadInput
from sm120kit.core.records import json_text
from sm120kit.hosts import doctor
from sm120kit.hosts.facts import _nvidia, _pci, probe
from sm120kit.hosts.facts._fact_records import ErrorCounters, Link
from sm120kit.hosts.facts._reader import HostReader

NAMES = sorted(synthetic_hosts.HOSTS)


def test_gpus_below_a_pcie_switch(tmp_path: Path) -> None:
    host = probe(synthetic_hosts.build("pix-pair", tmp_path))
    assert [gpu.bus for gpu in host.gpus] == ["0000:03:00.0", "0000:04:00.0"]
    first = host.gpus[0]
    assert first.root_complex == "pci0000:00" and first.bridges == ("0000:00:01.1", "0000:01:00.0", "0000:02:00.0")
    assert first.link == Link(16, 16, 32.0, 32.0, False) and first.errors == ErrorCounters(0, 0, 0)
    assert (first.aperture_mib, first.memory_mib, first.iommu, first.driver) == (131072, 97887, "identity", "nvidia")
    assert host.bridge("0000:02:01.0").acs == 0x1D
    assert [(pair.kind, pair.smi, pair.granted) for pair in host.pairs] == [("PIX", "PIX", "OK")]
    assert host.driver.registry == {} and host.driver.open_module and host.driver.version == "580.126.09"


def test_unreadable_fact_is_none_with_the_reason(tmp_path: Path) -> None:
    host = probe(synthetic_hosts.build("closed-module", tmp_path))
    assert host.gpus[0].temperature is None and host.gpus[0].name == synthetic_hosts.PRO and host.gpus[0].aperture_mib == 131072
    assert host.unread["nvidia-smi-q.xml"] == "No such file or directory"
    assert host.missing_reason("/nowhere", "nvidia-smi-q.xml") == "nvidia-smi -q -x: No such file or directory"
    assert host.missing_reason("/nowhere") == "/nowhere: no such value"


def test_configuration_space_without_root(tmp_path: Path) -> None:
    host = probe(synthetic_hosts.build("pix-forced", tmp_path))
    assert host.bridges[0].has_acs is None and host.bridges[0].link.aspm is None


@pytest.mark.parametrize("name", NAMES)
def test_facts_in_a_file_are_the_same_without_secrets(name: str, tmp_path: Path) -> None:
    host = probe(synthetic_hosts.build(name, tmp_path / "host"))
    text = json_text(doctor.report(host, doctor.diagnose(host)))
    (tmp_path / "host.json").write_text(text)
    assert probe(tmp_path / "host.json") == host
    secrets = ["hunter2", synthetic_hosts.SERIAL.decode("latin-1"), synthetic_hosts.UUID, synthetic_hosts.MAC, "/ann"]
    assert not [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("kind", ["gpus", "bridges"])
def test_a_report_that_names_absent_devices_is_refused(kind: str, tmp_path: Path) -> None:
    host = probe(synthetic_hosts.build("neglected", tmp_path / "host"))
    text = json_text(doctor.report(replace(host, **{kind: ()}), ()))
    (tmp_path / "host.json").write_text(text)
    with pytest.raises(BadInput, match="has no device"):
        probe(tmp_path / "host.json")


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"host": 3}', '{"host": {"gpus": []}}'])
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "host.json").write_text(text)
    with pytest.raises(BadInput, match=r"host\.json is no output of sm120kit doctor --json: [^\n]+$"):
        probe(tmp_path / "host.json")


def test_environment_is_redacted(tmp_path: Path) -> None:
    host = probe(synthetic_hosts.build("neglected", tmp_path))
    assert host.names == ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "VLLM_API_KEY")
    assert host.environment.keys() == {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "PYTORCH_CUDA_ALLOC_CONF"}


@pytest.mark.parametrize("absent", ["proc", "sys"])
def test_host_without_proc_or_sys_is_refused(absent: str, tmp_path: Path) -> None:
    root = synthetic_hosts.build("no-gpu", tmp_path)
    (root / absent).rename(root / "elsewhere")
    with pytest.raises(BadInput, match=absent):
        probe(root)
    with pytest.raises(BadInput):
        probe(tmp_path / "nowhere")


def test_proc_sys_of_this_machine_is_readable() -> None:
    assert HostReader(Path("/")).text("/proc/sys/kernel/osrelease") == os.uname().release


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff\x00\xfe", b"-1", b"N/A\n", b"0x" * 40, b"<a>", b"[1]", b"9" * 30, b"9" * 5000, "²³".encode()]
)
def test_invalid_content_of_every_file(garbage: bytes, tmp_path: Path) -> None:
    root = synthetic_hosts.build("neglected", tmp_path)
    files = [path for path in root.rglob("*") if path.is_file() and path.name not in ("vendor", "class")]
    for path in files:
        path.write_bytes(garbage)
    findings = doctor.diagnose(probe(root))
    assert len(findings) == len(doctor.CHECKS)
    assert not [finding for finding in findings if finding.verdict.fact.startswith("the check failed")]


def test_large_files_of_a_recording_take_little_time(tmp_path: Path) -> None:
    """An expression that is quadratic takes hours for a file of a megabyte."""
    root = synthetic_hosts.build("neglected", tmp_path)
    started = time.process_time()
    for path in ("proc/version", "proc/self/mounts", "proc/self/limits", "commands/nvidia-smi-q.xml", "commands/dmesg.txt"):
        for content in (b"\0", b"x", b"<serial>", b"pid=", b"flags "):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content * (200_000 // len(content)))
            probe(root)
    assert time.process_time() - started < 60


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_special_files_of_a_recording_are_not_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    root = synthetic_hosts.build("neglected", tmp_path)
    for path in [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]:
        path.unlink()
        make(path)
    host = probe(root)
    assert host.gpus == () and host.unread["/proc/version"] in ("not a regular file", "Is a directory")
    assert len(doctor.diagnose(host)) == len(doctor.CHECKS)


def test_wsl_is_detected_by_either_file(tmp_path: Path) -> None:
    root = synthetic_hosts.build("neglected", tmp_path)
    (root / "proc/version").unlink()
    assert probe(root).wsl is False
    (root / "proc/sys/kernel/osrelease").write_text("6.6.87.2-microsoft-standard-WSL2\n")
    assert probe(root).wsl
    (root / "proc/sys/kernel/osrelease").unlink()
    host = probe(root)
    verdicts = {finding.check: finding.status for finding in doctor.diagnose(host)}
    assert host.wsl is None and verdicts["wsl2"] is doctor.Status.UNKNOWN


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("Out of memory: Killed process 51234 (sglang::schedul) total-vm:2kB", "(sglang::schedul)"),
        ("Out of memory: Killed process 51234 (secret-program) total-vm:2kB", "(process)"),
        ("mlx5_core 0000:01:00.1: CREATE_MKEY(0x200) op_mod(0x0) failed, status no resources(0xf), err(-12)", "err(-12)"),
    ],
)
def test_the_kernel_log_keeps_what_ends_engines(line: str, kept: str, tmp_path: Path) -> None:
    root = synthetic_hosts.build("neglected", tmp_path)
    (root / "commands" / "dmesg.txt").write_text(line)
    host = probe(root)
    assert host.kernel_log is not None and kept in host.kernel_log[0] and "51234" not in host.kernel_log[0]
    (finding,) = [finding for finding in doctor.diagnose(host) if finding.check == "kernel-log"]
    assert finding.status is doctor.Status.PROBLEM


def test_invalid_or_missing_single_file(tmp_path: Path) -> None:
    root = synthetic_hosts.build("x4-link", tmp_path)
    for path in [path for path in root.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        path.write_bytes(b"\x01 garbage \xff")
        assert len(doctor.diagnose(probe(root))) == len(doctor.CHECKS), path
        path.unlink()
        assert len(doctor.diagnose(probe(root))) == len(doctor.CHECKS), path
        path.write_bytes(content)


def test_virtual_machine_is_detected_by_cpu_or_board(tmp_path: Path) -> None:
    root = synthetic_hosts.build("no-gpu", tmp_path)
    assert probe(root).virtual == ""
    (root / "proc/cpuinfo").write_text("flags\t: fpu hypervisor sse\n")
    assert probe(root).virtual == "WS WRX90E-SAGE"
    (root / "sys/class/dmi/id/product_name").unlink()
    (root / "sys/class/dmi/id/sys_vendor").unlink()
    assert probe(root).virtual == "unnamed hypervisor"
    (root / "proc/cpuinfo").unlink()
    assert probe(root).virtual is None


A, B, C = "0000:00:01.1", "0000:01:00.0", "0000:02:00.0"


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("PIX", ("pci0000:00", (A, B, "x"), 0), ("pci0000:00", (A, B, "y"), 0)),
        ("PIX", ("pci0000:00", (A,), 0), ("pci0000:00", (A,), 0)),
        ("PXB", ("pci0000:00", (A, B, C, "x", "z"), 0), ("pci0000:00", (A, B, "y"), 0)),
        ("PXB", ("pci0000:00", (A, B, "x", "v", "w"), 0), ("pci0000:00", (A, B, "y", "t", "u"), 1)),
        ("PXB", ("pci0000:00", (A, B, "x", "v"), 0), ("pci0000:00", (A, B, "y"), 0)),
        ("PHB", ("pci0000:00", (A,), 0), ("pci0000:00", ("0000:00:03.1",), 0)),
        ("PHB", ("pci0000:00", (), 0), ("pci0000:00", (), 0)),
        ("NODE", ("pci0000:00", (A,), 1), ("pci0000:40", ("0000:40:01.1",), 1)),
        ("SYS", ("pci0000:00", (A,), 0), ("pci0000:80", ("0000:80:01.1",), 1)),
        (None, ("pci0000:00", (A,), None), ("pci0000:80", ("0000:80:01.1",), 1)),
    ],
)
def test_topology_classes(
    kind: str | None, first: tuple[str, tuple[str, ...], int | None], second: tuple[str, tuple[str, ...], int | None]
) -> None:
    assert _pci.topology(first, second) == _pci.topology(second, first) == kind


def space(*capabilities: tuple[int, int, int, int]) -> bytes:
    """Configuration space with extended capabilities: (offset, id, next, word at +6)."""
    content = bytearray(4096)
    for offset, identifier, following, word in capabilities:
        struct.pack_into("<IHH", content, offset, identifier | 1 << 16 | following << 20, 0, word)
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (space((0x100, 0x000D, 0, 0x1D)), (True, 0x1D)),
        (space((0x100, 0x0001, 0x148, 0), (0x148, 0x0019, 0x2A0, 0), (0x2A0, 0x000D, 0, 0x11)), (True, 0x11)),
        (space((0x100, 0x0001, 0, 0)), (False, None)),
        (space((0x100, 0x0001, 0x100, 0)), (False, None)),  # a cyclic list
        (space((0x100, 0x0001, 0xFFC, 0)), (False, None)),  # an element beyond the end
        (bytes(64), (None, None)),
        (bytes(256), (None, None)),
        (b"", (None, None)),
    ],
)
def test_acs_in_configuration_space(content: bytes, expected: tuple[bool | None, int | None]) -> None:
    assert _pci.acs(content) == expected


def test_topology_matrix_with_other_devices() -> None:
    text = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \tNODE\tPHB\t0-31\t0\tN/A\n"
    text += "GPU1\tNODE\t X \tSYS\t0-31\t0\tN/A\nNIC0\tPHB\tSYS\t X \t\t\n\nLegend:\n\n  X    = Self\n"
    assert _nvidia.matrix(text) == {(0, 0): "X", (0, 1): "NODE", (1, 0): "NODE", (1, 1): "X"}
    assert _nvidia.matrix(None) == _nvidia.matrix("Failed to initialize NVML") == {}


def test_element_names_of_older_drivers(tmp_path: Path) -> None:
    root = synthetic_hosts.build("neglected", tmp_path)
    file = root / "commands" / "nvidia-smi-q.xml"
    text = (
        file.read_text()
        .replace("clocks_event_reason", "clocks_throttle_reason")
        .replace("gpu_power_readings", "power_readings")
    )
    file.write_text(text.replace("current_power_limit", "power_limit"))
    gpu = probe(root).gpus[0]
    assert gpu.active == ("hw_power_brake_slowdown", "sw_power_cap") and (gpu.power_limit, gpu.power_max) == (300, 600)


def test_registry_keys() -> None:
    assert _nvidia.registry('X: 1\nRegistryDwords: "ForceP2P=0x11; RMForceP2PType=1;"\n') == {
        "ForceP2P": "0x11",
        "RMForceP2PType": "1",
    }
    assert _nvidia.registry('RegistryDwords: ""\n') == {}
    assert _nvidia.registry('RegistryDwordsPerDevice: "a=1"\n') is None and _nvidia.registry(None) is None


@pytest.mark.parametrize(
    "number", ["9" * 24, "9" * 400, "\u0663", "\u00b2", "1e999", "-1", "0"], ids=lambda text: f"{text[:5]}x{len(text)}"
)
def test_numbers_of_a_recording_have_a_limit(number: str, tmp_path: Path) -> None:
    """Whatever stands in place of a number, also in file after file: doctor reports, and no finding needs long."""
    root = synthetic_hosts.build("neglected", tmp_path)
    for path in [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path.stat().st_size]:
        content = path.read_bytes()
        path.write_bytes(re.sub(rb"(?<![\w.:/-])[0-9]+(?![\w:/-])", number.encode(), content))
    findings = doctor.diagnose(probe(root))
    assert findings and all(len(finding.verdict.fact) < 2000 for finding in findings)
