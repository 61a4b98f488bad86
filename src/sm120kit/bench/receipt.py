"""Receipts: every sample of a run with its circumstances, as a JSON file, and the figures computed from the samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from sm120kit.bench.clocks import Clocks
from sm120kit.bench.energy import Energy
from sm120kit.bench.metrics import Acceptance, PrefixCache
from sm120kit.bench.sample import Sample
from sm120kit.core.errors import BadReceipt
from sm120kit.core.outside import parse_json, read_input
from sm120kit.core.state import read_record, write_record

FORMAT = "sm120kit.receipt/2"
LAG_SECONDS = 0.1
"""If the client did not read its streams for longer, chunks that arrived meanwhile have one time, and ITL is unknown."""


@dataclass(frozen=True)
class Served:
    """How the server was started, by launch's record. None is unknown; without a record, everything is.

    ``image`` is the content digest of the verified image, ``lock`` its build id, ``revision`` the commit of the model's
    repository. ``environment`` has variables, with values only if a configuration of sm120kit sets them: others may be secret.
    """

    configuration: str | None = None
    engine: str | None = None
    image: str | None = None
    image_name: str | None = None
    lock: str | None = None
    revision: str | None = None
    tokenizer_sha256: str | None = None
    argv: tuple[str, ...] | None = None
    environment: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Machine:
    """The server's machine before the run. None is unknown; unless it is known to be the client's, everything is.

    ``cuda`` is the newest version that the driver supports; ``gpus`` are names in nvidia-smi's order, ``topology`` is its class
    of each pair.
    """

    kernel: str | None = None
    cpu: str | None = None
    governor: str | None = None
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] | None = None
    power_limits_watts: tuple[float | None, ...] | None = None
    topology: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Circumstances:
    """Everything known that a figure depends on. ``given`` are values stated by the user, not detected.

    ``reported`` is the server's description of its model and its version, ``prompts_sha256`` the hash of the workload's
    prompts.
    """

    url: str
    model: str
    workload: str
    workload_sha256: str
    thinking: str
    temperature: float
    order_seed: int
    client: dict[str, str]
    given: dict[str, str]
    prompts_sha256: str | None = None
    reported: dict[str, str] = field(default_factory=dict)
    served: Served = Served()
    machine: Machine = Machine()


@dataclass(frozen=True)
class MeasuredCell:
    """A cell, measured after one start of the server; ``restart`` is the number of the start, from 0.

    ``lag_seconds`` is the longest time for which the client did not read its streams; ``clocks`` are samples of the GPUs, None
    if there were none; ``energy`` is that of the GPUs from the first request to the end of the last. ``complete`` is false if
    the cell was interrupted; ``samples`` then has the requests that had ended.
    """

    users: int
    output_tokens: int
    context_tokens: int
    warmup: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    lag_seconds: float | None
    acceptance: Acceptance | None
    restart: int = 0
    clocks: tuple[Clocks, ...] | None = None
    complete: bool = True
    prefix_cache: PrefixCache | None = None
    energy: Energy | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Identity of the cell in its workload: users, output tokens, context tokens."""
        return self.users, self.output_tokens, self.context_tokens


@dataclass(frozen=True)
class Receipt:
    """A run. ``complete`` is false if it was interrupted or the server went away; the cells until then are in it."""

    format: str
    started_utc: str
    complete: bool
    circumstances: Circumstances
    cells: tuple[MeasuredCell, ...]


@dataclass(frozen=True)
class Summary:
    """The figures of a cell; rates in tokens per second, times in seconds, None if unknown.

    ``decode_tok_s`` is the median over the requests, ``decode_at_least`` the same if the first chunk of each request has as
    many tokens as its average chunk: less than ``decode_tok_s`` unless the server counts tokens by chunk. ``total_tok_s``
    counts the tokens of all users while all of them were decoding; ``output_tok_s`` counts all tokens from the start of the
    first request to the end of the last. ``lagged``: the client did not read its streams for more than ``LAG_SECONDS``, so that
    times between chunks are unknown. ``prefill_tok_s`` is the median of uncached prompt tokens over the time to the first
    token, waiting included. ``cache_hits`` is the share of prompt tokens in the server's prefix cache. ``joules_per_token`` is
    the energy of the GPUs over the tokens of all answers, prefill included; None if a request failed.
    """

    requests: int
    errors: int
    tokens: int | None
    chunks: int
    decode_tok_s: float | None
    decode_at_least: float | None
    decode_lowest: float | None
    decode_highest: float | None
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
    joules_per_token: float | None = None


def schema() -> dict[str, Any]:
    """The JSON Schema of a receipt; published as ``docs/receipt.schema.json``."""
    from pydantic import TypeAdapter

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": FORMAT, **TypeAdapter(Receipt).json_schema()}


def write(path: Path, receipt: Receipt) -> None:
    """Write a receipt atomically."""
    write_record(path, receipt)


def read(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        BadReceipt: the file is missing, not a receipt, or of a newer format.
    """
    try:
        content = parse_json(read_input(path))
        version = content.get("format") if isinstance(content, dict) else None
        if version != FORMAT:
            raise BadReceipt(
                f"{path}: format {version!r}; this sm120kit reads {FORMAT}", "use the sm120kit that wrote it, or a newer one"
            )
        return read_record(Receipt, path)
    except OSError as error:
        raise BadReceipt(f"{path}: {error.strerror}", "name a file that bench run wrote") from error
    except ValueError as error:
        raise BadReceipt(f"{path} is not a receipt: {error}", "name a file that bench run wrote") from error


def summary(cell: MeasuredCell) -> Summary:
    """The figures of a cell over its successful requests; failed requests are counted, never averaged."""
    successful = [sample for sample in cell.samples if not sample.error]
    decoded = [sample for sample in successful if sample.decode_tok_s is not None]
    rates = [sample.decode_tok_s or 0.0 for sample in decoded]
    counts = [sample.completion_tokens for sample in successful if sample.completion_tokens is not None]
    prefill = [rate for sample in successful if (rate := sample.prefill_tok_s) is not None]
    lagged = cell.lag_seconds is not None and cell.lag_seconds > LAG_SECONDS
    gaps = [gap for sample in successful for gap in sample.itl if not lagged]
    span = max((s.ended for s in cell.samples), default=0.0) - min((s.started for s in cell.samples), default=0.0)
    known = len(counts) == len(successful) > 0
    joules = cell.energy.total if cell.energy and len(counts) == len(cell.samples) else None
    return Summary(
        requests=len(cell.samples),
        errors=len(cell.samples) - len(successful),
        tokens=sum(counts) if known else None,
        chunks=sum(len(sample.chunk_seconds) for sample in successful),
        decode_tok_s=median(rates) if rates else None,
        decode_at_least=median(sample.decode_at_least or 0.0 for sample in decoded) if decoded else None,
        decode_lowest=min(rates, default=None),
        decode_highest=max(rates, default=None),
        total_tok_s=_together(successful, cell.users),
        output_tok_s=sum(counts) / span if known and span > 0 else None,
        prefill_tok_s=median(prefill) if prefill else None,
        ttft=_quantile([s.ttft for s in successful if s.ttft is not None], 0.5),
        ttft_p95=_quantile([s.ttft for s in successful if s.ttft is not None], 0.95),
        ttfa=_quantile([s.ttfa for s in successful if s.ttfa is not None], 0.5),
        itl_p50=_quantile(gaps, 0.5),
        itl_p99=_quantile(gaps, 0.99),
        lagged=lagged,
        acceptance=cell.acceptance.share if cell.acceptance else None,
        cache_hits=cell.prefix_cache.share if cell.prefix_cache else None,
        joules_per_token=joules / total if joules is not None and (total := sum(counts)) else None,
    )


def _together(samples: Sequence[Sample], users: int) -> float | None:
    """Tokens per second of all users while every one of them was decoding.

    The time between the last chunk of a user's request and the first chunk of the user's next request does not count.
    """
    received = [sample.tokens_received for sample in samples]
    if None in received:
        return None
    streams = [(sample.chunk_seconds, counts) for sample, counts in zip(samples, received, strict=True) if counts]
    # Requests of a user follow each other: the number of streams that are decoding is the number of users that are.
    changes = sorted([(times[0], 1) for times, _ in streams] + [(times[-1], -1) for times, _ in streams])
    decoding, seconds, tokens = 0, 0.0, 0.0
    for (begin, change), (end, _) in pairwise(changes):
        decoding += change
        if decoding == users and end > begin:
            seconds += end - begin
            tokens += sum(
                _tokens_until(end, times, counts) - _tokens_until(begin, times, counts)
                for times, counts in streams
                if times[0] <= begin and times[-1] >= end
            )
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
