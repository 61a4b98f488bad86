"""The same greedy request alone, again, as a stream, among others, and after a long one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sm120kit.probes.probe_prompts import QUESTIONS, inventory, words
from sm120kit.probes.probe_records import ProbeJudgement, Recorded, answered, judged
from sm120kit.probes.probe_session import Ask, ProbeSession, ServerProbe
from sm120kit.probes.same_distributions import agreement, difference, problem

WAYS = {
    "again": "again",
    "stream": "as a stream",
    "among": "among eight others",
    "last": "after eight others at once",
    "after": "after a long request",
}
TOGETHER = 9


def ask(session: ProbeSession) -> None:
    """All questions in each way."""
    ask_some(session, len(QUESTIONS))


def ask_some(session: ProbeSession, count: int) -> None:
    """``count`` of the questions in each way."""
    for way in ("alone", "again", "stream"):
        session.send(_questions(session, way, count))
    crowd = [
        session.chat(f"other/{number}", " ".join(words(12 * number**2 + 3, f"{session.seed}/{number}")))
        for number in range(TOGETHER - count)
    ]
    session.send([*_questions(session, "among", count), *crowd], together=True)
    session.send([*crowd, *_questions(session, "last", count)], together=True)
    session.send([session.chat("long", " ".join(inventory(24, session.seed)), 2)])
    session.send(_questions(session, "after", count))


def _questions(session: ProbeSession, way: str, count: int) -> Iterator[Ask]:
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if way == "stream" else {}
    for number, question in enumerate(QUESTIONS[:count]):
        yield session.chat(f"{way}/{number}", question, **streamed)


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare each way with the answers of the first time."""
    alone = answered(recorded, "alone/")
    differences = []
    for way, words_of_way in WAYS.items():
        pairs = zip(alone.values(), answered(recorded, f"{way}/").values(), strict=False)
        of_way = [difference(first, second) for first, second in pairs]
        if found := problem(of_way):
            return judged(False, f"the same request {words_of_way}: {found}")
        differences += of_way
    return judged(True, agreement(differences))


def ask_quickly(session: ProbeSession) -> None:
    """Two questions in each way."""
    ask_some(session, 2)


REPEATED_REQUESTS = ServerProbe(
    "repeated requests", ask, judge, "a fault that is the same every time, or in batches of more than nine requests"
)
QUICK_REPEATED_REQUESTS = replace(REPEATED_REQUESTS, ask=ask_quickly)
