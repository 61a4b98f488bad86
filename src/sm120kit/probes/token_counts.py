"""Counts of tokens against the server's tokenizer, the tokens that it lists, and each other; the chat template by them."""

from collections.abc import Iterator
from typing import Any

from sm120kit.probes.probe_prompts import PASSAGE, QUESTIONS
from sm120kit.probes.probe_records import (
    AnsweredToken,
    ProbeExchange,
    ProbeJudgement,
    Recorded,
    RecordedAnswer,
    answered,
    judged,
    unknown,
)
from sm120kit.probes.probe_session import SHORT, ProbeSession, ServerProbe

SPECIAL = 2
"""Tokens that a server may add to a text or an answer: its beginning and its end."""
TEMPLATE = 3
"""Least tokens that a template adds to a message: its role and its ends."""


def ask(session: ProbeSession) -> None:
    """A text, the same in a chat, a chat of three messages, and an answer as a stream and at once."""
    if ids := session.token_ids(PASSAGE):
        tokens = tuple(AnsweredToken(str(number), 0.0) for number in ids)
        session.exchanges.append(ProbeExchange("tokenized", "/tokenize", {"prompt": PASSAGE}, RecordedAnswer(tokens=tokens)))
    session.send([session.text("text", PASSAGE, SHORT), session.text("text again", PASSAGE, SHORT)])
    session.send([session.chat("chat", PASSAGE, 1)])
    turns = [{"role": role, "content": PASSAGE} for role in ("user", "assistant", "user")]
    session.send([session.talk("three messages", turns, 1)])
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    session.send([session.chat("whole", QUESTIONS[0], SHORT), session.chat("stream", QUESTIONS[0], SHORT, **streamed)])


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare the counts."""
    answers = {label: exchange.answer for label, exchange in recorded.items() if not exchange.answer.error}
    if not any(answer.prompt_tokens for answer in answers.values()):
        answered(recorded)
        return unknown("the server does not count tokens")
    for problem in (*_answer_problems(answers), *_prompt_problems(answers)):
        return judged(False, problem)
    text = answers.get("text", RecordedAnswer()).prompt_tokens
    how = "as its tokenizer does" if "tokenized" in answers and text else "consistently; it has no /tokenize to compare with"
    return judged(True, f"the server counts {'the text' if text is None else f'{text} tokens of a text'} {how}")


def _answer_problems(answers: dict[str, RecordedAnswer]) -> Iterator[str]:
    for label, answer in answers.items():
        count, listed = answer.completion_tokens, len(answer.tokens)
        if label != "tokenized" and count is not None and listed and abs(count - listed) > SPECIAL:
            yield f"{label}: {count} tokens are counted, {listed} are listed"
        if (answer.cached_tokens or 0) > (answer.prompt_tokens or 1 << 30):
            yield f"{label}: {answer.cached_tokens} of {answer.prompt_tokens} tokens of the prompt are cached"
    for one, other in (("text", "text again"), ("whole", "stream")):
        counts = [(each.prompt_tokens, each.completion_tokens) for each in map(answers.get, (one, other)) if each]
        if len(counts) == 2 and any(a and b and abs(a - b) > SPECIAL for a, b in zip(*counts, strict=True)):
            yield f"the same request has other counts of tokens: {counts[0]} for {one!r}, {counts[1]} for {other!r}"


def _prompt_problems(answers: dict[str, RecordedAnswer]) -> Iterator[str]:
    text, chat, three = (answers.get(label, RecordedAnswer()).prompt_tokens for label in ("text", "chat", "three messages"))
    known = len(answers["tokenized"].tokens) if "tokenized" in answers else None
    if known and text and not 0 <= text - known <= SPECIAL:
        yield f"{text} tokens are counted for a text that the server's tokenizer reads as {known}"
    if text and chat and chat < text + TEMPLATE:
        yield f"a message in a chat has {chat} tokens, its text alone {text}: the chat template is missing"
    if text and three and three < 3 * (text - SPECIAL):
        yield f"a chat of three messages of {text} tokens has {three}: the template leaves messages out"


TOKEN_COUNTS = ServerProbe(
    "counts of tokens",
    ask,
    judge,
    "a template with the wrong markers; of servers without /tokenize, counts that are wrong by the same factor",
)
