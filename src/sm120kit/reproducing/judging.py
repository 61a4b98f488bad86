"""``(Configuration, receipts) -> Report``: what each published figure is worth here. Pure; it measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from sm120kit import roofline
from sm120kit.bench.receipt import Measured, Receipt, summary
from sm120kit.doctor import Finding, Impact
from sm120kit.recipe.configuration import Configuration, Reference
from sm120kit.reproducing import differences
from sm120kit.reproducing.differences import Difference
from sm120kit.roofline import Model, Work

HONEST = "real-prompts-thinking-off"
"""The workload to compare machines by: prompts of work, no thinking."""
RESTARTS = 0.15
"""Share by which one server differs from itself after a restart with fresh JIT caches, as its autotuner chooses other tactics:
github.com/Visual-Synthesizer/rtx6kpro benchmarks/inference-throughput/b650d4u-2gpu.md."""
SLOWED = 0.05
"""Share of looks at the clocks from which a reason that slows them is told."""
WITHOUT_RATE = ("method", "workload", "users", "requests", "tokens")
"""Fields that say already why there is no rate."""
SERIOUS = (Impact.BREAKS, Impact.SLOWS)


class Verdict(StrEnum):
    """What a published figure is worth here."""

    REPRODUCED = "REPRODUCED"
    WITHIN = "WITHIN"
    BELOW = "BELOW"
    NOT_COMPARABLE = "NOT COMPARABLE"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Rate:
    """Tokens per second of all users together: median over starts of the server, with the lowest and the highest.

    After one start lowest and highest are those of its requests, where they are of one user. ``acceptance`` is None when the
    server's counters do not say it.
    """

    tok_s: float
    lowest: float
    highest: float
    starts: int
    acceptance: float | None


@dataclass(frozen=True)
class Bound:
    """The roofline of a figure. ``acceptance`` is measured, or None: then every draft is taken to be accepted.

    ``needs`` is how many tokens each step must have given each user for the published figure, of at most ``at_most``.
    """

    roofline: float
    ceiling: float
    acceptance: float | None
    needs: float
    at_most: int


@dataclass(frozen=True)
class Judgement:
    """One published figure and what a receipt says of it. ``share`` is measured over published.

    ``differences`` are why it is not comparable, ``honest`` the rate of the honest workload with as many users.
    """

    reference: Reference
    verdict: Verdict
    measured: Rate | None
    share: float | None
    differences: tuple[Difference, ...]
    honest: Rate | None
    bound: Bound | None
    reasons: tuple[str, ...]

    @property
    def words(self) -> str:
        """The verdict in words."""
        if self.verdict is Verdict.NOT_COMPARABLE:
            fields = ", ".join(dict.fromkeys(difference.field for difference in self.differences))
            return f"{self.verdict}: {fields}"
        if self.verdict in (Verdict.WITHIN, Verdict.BELOW) and self.share is not None:
            return f"{self.verdict} {'by ' if self.verdict is Verdict.BELOW else ''}{1 - self.share:.1%}"
        return str(self.verdict)


@dataclass(frozen=True)
class Report:
    """All published figures of a configuration. ``host`` are doctor's findings on it, ``caveats`` what is not as published."""

    configuration: str
    judgements: tuple[Judgement, ...]
    host: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Of all together: BELOW if any is; what cannot be compared counts only when nothing can."""
        found = {judgement.verdict for judgement in self.judgements}
        order = (Verdict.BELOW, Verdict.WITHIN, Verdict.REPRODUCED, Verdict.NOT_MEASURED, Verdict.NOT_COMPARABLE)
        return next(verdict for verdict in order if verdict in found)


@dataclass(frozen=True)
class Known:
    """What the roofline can be told: the model that was served, None for the configuration's; see :class:`Work`."""

    model: Model | None = None
    all_reduce_us: float | None = None


def judge(
    wanted: Configuration, receipts: Sequence[Receipt], findings: Sequence[Finding] = (), known: Known = Known()
) -> Report:
    """Every published figure against the receipts. Without receipts it says what can be said before anything is measured."""
    honest = [receipt for receipt in receipts if receipt.circumstances.workload == HONEST]
    judgements = tuple(
        _judgement(wanted, one, receipt, honest, known) for one in wanted.reference for receipt in _candidates(one, receipts)
    )
    host = tuple(
        f"{finding.check}: {finding.verdict.fact}; {finding.verdict.consequence}"
        for finding in findings
        if finding.verdict.impact in SERIOUS
    )
    return Report(wanted.name, judgements, host, tuple(_caveats(wanted)))


def _candidates(one: Reference, receipts: Sequence[Receipt]) -> Sequence[Receipt | None]:
    """The receipts of the figure's own workload; else one of another, which cannot do but says why."""
    own = [receipt for receipt in receipts if receipt.circumstances.workload == one.workload]
    return own or receipts[:1] or [None]


def _judgement(
    wanted: Configuration, one: Reference, receipt: Receipt | None, honest: Sequence[Receipt], known: Known
) -> Judgement:
    found = list(differences.of_reference(wanted, one))
    measured: Rate | None = None
    reasons: list[str] = []
    beside = next((rate for other in honest if (rate := _rate(_cells(one, other), "decode"))), None)
    bound = _bound(wanted, one, receipt, None, known)
    if receipt is not None:
        cells = _cells(one, receipt)
        found += differences.of_receipt(wanted, one, receipt)
        found += differences.of_cells(one, receipt, cells)
        if receipt.circumstances.workload == one.workload:
            measured = _rate(cells, one.figure)
            reasons += _reasons(cells)
        bound = _bound(wanted, one, receipt, measured.acceptance if measured else None, known)
        if measured is None and not any(difference.field in WITHOUT_RATE for difference in found):
            found.append(Difference("rate", f"{one.value:g} tok/s", "none: too few chunks, or users who never decoded at once"))
        if measured and bound and measured.tok_s > bound.ceiling:
            allowed = f"at most {bound.ceiling:.0f} tok/s by the memory bandwidth"
            found.append(Difference("roofline", allowed, f"{measured.tok_s:.0f} tok/s, above what the memory bandwidth allows"))
    if bound and one.value > bound.ceiling:
        reasons.append(f"published is more than {bound.ceiling:.0f} tok/s: above what the memory bandwidth allows")
    if found:
        verdict = Verdict.NOT_COMPARABLE
    elif measured is None:
        verdict = Verdict.NOT_MEASURED
    elif measured.tok_s >= one.value - (one.spread or 0):
        verdict = Verdict.REPRODUCED
    else:
        verdict = Verdict.WITHIN if measured.tok_s >= one.value * (1 - RESTARTS) else Verdict.BELOW
    share = measured.tok_s / one.value if measured else None
    return Judgement(one, verdict, measured, share, tuple(found), beside, bound, tuple(reasons))


def _cells(one: Reference, receipt: Receipt) -> tuple[Measured, ...]:
    """The cells with as many users as were published, one for each start of the server."""
    return tuple(cell for cell in receipt.cells if cell.complete and cell.users == one.users)


def _rate(cells: Sequence[Measured], figure: str) -> Rate | None:
    """``decode``: after the first token, of all users together; ``wall``: all tokens over all of the time."""
    rates: list[float] = []
    lowest: list[float] = []
    highest: list[float] = []
    for cell in cells:
        said = summary(cell)
        alone = figure == "decode" and cell.users == 1
        rate = said.output_tok_s if figure == "wall" else said.decode_tok_s if alone else said.total_tok_s
        if rate is not None:
            rates.append(rate)
            lowest.append(said.decode_lowest or rate if alone else rate)
            highest.append(said.decode_highest or rate if alone else rate)
    if not rates:
        return None
    if len(rates) > 1:
        lowest, highest = rates, rates
    drafted = sum(cell.acceptance.drafted for cell in cells if cell.acceptance)
    accepted = sum(cell.acceptance.accepted for cell in cells if cell.acceptance)
    return Rate(median(rates), min(lowest), max(highest), len(rates), accepted / drafted if drafted else None)


def _bound(
    wanted: Configuration, one: Reference, receipt: Receipt | None, acceptance: float | None, known: Known
) -> Bound | None:
    """The roofline of the configuration with the figure's users; None when it does not describe the model, GPU or figure."""
    model = None if one.differs else known.model or roofline.model_of(wanted.model.repository)
    seen = next((gpu for name in (receipt and differences.gpu_names(receipt)) or () if (gpu := roofline.gpu_kind(name))), None)
    gpu = seen or roofline.gpu_kind(wanted.hardware.gpu)
    if model is None or gpu is None:
        return None
    cells = _cells(one, receipt) if receipt else ()
    # On average half of the answer is there.
    context = cells[0].context_tokens + cells[0].output_tokens // 2 if cells else 0
    drafts = drafted(wanted)
    work = Work(one.users, context, drafts, wanted.hardware.gpus, _cache_bytes(wanted), known.all_reduce_us)
    return Bound(
        roofline=roofline.roofline(model, gpu, work, 1.0 if acceptance is None else acceptance),
        ceiling=roofline.ceiling(model, gpu, work),
        acceptance=acceptance,
        needs=one.value / one.users * roofline.step(model, gpu, work).seconds,
        at_most=1 + drafts,
    )


def drafted(wanted: Configuration) -> int:
    """Tokens drafted in a step. SGLang's number of draft tokens counts the step's own; its steps do not."""
    words = wanted.arguments
    if "--speculative-num-steps" in words:
        return int(words[words.index("--speculative-num-steps") + 1])
    return wanted.speculation.draft_tokens if wanted.speculation else 0


def _cache_bytes(wanted: Configuration) -> float:
    words = wanted.arguments
    asked = words[words.index("--kv-cache-dtype") + 1] if "--kv-cache-dtype" in words else ""
    return 1.0 if asked.startswith("fp8") else 2.0


def _reasons(cells: Sequence[Measured]) -> Iterator[str]:
    """What the run itself knows about a low figure."""
    samples = [sample for cell in cells for sample in cell.samples]
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        yield f"{len(errors)} of {len(samples)} requests failed; the first: {errors[0]}"
    counts = [sample.completion_tokens for sample in samples if sample.completion_tokens is not None and not sample.error]
    if counts and median(counts) < cells[0].output_tokens:
        yield f"answers ended after {median(counts):.0f} of {cells[0].output_tokens} tokens"
    if any(sample.cached_tokens for sample in samples):
        yield "a prefix cache answered a part of the prompts"
    for cell in cells:
        for clock in cell.clocks or ():
            for reason, share in (clock.slowed or {}).items():
                if share >= SLOWED:
                    yield f"GPU {clock.gpu} was slowed by {reason} in {share:.0%} of the looks"


def _caveats(wanted: Configuration) -> Iterator[str]:
    """In what even a faithful run is not what was published."""
    yield f"originally: {wanted.original}"
    if wanted.model.why_unpinned:
        yield f"the model's revision is not pinned: {wanted.model.why_unpinned}"
    if wanted.unreleased:
        yield f"no released engine takes {', '.join(wanted.unreleased.arguments)}: {wanted.unreleased.reason}"
    for ours in wanted.ours:
        yield f"ours, not published: {ours.field}: {ours.reason}"
