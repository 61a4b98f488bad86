"""Compare two models by the KL divergence of their next-token distributions, with a control pair that measures rounding."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sm120kit.core.errors import ServerFailed
from sm120kit.kld import reference_model as references
from sm120kit.kld._kld_records import FORMAT, DivergenceSummary, KldComparison, Windowing
from sm120kit.kld._models import ComparedModel, LocalModel, ServedModel, require_same_tokenizer, require_window
from sm120kit.kld._tokens import TokenizedText, read_tokens
from sm120kit.kld.divergence import FullDistributions, TopLogProbabilities, WindowDivergences, divergences
from sm120kit.kld.reference_model import ReferenceText, SavedReference

__all__ = [
    "ComparedModel",
    "DivergenceSummary",
    "KldComparison",
    "LocalModel",
    "SavedReference",
    "ServedModel",
    "TokenizedText",
    "Windowing",
    "compare",
    "read_tokens",
    "require_same_tokenizer",
    "require_window",
    "save",
    "split_windows",
]

OTHER_BATCHES = "the reference again, in other batches"


def split_windows(tokens: Sequence[int], windowing: Windowing) -> list[Sequence[int]]:
    """Divide a text into windows.

    Raises:
        ServerFailed: the text is too short.
    """
    windows, length, stride = windowing.windows, windowing.window_tokens, windowing.stride_tokens
    required = length + (windows - 1) * stride
    if len(tokens) < required:
        possible = max(0, (len(tokens) - length) // stride + 1)
        raise ServerFailed(
            f"{windows} windows of {length} tokens with a stride of {stride} require {required:,} tokens; the text has "
            f"{len(tokens):,}",
            f"use a longer text, or --windows {possible}" if possible else "use a longer text, or a smaller --window",
        )
    return [tokens[start : start + length] for start in range(0, windows * stride, stride)]


def compare(
    reference: ComparedModel,
    test: ComparedModel,
    known_noise: DivergenceSummary | None,
    tokens: Sequence[int],
    windowing: Windowing,
    *,
    on_progress: Callable[[KldComparison], None] = lambda comparison: None,
) -> KldComparison:
    """Compare two models on the same tokens, two windows at a time to limit memory.

    The control pair is the reference and itself, computed again with one window per batch instead of two; ``known_noise`` was
    computed before, with a saved reference. The difference of the control pair is rounding, and a divergence of the test below
    it is not significant. ``on_progress`` is called after each pair of windows with the comparison so far.

    Raises:
        ServerFailed: the text is too short, or no position has a divergence.
    """
    windows = split_windows(tokens, windowing)
    sha256 = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    results: list[WindowDivergences] = []
    noise: list[WindowDivergences] = []
    exact = True

    def comparison() -> KldComparison:
        complete = len(results) == len(windows)
        compared = replace(windowing, windows=len(results))
        summaries = (_summary(results, test.name), known_noise or _summary(noise, "the control pair"))
        names = (reference.name, test.name, OTHER_BATCHES)
        return KldComparison(FORMAT, *names, compared, sha256, exact, complete, *summaries)

    for first in range(0, len(windows), 2):
        pair = windows[first : first + 2]
        expected, tested = reference.windows(pair), test.windows(pair)
        exact = exact and not any(isinstance(distributions, TopLogProbabilities) for distributions in (*expected, *tested))
        results += [divergences(p, q) for p, q in zip(expected, tested, strict=True)]
        if not known_noise:
            noise += [divergences(p, q) for p, q in zip(expected, _again(reference, pair), strict=True)]
        if any(window.nats for window in results) and (known_noise or any(window.nats for window in noise)):
            on_progress(comparison())
    return comparison()


def save(
    path: Path, model: ComparedModel, computed: ReferenceText, *, on_progress: Callable[[int], None] = lambda windows: None
) -> DivergenceSummary:
    """Compute a reference and write it to ``path``, with its difference from itself in other batches, which is returned.

    ``on_progress`` is called with the number of windows so far. The file appears when all of them are computed.

    Raises:
        ServerFailed: the text is too short, or no position has a divergence.
    """
    windows = split_windows(computed.text.tokens, computed.windowing)
    noise: list[WindowDivergences] = []
    with references.writer(path, computed.top) as writer:
        for first in range(0, len(windows), 2):
            pair = windows[first : first + 2]
            expected = model.windows(pair)
            for distributions in expected:
                writer.add(distributions)
            noise += [divergences(p, q) for p, q in zip(expected, _again(model, pair), strict=True)]
            on_progress(len(noise))
        summary = _summary(noise, "the reference")
        writer.finish(computed, summary)
    return summary


def _again(model: ComparedModel, pair: Sequence[Sequence[int]]) -> list[FullDistributions | TopLogProbabilities]:
    """The distributions of windows, one window per batch."""
    return [distributions for window in pair for distributions in model.windows([window])]


def _summary(windows: Sequence[WindowDivergences], name: str) -> DivergenceSummary:
    """Summarize the windows of ``name``, a model or the control pair."""
    nats = sorted(value for window in windows for value in window.nats)
    nan = [sum(window.nan_reference for window in windows), sum(window.nan_test for window in windows)]
    unbounded = sum(window.unbounded for window in windows)
    if not nats:
        raise ServerFailed(
            f"no position of {name} has a divergence: {nan[0]:,} with NaN in the reference, {nan[1]:,} in the test, "
            f"{unbounded:,} unbounded",
            "a model that returns NaN at every position was not loaded correctly",
        )
    percentiles = statistics.quantiles(nats, n=100, method="inclusive") if len(nats) > 1 else nats * 99
    return DivergenceSummary(
        positions=len(nats),
        covered=math.fsum(window.covered * len(window.nats) for window in windows) / len(nats),
        nan_reference=nan[0],
        nan_test=nan[1],
        unbounded=unbounded,
        mean=statistics.fmean(nats),
        median=statistics.median(nats),
        p95=percentiles[94],
        p99=percentiles[98],
        max=nats[-1],
        top1_differs=sum(window.top1_differs for window in windows),
        window_means=tuple(statistics.fmean(window.nats) for window in windows if window.nats),
    )
