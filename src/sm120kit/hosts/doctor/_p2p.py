"""Checks of peer-to-peer access, NCCL and custom all-reduce: what the driver permits, registry keys, variables, stale caches.

Whether NCCL uses P2P follows ncclGetLevel and ncclTopoCheckP2p in NCCL's src/graph/paths.cc.
"""

import re

from sm120kit.hosts.doctor import _gpus
from sm120kit.hosts.doctor._findings import Diagnosis, Impact, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.facts import Host
from sm120kit.hosts.facts._fact_records import SWITCHED, PeerCache

LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS")
"""Values of NCCL_P2P_LEVEL, nearest first."""
NEEDED = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
"""Topology class, nearest first -> the nearest level that includes it."""
_NUMBERED = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")


def p2p_level(value: str) -> str | None:
    """The level that NCCL reads from a value of NCCL_P2P_LEVEL; None if it ignores the value."""
    if value in LEVELS:
        return value
    number = re.match(r"0*([0-9]+)", value)
    return _NUMBERED[min(int(number[1][:4]), len(_NUMBERED) - 1)] if number else None


def p2p_disabled(value: str) -> bool:
    """Whether NCCL reads a value of NCCL_P2P_DISABLE as 1."""
    return re.match(r"\s*\+?(0[xX])?0*1(?![0-9])", value) is not None


def p2p_unused(host: Host) -> str:
    """The reason why NCCL does not use P2P between the GPUs of a host; "" if it does, or may.

    A status that is unknown counts as refused for GeForce, as by NVIDIA's driver, and as granted for other GPUs.
    """
    if all(pair.granted is None for pair in host.pairs) and any(gpu.consumer for gpu in host.gpus):
        return "NVIDIA's driver does not support P2P on GeForce"
    codes = {pair.granted for pair in host.pairs}
    if codes and not codes & {"OK", None}:
        return f"the driver refuses P2P ({', '.join(sorted(map(str, codes)))})"
    if p2p_disabled(host.environment.get("NCCL_P2P_DISABLE", "")):
        return "NCCL_P2P_DISABLE=1"
    level = p2p_level(host.environment.get("NCCL_P2P_LEVEL", ""))
    needed = {NEEDED[pair.kind] for pair in host.pairs if pair.kind in NEEDED}
    if level and needed and all(LEVELS.index(level) < LEVELS.index(name) for name in needed):
        return f"NCCL_P2P_LEVEL={level} excludes every pair"
    return ""


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


SHIMS = {"libvgpu.so": "HAMi", "libvcuda.so": "gpu-manager", "libcuda-control.so": "gpu-manager"}
"""File name of a preloaded library that intercepts CUDA calls -> the program that installs it."""
CUSTOM_GPUS = 2
"""Number of GPUs without NVLink for which vLLM uses its custom all-reduce (custom_all_reduce.py)."""


@check("nccl-p2p-level")
def nccl_p2p_level(host: Host) -> Diagnosis:
    level = host.environment.get("NCCL_P2P_LEVEL")
    if level is None:
        return ok("not set: NCCL's default applies")
    if level in LEVELS:
        return ok(f"NCCL_P2P_LEVEL={level}")
    kinds = [pair.kind for pair in host.pairs if pair.kind in NEEDED]
    farthest = max(kinds, key=list(NEEDED).index, default="SYS")
    fix = f"NCCL_P2P_LEVEL={NEEDED[farthest]}, the name for this host's most distant pair ({farthest})"
    if p2p_level(level):
        return problem(
            "nccl-p2p-level.numbered", Impact.MINOR, f"NCCL_P2P_LEVEL={level}, which NCCL reads as {p2p_level(level)}", fix=fix
        )
    return problem(
        "nccl-p2p-level.unknown", Impact.SLOWS, f"NCCL_P2P_LEVEL={level} is not a level: {', '.join(LEVELS)}", fix=fix
    )


@check("nccl-p2p-disable")
def p2p_disable(host: Host) -> Diagnosis:
    value = host.environment.get("NCCL_P2P_DISABLE", "0")
    if value == "0":
        return ok("NCCL_P2P_DISABLE is not set")
    if not p2p_disabled(value):
        return problem("nccl-p2p-disable.other", Impact.MINOR, f"NCCL_P2P_DISABLE={value}")
    if any(pair.granted not in ("OK", None) for pair in host.pairs):
        return ok("NCCL_P2P_DISABLE is set, and the driver refuses P2P on this host")
    return problem("nccl-p2p-disable", Impact.MINOR, "NCCL_P2P_DISABLE=1")


@check("allocator")
def allocator(host: Host) -> Diagnosis:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    expandable = [name for name in names if "expandable_segments:true" in host.environment.get(name, "").lower()]
    if expandable:
        custom = len(host.gpus) == CUSTOM_GPUS and not p2p_unused(host)
        return problem(
            "allocator",
            Impact.BREAKS if custom else Impact.MINOR,
            f"{expandable[0]}: expandable_segments:True",
            fix=f"unset {expandable[0]}, or serve with --disable-custom-all-reduce",
        )
    return ok("no expandable segments")


@check("peer-cache")
def peer_cache(host: Host) -> Diagnosis:
    if not host.peer_caches:
        return not_applicable("no cached P2P results")
    stale = [cache.path for cache in host.peer_caches if _stale(cache, host)]
    if stale:
        return problem("peer-cache", Impact.BREAKS, ", ".join(stale), fix=f"rm {' '.join(stale)}")
    return ok("agrees with the driver")


def _stale(cache: PeerCache, host: Host) -> bool:
    """Whether a cache is unreadable, names GPUs that do not exist, or contradicts the driver."""
    if cache.verdicts is None:
        return True
    numbers = set(map(str, range(len(host.gpus))))
    if any(gpu not in numbers for pair in cache.verdicts for gpu in pair.split("->")):
        return True
    peers = [allowed for pair, allowed in cache.verdicts.items() if len(set(pair.split("->"))) == 2]
    refused = any(pair.granted not in ("OK", None) for pair in host.pairs)
    granted = all(pair.granted == "OK" for pair in host.pairs)
    return (refused and any(peers)) or (granted and not all(peers))


@check("preload")
def preload(host: Host) -> Diagnosis:
    shims = [name for name in host.preloaded if name.partition(".so")[0] + ".so" in SHIMS]
    if not shims:
        return ok(f"preloaded: {', '.join(host.preloaded) or 'nothing'}")
    owners = ", ".join(sorted({SHIMS[name.partition(".so")[0] + ".so"] for name in shims}))
    disabled = host.environment.get("CUDA_DISABLE_CONTROL", "").lower() == "true"
    return problem(
        "preload",
        Impact.MINOR if disabled or len(host.gpus) < 2 else Impact.BREAKS,
        f"{', '.join(shims)} ({owners}){', CUDA_DISABLE_CONTROL=true' if disabled else ''}",
    )
