"""The same requests to a reference: another server of the same model, such as one without speculation, or a saved reference."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace

from sm120kit import kld
from sm120kit.core.errors import Sm120kitError
from sm120kit.core.outside import parse_json
from sm120kit.probes.probe_prompts import PASSAGE, QUESTIONS, inventory
from sm120kit.probes.probe_records import ProbeExchange, ProbeJudgement, Recorded, RecordedAnswer, answered, judged
from sm120kit.probes.probe_session import LONG, SENTENCE_TOKENS, ProbeSession, ServerProbe
from sm120kit.probes.same_distributions import agreement, difference, problem

WINDOWS = 4
LISTED = 20
MOST_MEAN_NATS = 0.5
"""A mean divergence from a reference with other weights, as of BF16 from NVFP4, is less (docs/verify-server.md)."""


def ask_server(session: ProbeSession) -> None:
    """The questions, a text and three long ones, of both servers."""
    lines = inventory(session.long_tokens // SENTENCE_TOKENS, session.seed)
    long = {part: "\n".join(lines[: len(lines) * part // 4]) for part in (2, 3, 4)}
    for name, to in (("reference", session.reference), ("server", None)):
        session.send(
            [
                *(session.chat(f"{name}/{number}", question, LONG) for number, question in enumerate(QUESTIONS)),
                session.text(f"{name}/text", PASSAGE[:400], LONG),
                *(session.text(f"{name}/long/{part}", text, LONG) for part, text in long.items()),
            ],
            to=to,
        )


def judge_server(recorded: Recorded) -> ProbeJudgement:
    """Compare the answers one by one."""
    pairs = zip(answered(recorded, "reference/").values(), answered(recorded, "server/").values(), strict=True)
    differences = [difference(reference, answer) for reference, answer in pairs]
    found = problem(differences)
    return judged(not found, found or agreement(differences))


def ask_saved(saved: kld.SavedReference) -> Callable[[ProbeSession], None]:
    """A function that computes the divergence from a saved reference, over its first windows."""

    def ask(session: ProbeSession) -> None:
        windowing = replace(saved.windowing, windows=min(WINDOWS, saved.windowing.windows))
        try:
            server = session.served(LISTED)
            server.require(windowing.window_tokens, saved.text)
            compared = kld.compare(saved, server, saved.noise, saved.text.tokens, windowing)
            answer = RecordedAnswer(content=json.dumps(asdict(compared.result)))
        except Sm120kitError as error:
            answer = RecordedAnswer(error=error.message[:1000])
        session.exchanges.append(ProbeExchange("divergence", "prompt", asdict(windowing), answer))

    return ask


def judge_saved(recorded: Recorded) -> ProbeJudgement:
    """Compare the mean with a bound."""
    summary = parse_json(answered(recorded)["divergence"].content)
    seen = f"{summary['mean']:.3g} nats on average at {summary['positions']:,} positions, at least"
    broken = summary["nan_test"] or summary["unbounded"] or summary["mean"] > MOST_MEAN_NATS
    return judged(not broken, f"{seen}; {summary['top1_differs']:,} with another most likely token")


REFERENCE_SERVER = ServerProbe("reference server", ask_server, judge_server, "a fault that both servers share")


def saved_reference(saved: kld.SavedReference) -> ServerProbe:
    """The probe that compares with a saved reference."""
    return ServerProbe(
        "saved reference", ask_saved(saved), judge_saved, "a fault of decoding, batches or caches: prompts are compared"
    )
