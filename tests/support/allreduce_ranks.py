"""Ranks for ``image_programs/allreduce.py`` without GPUs: processes that report, stall or die, and import nothing slow."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "image_programs"))
import allreduce as program  # type: ignore[import-not-found]


def _steps(rank: int, request: dict[str, Any], results: Any, progress: Any, until: str = "end") -> None:
    """What a healthy rank reports, up to a step."""
    for step in program.steps_of(request):
        progress.enter(rank, step)
        if step == until:
            return
        if step.startswith("time"):
            rows = int(step.split()[2])
            results.put({"rank": rank, "rows": rows, "wrong": 0, "graph_wrong": 0, "worst": 0.5, "microseconds": 10.0 + rank})
    results.close()
    results.join_thread()


def healthy(rank: int, request: dict[str, Any], init: str, results: Any, progress: Any, beside: Any) -> None:
    _steps(rank, request, results, progress)


def stalls(rank: int, request: dict[str, Any], init: str, results: Any, progress: Any, beside: Any) -> None:
    _steps(rank, request, results, progress, "sums of 8 rows")
    progress.calls[rank] += 5 - rank
    time.sleep(600)


def dies(rank: int, request: dict[str, Any], init: str, results: Any, progress: Any, beside: Any) -> None:
    _steps(rank, request, results, progress, "graph of 1 rows")
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def idle(rank: int, beside: Any) -> None:
    """In place of a process that uses the GPU of a rank."""
