"""The command tree: what help prints, what is imported for it, and where options come from."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from sm120kit import __version__, recipes
from sm120kit.bench.workload import Case
from sm120kit.cli import app, bench, plugins
from sm120kit.cli.commands import COMMANDS
from sm120kit.cli.options import Sources, expand_groups
from sm120kit.cli.tree import Branch, Leaf
from sm120kit.core import console
from sm120kit.core.errors import NotFound, OfflineMiss, ResourceUnavailable, SystemRefused
from sm120kit.recipes import configurations

HEAVY = ("docker", "importlib.metadata", "git", "httpx2", "pydantic", "rich", "ssl", "torch", "unearth")
ROOT = typer.main.get_command(app)


def walk(entry: Branch | Leaf = COMMANDS, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Branch | Leaf]]:
    yield path, entry
    if isinstance(entry, Branch):
        for name, child in entry.commands.items():
            yield from walk(child, (*path, name))


TREE = dict(walk()) | dict(plugins.commands())
LEAVES = {path: entry for path, entry in TREE.items() if isinstance(entry, Leaf)}


def command(path: tuple[str, ...]) -> Any:
    group: Any = ROOT
    for name in path:
        group = group.get_command(None, name)
    return group


def run(*words: str | Path, **env: str) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), env=env)


def by_path(path: tuple[str, ...]) -> str:
    return "-".join(path) or "root"


@pytest.mark.parametrize("path", TREE, ids=by_path)
def test_help_fits_80_columns_and_cuts_no_summary(path: tuple[str, ...]) -> None:
    page = run(*path, "-h").stdout
    assert page == run(*path, "--help").stdout
    assert max(map(len, page.splitlines())) <= 80
    assert not re.search(r"<[a-z]|\{|\}|\[\[|\]\]|\.\.\.\]|\.\.\.\.", page)
    entry = TREE[path]
    for each in (entry, *(entry.commands.values() if isinstance(entry, Branch) else ())):
        assert each.summary in " ".join(page.split())


@pytest.mark.parametrize("path", LEAVES, ids=by_path)
def test_summary_is_first_line_of_docstring(path: tuple[str, ...]) -> None:
    module, _, name = LEAVES[path].target.partition(":")
    function = getattr(import_module(module if "." in module else f"sm120kit.cli.{module}"), name)
    assert function.__doc__.splitlines()[0] == f"{LEAVES[path].summary}."


@pytest.mark.parametrize("path", LEAVES, ids=by_path)
def test_option_values_have_placeholders(path: tuple[str, ...]) -> None:
    for param in command(path).params:
        if param.param_type_name == "argument" or not (param.is_flag or param.count):
            assert re.fullmatch(r"[A-Z]([^][ ]*[^].])?|NAME,\.\.\.", param.metavar or ""), param.name
            assert param.help, param.name
        if param.param_type_name == "option" and param.multiple:
            assert re.search("[Rr]epeatable|one for each", param.help), param.name


WITHOUT_JSON = {
    "image export": "writes a file",
    "init": "writes a directory",
    "logs": "prints a server's own lines",
    "patch edit": "writes a directory",
    "recipe check": "exit code",
    "config check": "exit code",
    "config new": "writes a file",
    "serve": "prints a request for curl; `ps --json` lists the server",
    "stop": "prints no result",
    "verify run": "prints what the program prints; --receipt writes the record",
}
"""What commands without --json print instead of tables and records."""


def test_tables_and_records_can_be_printed_as_json() -> None:
    without = {" ".join(path) for path in LEAVES if not any("--json" in param.opts for param in command(path).params)}
    assert without == {*WITHOUT_JSON}


def test_common_options_are_in_the_help_of_the_program_only() -> None:
    names = ("--state", "--mirror", "--quiet")
    assert all(name in run("-h").stdout for name in names)
    assert not any(name in run("build", "-h").stdout for name in names)


def test_help_has_options_of_a_command_before_those_of_a_group_that_it_extends() -> None:
    page = run("bench", "run", "-h").stdout
    assert page.index("--served-model-name") < page.index("--api-key") and "[default: 120.0" in page


def test_environment_variables_are_unique() -> None:
    names = [name for path in LEAVES for option in command(path).settable().values() for name in option.envvar[:1]]
    assert len(names) == len(set(names))
    shared = {option.envvar[1] for path in LEAVES for option in command(path).settable().values() if option.envvar[1:]}
    assert {"SM120KIT_JOBS", "SM120KIT_MEMORY", "SM120KIT_MIRROR", "SM120KIT_OFFLINE", "SM120KIT_STATE"} <= shared
    assert not {"SM120KIT_CONFIG", "SM120KIT_DATA", "SM120KIT_TRACEBACK"} & {*names, *shared}
    assert not shared & {*names}


def loaded(*words: str) -> set[str]:
    program = f"import sys; from sm120kit.cli import app\ntry: app({[*words]!r})\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_no_command_and_nothing_heavy() -> None:
    parts = ("", ".commands", ".config_file", ".entry", ".options", ".plugins", ".tree")
    base = {f"sm120kit.cli{name}" for name in parts}
    modules = loaded("--help")
    assert not modules & {*HEAVY}
    assert {name for name in modules if name.startswith("sm120kit.cli")} == base
    assert not loaded("build", "--help") & {*HEAVY} - {"pydantic", "importlib.metadata"}


def test_version() -> None:
    assert run("--version").stdout == f"sm120kit {__version__}\n"


def test_unknown_command_suggests_nearest() -> None:
    result = run("tile")
    assert result.exit_code == 2
    assert "'tiles'" in result.output


def stage(*words: str, **env: str) -> str:
    """The error of `build` with an unknown stage."""
    return run("build", "flashinfer", *words, **env).output


def test_command_line_overrides_environment() -> None:
    assert "'from-environment'" in stage(SM120KIT_BUILD_TO="from-environment")
    assert "'from-command-line'" in stage("--to", "from-command-line", SM120KIT_BUILD_TO="from-environment")


def test_command_variable_overrides_shared_variable(tmp_path: Path) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).write_text("")
    result = run("patch", "status", SM120KIT_STATE=str(tmp_path / "shared"))
    assert f"{tmp_path}/shared" in str(result.exception)
    result = run("patch", "status", SM120KIT_STATE=str(tmp_path / "shared"), SM120KIT_PATCH_STATUS_STATE=str(tmp_path / "own"))
    assert f"{tmp_path}/own" in str(result.exception)


def test_invalid_value_names_its_environment_variable() -> None:
    result = run("build", "flashinfer", SM120KIT_JOBS="many")
    assert result.exit_code == 2
    assert "--jobs" in result.output and "from SM120KIT_JOBS" in result.output
    assert "SM120KIT" not in run("build", "flashinfer", "--jobs", "many", SM120KIT_JOBS="2").output.split("error:")[1]


def test_quiet_and_verbose_end_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        print(f"quiet={console.quiet} verbose={console.verbose}")

    monkeypatch.setattr("sm120kit.recipes.load_with_path", load)
    words = ("patch", "export", "flashinfer", "--from", "x")
    assert "quiet=True verbose=False" in run(*words, "-q").stdout
    assert "quiet=False verbose=True" in run(*words, "-v").stdout
    assert "quiet=False verbose=False" in run(*words).stdout


def test_quiet_prints_results_and_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "quiet", True)
    console.info("progress")
    console.data("result")
    console.error("failure", "remedy")
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert "failure" in err and "remedy" in err and "progress" not in err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--offline"], OfflineMiss),
        (["--base", "debian:12"], NotFound),
        (["--to", "pack"], SystemRefused),
        (["--dry-run"], SystemRefused),
    ],
)
def test_base_and_daemon_are_required_before_the_build(
    options: list[str], error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_nothing(*args: Any) -> None:
        raise SystemRefused("nothing is compiled", "")

    monkeypatch.setattr("sm120kit.wheels.pipeline.build", compile_nothing)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SM120KIT_MEMORY", "64")
    result = run("build", "vllm@0.19.1", *options)
    assert type(result.exception) is error


@pytest.mark.parametrize("argument", ["vllm@0.19.1", "flashinfer@0.6.6"])
def test_memory_is_required_before_anything_is_fetched(argument: str, tmp_path: Path) -> None:
    result = run("build", argument, "--memory", "0.5", "--offline", SM120KIT_STATE=str(tmp_path))
    assert isinstance(result.exception, ResourceUnavailable)
    assert "0.5 GiB" in result.exception.message
    assert not {path.name for path in tmp_path.iterdir()} & {"work", "downloads", "bases"}


def test_progress_of_timed_cell_ends_with_the_next_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    displays = []
    progress = console.progress

    @contextmanager
    def recorded(**options: bool) -> Iterator[Any]:
        with progress(**options) as display:
            displays.append(display)
            yield display

    monkeypatch.setattr(console, "progress", recorded)
    with bench.case_progress(2) as case_begins:
        case_begins(Case(1, 64, 0), 0)()
        request_ended = case_begins(Case(4, 64, 0), 2)
        assert [task.finished for task in displays[0].tasks] == [False, True, False]
        request_ended()
        request_ended()
    assert [(task.finished, task.completed) for task in displays[0].tasks] == [(False, 1), (True, 1), (True, 2)]


def test_unencodable_characters_are_printed_as_escapes() -> None:
    argv = [sys.executable, "-m", "sm120kit", "config", "show", "qwen3.5-122b-int4-1x-dgx-spark"]
    plain = subprocess.run(argv, capture_output=True, text=True, encoding="utf-8", env=os.environ | {"PYTHONUTF8": "1"})
    assert "±" in plain.stdout
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xb1" in done.stdout


@dataclass(frozen=True)
class Group:
    size: Annotated[int, typer.Option("--size")]
    name: Annotated[str, typer.Option("--name")] = "none"


@dataclass(frozen=True)
class OtherGroup:
    name: Annotated[str, typer.Option("--name")] = "other"


def test_option_group_becomes_single_options() -> None:
    calls = []

    def function(
        word: Annotated[str, typer.Argument()], *, group: Group, last: Annotated[bool, typer.Option("--last")] = False
    ) -> None:
        """Help."""
        calls.append((word, group, last))

    expanded = expand_groups(function)
    common = [field.name for field in fields(Sources)]
    assert list(inspect.signature(expanded).parameters) == ["word", "size", "name", "last", *common]
    assert (expanded.__name__, expanded.__doc__) == ("function", "Help.")
    program = typer.Typer()
    program.command()(expanded)
    assert CliRunner().invoke(program, ["w", "--size", "2"]).exit_code == 0
    assert CliRunner().invoke(program, ["--last", "--name=n", "--size=3", "v"]).exit_code == 0
    assert calls == [("w", Group(2, "none"), False), ("v", Group(3, "n"), True)]
    assert CliRunner().invoke(program, ["w"]).exit_code == 2  # a field without a default is required


def test_option_groups_with_the_same_option_are_refused() -> None:
    def function(*, group: Group, other: OtherGroup) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'name'"):
        expand_groups(function)


def test_program_help_has_every_command_in_one_section() -> None:
    page, titles = run("-h").stdout, list(COMMANDS.sections)
    assert [line[:-1] for line in page.splitlines() if line[:-1] in titles] == titles and "\nCommands:" not in page
    listed = [name for names in COMMANDS.sections.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS.commands)


@pytest.mark.parametrize(
    ("words", "expected"), [(["build"], recipes.names()), (["serve"], configurations.names()), (["bench", "show"], ())]
)
def test_missing_argument_lists_what_there_is(words: list[str], expected: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert [line.strip() for line in result.stderr.splitlines() if line.startswith("  ")] == list(expected)


@pytest.mark.parametrize(
    ("words", "near"), [(["serve", "gpt-oss-20b-1x-rtx"], "gpt-oss-20b-1x-rtx-5090"), (["build", "vlm"], "vllm-0.33.0")]
)
def test_unknown_name_has_three_suggestions(words: list[str], near: str) -> None:
    error = run(*words).exception
    assert isinstance(error, NotFound) and near in error.hint
    assert 0 < sum(name in error.hint.replace(",", " ").split() for name in (*recipes.names(), *configurations.names())) <= 3


@pytest.mark.parametrize(
    "words",
    [
        ("--state", "{state}", "-q", "cache", "--json"),
        ("-q", "cache", "--state={state}", "--json"),
        ("--state={state}", "-C", "{directory}", "--offline", "cache", "--json"),
        ("cache", "--json", "--state", "{state}"),
    ],
)
def test_options_of_every_command_are_taken_before_and_after_its_name(words: tuple[str, ...], tmp_path: Path) -> None:
    argv = [word.format(state=tmp_path / "state", directory=tmp_path) for word in words]
    done = subprocess.run([sys.executable, "-m", "sm120kit", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == str(tmp_path / "state")


def test_options_of_every_command_are_taken_between_a_group_and_its_command() -> None:
    done = CliRunner().invoke(app, ["recipe", "--offline", "list", "-q"])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["recipe", "--json", "list"]).exit_code == 2
