"""Log-probabilities that contradict each other: positive, with a sum above 1, or of a token that is not the most likely one."""

import math
from collections.abc import Iterator

from sm120kit.probes.probe_prompts import PASSAGE, QUESTIONS
from sm120kit.probes.probe_records import AnsweredToken, CannotBeJudged, ProbeJudgement, Recorded, answered, judged
from sm120kit.probes.probe_session import LONG, TOP, ProbeSession, ServerProbe
from sm120kit.probes.same_distributions import TIE_NATS

ROUNDING = 0.01
"""Log-probabilities of BF16 logits are off by less (8 bits)."""


def ask(session: ProbeSession) -> None:
    """Two chats and a text, with the most likely tokens at each position."""
    session.send(session.chat(f"chat/{number}", question, LONG) for number, question in enumerate(QUESTIONS[:2]))
    session.send([session.text("text", PASSAGE[:300], LONG)])


def judge(recorded: Recorded) -> ProbeJudgement:
    """Check every position."""
    answers = {label: exchange.answer for label, exchange in recorded.items() if not exchange.answer.error}
    tokens = [token for answer in answers.values() for token in answer.tokens if token.top]
    if not tokens:
        answered(recorded)
        raise CannotBeJudged("the server does not list log-probabilities")
    for label, answer in answers.items():
        for number, token in enumerate(answer.tokens):
            for problem in _problems(token):
                return judged(False, f"token {number} of {label}: {problem}")
    return judged(True, f"{len(tokens)} positions: none above 0, no sum above 1, each token the most likely one")


def _problems(token: AnsweredToken) -> Iterator[str]:
    if not token.top:
        return
    values = [value for _, value in token.top]
    if max(token.logprob, *values) > ROUNDING:
        yield f"a log-probability is {max(token.logprob, *values):.3g}, above 0"
    if (total := math.fsum(math.exp(min(value, 1)) for value in values)) > 1 + ROUNDING * TOP:
        yield f"the listed probabilities add up to {total:.3g}"
    if token.logprob < max(values) - TIE_NATS:
        yield f"{token.text!r} was chosen at temperature 0, another token is {max(values) - token.logprob:.2g} nats more likely"
    if token.text not in dict(token.top) and token.logprob > max(values) + ROUNDING:
        yield f"the chosen token {token.text!r} is more likely than all listed ones, and not listed"


LOG_PROBABILITIES = ServerProbe(
    "log-probabilities",
    ask,
    judge,
    "numbers that are wrong and consistent; a token that is chosen wrongly where two differ by less than half a nat",
)
