"""The order of a plan's units, simulated: time to the end of the last unit, as generated and longest first.

    python tests/bench/unit_order.py [RECIPE [GROUP...]]

Costs are those of the plan: of earlier compiles, otherwise the recipe's estimates. As in a build, ninja keeps one unit for each
core, and a unit whose memory does not fit waits without giving up its place. *As generated* is the order of the ninja files and
of ninja: units of samples last. No order takes less time than the bound: the longest unit, all seconds over all cores, or the
seconds times GiB of all units over the memory.
"""

from __future__ import annotations

import heapq
import json
import subprocess
import sys
from dataclasses import dataclass

MACHINES = ((2, 24), (16, 32), (16, 64), (16, 128))
"""Cores and GiB of memory."""


@dataclass(frozen=True)
class SimulatedUnit:
    """Seconds and GiB of a unit."""

    seconds: float
    gib: float


def makespan(units: list[SimulatedUnit], cores: int, gib: float) -> float:
    """Seconds until the last unit ends, started in the order of ``units``."""
    now, left = 0.0, units[::-1]
    running: list[tuple[float, float]] = []
    waiting: list[SimulatedUnit] = []
    while left or waiting or running:
        while left and len(running) + len(waiting) < cores:
            waiting.append(left.pop())
        for unit in [*waiting]:
            if not running or unit.gib + sum(taken for _, taken in running) <= gib:
                waiting.remove(unit)
                heapq.heappush(running, (now + unit.seconds, unit.gib))
        now, _ = heapq.heappop(running)
    return now


def planned(recipe: str, group: str) -> tuple[list[SimulatedUnit], list[SimulatedUnit]]:
    """The units of a kernel group as generated, and longest first."""
    argv = [sys.executable, "-m", "sm120kit", "build", recipe, "--kernels", group, "--dry-run", "--json"]
    plan = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    modules = sorted(plan["modules"], key=lambda module: not module["packed"])
    units = [
        SimulatedUnit(unit["estimate_seconds"], unit["estimate_bytes"] / 2**30)
        for module in modules
        for unit in module["units"]
    ]
    return units, sorted(units, key=lambda unit: -unit.seconds)


def main() -> None:
    recipe, *groups = sys.argv[1:] or ["flashinfer@0.6.6"]
    print("| group | units | CPU-s | cores, GiB | as generated | longest first | bound |\n|---|---|---|---|---|---|---|")
    for group in groups or ["quick", "fused-moe", "all"]:
        generated, longest_first = planned(recipe, group)
        total, longest = sum(unit.seconds for unit in generated), max(unit.seconds for unit in generated)
        for cores, gib in MACHINES:
            before, after = makespan(generated, cores, gib), makespan(longest_first, cores, gib)
            bound = max(longest, total / cores, sum(unit.seconds * unit.gib for unit in generated) / gib)
            row = [
                group,
                len(generated),
                f"{total:.0f}",
                f"{cores}, {gib}",
                *(f"{time:.0f} s" for time in (before, after, bound)),
            ]
            print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
