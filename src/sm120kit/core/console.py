"""Terminal output of the command line: results on stdout, messages on stderr. The only module that imports rich.

A text may come from a server, an archive, a log, git or a recipe, and may contain secrets. So every text is
passed through :func:`printable`, here and nowhere else. JSON escapes control characters itself.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from sm120kit.core._heartbeat import Heartbeat
from sm120kit.core.records import json_text
from sm120kit.core.reporting import Advance
from sm120kit.core.secrets import masked, masked_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task

    from sm120kit.core.report_page import Page


_STRINGS = r"(?:\x1b[P\]X^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90-\x9f]*(?:\x07|\x1b\\|\x9c)"  # titles, links, clipboard
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor, erase
    rf"|{_STRINGS}|\x1b[ -/]*[0-~]"
)
_INVISIBLE = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f"
"""C1, and characters of Unicode that break lines, change the direction of text or are never seen."""
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f{_INVISIBLE}]")
"""Control characters except tab and newline, and invisible ones."""
_UNSTYLED = re.compile(rf"{_STRINGS}|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f{_INVISIBLE}]")


def printable(text: str, *, credentials: bool = False) -> str:
    """A text without escape sequences (ECMA-48), control characters and Unicode bidirectional controls.

    Secrets are masked as well (:mod:`sm120kit.core.secrets`), unless ``credentials`` is set.
    """
    text = _CONTROLS.sub("", _SEQUENCES.sub("", text))
    return text if credentials else masked(text)


def written(text: str) -> str:
    """What standard error prints of any text, of a library too: as :func:`printable`, but with rich's colours and cursor."""
    return masked(_UNSTYLED.sub("", text))


verbose = False
"""Whether :func:`detail` prints."""
json_errors = False
"""Whether :func:`failure` also prints JSON: the command has ``--json``, and has not printed its result."""
quiet = False
"""Whether only results and errors are printed."""
page: Page | None = None
"""Where results and warnings go as well."""


@cache
def _stderr() -> Console:
    """The one console: displays on it can be nested."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


MAX_MESSAGE = 20_000
"""Limit for the characters of a message, which may quote what comes from outside."""


def _message(text: str) -> str:
    """The text of a message, printable and not without end."""
    left = len(text := printable(text)) - MAX_MESSAGE
    return text if left <= 0 else f"{text[:MAX_MESSAGE]}\n... and {left:,} characters more"


def info(message: str) -> None:
    """Print a message; not with ``--quiet``."""
    _heartbeat.printed(message)
    if not quiet:
        print(_message(message), file=sys.stderr, flush=True)


def detail(message: str) -> None:
    """Print a message only with ``--verbose``."""
    if verbose:
        info(message)


def error(message: str, hint: str = "") -> None:
    """Print an error and its remedy."""
    console = _stderr()
    console.print("[bold red]error:[/] ", end="")
    console.print(_message(message), markup=False)
    if hint:
        console.print("[bold cyan]hint:[/] ", end="")
        console.print(printable(hint), markup=False)


def failure(kind: str, exit_code: int, message: str, hint: str) -> None:
    """Print the error that ends a command; with ``--json`` also as an object on stdout, in place of the result."""
    if json_errors:
        json_data({"error": {"kind": kind, "exit_code": exit_code, "message": printable(message), "hint": printable(hint)}})
    error(message, hint)


def warn(message: str) -> None:
    """Print a risk that does not end the command; also with ``--quiet``."""
    console = _stderr()
    console.print("[bold yellow]warning:[/] ", end="")
    console.print(_message(message), markup=False)
    if page:
        page.line(f"warning: {printable(message)}")


def data(text: str, *, credentials: bool = False) -> None:
    """Print a line of the result. ``credentials`` keeps them, for a command that is to be pasted."""
    print(printable(text, credentials=credentials), flush=True)
    if page:
        page.line(printable(text))


def chart(title: str, svg: str) -> None:
    """Add a chart to the page, if there is one: an SVG element of a trusted program."""
    if page:
        page.chart(printable(title), svg)


def json_data(value: Any) -> None:
    """Print a result as JSON; records become objects."""
    global json_errors
    json_errors = False
    print(masked_json(json_text(value)), flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout. In a pipe without COLUMNS no line is wrapped, and none has trailing blanks.

    On a terminal, cells are wrapped between words; where a word is too long for its column, each row is printed as a list of
    its cells.
    """
    lines = [[printable(name) for name in columns]]
    lines += [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if page:
        page.table(lines)
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        available = shutil.get_terminal_size().columns
        widths = _widths(lines, available - _EDGE - _GAP * (len(columns) - 1))
        if widths is None:
            _lists(lines[0], lines[1:], available)
            return
        lines = [["\n".join(_wrapped(text, width)) for text, width in zip(line, widths, strict=True)] for line in lines]
    else:
        widths = [max(_width(text, str.splitlines) for text in column) for column in zip(*lines, strict=True)]
    printed = [text for line in lines for text in _padded(line, widths)]
    rule = " " + "─" * max(_cell_len(printed[0]) - 1, 0)
    print("", printed[0], rule, *printed[1:], "", sep="\n", flush=True)


def _wrapped(text: str, width: int) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(line, width, **_WHOLE_WORDS) or [""]


def _padded(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row, of which only columns before the last are padded."""
    for cells in zip_longest(*(text.splitlines() or [""] for text in line), fillvalue=""):
        padded = (text + " " * (width - _cell_len(text)) for text, width in zip(cells, widths, strict=True))
        yield f" {(' ' * _GAP).join(padded)}".rstrip()


_EDGE, _GAP = 2, 2
"""Characters of a table beside its cells: at both edges, and between two cells."""


def _widths(lines: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Width of each column in characters: at most ``available`` together, no word cut; None if that is impossible."""
    natural = [max(_width(text, str.splitlines) for text in column) for column in zip(*lines, strict=True)]
    least = [max(_width(text, str.split) for text in column) for column in zip(*lines, strict=True)]
    if sum(least) > available:
        return None
    most = max(natural)
    while sum(widths := [max(low, min(high, most)) for low, high in zip(least, natural, strict=True)]) > available:
        most -= 1
    return widths


def _width(text: str, parts: Callable[[str], list[str]]) -> int:
    return max(map(_cell_len, parts(text)), default=0)


def _cell_len(text: str) -> int:
    """Width of a text on a terminal, where some characters take two columns and some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _lists(columns: Sequence[str], rows: Sequence[Sequence[str]], available: int) -> None:
    """Print each row as lines with a column's name and the cell, without empty cells."""
    margin = max(map(len, columns)) + 2
    for row in rows:
        print()
        for name, cell in zip(columns, row, strict=True):
            for number, text in enumerate(cell.splitlines()):
                lead = f"{'' if number else name:<{margin}}"
                print(textwrap.fill(text, available, initial_indent=lead, subsequent_indent=" " * margin, **_WHOLE_WORDS))
    print(flush=True)


_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


_heartbeat = Heartbeat()


@contextmanager
def heartbeat() -> Iterator[None]:
    """Print a line about the current activity whenever nothing was printed for a while, unless stderr is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.5):
            if not quiet and (line := _heartbeat.line()):
                print(printable(line), file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def step(message: str) -> Iterator[None]:
    """A step that may take long and has no parts to count: a display on a terminal, else a line, repeated with the time."""
    _heartbeat.printed(message)
    terminal = sys.stderr.isatty()
    if not (quiet or terminal):
        print(printable(message), file=sys.stderr, flush=True)
    with _display(message) if terminal and not quiet else _heartbeat.during():
        yield


def working(activity: str = "") -> AbstractContextManager[None]:
    """A program or wait that is printed only when it takes long; without a name it belongs to the last message."""
    since = time.monotonic()
    return _heartbeat.during(lambda: f"{activity}: {time.monotonic() - since:.0f} s" if activity else "")


@contextmanager
def progress(*, transfer: bool = False, remaining: bool = False) -> Iterator[Progress]:
    """A progress display on stderr: bytes with ``transfer``, else steps and time. In a pipe see :func:`heartbeat`.

    ``remaining`` adds the time that the other steps take at the same pace.
    """
    from rich import progress as bars
    from rich.text import Text

    class Description(bars.ProgressColumn):
        def render(self, task: bars.Task) -> Text:
            return Text(printable(task.description))

    columns: list[bars.ProgressColumn] = [Description(), bars.BarColumn()]
    columns += (
        [bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn()]
        if transfer
        else [bars.MofNCompleteColumn(), bars.TimeElapsedColumn()]
    )
    if remaining:
        columns += [bars.TextColumn("remaining"), bars.TimeRemainingColumn()]
    with bars.Progress(*columns, console=_stderr(), transient=True, disable=quiet or not sys.stderr.isatty()) as display:

        def states() -> str:
            return "; ".join(_state(task, transfer) for task in display.tasks if not task.finished)

        with _heartbeat.during(states):
            yield display


@contextmanager
def task(description: str, total: int | None, *, transfer: bool = False) -> Iterator[Advance]:
    """A progress display with one task; see :func:`sm120kit.core.reporting.task`."""
    with progress(transfer=transfer) as display:
        key = display.add_task(description, total=total)
        yield lambda amount=1: display.advance(key, amount)


def _state(task: Task, transfer: bool) -> str:
    unit, name = (1e6, " MB") if transfer else (1, "")
    of = "" if task.total is None else f" of {task.total / unit:,.0f}"
    rate = f" at {task.completed / unit / task.elapsed:,.1f} MB/s" if transfer and task.elapsed else ""
    return f"{task.description}: {task.completed / unit:,.0f}{of}{name}{rate}, {task.elapsed or 0:.0f} s"


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A line on stderr that is replaced by the next line. In a pipe see :func:`heartbeat`."""
    if quiet or not sys.stderr.isatty():
        text = printed = ""

        def show(line: str) -> None:
            nonlocal text
            text = line

        def changed() -> str | None:
            nonlocal printed
            line, printed = text if text != printed else None, text
            return line

        with _heartbeat.during(changed):
            yield show
        return
    with _display("") as update:
        yield update


@contextmanager
def _display(line: str) -> Iterator[Callable[[str], None]]:
    """A line on a terminal while the block runs; yields a function that replaces it."""
    from rich.text import Text

    with _stderr().status(Text(printable(line))) as display:
        yield lambda text: display.update(Text(printable(text)))
