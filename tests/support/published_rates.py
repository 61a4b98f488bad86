"""Published decode rates: the fit of the expected rate, its errors, and the tables of docs/measurements/rates.md."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from sm120kit.bench import roofline
from sm120kit.bench.roofline import CALIBRATION, Calibration, DecodeStep, GpuKind, RooflineModel, Work, calibrated
from sm120kit.recipes.architectures import PartBits, architecture_of

DATA = Path(__file__).parents[1] / "unit/data/roofline/published.toml"
PAGE = Path(__file__).parents[2] / "docs/measurements/rates.md"
CONTEXT = 300
"""Average tokens of a user in a published case without context: prompt and half of the answer. The effect is small."""
GRID = tuple(
    Calibration(floor / 1e6, wait / 1e6, share / 100)
    for floor, wait, share in product(range(0, 210, 10), range(0, 70, 10), range(60, 102, 2))
)
"""Candidates of the fit: floors of 0 to 200 us, waits of 0 to 60 us, and shares of 0.6 to 1."""


@dataclass(frozen=True)
class PublishedCell:
    """A published rate and the roofline's step. ``tokens`` per step of all concurrency is None if the acceptance is unknown."""

    work: Work
    rate: float
    ideal: DecodeStep
    tokens: float | None


@dataclass(frozen=True)
class PublishedTable:
    """Rates of one configuration on one machine."""

    name: str
    machine: str
    engine: str
    source: str
    model: RooflineModel
    gpu: GpuKind
    cases: tuple[PublishedCell, ...]

    @property
    def fitted(self) -> bool:
        """Whether rates can be computed: there is no speculation, or its acceptance is published."""
        return self.cases[0].tokens is not None

    def ratios(self, calibration: Calibration | None) -> list[float]:
        """Computed over published rate for each case; of the roofline without a calibration."""
        return [self._rate(case, calibration) / case.rate for case in self.cases]

    def error(self, calibration: Calibration | None) -> float:
        """Mean absolute error of the computed rates."""
        return fmean(abs(ratio - 1) for ratio in self.ratios(calibration))

    def needs(self, calibration: Calibration | None) -> list[float]:
        """Tokens per step and user that the published rates require."""
        return [case.rate / case.work.concurrency * self._seconds(case, calibration) for case in self.cases]

    def _rate(self, case: PublishedCell, calibration: Calibration | None) -> float:
        assert case.tokens is not None
        return case.tokens / self._seconds(case, calibration)

    def _seconds(self, case: PublishedCell, calibration: Calibration | None) -> float:
        if calibration is None:
            return case.ideal.seconds
        return calibrated(case.ideal, self.model, self.gpu, case.work, calibration).seconds


@cache
def others() -> dict[str, RooflineModel]:
    """Models that no configuration serves, by repository."""
    models = tomllib.loads(DATA.with_name("models.toml").read_text())["model"]
    return {
        each["repository"]: roofline.model(architecture, PartBits(**each["bits"]))
        for each in models
        if (architecture := architecture_of(each["config"], with_mtp=True))
    }


@cache
def tables() -> tuple[PublishedTable, ...]:
    """All tables, in the order of the file."""
    return tuple(map(_table, tomllib.loads(DATA.read_text())["table"]))


def _table(entry: dict[str, Any]) -> PublishedTable:
    repository = entry["repository"]
    model, gpu = roofline.model_of(repository) or others()[repository], roofline.gpu_kind(entry["gpu"])
    assert model and gpu, entry["name"]
    drafts = entry.get("drafts", 0)
    published = [(int(concurrency), CONTEXT, rate) for concurrency, rate in entry["rates"].items()]
    published += [(1, int(context), rate) for context, rate in entry.get("contexts", {}).items()]
    cases = []
    for concurrency, context, rate in published:
        work = Work(concurrency, context, drafts, entry["gpus"], entry["kv"])
        known = not drafts or "acceptance" in entry
        tokens = concurrency * roofline.tokens_per_step(drafts, entry.get("acceptance", 0.0)) if known else None
        cases.append(PublishedCell(work, rate, roofline.step(model, gpu, work), tokens))
    return PublishedTable(entry["name"], entry["machine"], entry["engine"], entry["source"], model, gpu, tuple(cases))


@cache
def _errors() -> dict[str, list[float]]:
    """The error of each fitted table with each candidate, in the order of the grid."""
    return {table.name: _table_errors(table) for table in tables() if table.fitted}


def _table_errors(table: PublishedTable) -> list[float]:
    """Candidates that differ in costs that do not concern the table are computed once."""
    relevant = [
        replace(
            one,
            gb10_share=one.gb10_share if table.gpu.name == "GB10" else 1.0,
            wait_seconds=one.wait_seconds if table.cases[0].work.gpus > 1 else 0.0,
        )
        for one in GRID
    ]
    computed = {one: table.error(one) for one in set(relevant)}
    return [computed[one] for one in relevant]


def fit(names: Iterable[str], candidates: Sequence[Calibration] = GRID) -> Calibration:
    """The candidate with the least mean absolute error over these tables."""
    totals = dict(zip(GRID, map(sum, zip(*(_errors()[name] for name in names), strict=True)), strict=True))
    return min(candidates, key=totals.__getitem__)


Key = Callable[[PublishedTable], str]


def left_out(
    key: Key, candidates: Sequence[Calibration] = GRID, group: Key = lambda table: "all of them together"
) -> dict[str, Calibration]:
    """For each table the costs fitted to the tables of its group whose ``key`` differs from its own."""
    fitted = [table for table in tables() if table.fitted]
    return {
        table.name: fit(
            [other.name for other in fitted if key(other) != key(table) and group(other) == group(table)], candidates
        )
        for table in fitted
    }


def error_left_out(
    key: Key, candidates: Sequence[Calibration] = GRID, group: Key = lambda table: "all of them together"
) -> float:
    """The mean error of all tables, each with the costs of :func:`left_out`."""
    return fmean(_errors()[name][GRID.index(costs)] for name, costs in left_out(key, candidates, group).items())


def by_table(table: PublishedTable) -> str:
    """Key of :func:`left_out`: only the table itself is left out."""
    return table.name


def by_machine(table: PublishedTable) -> str:
    """Key of :func:`left_out`: every table of the machine is left out."""
    return table.machine


NO_WAITS = tuple(one for one in GRID if one.wait_seconds == 0)
FLOOR_ONLY = tuple(one for one in NO_WAITS if one.gb10_share == 1)


# ---- the page


def generated(page: str) -> str:
    """The page with its generated parts replaced."""
    for name, lines in (("forms", _forms()), ("rates", _rates()), ("drafts", _drafts()), ("sources", _sources())):
        before, opening, rest = page.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- end of {name} -->\n")
        assert opening and closing, name
        page = "\n".join((before + opening, *lines, "", closing + after))
    return page


def _forms() -> Iterator[str]:
    yield "| fitted | table left out | machine left out |"
    yield "|---|---|---|"
    roofline_error = fmean(table.error(None) for table in tables() if table.fitted)
    yield f"| nothing: the roofline | {roofline_error:.1%} | {roofline_error:.1%} |"
    for name, candidates in (
        ("a floor per layer", FLOOR_ONLY),
        ("a floor per layer, GB10's share of its bandwidth", NO_WAITS),
        ("**a floor per layer, GB10's share of its bandwidth, waits by number of GPUs**", GRID),
    ):
        yield f"| {name} | {' | '.join(f'{error_left_out(key, candidates):.1%}' for key in (by_table, by_machine))} |"
    engines = [error_left_out(key, GRID, lambda table: table.engine) for key in (by_table, by_machine)]
    yield f"| the same, for each engine | {' | '.join(f'{error:.1%}' for error in engines)} |"


def _rates() -> Iterator[str]:
    alone, related = left_out(by_table), left_out(by_machine)
    fitted = [table for table in tables() if table.fitted]
    yield "| published table | concurrency | roofline | expected | expected, machine left out | expected / published |"
    yield "|---|---|---|---|---|---|"
    for table in fitted:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in table.ratios(alone[table.name]))
        errors = (table.error(None), table.error(alone[table.name]), table.error(related[table.name]))
        yield f"| {table.name} | {_users(table)} | {' | '.join(f'{error:.0%}' for error in errors)} | {ratios} |"
    means = (fmean(table.error(None) for table in fitted), error_left_out(by_table), error_left_out(by_machine))
    yield f"| **mean** | | {' | '.join(f'**{error:.0%}**' for error in means)} | |"


def _drafts() -> Iterator[str]:
    yield "| published table | concurrency | at the roofline | at the expected step | at most |"
    yield "|---|---|---|---|---|"
    for table in tables():
        if not table.fitted:
            ranges = (
                f"{min(needs):.1f} to {max(needs):.1f}" if len(needs) > 1 else f"{needs[0]:.1f}"
                for needs in (table.needs(None), table.needs(CALIBRATION))
            )
            yield f"| {table.name} | {_users(table)} | {' | '.join(ranges)} | {1 + table.cases[0].work.drafts} |"


def _sources() -> Iterator[str]:
    yield from (f"- {table.name}: {table.source}" for table in tables())


def _users(table: PublishedTable) -> str:
    concurrency = [case.work.concurrency for case in table.cases]
    return "-".join(map(str, dict.fromkeys((min(concurrency), max(concurrency)))))
