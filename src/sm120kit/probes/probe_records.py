"""Records of a server's verification: what was asked, what was answered, and what each probe concludes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

FORMAT = "sm120kit.server-verification/1"


class ProbeVerdict(StrEnum):
    """What a probe concludes."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "cannot be judged"


class CannotBeJudged(Exception):
    """A probe cannot conclude anything; the message is the reason."""


@dataclass(frozen=True)
class AnsweredToken:
    """A generated token with its log-probability, and the most likely tokens at its position, as the server lists them."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``arguments`` is the text that should be JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer. None is unknown. ``error`` is empty unless the request failed; ``seconds`` from request to end."""

    error: str = ""
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[AnsweredToken, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Reasoning and answer."""
        return self.reasoning + self.content

    @property
    def said(self) -> bool:
        """Whether there is anything to judge."""
        return bool(self.text.strip() or self.tokens or self.tool_calls)


@dataclass(frozen=True)
class ProbeExchange:
    """A request, which ``label`` names within its probe, and its answer."""

    label: str
    path: str
    body: dict[str, Any]
    answer: RecordedAnswer


Recorded = Mapping[str, ProbeExchange]
"""The requests of a probe with their answers, by label."""


@dataclass(frozen=True)
class ProbeJudgement:
    """A verdict with what the probe saw, in a sentence with numbers; of an unknown one, the reason."""

    verdict: ProbeVerdict
    saw: str


@dataclass(frozen=True)
class ProbeResult:
    """What a probe concluded, what it cannot see, and everything that was said."""

    probe: str
    verdict: ProbeVerdict
    saw: str
    cannot_see: str
    seconds: float
    exchanges: tuple[ProbeExchange, ...] = ()


@dataclass(frozen=True)
class ServerVerification:
    """The probes of a server. ``complete`` is false while some have not run; the words of the prompts follow from ``seed``."""

    format: str
    started_utc: str
    complete: bool
    url: str
    model: str
    reference: str | None
    reported: dict[str, str]
    seed: str
    seconds: float
    probes: tuple[ProbeResult, ...] = field(default_factory=tuple)

    @property
    def wrong(self) -> tuple[ProbeResult, ...]:
        """The probes that found something wrong."""
        return tuple(probe for probe in self.probes if probe.verdict is ProbeVerdict.WRONG)

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each probe."""
        return {probe.probe: probe.verdict.value for probe in self.probes}


def schema() -> dict[str, Any]:
    """The JSON Schema of a verification; published as ``docs/server-verification.schema.json``."""
    from pydantic import TypeAdapter

    form = TypeAdapter(ServerVerification).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": FORMAT, **form}


def judged(ok: bool, saw: str) -> ProbeJudgement:
    """``ok`` or ``wrong``."""
    return ProbeJudgement(ProbeVerdict.OK if ok else ProbeVerdict.WRONG, saw)


def unknown(reason: str) -> ProbeJudgement:
    """``cannot be judged``."""
    return ProbeJudgement(ProbeVerdict.UNKNOWN, reason)


def answered(recorded: Recorded, prefix: str = "") -> dict[str, RecordedAnswer]:
    """The answers to the requests whose labels start with ``prefix``.

    Raises:
        CannotBeJudged: a request failed, none has such a label, or the text of all answers is missing.
    """
    selected = {label: exchange.answer for label, exchange in recorded.items() if label.startswith(prefix)}
    if not selected:
        raise CannotBeJudged(f"no request {prefix!r} was sent")
    for label, answer in selected.items():
        if answer.error:
            raise CannotBeJudged(f"the request {label!r} failed: {answer.error[:200]}")
    if all(answer.completion_tokens and answer.finish_reason == "length" and not answer.said for answer in selected.values()):
        raise CannotBeJudged(
            f"{len(selected)} answers have tokens, but no text: thoughts that the server does not send, or lost text"
        )
    return selected
