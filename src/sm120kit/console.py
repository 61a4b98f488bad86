"""Talking to people: stdout is data, stderr is talk. The only module that imports rich."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sm120kit.records import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A line of talk."""
    print(message, file=sys.stderr, flush=True)


def error(message: str, hint: str = "") -> None:
    """A failure and the way out."""
    console = _stderr()
    console.print("[bold red]error:[/] ", end="")
    console.print(message, markup=False)
    if hint:
        console.print("[bold cyan]hint:[/] ", end="")
        console.print(hint, markup=False)


def data(text: str) -> None:
    """A line of output for people or programs to read."""
    print(text, flush=True)


def json_data(value: Any) -> None:
    """Output for programs; records are objects."""
    print(json.dumps(value, indent=2, default=plain), flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout. It fits the width of the terminal or COLUMNS; in a pipe without COLUMNS no cell is ever broken."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if fits else 1000, highlight=False).print(grid)


@contextmanager
def progress(*, transfer: bool = False) -> Iterator[Progress]:
    """A progress display on stderr: byte counts with ``transfer``, else steps and time. Silent when not a terminal."""
    from rich import progress as bars

    columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn()]
    columns += (
        [bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()]
        if transfer
        else [bars.MofNCompleteColumn(), bars.TimeElapsedColumn()]
    )
    with bars.Progress(*columns, console=_stderr(), transient=True, disable=not sys.stderr.isatty()) as display:
        yield display


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on stderr that is replaced by the next one. Silent when not a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with _stderr().status("") as display:
        yield display.update
