"""Compare two greedy answers to the same request, with a tolerance for rounding.

A server rounds differently in another batch, so two tokens that are about equally likely may change places. The distributions
before the tokens hardly change: their divergence is compared, at each position up to the first at which the tokens differ.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from sm120kit.kld.divergence import TopLogProbabilities, divergences
from sm120kit.probes.probe_records import AnsweredToken, CannotBeJudged, RecordedAnswer
from sm120kit.probes.recorded_answer import REPLACEMENT

MEAN_NATS = 0.05
"""A server's mean divergence from itself. Good quantization changes the weights and stays below it (docs/verify-server.md)."""
FAR_NATS, MOST_FAR = 0.25, 1
"""A divergence that rounding causes at this many positions at most: where two experts are about equally likely."""
MOST_FAR_IN_BATCHES = 2
"""The same of answers in batches of nine (measured: two of 61 to 151 positions in 4 of 64 runs of BF16 mixtures of 8
experts with random weights)."""
FARTHEST_NATS = 2.0
"""More than rounding was seen to cause at any place (1.6 nats, of the same kind of model on a GPU)."""
QUIET_NATS = 1e-7
"""Mean divergence below which rounding is that of float32 on a CPU, which exchanges no experts."""
TIE_NATS = 0.5
"""Difference of the log-probabilities of two tokens of which either may be chosen."""
FEWEST = 8
"""Positions from which a mean is taken."""


@dataclass(frozen=True)
class Difference:
    """Divergences of two answers at the positions with a common prefix, in nats, and whether the tokens differ anywhere.

    ``preferred`` is by how much an answer prefers another token to the one that it chose where they differ. With ``only_text``
    the tokens are the same, but not the texts.
    """

    nats: tuple[float, ...]
    differs: bool
    preferred: float = 0.0
    only_text: bool = False


def difference(one: RecordedAnswer, other: RecordedAnswer) -> Difference:
    """How two greedy answers differ.

    Raises:
        CannotBeJudged: the texts differ, and the server does not list log-probabilities.
    """
    if not (one.tokens and other.tokens and one.tokens[0].top and other.tokens[0].top):
        if _letters(one) == _letters(other):
            return Difference((), False)
        raise CannotBeJudged("answers differ, and without log-probabilities a tie of two tokens cannot be excluded")
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    common = next((number for number, (a, b) in enumerate(pairs) if a.text != b.text), len(pairs))
    compared = pairs[: common + 1]
    nats = token_divergences(compared)
    if common == len(pairs):
        return Difference(nats, False, only_text=_letters(one) != _letters(other))
    return Difference(nats, True, max(map(_preferred, pairs[common])))


def _letters(answer: RecordedAnswer) -> str:
    """The text without what a stream may leave out: blanks between reasoning and answer, half of the last character."""
    return "".join(answer.text.split()).rstrip(REPLACEMENT)


def token_divergences(pairs: Iterable[tuple[AnsweredToken, AnsweredToken]]) -> tuple[float, ...]:
    """The divergence between the distributions before the tokens of each pair; about a lower bound, from the listed tokens.

    A token that only one lists is at most as likely in the other as the last one listed there; as near as that, it is compared.
    """
    nats: list[float] = []
    for one, other in pairs:
        first, second = (dict(_listed(token)) for token in (one, other))
        ids = {name: number for number, name in enumerate(first | second)}
        lists = [
            {number: own.get(name, min(*own.values(), theirs.get(name, 0.0))) for name, number in ids.items()}
            for own, theirs in ((first, second), (second, first))
        ]
        nats += divergences(TopLogProbabilities([lists[0]]), TopLogProbabilities([lists[1]])).nats
    return tuple(nats)


def _listed(token: AnsweredToken) -> tuple[tuple[str, float], ...]:
    return token.top if any(name == token.text for name, _ in token.top) else (*token.top, (token.text, token.logprob))


def _preferred(token: AnsweredToken) -> float:
    return max((value for _, value in token.top), default=token.logprob) - token.logprob


def too_far(nats: Sequence[float], most: int = MOST_FAR) -> str:
    """Why divergences are more than rounding; "" if they are not. The ``most`` largest are left out of the mean."""
    if reason := farther(nats, FAR_NATS, most):
        return reason
    if len(nats) >= FEWEST and (mean := fmean(sorted(nats)[:-most])) > MEAN_NATS:
        return f"the distributions differ by {mean:.2g} nats on average without the largest, more than {MEAN_NATS:g}"
    return ""


def farther(nats: Sequence[float], limit: float, most: int = MOST_FAR) -> str:
    """The positions at which distributions differ by more than ``limit``; "" if rounding may cause as many."""
    far = sum(value > limit for value in nats)
    return f"the distributions before {far} of {len(nats)} tokens differ by more than {limit:g} nats" if far > most else ""


def problem(differences: Iterable[Difference], most: int = MOST_FAR) -> str:
    """Why answers are not the same within rounding; "" if they are. ``most`` positions may be far."""
    differences = list(differences)
    if reason := too_far([value for each in differences for value in each.nats], most):
        return reason
    if (worst := max((each.preferred for each in differences), default=0.0)) > TIE_NATS:
        return f"a token was chosen to which another is preferred by {worst:.2g} nats, more than {TIE_NATS:g}"
    if any(each.only_text for each in differences):
        return "the tokens are the same, the texts are not"
    return ""


def agreement(differences: Iterable[Difference]) -> str:
    """What the comparison of answers that are the same saw."""
    differences = list(differences)
    nats = [value for each in differences for value in each.nats]
    changed = sum(each.differs for each in differences)
    measured = f", distributions within {max(nats):.2g} nats (mean {fmean(nats):.2g})" if nats else ", text only"
    return f"{len(differences)} answers compared, {changed} with another token where two are about equally likely{measured}"
