"""Documentation: link targets, commands and names of code exist; the source of the site is complete."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pasted_commands
import pytest
import typer
from typer import _click

from sm120kit.cli import app
from sm120kit.core import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "patches/*.md", "tests/**/*.md", "src/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)|^\[[^]]+\]: ([^#\s]*)#?(\S*)", re.MULTILINE)
FENCED = re.compile(r"^ *(```|~~~)(\w*)\n(.*?)^ *\1$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Path and anchor of every link that stays in the repository."""
    for groups in LINK.findall(prose(page)):
        path, anchor = groups[0] or groups[2], groups[1] or groups[3]
        if not re.match(r"[a-z]+:", path):
            yield path, anchor


def broken(page: Path) -> Iterator[str]:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: there is no {path}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {path} has no heading {anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page: Path) -> None:
    assert not list(broken(page))


def test_links_lead_to_every_page_from_the_readme_and_the_home_page() -> None:
    reached: set[Path] = set()
    todo = {ROOT / "README.md", ROOT / "docs" / "index.md"}
    while todo:
        page = todo.pop()
        reached.add(page)
        todo |= {target for path, _ in links(page) if (target := (page.parent / path).resolve()) in PAGES} - reached
    within = (ROOT / "docs", ROOT / "src" / "sm12x_lab")
    assert sorted(page.name for page in PAGES if {*within} & {*page.parents} and page not in reached) == []


COMMAND = re.compile(r" *(?:\$ |sudo (?:-E )?)?(?:sm120kit|sm12x-lab|docker|nox|pytest|python3?|pip|git) ")


def unpasteable(page: Path) -> Iterator[str]:
    """Lines of commands that a shell would take with their description: it follows two spaces, and is no comment."""
    for _, language, block in FENCED.findall(page.read_text()):
        for line in block.splitlines() if language in ("", "sh", "bash") else ():
            if COMMAND.match(line) and re.search(r"\S {2,}[^#\s&|\\]", line.partition("#")[0]):
                yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_paste_as_shown(page: Path) -> None:
    assert not list(unpasteable(page))


def misplaced(page: Path) -> Iterator[str]:
    """Rows of tables below no header, empty headers, and names of files and tests in backquotes that do not exist."""
    text = prose(page)
    lines = ["", *text.splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|") and (before or not re.fullmatch(r"[|:\- ]+", after)):
            yield f"no header: {line}"
        if line.startswith("|") and re.fullmatch(r"[|:\- ]+", after) and re.search(r"\|\s*\|", line):
            yield f"an empty header: {line}"
        if line.startswith("|") and re.search(r"`[^`|]*\\\|[^`|]*`", line):
            yield f"the site prints the backslash: {line}"
    for path in re.findall(r"`((?:src|tests|ci|docs|recipes|patches|image_programs)/[\w./-]+)`", text):
        if not any((ROOT / f"{path}{suffix}").exists() for suffix in ("", ".patch")):
            yield f"there is no {path}"
    for package, rest in re.findall(r"`(\w+)/([\w/]+\.py)`", text):
        if (ROOT / "src" / "sm120kit" / package).is_dir() and not (ROOT / "src" / "sm120kit" / package / rest).exists():
            yield f"there is no {package}/{rest}"
    for file, test in re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)::(\w+)`", text):
        if not any(f"def {test}(" in path.read_text() for path in (ROOT / "tests").rglob(file)):
            yield f"there is no {file}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole_and_named_files_exist(page: Path) -> None:
    assert not list(misplaced(page))


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Lines of code blocks that run sm120kit, without comments, and commands in prose; whether it is of a block."""
    for command in re.findall(r"`(sm120kit [a-z][^`]*)`", prose(page)):
        yield " ".join(command.split()), False
    for line in pasted_commands.of_blocks(page):
        yield line, True


def parse(words: list[str]) -> None:
    """Parse a command line as sm120kit does, with types and required arguments, and run nothing."""
    command: Any = typer.main.get_command(app)
    name, parent = "sm120kit", None
    while hasattr(command, "list_commands"):
        parent = command.make_context(name, words, parent=parent)
        name, command, words = command.resolve_command(parent, [*parent._protected_args, *parent.args])
    command.make_context(name, words, parent=parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_parsed(page: Path) -> None:
    """Commands in prose may lack an argument."""
    for line, pasted in commands(page):
        try:
            parse(shlex.split(line.replace("[", "").replace("]", "").replace("...", ""))[1:])
        except _click.exceptions.UsageError as error:
            lacks = isinstance(error, (_click.exceptions.MissingParameter, _click.exceptions.NoArgsIsHelpError))
            assert lacks and not pasted, f"{page.name}: {line}: {error.format_message()}"


SAID = re.compile(r"`(sm120kit [a-z][^`]*)`|: (sm120kit(?: [a-z][a-z-]*){1,2})")
VERBS = ("did", "plans", "reads")
"""What a sentence says of sm120kit itself."""


def said(path: Path) -> Iterator[str]:
    """The commands in the texts of a file; what an f-string puts in is 1."""
    found = [path.read_text()] if path.suffix == ".toml" else []
    for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in parts))
    yield from (" ".join((quoted or plain).split()) for text in found for quoted, plain in SAID.findall(text))


def test_commands_in_messages_and_help_exist() -> None:
    """Quoted ones with their options, others by their names."""
    paths = [*(ROOT / "src").glob("sm1*/**/*.py"), *(ROOT / "src" / "sm120kit").glob("**/*.toml")]
    lines = {line: path for path in paths for line in said(path) if line.split()[1] not in VERBS}
    wrong = []
    for line, path in lines.items():
        try:
            parse(shlex.split(line.replace("[", "").replace("]", "").replace("...", ""))[1:])
        except (_click.exceptions.MissingParameter, _click.exceptions.NoArgsIsHelpError):
            pass  # of a command that exists
        except _click.exceptions.UsageError as error:
            wrong.append(f"{path.name}: {line}: {error.format_message()}")
    assert wrong == [] and len(lines) > 50


class TestPageBlocks:
    """Parts of pages that follow from the code and the recipes: the drawing of imports, the tables of configurations."""

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)

    def test_pages_are_those_of_the_code(self) -> None:
        done = self.run(ROOT / "ci" / "page_blocks.py", "--check")
        assert done.returncode == 0, done.stderr

    def test_another_page_is_named_and_written_again(self, tmp_path: Path) -> None:
        pages = (f"docs/{name}.md" for name in ("architecture", "rtx-5090", "rtx-pro-6000", "dgx-spark"))
        for name in ("ci/page_blocks.py", *pages):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
        page, right = tmp_path / "docs" / "rtx-5090.md", (ROOT / "docs" / "rtx-5090.md").read_text()
        page.write_text(right.replace("`gpt-oss-20b-1x-rtx-5090`", "`gpt`"))
        done = self.run(tmp_path / "ci" / "page_blocks.py", "--check")
        assert done.returncode == 1 and "docs/rtx-5090.md" in done.stderr and "architecture" not in done.stderr
        assert self.run(tmp_path / "ci" / "page_blocks.py").returncode == 0 and page.read_text() == right


def test_architecture_page_names_existing_code() -> None:
    """In table rows that link to a Python file, each `function()` is defined there, and each `Class` in some module."""
    page = ROOT / "docs" / "architecture.md"
    package = "".join(path.read_text() for name in ("sm120kit", "sm12x_lab") for path in (ROOT / "src" / name).rglob("*.py"))
    missing, count = [], 0
    for row in re.findall(r"^\|.*\|$", page.read_text(), re.MULTILINE):
        files = [(page.parent / path).resolve() for path, *_ in LINK.findall(row) if path.endswith(".py")]
        for name, call in re.findall(r"`(\w+)(\(\))?`", row) if files else ():
            text = "".join(path.read_text() for path in files) if call else package
            count += 1
            if not re.search(rf"^{'def' if call else 'class'} {name}\b", text, re.MULTILINE):
                missing.append(f"{name}{call} in {', '.join(str(file.relative_to(ROOT)) for file in files)}")
    assert not missing and count > 40


class TestSite:
    @pytest.fixture
    def repository(self, tmp_path: Path) -> Path:
        """A copy of all files that the site is generated from."""
        root = tmp_path / "repository"
        linked = {(page.parent / path).resolve() for page in PAGES for path, _ in links(page) if path}
        others = {ROOT / name for name in ("ci/docs_source.py", "mkdocs.yml", "docs/result.schema.json", "docs/site.css")}
        for path in {*PAGES, *linked, *others}:
            (root / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, root / path.relative_to(ROOT))
        return root

    def collect(self, repository: Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, repository / "ci" / "docs_source.py", repository / "site"]
        return subprocess.run(argv, capture_output=True, text=True)

    def test_reference_pages_list_commands(self, repository: Path) -> None:
        done = self.collect(repository)
        assert done.returncode == 0, done.stderr
        reference = (repository / "site" / "reference" / "cli.md").read_text()
        assert "## `sm120kit build`" in reference and "### `sm120kit patch prove`" in reference
        assert not re.search(r"^\* `[a-z-]+`: .*\.\.\.$", reference, re.MULTILINE), "a summary is truncated"

    def test_links_are_rewritten_for_the_site(self, repository: Path) -> None:
        (repository / "patches" / "proofs").mkdir()
        (repository / "patches" / "proofs" / "a.json").write_text("{}")
        with (repository / "docs" / "bench.md").open("a") as page:
            page.write(
                "\n[p](../patches/README.md#series) [e](../patches/proofs/a.json) [r](../README.md)\n```\n[x](y.md)\n```\n"
            )
        done = self.collect(repository)
        assert done.returncode == 0, done.stderr
        text = (repository / "site" / "bench.md").read_text()
        assert "[p](patches.md#series) [e](files/patches/proofs/a.json) [r](index.md)" in text
        assert (repository / "site" / "files" / "patches" / "proofs" / "a.json").read_text() == "{}"

    def test_broken_links_and_navigation_are_reported(self, repository: Path) -> None:
        (repository / "docs" / "extra.md").write_text("# Extra\n\n![a picture](nowhere.png)\n")
        (repository / "docs" / "cache.md").unlink()
        done = self.collect(repository)
        assert done.returncode == 1
        assert "docs/extra.md:3: there is no file nowhere.png" in done.stderr
        assert "mkdocs.yml: nav lacks extra.md" in done.stderr
        assert "mkdocs.yml: nav lists cache.md, which does not exist" in done.stderr


@pytest.mark.parametrize("name", ["vllm-expert-scales", "b12x-moe-race", "flashinfer-b12x-micro-race"])
def test_program_of_a_finding_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    text = (ROOT / "src" / "sm12x_lab" / "docs" / "findings" / f"{name}.md").read_text()
    ((program, output),) = re.findall(r"```python\n(.*?)```\s+```\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == output


def test_table_of_errors_is_that_of_the_code() -> None:
    table = re.findall(r"^\| (\d+) \| `([a-z-]+)` \| (.+) \|$", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    stated = [(int(code), kind, meaning) for code, kind, meaning in table if kind != "usage"]
    summaries = [" ".join(str(family.__doc__).partition("\n\n")[0].split()).removesuffix(".") for family in errors.families()]
    assert stated == [
        (family.exit_code, family.kind, summary) for family, summary in zip(errors.families(), summaries, strict=True)
    ]


def exit_codes(page: Path) -> Iterator[int]:
    """Exit codes in sentences, and those in the columns of tables that are named so."""
    text = prose(page)
    for listed in re.findall(r"exit codes? (\d+(?:(?:, | and | or )\d+)*)", text):
        yield from map(int, re.findall(r"\d+", listed))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, *rows = ([cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines())
        if "exit code" in header and page.name != "configuration.md":
            column = header.index("exit code") - len(header)
            yield from (int(code) for row in rows for code in re.findall(r"\d+", row[column]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_exit_codes_are_those_of_the_code(page: Path) -> None:
    families = {family.exit_code for family in errors.families()}
    assert {code for code in exit_codes(page) if code < 128} <= families | {0, 1, 2}
