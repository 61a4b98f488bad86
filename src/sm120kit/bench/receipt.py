"""Receipts: every sample of a run with its circumstances, as one JSON file; and what follows from the samples."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sm120kit.bench.clocks import Clocks
from sm120kit.bench.sample import Sample
from sm120kit.errors import BadReceipt, StateUnwritable
from sm120kit.workspace import read_record, write_record

FORMAT = "sm120kit.receipt/2"


@dataclass(frozen=True)
class Served:
    """How the server was started, as launch recorded it. None is unknown: of a server that somebody else started, everything.

    ``image`` is the content of the verified image, ``lock`` its build id, ``revision`` the commit of the model's repository.
    ``environment`` are variables, with values where a configuration of sm120kit sets them; others may be secret.
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
    """The server's machine before the run. None is unknown: of another machine than the client's, everything.

    ``cuda`` is the newest that the driver runs; ``gpus`` are names in nvidia-smi's order, ``topology`` its class of each pair.
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
    """All that a figure depends on and that is known. ``given`` is what the user said about it, not what was seen.

    ``said`` is what the server says of itself and of its model, ``prompts_sha256`` the hash of the workload's prompts.
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
    said: dict[str, str] = field(default_factory=dict)
    served: Served = Served()
    machine: Machine = Machine()


@dataclass(frozen=True)
class Acceptance:
    """Draft tokens of speculative decoding during a cell, by the server's own counters."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class Measured:
    """One cell after one start of the server, of which ``restart`` is the number: 0 for the first.

    ``lag_seconds`` is how long the client at worst did not look at its streams; ``clocks`` what the GPUs did, None when that
    could not be seen. ``complete`` is false when it was interrupted: the requests that had ended are there.
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

    @property
    def key(self) -> tuple[int, int, int]:
        """Which cell of the workload it is: users, output tokens, context tokens."""
        return self.users, self.output_tokens, self.context_tokens


@dataclass(frozen=True)
class Receipt:
    """A run. ``complete`` is false when it was interrupted or the server went away: what was measured is there."""

    format: str
    started_utc: str
    complete: bool
    circumstances: Circumstances
    cells: tuple[Measured, ...]


@dataclass(frozen=True)
class Summary:
    """A cell in figures; rates in tokens per second, times in seconds, None where nothing is known.

    ``decode_tok_s`` is the median over the requests, ``total_tok_s`` counts the tokens of all users while every one of them
    was decoding, ``output_tok_s`` all tokens from the first request's start to the last one's end. ``prefill_tok_s`` is the
    median of prompt tokens that no cache had, over the time to the first token: what a request waited counts.
    """

    requests: int
    errors: int
    tokens: int | None
    chunks: int
    decode_tok_s: float | None
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
    acceptance: float | None


def schema() -> dict[str, Any]:
    """The JSON Schema of a receipt; published as ``docs/receipt.schema.json``."""
    from pydantic import TypeAdapter

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": FORMAT, **TypeAdapter(Receipt).json_schema()}


def write(path: Path, receipt: Receipt) -> None:
    """Write a receipt whole or not at all."""
    write_record(path, receipt)


def require_writable(path: Path, option: str = "--output") -> None:
    """Refuse a place that cannot hold a file, before anything is measured.

    Raises:
        StateUnwritable: it is a directory, or its directory is missing or cannot be written.
    """
    why = "is a directory" if path.is_dir() else ""
    if not why:
        try:
            with tempfile.TemporaryFile(dir=path.parent):  # permissions do not tell it all: root, read-only disks, /proc
                pass
        except OSError as error:
            why = f"{path.parent}: {error.strerror}"
    if why:
        raise StateUnwritable(f"cannot write {path}: {why}", f"name another file with {option}")


def read(path: Path) -> Receipt:
    """Read a receipt back.

    Raises:
        BadReceipt: it is missing, not a receipt, or of a newer format.
    """
    try:
        said = json.loads(path.read_bytes())
        form = said.get("format") if isinstance(said, dict) else None
        if form != FORMAT:
            raise BadReceipt(
                f"{path}: format {form!r}; this sm120kit reads {FORMAT}", "use the sm120kit that wrote it, or a newer one"
            )
        return read_record(Receipt, path)
    except OSError as error:
        raise BadReceipt(f"{path}: {error.strerror}", "name a file that bench run wrote") from error
    except ValueError as error:
        raise BadReceipt(f"{path} is not a receipt: {error}", "name a file that bench run wrote") from error


def summary(cell: Measured) -> Summary:
    """The figures of a cell, of the requests that ended well; errors are counted, never averaged away."""
    good = [sample for sample in cell.samples if not sample.error]
    rates = [rate for sample in good if (rate := sample.decode_tok_s) is not None]
    counts = [sample.completion_tokens for sample in good if sample.completion_tokens is not None]
    prefill = [
        (s.prompt_tokens - (s.cached_tokens or 0)) / s.ttft for s in good if s.prompt_tokens is not None and s.ttft is not None
    ]
    gaps = [gap for sample in good for gap in sample.itl]
    span = max((s.ended for s in cell.samples), default=0.0) - min((s.started for s in cell.samples), default=0.0)
    known = len(counts) == len(good) > 0
    drafted = cell.acceptance.drafted if cell.acceptance else 0
    return Summary(
        requests=len(cell.samples),
        errors=len(cell.samples) - len(good),
        tokens=sum(counts) if known else None,
        chunks=sum(len(sample.chunk_seconds) for sample in good),
        decode_tok_s=median(rates) if rates else None,
        decode_lowest=min(rates, default=None),
        decode_highest=max(rates, default=None),
        total_tok_s=_together(good, cell.users),
        output_tok_s=sum(counts) / span if known and span > 0 else None,
        prefill_tok_s=median(prefill) if prefill else None,
        ttft=_quantile([s.ttft for s in good if s.ttft is not None], 0.5),
        ttft_p95=_quantile([s.ttft for s in good if s.ttft is not None], 0.95),
        ttfa=_quantile([s.ttfa for s in good if s.ttfa is not None], 0.5),
        itl_p50=_quantile(gaps, 0.5),
        itl_p99=_quantile(gaps, 0.99),
        acceptance=cell.acceptance.accepted / drafted if cell.acceptance and drafted else None,
    )


def _together(samples: Sequence[Sample], users: int) -> float | None:
    """Tokens per second of all users over the time in which each of them was decoding; a chunk holds its stream's average."""
    decoding: dict[int, tuple[float, float]] = {}
    for sample in samples:
        if sample.completion_tokens is None or len(sample.chunk_seconds) < 2:
            return None
        first, last = decoding.get(sample.user, (sample.chunk_seconds[0], 0.0))
        decoding[sample.user] = min(first, sample.chunk_seconds[0]), max(last, sample.chunk_seconds[-1])
    if len(decoding) < users:
        return None
    begin, end = max(first for first, _ in decoding.values()), min(last for _, last in decoding.values())
    if end <= begin:
        return None
    tokens = 0.0
    for sample in samples:
        inside = _chunks_until(sample, end) - _chunks_until(sample, begin)
        tokens += inside * (sample.completion_tokens or 0) / len(sample.chunk_seconds)
    return tokens / (end - begin)


def _chunks_until(sample: Sample, seconds: float) -> float:
    """Chunks that had come, and what part of the time to the next one had passed."""
    times = sample.chunk_seconds
    came = bisect_right(times, seconds)
    if came in (0, len(times)):
        return came
    return came + (seconds - times[came - 1]) / (times[came] - times[came - 1])


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
