"""Measure copies and collectives between GPUs: ``measure(host, python) -> findings``.

``transfers.py`` runs in a child process with a time limit, because the faults that it detects cause hangs. Results are compared
with figures that others published for RTX PRO 6000 and RTX 5090; unverified on SM120.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core.errors import RequirementMissing
from sm120kit.core.process import Stopped, deadline, run_until
from sm120kit.hosts.doctor._findings import Diagnosis, Finding, Impact, ok, problem
from sm120kit.hosts.facts import GpuPair, Host

PROGRAM = Path(__file__).with_name("transfers.py")
SECONDS = 180
"""Time limit of one run of ``transfers.py``; a first NCCL start over many GPUs takes tens of seconds."""
SHARE = 0.8
"""Below this share of the lowest published figure a rate is slow."""
COLLAPSE = 0.5
"""Below this share of the slowest single pair, concurrent copies are slow."""
BANDS = {
    ("PIX", 32.0): (52.2, 103.0),
    ("PXB", 32.0): (37.0, 94.0),
    ("PHB", 32.0): (55.0, 105.0),
    ("NODE", 32.0): (55.0, 105.0),
    ("SYS", 32.0): (39.0, 64.0),
    ("NODE", 16.0): (26.6, 46.6),
    ("PHB", 16.0): (26.6, 46.6),
}
"""(topology class, GT/s per lane) -> lowest published GB/s over x16, one way and both ways."""
BUS_BANDS = {(2, 16.0): 18.3, (8, 32.0): 22.2}
"""(ranks, GT/s) -> lowest published all-reduce bus bandwidth in GB/s."""
SOURCE = (
    "unverified on SM120; github.com/Visual-Synthesizer/rtx6kpro hardware/pcie-bandwidth.md, hardware/topology.md; "
    "noonghunna/club-3090 docs/PCIE_P2P.md §5, §7; NVIDIA/open-gpu-kernel-modules#1257"
)
WRONG_FIX = "serve with NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce; remove ForceP2P; see the findings iommu and acs"
HANG_FIX = "see the findings iommu, acs and hmm; workaround: NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce"
BYTES_TITLE = "copies arrive unchanged"
COPIES_TITLE = "copies reach the published rates"


@dataclass(frozen=True)
class TransferOutput:
    """Output lines of ``transfers.py``; ``hung`` is the step that exceeded the time limit, ``failed`` the last error line."""

    lines: tuple[dict[str, Any], ...]
    hung: str = ""
    failed: str = ""

    def having(self, key: str) -> list[dict[str, Any]]:
        """The lines that contain a key."""
        return [line for line in self.lines if key in line]


def measure(host: Host, python: str = sys.executable) -> tuple[Finding, ...]:
    """Copy between every pair of GPUs and verify the bytes, then all-reduce with two ranks and with all GPUs.

    Raises:
        RequirementMissing: fewer than two discrete GPUs, or no torch that can use them.
    """
    count = sum(not gpu.unified for gpu in host.gpus)
    if count < 2:
        raise RequirementMissing(
            f"--measure requires two discrete GPUs; this host has {count}",
            "sm120kit doctor without --measure only reads facts",
        )
    findings = judge_copies(host, run_transfers("copies", count, python))
    for ranks in dict.fromkeys((2, count)):
        findings += judge_collective(host, ranks, run_transfers("collective", ranks, python))
    return findings


def run_transfers(mode: str, count: int, python: str, kind: str = "cuda", seconds: int = SECONDS) -> TransferOutput:
    """Run ``transfers.py`` and return its output, also when it hangs or fails.

    Raises:
        RequirementMissing: this Python has no torch, or torch does not detect the GPUs.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "output")
        output.touch()
        argv: list[str | Path] = [python, PROGRAM, mode, kind, str(count), output]
        process, message = None, ""
        try:
            with deadline(seconds) as stop:
                # Number the GPUs as nvidia-smi does; the user's CUDA_VISIBLE_DEVICES would number others.
                env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": None}
                process = run_until(argv, stop, env=env)
                message = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        except Stopped:
            pass
        lines = tuple(json.loads(line) for line in output.read_text().splitlines())
    steps = [line["step"] for line in lines if "step" in line]
    if process is None:
        return TransferOutput(lines, hung=steps[-1] if steps else "starting torch")
    if process.returncode and not steps:
        raise RequirementMissing(f"{python}: {message}", "name a Python whose torch supports CUDA and NCCL: --python PATH")
    return TransferOutput(lines, failed=message if process.returncode else "")


def judge_copies(host: Host, output: TransferOutput) -> tuple[Finding, ...]:
    """Findings on the bytes that arrived, and on the rates of single and concurrent copies."""
    if output.hung or output.failed:
        return (Finding("measure-bytes", BYTES_TITLE, _not_finished(output), SOURCE),)
    return (
        Finding("measure-bytes", BYTES_TITLE, _bytes(output), SOURCE),
        Finding("measure-copies", COPIES_TITLE, _rates(host, output), SOURCE),
    )


def _bytes(output: TransferOutput) -> Diagnosis:
    pairs = output.having("pair")
    wrong = [f"GPU {line['pair'][0]} and {line['pair'][1]}: {line['wrong']} bytes" for line in pairs if line["wrong"]]
    if wrong:
        return problem(
            Impact.BREAKS,
            "; ".join(wrong),
            cause="P2P between these GPUs corrupts data, usually because the IOMMU translates addresses",
            consequence='garbage output ("!!!!") or no accepted draft tokens, without any error',
            fix=WRONG_FIX,
        )
    return ok(f"{len(pairs)} pair(s), both ways")


def _rates(host: Host, output: TransferOutput) -> Diagnosis:
    normal, slow = [], []
    for line in output.having("pair"):
        first, second = line["pair"]
        fact = f"GPU {first}-{second}: {line['one_way']:.1f} GB/s one way, {line['both_ways']:.1f} both ways"
        band = _band(host, first, second)
        if band is None:
            normal.append(f"{fact} (no published figure)")
        elif line["one_way"] < SHARE * band[0] or line["both_ways"] < SHARE * band[1]:
            slow.append(f"{fact} (published: {band[0]:g} and {band[1]:g})")
        else:
            normal.append(fact)
    slowest = min((line["one_way"] for line in output.having("pair")), default=0.0)
    for line in output.having("concurrent"):
        fact = f"all GPUs concurrently: {line['concurrent']:.1f} GB/s per pair"
        (slow if line["concurrent"] < COLLAPSE * slowest else normal).append(fact)
    if slow:
        return problem(
            Impact.SLOWS,
            "; ".join(slow),
            cause="P2P is refused or staged in host memory, ACS redirects it, a link is narrow, or writes collapse in a switch",
            consequence="all-reduce and prefill are slower in proportion",
            fix="see the findings acs, link-width, link-speed, bar1, p2p-grant, force-p2p and posted-writes",
        )
    return ok("; ".join(normal))


def judge_collective(host: Host, ranks: int, output: TransferOutput) -> tuple[Finding, ...]:
    """The finding on an all-reduce: that it ends, that its sums are correct, and its bus bandwidth."""
    name, title = f"measure-all-reduce-{ranks}", f"all-reduce of {ranks} ranks is correct and fast"
    return (Finding(name, title, _collective(host, ranks, output), SOURCE),)


def _collective(host: Host, ranks: int, output: TransferOutput) -> Diagnosis:
    sums, speeds = output.having("rank"), output.having("bus")
    if output.hung or output.failed or not speeds:
        return _not_finished(output)
    wrong = [f"rank {line['rank']}: {line['wrong']} wrong sums" for line in sums if line["wrong"]]
    if wrong or len(sums) != ranks:
        return problem(
            Impact.BREAKS,
            "; ".join(wrong) or f"{len(sums)} of {ranks} ranks returned a result",
            cause="NCCL's P2P transport corrupts data",
            consequence="wrong results from every model on several GPUs",
            fix=WRONG_FIX,
        )
    fact = f"{speeds[0]['bus']:.1f} GB/s bus bandwidth at 64 MiB, {speeds[0]['small_us']:.0f} µs at 16 KiB"
    lowest = BUS_BANDS.get((ranks, min((gpu.link.max_speed or 0.0 for gpu in host.gpus), default=0.0)))
    if lowest and speeds[0]["bus"] < SHARE * lowest:
        return problem(
            Impact.SLOWS,
            f"{fact} (published: {lowest:g} GB/s)",
            cause="NCCL does not use P2P, or uses few channels",
            consequence="tensor parallelism is slower in proportion",
            fix="see the findings acs, p2p-grant, nccl-p2p-disable and turin-graph; NCCL_DEBUG=INFO prints the transport",
        )
    return ok(fact)


def _not_finished(output: TransferOutput) -> Diagnosis:
    if output.hung:
        return problem(
            Impact.BREAKS,
            f"not finished within {SECONDS} s: {output.hung}",
            cause="peer traffic does not arrive: the IOMMU translates it, ACS redirects it, or HMM is on",
            consequence="engines hang at the same point, with GPUs at 100 % and no error",
            fix=f"{HANG_FIX}. A GPU that hung may need a reset or a reboot",
        )
    return problem(
        Impact.BREAKS,
        output.failed or "ended without a result",
        cause="a copy or a collective failed",
        consequence="engines fail at the same point",
        fix=HANG_FIX,
    )


def _band(host: Host, first: int, second: int) -> tuple[float, float] | None:
    """Lowest published GB/s of a pair, one way and both ways, scaled to its lanes; None without a published figure."""
    ends = [host.gpus[first], host.gpus[second]]
    pair: GpuPair | None = next((pair for pair in host.pairs if {pair.first, pair.second} == {gpu.bus for gpu in ends}), None)
    if pair is None or (pair.smi or "").startswith("NV"):
        return None
    speed = min(gpu.link.max_speed or 0.0 for gpu in ends)
    lanes = min(gpu.link.max_width or 0 for gpu in ends)
    band = BANDS.get((pair.kind or "", speed))
    return (band[0] * lanes / 16, band[1] * lanes / 16) if band else None
