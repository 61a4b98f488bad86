"""``sm120kit kld``: measure the KL divergence of a model from a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import ApiKey, Json, endpoint
from sm120kit.core import console

if TYPE_CHECKING:
    from sm120kit.kld import ComparedModel, DivergenceSummary, KldComparison, Windowing

SCALE = ((0.01, "near lossless"), (0.05, "good"), (0.1, "noticeable"), (float("inf"), "bad"))
"""Upper limit of the mean in nats -> rating (voipmonitor/rtx6kpro, benchmarks/kld-evaluation.md)."""

COVERED = 0.999
"""Minimum share of the probability for a rating: a lower bound from less leaves tokens uncompared that may differ."""


@dataclass(frozen=True)
class TextOptions:
    """The text, its tokenizer and its division into windows."""

    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text, or token ids as a JSON list (.json).")]
    windows: Annotated[int, typer.Option("--windows", min=1, metavar="N", help="Number of windows of the text.")] = 100
    window: Annotated[int, typer.Option("--window", min=2, metavar="TOKENS", help="Length of a window.")] = 2048
    stride: Annotated[
        int, typer.Option("--stride", min=1, metavar="TOKENS", help="Distance between the starts of two windows.")
    ] = 512
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="DIR", help="Directory of the tokenizer; default: the first model directory."),
    ] = None

    def windowing(self) -> Windowing:
        """The division into windows."""
        from sm120kit.kld import Windowing

        return Windowing(self.windows, self.window, self.stride)

    def tokens(self, directories: Sequence[Path]) -> list[int]:
        """Token ids of the text, by the tokenizer of ``--tokenizer`` or of the first of ``directories``.

        Raises:
            UnknownName: no tokenizer.
            Sm120kitError: see :func:`sm120kit.kld.read_tokens`.
        """
        from sm120kit.core.errors import UnknownName
        from sm120kit.kld import read_tokens

        if self.tokenizer is None and not directories and self.text.suffix != ".json":
            raise UnknownName("two servers and no tokenizer", "pass --tokenizer DIR, or token ids: --text ids.json")
        return read_tokens(self.text, self.tokenizer or (directories or [Path()])[0])


@dataclass(frozen=True)
class ModelOptions:
    """The control model, and requests to servers."""

    control: Annotated[
        str,
        typer.Option(
            "--control", metavar="REFERENCE", help="A second copy of the reference; default: the reference in other batches."
        ),
    ] = ""
    top: Annotated[
        int,
        typer.Option(
            "--top", min=-1, metavar="N", help="Tokens per position to request from a server; -1: the whole vocabulary."
        ),
    ] = 20
    api_key: ApiKey = ""

    def load(self, name: str) -> ComparedModel:
        """The model of a directory or behind a URL.

        Raises:
            Sm120kitError: the checkpoint cannot be loaded, or the server does not respond or offer the model.
        """
        from sm120kit import bench, kld

        if not _is_url(name):
            return kld.LocalModel(Path(name))
        url, _, model = name.partition("#")
        server = endpoint(url, self.api_key)
        return kld.ServedModel(server, bench.choose_model(server, model or None), self.top)


def kld(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="A model directory, or the URL of a vLLM server.")],
    test: Annotated[str, typer.Argument(metavar="TEST", help="Directory or URL of the model to compare with it.")],
    *,
    source: TextOptions,
    models: ModelOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the comparison to this file, as JSON.")
    ] = None,
    max_mean: Annotated[
        float | None, typer.Option("--max-mean", min=0, metavar="NATS", help="Exit code 1 if the mean is larger.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure the KL divergence of a model from a reference.

    Compares next-token distributions on the same tokens; a control pair measures the noise. Model directories are computed by
    Transformers, with full distributions. Servers return the most likely tokens of each position (vLLM's prompt_logprobs); the
    divergence is then a lower bound. With --output, an interrupted run keeps the windows compared so far. Exit code 1 if a
    model returns NaN or rules out a token of the reference.
    """
    from sm120kit.bench.receipt import require_writable
    from sm120kit.core.state import write_record
    from sm120kit.kld import compare, split_windows

    if output is not None:
        require_writable(output)
    tokens, windowing = source.tokens([Path(name) for name in (reference, test) if not _is_url(name)]), source.windowing()
    split_windows(tokens, windowing)  # refuse a text that is too short before a model is loaded
    loaded: dict[str, ComparedModel] = {}
    for name in (reference, test, *([models.control] if models.control else [])):
        if name not in loaded:
            loaded[name] = models.load(name)
    with console.progress() as progress:
        task = progress.add_task("windows", total=windowing.windows)

        def on_progress(partial: KldComparison) -> None:
            progress.update(task, completed=partial.asked.windows)
            if output is not None:
                write_record(output, partial)

        control = loaded[models.control] if models.control else None
        comparison = compare(loaded[reference], loaded[test], control, tokens, windowing, on_progress=on_progress)
    if json:
        console.json_data(asdict(comparison))
    else:
        _print(comparison)
    problems = _problems(comparison.result, max_mean)
    if problems:
        console.error("; ".join(problems), "check the checkpoint and the log of its server")
        raise typer.Exit(1)


def _problems(result: DivergenceSummary, max_mean: float | None) -> list[str]:
    """Why the comparison fails: NaN, tokens of probability 0, and a mean above the limit."""
    counts = {
        "the reference returns NaN": result.nan_reference,
        "the test returns NaN": result.nan_test,
        "the test gives probability 0 to a token that the reference does not": result.unbounded,
    }
    total = result.positions + sum(counts.values())
    problems = [f"{problem} at {count:,} of {total:,} positions" for problem, count in counts.items() if count]
    if max_mean is not None and result.mean > max_mean:
        problems.append(f"the mean of {result.mean:.3g} nats is larger than {max_mean:g}")
    return problems


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _print(comparison: KldComparison) -> None:
    rows = [("test", comparison.result), ("control", comparison.noise)]
    console.table(
        ("KL, nats", "positions", "mean", "median", "P95", "P99", "max", "top-1 differs", "NaN ref.", "NaN test", "unbounded"),
        ((name, f"{summary.positions:,}", *_figures(summary), *_counts(summary)) for name, summary in rows),
    )
    result, noise = comparison.result, comparison.noise
    console.info(f"test: {comparison.test}; control: {comparison.control}")
    if _problems(result, None):
        console.info("not rated: positions without a divergence are excluded from the figures")
    elif result.covered < COVERED:
        console.info(
            f"a lower bound: the tokens that both models listed have {result.covered:.1%} of the reference's probability; all "
            "others count as a single token. --top requests more tokens"
        )
    else:
        rating = next(rating for limit, rating in SCALE if result.mean < limit)
        console.info(f"{rating}, by the scale of the community's evaluations")
    if result.mean <= noise.mean and noise.mean > 0:
        console.info("not larger than the difference of the control pair: no significant difference")


def _figures(summary: DivergenceSummary) -> list[str]:
    return [f"{value:.3g}" for value in (summary.mean, summary.median, summary.p95, summary.p99, summary.max)]


def _counts(summary: DivergenceSummary) -> list[str]:
    share = f"{summary.top1_differs / summary.positions:.2%}"
    return [share, *(f"{count:,}" for count in (summary.nan_reference, summary.nan_test, summary.unbounded))]
