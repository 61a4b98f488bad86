"""Unit tests run no programs but git, Python, /bin/sh and those that a test writes itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ALLOWED = {"git", sys.executable, "/bin/sh"}


@pytest.fixture(autouse=True)
def _only_registered_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = subprocess.Popen

    def guarded(argv: Any, *args: Any, **kwargs: Any) -> Any:
        program = str(argv[0])
        if program not in ALLOWED and not program.startswith(str(tmp_path)):
            raise AssertionError(f"a unit test runs {program}: use a program of its own, or make it an integration test")
        return real(argv, *args, **kwargs)

    monkeypatch.setattr("sm120kit.core.process.subprocess.Popen", guarded)
    monkeypatch.setattr("sm120kit.core.toolchain.installed", list)  # each `build` asks compilers for their versions


@pytest.fixture
def hostile_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory whose git configuration signs, converts and rewrites everything, and has failing hooks."""
    home = tmp_path / "hostile"
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("post-index-change", "reference-transaction", "pre-commit", "commit-msg"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / ".gitconfig").write_text(
        f"""[user]
name = Somebody Else
email = else@example.invalid
signingkey = nobody
[commit]
gpgSign = true
template = {home}/nothing-here
[core]
autocrlf = true
eol = crlf
hooksPath = {hooks}
fileMode = false
symlinks = false
[i18n]
commitEncoding = latin1
[init]
templateDir = {home}/hooks
defaultObjectFormat = sha256
"""
    )
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/attributes").write_text("* text eol=crlf\n")
    (home / ".config/git/ignore").write_text("*\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Third Person")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_DIR", str(home / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(home / "index"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", "/proc/nowhere")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "commit.gpgSign")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    return home
