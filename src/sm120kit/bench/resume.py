"""Resume interrupted runs: which measured cells are kept, and which are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sm120kit.bench import receipt, saturation, workload
from sm120kit.bench.receipt import MeasuredCell, Receipt
from sm120kit.bench.workload import Cell, Workload
from sm120kit.core.errors import BadReceipt, NotComparable, StateUnwritable

REPLACE = "choose another place for the receipt, or replace it with --overwrite"
MIN_SHARE = 0.9
"""Share of a workload's ``seconds`` that the requests of a complete cell take at least."""


def missing(work: Workload, measured: Sequence[MeasuredCell], start: int, seed: int) -> list[Cell]:
    """The cells to measure after a start of the server, in their order: each start has another one.

    A sweep whose knee was measured has none.
    """
    done = [cell for cell in measured if cell.restart == start]
    if work.sweep and saturation.knee(done) is not None:
        return []
    points = {Cell(*cell.key) for cell in done}
    return [cell for cell in workload.cells(work, seed + start) if cell not in points]


def existing(path: Path) -> Receipt | None:
    """The receipt at ``path``, None if there is no file.

    Raises:
        StateUnwritable: the file is not a receipt.
    """
    if not path.exists() or path.is_dir():
        return None
    try:
        return receipt.read(path)
    except BadReceipt as error:
        raise StateUnwritable(f"{path} exists and is not a receipt", REPLACE) from error


def unfinished(path: Path, work: Workload, restarts: int = 0) -> Receipt | None:
    """The receipt at ``path`` of an interrupted run of a workload, reduced by :func:`kept`. None if there is no file.

    Raises:
        StateUnwritable: the file is a complete receipt, or none at all.
        NotComparable: see :func:`kept`.
    """
    before = existing(path)
    if before and before.complete:
        raise StateUnwritable(f"{path} exists: a complete receipt of {before.started_utc}", REPLACE)
    return kept(before, path, work, restarts) if before else None


def kept(before: Receipt, path: Path, work: Workload, restarts: int = 0) -> Receipt:
    """A receipt of a workload, if partial without the cells to measure again: interrupted ones and those with failed requests.

    Raises:
        NotComparable: it was measured with other options, such as ``--quick``.
    """
    if not before.complete:
        whole = (cell for cell in before.cells if cell.complete and not any(sample.error for sample in cell.samples))
        before = replace(before, cells=tuple(whole))
    planned = set(workload.cells(work, 0))
    fits = all(
        Cell(*cell.key) in planned and cell.restart <= restarts and _has_all_requests(work, cell) for cell in before.cells
    )
    if not fits or before.complete == any(missing(work, before.cells, start, 0) for start in range(restarts + 1)):
        raise NotComparable(
            f"{path} was measured with other options: other cells, starts or numbers of requests, as with --quick",
            f"run the command that wrote it, {REPLACE}",
        )
    return before


def _has_all_requests(work: Workload, cell: MeasuredCell) -> bool:
    """Whether a cell has the requests of the workload: their number, or the time that they take."""
    if planned := workload.request_count(work, Cell(*cell.key)):
        return len(cell.samples) == planned - cell.users * work.warmup_requests
    begin = min((sample.started for sample in cell.samples), default=0.0)
    return max((sample.ended for sample in cell.samples), default=0.0) - begin >= MIN_SHARE * work.seconds
