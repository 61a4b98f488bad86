"""A configuration measured: launch starts the server, bench measures it, as often as it is to be restarted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sm120kit import bench, launching
from sm120kit.bench import circumstances
from sm120kit.bench.receipt import Receipt
from sm120kit.bench.workload import Cell, Named
from sm120kit.launching import Prepared
from sm120kit.recipe import configuration
from sm120kit.recipe.configuration import Configuration
from sm120kit.records import Run
from sm120kit.workspace import Workspace

Work = Callable[[Run], None]


def run(
    prepared: Prepared,
    index: Path,
    workspace: Workspace,
    asked: Named,
    *,
    restarts: int,
    seed: int,
    given: Mapping[str, str],
    keep: Callable[[Receipt], None],
    cell_begins: Callable[[Cell, int], bench.Finished],
    wait_seconds: float,
    tell: Callable[[str], None],
    progress: Callable[[float, str], None],
) -> Receipt:
    """Launch, measure every cell, stop; and again after each of ``restarts`` restarts, in one receipt.

    Raises:
        Sm120kitError: as :func:`launching.run` and :func:`bench.run`; what was measured before is kept.
    """

    def start(work: Work) -> None:
        launching.run(prepared, index, workspace, wait_seconds=wait_seconds, tell=tell, progress=progress, work=work)

    return measure(
        start,
        prepared.configuration,
        asked,
        restarts=restarts,
        seed=seed,
        given=given,
        keep=keep,
        cell_begins=cell_begins,
    )


def measure(
    start: Callable[[Work], None],
    wanted: Configuration,
    asked: Named,
    *,
    restarts: int,
    seed: int,
    given: Mapping[str, str],
    keep: Callable[[Receipt], None],
    cell_begins: Callable[[Cell, int], bench.Finished] = lambda cell, requests: lambda: None,
) -> Receipt:
    """Measure what ``start`` starts: it is given work to do with each healthy server, and stops the server after it."""
    made: Receipt | None = None
    # What a configuration of ours sets is published with it; another one may hold a token.
    values = wanted.environment if wanted.name in configuration.names() and wanted == configuration.load(wanted.name) else {}

    def work(run: Run) -> None:
        nonlocal made
        made = bench.run(
            run.url,
            bench.choose_model(run.url, None),
            asked,
            seed=seed,
            given=given,
            keep=keep,
            cell_begins=cell_begins,
            served=circumstances.with_values(circumstances.served(run), values),
            earlier=made,
            restarts=restarts,
        )

    for _ in range(restarts + 1):
        start(work)
    assert made is not None
    return made
