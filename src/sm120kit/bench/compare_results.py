"""Compare two results case by case: refused if their environments differ, with the spread of their figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from sm120kit.bench.figures import COLUMNS, UNKNOWN, summary
from sm120kit.bench.result_file import Machine, MeasuredCase, Result, Served
from sm120kit.bench.sample import Sample
from sm120kit.core.errors import NotComparable

Spread = tuple[float, float, float]
"""Median, lowest and highest value of a figure."""

GROUPS = ("client", "given", "reported", "served", "machine")


@dataclass(frozen=True)
class FigureDifference:
    """A figure of :class:`sm120kit.bench.result_file.Summary` in two results, with its lowest and highest value in each.

    ``beyond_spread`` is true if the two ranges are disjoint, None if a result lacks the figure or has one value of it.
    """

    figure: str
    before: Spread | None
    after: Spread | None
    ratio: float | None
    beyond_spread: bool | None


@dataclass(frozen=True)
class CaseDifference:
    """A case in both results: the failed requests of all, and each figure of the successful ones.

    ``between`` names the spread: between the medians of several "starts" of the server if both results have several, else
    between "requests".
    """

    concurrency: int
    output_tokens: int
    context_tokens: int
    errors_before: tuple[int, int]
    errors_after: tuple[int, int]
    between: str
    figures: tuple[FigureDifference, ...]

    @property
    def fails_more(self) -> bool:
        """Whether a larger share of the requests failed than before."""
        (before, of_before), (after, of_after) = self.errors_before, self.errors_after
        return after * of_before > before * of_after


@dataclass(frozen=True)
class Comparison:
    """The cases in both results. ``differ`` is what differs in the environments and is ignored, ``unknown`` is so in both."""

    differ: dict[str, tuple[str, str]]
    unknown: tuple[str, ...]
    cases: tuple[CaseDifference, ...]


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
    """Compare the complete cases that both results have, first those in which requests failed.

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
    cases = _cases(before)
    common = [_difference(key, cases[key], measured) for key, measured in sorted(_cases(after).items()) if key in cases]
    if not common:
        raise NotComparable("the results have no case in common", "compare runs of the same workload")
    common.sort(key=lambda case: not (case.errors_before[0] or case.errors_after[0]))
    unknown = tuple(name for name in sorted(first.keys() & second.keys()) if first[name] == second[name] == UNKNOWN)
    return Comparison(differ, unknown, tuple(common))


def _cases(result: Result) -> dict[tuple[int, int, int], list[MeasuredCase]]:
    """The complete cases by identity, with one measurement per start."""
    cases: dict[tuple[int, int, int], list[MeasuredCase]] = {}
    for case in result.cases:
        if case.complete:
            cases.setdefault(case.key, []).append(case)
    return cases


PER_REQUEST: dict[str, Callable[[Sample], float | None]] = {
    "decode_tok_s": lambda sample: sample.decode_tok_s,
    "prefill_tok_s": lambda sample: sample.prefill_tok_s,
    "ttft": lambda sample: sample.ttft,
    "ttfa": lambda sample: sample.ttfa,
}
"""Figures of a case that are medians over its requests."""
FIGURES = tuple(name for name in COLUMNS if name not in ("tokens", "chunks"))
"""The compared figures of a case."""


def _difference(key: tuple[int, int, int], before: Sequence[MeasuredCase], after: Sequence[MeasuredCase]) -> CaseDifference:
    between = "starts" if len(before) > 1 and len(after) > 1 else "requests"
    figures = [_figure(name, before, after, between) for name in FIGURES]
    known = tuple(figure for figure in figures if figure.before or figure.after)
    return CaseDifference(*key, _errors(before), _errors(after), between, known)


def _errors(cases: Sequence[MeasuredCase]) -> tuple[int, int]:
    """Failed requests, and all."""
    samples = [sample for case in cases for sample in case.samples]
    return sum(bool(sample.error) for sample in samples), len(samples)


def _figure(name: str, before: Sequence[MeasuredCase], after: Sequence[MeasuredCase], between: str) -> FigureDifference:
    first, second = _values(name, before, between), _values(name, after, between)
    a, b = _spread(first), _spread(second)
    if a is None or b is None:
        return FigureDifference(name, a, b, None, None)
    beyond = (b[1] > a[2] or b[2] < a[1]) if len(first) > 1 or len(second) > 1 else None
    return FigureDifference(name, a, b, b[0] / a[0] if a[0] else None, beyond)


def _values(name: str, cases: Sequence[MeasuredCase], between: str) -> list[float]:
    """The figure of each start, or of each request if the spread is between them and the figure is of requests."""
    if between == "starts" or name not in PER_REQUEST:
        return [value for case in cases if (value := getattr(summary(case), name)) is not None]
    values = [PER_REQUEST[name](sample) for case in cases for sample in case.samples if not sample.error]
    return [value for value in values if value is not None]


def _spread(values: Sequence[float]) -> Spread | None:
    return (median(values), min(values), max(values)) if values else None
