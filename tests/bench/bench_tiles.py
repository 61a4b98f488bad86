"""What a tile table costs, cold and warm: ``python tests/bench/bench_tiles.py flashinfer@0.6.6 [--patched]``.

Cold is an empty cache in a directory of its own, with the source fetched and the tree written before the clock starts. Warm
is the same question in a fresh interpreter. Bounds: 180 s cold on two quiet cores, 2 s warm.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sm120kit import patches
from sm120kit.core import toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tiles
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options

WARM = """
import sys, time
began = time.perf_counter()
from pathlib import Path
from sm120kit.core import toolchain
from sm120kit.kernels import tiles
tiles.table(Path(sys.argv[1]), sys.argv[2], sys.argv[3], toolchain.find(), Path(sys.argv[4]))
print(time.perf_counter() - began)
"""


def cpu_seconds() -> float:
    """User and system time of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(engine: str, patched: bool) -> None:
    """Print one JSON object with the figures and their environment."""
    with tempfile.TemporaryDirectory() as scratch:
        target = resolve_flashinfer(engine, Options(Workspace.open(Path(scratch, "state"))))
        item, tree = target.recipe, target.tree if patched else target.unpatched_tree
        directory, cache = Path(scratch, "tree"), Path(scratch, "cache")
        patches.materialise(tree, directory)
        load, cpu, began = os.getloadavg()[0], cpu_seconds(), time.perf_counter()
        facts = tiles.table(directory, tree.tree, item.version, toolchain.find(), cache)
        cold, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        arguments = [str(directory), tree.tree, item.version, str(cache)]
        warm = float(
            subprocess.run([sys.executable, "-c", WARM, *arguments], check=True, capture_output=True, text=True).stdout
        )
    figures = {
        "engine": engine,
        "patched": patched,
        "kernels": len(facts),
        "cold_seconds": round(cold, 1),
        "cold_cpu_seconds": round(cpu, 1),
        "warm_seconds": round(warm, 2),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 1),
        "largest_process_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], "--patched" in sys.argv[2:])
