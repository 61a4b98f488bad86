"""Measure copies and collectives between GPUs: ``measure(host, python) -> findings``.

``transfers.py`` runs in a child process with a time limit, because the faults that it detects cause hangs. Bytes and sums are
judged; rates are stated. Unverified on SM120.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core.errors import RequirementMissing
from sm120kit.core.process import Stopped, run_within
from sm120kit.hosts.doctor._findings import Diagnosis, Finding, Impact, ok, problem
from sm120kit.hosts.facts import Host

PROGRAM = Path(__file__).with_name("transfers.py")
SECONDS = 180
"""Time limit of one run of ``transfers.py``; a first NCCL start over many GPUs takes tens of seconds."""
SOURCE = "unverified on SM120; noonghunna/club-3090 docs/PCIE_P2P.md §5, §7; NVIDIA/open-gpu-kernel-modules#1257"


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
            f"--measure requires two discrete GPUs; this host has {count}", "sm120kit doctor without --measure only reads facts"
        )
    findings = judge_copies(run_transfers("copies", count, python))
    for ranks in dict.fromkeys((2, count)):
        findings += judge_collective(ranks, run_transfers("collective", ranks, python))
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
            # Number the GPUs as nvidia-smi does; the user's CUDA_VISIBLE_DEVICES would number others.
            env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": None}
            process = run_within(argv, seconds, env=env)
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


def judge_copies(output: TransferOutput) -> tuple[Finding, ...]:
    """The finding on the bytes that arrived, with the rates of copies."""
    pairs = output.having("pair")
    wrong = [f"GPU {line['pair'][0]} and {line['pair'][1]}: {line['wrong']} bytes" for line in pairs if line["wrong"]]
    rates = [
        f"GPU {line['pair'][0]}-{line['pair'][1]}: {line['one_way']:.1f} GB/s, {line['both_ways']:.1f} both ways"
        for line in pairs
    ]
    return (Finding("measure-bytes", "copies arrive unchanged", _verdict(output, wrong, "; ".join(rates)), SOURCE),)


def judge_collective(ranks: int, output: TransferOutput) -> tuple[Finding, ...]:
    """The finding on an all-reduce: that it ends and that its sums are correct, with its bus bandwidth."""
    sums, speeds = output.having("rank"), output.having("bus")
    wrong = [f"rank {line['rank']}: {line['wrong']} wrong sums" for line in sums if line["wrong"]]
    if len(sums) != ranks and not wrong:
        wrong = [f"{len(sums)} of {ranks} ranks returned a result"]
    fact = "".join(f"{line['bus']:.1f} GB/s bus bandwidth at 64 MiB, {line['small_us']:.0f} µs at 16 KiB" for line in speeds)
    title = f"all-reduce of {ranks} ranks is correct"
    return (Finding(f"measure-all-reduce-{ranks}", title, _verdict(output, wrong, fact), SOURCE),)


def _verdict(output: TransferOutput, wrong: list[str], fact: str) -> Diagnosis:
    """The result of a run: what was wrong, or ``fact``, which is empty if it ended without a result."""
    workaround = "NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce"
    if output.hung or output.failed or not fact:
        return problem(
            "measure.unfinished",
            Impact.BREAKS,
            f"not finished within {SECONDS} s: {output.hung}" if output.hung else output.failed or "ended without a result",
            fix=f"see the findings iommu, acs and hmm; workaround: {workaround}. A GPU that hung may need a reset or a reboot",
        )
    if wrong:
        return problem(
            "measure.wrong",
            Impact.BREAKS,
            "; ".join(wrong),
            fix=f"serve with {workaround}; remove ForceP2P; see the findings iommu and acs",
        )
    return ok(fact)
