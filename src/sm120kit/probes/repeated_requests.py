"""The same greedy request alone, again, as a stream, among others, and after a long one."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from sm120kit.probes.probe_prompts import QUESTIONS, inventory, words
from sm120kit.probes.probe_records import ProbeJudgement, Recorded, answered, judged
from sm120kit.probes.probe_session import Ask, ProbeSession, ServerProbe
from sm120kit.probes.same_distributions import (
    FAR_NATS,
    FARTHEST_NATS,
    MOST_FAR,
    MOST_FAR_IN_BATCHES,
    QUIET_NATS,
    Difference,
    agreement,
    difference,
    farther,
    problem,
)

CROWD = ("crowd-among", "crowd-last")
"""The other requests of a batch: a fault may be in one of its rows alone, the first as a rule."""
IN_BATCHES = ("among", "last", *CROWD)
WAYS = {
    "again": "again",
    "stream": "as a stream",
    "among": "among eight others",
    "last": "after eight others at once",
    "after": "after a long request",
    **dict.fromkeys(CROWD, "among eight others"),
}
TOGETHER = 9


def ask(session: ProbeSession) -> None:
    """All questions in each way, and the others of their batches alone."""
    ask_some(session, len(QUESTIONS))
    session.send(_crowd(session, "crowd-alone", TOGETHER - len(QUESTIONS)))


def ask_some(session: ProbeSession, count: int) -> None:
    """``count`` of the questions in each way."""
    for way in ("alone", "again", "stream"):
        session.send(_questions(session, way, count))
    others = TOGETHER - count
    session.send([*_questions(session, "among", count), *_crowd(session, "crowd-among", others)], together=True)
    session.send([*_crowd(session, "crowd-last", others), *_questions(session, "last", count)], together=True)
    session.send([session.chat("long", " ".join(inventory(24, session.seed)), 2)])
    session.send(_questions(session, "after", count))


def _crowd(session: ProbeSession, way: str, count: int) -> list[Ask]:
    lengths = (12 * number**2 + 3 for number in range(count))
    texts = [" ".join(words(length, f"{session.seed}/{number}")) for number, length in enumerate(lengths)]
    return [session.chat(f"{way}/{number}", text) for number, text in enumerate(texts)]


def _questions(session: ProbeSession, way: str, count: int) -> Iterator[Ask]:
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if way == "stream" else {}
    for number, question in enumerate(QUESTIONS[:count]):
        yield session.chat(f"{way}/{number}", question, **streamed)


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare each way with the answers of the first time, and those of a crowd with its answers alone if there are any."""
    differences: list[Difference] = []
    for way, said in WAYS.items():
        first = "crowd-alone/" if way in CROWD else "alone/"
        if way in CROWD and not any(label.startswith(first) for label in recorded):
            continue
        pairs = zip(answered(recorded, first).values(), answered(recorded, f"{way}/").values(), strict=False)
        of_way = [difference(one, other) for one, other in pairs]
        if found := problem(of_way, MOST_FAR_IN_BATCHES if way in IN_BATCHES else MOST_FAR):
            return judged(False, f"the same request {said}: {found}")
        differences += of_way
    nats = [value for each in differences for value in each.nats]
    quiet = fmean([0.0, *(value for value in nats if value <= FAR_NATS)]) < QUIET_NATS
    found = farther(nats, FAR_NATS if quiet else FARTHEST_NATS)
    return judged(False, f"the same requests in all ways: {found}") if found else judged(True, agreement(differences))


def ask_quickly(session: ProbeSession) -> None:
    """Two questions in each way."""
    ask_some(session, 2)


REPEATED_REQUESTS = ServerProbe(
    "repeated requests", ask, judge, "a fault that is the same every time, or in batches of more than nine requests"
)
QUICK_REPEATED_REQUESTS = replace(REPEATED_REQUESTS, ask=ask_quickly)
