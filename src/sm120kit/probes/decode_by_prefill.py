"""A greedy answer, and each of its tokens again as the first one after the text before it.

The first token of an answer is computed by prefill, without drafts and without the states of earlier steps.
"""

from statistics import fmean

from sm120kit.probes.probe_prompts import PASSAGE, inventory, words
from sm120kit.probes.probe_records import CannotBeJudged, ProbeJudgement, Recorded, RecordedAnswer, answered, judged
from sm120kit.probes.probe_session import LONG, SENTENCE_TOKENS, Ask, ProbeSession, ServerProbe
from sm120kit.probes.recorded_answer import REPLACEMENT
from sm120kit.probes.same_distributions import FEWEST, token_divergences, too_far

CUTS, LONG_CUTS = 20, 6
"""Most tokens of an answer that are computed again, after a short text and after a long one."""
TOGETHER = 4
"""Requests at once."""


def ask(session: ProbeSession) -> None:
    """Continue three texts, then each text with the first tokens of its continuation."""
    list_of_words = " ".join(words(20, "list"))
    long = "\n".join(inventory(session.long_tokens // SENTENCE_TOKENS // 2, f"{session.seed}/decode"))
    texts = {"story": PASSAGE[:400], "words": f"{list_of_words}. {list_of_words}. {list_of_words[:40]}", "long": long}
    for name, prompt in texts.items():
        (whole,) = session.send([session.text(f"{name}/whole", prompt, LONG, **session.cold(name))])
        if whole.error:
            return
        cuts = _cuts(session, name, prompt, whole)
        for first in range(0, len(cuts), TOGETHER):
            session.send(cuts[first : first + TOGETHER], together=True)


def _cuts(session: ProbeSession, name: str, prompt: str, whole: RecordedAnswer) -> list[Ask]:
    texts = [token.text for token in whole.tokens]
    usable = [
        number
        for number in range(1, 1 + _read_alike(session, prompt, texts[:-1]))
        if texts[number][:1].isspace() and not any(REPLACEMENT in text or text.startswith("bytes") for text in texts[:number])
    ]
    return [
        session.text(
            f"{name}/{number}", prompt + "".join(texts[:number]), 1, **session.cold(name if name == "long" else number)
        )
        for number in usable[: LONG_CUTS if name == "long" else CUTS]
    ]


def _read_alike(session: ProbeSession, prompt: str, texts: list[str]) -> int:
    """How many of the first tokens of an answer are read again as those that were generated; all if the server does not tell.

    Each must add one token to those before it. A model may generate tokens of a text that its tokenizer divides otherwise.
    """
    read = session.token_ids(prompt)
    for number in range(len(texts)):
        before, read = read, session.token_ids(prompt + "".join(texts[: number + 1]))
        if before and read and read[:-1] != before:
            return number
    return len(texts)


def judge(recorded: Recorded) -> ProbeJudgement:
    """Compare the distributions before each token, by decoding and by prefill."""
    answers = answered(recorded)
    nats: list[float] = []
    for label, answer in answers.items():
        name, _, cut = label.partition("/")
        if cut != "whole" and _same_prefix(answers[f"{name}/whole"], answer, int(cut)):
            nats += token_divergences([(answers[f"{name}/whole"].tokens[int(cut)], answer.tokens[0])])
    if len(nats) < FEWEST:
        raise CannotBeJudged(
            f"only {len(nats)} tokens of the answers could be computed again: without log-probabilities or counts of tokens, "
            "or as the text before them is read as other tokens"
        )
    if reason := too_far(nats):
        return judged(False, f"after prefill instead of decoding, {reason}")
    seen = f"{max(nats):.2g} nats at most, {fmean(nats):.2g} on average"
    return judged(True, f"{len(nats)} tokens have the same distribution after prefill: {seen}")


def _same_prefix(whole: RecordedAnswer, answer: RecordedAnswer, cut: int) -> bool:
    """Whether the text before the token was read as the same number of tokens."""
    counts = whole.prompt_tokens, answer.prompt_tokens
    return bool(answer.tokens and answer.tokens[0].top and None not in counts and counts[0] + cut == counts[1])  # type: ignore[operator]


DECODE_BY_PREFILL = ServerProbe(
    "decoding against prefill", ask, judge, "a fault that prefill and decoding share, or in longer contexts than asked"
)
