"""Measure as the published figures of a configuration were measured, and judge a result by them and by the expected rate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from sm120kit.bench import _differences as differences
from sm120kit.bench import configured_rates as configured
from sm120kit.bench import roofline, workload
from sm120kit.bench._differences import SetupDifference
from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.bench.workload import NamedWorkload
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration, Reference

FASTEST = 2.0
"""Multiple of the published rate above which a measurement of the same setup is doubted: of a cache, or of another model."""
ROUNDING = 0.0005
"""Share below a published figure that is printed as 0.0%."""
WITHOUT_RATE = ("method", "workload", "requests", "tokens")
"""Fields whose difference explains a missing rate."""


@dataclass(frozen=True)
class MeasuredRate:
    """Total tokens per second: median over starts of the server, with the lowest and the highest.

    With one start, lowest and highest are those of its requests if the concurrency is 1. ``acceptance`` is None if the server
    does not report it.
    """

    tok_s: float
    lowest: float
    highest: float
    starts: int
    acceptance: float | None

    @property
    def text(self) -> str:
        """The rate with its range."""
        spread = f" ({self.lowest:.1f} to {self.highest:.1f})" if self.highest > self.lowest else ""
        return f"{self.tok_s:.1f} tok/s{spread}"


@dataclass(frozen=True)
class Judgement:
    """A published figure, and the rate measured as it was; not comparable if there are ``differences``.

    ``reasons`` are what the answers had that changes a rate: fewer tokens, or prompts from a cache.
    """

    reference: Reference
    measured: MeasuredRate | None
    differences: tuple[SetupDifference, ...]
    reasons: tuple[str, ...] = ()

    @property
    def reached(self) -> bool | None:
        """Whether the figure, less its published spread, was reached; None if that cannot be compared."""
        if self.measured is None or self.differences:
            return None
        return self.measured.tok_s >= (self.reference.value - (self.reference.spread or 0)) * (1 - ROUNDING)

    @property
    def text(self) -> str:
        """Whether it was reached and in how many starts, the share that is missing, or the fields that differ."""
        if self.measured is None or self.reached is None:
            return f"NOT COMPARABLE: {', '.join(dict.fromkeys(each.field for each in self.differences))}"
        starts = f"{self.measured.starts} start{'s' * (self.measured.starts > 1)}"
        return f"REACHED in {starts}" if self.reached else f"BELOW by {1 - self.measured.tok_s / self.reference.value:.1%}"


def workloads(configuration: Configuration) -> tuple[NamedWorkload, ...]:
    """The published methods that a workload measures, each with the published numbers of requests in parallel.

    Their sha256 stay those of the files: prompts and method are the same.
    """
    concurrency: dict[str, set[int]] = {}
    for reference in configuration.reference:
        if reference.workload and not reference.differs:
            concurrency.setdefault(reference.workload, set()).add(reference.concurrency)
    return tuple(_with_concurrency(workload.load(name), numbers) for name, numbers in concurrency.items())


def _with_concurrency(named: NamedWorkload, numbers: set[int]) -> NamedWorkload:
    changed = named.workload.model_copy(update={"concurrency": tuple(sorted(numbers))})
    return NamedWorkload(named.name, named.sha256, changed)


def configuration_of(result: Result) -> Configuration | None:
    """The configuration that the server of a result was started as, by its record or as stated; None if that is unknown."""
    about = result.environment
    return configuration_named(about.served.configuration or about.given.get("configuration"))


def configuration_named(name: str | None) -> Configuration | None:
    """The configuration of that name, None if there is none."""
    return configurations.load(name) if name in configurations.names() else None


def comparisons(result: Result) -> list[str]:
    """How the cases of a result compare with the expected rates and the published figures of its configuration.

    Empty if the configuration is unknown.
    """
    configuration = configuration_of(result)
    if configuration is None:
        return []
    judgements = judge(configuration, result)
    lines = [*_expected(configuration, result), *(line for each in judgements for line in _published(each))]
    if judgements:
        lines += [f"deviation from the publication: {each.field}: {each.reason}" for each in configuration.deviations]
    return list(dict.fromkeys(lines))  # several figures can differ in the same


def _published(judgement: Judgement) -> Iterator[str]:
    figure = judgement.reference
    measured = f"; measured {judgement.measured.text}" if judgement.measured else ""
    yield f"published: concurrency {figure.concurrency}: {figure.value:g} tok/s{measured}; {judgement.text}; {figure.source}"
    for each in judgement.differences:
        yield f"{each.field}: published {each.published}, here {each.here}"
    yield from judgement.reasons


def _expected(configuration: Configuration, result: Result) -> Iterator[str]:
    """How far each complete case is from the expected rate; nothing if the model or the GPU is not modelled."""
    for difference in differences.of_model(configuration, result):
        if difference.field == "model":
            yield f"expected: unknown, the result is of {difference.here}, not of {difference.published}"
            return
    setup = configured.modelled(configuration, differences.gpu_names(result) or ())
    for case in result.cases if setup else ():
        rate = rate_of([case], "decode") if case.complete else None
        if setup and rate:
            load = configured.work(configuration, case.concurrency, _context(case))
            context = f" at context depth {case.context_tokens:,}" if case.context_tokens else ""
            stated = configured.statement(*setup, load, rate.acceptance, rate.tok_s)
            yield f"expected: concurrency {case.concurrency}{context}: {stated}"


def _context(case: MeasuredCase) -> int:
    """Context tokens of a request, on average with half of the answer."""
    return case.context_tokens + case.output_tokens // 2


def judge(configuration: Configuration, result: Result) -> tuple[Judgement, ...]:
    """Judge the published figures at the measured concurrencies."""
    cases: dict[int, list[MeasuredCase]] = {}
    for case in result.cases:
        if case.complete:
            cases.setdefault(case.concurrency, []).append(case)
    measured = (each for each in configuration.reference if each.concurrency in cases)
    return tuple(_judgement(configuration, each, result, cases[each.concurrency]) for each in measured)


def _judgement(configuration: Configuration, reference: Reference, result: Result, cases: list[MeasuredCase]) -> Judgement:
    of_method = result.environment.workload == reference.workload
    measured = rate_of(cases, reference.figure) if of_method else None
    differing = [
        *differences.of_reference(configuration, reference),
        *differences.of_result(configuration, reference, result),
        *differences.of_cases(result, cases),
    ]
    if measured is None and not any(difference.field in WITHOUT_RATE for difference in differing):
        none = "none: too few chunks, or the requests never decoded at the same time"
        differing.append(SetupDifference("rate", f"{reference.value:g} tok/s", none))
    elif measured and (excess := _above_ceiling(configuration, result, cases[0], measured)):
        differing.append(excess)
    elif measured and measured.tok_s > FASTEST * reference.value:
        doubted = f"{measured.tok_s:.0f} tok/s, more than {FASTEST:g} times the published rate of the same setup"
        differing.append(SetupDifference("rate", f"{reference.value:g} tok/s", doubted))
    return Judgement(reference, measured, tuple(differing), tuple(_reasons(cases)))


def _reasons(cases: Sequence[MeasuredCase]) -> Iterator[str]:
    samples = [sample for case in cases for sample in case.samples if not sample.error]
    counts = [sample.completion_tokens for sample in samples if sample.completion_tokens is not None]
    if counts and median(counts) < cases[0].output_tokens:
        yield f"answers ended after {median(counts):.0f} of {cases[0].output_tokens} tokens"
    if any(sample.cached_tokens for sample in samples):
        yield "a prefix cache answered part of the prompts"


def _above_ceiling(
    configuration: Configuration, result: Result, case: MeasuredCase, measured: MeasuredRate
) -> SetupDifference | None:
    """The difference of a rate above the ceiling, with every draft accepted if the acceptance is unknown."""
    setup = configured.modelled(configuration, differences.gpu_names(result) or ())
    if setup is None:
        return None
    load = configured.work(configuration, case.concurrency, _context(case))
    most = roofline.ceiling(*setup, load, 1.0 if measured.acceptance is None else measured.acceptance)
    if measured.tok_s <= most:
        return None
    return SetupDifference("roofline", f"at most {most:.0f} tok/s by the memory bandwidth", f"{measured.tok_s:.0f} tok/s")


def rate_of(cases: Sequence[MeasuredCase], figure: str) -> MeasuredRate | None:
    """The rate of the starts of a case. ``decode``: total after the first token; ``wall``: all tokens over the whole time."""
    alone = figure == "decode" and cases[0].concurrency == 1
    name = "output_tok_s" if figure == "wall" else "decode_tok_s" if alone else "total_tok_s"
    known = [figures for case in cases if getattr(figures := summary(case), name) is not None]
    if not known:
        return None
    rates = [getattr(figures, name) for figures in known]
    lowest, highest = min(rates), max(rates)
    if alone and len(known) == 1:
        lowest, highest = known[0].decode_lowest or lowest, known[0].decode_highest or highest
    return MeasuredRate(median(rates), lowest, highest, len(rates), _acceptance(cases))


def _acceptance(cases: Sequence[MeasuredCase]) -> float | None:
    known = [case.acceptance for case in cases if case.acceptance]
    drafted, accepted = sum(each.drafted or 0 for each in known), sum(each.accepted or 0 for each in known)
    sampled = [each.rate for each in known if each.rate is not None]
    return accepted / drafted if drafted else median(sampled) if sampled else None
