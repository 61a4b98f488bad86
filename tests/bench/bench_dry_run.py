"""Time of a warm ``sm120kit build RECIPE --dry-run``, and its ratio to an interpreter that imports typer and pydantic.

    python tests/bench/bench_dry_run.py [RECIPE...]

Runs are interleaved, so that other work on the machine affects all rows alike. The state directory is that of the environment;
a first run of each recipe warms it. Prints a table, asserts nothing.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

ROUNDS = 15
FLOOR = "python -c 'import typer, pydantic'"


def measure(argv: list[str]) -> tuple[float, float]:
    """Wall time and CPU time of a program with its children, in seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the best and the median of each row."""
    rows = {FLOOR: [sys.executable, "-c", "import typer, pydantic"]}
    for recipe in sys.argv[1:] or ["vllm", "sglang", "flashinfer"]:
        rows[f"sm120kit build {recipe} --dry-run"] = [sys.executable, "-m", "sm120kit", "build", recipe, "--dry-run"]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for argv in rows.values():
        measure(argv)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, argv in rows.items():
            figures[name].append(measure(argv))
    best = {name: min(wall for wall, _ in taken) for name, taken in figures.items()}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    print(f"{'best':>8} {'median':>8} {'CPU':>8} {'ratio':>7}")
    for name, taken in figures.items():
        median, cpu = statistics.median(wall for wall, _ in taken), min(cpu for _, cpu in taken)
        print(f"{best[name]:7.3f}s {median:7.3f}s {cpu:7.3f}s {best[name] / best[FLOOR]:7.1f}  {name}")


if __name__ == "__main__":
    main()
