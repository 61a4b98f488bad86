"""Measure a server, keep a receipt, say what follows from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime

from sm120kit.bench import circumstances, client, clocks, receipt, workload
from sm120kit.bench.receipt import Acceptance, Circumstances, Measured, Receipt, Served
from sm120kit.bench.workload import Cell, Named
from sm120kit.errors import ServerUnreachable, WrongModel
from sm120kit.workspace import digest_of

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
    served: Served | None = None,
    earlier: Receipt | None = None,
    restarts: int = 0,
) -> Receipt:
    """Measure every cell of a workload. ``keep`` gets a partial receipt after each cell, and when one is interrupted.

    ``cell_begins`` is told a cell and its number of requests, 0 when the time decides, and returns what is called after each
    request. A server that will be started again ``restarts`` times is measured in as many more calls, each with the receipt of
    the one before as ``earlier``; the order of the cells is another one each time.

    Raises:
        ServerUnreachable: the server went away.
    """
    began = datetime.now(UTC)
    made = earlier or Receipt(
        receipt.FORMAT,
        began.isoformat(timespec="seconds"),
        False,
        Circumstances(
            url=url,
            model=model,
            workload=asked.name,
            workload_sha256=asked.sha256,
            thinking=asked.workload.thinking,
            temperature=asked.workload.temperature,
            order_seed=seed,
            client=circumstances.client(),
            given=dict(given),
            prompts_sha256=digest_of(asked.workload.prompts),
            said=client.said(url, model),
            served=served or Served(),
            machine=circumstances.machine(url),
        ),
        (),
    )
    restart = 0 if earlier is None else 1 + max(cell.restart for cell in earlier.cells)
    order = workload.cells(asked.workload, seed + restart)
    for number, cell in enumerate(order):

        def interrupted(part: Measured, before: Receipt = made) -> None:
            keep(replace(before, cells=(*before.cells, part)))

        salt = f"{began.isoformat()}/{number}"
        found = _measure(url, model, asked.workload, cell, salt, restart, cell_begins, interrupted)
        lost = any(sample.error for sample in found.samples) and _lost(url)
        last = restart == restarts and number == len(order) - 1
        made = replace(made, cells=(*made.cells, found), complete=last and not lost)
        keep(made)
        if lost:
            raise ServerUnreachable(
                f"{url} no longer answers; it went away in cell {number + 1} of {len(order)}",
                "what was measured is kept, marked partial; its log may say why: sm120kit explain LOG",
            )
    return made


def _measure(
    url: str,
    model: str,
    work: workload.Workload,
    cell: Cell,
    salt: str,
    restart: int,
    cell_begins: Callable[[Cell, int], Finished],
    interrupted: Callable[[Measured], None],
) -> Measured:
    """One cell. When it is interrupted, ``interrupted`` gets what has ended."""
    finished = cell_begins(cell, 0 if work.seconds else cell.users * (work.warmup_requests + work.requests_per_user))
    ended: list[client.Ended] = []

    def one(request: client.Ended) -> None:
        ended.append(request)
        finished()

    warming = workload.asks(work, cell, model, work.warmup_requests, f"{salt}/warm")
    warm = client.stream_all(url, warming, finished=lambda request: finished())
    made = Measured(cell.users, cell.output_tokens, cell.context_tokens, warm.samples, (), None, None, restart)
    before = _counters(url)
    try:
        with clocks.watched() if circumstances.is_local(url) else nullcontext(lambda: None) as seen:
            asking: Sequence[Iterable[client.Ask]] = (
                workload.asks_for(work.seconds, work, cell, model, salt)
                if work.seconds
                else workload.asks(work, cell, model, work.requests_per_user, salt)
            )
            watched = client.stream_all(url, asking, finished=one)
    except BaseException:
        if ended:
            interrupted(replace(made, samples=tuple(request() for request in ended), complete=False))
        raise
    after = _counters(url)
    acceptance = None
    if before and after:
        acceptance = Acceptance(after["drafted"] - before["drafted"], after["accepted"] - before["accepted"])
    return replace(made, samples=watched.samples, lag_seconds=watched.lag_seconds, acceptance=acceptance, clocks=seen())


def _lost(url: str) -> bool:
    """Whether the server is gone: not a failed request, but nobody there."""
    try:
        client.models(url)
    except ServerUnreachable:
        return True
    return False


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
