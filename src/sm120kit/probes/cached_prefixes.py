"""A long prompt cold, again from the prefix cache, with one more turn, and with another beginning."""

from collections.abc import Iterator
from typing import Any

from sm120kit.probes.probe_prompts import inventory
from sm120kit.probes.probe_records import ProbeJudgement, ProbeVerdict, Recorded, answered, judged
from sm120kit.probes.probe_session import SENTENCE_TOKENS, Ask, ProbeSession, ServerProbe
from sm120kit.probes.same_distributions import agreement, difference, problem

TOKENS = 8
QUESTIONS = tuple(f"How many kilograms does the {which} thing in the list weigh?" for which in ("first", "second", "last"))
PAIRS = {
    "again": ("cold", "the same prompt again"),
    "turn": ("turn cold", "the prompt with one more turn"),
    "turn again": ("turn", "the prompt with one more turn, again"),
    "other": ("other cold", "a prompt whose first half has another order"),
}


def ask(session: ProbeSession) -> None:
    """Every prompt with three questions with a filled cache, and where the engine can, with an empty one."""
    lines = inventory(max(16, session.long_tokens // SENTENCE_TOKENS // 2), f"{session.seed}/cache")
    half = len(lines) // 2
    prompt, other = ("\n".join((*head, *lines[half:])) for head in (lines[:half], lines[half - 1 :: -1]))
    turns = [_user(prompt), {"role": "assistant", "content": "I have read the list."}]
    asked = {"cold": [_user(prompt)], "again": [_user(prompt)], "turn": turns, "turn again": turns, "other": [_user(other)]}
    for label, messages in asked.items():
        session.send(_asks(session, label, messages, session.cold("shared")))
    if session.salts_cache:
        session.send(_asks(session, "turn cold", turns, session.cold("turn")))
        session.send(_asks(session, "other cold", asked["other"], session.cold("other")))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _asks(session: ProbeSession, label: str, messages: list[dict[str, Any]], salt: dict[str, str]) -> Iterator[Ask]:
    for number, question in enumerate(QUESTIONS):
        yield session.talk(f"{label}/{number}", [*messages, _user(question)], TOKENS, **salt)


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare what came from the cache with what did not."""
    answers = answered(recorded)
    differences = []
    for label, (expected, words) in PAIRS.items():
        numbers = [number for number in range(len(QUESTIONS)) if {f"{label}/{number}", f"{expected}/{number}"} <= {*answers}]
        found = [difference(answers[f"{expected}/{number}"], answers[f"{label}/{number}"]) for number in numbers]
        if reason := problem(found):
            return judged(False, f"{words}: {reason}")
        differences += found
    cached = max((answer.cached_tokens or 0 for answer in answers.values()), default=0)
    seen = f"{cached:,} tokens were cached" if cached else "the server does not report cached tokens"
    blind = "" if "other cold/0" in answers else "; without cache_salt no prompt is known to be cold but the first"
    return ProbeJudgement(ProbeVerdict.OK, f"{agreement(differences)}; {seen}{blind}")


CACHED_PREFIXES = ServerProbe(
    "cached prefixes",
    ask,
    judge,
    "a block that is reused only under memory pressure; of engines other than vLLM and SGLang, a block of another prompt",
)
