"""Measure a server, keep a receipt, say what follows from it."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version

from sm120kit import __version__
from sm120kit.bench import client, receipt, workload
from sm120kit.bench.receipt import Acceptance, Circumstances, Measured, Receipt
from sm120kit.bench.workload import Cell, Named
from sm120kit.errors import WrongModel

Finished = Callable[[], None]
"""Called after each request."""

COUNTERS = {
    "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
}
"""Prometheus counters of speculative decoding (vLLM, docs/usage/metrics). Others are unknown to us, and so is their rate."""


def choose_model(url: str, named: str | None) -> str:
    """The model to ask for: the named one, or the only one there is.

    Raises:
        ServerUnreachable: no list of models.
        WrongModel: the server does not offer it, or offers several.
    """
    offered = client.models(url)
    if named is None and len(offered) == 1:
        return offered[0]
    if named is None or named not in offered:
        what = f"does not offer {named!r}" if named else f"offers {len(offered)} models"
        raise WrongModel(f"{url} {what}", f"name one with --model: {', '.join(offered)}")
    return named


def run(
    url: str,
    model: str,
    asked: Named,
    *,
    seed: int,
    given: Mapping[str, str],
    keep: Callable[[Receipt], None],
    cell_begins: Callable[[Cell, int], Finished] = lambda cell, requests: lambda: None,
) -> Receipt:
    """Measure every cell of a workload. ``keep`` gets a partial receipt after each cell, so that an interrupt loses no other.

    ``cell_begins`` is told a cell and its number of requests, and returns what is called after each request.
    """
    began = datetime.now(UTC)
    about = Circumstances(
        url=url,
        model=model,
        workload=asked.name,
        workload_sha256=asked.sha256,
        thinking=asked.workload.thinking,
        temperature=asked.workload.temperature,
        order_seed=seed,
        client={"sm120kit": __version__, "httpx2": version("httpx2"), "python": platform.python_version()},
        given=dict(given),
    )
    order = workload.cells(asked.workload, seed)
    found: list[Measured] = []
    made = Receipt(receipt.FORMAT, began.isoformat(timespec="seconds"), False, about, ())
    for number, cell in enumerate(order):
        salt = f"{began.isoformat()}/{number}"
        found.append(_measure(url, model, asked.workload, cell, salt, cell_begins))
        made = Receipt(receipt.FORMAT, made.started_utc, len(found) == len(order), about, tuple(found))
        keep(made)
    return made


def _measure(
    url: str,
    model: str,
    work: workload.Workload,
    cell: Cell,
    salt: str,
    cell_begins: Callable[[Cell, int], Finished],
) -> Measured:
    finished = cell_begins(cell, cell.users * (work.warmup_requests + work.requests_per_user))
    warm = client.stream_all(url, workload.asks(work, cell, model, work.warmup_requests, f"{salt}/warm"), finished=finished)
    before = _counters(url)
    seen = client.stream_all(url, workload.asks(work, cell, model, work.requests_per_user, salt), finished=finished)
    after = _counters(url)
    acceptance = None
    if before and after:
        acceptance = Acceptance(after["drafted"] - before["drafted"], after["accepted"] - before["accepted"])
    return Measured(
        cell.users, cell.output_tokens, cell.context_tokens, warm.samples, seen.samples, seen.lag_seconds, acceptance
    )


def _counters(url: str) -> dict[str, int] | None:
    """The sums of the counters over all engines, or None when the server does not offer every one of them."""
    import httpx2

    try:
        answer = httpx2.get(f"{url}/metrics", timeout=10, trust_env=False)
        answer.raise_for_status()
    except httpx2.HTTPError:
        return None
    found: dict[str, int] = {}
    for what, counters in COUNTERS.items():
        values = [
            float(value)
            for counter in counters
            for value in re.findall(rf"^{re.escape(counter)}(?:\{{[^}}]*\}})?\s+(\S+)", answer.text, re.MULTILINE)
        ]
        if not values:
            return None
        found[what] = int(sum(values))
    return found
