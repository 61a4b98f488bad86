"""``sm120kit kld``: measure the KL divergence of a model from a reference."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.bench import choose_model
from sm120kit.cli.options import Json, Overwrite, ServerAccess, argument, option
from sm120kit.core import console
from sm120kit.core.disk import require_new, require_writable
from sm120kit.core.errors import NotFound
from sm120kit.core.record_files import write_record
from sm120kit.core.urls import is_url
from sm120kit.kld import (
    ComparedModel,
    DivergenceSummary,
    KldComparison,
    LocalModel,
    SavedReference,
    ServedModel,
    TokenizedText,
    Windowing,
    compare,
    read_tokens,
    require_same_tokenizer,
    require_window,
    split_windows,
)
from sm120kit.kld import save as save_reference
from sm120kit.kld.reference_model import ReferenceText


@dataclass(frozen=True)
class TextOptions:
    """The text, its tokenizer and its division into windows."""

    text: Annotated[Path | None, option("--text FILE", "UTF-8 text, or token ids as a JSON list (.json).")] = None
    windows: Annotated[int, option("--windows N", "Number of windows of the text.", min=1)] = 100
    window: Annotated[int, option("--window TOKENS", "Length of a window.", min=2)] = 2048
    stride: Annotated[int, option("--stride TOKENS", "Distance between the starts of two windows.", min=1)] = 512
    tokenizer: Annotated[
        Path | None, option("--tokenizer DIR", "Directory of the tokenizer; default: the first model directory.")
    ] = None

    def tokens(self, directories: Sequence[Path]) -> TokenizedText:
        """Token ids of the text, by the tokenizer of ``--tokenizer`` or of the first of ``directories``.

        Raises:
            typer.BadParameter: no text.
            NotFound: no tokenizer.
            Sm120kitError: see :func:`sm120kit.kld.read_tokens`.
        """
        if self.text is None:
            raise typer.BadParameter("a model or server requires a text", param_hint="--text")
        if self.tokenizer is None and not directories and self.text.suffix != ".json":
            raise NotFound("two servers and no tokenizer", "pass --tokenizer DIR, or token ids: --text ids.json")
        return read_tokens(self.text, self.tokenizer or next(iter(directories), None))

    def require_unused(self, path: str) -> None:
        """Check that no text is given for a saved reference, which has its own.

        Raises:
            typer.BadParameter: a text, a tokenizer or a division was given.
        """
        if self != TextOptions():
            raise typer.BadParameter(f"{path} has its text, tokens and windows; leave out these options", param_hint="--text")


@dataclass(frozen=True)
class ModelOptions(ServerAccess):
    """How many tokens of each position are requested or saved."""

    top: Annotated[
        int | None,
        option(
            "--top N", "Tokens per position to request from a server (20) or to save (1000); -1: the whole vocabulary.", min=-1
        ),
    ] = None

    def load(self, names: Sequence[str], window: int, text: TokenizedText) -> dict[str, ComparedModel]:
        """The models of directories or behind URLs, which must read windows of ``text``. All are checked before one is loaded.

        Raises:
            Sm120kitError: a checkpoint cannot be loaded, or a server does not respond or offer the model, or the window is too
                long, or the tokenizer is another.
        """
        for name in names:
            if not is_url(name):
                require_window(Path(name), window)
                require_same_tokenizer(Path(name), text)
        return {name: self._server(name, window, text) if is_url(name) else LocalModel(Path(name)) for name in names}

    def saved_top(self, name: str) -> int:
        """How many tokens of each position of ``name`` are saved.

        Raises:
            typer.BadParameter: the whole vocabulary of a model directory.
        """
        if self.top == -1 and not is_url(name):
            raise typer.BadParameter("name a number of tokens to save of a model directory", param_hint="--top")
        return self.top if self.top is not None else 20 if is_url(name) else 1000

    def _server(self, name: str, window: int, text: TokenizedText) -> ServedModel:
        url, _, model = name.partition("#")
        endpoint = self.endpoint(url)
        server = ServedModel(endpoint, choose_model(endpoint, model or None), 20 if self.top is None else self.top)
        server.require(window, text)
        return server


@dataclass(frozen=True)
class ComparisonResults:
    """Where the comparison goes, and its limit."""

    output: Annotated[Path | None, option("--output -o FILE", "Write the comparison to this file, as JSON.")] = None
    max_mean: Annotated[float | None, option("--max-mean NATS", "Exit code 1 if the mean is larger.", min=0)] = None
    overwrite: Overwrite = False
    json: Json = False


def kld(
    reference: Annotated[str, argument("REFERENCE", "A model directory, a URL of vLLM or SGLang, or a file of --save.")],
    test: Annotated[str, argument("TEST", "Directory or URL of the model to compare with it.")] = "",
    *,
    source: TextOptions,
    models: ModelOptions,
    save: Annotated[Path | None, option("--save FILE", "Write the reference to this file, to compare it later.")] = None,
    results: ComparisonResults,
) -> None:
    """Measure the KL divergence of a model from a reference.

    Compares next-token distributions on the same tokens; a control pair measures the noise. Model directories are computed by
    Transformers, with full distributions. Servers return the most likely tokens of each position; the divergence is then a
    lower bound. --save writes a reference to a file, for a machine that cannot hold both models. With --output, an interrupted
    run keeps the windows compared so far. Exit code 1 if a model returns NaN or rules out a token of the reference.
    """
    if bool(save) == bool(test):
        raise typer.BadParameter("name a TEST to compare, or a FILE to save the reference to", param_hint="--save")
    for named, file in (("--save", save), ("--output", results.output)):
        if file is not None:
            require_writable(file, named)
            require_new(file, named, results.overwrite)
    stored = None if is_url(reference) or not Path(reference).is_file() else SavedReference(Path(reference))
    if stored and save:
        raise typer.BadParameter(f"{reference} is a saved reference", param_hint="--save")
    if stored:
        source.require_unused(reference)
    top = models.saved_top(reference) if save else 0
    names = [name for name in (reference, test) if name and not (stored and name == reference)]
    text = stored.text if stored else source.tokens([Path(name) for name in names if not is_url(name)])
    windowing = stored.windowing if stored else Windowing(source.windows, source.window, source.stride)
    split_windows(text.tokens, windowing)  # refuse what is wrong before a model is loaded
    loaded = models.load([*dict.fromkeys(names)], windowing.window_tokens, text)
    if save is not None:
        _save(save, loaded[reference], text, windowing, top)
        return
    pair = (stored or loaded[reference], loaded[test])
    comparison = _compare(pair, stored.noise if stored else None, text, windowing, results.output)
    if results.json:
        console.json_data(asdict(comparison))
    else:
        _print(comparison)
    problems = [*comparison.result.problems]
    if results.max_mean is not None and comparison.result.mean > results.max_mean:
        problems.append(f"the mean of {comparison.result.mean:.3g} nats is larger than {results.max_mean:g}")
    if problems:
        console.error("; ".join(problems), "check the checkpoint and the log of its server")
        raise typer.Exit(1)


def _save(path: Path, model: ComparedModel, text: TokenizedText, windowing: Windowing, top: int) -> None:
    with console.progress() as progress:
        task = progress.add_task("windows", total=windowing.windows)
        computed = ReferenceText(model.name, text, windowing, top)
        noise = save_reference(path, model, computed, on_progress=lambda windows: progress.update(task, completed=windows))
    console.info(f"{path}: {windowing.windows} windows, {top} tokens a position, {path.stat().st_size / 2**20:,.1f} MiB")
    console.info(f"in other batches, the reference differs from itself by {noise.mean:.3g} nats (mean)")
    if problems := noise.problems:
        console.error("; ".join(problems), "check the checkpoint")
        raise typer.Exit(1)


def _compare(
    pair: tuple[ComparedModel, ComparedModel],
    noise: DivergenceSummary | None,
    text: TokenizedText,
    windowing: Windowing,
    output: Path | None,
) -> KldComparison:
    with console.progress() as progress:
        task = progress.add_task("windows", total=windowing.windows)

        def on_progress(partial: KldComparison) -> None:
            progress.update(task, completed=partial.windowing.windows)
            if output is not None:
                write_record(output, partial)

        return compare(*pair, noise, text.tokens, windowing, on_progress=on_progress)


def _print(comparison: KldComparison) -> None:
    rows = [("test", comparison.result), ("control", comparison.noise)]
    console.table(
        ("KL, nats", "positions", "mean", "median", "P95", "P99", "max", "top-1 differs", "NaN ref.", "NaN test", "unbounded"),
        ((name, f"{summary.positions:,}", *_figures(summary), *_counts(summary)) for name, summary in rows),
    )
    console.info(f"test: {comparison.test}; control: {comparison.control}")
    for statement in comparison.statements:
        console.info(statement)


def _figures(summary: DivergenceSummary) -> list[str]:
    return [f"{value:.3g}" for value in (summary.mean, summary.median, summary.p95, summary.p99, summary.max)]


def _counts(summary: DivergenceSummary) -> list[str]:
    share = f"{summary.top1_differs / summary.positions:.2%}"
    return [share, *(f"{count:,}" for count in (summary.nan_reference, summary.nan_test, summary.unbounded))]
