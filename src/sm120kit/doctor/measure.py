"""P2P and collectives put to the test: ``measure(host, python) -> findings``.

The work is done by ``_measure.py`` in a process of its own with a time limit, since what it looks for hangs. The bands are what
others measured on RTX PRO 6000 and RTX 5090; nothing here has run on an SM120 GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.doctor.model import Finding, Impact, Verdict, ok, problem
from sm120kit.errors import CannotMeasure
from sm120kit.host import Host, Pair
from sm120kit.process import Stopped, deadline, run

PROGRAM = Path(__file__).with_name("_measure.py")
SECONDS = 180
"""What one step may take; a first NCCL start over many GPUs takes tens of seconds."""
SHARE = 0.8
"""Below this share of the lowest published figure a rate is slow."""
COLLAPSE = 0.5
BANDS = {
    ("PIX", 32.0): (52.2, 103.0),
    ("PXB", 32.0): (37.0, 94.0),
    ("PHB", 32.0): (55.0, 105.0),
    ("NODE", 32.0): (55.0, 105.0),
    ("SYS", 32.0): (39.0, 64.0),
    ("NODE", 16.0): (26.6, 46.6),
    ("PHB", 16.0): (26.6, 46.6),
}
"""(class, GT/s per lane) of x16 -> lowest published GB/s one way and both ways."""
BUS_BANDS = {(2, 16.0): 18.3, (8, 32.0): 22.2}
"""(ranks, GT/s) -> lowest published all-reduce bus bandwidth in GB/s."""
SOURCE = (
    "unverified on SM120; github.com/Visual-Synthesizer/rtx6kpro hardware/pcie-bandwidth.md, hardware/topology.md; "
    "noonghunna/club-3090 docs/PCIE_P2P.md §5, §7; NVIDIA/open-gpu-kernel-modules#1257"
)
WRONG_FIX = "serve with NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce; remove ForceP2P; look at iommu and acs"
HANG_FIX = "look at the findings iommu, acs and hmm; meanwhile NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce"


@dataclass(frozen=True)
class Told:
    """What the program said: its lines; ``hung`` is what it was about when its time was up, ``failed`` its last words."""

    lines: tuple[dict[str, Any], ...]
    hung: str = ""
    failed: str = ""

    def having(self, name: str) -> list[dict[str, Any]]:
        """The lines with one fact."""
        return [line for line in self.lines if name in line]


def measure(host: Host, python: str = sys.executable) -> tuple[Finding, ...]:
    """Copy between every pair of GPUs with read-back, then all-reduce with two ranks and with all.

    Raises:
        CannotMeasure: fewer than two GPUs, or no torch that can use them.
    """
    count = sum(not gpu.unified for gpu in host.gpus)
    if count < 2:
        raise CannotMeasure(
            f"measuring needs two GPUs with memory of their own; this host has {count}",
            "sm120kit doctor without --measure reads facts only",
        )
    copied = ask("copies", count, python)
    findings = judge_copies(host, copied)
    for ranks in dict.fromkeys((2, count)):
        findings += judge_collective(host, ranks, ask("collective", ranks, python))
    return findings


def ask(what: str, count: int, python: str, kind: str = "cuda", seconds: int = SECONDS) -> Told:
    """Run the program; whatever becomes of it is told.

    Raises:
        CannotMeasure: this Python has no torch, or torch does not see the GPUs.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "output")
        output.touch()
        argv: list[str | Path] = [python, PROGRAM, what, kind, str(count), output]
        done, words = None, ""
        try:
            with deadline(seconds) as stop:
                # GPUs are numbered as nvidia-smi has them; a choice of the user's would number others.
                surroundings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
                done = run(argv, env=surroundings, drop=["CUDA_VISIBLE_DEVICES"], check=False, stop=stop)
                words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except Stopped:
            pass
        lines = tuple(json.loads(line) for line in output.read_text().splitlines())
    about = [line["about"] for line in lines if "about" in line]
    if done is None:
        return Told(lines, hung=about[-1] if about else "starting torch")
    if done.returncode and not about:
        raise CannotMeasure(f"{python}: {words}", "name a Python whose torch has CUDA and NCCL: --python PATH")
    return Told(lines, failed=words if done.returncode else "")


def judge_copies(host: Host, told: Told) -> tuple[Finding, ...]:
    """Are bytes the same, is it as fast as elsewhere, and does it stay so when all GPUs write at once?"""
    title = "bytes arrive unchanged", "copies are as fast as elsewhere"
    if told.hung or told.failed:
        return (Finding("measure-bytes", title[0], _ended(told), SOURCE),)
    pairs = {(line["pair"][0], line["pair"][1]): line for line in told.having("pair")}
    wrong = [f"GPU {one} and {other}: {line['wrong']} bytes" for (one, other), line in pairs.items() if line["wrong"]]
    first = (
        problem(
            Impact.BREAKS,
            "; ".join(wrong),
            cause="P2P between these GPUs delivers other bytes than were sent; mostly the IOMMU translates",
            consequence='garbage output ("!!!!") or none of the draft tokens accepted, without any error',
            fix=WRONG_FIX,
        )
        if wrong
        else ok(f"{len(pairs)} pair(s), both ways")
    )
    facts, slow = [], []
    for (one, other), line in pairs.items():
        fact = f"GPU {one}-{other}: {line['one_way']:.1f} one way, {line['both_ways']:.1f} GB/s both ways"
        band = _band(host, one, other)
        if band is None:
            facts.append(f"{fact} (no published figure)")
        elif line["one_way"] < SHARE * band[0] or line["both_ways"] < SHARE * band[1]:
            slow.append(f"{fact} (published: {band[0]:g} and {band[1]:g})")
        else:
            facts.append(fact)
    alone = min((line["one_way"] for line in pairs.values()), default=0.0)
    for line in told.having("together"):
        fact = f"all at once: {line['together']:.1f} GB/s per pair"
        (slow if line["together"] < COLLAPSE * alone else facts).append(fact)
    second = (
        problem(
            Impact.SLOWS,
            "; ".join(slow),
            cause="P2P is refused or staged in host memory, ACS redirects it, a link is narrow, or writes collapse in a switch",
            consequence="all-reduce and prefill are slower by as much",
            fix="look at the findings acs, link-width, link-speed, bar1, p2p-grant, force-p2p and posted-writes",
        )
        if slow
        else ok("; ".join(facts))
    )
    return (
        Finding("measure-bytes", title[0], first, SOURCE),
        Finding("measure-copies", title[1], second, SOURCE),
    )


def judge_collective(host: Host, ranks: int, told: Told) -> tuple[Finding, ...]:
    """Does an all-reduce end, is its sum right, and is it as fast as elsewhere?"""
    name, title = f"measure-all-reduce-{ranks}", f"all-reduce of {ranks} ranks works"
    sums, speeds = told.having("rank"), told.having("bus")
    if told.hung or told.failed or not speeds:
        return (Finding(name, title, _ended(told), SOURCE),)
    wrong = [f"rank {line['rank']}: {line['wrong']} sums" for line in sums if line["wrong"]]
    fact = f"{speeds[0]['bus']:.1f} GB/s bus bandwidth at 64 MiB, {speeds[0]['small_us']:.0f} µs at 16 KiB"
    lowest = BUS_BANDS.get((ranks, min((gpu.link.max_speed or 0.0 for gpu in host.gpus), default=0.0)))
    if wrong or len(sums) != ranks:
        verdict = problem(
            Impact.BREAKS,
            "; ".join(wrong) or f"{len(sums)} of {ranks} ranks answered",
            cause="NCCL's P2P transport delivers other bytes than were sent",
            consequence="wrong results from every model on several GPUs",
            fix=WRONG_FIX,
        )
    elif lowest and speeds[0]["bus"] < SHARE * lowest:
        verdict = problem(
            Impact.SLOWS,
            f"{fact} (published: {lowest:g} GB/s)",
            cause="NCCL does not use P2P, or few channels",
            consequence="tensor parallelism is slower by as much",
            fix="look at the findings acs, p2p-grant, nccl-p2p-disable and turin-graph; NCCL_DEBUG=INFO shows the transport",
        )
    else:
        verdict = ok(fact)
    return (Finding(name, title, verdict, SOURCE),)


def _ended(told: Told) -> Verdict:
    if told.hung:
        return problem(
            Impact.BREAKS,
            f"no end within {SECONDS} s: {told.hung}",
            cause="peer traffic goes nowhere: the IOMMU translates it, ACS redirects it, or HMM is on",
            consequence="engines hang at the same point, with GPUs at 100 % and no error",
            fix=f"{HANG_FIX}. A GPU that hung may need a reset or a reboot",
        )
    return problem(
        Impact.BREAKS,
        told.failed or "it ended without a result",
        cause="a copy or collective failed",
        consequence="engines fail at the same point",
        fix=HANG_FIX,
    )


def _band(host: Host, one: int, other: int) -> tuple[float, float] | None:
    """The lowest published rates for a pair, scaled to its lanes; None for classes that nobody has published."""
    ends = [host.gpus[one], host.gpus[other]]
    pair: Pair | None = next((pair for pair in host.pairs if {pair.first, pair.second} == {gpu.bus for gpu in ends}), None)
    if pair is None or (pair.said or "").startswith("NV"):
        return None
    speed = min(gpu.link.max_speed or 0.0 for gpu in ends)
    lanes = min(gpu.link.max_width or 0 for gpu in ends)
    band = BANDS.get((pair.kind or "", speed))
    return (band[0] * lanes / 16, band[1] * lanes / 16) if band else None
