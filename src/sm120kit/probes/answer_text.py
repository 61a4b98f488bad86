"""What any answer must be: valid characters, no single piece repeated, in the script and language of the question."""

import re
import unicodedata
from collections.abc import Iterator

from sm120kit.probes.probe_prompts import ODD_CHARACTERS, QUESTIONS
from sm120kit.probes.probe_records import ProbeJudgement, Recorded, RecordedAnswer, answered, judged
from sm120kit.probes.probe_session import ProbeSession, ServerProbe
from sm120kit.probes.recorded_answer import REPLACEMENT

TOKENS = 48
FOREIGN = 0.2
"""Share of letters of another script than Latin in an answer to an English question."""
LEAST_COMMON = 0.1
"""Least share of the commonest words; English prose has 0.4 to 0.5."""
FEWEST_WORDS = 40
COMMON = frozenset(
    re.findall(
        r"\w+",
        "the of and a to in is it that for on as with are by from this be or an at have you can its which has they into when "
        "so not but if we more one other their also all these then how what your them there some will make made",
    )
)
MARKERS = re.compile(r"<\|[a-zA-Z_]{2,30}\|>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>")
UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2060\ufeff]")
"""Characters without a width, and control characters."""
UNIT, REPEATS = 8, 6
"""Longest piece in characters, and how often in a row it makes up all of an answer, that is no answer."""


def ask(session: ProbeSession) -> None:
    """All questions, and characters of several bytes, as a stream and at once."""
    tokens = TOKENS if session.tokens_per_second > TOKENS else TOKENS // 2
    session.send(session.chat(f"question/{number}", question, tokens) for number, question in enumerate(QUESTIONS))
    request = f"Repeat exactly: {ODD_CHARACTERS}"
    session.send(
        [session.chat("characters/whole", request, TOKENS), session.chat("characters/stream", request, TOKENS, stream=True)]
    )


def judge(recorded: Recorded) -> ProbeJudgement:
    """Check every answer, and the words of all."""
    answers = answered(recorded)
    for label, answer in answers.items():
        for problem in _problems(answer):
            return judged(False, f"{label}: {problem}")
    prose = list(answered(recorded, "question/").values())
    foreign = sum(_foreign(answer.text) > FOREIGN for answer in prose)
    loops = sum(_is_loop(answer.text) for answer in prose)
    unseen = [found[0] for answer in prose if (found := UNSEEN.search(answer.text))]
    if 2 * len(unseen) >= max(4, len(prose)):
        return judged(False, f"{len(unseen)} of {len(prose)} answers have characters that nobody sees, such as {unseen[0]!r}")
    if 2 * foreign >= len(prose) or 2 * loops >= len(prose):
        return judged(False, f"{foreign} of {len(prose)} answers are in another script, {loops} are one piece in a row")
    words = re.findall(r"[a-z]+", " ".join(answer.text for answer in prose).lower())
    share = sum(word in COMMON for word in words) / max(1, len(words))
    if len(words) >= FEWEST_WORDS and share < LEAST_COMMON:
        return judged(False, f"of {len(words)} words of answers to English questions {share:.0%} are common ones")
    if not any(answer.text.strip() for answer in prose):
        return judged(False, "all answers are empty")
    return judged(
        True, f"{len(answers)} answers, {len(words)} words, {share:.0%} of them common ones; {foreign} in another script"
    )


def _problems(answer: RecordedAnswer) -> Iterator[str]:
    whole = answer.finish_reason not in (None, "length")
    text = answer.text if whole else answer.text.rstrip(REPLACEMENT)
    if REPLACEMENT in text:
        yield f"{REPLACEMENT!r} stands for bytes that are not UTF-8"
    if marker := MARKERS.search(answer.content):
        yield f"the marker {marker[0]!r} of a chat template is in the text: another template, or a wrong stop token"
    if whole and answer.content.count("<think>") > answer.content.count("</think>"):
        yield "<think> is not closed"


def _foreign(text: str) -> float:
    letters = [character for character in text if character.isalpha()]
    return sum(not unicodedata.name(each, "").startswith("LATIN") for each in letters) / max(1, len(letters))


def _is_loop(text: str) -> bool:
    """Whether all of a text but its first characters is one piece in a row."""
    text = text.strip()
    return bool(re.search(rf"^.{{0,12}}?(.{{1,{UNIT}}}?)\1{{{REPEATS - 1},}}.{{0,{UNIT}}}$", text, re.DOTALL))


ANSWER_TEXT = ServerProbe(
    "text", ask, judge, "wrong statements in good prose; garbled text that has the common words of a language"
)
