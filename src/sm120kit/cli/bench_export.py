"""``sm120kit bench export``: write receipts as CSV, Markdown or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Overwrite
from sm120kit.core import console


def export(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="Files that bench run wrote.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write: .csv, .md, or .html with charts.")
    ] = Path("receipt.html"),
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo", metavar="NAME=MS", help="Objective for goodput, such as ttft=500, itl:p95=50 or e2e=9000; repeatable."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write receipts as a table or a page with charts.

    With objectives, the requests per second that meet all of them are the goodput of a cell.
    """
    from sm120kit.bench import export as exports
    from sm120kit.bench import receipt, saturation
    from sm120kit.core.state import require_new, require_writable, write_atomic

    writers = {".csv": exports.as_csv, ".md": exports.as_markdown, ".html": exports.as_html}
    if output.suffix not in writers:
        raise typer.BadParameter(f"{output}: a file ends in {', '.join(writers)}", param_hint="--output")
    require_writable(output)
    require_new(output, "--output", overwrite)
    objectives = saturation.parse_objectives(slo or [])
    named = [(path.stem, receipt.read(path)) for path in receipts]
    write_atomic(output, writers[output.suffix](named, objectives).encode())
    console.info(f"{output}: {sum(len(each.cells) for _, each in named)} cells")
