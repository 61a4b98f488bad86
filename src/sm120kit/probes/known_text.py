"""How likely a plain English text is to the model: alone, with its words out of order, and far from the beginning."""

import random
from statistics import fmean

from sm120kit.core.errors import Sm120kitError
from sm120kit.kld.divergence import TopLogProbabilities
from sm120kit.probes.probe_prompts import PASSAGE, inventory
from sm120kit.probes.probe_records import (
    AnsweredToken,
    CannotBeJudged,
    ProbeExchange,
    ProbeJudgement,
    Recorded,
    RecordedAnswer,
    answered,
    judged,
)
from sm120kit.probes.probe_session import SENTENCE_TOKENS, TEXT, TOKENIZE, ProbeSession, ServerProbe

LISTED = 20
"""Most likely tokens that are requested; vLLM's default limit."""
BOUND = 5.5
"""Nats per token. A guess among 50,000 tokens has 10.8, a model of 135 M parameters 3.5 (docs/verify-server.md)."""
ORDER = 0.5
"""Nats per token by which order must make the text more likely."""
FAR = 1.0
"""Nats per token by which an unrelated text before it may make it less likely."""


def ask(session: ProbeSession) -> None:
    """The distributions after each token of the text, and of its words in another order."""
    shuffled = random.Random(0).sample(PASSAGE.split(), len(PASSAGE.split()))
    before = "\n".join(inventory(session.long_tokens // SENTENCE_TOKENS, session.seed))
    if TEXT in session.silent:
        raise CannotBeJudged(session.silent[TEXT])
    for label, text in (("text", PASSAGE), ("shuffled", " ".join(shuffled)), ("far", f"{before}\n{PASSAGE}")):
        ids = session.token_ids(text)
        if ids is None:
            raise CannotBeJudged(session.silent.get(TOKENIZE, "the server has no /tokenize"))
        session.exchanges.append(ProbeExchange(label, "prompt", {"prompt": text}, scored := _scored(session, ids)))
        if scored.error:
            return


def _scored(session: ProbeSession, ids: tuple[int, ...]) -> RecordedAnswer:
    """The tokens after the first with their log-probability, or that of the last listed one: at least as likely."""
    try:
        (window,) = session.served(LISTED).windows([ids])
    except Sm120kitError as error:
        return RecordedAnswer(error=error.message[:1000])
    assert isinstance(window, TopLogProbabilities)
    tokens = [
        AnsweredToken(str(token), listed.get(token, min(listed.values())))
        for token, listed in zip(ids[1:], window.positions, strict=True)
    ]
    return RecordedAnswer(tokens=tuple(tokens), prompt_tokens=len(ids))


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare the first with a bound, and the others with it."""
    scored = {name: [token.logprob for token in answer.tokens] for name, answer in answered(recorded).items()}
    size = len(scored["text"])
    text, shuffled, far = (-fmean(scored[name][-size:]) for name in ("text", "shuffled", "far"))
    position = len(scored["far"]) - size
    seen = (
        f"{text:.2f} nats per token of an English text, {shuffled:.2f} without order, {far:.2f} after {position:,} other tokens"
    )
    return judged(text <= BOUND and shuffled - text >= ORDER and far - text <= FAR, seen)


KNOWN_TEXT = ServerProbe(
    "known text",
    ask,
    judge,
    "a loss of quality as by quantization, which `sm120kit kld` measures; servers without log-probabilities of prompts",
)
