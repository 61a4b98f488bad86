"""Codes at several depths of a long prompt: whether they are recalled, and whether they have any influence.

A code is recalled only by a model that can: a short prompt shows this first. That another code changes the distribution of the
answer needs no such model: what was lost from the prompt changes nothing.
"""

import re
from collections.abc import Mapping
from statistics import median

from sm120kit.probes.probe_prompts import COLOURS, codes, inventory, needle
from sm120kit.probes.probe_records import ProbeExchange, ProbeJudgement, Recorded, RecordedAnswer, answered, judged, unknown
from sm120kit.probes.probe_session import SENTENCE_TOKENS, Ask, ProbeSession, ServerProbe
from sm120kit.probes.same_distributions import token_divergences

TOKENS = 12
NO_INFLUENCE, INFLUENCE = 1e-5, 0.05
"""Divergence in nats that another code causes where it is lost, and at least where it is not."""


def ask(session: ProbeSession) -> None:
    """Ask for each code in a short prompt, in the long one, and in the long one with another code."""
    sentences = max(2 * len(COLOURS), session.long_tokens // SENTENCE_TOKENS)
    known, other = codes(session.seed), codes(f"{session.seed}/other")
    rest = inventory(sentences, f"{session.seed}/needles")
    session.send([_ask(session, f"short/{colour}", known, rest[:2], colour) for colour in COLOURS[:3]])
    session.send([_ask(session, f"long/{colour}", known, rest, colour) for colour in COLOURS])
    session.send([_ask(session, "repeated/0", known, rest, COLOURS[0])])
    for colour in COLOURS:
        session.send([_ask(session, f"changed/{colour}", {**known, colour: other[colour]}, rest, colour)])


def _ask(session: ProbeSession, label: str, code: Mapping[str, int], rest: list[str], colour: str) -> Ask:
    """The question for a code, after sentences with all codes at equal distances."""
    lines: list[str] = []
    for number, each in enumerate(COLOURS):
        first, end = (len(rest) * part // len(COLOURS) for part in (number, number + 1))
        lines += [*rest[first : (first + end) // 2], needle(each, code[each]), *rest[(first + end) // 2 : end]]
    question = f"What is the secret code of the {colour} box? RecordedAnswer with the number only."
    return session.chat(label, "\n".join((*lines, question)), TOKENS)


def judge(recorded: Recorded) -> ProbeJudgement:
    """Recall, of a model that can, and influence at each depth."""
    influence = _influence(recorded)
    lost = [_depth(colour) for colour, nats in influence.items() if nats <= NO_INFLUENCE]
    if len(lost) > 1 and max(influence.values()) >= INFLUENCE:
        return judged(False, f"what the prompt has at {', '.join(lost)} of its length does not influence the answer")
    short, long = (answered(recorded, prefix) for prefix in ("short/", "long/"))
    missed = [_depth(label.partition("/")[2]) for label in long if not _recalls(recorded[label])]
    size = max(answer.prompt_tokens or 0 for answer in long.values())
    where = f"in a prompt of {size:,} tokens, " if size else ""
    changed = f"another code changes the answer by {median(influence.values()):.2g} nats" if influence else ""
    if not all(_recalls(recorded[label]) for label in short):
        if max(influence.values(), default=0.0) < INFLUENCE:
            return unknown("the model does not recall a code from a short prompt, and another code hardly changes its answer")
        return judged(True, f"{where}{changed}, at each depth; the model recalls no code, not from a short prompt either")
    if len(missed) > len(long) // 2:
        return judged(
            False, f"{where}the codes at {', '.join(missed)} of its length are not recalled; from a short one they are"
        )
    return judged(
        True, "; ".join(filter(None, (f"{where}{len(long) - len(missed)} of {len(long)} codes are recalled", changed)))
    )


def _depth(colour: str) -> str:
    return f"{(2 * COLOURS.index(colour) + 1) / (2 * len(COLOURS)):.0%}"


def _influence(recorded: Recorded) -> dict[str, float]:
    """The divergence that another code causes, by colour; empty without log-probabilities, or if repeating has one, too."""
    long, changed = (answered(recorded, prefix) for prefix in ("long/", "changed/"))
    noise = _furthest(long[f"long/{COLOURS[0]}"], answered(recorded, "repeated/")["repeated/0"])
    if noise is None or noise > NO_INFLUENCE:
        return {}
    pairs = {label.partition("/")[2]: answer for label, answer in changed.items()}
    nats = {colour: _furthest(long[f"long/{colour}"], answer) for colour, answer in pairs.items()}
    return {colour: value for colour, value in nats.items() if value is not None}


def _furthest(one: RecordedAnswer, other: RecordedAnswer) -> float | None:
    """The largest divergence at the tokens with a common prefix; None without log-probabilities."""
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    common = next((number for number, (a, b) in enumerate(pairs) if a.text != b.text), len(pairs))
    return max(token_divergences(pair for pair in pairs[: common + 1] if pair[0].top and pair[1].top), default=None)


def _recalls(exchange: ProbeExchange) -> bool:
    """Whether an answer has the code of its box, as the prompt states it."""
    colour = exchange.label.partition("/")[2]
    code = re.search(rf"code of the {colour} box is (\d+)", str(exchange.body["messages"]))
    return bool(code and code[1] in exchange.answer.text)


NEEDLES = ServerProbe(
    "needles",
    ask,
    judge,
    "what is lost beyond the length that was asked, or at one depth only; recall by a model that recalls nothing",
)
