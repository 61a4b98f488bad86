"""Judge published figures by results: ``(Configuration, results) -> ReproductionReport``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from sm120kit.bench import roofline
from sm120kit.bench.figures import summary
from sm120kit.bench.reproduce import _differences as differences
from sm120kit.bench.reproduce._differences import SetupDifference
from sm120kit.bench.reproduce._expectation import Expectation, expectation
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.bench.roofline import GpuKind, RooflineModel, Work
from sm120kit.bench.roofline.expected import expected_step
from sm120kit.hosts.doctor import Finding, Impact
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration, Reference
from sm120kit.serving.flight_plan import PlannedRates

REAL_PROMPTS = "real-prompts-thinking-off"
"""The workload for comparing machines: prompts from daily work, no thinking."""
RESTARTS = 0.15
"""Share by which a server's rate changes after a restart with empty JIT caches: its autotuner chooses other tactics.

Source: github.com/Visual-Synthesizer/rtx6kpro benchmarks/inference-throughput/b650d4u-2gpu.md."""
ROUNDING = 0.0005
"""Share below a published figure that is printed as 0.0%."""
FASTEST = 2.0
"""Multiple of the published rate above which a measurement of the same setup is doubted: of a cache, or of another model."""
STARTS = 3
"""Starts of the server that :attr:`ReproductionVerdict.REPRODUCED` requires, since a rate differs between starts."""
SLOWED = 0.05
"""Share of clock samples from which a reason for lower clocks is reported."""
WITHOUT_RATE = ("method", "workload", "concurrency", "requests", "tokens")
"""Fields whose difference explains a missing rate."""
SERIOUS = (Impact.BREAKS, Impact.SLOWS)


class ReproductionVerdict(StrEnum):
    """Result of comparing a published figure with results."""

    REPRODUCED = "REPRODUCED"
    REACHED = "REACHED"
    WITHIN = "WITHIN"
    BELOW = "BELOW"
    NOT_COMPARABLE = "NOT COMPARABLE"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Rate:
    """Total tokens per second: median over starts of the server, with the lowest and the highest.

    With one start, lowest and highest are those of its requests if the concurrency is 1. ``acceptance`` is None if the server
    does not report it.
    """

    tok_s: float
    lowest: float
    highest: float
    starts: int
    acceptance: float | None


@dataclass(frozen=True)
class Bound:
    """The roofline and the ceiling of a figure. ``acceptance`` was measured; None assumes that every draft is accepted."""

    roofline: float
    ceiling: float
    acceptance: float | None
    expected: Expectation


@dataclass(frozen=True)
class Judgement:
    """A published figure, judged by a result. ``share`` is the least that the measured rate can be over the published one.

    ``differences`` are the reasons why it is not comparable; ``honest`` is the rate of :data:`REAL_PROMPTS`.
    """

    reference: Reference
    verdict: ReproductionVerdict
    measured: Rate | None
    share: float | None
    differences: tuple[SetupDifference, ...]
    honest: Rate | None
    bound: Bound | None
    reasons: tuple[str, ...]

    @property
    def expectation(self) -> str:
        """How far the measured rate, else the published one, is from the expected one; empty without a roofline."""
        if self.bound is None:
            return ""
        if self.measured:
            return f"measured: {self.bound.expected.statement(self.measured.tok_s)}"
        return f"published: {self.bound.expected.statement(self.reference.value)}"

    @property
    def text(self) -> str:
        """The verdict with its percentage or the fields that differ."""
        if self.verdict is ReproductionVerdict.NOT_COMPARABLE:
            fields = ", ".join(dict.fromkeys(difference.field for difference in self.differences))
            return f"{self.verdict}: {fields}"
        if self.verdict in (ReproductionVerdict.WITHIN, ReproductionVerdict.BELOW) and self.share is not None:
            return f"{self.verdict} {'by ' if self.verdict is ReproductionVerdict.BELOW else ''}{1 - self.share:.1%}"
        if self.verdict is ReproductionVerdict.REACHED and self.measured:
            return f"{self.verdict} in {self.measured.starts} of {STARTS} starts"
        return str(self.verdict)


@dataclass(frozen=True)
class ReproductionReport:
    """All published figures of a configuration. ``host`` are doctor's findings, ``caveats`` deviations from the publication."""

    configuration: str
    judgements: tuple[Judgement, ...]
    host: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def verdict(self) -> ReproductionVerdict:
        """The verdict on all figures: BELOW if any is. Figures that are not comparable count only if all are."""
        verdicts = {judgement.verdict for judgement in self.judgements}
        order = (
            ReproductionVerdict.BELOW,
            ReproductionVerdict.WITHIN,
            ReproductionVerdict.REACHED,
            ReproductionVerdict.REPRODUCED,
            ReproductionVerdict.NOT_MEASURED,
            ReproductionVerdict.NOT_COMPARABLE,
        )
        return next(verdict for verdict in order if verdict in verdicts)


def judge(
    configuration: Configuration,
    results: Sequence[Result],
    findings: Sequence[Finding] = (),
    model: RooflineModel | None = None,
) -> ReproductionReport:
    """Judge every published figure by the results. Without results the report has what is known before a measurement.

    ``model`` is the served one for the roofline, None for that of the configuration.
    """
    real_prompts = [result for result in results if result.environment.workload == REAL_PROMPTS]
    judgements = tuple(
        _judgement(configuration, reference, result, real_prompts, model)
        for reference in configuration.reference
        for result in _candidates(reference, results)
    )
    host = tuple(
        f"{finding.check}: {finding.verdict.fact}; {finding.verdict.consequence}"
        for finding in findings
        if finding.verdict.impact in SERIOUS
    )
    return ReproductionReport(configuration.name, judgements, host, tuple(_caveats(configuration)))


def _candidates(reference: Reference, results: Sequence[Result]) -> Sequence[Result | None]:
    """The results of the figure's workload; else one of another workload, whose differences are the reasons."""
    own = [result for result in results if result.environment.workload == reference.workload]
    return own or results[:1] or [None]


def _judgement(
    configuration: Configuration,
    reference: Reference,
    result: Result | None,
    real_prompts: Sequence[Result],
    model: RooflineModel | None,
) -> Judgement:
    differing = list(differences.of_reference(configuration, reference))
    measured: Rate | None = None
    reasons: list[str] = []
    honest = next((rate for other in real_prompts if (rate := _rate(_cases(reference, other), "decode"))), None)
    bound = possible = _bound(configuration, reference, result, None, model)
    if result is not None:
        cases = _cases(reference, result)
        differing += differences.of_result(configuration, reference, result)
        differing += differences.of_cases(reference, result, cases)
        if result.environment.workload == reference.workload:
            measured = _rate(cases, reference.figure)
            reasons += _reasons(cases)
        bound = _bound(configuration, reference, result, measured.acceptance if measured else None, model)
        if measured is None and not any(difference.field in WITHOUT_RATE for difference in differing):
            differing.append(
                SetupDifference(
                    "rate", f"{reference.value:g} tok/s", "none: too few chunks, or the requests never decoded at the same time"
                )
            )
        if measured and bound and measured.tok_s > bound.ceiling:
            allowed = f"at most {bound.ceiling:.0f} tok/s by the memory bandwidth{_accepting(bound)}"
            differing.append(
                SetupDifference("roofline", allowed, f"{measured.tok_s:.0f} tok/s, above what the memory bandwidth allows")
            )
        elif measured and measured.tok_s > FASTEST * reference.value:
            doubted = f"{measured.tok_s:.0f} tok/s, more than {FASTEST:g} times the published rate of the same setup"
            differing.append(SetupDifference("rate", f"{reference.value:g} tok/s", doubted))
    if possible and reference.value > possible.ceiling:
        reasons.append(f"published is more than {possible.ceiling:.0f} tok/s: above what the memory bandwidth allows")
    if differing:
        verdict = ReproductionVerdict.NOT_COMPARABLE
    elif measured is None:
        verdict = ReproductionVerdict.NOT_MEASURED
    elif measured.tok_s >= (reference.value - (reference.spread or 0)) * (1 - ROUNDING):
        verdict = ReproductionVerdict.REPRODUCED if measured.starts >= STARTS else ReproductionVerdict.REACHED
    else:
        within = measured.tok_s >= reference.value * (1 - RESTARTS)
        verdict = ReproductionVerdict.WITHIN if within else ReproductionVerdict.BELOW
    share = measured.tok_s / reference.value if measured else None
    return Judgement(reference, verdict, measured, share, tuple(differing), honest, bound, tuple(reasons))


def _accepting(bound: Bound) -> str:
    return "" if bound.acceptance is None else f" at the measured acceptance of {bound.acceptance:.1%}"


def _cases(reference: Reference, result: Result) -> tuple[MeasuredCase, ...]:
    """The complete cases with the published concurrency, one for each start of the server."""
    return tuple(case for case in result.cases if case.complete and case.concurrency == reference.concurrency)


def _rate(cases: Sequence[MeasuredCase], figure: str) -> Rate | None:
    """The rate of cases. ``decode``: total after the first token; ``wall``: all tokens over the whole time."""
    rates: list[float] = []
    lowest: list[float] = []
    highest: list[float] = []
    for case in cases:
        figures = summary(case)
        alone = figure == "decode" and case.concurrency == 1
        rate = figures.output_tok_s if figure == "wall" else figures.decode_tok_s if alone else figures.total_tok_s
        if rate is not None:
            rates.append(rate)
            lowest.append(figures.decode_lowest or rate if alone else rate)
            highest.append(figures.decode_highest or rate if alone else rate)
    if not rates:
        return None
    if len(rates) > 1:
        lowest, highest = rates, rates
    known = [case.acceptance for case in cases if case.acceptance]
    drafted, accepted = sum(case.drafted or 0 for case in known), sum(case.accepted or 0 for case in known)
    sampled = [case.rate for case in known if case.rate is not None]
    acceptance = accepted / drafted if drafted else median(sampled) if sampled else None
    return Rate(median(rates), min(lowest), max(highest), len(rates), acceptance)


def _bound(
    configuration: Configuration,
    reference: Reference,
    result: Result | None,
    acceptance: float | None,
    served: RooflineModel | None,
) -> Bound | None:
    """The roofline of the configuration at the figure's concurrency; None if the model or the GPU is unknown."""
    modelled = None if reference.differs else _modelled(configuration, result, served)
    if modelled is None:
        return None
    model, gpu = modelled
    cases = _cases(reference, result) if result else ()
    work = _work(configuration, reference.concurrency, cases[0] if cases else None)
    return Bound(
        roofline=roofline.roofline(model, gpu, work, 1.0 if acceptance is None else acceptance),
        ceiling=roofline.ceiling(model, gpu, work, 1.0 if acceptance is None else acceptance),
        acceptance=acceptance,
        expected=expectation(model, gpu, work, acceptance),
    )


def planned_rates(
    configuration: Configuration, model: RooflineModel | None = None, concurrency: int = 1
) -> PlannedRates | None:
    """The total rates without context. None if the model or the GPU is not modelled, and for several machines."""
    modelled = _modelled(configuration, None, model)
    if modelled is None:
        return None
    work = _work(configuration, concurrency, None)
    least = concurrency / expected_step(*modelled, work).seconds
    highest = roofline.roofline(*modelled, work, 1.0)
    return PlannedRates(least, (1 + work.drafts) * least, highest, roofline.ceiling(*modelled, work))


def _modelled(
    configuration: Configuration, result: Result | None, served: RooflineModel | None
) -> tuple[RooflineModel, GpuKind] | None:
    """The served model, else that of the configuration, and the GPU of the result, else that of the configuration.

    None for several machines: the network between them is not modelled.
    """
    if configuration.hardware.nodes > 1:
        return None
    model = served or roofline.model_of(configuration.model.repository)
    names = differences.gpu_names(result) if result else ()
    detected = next((gpu for name in names or () if (gpu := roofline.gpu_kind(name))), None)
    gpu = detected or roofline.gpu_kind(configuration.hardware.gpu)
    return (model, gpu) if model and gpu else None


def _work(configuration: Configuration, concurrency: int, case: MeasuredCase | None) -> Work:
    # On average, half of the answer is in the context.
    context = case.context_tokens + case.output_tokens // 2 if case else 0
    return Work(concurrency, context, drafts_per_step(configuration), configuration.hardware.gpus, _cache_bytes(configuration))


def _expected(configuration: Configuration, result: Result) -> Iterator[str]:
    """How far each complete case of a result is from the expected rate; nothing if the model or the GPU is not modelled."""
    for difference in differences.of_model(configuration, result):
        if difference.field == "model":
            yield f"expected: unknown, the result is of {difference.here}, not of {difference.published}"
            return
    modelled = _modelled(configuration, result, None)
    for case in result.cases if modelled else ():
        rate = _rate([case], "decode") if case.complete else None
        if modelled and rate:
            expected = expectation(*modelled, _work(configuration, case.concurrency, case), rate.acceptance)
            context = f" at context depth {case.context_tokens:,}" if case.context_tokens else ""
            yield f"expected: concurrency {case.concurrency}{context}: {expected.statement(rate.tok_s)}"


def comparisons(result: Result) -> list[str]:
    """How the cases of a result compare with the expected rates and the published figures of its configuration.

    Empty if the result names no configuration that can be read. Published figures are those of measured concurrencies.
    """
    name = result.environment.served.configuration
    if name is None or name not in configurations.names():
        return []
    configuration = configurations.load(name)
    measured = {case.concurrency for case in result.cases if case.complete}
    judgements = (each for each in judge(configuration, [result]).judgements if each.reference.concurrency in measured)
    lines = list(_expected(configuration, result))
    for each in judgements:
        figure = each.reference
        lines.append(f"published: concurrency {figure.concurrency}: {figure.value:g} tok/s; {each.text}; {figure.source}")
    return lines


def drafts_per_step(configuration: Configuration) -> int:
    """Draft tokens per step. SGLang's number of draft tokens includes the verified token, its number of steps does not."""
    if steps := configuration.option_for("draft_steps"):
        return configuration.served_by.integer(steps) or 0
    return configuration.speculation.draft_tokens if configuration.speculation else 0


def _cache_bytes(configuration: Configuration) -> float:
    return 1.0 if (configuration.option("--kv-cache-dtype") or "").startswith("fp8") else 2.0


def _reasons(cases: Sequence[MeasuredCase]) -> Iterator[str]:
    """Reasons for a low figure in the result itself."""
    samples = [sample for case in cases for sample in case.samples]
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        yield f"{len(errors)} of {len(samples)} requests failed; the first: {errors[0]}"
    counts = [sample.completion_tokens for sample in samples if sample.completion_tokens is not None and not sample.error]
    if counts and median(counts) < cases[0].output_tokens:
        yield f"answers ended after {median(counts):.0f} of {cases[0].output_tokens} tokens"
    if any(sample.cached_tokens for sample in samples):
        yield "a prefix cache answered part of the prompts"
    for case in cases:
        for clock in case.clocks or ():
            for reason, share in (clock.slowed or {}).items():
                if share >= SLOWED:
                    yield f"GPU {clock.gpu} was slowed by {reason} in {share:.0%} of the samples"


def _caveats(configuration: Configuration) -> Iterator[str]:
    """Deviations of the configuration from the publication."""
    yield f"originally: {configuration.original}"
    if configuration.model.why_unpinned:
        yield f"the model's revision is not pinned: {configuration.model.why_unpinned}"
    for deviation in configuration.deviations:
        yield f"deviation from the publication: {deviation.field}: {deviation.reason}"
