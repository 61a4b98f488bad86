"""How many seeded faults of synchronisation delays find: ``races.py PROGRAM [JSON]`` with the program of races.cu.

On a Hopper GPU, it prints for each fault whether it is seen without delays, and with those of 8 seeds; kernels without a fault
run with 50. Exit code 0: no such kernel was ever wrong. ``PYTHONPATH`` has sm12x_lab; state is that of sm120kit.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sm12x_lab.ptx import interposed, races
from sm120kit.core import process, toolchain
from sm120kit.core.workspace import Workspace

FAULTS = {
    "pipeline (cp.async)": [
        "wait_group too large",
        "no wait_group",
        "no barrier after the wait",
        "copy into the stage that is read",
        "last wait left out",
        "a group not committed",
        "copy issued after the read, without a barrier",
    ],
    "bulk copies (mbarrier)": [
        "no wait for a full stage",
        "wait for the other parity",
        "stage released before it is read",
        "no wait for an empty stage",
        "one arrival empties a stage",
        "a part of the bytes is not expected",
        "no __syncwarp before the release",
    ],
    "bulk store": [
        "no proxy fence",
        "no barrier before the store",
        "no wait before the buffer is overwritten",
        "wait_group.read too large",
        "no barrier after the wait",
        "barrier of half of the threads",
        "another thread waits than the one that stored",
    ],
    "attention (maxima of warps)": [
        "no barrier after the maxima",
        "no barrier before the next block",
        "maxima reset before others have read them",
        "barrier of half of the threads",
        "no __syncwarp",
        "arrive in place of sync",
    ],
    "split-K": [
        "no barrier before the ticket",
        "no fence before the ticket",
        "ticket before the stores",
        "no barrier after the ticket",
        "last but one takes itself for the last",
        "barrier of half of the threads",
    ],
    "phases (all CTAs meet)": [
        "first meeting left out",
        "one CTA too few",
        "no barrier before the arrival",
        "no barrier after it",
        "the second meeting counts as the first",
        "no fence before the arrival",
        "second meeting left out",
    ],
}
"""Faults of each kernel, numbered from 1."""

SEEDS, HEALTHY_SEEDS, AT_ONCE, SECONDS = range(1, 9), range(1, 51), 6, 30.0


def main() -> int:
    program = str(Path(sys.argv[1]).resolve())
    with interposed.prepared(None, Workspace.open(None), toolchain.find(), perturbed=True) as interposition:

        def run(kernel: int, fault: int, seed: int | None = None) -> str:
            delays = f"{seed} 0 {races.EVERY_SITE} {races.EVERY_MODULE}" if seed is not None else ""
            environment = interposition.environment() | {races.DELAYS: delays}
            try:
                with process.deadline(SECONDS) as late:
                    done = process.run_until([program, str(kernel), str(fault)], late, env=environment, tied=True)
            except process.Stopped:
                return "did not end"
            return done.stdout.strip() if not done.returncode else f"exit code {done.returncode}"

        right = [run(kernel, 0) for kernel in range(len(FAULTS))]
        jobs = [(kernel, fault) for kernel, names in enumerate(FAULTS.values()) for fault in range(len(names) + 1)]

        def examine(job: tuple[int, int]) -> dict[str, object]:
            kernel, fault = job
            seeds = SEEDS if fault else HEALTHY_SEEDS
            without = run(kernel, fault) != right[kernel]
            seen = next((seed for seed in seeds if run(kernel, fault, seed) != right[kernel]), None)
            name = [*FAULTS][kernel]
            return {"kernel": name, "fault": ["none", *FAULTS[name]][fault], "without": without, "seed": seen}

        with ThreadPoolExecutor(AT_ONCE) as pool:
            rows = list(pool.map(examine, jobs))
    for row in rows:
        print(f"| {row['kernel']} | {row['fault']} | {'seen' if row['without'] else ''} | {row['seed'] or ''} |")
    faults, healthy = ([row for row in rows if (row["fault"] == "none") is none] for none in (False, True))
    found = [sum(bool(row[how]) for row in faults) for how in ("without", "seed")]
    alarms = [row for row in healthy if row["without"] or row["seed"]]
    print(f"{found[0]} of {len(faults)} faults seen without delays, {found[1]} with")
    print(f"{len(alarms)} alarms on {len(healthy)} kernels without a fault")
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps({**interposed.digests(), "rows": rows}, indent=1) + "\n")
    return min(len(alarms), 1)


if __name__ == "__main__":
    sys.exit(main())
