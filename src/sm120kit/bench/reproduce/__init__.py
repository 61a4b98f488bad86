"""Compare published figures with this machine: measure by the published methods and with real prompts, judge each figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sm120kit import bench
from sm120kit.bench import Measurement, result_file, resume, workload
from sm120kit.bench.reproduce._differences import SetupDifference
from sm120kit.bench.reproduce._judging import (
    REAL_PROMPTS,
    Bound,
    Judgement,
    Rate,
    ReproductionReport,
    ReproductionVerdict,
    comparisons,
    judge,
    planned_rates,
)
from sm120kit.bench.result_file import Machine, Result
from sm120kit.bench.workload import Case, NamedWorkload
from sm120kit.core.disk import require_writable
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
    "SetupDifference",
    "case_count",
    "comparisons",
    "earlier",
    "findings",
    "judge",
    "measurements",
    "plan",
    "planned_rates",
    "result_path",
]


def plan(configuration: Configuration, *, quick: bool = False) -> tuple[NamedWorkload, ...]:
    """The workloads to run with the published concurrencies: each published method that has a workload, then REAL_PROMPTS.

    ``quick``: only the lowest concurrency, and one request for each in parallel.
    """
    measurable = [reference for reference in configuration.reference if reference.workload and not reference.differs]
    names = dict.fromkeys(reference.workload for reference in measurable if reference.workload)
    published = [
        _with_concurrencies(
            workload.load(name), {reference.concurrency for reference in measurable if reference.workload == name}, quick
        )
        for name in names
    ]
    concurrency = {reference.concurrency for reference in measurable or configuration.reference} or {1}
    return (*published, _with_concurrencies(workload.load(REAL_PROMPTS), concurrency, quick))


def case_count(workloads: Sequence[NamedWorkload]) -> int:
    """The cases of all workloads, for one start of the server."""
    return sum(len(workload.cases(named.workload, 0)) for named in workloads)


def _with_concurrencies(named: NamedWorkload, concurrency: set[int], quick: bool) -> NamedWorkload:
    """The same workload with these concurrencies. Its sha256 stays that of the file: prompts and method are the same."""
    changed = NamedWorkload(
        named.name, named.sha256, named.workload.model_copy(update={"concurrency": tuple(sorted(concurrency))})
    )
    return workload.quick(changed) if quick else changed


def result_path(directory: Path, configuration: Configuration, named: NamedWorkload) -> Path:
    """The file for the result of a workload."""
    return directory / f"{configuration.name}.{named.name}.json"


def earlier(
    configuration: Configuration, workloads: Sequence[NamedWorkload], directory: Path, restarts: int = 0
) -> dict[str, Result]:
    """The results of an interrupted run in ``directory`` by name of their workload. See :func:`resume.unfinished`."""
    paths = {result_path(directory, configuration, named): named for named in workloads}
    judge_them = f"judge them with {' '.join(f'--result {path}' for path in paths)}"
    works = {path: named.workload for path, named in paths.items()}
    found = resume.unfinished(works, restarts, f"{judge_them}; to measure again, {resume.REPLACE}")
    return {paths[path].name: result for path, result in found.items()}


def measurements(
    configuration: Configuration,
    workloads: Sequence[NamedWorkload],
    directory: Path,
    given: Mapping[str, str],
    case_begins: Callable[[Case, int], bench.RequestEnded] = lambda case, requests: lambda: None,
    resumed: Mapping[str, Result] = MappingProxyType({}),
) -> tuple[Measurement, ...]:
    """A measurement for each workload, whose result is written to ``directory`` after each case.

    ``resumed`` are the results of an interrupted run, by workload.

    Raises:
        SystemRefused: a result cannot be written.
    """
    paths = [result_path(directory, configuration, named) for named in workloads]
    for path in paths:
        require_writable(path, "--results")

    def writer(path: Path) -> Callable[[Result], None]:
        return lambda result: result_file.write(path, result)

    return tuple(
        Measurement(named, writer(path), given=given, case_begins=case_begins, resumed=resumed.get(named.name))
        for named, path in zip(workloads, paths, strict=True)
    )


def findings(configuration: Configuration, measured: Sequence[Result]) -> tuple[Finding, ...]:
    """Doctor's findings on this host for the configuration, none if the measured server is not known to be on it."""
    here = any(result.environment.machine != Machine() for result in measured)
    return doctor.diagnose(probe(Path("/")), doctor.checks_for(configuration)) if here else ()
