"""Peer-to-peer: what the driver grants, and the registry keys that change it."""

from __future__ import annotations

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, not_applicable, ok, problem, unknown
from sm120kit.host import Host
from sm120kit.host.facts import SWITCHED

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
CLUB = "noonghunna/club-3090 docs/PCIE_P2P.md"
PARAMS = "/proc/driver/nvidia/params"
FORCE_P2P = {
    "ForceP2P": "0x11",
    "RMForceP2PType": "1",
    "RMPcieP2PType": "2",
    "GrdmaPciTopoCheckOverride": "1",
    "EnableResizableBar": "1",
}
STATIC_BAR = {"RMForceStaticBar1": "1", "PeerMappingOverride": "1"}
REFUSALS = {
    "CNS": "the chipset is not on the driver's list, as in every guest",
    "GNS": "the driver refuses P2P on this GPU, as NVIDIA's own does on GeForce",
    "TNS": "the driver does not do P2P over this topology",
    "DR": "a registry key turned it off",
    "NS": "not supported",
}
"""``nvidia-smi topo -p2p``, its legend."""


@check("p2p-grant", "the driver grants P2P", Scope.PAIR, f"nvidia-smi topo -p2p, legend; {CLUB} §4a, §5")
def grant(host: Host) -> Verdict:
    said = {pair.granted for pair in host.pairs}
    if None in said:
        return unknown(host.why("nvidia-smi-topo-p2p-r.txt"), "nvidia-smi topo -p2p r")
    refused = sorted(word for word in said if word and word != "OK")
    if refused:
        return problem(
            Impact.SLOWS,
            "; ".join(f"{word}: {REFUSALS.get(word, 'no P2P')}" for word in refused),
            cause="the driver refuses direct access between GPUs",
            consequence="all-reduce goes through host memory; an engine that assumes P2P may hang",
            fix="serve with NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce; for P2P: bare metal, ReBAR, RTX PRO cards",
        )
    return ok(f"{len(host.pairs)} pair(s): OK")


@check(
    "force-p2p",
    "ForceP2P is set where it helps, and only there",
    Scope.BARE_PAIR,
    f"{WIKI} hardware/pcie-bandwidth.md; {CLUB} §4a; NVIDIA/open-gpu-kernel-modules#1257",
)
def force_p2p(host: Host) -> Verdict:
    if any(gpu.consumer for gpu in host.gpus):
        return not_applicable("GeForce: these keys are for RTX PRO cards")
    registry = host.driver.registry
    if registry is None:
        return unknown(host.why(PARAMS), f"grep RegistryDwords {PARAMS} (the file under /sys/module reads empty even when set)")
    kinds = {pair.kind for pair in host.pairs}
    if None in kinds:
        return unknown("the topology is not known", "nvidia-smi topo -m")
    forced = "ForceP2P" in registry
    switched = kinds & set(SWITCHED)
    if switched and forced:
        return problem(
            Impact.BREAKS,
            f"ForceP2P={registry['ForceP2P']} with {', '.join(sorted(kind for kind in kinds if kind))} pairs",
            cause="behind a PCIe switch the driver uses BAR1 P2P by itself; forcing it breaks the detection",
            consequence="the crossover test of one-shot all-reduce goes wrong",
            fix="remove ForceP2P from /etc/modprobe.d/, sudo update-initramfs -u, reboot",
        )
    if switched:
        return ok("not set, as it should be behind a switch")
    missing = [key for key, value in FORCE_P2P.items() if not _same(registry.get(key), value)]
    if missing:
        keys = ";".join(f"{key}={value}" for key, value in FORCE_P2P.items())
        return problem(
            Impact.SLOWS,
            f"{', '.join(sorted(kind for kind in kinds if kind))}: {', '.join(missing)} not set",
            cause="without a switch the driver stages peer writes in host memory unless told otherwise",
            consequence="one-shot all-reduce takes 59 instead of 7 µs at 16 KB, and engines turn it off above 4 KB",
            fix=f"echo 'options nvidia NVreg_RegistryDwords=\"{keys}\"' | sudo tee /etc/modprobe.d/nvidia-p2p.conf; "
            "sudo update-initramfs -u; reboot; then sm120kit doctor --measure: such P2P has corrupted data",
        )
    return ok("set")


def _same(found: str | None, wanted: str) -> bool:
    try:
        return found is not None and int(found, 0) == int(wanted, 0)
    except ValueError:
        return False


@check("static-bar1", "a patched GeForce driver maps peers statically", Scope.BARE_PAIR, "noonghunna/club-3090#873")
def static_bar1(host: Host) -> Verdict:
    patched = all(gpu.consumer for gpu in host.gpus) and any(pair.granted == "OK" for pair in host.pairs)
    if not patched:
        return not_applicable("concerns GeForce cards with a third-party driver that grants P2P")
    registry = host.driver.registry
    if registry is None:
        return unknown(host.why(PARAMS), f"grep RegistryDwords {PARAMS}")
    missing = [key for key, value in STATIC_BAR.items() if not _same(registry.get(key), value)]
    if missing:
        keys = ";".join(f"{key}={value}" for key, value in STATIC_BAR.items())
        return problem(
            Impact.MINOR,
            f"{', '.join(missing)} not set",
            cause="some branches of the patched driver need these keys",
            consequence="nvidia-smi topo says OK and NCCL hangs while it starts",
            fix=f'only when it hangs: options nvidia NVreg_RegistryDwords="{keys}" in /etc/modprobe.d/; costs 2 to 3 %',
        )
    return ok("set")


@check("p2p-check", "engines test P2P that was forced upon GeForce", Scope.PAIR, f"noonghunna/club-3090#922; {CLUB} §7")
def p2p_check(host: Host) -> Verdict:
    patched = any(gpu.consumer for gpu in host.gpus) and any(pair.granted == "OK" for pair in host.pairs)
    if not patched:
        return not_applicable("concerns GeForce cards with a third-party driver that grants P2P")
    if host.environment.get("VLLM_SKIP_P2P_CHECK") != "0":
        return problem(
            Impact.BREAKS,
            "P2P is granted on GeForce, and VLLM_SKIP_P2P_CHECK is not 0",
            cause="vLLM trusts the driver's grant and does not look whether data arrive unchanged",
            consequence='output of "!!!!" and no accepted draft tokens, while NCCL looks healthy',
            fix="VLLM_SKIP_P2P_CHECK=0, and sm120kit doctor --measure; if it reports wrong bytes: --disable-custom-all-reduce",
        )
    return ok("VLLM_SKIP_P2P_CHECK=0")


CHECKS: tuple[Check, ...] = (grant, force_p2p, static_bar1, p2p_check)
