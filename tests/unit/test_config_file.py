"""Options from the configuration file: precedence, and every kind of error in the file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app, commands, config_file
from sm120kit.cli.tree import Command, Group
from sm120kit.core.errors import BadInput


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration file, which SM120KIT_CONFIG names."""
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("SM120KIT_CONFIG", str(path))
    return path


def values(*path: str) -> dict[str, Any]:
    """The values of the file for a command, by parameter."""
    command: Any = Group(branch=commands.COMMANDS, path=())
    for name in path:
        command = command.get_command(None, name)
    assert isinstance(command, Command)
    return config_file.values(path, command.settable(), {*commands.COMMANDS.commands})


def failure(*words: str, **env: str) -> str:
    result = CliRunner().invoke(app, list(words), env=env)
    return str(result.exception) if result.exit_code == 1 else result.output


def test_command_table_overrides_shared_keys(file: Path) -> None:
    file.write_text(
        'jobs = 3\nmirror = "~/mirror"\nquiet = true\n[build]\njobs = 4\narch = ["sm_120a"]\ndry-run = true\n[verify.kernels]\n'
    )
    home = str(Path.home())
    assert values("build") == {
        "jobs": 4,
        "mirror": f"{home}/mirror",
        "quiet": True,
        "arch": ["sm_120a"],
        "dry_run": True,
    }
    assert values("verify", "kernels") == {"jobs": 3, "mirror": f"{home}/mirror", "quiet": True}
    assert values("doctor") == {"quiet": True, "mirror": f"{home}/mirror"}


def test_precedence_command_line_environment_file(file: Path) -> None:
    file.write_text('[build]\nto = "file"\n')
    assert "'file'" in failure("build", "flashinfer")
    assert "'environment'" in failure("build", "flashinfer", SM120KIT_BUILD_TO="environment")
    assert "'line'" in failure("build", "flashinfer", "--to", "line", SM120KIT_BUILD_TO="environment")


def test_shared_variable_overrides_command_table(file: Path, tmp_path: Path) -> None:
    for name in ("file", "variable"):
        (tmp_path / name).write_text("")
    file.write_text(f'[patch.status]\nstate = "{tmp_path}/file"\n')
    assert f"{tmp_path}/file" in failure("patch", "status", SM120KIT_STATE="")
    assert f"{tmp_path}/variable" in failure("patch", "status", SM120KIT_STATE=f"{tmp_path}/variable")


def test_all_problems_are_reported_with_suggestions(file: Path) -> None:
    file.write_text('job = 3\nbuild-dir = 1\n[biuld]\njobs = 1\n[build]\nofline = true\narch = "sm_120a"\nto = ["x"]\n')
    with pytest.raises(BadInput) as caught:
        values("build")
    assert [line.strip() for line in caught.value.message.splitlines()] == [
        f"{file}:",
        "unknown key 'job'; did you mean 'jobs'?",
        "unknown key 'build-dir'; did you mean 'build'?",
        "unknown key 'biuld'; did you mean 'build'?",
        "unknown key 'ofline' for `sm120kit build`; did you mean 'offline'?",
        "'arch' for `sm120kit build` is 'sm_120a'; expected a list of values",
        "'to' for `sm120kit build` is ['x']; expected one value",
    ]


@pytest.mark.parametrize("content", ["build = 1\n", "[[build]]\n", "[build.jobs]\n", "patch = 1\n"])
def test_value_in_place_of_a_table(content: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(BadInput, match=r"build|patch"):
        values(*(("patch", "status") if "patch" in content else ("build",)))


@pytest.mark.parametrize("text", ["jobs = 0\n", '[build]\njobs = "many"\n'])
def test_invalid_value_names_the_file(file: Path, text: str) -> None:
    file.write_text(text)
    message = failure("build", "flashinfer")
    assert str(file) in message and "'jobs' for `sm120kit build`" in message


def test_value_that_the_command_refuses_names_what_sets_it(file: Path, tmp_path: Path) -> None:
    """A former ``cache``, which was the name of a repository."""
    words = ("build", "flashinfer", "--dry-run", "--state", str(tmp_path / "state"))
    assert "(from SM120KIT_CACHE)" in failure(*words, SM120KIT_CACHE="registry.example/cache").replace("\n", " ")
    file.write_text('cache = "registry.example/cache"\n')
    message = failure(*words)
    assert str(file) in message and "'cache' for `sm120kit build`: registry.example/cache is not a directory" in message


@pytest.mark.parametrize("content", [b"jobs = \n", b'mirror = "\xff"\n', b"jobs = " + b"9" * 5000, b"jobs = " + b"[" * 5000])
def test_file_is_not_toml(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(BadInput, match=f"{file} is not TOML"):
        values("build")


def test_file_is_unreadable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_CONFIG", str(file.parent))
    with pytest.raises(BadInput, match=f"cannot read {file.parent}: Is a directory"):
        values("build")
    monkeypatch.setenv("SM120KIT_CONFIG", str(file.parent / "absent.toml"))
    with pytest.raises(BadInput, match=r"absent\.toml, which does not exist"):
        values("build")


def test_user_file_is_read_but_not_for_help(tmp_path: Path) -> None:
    folder = tmp_path / "sm120kit"
    folder.mkdir()
    (folder / "config.toml").write_text("jbos = 1\n")
    env = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "SM120KIT_CONFIG": ""}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "sm120kit", *words], capture_output=True, text=True, env=env)

    refused = run("recipe", "list")
    assert refused.returncode == BadInput.exit_code
    assert "config.toml" in refused.stderr and "did you mean 'jobs'?" in refused.stderr and "hint:" in refused.stderr
    assert run("recipe", "list", "--help").returncode == run("--version").returncode == 0
    (folder / "config.toml").unlink()
    assert run("recipe", "list").returncode == 0


def test_documented_file_is_valid(file: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    file.write_text(example[1])
    assert values("build")["output"] == "dist"
    assert values("patch", "prove")["code"] is True
