"""What commands print as one self-contained HTML page, with a section for each command: a report of a machine."""

import html
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import require_writable
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import read_input_text

MAX_PAGE_BYTES = 2**24
_MARK = "<!doctype html>\n<!-- report of sm120kit -->\n"
_SECTION = re.compile(r"<section>\n<h2>(.*?)</h2>\n.*?\n</section>\n", re.DOTALL)
_NUMBER = re.compile(r"([+-]?[0-9][0-9.,]*( of [0-9]+|%| [a-z]{1,3})?( \([0-9.-]+\))?|unknown)?")
"""A cell of a column that is aligned at the right: 1,024, 51.3 (50.1-52.0), 3.0 us, 1 of 32."""

STYLE = """:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem;border-bottom:2px solid #8888;overflow-wrap:anywhere}
p{margin:.2rem 0;white-space:pre-wrap;overflow-wrap:anywhere}p:empty{height:.6rem}
small{opacity:.75}
div{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .9rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #8884}
td:last-child{overflow-wrap:anywhere;min-width:9rem}.n:last-child{min-width:0}th{white-space:nowrap}.n{text-align:right;white-space:nowrap}
svg{width:100%;height:auto;background:#fff}
@media(prefers-color-scheme:dark){svg{filter:invert(.9) hue-rotate(180deg)}}
@media print{body{margin:0;max-width:none;font-size:11px}svg{filter:none}svg,tr{break-inside:avoid}h2,h3{break-after:avoid}}"""
"""Light or dark as the reader's system is; prints on white paper, no row or chart cut."""


class Page:
    """The section of a command: lines, tables and charts in the order in which they are printed.

    Texts are printable (:func:`sm120kit.core.console.printable`), and escaped here.

    Raises:
        BadInput: the file exists, and is no page of sm120kit.
        SystemRefused: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        require_writable(path, "--html")
        self.path, self.parts = path, list[str]()
        self._read()

    def line(self, text: str) -> None:
        """Add a line of text."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, lines: Sequence[Sequence[str]]) -> None:
        """Add a table; the first line is its head. Columns of numbers are aligned at the right."""
        numbers = [all(map(_NUMBER.fullmatch, column[1:])) for column in zip(*lines, strict=True)]

        def row(texts: Sequence[str], tag: str) -> str:
            cells = zip(texts, numbers, strict=True)
            return "".join(f"<{tag}{' class=n' if number else ''}>{html.escape(text)}</{tag}>" for text, number in cells)

        body = "\n".join(f"<tr>{row(line, 'td')}" for line in lines[1:])
        self.parts.append(f"<div><table><tr>{row(lines[0], 'th')}\n{body}</table></div>")

    def chart(self, title: str, svg: str) -> None:
        """Add a chart: the SVG element of a trusted program."""
        self.parts.append(f"<h3>{html.escape(title)}</h3>\n<div>{svg}</div>")

    def write(self, title: str) -> bool:
        """Write the page, if it has parts, and return whether it has: a section of the same title is replaced, others stay."""
        if not self.parts:
            return False
        heading = html.escape(title)
        written = f"<p><small>{datetime.now(UTC):%Y-%m-%d %H:%M} UTC</small></p>"
        section = "\n".join((f"<section>\n<h2>{heading}</h2>", written, *self.parts, "</section>\n"))
        sections = {**self._read(), heading: section}
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        start = f'{_MARK}<html lang="en"><head>{head}<title>sm120kit report</title></head>\n<body><h1>sm120kit report</h1>\n'
        write_atomic(self.path, f"{start}{''.join(sections.values())}</body></html>\n".encode())
        return True

    def _read(self) -> dict[str, str]:
        """The sections of the file by heading; none if it does not exist."""
        if not self.path.is_file():
            return {}
        try:
            text = read_input_text(self.path, MAX_PAGE_BYTES)
        except (OSError, UnicodeError) as error:
            raise BadInput(f"{self.path} cannot be read: {error}", "name another file with --html") from error
        if text and not text.startswith(_MARK):
            raise BadInput(f"{self.path} is not a page that --html wrote", "name another file: its content would be lost")
        return {found[1]: found[0] for found in _SECTION.finditer(text)}
