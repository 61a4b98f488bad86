"""Run probes on a server, one after the other, within a time limit."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sm120kit.bench import client
from sm120kit.core.errors import NotFound, ServerFailed, did_you_mean
from sm120kit.core.urls import Endpoint
from sm120kit.kld import SavedReference
from sm120kit.probes.answer_text import ANSWER_TEXT
from sm120kit.probes.cached_prefixes import CACHED_PREFIXES
from sm120kit.probes.decode_by_prefill import DECODE_BY_PREFILL
from sm120kit.probes.known_text import KNOWN_TEXT
from sm120kit.probes.log_probabilities import LOG_PROBABILITIES
from sm120kit.probes.needles import NEEDLES
from sm120kit.probes.probe_records import FORMAT, CannotBeJudged, ProbeJudgement, ProbeResult, ServerVerification, unknown
from sm120kit.probes.probe_session import ProbeSession, ServerProbe
from sm120kit.probes.reference_answers import REFERENCE_SERVER, saved_reference
from sm120kit.probes.repeated_requests import QUICK_REPEATED_REQUESTS, REPEATED_REQUESTS
from sm120kit.probes.structured_answers import STRUCTURED_ANSWERS
from sm120kit.probes.token_counts import TOKEN_COUNTS
from sm120kit.probes.word_copy import WORD_COPY

PROBES = (
    LOG_PROBABILITIES,
    TOKEN_COUNTS,
    ANSWER_TEXT,
    KNOWN_TEXT,
    REPEATED_REQUESTS,
    DECODE_BY_PREFILL,
    CACHED_PREFIXES,
    NEEDLES,
    WORD_COPY,
    STRUCTURED_ANSWERS,
)
"""In the order in which they run: those of few requests first."""
QUICK = (LOG_PROBABILITIES, TOKEN_COUNTS, QUICK_REPEATED_REQUESTS)
"""The probes before a measurement: some seconds."""
SECONDS = 120.0


@dataclass(frozen=True)
class VerifiedServer:
    """A server, its model, and what it is compared with: another server with its model, or a saved reference."""

    endpoint: Endpoint
    model: str
    reference: tuple[Endpoint, str] | SavedReference | None = None


def selected(names: Sequence[str]) -> tuple[ServerProbe, ...]:
    """The probes of these names; all without names.

    Raises:
        NotFound: no probe has a name.
    """
    known = {probe.name: probe for probe in PROBES}
    for name in names:
        if name not in known:
            raise NotFound(f"unknown probe {name!r}{did_you_mean(name, known)}", f"probes: {', '.join(known)}")
    return tuple(known[name] for name in names) or PROBES


def verify(
    server: VerifiedServer,
    probes: Sequence[ServerProbe] = PROBES,
    seconds: float = SECONDS,
    *,
    on_result: Callable[[ServerVerification], None] = lambda verification: None,
) -> ServerVerification:
    """Run probes on a server; ``on_result`` gets the verification so far after each.

    Raises:
        ServerFailed: the server does not list its models, or answers no request in time.
    """
    began, seed = time.monotonic(), secrets.token_hex(4)
    reported = client.server_info(server.endpoint, server.model, min(10, seconds / 10))
    reference = server.reference
    session = ProbeSession(server.endpoint, server.model, seed, began + seconds, reported=reported)
    if isinstance(reference, SavedReference):
        probes = (*probes, saved_reference(reference))
    elif reference:
        session.reference = reference
        probes = (*probes, REFERENCE_SERVER)
    verification = ServerVerification(
        FORMAT,
        datetime.now(UTC).isoformat(timespec="seconds"),
        False,
        server.endpoint.url,
        server.model,
        _name(reference),
        reported,
        seed,
        0.0,
    )
    try:
        session.measure()
    except CannotBeJudged as reason:
        raise ServerFailed(f"{server.endpoint.url}: {reason}", f"of a slow server, --seconds; {client.hint('')}") from reason
    for number, probe in enumerate(probes, 1):
        result = _run(probe, session)
        took = round(time.monotonic() - began, 1)
        results = (*verification.probes, result)
        verification = replace(verification, probes=results, seconds=took, complete=number == len(probes))
        on_result(verification)
    return verification


def _name(reference: tuple[Endpoint, str] | SavedReference | None) -> str | None:
    if reference is None:
        return None
    return reference.name if isinstance(reference, SavedReference) else f"{reference[1]} at {reference[0].url}"


def _run(probe: ServerProbe, session: ProbeSession) -> ProbeResult:
    session.exchanges.clear()
    began = time.monotonic()
    try:
        probe.ask(session)
        judgement = probe.judge({exchange.label: exchange for exchange in session.exchanges})
    except CannotBeJudged as reason:
        judgement = unknown(str(reason))
    return _result(probe, time.monotonic() - began, judgement, session)


def _result(probe: ServerProbe, seconds: float, judgement: ProbeJudgement, session: ProbeSession) -> ProbeResult:
    exchanges = tuple(session.exchanges)
    saw = session.server.without_secrets(judgement.saw)
    return ProbeResult(probe.name, judgement.verdict, saw, probe.cannot_see, round(seconds, 1), exchanges)
