"""Compare two results case by case and start by start; refused if their environments differ."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from math import exp, log, sqrt
from statistics import mean, stdev

from sm120kit.bench.figures import COLUMNS, UNKNOWN, summary
from sm120kit.bench.result_file import Machine, MeasuredCase, Result, Served
from sm120kit.core.errors import NotComparable

FIGURES = tuple(name for name in COLUMNS if name not in ("tokens", "chunks"))
"""The compared figures of a case."""
GROUPS = ("client", "given", "reported", "served", "machine")
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantiles of Student's t by degrees of freedom, from 1; that of the last for more."""

CaseKey = tuple[int, int, int]


@dataclass(frozen=True)
class Gain:
    """A figure of a case in two results, in the order of the starts that both have; starts that lack it are left out.

    If no start has it in both, it is that of one start, and the other side is empty.
    """

    concurrency: int
    output_tokens: int
    context_tokens: int
    figure: str
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """The geometric mean of the ratios of the starts; None if a value is absent or 0."""
        return _ratio(mean(self._logs)) if self._logs else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the ratio, by Student's t over its logarithms; None for one start."""
        count = len(self._logs)
        if count < 2:
            return None
        half = STUDENT_T[min(count - 2, len(STUDENT_T) - 1)] * stdev(self._logs) / sqrt(count)
        return _ratio(mean(self._logs) - half), _ratio(mean(self._logs) + half)

    @property
    def _logs(self) -> list[float]:
        if len(self.before) != len(self.after) or min((*self.before, *self.after)) <= 0:
            return []
        return [log(after) - log(before) for before, after in zip(self.before, self.after, strict=True)]


def _ratio(logarithm: float) -> float:
    return exp(min(logarithm, 700.0))  # of 710 it is larger than any float


def gains(before: Result, after: Result, figures: Sequence[str] = FIGURES) -> tuple[Gain, ...]:
    """The figures of all cases that are complete in both results, of starts with the same number."""
    first, second = _by_start(before), _by_start(after)
    pairs = [
        (key, summary(first[key, start]), summary(second[key, start])) for key, start in sorted(first.keys() & second.keys())
    ]
    found = []
    for key in dict.fromkeys(key for key, _, _ in pairs):
        for figure in figures:
            of_starts = [(getattr(a, figure), getattr(b, figure)) for each, a, b in pairs if each == key]
            known = [pair for pair in of_starts if pair != (None, None)]
            shown = [pair for pair in known if None not in pair] or known[:1]
            if shown:
                sides = (tuple(value for value in side if value is not None) for side in zip(*shown, strict=True))
                found.append(Gain(*key, figure, *sides))
    return tuple(found)


def _by_start(result: Result) -> dict[tuple[CaseKey, int], MeasuredCase]:
    """The complete cases by identity and start."""
    return {(case.key, case.restart): case for case in result.cases if case.complete}


@dataclass(frozen=True)
class Failures:
    """Failed requests of a case in two results, and all of its requests."""

    case: CaseKey
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def more(self) -> bool:
        """Whether a larger share failed than before."""
        return self.after[0] * self.before[1] > self.before[0] * self.after[1]


@dataclass(frozen=True)
class Comparison:
    """The cases in both results. ``differ`` is what differs in the environments and is ignored, ``unknown`` is so in both."""

    differ: dict[str, tuple[str, str]]
    unknown: tuple[str, ...]
    failures: tuple[Failures, ...]
    gains: tuple[Gain, ...]


def environment(result: Result) -> dict[str, str]:
    """The environment by name, in groups as ``<group>.<name>``, and whether the result is complete."""
    values = asdict(result.environment)
    plain = {name: value for name, value in values.items() if name not in GROUPS}
    nested = {f"{group}.{name}": value for group in GROUPS for name, value in values[group].items()}
    return {name: _text(value) for name, value in {"complete": result.complete, **plain, **nested}.items()}


def _text(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


def briefly(names: Collection[str]) -> str:
    """Names of parts of the environment in a line; a complete group is named once."""
    groups = {"served": fields(Served), "machine": fields(Machine)}
    members = {group: {f"{group}.{member.name}" for member in group_fields} for group, group_fields in groups.items()}
    complete = {group for group, expected in members.items() if expected <= set(names)}
    rest = [name for name in names if name.partition(".")[0] not in complete]
    return ", ".join([*rest, *(f"{group}.*" for group in sorted(complete))])


def compare(before: Result, after: Result, ignore: Collection[str]) -> Comparison:
    """Compare the complete cases that both results have.

    Raises:
        NotComparable: their environments differ in what is not in ``ignore``, one is partial, or no case is in both.
    """
    first, second = environment(before), environment(after)
    differ = {
        name: (first.get(name, UNKNOWN), second.get(name, UNKNOWN))
        for name in sorted(first | second)
        if first.get(name, UNKNOWN) != second.get(name, UNKNOWN)
    }
    refused = {name: values for name, values in differ.items() if name not in ignore}
    if not before.complete and not after.complete and "complete" not in ignore:
        refused["complete"] = ("no", "no")
    if refused:
        differences = "; ".join(f"{name}: {a} / {b}" for name, (a, b) in refused.items())
        raise NotComparable(
            f"the results differ in: {differences}", f"to compare them all the same: --ignore {','.join(refused)}"
        )
    common = {case.key for case in before.cases if case.complete} & {case.key for case in after.cases if case.complete}
    if not common:
        raise NotComparable("the results have no case in common", "compare runs of the same workload")
    failures = (Failures(key, _failed(before, key), _failed(after, key)) for key in sorted(common))
    unknown = tuple(name for name in sorted(first.keys() & second.keys()) if first[name] == second[name] == UNKNOWN)
    return Comparison(
        differ, unknown, tuple(each for each in failures if each.before[0] or each.after[0]), gains(before, after)
    )


def _failed(result: Result, key: CaseKey) -> tuple[int, int]:
    samples = [sample for case in result.cases if case.complete and case.key == key for sample in case.samples]
    return sum(bool(sample.error) for sample in samples), len(samples)
