"""A server's Prometheus metrics under the same names for every engine: load, draft tokens, hits of the prefix cache."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean

from sm120kit.bench import client
from sm120kit.core.outside import number
from sm120kit.core.urls import Endpoint
from sm120kit.engines import Metrics, all_engines

GAUGE_SECONDS = 1.0
MOST = 2.0**53
"""Largest value of a metric, from which on a float cannot count by one."""


@dataclass(frozen=True)
class Acceptance:
    """Draft tokens of speculative decoding during a case. None is unknown.

    ``drafted`` and ``accepted`` are by the server's counters; ``rate`` and ``length`` are means of ``looks`` samples of its
    gauges: the acceptance rate, and the tokens per step and request.
    """

    drafted: int | None = None
    accepted: int | None = None
    rate: float | None = None
    length: float | None = None
    looks: int = 0

    @property
    def share(self) -> float | None:
        """Accepted drafts over all, None if unknown or if there was no draft."""
        if self.drafted is not None and self.accepted is not None:
            return self.accepted / self.drafted if self.drafted > 0 else None
        return self.rate


@dataclass(frozen=True)
class PrefixCache:
    """Prompt tokens of all requests during a case, and how many of them were in the server's prefix cache."""

    tokens: int
    hits: int

    @property
    def share(self) -> float | None:
        """Cached prompt tokens over all, None if there were none."""
        return self.hits / self.tokens if self.tokens else None


@dataclass(frozen=True)
class CaseMetrics:
    """What a server's metrics have on a case. None is unknown."""

    acceptance: Acceptance | None = None
    prefix_cache: PrefixCache | None = None


@dataclass
class _Gauges:
    """Samples of gauges while the server decodes, for an engine without counters of drafts."""

    names: Metrics
    rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def look(self, metrics: str) -> None:
        for values, name in ((self.rates, self.names.accept_rate), (self.lengths, self.names.accept_length)):
            known = [value for value in metric(metrics, name) if value > 0]
            values += [mean(known)] if known else []


@contextmanager
def measured(server: Endpoint) -> Iterator[Callable[[], CaseMetrics]]:
    """Observe the metrics while the block runs. The yielded function returns the result afterwards.

    Counters are read before and after the block, gauges once a second and after it.
    """
    before = metrics_of(server)
    result = CaseMetrics()
    names, over = names_in(before), threading.Event()
    gauges = _Gauges(names)

    def watch() -> None:
        while not over.wait(GAUGE_SECONDS):
            gauges.look(metrics_of(server))

    thread = threading.Thread(target=watch, daemon=True)
    has_gauges = bool(metric(before, names.accept_rate) or metric(before, names.accept_length))
    if has_gauges:
        thread.start()
    try:
        yield lambda: result
    finally:
        over.set()
        if has_gauges:
            thread.join()
    after = metrics_of(server)
    if has_gauges:
        gauges.look(after)
    result = CaseMetrics(_acceptance(before, after, gauges), _prefix_cache(before, after, names))


def names_in(metrics: str) -> Metrics:
    """The names of the engine whose metrics these are; none if they are of no known engine."""
    known = (engine.metrics for engine in all_engines())
    return next((names for names in known if any(metric(metrics, name) for name in vars(names).values())), Metrics())


def _acceptance(before: str, after: str, gauges: _Gauges) -> Acceptance | None:
    names = gauges.names
    drafted, accepted = (_change(name, before, after) for name in (names.drafted, names.accepted))
    if drafted is not None and accepted is not None:
        return Acceptance(drafted, accepted)
    if gauges.rates or gauges.lengths:
        rate, length = (mean(values) if values else None for values in (gauges.rates, gauges.lengths))
        return Acceptance(rate=rate, length=length, looks=max(len(gauges.rates), len(gauges.lengths)))
    return None


def _prefix_cache(before: str, after: str, names: Metrics) -> PrefixCache | None:
    queried, hits = _change(names.prompt_tokens, before, after), names.cached_tokens
    cached = _change(hits, before, after) if metric(before, hits) else _whole(sum(metric(after, hits)))
    return PrefixCache(queried, cached) if queried is not None and cached is not None and cached <= queried else None


def _change(name: str, before: str, after: str) -> int | None:
    """The increase of a counter over all engines of the server; None without it, or if it was reset."""
    first, second = metric(before, name), metric(after, name)
    return _whole(sum(second) - sum(first)) if first and second else None


def _whole(tokens: float) -> int | None:
    return int(tokens) if tokens >= 0 else None


def metrics_of(server: Endpoint) -> str:
    """The server's Prometheus metrics, "" if it offers none."""
    import httpx2

    try:
        return client.get(server, "/metrics").content.decode("utf-8", "replace")
    except httpx2.HTTPError:
        return ""


def metric(metrics: str, name: str) -> list[float]:
    """The values of a metric, one for each set of labels, without those beyond ``MOST``, whose sum would be infinite."""
    values: list[float] = []
    for text in re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+(\S+)", metrics, re.MULTILINE) if name else ():
        try:
            value = number(text)
        except ValueError:
            continue
        if abs(value) <= MOST:
            values.append(value)
    return values
