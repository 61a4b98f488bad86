"""``sm120kit kld``: how far a model's distributions are from a reference's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.kld import Comparison, Side, Summary

SCALE = ((0.01, "near lossless"), (0.05, "good"), (0.1, "noticeable"), (float("inf"), "bad"))
"""What a mean below so many nats is called (voipmonitor/rtx6kpro, benchmarks/kld-evaluation.md)."""

COVERED = 0.999
"""A bound from less of the probability than this gets no such name: what was not looked at may differ in any way."""


def kld(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="A model folder, or the URL of a vLLM server.")],
    test: Annotated[str, typer.Argument(metavar="TEST", help="The same, of the model to judge.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text, or token ids as a JSON list (.json).")],
    windows: Annotated[int, typer.Option("--windows", min=1, help="How many windows of the text.")] = 100,
    window: Annotated[int, typer.Option("--window", min=2, metavar="TOKENS", help="Tokens of one window.")] = 2048,
    stride: Annotated[int, typer.Option("--stride", min=1, metavar="TOKENS", help="From one window to the next.")] = 512,
    top: Annotated[
        int, typer.Option("--top", min=-1, help="Tokens asked of a server for each position; -1: the whole vocabulary.")
    ] = 20,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="Whose tokenizer; default: the first model folder given.")
    ] = None,
    control: Annotated[
        str | None, typer.Option("--control", help="A second copy of the reference; default: the reference asked again.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the comparison here.")] = None,
    as_json: Json = False,
) -> None:
    """Kullback-Leibler divergence of TEST from REFERENCE on the same tokens, with a control pair beside it.

    Model folders are computed by Transformers, whole distributions. Servers give the likeliest tokens of each position
    (prompt_logprobs of vLLM); the divergence is then a lower bound. What was measured is kept when the run is interrupted.
    """
    from sm120kit import kld as stage
    from sm120kit.bench.receipt import require_writable
    from sm120kit.errors import UnknownName
    from sm120kit.workspace import write_record

    folders = [Path(name) for name in (reference, test) if not _is_url(name)]
    if tokenizer is None and not folders and text.suffix != ".json":
        raise UnknownName("two servers and no tokenizer", "--tokenizer DIR names one, or give token ids: --text ids.json")
    if output is not None:
        require_writable(output)
    asked = stage.Asked(windows, window, stride)
    tokens = stage.tokens_of(text, tokenizer or (folders or [Path()])[0])
    stage.windows(tokens, asked)  # a text that is too short is refused before a model is loaded
    sides: dict[str, Side] = {}
    for name in (reference, test, *([control] if control else [])):
        if name not in sides:
            sides[name] = _side(name, top)
    with console.progress() as progress:
        task = progress.add_task("windows", total=windows)

        def keep(so_far: Comparison) -> None:
            progress.update(task, completed=so_far.asked.windows)
            if output is not None:
                write_record(output, so_far)

        made = stage.compare(sides[reference], sides[test], sides[control] if control else None, tokens, asked, keep=keep)
    if as_json:
        import dataclasses

        console.json_data(dataclasses.asdict(made))
        return
    _show(made)


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _side(name: str, top: int) -> Side:
    from sm120kit import bench, kld

    if not _is_url(name):
        return kld.Checkpoint(Path(name))
    url, _, model = name.partition("#")
    url = url.rstrip("/")
    return kld.Served(url, bench.choose_model(url, model or None), top)


def _show(made: Comparison) -> None:
    rows = [("test", made.result), ("control", made.noise)]
    console.table(
        ("KL, nats", "positions", "mean", "median", "P95", "P99", "max", "top-1 differs", "NaN ref.", "NaN test", "unbounded"),
        ((name, f"{one.positions:,}", *_figures(one), *_counts(one)) for name, one in rows),
    )
    result, noise = made.result, made.noise
    console.say(f"test: {made.test}; control: {made.control}")
    if result.covered < COVERED:
        console.say(
            f"a lower bound: the tokens that both sides listed have {result.covered:.1%} of the reference's probability, all "
            "others count as one; --top asks for more"
        )
    else:
        word = next(word for limit, word in SCALE if result.mean < limit)
        console.say(f"{word}, by the scale of the community's evaluations")
    if result.mean <= noise.mean and noise.mean > 0:
        console.say("not more than the control pair differs: this shows no difference")
    if result.nan_test or result.unbounded:
        console.say("positions without a divergence are not in the figures; a model that has such is not right")


def _figures(one: Summary) -> list[str]:
    return [f"{value:.3g}" for value in (one.mean, one.median, one.p95, one.p99, one.max)]


def _counts(one: Summary) -> list[str]:
    share = f"{one.top1_differs / one.positions:.2%}"
    return [share, *(f"{count:,}" for count in (one.nan_reference, one.nan_test, one.unbounded))]
