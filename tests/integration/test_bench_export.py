"""Export of results as CSV, Markdown, HTML and as llama-benchy does."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result as CliResult

pytest.importorskip("matplotlib")


from sm120kit.bench import result_export, result_file
from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import Environment, MeasuredCase, Result
from sm120kit.bench.sample import Exchange, parse_sample
from sm120kit.cli import app
from sm120kit.core.errors import BadInput, SystemRefused


def case(concurrency: int, context: int, tok_s: float, error: str = "") -> MeasuredCase:
    """Requests of 40 tokens, the first after 0.1 s."""
    event = json.dumps({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]})
    usage = json.dumps({"usage": {"completion_tokens": 40, "prompt_tokens": 9}, "choices": []})
    last = 0.1 + 39 * concurrency / tok_s
    reads = [(0.1, f"data: {event}\n\n".encode()), (last, f"data: {event}\n\ndata: {usage}\n\n".encode())]
    samples = [parse_sample(reads, Exchange(user, 0, 0.0, last, 200)) for user in range(concurrency)]
    samples[0] = replace(samples[0], error=error)
    return MeasuredCase(concurrency, 40, context, (), tuple(samples), 0.0, None)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    about = Environment("http://h", "org/<b>model</b>", "w", "0" * 64, "off", 0.0, {"sm120kit": "1"}, {"gpu": "2x <x>"})
    cases = [
        case(concurrency, context, rate)
        for context in (0, 8192)
        for concurrency, rate in ((1, 100), (2, 190), (4, 200), (16, 210))
    ]
    path = tmp_path / "mine.json"
    result_file.write(
        path, Result(result_file.FORMAT, "2026-11-22T00:00:00+00:00", True, about, (*cases, case(32, 0, 210, "HTTP 500")))
    )
    return path


def exported(path: Path, name: str, *options: str) -> str:
    output = path.parent / name
    result = CliRunner().invoke(app, ["bench", "show", str(path), "-o", str(output), *options])
    assert result.exit_code == 0, result.output
    return output.read_text()


def test_csv_has_a_row_for_each_case(measured: Path) -> None:
    table = list(csv.DictReader(exported(measured, "a.csv").splitlines()))
    assert [(row["concurrency"], row["context_tokens"]) for row in table[:3]] == [("1", "0"), ("1", "8192"), ("2", "0")]
    assert float(table[0]["ttft"]) == pytest.approx(0.1) and table[0]["acceptance"] == ""
    assert table[-1]["errors"] == "1"


def test_markdown_has_figures_and_errors(measured: Path) -> None:
    text = exported(measured, "a.md")
    assert "| concurrency | output | context |" in text and "| 1 of 32 |" in text
    assert "- error: HTTP 500" in text.replace("&#45;", "-")
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


class Page(HTMLParser):
    """Collects the tags that are not closed, external references and text."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def page_of(path: Path, name: str) -> str:
    output = path.parent / name
    result = CliRunner().invoke(app, ["bench", "show", str(path), "--html", str(output)])
    assert result.exit_code == 0, result.output
    return output.read_text()


def test_html_is_one_page_with_charts(measured: Path) -> None:
    text = page_of(measured, "a.html")
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 2, "by concurrency, and by context"
    assert all(reference.startswith("#") for reference in page.references) and "@import" not in text
    assert "<b>model" not in text and "org/&lt;b&gt;model" in text and "2x &lt;x&gt;" in text
    for label in (*(title for title, _, _ in result_export.CHARTS), "context depth 8,192"):
        assert label in text
    assert text.count("<svg") == page_of(measured, "a.html").count("<svg"), "the section is replaced"


def test_llama_benchy_has_the_cases_with_their_rates(measured: Path) -> None:
    known = [case for case in result_file.read(measured).ordered if summary(case).total_tok_s]
    rates = [pytest.approx(summary(case).total_tok_s) for case in known]
    exported(measured, "a.benchy.json")
    report = json.loads((measured.parent / "a.benchy.json").read_text())
    runs = [run for run in report["benchmarks"] if run["tg_throughput"]]
    assert report["model"] == "org/<b>model</b>"
    assert [run["concurrency"] for run in runs] == [case.concurrency for case in known]
    assert [run["tg_throughput"]["mean"] for run in runs] == rates
    exported(measured, "a.benchy.csv")
    rows = list(csv.DictReader((measured.parent / "a.benchy.csv").open()))
    decode = [row for row in rows if row["test_name"].startswith("tg40")]
    assert [float(row["t_s_mean"]) for row in decode] == rates
    assert [re.search(r"\(c(\d+)\)", row["test_name"])[1] for row in decode] == [str(case.concurrency) for case in known]
    several = CliRunner().invoke(
        app, ["bench", "show", str(measured), str(measured), "-o", str(measured.parent / "b.benchy.csv")]
    )
    assert isinstance(several.exception, BadInput)


def test_charts_are_reproducible(measured: Path) -> None:
    (first, _), (again, _) = (result_export.chart_pages([("a", result_file.read(measured))]) for _ in range(2))
    assert first == again and first[1].startswith("<svg")


def test_unusable_files_are_refused(measured: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> CliResult:
        return CliRunner().invoke(app, ["bench", "show", *map(str, arguments)])

    assert run(measured, "-o", tmp_path / "a.pdf").exit_code == 2
    (tmp_path / "b.md").write_text("mine")
    assert isinstance(run(measured, "-o", tmp_path / "b.md").exception, SystemRefused)
    assert (tmp_path / "b.md").read_text() == "mine"
    assert re.search("no/a.md", str(run(measured, "-o", tmp_path / "no" / "a.md").exception))
    assert not list(tmp_path.glob("a.*"))
