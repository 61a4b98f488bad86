"""The figures of a case, computed from its samples, with the columns and notes of every table and export."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

from sm120kit.bench._metrics import PrefixCache
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.bench.sample import Sample

LAG_SECONDS = 0.1
"""If the client did not read its streams for longer, chunks that arrived meanwhile have one time, and ITL is unknown."""
UNKNOWN = "unknown"
T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """The figures of a case; rates in tokens per second, times in seconds, None if unknown.

    ``decode_tok_s`` is the median over the requests, ``no_rate`` why requests have none. ``decode_at_least`` and
    ``decode_at_most`` are its bounds with at least one token in each chunk: the rate itself if the server counts them by chunk.
    ``total_tok_s`` counts all tokens while as many requests as the concurrency were decoding; ``output_tok_s`` from the start
    of the first request to the end of the last. ``prompt_tokens`` is the median of the server's counts. ``lagged``: the
    client did not read its streams for more than ``LAG_SECONDS``, so that times between chunks are unknown. ``prefill_tok_s``
    is the median of uncached prompt tokens over the time to the first token, waiting included. ``cache_hits`` is the share of
    prompt tokens in the server's prefix cache.
    """

    requests: int
    errors: int
    tokens: int | None
    chunks: int
    prompt_tokens: int | None
    decode_tok_s: float | None
    decode_at_least: float | None
    decode_at_most: float | None
    decode_lowest: float | None
    decode_highest: float | None
    no_rate: str
    total_tok_s: float | None
    output_tok_s: float | None
    prefill_tok_s: float | None
    ttft: float | None
    ttft_p95: float | None
    ttfa: float | None
    itl_p50: float | None
    itl_p99: float | None
    lagged: bool
    acceptance: float | None
    cache_hits: float | None = None


def summary(case: MeasuredCase) -> Summary:
    """The figures of a case over its successful requests; failed requests are counted, never averaged."""
    successful = [sample for sample in case.samples if not sample.error]
    rates = _known(sample.decode_tok_s for sample in successful)
    bounds = [bounds for sample in successful if (bounds := sample.decode_bounds)]
    counts = _known(sample.tokens for sample in successful)
    prompts = _known(sample.prompt_tokens for sample in successful)
    prefill = _known(sample.prefill_tok_s for sample in successful)
    ttft = _known(sample.ttft for sample in successful)
    lagged = case.lag_seconds is not None and case.lag_seconds > LAG_SECONDS
    gaps = [gap for sample in successful for gap in sample.itl if not lagged]
    span = max((s.ended for s in case.samples), default=0.0) - min((s.started for s in case.samples), default=0.0)
    known = len(counts) == len(successful) > 0
    return Summary(
        requests=len(case.samples),
        errors=len(case.samples) - len(successful),
        tokens=sum(counts) if known else None,
        chunks=sum(len(sample.chunk_seconds) for sample in successful),
        prompt_tokens=round(median(prompts)) if prompts else None,
        decode_tok_s=median(rates) if rates else None,
        decode_at_least=median(least for least, _ in bounds) if bounds else None,
        decode_at_most=median(most for _, most in bounds) if bounds else None,
        decode_lowest=min(rates, default=None),
        decode_highest=max(rates, default=None),
        no_rate=_reasons([sample.no_rate for sample in case.samples]),
        total_tok_s=_total(successful, case.concurrency),
        output_tok_s=sum(counts) / span if known and span > 0 else None,
        prefill_tok_s=median(prefill) if prefill else None,
        ttft=_quantile(ttft, 0.5),
        ttft_p95=_quantile(ttft, 0.95),
        ttfa=_quantile(_known(sample.ttfa for sample in successful), 0.5),
        itl_p50=_quantile(gaps, 0.5),
        itl_p99=_quantile(gaps, 0.99),
        lagged=lagged,
        acceptance=case.acceptance.share if case.acceptance else None,
        cache_hits=cache.share if (cache := prefix_cache(case)) else None,
    )


def prefix_cache(case: MeasuredCase) -> PrefixCache | None:
    """Prompt tokens and those in the prefix cache: by ``usage`` if every request has both, else by the server's metrics."""
    samples = [sample for sample in case.samples if not sample.error]
    prompts, cached = (_known(getattr(sample, name) for sample in samples) for name in ("prompt_tokens", "cached_tokens"))
    if samples and len(prompts) == len(cached) == len(samples) and sum(cached) <= sum(prompts):
        return PrefixCache(sum(prompts), sum(cached))
    return case.prefix_cache


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _reasons(reasons: Sequence[str]) -> str:
    """The most frequent reason, with its number of requests unless all have it; "" if none has one."""
    counted = Counter(filter(None, reasons)).most_common(1)
    return "".join(reason + f" ({number} of {len(reasons)} requests)" * (number < len(reasons)) for reason, number in counted)


def _total(samples: Sequence[Sample], concurrency: int) -> float | None:
    """Tokens per second while as many requests as the concurrency were decoding.

    The time between the last chunk of a request and the first chunk of the next one does not count.
    """
    streams = [sample.received for sample in samples]
    if None in streams:
        return None
    # Requests of a user follow each other: the number of streams that are decoding is the concurrency that are.
    changes = [
        (moment, begins, stream)
        for stream in streams
        if stream
        for moment, begins in ((stream[0][0], True), (stream[0][-1], False))
    ]
    decoding, seconds, tokens = {}, 0.0, 0.0
    for (begin, begins, stream), (end, _, _) in pairwise(sorted(changes, key=lambda change: change[:2])):
        if begins:
            decoding[id(stream)] = stream
        else:
            decoding.pop(id(stream), None)
        if len(decoding) == concurrency and end > begin:
            seconds += end - begin
            tokens += sum(_tokens_until(end, *each) - _tokens_until(begin, *each) for each in decoding.values())
    return tokens / seconds if seconds else None


def _tokens_until(seconds: float, times: Sequence[float], tokens: Sequence[float]) -> float:
    """Tokens of the chunks received until then, and of the next chunk the elapsed fraction of the time to it."""
    chunks = bisect_right(times, seconds)
    if chunks == len(times):
        return tokens[-1]
    elapsed = (seconds - times[chunks - 1]) / (times[chunks] - times[chunks - 1])
    return tokens[chunks - 1] + elapsed * (tokens[chunks] - tokens[chunks - 1])


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


# ---- how figures are shown


def _number(digits: int, scale: float = 1.0, unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value * scale:.{digits}f}{unit}"


_RATE, _TIME, _SHARE, _COUNT = _number(1), _number(1, 1000, " ms"), _number(1, 100, "%"), _number(0)

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "decode_tok_s": ("decode (tg) tok/s", _RATE),
    "total_tok_s": ("total tok/s", _RATE),
    "output_tok_s": ("output tok/s", _RATE),
    "prefill_tok_s": ("prefill (pp) tok/s", _RATE),
    "ttft": ("TTFT", _TIME),
    "ttft_p95": ("TTFT p95", _TIME),
    "ttfa": ("TTFA", _TIME),
    "itl_p50": ("ITL p50", _TIME),
    "itl_p99": ("ITL p99", _TIME),
    "acceptance": ("acceptance", _SHARE),
    "cache_hits": ("cached", _SHARE),
    "prompt_tokens": ("prompt tokens", _COUNT),
    "tokens": ("tokens", _COUNT),
    "chunks": ("chunks", _COUNT),
}
"""Figures with their title and text: one name for a figure in every table, comparison, export and chart."""


def text(figures: Summary, name: str) -> str:
    """A figure of :data:`COLUMNS` as text; ``decode_tok_s`` with its range, unless that is a point."""
    value = getattr(figures, name)
    if name.startswith("itl") and figures.lagged:
        return "lagged"
    if value is None:
        return UNKNOWN
    shown = COLUMNS[name][1](value)
    lowest, highest = (f"{rate or 0:.1f}" for rate in (figures.decode_lowest, figures.decode_highest))
    return f"{shown} ({lowest}-{highest})" if name == "decode_tok_s" and lowest != highest else shown


def failed(case: MeasuredCase) -> str:
    """The failed requests of a case, and whether it is complete."""
    return f"{sum(bool(s.error) for s in case.samples)} of {len(case.samples)}" + ("" if case.complete else ", interrupted")


SHOWN_DIFFERENCE = 0.001
"""Share of a rate from which its uncertainty is shown."""
DEPTH_DIFFERENCE = 0.05
"""Share by which the counted context may differ from the requested one without a note."""
TOTAL_DIFFERENCE = 0.1
"""Share by which the rates of requests may differ from the total without a note."""


def notes(result: Result) -> list[str]:
    """What a reader must know of the figures of a result: reasons for unknown ones, bounds, contradictions, errors."""
    found = [f"the server answers wrongly: {probe}" for probe in result.wrong]
    found += [f"{name(*case.key)}: {note}" for case in result.cases for note in _notes(case, summary(case))]
    if all(prefix_cache(case) is None for case in result.cases):
        found.append("cached: unknown, neither usage nor the server's metrics have it")
    return found + sorted({f"error: {sample.error}" for case in result.cases for sample in case.samples if sample.error})


def about(result: Result) -> str:
    """What was measured, and when."""
    about = result.environment
    partial = "" if result.complete else "; partial: the run was interrupted, or the server went away"
    return f"{about.model} at {about.url}; {about.workload}, thinking {about.thinking}; {result.started_utc}{partial}"


def name(concurrency: int, output_tokens: int, context_tokens: int) -> str:
    """A case in words."""
    return f"concurrency {concurrency}, {output_tokens:,} output tokens at context depth {context_tokens:,}"


def line(case: MeasuredCase) -> str:
    """A case with its decode rate, and its failed requests if there are any."""
    computed = summary(case)
    rate = f"{computed.decode_tok_s:.1f} tok/s per request" if computed.decode_tok_s else f"rate unknown: {computed.no_rate}"
    return f"{name(*case.key)}: {rate}" + (f", {failed(case)} requests failed" if computed.errors or not case.complete else "")


def _notes(case: MeasuredCase, figures: Summary) -> Iterator[str]:
    rate, least, most = figures.decode_tok_s, figures.decode_at_least, figures.decode_at_most
    if figures.no_rate and figures.errors < figures.requests:
        yield f"rate {'of all requests ' * (rate is not None)}unknown: {figures.no_rate}"
    if rate and least is not None and most is not None and most - least > SHOWN_DIFFERENCE * rate:
        yield (
            f"the server does not count tokens by chunk ({figures.tokens or 0:,} in {figures.chunks:,}): they are estimated by "
            f"the length of its text. With any number of them in the first chunk the rate is {least:.1f} to {most:.1f} tok/s"
        )
    if rate and figures.total_tok_s and abs(share := rate * case.concurrency / figures.total_tok_s - 1) > TOTAL_DIFFERENCE:
        yield f"{case.concurrency} times the median rate of a request is {share:+.0%} off the total: requests are unequal"
    counted, requested = figures.prompt_tokens, case.context_tokens
    if counted is not None and requested and abs(share := counted / requested - 1) > DEPTH_DIFFERENCE:
        yield f"the server counts {counted:,} prompt tokens, {share:+.1%} of the {requested:,} that were requested"
    if figures.lagged:
        lag = f"{(case.lag_seconds or 0) * 1000:.0f} ms"
        yield f"the client did not read its streams for {lag}: times between chunks are unknown. Measure from an idle machine"
