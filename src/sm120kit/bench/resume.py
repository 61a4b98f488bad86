"""Resume interrupted runs: which measured cases are kept, and which are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from sm120kit.bench import result_file, workload
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.bench.workload import Case, Workload
from sm120kit.core.errors import BadInput, NotComparable, SystemRefused

REPLACE = "choose another place for the result, or replace it with --overwrite"
MIN_SHARE = 0.9
"""Share of a workload's ``seconds`` that the requests of a complete case take at least."""


def missing(work: Workload, measured: Sequence[MeasuredCase], start: int) -> list[Case]:
    """The cases to measure after a start of the server, in their order: each start has another one."""
    points = {Case(*case.key) for case in measured if case.restart == start}
    return [case for case in workload.cases(work, start) if case not in points]


def existing(path: Path) -> Result | None:
    """The result at ``path``, None if there is no file.

    Raises:
        SystemRefused: the file is not a result.
    """
    if not path.exists() or path.is_dir():
        return None
    try:
        return result_file.read(path)
    except BadInput as error:
        raise SystemRefused(f"{path} exists and is not a result", REPLACE) from error


def unfinished(paths: Iterable[Path], work: Workload, restarts: int = 0) -> dict[Path, Result]:
    """The results of interrupted runs of a workload by file, reduced by :func:`kept`; complete ones of some files among them.

    Raises:
        SystemRefused: all are complete; or a file is not a result.
        NotComparable: see :func:`kept`.
    """
    found = {path: existing(path) for path in paths}
    results = {path: before for path, before in found.items() if before}
    if len(results) == len(found) and all(before.complete for before in results.values()):
        path, before = next(iter(results.items()))
        others = f", and {len(results) - 1} more" if len(results) > 1 else ""
        raise SystemRefused(f"{path} exists: a complete result of {before.started_utc}{others}", REPLACE)
    return {path: kept(before, path, work, restarts) for path, before in results.items()}


def kept(before: Result, path: Path, work: Workload, restarts: int = 0) -> Result:
    """A result of a workload, if partial without the cases to measure again: interrupted ones and those with failed requests.

    Raises:
        NotComparable: it was measured with other options, such as ``--quick``.
    """
    if not before.complete:
        whole = (case for case in before.cases if case.complete and not any(sample.error for sample in case.samples))
        before = replace(before, cases=tuple(whole))
    planned = set(workload.cases(work, 0))
    fits = all(
        Case(*case.key) in planned and case.restart <= restarts and _has_all_requests(work, case) for case in before.cases
    )
    if not fits or before.complete == any(missing(work, before.cases, start) for start in range(restarts + 1)):
        raise NotComparable(
            f"{path} was measured with other options: other cases, starts or numbers of requests, as with --quick",
            f"run the command that wrote it, {REPLACE}",
        )
    return before


def _has_all_requests(work: Workload, case: MeasuredCase) -> bool:
    """Whether a case has the requests of the workload: their number, or the time that they take."""
    if planned := workload.request_count(work, Case(*case.key)):
        return len(case.samples) == planned - case.concurrency * work.warmup_requests
    begin = min((sample.started for sample in case.samples), default=0.0)
    return max((sample.ended for sample in case.samples), default=0.0) - begin >= MIN_SHARE * work.seconds
