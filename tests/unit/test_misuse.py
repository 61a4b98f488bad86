"""Every command with unusable input: no traceback, the value is named, the exit code is distinct, nothing is left behind."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from sm120kit import recipes
from sm120kit.cli import app, entry
from sm120kit.cli.commands import COMMANDS
from sm120kit.cli.tree import Branch
from sm120kit.core import errors
from sm120kit.core.console import printable
from sm120kit.core.data_roots import data_root
from sm120kit.core.workspace import MARKER, Workspace
from sm120kit.patches import checkout

REAL = subprocess.Popen
ROOT = typer.main.get_command(app)
CODES = {family.exit_code for family in errors.families()}
CONFIG = "qwen3.5-397b-nvfp4-4x-rtx-pro-6000"
NOWHERE = "http://127.0.0.1:9"

BASE = {
    "build": ["flashinfer", "--offline"],
    "explain": ["log.txt"],
    "kld": ["model", "model", "--text", "ids.json"],
    "serve": [CONFIG, "--model", "model"],
    "publish": ["image", "localhost/x"],
    "pull": ["vllm"],
    "tiles": ["flashinfer", "--offline"],
    "bench run": [NOWHERE],
    "bench show": ["log.txt"],
    "bench compare": ["log.txt", "log.txt"],
    "config show": [CONFIG],
    "cache": ["downloads", "--clean", "--dry-run"],
    "image export": ["image", "out.tar"],
    "image load": ["image"],
    "image rm": ["image"],
    "patch status": ["--offline"],
    "patch check": ["--offline"],
    "patch edit": ["flashinfer", "--into", "out", "--offline"],
    "patch export": ["flashinfer", "--from", "model"],
    "patch rebase": ["flashinfer", "--onto", "flashinfer", "--into", "out", "--offline"],
    "patch import": ["log.txt", "--offline"],
    "patch drop": ["no-such-patch", "--offline"],
    "patch prove": ["gdc-flags", "--offline"],
    "recipe lock": ["flashinfer", "--check", "--offline"],
    "recipe new": ["flashinfer@0.0", "--offline"],
    "recipe update": ["--offline"],
    "verify image": ["image"],
    "verify kernels": ["--offline"],
    "verify run": ["true"],
}
"""Valid arguments of each command, with which it reaches the invalid one and uses no network."""

OUTPUTS = {"build --cache", "doctor --html", "init directory"}
"""Options that take any directory, or whose file or directory is created under any new name, as that of --state is."""


def commands(branch: Branch = COMMANDS, group: Any = ROOT, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The name of each command, with its click object."""
    for name, child in branch.commands.items():
        path = f"{prefix} {name}".strip()
        if isinstance(child, Branch):
            yield from commands(child, group.get_command(None, name), path)
        else:
            yield path, group.get_command(None, name)


COMMAND = dict(commands())


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command in this process, in a directory with a file and a folder. Only git is on PATH, and no daemon runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(shutil.which("git") or "/usr/bin/git")
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "log.txt").write_text("nothing\n")
    (tmp_path / "here" / "link").symlink_to("nothing")
    (tmp_path / "here" / "ids.json").write_text("[]")
    for name in ("there.md", "there.tar"):
        (tmp_path / "here" / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    for name in [name for name in os.environ if name.startswith(("SM120KIT_", "DOCKER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("SM120KIT_DATA", str(data_root()))  # which may be written to, as in the clone itself
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-daemon")
    monkeypatch.setattr("sm120kit.core.process.subprocess.Popen", REAL)

    def run_command(*words: str) -> Result:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", mode) for mode in ("strict", "backslashreplace"))
        monkeypatch.setattr(sys, "argv", ["sm120kit", *words])
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        code = entry.run(ROOT)
        for stream in (out, err):
            stream.flush()
        return Result(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]

    return run_command


def refused(result: Result, *named: str, base: Result | None = None, codes: set[int] = CODES) -> None:
    """Require a usage error, or an error with a hint, that contains one of ``named``.

    The result may also equal ``base``, that of the valid arguments, where the command ends before it reads the value.
    """
    if base is not None and (result.code, result.err) == (base.code, base.err):
        return
    assert result.code in codes | {2}, result
    assert "Traceback" not in result.err, result
    assert "error: " in result.err and "\nhint: " in result.err, result
    shown = [printable(text).encode("utf-8", "backslashreplace").decode() for text in named]
    assert any(text in result.err for text in (*shown, *(repr(text)[1:-1] for text in named))), (named, result)


def test_families_are_distinct_and_few() -> None:
    families = errors.families()
    assert len({family.exit_code for family in families}) == len({family.kind for family in families}) == len(families) <= 16
    assert all(10 <= family.exit_code < 126 for family in families)


def files(tmp_path: Path) -> set[Path]:
    """All files but those of the state directory."""
    return {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "state")}


# ---- values of every argument and option

NAMES = ["../no-such-thing", "x" * 300, "%s{0} b", "\udcff", "-", "no\nline"]
NUMBERS = ["", "x", "-1", "0", "1e400", "nan", "9" * 400]
DEEP = 100_000
CONTENTS = {
    "empty": b"",
    "binary": bytes(range(256)) * 16,
    "one long line": b"x" * 200_000,
    "not UTF-8": b"\xff\xfe key = 1\n",
    "deep JSON": b"[" * DEEP,
    "deep and whole JSON": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep TOML": b"a = " + b"[" * DEEP,
    "list": b"[]",
    "object": b"{}",
    "null": b"null",
    "infinite": b'{"format": 1e999, "results": [1e999], "x": NaN}',
    "rows": b'[{"system_tps": 1, "concurrency": 0, "output_len": [], "total_tokens": 1e999, "time": null}]',
}
KINDS = {
    ".toml": ["empty", "binary", "one long line", "not UTF-8", "deep TOML"],
    ".patch": ["empty", "binary", "one long line"],
}
"""Contents for files of each format; other files may be JSON."""

PLACES = ["missing", "a directory", "a link to nothing", "a link to itself", "a device", "a name too long"]
SHARED = {"--state", "--mirror", "--index-url", "--find-links", "--index", "--jobs", "--memory", "--trust", "--api-key"}
"""Options with the same meaning everywhere: they are tested with two commands."""


def make(kind: str, directory: Path, suffix: str) -> Path:
    """An unusable file."""
    path = directory / f"{kind.replace(' ', '-')}{suffix}"
    if kind == "a directory":
        path.mkdir()
    elif kind in ("a link to nothing", "a link to itself", "a device"):
        path.symlink_to({"a link to itself": path.name, "a device": "/dev/null"}.get(kind, "nothing"))
    elif kind == "a name too long":
        path = directory / f"{'x' * 300}{suffix}"
    elif kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
    return path


def parameters() -> Iterator[tuple[str, Any]]:
    count: dict[str, int] = {}
    for command, definition in COMMAND.items():
        for param in definition.params:
            name = param.opts[0]
            count[name] = count.get(name, 0) + 1
            if not getattr(param, "is_flag", False) and param.name != "help" and (name not in SHARED or count[name] <= 2):
                yield command, param


def named(pair: object) -> str:
    return pair if isinstance(pair, str) else pair.opts[0]  # type: ignore[attr-defined, no-any-return]


def suffix_of(param: Any) -> str | None:
    """The suffix of the files that a parameter takes; None if it does not take a file."""
    if param.metavar in ("ENGINE", "RECIPE", "CONFIG", "CONFIG|URL", "WORKLOAD"):
        return ".toml"
    if param.metavar == "PATCH":
        return ".patch"
    return ".json" if "Path" in str(param.type_descriptor.annotation) else None


def words(command: str, param: Any, value: str) -> list[str]:
    """A command line with ``value`` for one parameter instead of its value in BASE."""
    base = list(BASE.get(command, []))
    if param.param_type_name == "option":
        for name in param.opts:
            if name in base:
                del base[base.index(name) : base.index(name) + 2]
        return [*command.split(), *base, f"{param.opts[0]}={value}"]
    arguments = []
    while base and not base[0].startswith("-"):
        arguments.append(base.pop(0))
    position = [each for each in COMMAND[command].params if each.param_type_name == "argument"].index(param)
    arguments[position : position + 1] = [value]
    return [*command.split(), *base, "--", *arguments]


@pytest.mark.parametrize(("command", "param"), [*parameters()], ids=named)
def test_unusable_value(command: str, param: Any, run: Run, tmp_path: Path) -> None:
    base = run(*command.split(), *BASE.get(command, []))
    before = files(tmp_path)
    number = param.type_descriptor.annotation in (int, float)
    reached = number
    for value in NUMBERS if number else NAMES:
        result = run(*words(command, param, value))
        reached |= result != base
        if not reached and value != NAMES[0]:
            break
        if param.opts[0] != "--state" and f"{command} {param.opts[0]}" not in OUTPUTS:
            refused(result, value, *param.opts[:1], base=base)
            assert files(tmp_path) == before


@pytest.mark.parametrize(("command", "param"), [pair for pair in parameters() if suffix_of(pair[1])], ids=named)
def test_unusable_file(command: str, param: Any, run: Run, tmp_path: Path) -> None:
    base = run(*command.split(), *BASE.get(command, []))
    suffix = suffix_of(param) or ""
    reached = False
    for kind in [*PLACES, *KINDS.get(suffix, CONTENTS)]:
        path = make(kind, tmp_path, suffix)
        before = files(tmp_path)
        result = run(*words(command, param, str(path)))
        reached |= result != base
        if not reached and kind != PLACES[0]:
            break
        if param.opts[0] != "--state" and f"{command} {param.opts[0]}" not in OUTPUTS:
            refused(result, path.stem, *param.opts[:1], base=base)
            assert files(tmp_path) == before


@pytest.mark.parametrize("command", COMMAND)
def test_missing_and_extra_arguments(command: str, run: Run) -> None:
    base = BASE.get(command, [])
    refused(run(*command.split(), *base, "--no-such-option"), "--no-such-option", codes=set())
    if any(param.required for param in COMMAND[command].params):
        refused(run(*command.split()), "missing argument", "missing option", codes=set())
    arguments = [param for param in COMMAND[command].params if param.param_type_name == "argument"]
    if all(param.nargs == 1 for param in arguments):
        extra = ["x"] * (len(arguments) - sum(not word.startswith("-") for word in base)) + ["extra"]
        refused(run(*command.split(), *base, *extra), "extra", codes=set())


# ---- unusable environments

IN_ENVIRONMENT = [
    "build flashinfer --offline",
    "patch status --offline",
    "recipe list",
    "config list",
    f"bench run {NOWHERE}",
    "doctor",
]


@pytest.mark.parametrize("state", ["/proc/state", "/dev/null/state", "log.txt", "/proc"])
@pytest.mark.parametrize("command", ["build flashinfer --offline", "patch status --offline", "pull vllm --index log.txt"])
def test_state_directory_unwritable(command: str, state: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_STATE", state)
    refused(run(*command.split()), Path(state).name, codes={21 if state == "/proc" else 42})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_file_and_state_permissions(run: Run, tmp_path: Path) -> None:
    """BadInput files, and a read-only state directory."""
    for suffix, command in ((".toml", "recipe check"), (".toml", "config show"), (".json", "bench show")):
        path = tmp_path / f"unreadable{suffix}"
        path.touch()
        path.chmod(0)
        refused(run(*command.split(), str(path)), path.name)
    (tmp_path / "state").mkdir(mode=0o500)
    refused(run("build", "flashinfer", "--offline"), "state", codes={42})


@pytest.mark.parametrize("data", ["/nonexistent", "log.txt", "model"])
@pytest.mark.parametrize("command", IN_ENVIRONMENT)
def test_data_directory_unusable(command: str, data: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_DATA", data)
    base = Result(1, "", "") if command == "doctor" else None  # it reads only the host
    refused(run(*command.split()), data, base=base, codes={10})


@pytest.mark.parametrize("command", IN_ENVIRONMENT)
def test_directories_with_spaces_and_non_ascii_names(
    command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run(*command.split())
    directory = tmp_path / "mäßig ☃ %s {x}"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("SM120KIT_STATE", str(directory / "der Zustand"))
    result = run(*command.split())
    assert result.code == base.code
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", IN_ENVIRONMENT)
@pytest.mark.parametrize("missing", ["HOME", "cwd", "TMPDIR"])
def test_missing_home_cwd_or_tmpdir(
    command: str, missing: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run(*command.split())
    if missing == "HOME":
        for name in ("HOME", "XDG_CONFIG_HOME", "SM120KIT_STATE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    elif missing == "TMPDIR":
        monkeypatch.setenv("TMPDIR", "/proc")
    else:
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
    result = run(*command.split())
    assert result.code in {base.code, *CODES}
    assert "Traceback" not in result.err


def test_user_without_home_directory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "SM120KIT_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as of a user that is not in the password database
    refused(run("build", "flashinfer", "--offline"), "no home directory", codes={42})
    assert not Path("~").exists()


def test_no_writable_temporary_directory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/nonexistent"])
    refused(run("patch", "export", "flashinfer", "--from", "model"), "/nonexistent", codes={42})


# ---- damaged files of the state and data directories


@pytest.mark.parametrize("kind", CONTENTS)
def test_damaged_state_record(kind: str, run: Run, tmp_path: Path) -> None:
    recipe = recipes.load_flashinfer("flashinfer")
    record = checkout.record_path(recipe.pin, recipe.inside, Workspace(tmp_path / "state"), checkout.series_files())
    record.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "state").chmod(0o700)
    (tmp_path / "state" / MARKER).touch()
    record.write_bytes(CONTENTS[kind])
    refused(run("build", "flashinfer", "--offline", "--to", "patch"), record.name, codes={11})


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize(
    ("file", "command", "code"),
    [
        ("recipes/engines/flashinfer-0.6.6.lock.json", "recipe lock flashinfer-0.6.6 --check --offline", 12),
        ("recipes/engines/vllm-0.19.1.arguments.json", "config check", 11),
        ("recipes/configurations/m.toml", "config show m", 11),
        ("recipes/engines/flashinfer-0.6.6.toml", "recipe check", 11),
        ("recipes/workloads/quick.toml", "bench run 127.0.0.1:9", 11),
        ("patches/cutlass/series", "patch drop gdc-flags", 11),
    ],
)
def test_damaged_data_file(
    kind: str, file: str, command: str, code: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("recipes", "patches"):
        shutil.copytree(data_root() / name, data / name)
    (data / file).write_bytes(CONTENTS[kind])
    monkeypatch.setenv("SM120KIT_DATA", str(data))
    refused(run(*command.split()), Path(file).name.partition(".")[0], "x" * 50, codes={code, 42})


# ---- single cases

CASES = {
    "bench show /dev/zero": (11, "/dev/zero: it has more than 64 MiB"),
    f"bench run {NOWHERE} --api-key @/dev/zero": (2, "cannot read /dev/zero: it has more than 64 MiB"),
    "verify server http://127.0.0.1:9 --reference http://127.0.0.1:9 --reference-api-key @/dev/zero": (
        2,
        "--reference-api-key",
    ),
    "publish image localhost:9/x --key /dev/zero": (11, "cannot read the private key /dev/zero: it has more than 64 MiB"),
    "patch import /dev/zero": (11, "/dev/zero cannot be read: it has more than 64 MiB"),
    "pull x --index typo.json": (11, "the index typo.json does not exist"),
    f"bench run {NOWHERE} --given gpus=2": (2, "unknown name 'gpus'; did you mean 'gpu'?"),
    f"bench run {NOWHERE} --model x": (2, "give a CONFIG"),
    "build flashinfer --memory 1e400": (2, "inf is not a finite number"),
    "build flashinfer --memory nan": (2, "nan"),
    "build flashinfer --memory=-1": (2, "'-1'"),
    "build flashinfer --memory 0": (2, "'0'"),
    "build flashinfer --cache-push": (2, "--cache-push requires --cache"),
    "build flashinfer --cache nowhere": (2, "nowhere is not a directory"),
    "build flashinfer --offline -o log.txt": (42, "cannot write to log.txt: Not a directory"),
    "build flashinfer --offline -o link": (42, "cannot write to link: No such file or directory"),
    "build flashinfer --offline -o log.txt/below": (42, "cannot write to log.txt/below: Not a directory"),
    "serve model/mine.toml": (10, "no configuration file model/mine.toml: it does not exist"),
    "serve model/a/b": (10, "no configuration file model/a/b: it does not exist"),
    "plan mine": (10, "no configuration 'mine'"),
    "config new --from /dev/zero": (11, "/dev/zero: it has more than 1 MiB"),
    "config new --from log.txt": (11, "log.txt: no command starts a server"),
    "config show ../here": (10, "no configuration file ../here: it is a directory"),
    "explain /dev/zero": (11, "cannot read /dev/zero: is a device"),
    "kld model --save log.txt": (42, "log.txt exists\nhint: choose another file with --save, or add --overwrite"),
    "kld model model -o log.txt": (42, "log.txt exists\nhint: choose another file with --output, or add --overwrite"),
    "verify kernels --receipt log.txt --offline": (42, "log.txt exists\nhint: choose another file with --receipt"),
    "verify ptx --instructions --receipt log.txt": (42, "log.txt exists"),
    "verify ptx log.txt --ptx log.txt": (42, "log.txt exists\nhint: choose another file with --ptx, or add --overwrite"),
    "verify ptx log.txt --cubin ids.json": (42, "ids.json exists"),
    "verify run --receipt log.txt true": (42, "log.txt exists"),
    "bench show log.txt -o there.md": (42, "there.md exists\nhint: choose another file with --output, or add --overwrite"),
    "image export image there.tar": (42, "there.tar exists\nhint: choose another file with PATH, or add --overwrite"),
    "doctor --python python3.12": (2, "invalid value for --python: it runs the measurements: add --measure"),
    "image list --index images.json": (2, "invalid value for --index: an index lists images in registries: add --remote"),
    "patch check no-such-recipe": (10, "no-such-recipe"),
    "patch drop gdc-flag": (10, "no series has a patch 'gdc-flag'"),
    "patch drop cutlass/gdc-flags": (10, "no series has a patch"),
    "patch import log.txt": (11, "log.txt contains no diff"),
    "patch import nowhere.patch": (11, "nowhere.patch cannot be read"),
    "recipe check flashinfr": (10, "did you mean"),
}


@pytest.mark.parametrize("command", CASES)
def test_single_cases(command: str, run: Run, tmp_path: Path) -> None:
    code, text = CASES[command]
    before = files(tmp_path)
    result = run(*command.split())
    assert result.code == code and text in result.err and "Traceback" not in result.err, result
    assert not result.out and files(tmp_path) == before
