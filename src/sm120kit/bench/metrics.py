"""A server's Prometheus metrics under the same names for vLLM and SGLang: load, draft tokens, hits of the prefix cache."""

from __future__ import annotations

import re
import threading
import time
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
MOST = 2.0**53
"""Largest value of a metric, from which on a float cannot count by one."""
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
KV_CACHE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
"""Gauges: requests, and the used share of the KV cache; a value for each engine of a server with data parallelism."""
GENERATED, THROUGHPUT = "vllm:generation_tokens_total", "sglang:gen_throughput"
"""vLLM's counter of tokens, and SGLang's gauge of tokens per second of the latest decoding, which stays when no request runs.
Sources of these as of ``CACHE``."""


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


@dataclass(frozen=True)
class ServerMetrics:
    """What a server does, over an interval. None is unknown, also acceptance if nothing was drafted.

    ``kv_cache`` and ``acceptance`` are shares: of the KV cache in use, and of accepted draft tokens.
    """

    healthy: bool
    running: int | None
    waiting: int | None
    kv_cache: float | None
    tokens_per_second: float | None
    acceptance: float | None


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


def observe(server: Endpoint, seconds: float) -> ServerMetrics:
    """What a server does within ``seconds``."""
    before, started = metrics_of(server), time.monotonic()
    time.sleep(seconds)
    after, passed = metrics_of(server), time.monotonic() - started
    gauges = _Gauges()
    gauges.look(after)
    accepted = _acceptance(before, after, gauges)
    running, usage = _total(after, RUNNING), [value for name in KV_CACHE for value in metric(after, name)]
    generated, rates = _change(GENERATED, before, after), metric(after, THROUGHPUT)
    if generated is not None:
        rate: float | None = generated / passed
    else:
        rate = (sum(rates) if running else 0.0) if rates else None
    return ServerMetrics(
        _is_healthy(server),
        running,
        _total(after, WAITING),
        mean(usage) if usage else None,
        rate,
        accepted.share if accepted else None,
    )


def _total(metrics: str, names: tuple[str, ...]) -> int | None:
    """The sum of the first of these metrics that a server has."""
    return next((int(sum(values)) for name in names if (values := metric(metrics, name))), None)


def _is_healthy(server: Endpoint) -> bool:
    import httpx2

    try:
        return client.get(server, "/health").is_success
    except httpx2.HTTPError:
        return False


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
    values = []
    for text in re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+(\S+)", metrics, re.MULTILINE):
        try:
            value = float(text)
        except ValueError:
            continue
        if abs(value) <= MOST:
            values.append(value)
    return values
