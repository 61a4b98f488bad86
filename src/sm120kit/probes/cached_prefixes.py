"""A long prompt cold, again from the prefix cache, with one more turn, and with another beginning."""

from __future__ import annotations

from typing import Any

from sm120kit.probes.probe import ServerProbe
from sm120kit.probes.probe_prompts import inventory
from sm120kit.probes.probe_records import ProbeJudgement, ProbeVerdict, Recorded, answered, judged
from sm120kit.probes.probe_session import SENTENCE_TOKENS, Ask, ProbeSession
from sm120kit.probes.same_distributions import agreement, difference, problem

TOKENS = 8
QUESTION = "How many kilograms does the first thing in the list weigh? RecordedAnswer with the number only."
PAIRS = {
    "again": ("cold", "the same prompt again"),
    "turn": ("turn cold", "the prompt with one more turn"),
    "turn again": ("turn", "the prompt with one more turn, again"),
    "other": ("other cold", "a prompt whose first half has another order"),
}


def ask(session: ProbeSession) -> None:
    """Every prompt with a filled cache, and where the engine can, with an empty one."""
    lines = inventory(max(16, session.long_tokens // SENTENCE_TOKENS // 2), f"{session.seed}/cache")
    half = len(lines) // 2
    prompt, other = ([_user("\n".join((*head, *lines[half:], QUESTION)))] for head in (lines[:half], lines[half - 1 :: -1]))
    shared = session.cold("shared")
    (cold, *_) = session.send([_ask(session, "cold", prompt, shared), _ask(session, "again", prompt, shared)])
    turns = [*prompt, {"role": "assistant", "content": cold.content or "I do not know."}, _user("And the second thing?")]
    session.send([_ask(session, "turn", turns, shared), _ask(session, "turn again", turns, shared)])
    session.send([_ask(session, "other", other, shared)])
    if session.salts_cache:
        session.send([_ask(session, "turn cold", turns, session.cold("turn"))])
        session.send([_ask(session, "other cold", other, session.cold("other"))])


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _ask(session: ProbeSession, label: str, messages: list[dict[str, Any]], salt: dict[str, str]) -> Ask:
    return session.talk(label, messages, TOKENS, **salt)


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare what came from the cache with what did not."""
    answers = answered(recorded)
    differences = []
    for label, (expected, words) in PAIRS.items():
        if expected in answers and label in answers:
            found = difference(answers[expected], answers[label])
            if reason := problem([found]):
                return judged(False, f"{words}: {reason}")
            differences.append(found)
    if (reason := problem(differences)) or not differences:
        return judged(False, reason)
    cached = max((answer.cached_tokens or 0 for answer in answers.values()), default=0)
    seen = f"{cached:,} tokens were cached" if cached else "the server does not report cached tokens"
    blind = "" if "other cold" in answers else "; without cache_salt no prompt is known to be cold but the first"
    return ProbeJudgement(ProbeVerdict.OK, f"{agreement(differences)}; {seen}{blind}")


CACHED_PREFIXES = ServerProbe(
    "cached prefixes",
    ask,
    judge,
    "a block that is reused only under memory pressure; of engines other than vLLM and SGLang, a block of another prompt",
)
