"""Checks of peer-to-peer access: what the driver permits, and the registry keys that change it."""

from __future__ import annotations

from sm120kit.hosts.doctor import _gpus
from sm120kit.hosts.doctor._findings import Diagnosis, Impact, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.facts import Host
from sm120kit.hosts.facts._fact_records import SWITCHED

PARAMS = "/proc/driver/nvidia/params"
FORCE_P2P = {
    "ForceP2P": "0x11",
    "RMForceP2PType": "1",
    "RMPcieP2PType": "2",
    "GrdmaPciTopoCheckOverride": "1",
    "EnableResizableBar": "1",
}
STATIC_BAR_SINCE = (610,)
STATIC_BAR = {"RMForceStaticBar1": "1", "PeerMappingOverride": "1"}
REFUSALS = {
    "CNS": "the chipset is not on the driver's list, as in every virtual machine",
    "GNS": "the driver does not support P2P on this GPU; NVIDIA's driver never does on GeForce",
    "TNS": "the driver does not support P2P on this topology",
    "DR": "disabled by a registry key",
    "NS": "not supported",
}
"""Legend of ``nvidia-smi topo -p2p``."""


@check("p2p-grant")
def grant(host: Host) -> Diagnosis:
    codes = {pair.granted for pair in host.pairs}
    if None in codes:
        return unknown(host.missing_reason("nvidia-smi-topo-p2p-r.txt"), "nvidia-smi topo -p2p r")
    refusals = sorted(code for code in codes if code and code != "OK")
    if refusals:
        expected = "NCCL_P2P_DISABLE" in host.environment or any(gpu.consumer for gpu in host.gpus)
        return problem(
            "p2p-grant",
            Impact.MINOR if expected else Impact.SLOWS,
            "; ".join(f"{code}: {REFUSALS.get(code, 'no P2P')}" for code in refusals),
        )
    return ok(f"{len(host.pairs)} pair(s): OK")


@check("force-p2p")
def force_p2p(host: Host) -> Diagnosis:
    if any(gpu.consumer for gpu in host.gpus):
        return not_applicable("GeForce: these keys apply to RTX PRO cards")
    registry = host.driver.registry
    if registry is None:
        return unknown(
            host.missing_reason(PARAMS), f"grep RegistryDwords {PARAMS} (the file under /sys/module reads empty even when set)"
        )
    kinds = {pair.kind for pair in host.pairs}
    if None in kinds:
        return unknown("the topology is unknown", "nvidia-smi topo -m")
    forced = "ForceP2P" in registry
    switched = kinds & set(SWITCHED)
    if switched and forced:
        return problem(
            "force-p2p.switched",
            Impact.BREAKS,
            f"ForceP2P={registry['ForceP2P']} with {', '.join(sorted(kind for kind in kinds if kind))} pairs",
        )
    if switched:
        return ok("not set, which is correct behind a PCIe switch")
    missing = [key for key, value in FORCE_P2P.items() if not _equal(registry.get(key), value)]
    if missing:
        keys = ";".join(f"{key}={value}" for key, value in FORCE_P2P.items())
        return problem(
            "force-p2p.missing",
            Impact.MINOR,
            f"{', '.join(sorted(kind for kind in kinds if kind))}: {', '.join(missing)} not set",
            fix=f"echo 'options nvidia NVreg_RegistryDwords=\"{keys}\"' | sudo tee /etc/modprobe.d/nvidia-p2p.conf; "
            "sudo update-initramfs -u; reboot; then sm120kit doctor --measure, because forced P2P has corrupted data",
        )
    return ok("set")


def _equal(value: str | None, expected: str) -> bool:
    try:
        return value is not None and int(value, 0) == int(expected, 0)
    except ValueError:
        return False


@check("static-bar1")
def static_bar1(host: Host) -> Diagnosis:
    patched = all(gpu.consumer for gpu in host.gpus) and any(pair.granted == "OK" for pair in host.pairs)
    if not patched:
        return not_applicable("applies to GeForce cards with a third-party driver that permits P2P")
    registry = host.driver.registry
    if registry is None:
        return unknown(host.missing_reason(PARAMS), f"grep RegistryDwords {PARAMS}")
    missing = [key for key, value in STATIC_BAR.items() if not _equal(registry.get(key), value)]
    if missing:
        keys = ";".join(f"{key}={value}" for key, value in STATIC_BAR.items())
        required = (_gpus.numbers(host.driver.version or "") or (0,)) >= STATIC_BAR_SINCE
        hint = "" if required else "only if NCCL hangs: "
        return problem(
            "static-bar1",
            Impact.BREAKS if required else Impact.MINOR,
            f"{', '.join(missing)} not set, driver {host.driver.version or 'unknown'}",
            fix=f'{hint}options nvidia NVreg_RegistryDwords="{keys}" in /etc/modprobe.d/; costs 2 to 3 %',
        )
    return ok("set")


@check("p2p-check")
def p2p_check(host: Host) -> Diagnosis:
    patched = any(gpu.consumer for gpu in host.gpus) and any(pair.granted == "OK" for pair in host.pairs)
    if not patched:
        return not_applicable("applies to GeForce cards with a third-party driver that permits P2P")
    if host.environment.get("VLLM_SKIP_P2P_CHECK") != "0":
        return problem("p2p-check", Impact.MINOR, "the driver permits P2P on GeForce, and VLLM_SKIP_P2P_CHECK is not 0")
    return ok("VLLM_SKIP_P2P_CHECK=0")
