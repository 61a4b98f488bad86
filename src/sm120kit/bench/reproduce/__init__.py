"""Compare published figures with this machine: measure by the published methods and with real prompts, judge each figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sm120kit import bench
from sm120kit.bench import Measurement, receipt, resume, workload
from sm120kit.bench.receipt import Machine, Receipt
from sm120kit.bench.reproduce.differences import SetupDifference
from sm120kit.bench.reproduce.judging import (
    REAL_PROMPTS,
    Bound,
    Judgement,
    Rate,
    ReproductionReport,
    ReproductionVerdict,
    RooflineInputs,
    expected_cells,
    judge,
    one_user,
)
from sm120kit.bench.workload import Cell, NamedWorkload
from sm120kit.core.errors import StateUnwritable
from sm120kit.core.state import require_writable
from sm120kit.hosts import doctor
from sm120kit.hosts.doctor import Finding
from sm120kit.hosts.facts import probe
from sm120kit.recipes.configurations import Configuration

__all__ = [
    "REAL_PROMPTS",
    "Bound",
    "Judgement",
    "Rate",
    "ReproductionReport",
    "ReproductionVerdict",
    "RooflineInputs",
    "SetupDifference",
    "cell_count",
    "earlier",
    "expected_cells",
    "findings",
    "judge",
    "measurements",
    "one_user",
    "plan",
    "receipt_path",
]


def plan(configuration: Configuration, *, quick: bool = False) -> tuple[NamedWorkload, ...]:
    """The workloads to run with the published numbers of users: each published method that has a workload, then REAL_PROMPTS.

    ``quick``: only the fewest users, and one request for each.
    """
    measurable = [reference for reference in configuration.reference if reference.workload and not reference.differs]
    names = dict.fromkeys(reference.workload for reference in measurable if reference.workload)
    published = [
        _with_users(workload.load(name), {reference.users for reference in measurable if reference.workload == name}, quick)
        for name in names
    ]
    users = {reference.users for reference in measurable or configuration.reference}
    return (*published, _with_users(workload.load(REAL_PROMPTS), users, quick))


def cell_count(workloads: Sequence[NamedWorkload]) -> int:
    """The cells of all workloads, for one start of the server."""
    return sum(len(workload.cells(named.workload, 0)) for named in workloads)


def _with_users(named: NamedWorkload, users: set[int], quick: bool) -> NamedWorkload:
    """The same workload with these numbers of users. Its sha256 stays that of the file: prompts and method are the same."""
    changed = NamedWorkload(named.name, named.sha256, named.workload.model_copy(update={"users": tuple(sorted(users))}))
    return workload.quick(changed) if quick else changed


def receipt_path(directory: Path, configuration: Configuration, named: NamedWorkload) -> Path:
    """The file for the receipt of a workload."""
    return directory / f"{configuration.name}.{named.name}.json"


def earlier(
    configuration: Configuration, workloads: Sequence[NamedWorkload], directory: Path, restarts: int = 0
) -> dict[str, Receipt]:
    """The receipts of an interrupted run in ``directory`` by name of their workload, complete ones among them.

    Raises:
        StateUnwritable: all are complete, or a file is not a receipt.
        NotComparable: a receipt was measured with other options, such as ``--quick``.
    """
    paths = {named.name: receipt_path(directory, configuration, named) for named in workloads}
    receipts = {name: existing for name, path in paths.items() if (existing := resume.existing(path))}
    if len(receipts) == len(paths) and all(existing.complete for existing in receipts.values()):
        judge_them = " ".join(f"--receipt {path}" for path in paths.values())
        raise StateUnwritable(
            f"{directory} has complete receipts of {configuration.name}",
            f"judge them with {judge_them}; to measure again, choose another --receipts or replace them with --overwrite",
        )
    by_name = {named.name: named.workload for named in workloads}
    return {name: resume.kept(existing, paths[name], by_name[name], restarts) for name, existing in receipts.items()}


def measurements(
    configuration: Configuration,
    workloads: Sequence[NamedWorkload],
    directory: Path,
    given: Mapping[str, str],
    cell_begins: Callable[[Cell, int], bench.RequestEnded] = lambda cell, requests: lambda: None,
    resumed: Mapping[str, Receipt] = MappingProxyType({}),
) -> tuple[Measurement, ...]:
    """A measurement for each workload, whose receipt is written to ``directory`` after each cell.

    ``resumed`` are the receipts of an interrupted run, by workload.

    Raises:
        StateUnwritable: a receipt cannot be written.
    """
    paths = [receipt_path(directory, configuration, named) for named in workloads]
    for path in paths:
        require_writable(path, "--receipts")

    def writer(path: Path) -> Callable[[Receipt], None]:
        return lambda result: receipt.write(path, result)

    return tuple(
        Measurement(named, writer(path), given=given, cell_begins=cell_begins, resumed=resumed.get(named.name))
        for named, path in zip(workloads, paths, strict=True)
    )


def findings(configuration: Configuration, measured: Sequence[Receipt]) -> tuple[Finding, ...]:
    """Doctor's findings on this host for the configuration, none if the measured server is not known to be on it."""
    here = any(result.circumstances.machine != Machine() for result in measured)
    return doctor.diagnose(probe(Path("/")), doctor.checks_for(configuration)) if here else ()
