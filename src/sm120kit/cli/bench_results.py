"""``sm120kit bench show`` and ``compare``: print, export and compare results."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from sm120kit.bench import compare_results, figures, published, result_export, result_file
from sm120kit.bench.ablation import AblationEffect
from sm120kit.bench.compare_results import Gain
from sm120kit.bench.figures import COLUMNS, UNKNOWN
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.cli.options import Html, Json, Overwrite, argument, option
from sm120kit.core import console
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import require_new, require_writable


def show(
    results: Annotated[list[Path], argument("RESULT", "Files that bench run wrote.")],
    output: Annotated[
        Path | None,
        option("--output -o FILE", "Write this file instead: .csv, .md, or as llama-benchy does .benchy.json or .benchy.csv."),
    ] = None,
    html: Html = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Show the figures of results, or write them as a table or a page.

    They are computed from the samples.
    """
    if output is not None:
        if json or html:
            raise typer.BadParameter(f"--{'json' if json else 'html'} has the figures: leave out --output")
        _export(results, output, overwrite)
        return
    named = [(path.stem, result_file.read(path)) for path in results]
    charts = list(result_export.chart_pages(named)) if html else []
    render(named, as_json=json)
    for by, chart in charts:
        console.chart(f"by {by}", chart)


def _export(results: Sequence[Path], output: Path, overwrite: bool) -> None:
    kind = next((kind for kind in result_export.KINDS if output.name.endswith(kind)), None)
    if kind is None:
        raise typer.BadParameter(f"{output}: a file ends in {', '.join(result_export.KINDS)}", param_hint="--output")
    require_writable(output)
    require_new(output, "--output", overwrite)
    named = [(path.stem, result_file.read(path)) for path in results]
    write_atomic(output, result_export.KINDS[kind](named).encode())
    console.info(f"{output}: {sum(len(each.cases) for _, each in named)} cases")


def compare(
    before: Annotated[Path, argument("BEFORE", "A result.")],
    after: Annotated[Path, argument("AFTER", "The result to compare with it.")],
    ignore: Annotated[str, option("--ignore NAME,...", "What may differ in the environments; it is printed.")] = "",
    json: Json = False,
) -> None:
    """Compare two results case by case.

    Every figure is compared, with its mean ratio and the 95 % interval of several starts. Refused if the environments differ
    in what is not ignored. Exit code 1 if a larger share of requests failed than before.
    """
    ignored = [name.strip() for name in ignore.split(",") if name.strip()]
    compared = compare_results.compare(result_file.read(before), result_file.read(after), ignored)
    if json:
        console.json_data(asdict(compared) | {"gains": _gain_objects(compared.gains)})
    else:
        for name, (first, second) in compared.differ.items():
            console.data(f"{name}: {first} / {second}")
        if compared.unknown:
            console.data(f"unknown in both: {compare_results.briefly(compared.unknown)}")
        for each in compared.failures:
            shares = " / ".join(f"{failed} of {requests}" for failed, requests in (each.before, each.after))
            console.data(f"{figures.name(*each.case)}: failed requests: {shares}; the figures are of the others")
        _gain_table(compared.gains, "before", "after")
    if any(each.more for each in compared.failures):
        raise typer.Exit(1)


def _gain_objects(gains: Sequence[Gain]) -> list[dict[str, Any]]:
    return [asdict(gain) | {"ratio": gain.ratio, "interval": gain.interval} for gain in gains]


def _gain_table(gains: Sequence[Gain], before: str, after: str) -> None:
    """A row for each figure of each case: medians of the starts, the change, and its interval."""
    rows = []
    for gain in gains:
        title, shown = COLUMNS[gain.figure]
        interval = " to ".join(f"{end - 1:+.1%}" for end in gain.interval or ()) or "unknown: one start"
        changes = (UNKNOWN, "") if gain.ratio is None else (f"{gain.ratio - 1:+.1%}", interval)
        middles = (shown(median(values)) if values else UNKNOWN for values in (gain.before, gain.after))
        rows.append((gain.concurrency, gain.output_tokens, gain.context_tokens, title, *middles, *changes))
    console.table(("concurrency", "output", "context", "figure", before, after, "change", "95 % interval"), rows)


# ---- results as tables and as JSON


def render(named: Sequence[tuple[str, Result]], *, as_json: bool) -> None:
    """Print results as tables, or as JSON: an object, a list for several."""
    if as_json:
        objects = [_object(result) for _, result in named]
        console.json_data(objects[0] if len(objects) == 1 else objects)
        return
    for name, result in named:
        if len(named) > 1:
            console.data(f"{name}:")
        _print(result)


def render_effects(effects: Sequence[AblationEffect], *, as_json: bool) -> None:
    """Print what options change, each as a table of its gains and a line on the answers; or all as a JSON list."""
    if as_json:
        console.json_data([asdict(each) | {"gains": _gain_objects(each.gains)} for each in effects])
        return
    for effect in effects:
        console.data(f"{effect.name}: {effect.option}")
        _gain_table(effect.gains, "without", "with")
        console.data(effect.answers.text)


def _object(result: Result) -> dict[str, Any]:
    kept = ("concurrency", "output_tokens", "context_tokens", "restart", "complete")
    return {
        "complete": result.complete,
        "environment": asdict(result.environment),
        "comparisons": published.comparisons(result),
        "published": _judgements(result),
        "notes": figures.notes(result),
        "cases": [{**{name: getattr(case, name) for name in kept}, **asdict(figures.summary(case))} for case in result.ordered],
    }


def _judgements(result: Result) -> list[dict[str, Any]]:
    configuration = published.configuration_of(result)
    judgements = published.judge(configuration, result) if configuration else ()
    return [
        asdict(each) | {"reference": each.reference.model_dump(), "reached": each.reached, "text": each.text}
        for each in judgements
    ]


SETUP = ("machine.", "served.", "given.", "reported.")
"""The printed groups of the environment."""

TABLES = (
    ("decode_tok_s", "total_tok_s", "output_tok_s", "acceptance"),
    ("prompt_tokens", "prefill_tok_s", "ttft", "ttft_p95", "ttfa"),
    ("itl_p50", "itl_p99", "tokens", "chunks"),
    ("cache_hits",),
)
"""The figures of each printed table, each within 80 columns."""


def _print(result: Result) -> None:
    console.data(figures.about(result))
    setup = {name: text for name, text in compare_results.environment(result).items() if name.startswith(SETUP)}
    if known := [(name, text) for name, text in setup.items() if text != figures.UNKNOWN]:
        console.table(("environment", "value"), known)
    if unknown := [name for name, text in setup.items() if text == figures.UNKNOWN]:
        console.data(f"unknown: {compare_results.briefly(unknown)}")
    for number, names in enumerate(TABLES):
        _table(result, names, failed=number == 0)
    for line in (*published.comparisons(result), *figures.notes(result)):
        console.data(line)


def _table(result: Result, names: Sequence[str], *, failed: bool) -> None:
    """Print figures of each case; not if all are unknown, whose reason is a note."""
    restarted = any(case.restart for case in result.cases)
    summaries = [(case, figures.summary(case)) for case in result.ordered]
    if not failed and all(getattr(summary, name) is None for _, summary in summaries for name in names):
        return
    heads = ("concurrency", "output", "context", *["restart"] * restarted, *(figures.COLUMNS[name][0] for name in names))
    rows = [
        (*_key(case, restarted), *(figures.text(summary, name) for name in names), *[figures.failed(case)] * failed)
        for case, summary in summaries
    ]
    console.table((*heads, *["failed"] * failed), rows)


def _key(case: MeasuredCase, restarted: bool) -> tuple[int, ...]:
    return (*case.key, *[case.restart] * restarted)
