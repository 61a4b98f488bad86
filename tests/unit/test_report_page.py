"""The page of ``--html``: what commands print, whatever it contains."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import synthetic_hosts
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core import console
from sm120kit.core.errors import BadInput, SystemRefused
from sm120kit.core.report_page import Page

MARKUP = "</section><script>alert(1)</script>\x1b]0;t\x07\u202e<img src=x onerror=y>"
HOSTILE = f"{MARKUP} Authorization: Bearer hf_0123456789abcdefghijABCDEFGHIJklmn"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.references: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.references += [value for name, value in attrs if name in ("src", "href") or name.startswith("on")]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page(tmp_path / "report.html")
    monkeypatch.setattr(console, "page", page)
    return page


def test_hostile_texts_are_text(page: Page) -> None:
    console.data(HOSTILE)
    console.warn(HOSTILE)
    console.table((HOSTILE, "n"), [(HOSTILE, 1)])
    page.write(console.printable(HOSTILE))
    text = page.path.read_text()
    tags = Tags(text)
    assert not tags.found & {"script", "img", "a", "link", "iframe"} and not tags.references
    assert not re.search("[\x00-\x08\x1b\u202e]", text) and "hf_0123" not in text
    again = Page(page.path)
    again.line("kept")
    again.write("other")
    assert page.path.read_text().count("<section>") == 2, "a text cannot end its section"


def test_sections_are_replaced_and_added(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for title, text in (("doctor", "first"), ("plan x", "second"), ("doctor", "third")):
        page = Page(path)
        page.line(text)
        page.write(title)
    text = path.read_text()
    assert "first" not in text and text.index("third") < text.index("second")
    Page(path).write("nothing printed")
    assert path.read_text() == text


def test_files_of_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.html"
    path.write_text("<h1>mine</h1>")
    with pytest.raises(BadInput, match=r"mine\.html"):
        Page(path)
    with pytest.raises(SystemRefused):
        Page(tmp_path / "no" / "a.html")


def test_a_command_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    host = synthetic_hosts.build(sorted(synthetic_hosts.HOSTS)[0], tmp_path / "host")
    printed = CliRunner().invoke(app, ["doctor", "--root", str(host), "--html", str(path)])
    text = path.read_text()
    assert "<h2>doctor</h2>" in text and console.page is None
    assert printed.stdout.splitlines()[-1] in text
    for wrong in (["--json"], ["--no-such-option"]):
        assert CliRunner().invoke(app, ["doctor", "--html", str(path), *wrong]).exit_code == 2
        assert console.page is None and path.read_text() == text
