"""Acceptance of draft tokens and hits of the prefix cache by a server's Prometheus metrics, as vLLM and SGLang have them."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean

from sm120kit.bench import client
from sm120kit.core.urls import Endpoint

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
"""vLLM's counters (docs/usage/metrics)."""
CACHE = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
)
"""Counters of prompt tokens, and of those in the prefix cache: vLLM 0.19.1 and 0.33.0 (vllm/v1/metrics/loggers.py), SGLang
0.5.11 and 0.5.23 (srt/observability/metrics_collector.py), whose second counter is absent before the first hit. SGLang's gauge
``sglang:cache_hit_rate`` is that of the latest batch, and 0 in each that decodes."""
RATE, LENGTH = "sglang:spec_accept_rate", "sglang:spec_accept_length"
"""SGLang's gauges: accepted drafts over proposed ones, and tokens per step, of the latest 40 steps or
``--decode-log-interval`` (SGLang 0.5.11, srt/observability/scheduler_metrics_mixin.py). 0 before the first."""
GAUGE_SECONDS = 1.0


@dataclass(frozen=True)
class Acceptance:
    """Draft tokens of speculative decoding during a cell. None is unknown.

    ``drafted`` and ``accepted`` are by the server's counters; ``rate`` and ``length`` are means of ``looks`` samples of its
    gauges: the share of accepted drafts, and the tokens per step and user.
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
    """Prompt tokens of all requests during a cell, and how many of them were in the server's prefix cache."""

    tokens: int
    hits: int

    @property
    def share(self) -> float | None:
        """Cached prompt tokens over all, None if there were none."""
        return self.hits / self.tokens if self.tokens else None


@dataclass(frozen=True)
class CellMetrics:
    """What a server's metrics have on a cell. None is unknown."""

    acceptance: Acceptance | None = None
    prefix_cache: PrefixCache | None = None


@dataclass
class _Gauges:
    """Samples of SGLang's gauges while the server decodes."""

    rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def look(self, metrics: str) -> None:
        for values, name in ((self.rates, RATE), (self.lengths, LENGTH)):
            known = [value for value in metric(metrics, name) if value > 0]
            values += [mean(known)] if known else []


@contextmanager
def measured(server: Endpoint) -> Iterator[Callable[[], CellMetrics]]:
    """Observe the metrics while the block runs. The yielded function returns the result afterwards.

    Counters are read before and after the block, gauges once a second and after it.
    """
    before = metrics_of(server)
    result = CellMetrics()
    gauges, over = _Gauges(), threading.Event()

    def watch() -> None:
        while not over.wait(GAUGE_SECONDS):
            gauges.look(metrics_of(server))

    thread = threading.Thread(target=watch, daemon=True)
    has_gauges = bool(metric(before, RATE) or metric(before, LENGTH))
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
    result = CellMetrics(_acceptance(before, after, gauges), _prefix_cache(before, after))


def _acceptance(before: str, after: str, gauges: _Gauges) -> Acceptance | None:
    drafted, accepted = _change(DRAFTED, before, after), _change(ACCEPTED, before, after)
    if drafted is not None and accepted is not None:
        return Acceptance(drafted, accepted)
    if gauges.rates or gauges.lengths:
        rate, length = (mean(values) if values else None for values in (gauges.rates, gauges.lengths))
        return Acceptance(rate=rate, length=length, looks=max(len(gauges.rates), len(gauges.lengths)))
    return None


def _prefix_cache(before: str, after: str) -> PrefixCache | None:
    for tokens, hits in CACHE:
        queried = _change(tokens, before, after)
        cached = _change(hits, before, after) if metric(before, hits) else _whole(sum(metric(after, hits)))
        if queried is not None and cached is not None and cached <= queried:
            return PrefixCache(queried, cached)
    return None


def _change(name: str, before: str, after: str) -> int | None:
    """The increase of a counter over all engines of the server; None without it, or if it was reset."""
    first, second = metric(before, name), metric(after, name)
    return _whole(sum(second) - sum(first)) if first and second else None


def _whole(tokens: float) -> int | None:
    return int(tokens) if 0 <= tokens < math.inf else None


def metrics_of(server: Endpoint) -> str:
    """The server's Prometheus metrics, "" if it offers none."""
    import httpx2

    try:
        return client.get(server, "/metrics").text
    except httpx2.HTTPError:
        return ""


def metric(metrics: str, name: str) -> list[float]:
    """The finite values of a metric, one for each set of labels."""
    values = []
    for text in re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+(\S+)", metrics, re.MULTILINE):
        try:
            value = float(text)
        except ValueError:
            continue
        if math.isfinite(value):
            values.append(value)
    return values
