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
    keys = {cell.key for cell in done}
    order = workload.cells(work, seed + start)
    return [cell for cell in order if (cell.users, cell.output_tokens, cell.context_tokens) not in keys]


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
    found = existing(path)
    if found and found.complete:
        raise StateUnwritable(f"{path} exists: a complete receipt of {found.started_utc}", REPLACE)
    return kept(found, path, work, restarts) if found else None


def kept(found: Receipt, path: Path, work: Workload, restarts: int = 0) -> Receipt:
    """A receipt of a workload, if partial without the cells to measure again: interrupted ones and those with failed requests.

    Raises:
        NotComparable: it was measured with other options, such as ``--quick``.
    """
    if not found.complete:
        whole = (cell for cell in found.cells if cell.complete and not any(sample.error for sample in cell.samples))
        found = replace(found, cells=tuple(whole))
    planned = {(c.users, c.output_tokens, c.context_tokens) for c in workload.cells(work, 0)}
    fits = all(cell.key in planned and cell.restart <= restarts and _has_all_requests(work, cell) for cell in found.cells)
    if not fits or found.complete == any(missing(work, found.cells, start, 0) for start in range(restarts + 1)):
        raise NotComparable(
            f"{path} was measured with other options: other cells, starts or numbers of requests, as with --quick",
            f"run the command that wrote it, {REPLACE}",
        )
    return found


def _has_all_requests(work: Workload, cell: MeasuredCell) -> bool:
    """Whether a cell has the requests of the workload: their number, or the time that they take."""
    if planned := workload.request_count(work, Cell(*cell.key)):
        return len(cell.samples) == planned - cell.users * work.warmup_requests
    begin = min((sample.started for sample in cell.samples), default=0.0)
    return max((sample.ended for sample in cell.samples), default=0.0) - begin >= MIN_SHARE * work.seconds
