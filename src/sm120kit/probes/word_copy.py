"""Words in a row to be repeated: a short row shows whether the model can, a long one whether the server can."""

from difflib import SequenceMatcher

from sm120kit.probes.probe_prompts import words
from sm120kit.probes.probe_records import ProbeExchange, ProbeJudgement, Recorded, answered, judged, unknown
from sm120kit.probes.probe_session import ProbeSession, ServerProbe

SHORT_WORDS, LONG_WORDS = 6, 36
LEAST = 0.5
REQUEST = "Repeat exactly, without any other word:"


def ask(session: ProbeSession) -> None:
    """Three short rows, and two long ones."""
    for name, count, rows in (("short", SHORT_WORDS, 3), ("long", LONG_WORDS, 2)):
        session.send(
            session.chat(
                f"{name}/{row}", f"{REQUEST} {' '.join(words(count, f'{session.seed}/{name}/{row}'))}", 3 * count, listed=False
            )
            for row in range(rows)
        )


def judge(recorded: Recorded) -> ProbeJudgement:
    """The share of the words that come back in their order."""
    answered(recorded)
    short, long = (
        [_copied(exchange) for label, exchange in recorded.items() if label.startswith(name)] for name in ("short", "long")
    )
    if min(short) < 1:
        return unknown(f"the model does not repeat {SHORT_WORDS} words; it repeats {min(short):.0%} of them")
    seen = f"{min(short):.0%} of {SHORT_WORDS} words and {min(long):.0%} of {LONG_WORDS} are repeated"
    return judged(min(long) >= LEAST, seen)


def _copied(exchange: ProbeExchange) -> float:
    asked = exchange.body["messages"][0]["content"].removeprefix(REQUEST).split()
    given = [word.strip(".,:;!?\"'*").lower() for word in exchange.answer.content.split()]
    blocks = SequenceMatcher(None, asked, given, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(asked)


WORD_COPY = ServerProbe(
    "copied words", ask, judge, "anything of a model that cannot repeat a row of words, or thinks before it answers"
)
