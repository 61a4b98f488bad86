"""A maintainer's day on the current vLLM: each form in which a change arrives ends as a wheel with it, by commands of users.

The upstream wheel of 0.3 GB is fetched once, and each wheel is packed in seconds.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sm120kit.core.workspace import Workspace
from sm120kit.recipes.target import EngineTarget, resolve
from sm120kit.sources import wheelhouse
from sm120kit.sources.run_options import Options
from sm120kit.wheels._overlay import patched_members

RECIPE = "vllm-0.33.0"
FIXED, SECOND, THIRD = "vllm/connections.py", "vllm/logger.py", "vllm/tasks.py"
COMMENT = "# changed by a test\n"
COMPARED, UPSTREAM = (
    "vllm/distributed/device_communicators/symm_mem.py",
    ("inp_size < self.max_size", "inp_size <= self.max_size"),
)
"""A line of vLLM 0.20.0 that 0.33.0 has changed."""

DESCRIBED, BEFORE, AFTER = (
    "vllm/entrypoints/cli/benchmark/latency.py",
    "    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:\n",
    "    def add_cli_args(cls, parser: FlexibleArgumentParser) -> None:\n",
)
"""A line of vLLM 0.20.0, and what 0.33.0 has instead."""

ADDED = "        parser.description = cls.help\n"
IDENTITY = {f"GIT_{who}_{key}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}


@pytest.fixture(scope="module")
def target() -> EngineTarget:
    engine = resolve(RECIPE, Options(Workspace.open(None))).engine
    assert engine is not None
    return engine


@pytest.fixture(scope="module")
def upstream(target: EngineTarget) -> Path:
    (locked,) = (wheel for wheel in target.closure.wheels if wheel.name == "vllm")
    return wheelhouse((locked,), target.options.workspace, target.options.origin)[0]


@pytest.fixture(scope="module")
def sources(upstream: Path) -> dict[str, str]:
    """The Python files of the upstream wheel."""
    with zipfile.ZipFile(upstream) as wheel:
        return {name: wheel.read(name).decode() for name in wheel.namelist() if re.fullmatch(r"vllm/.+\.py", name)}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A repository of the user's own."""
    sm120kit("init", tmp_path / "own", cwd=tmp_path)
    return tmp_path / "own"


def sm120kit(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "sm120kit", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def git(*arguments: str, cwd: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | IDENTITY
    done = subprocess.run(["git", *arguments], cwd=cwd, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_first_line(clone: Path, *paths: str) -> None:
    """Commit another first line of each file, each in a commit of its own."""
    for path in paths:
        (clone / path).write_text(COMMENT + (clone / path).read_text())
        git("commit", "-qam", f"comment {path}", cwd=clone)


def clone_of(sources: dict[str, str], path: Path) -> Path:
    """A git repository of the engine with the release as a tag."""
    for name, text in sources.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    git("init", "-q", cwd=path)
    git("add", "-A", cwd=path)
    git("commit", "-qm", "release", cwd=path)
    git("tag", "v0.33.0", cwd=path)
    return path


def build(*options: str | Path, cwd: Path) -> Path:
    """Build the wheel by the command; its path."""
    written = cwd / "wheelhouse"
    sm120kit("build", RECIPE, "--kernels", "none", "--to", "pack", "--output", written, *options, cwd=cwd)
    (wheel,) = written.glob("vllm-*.whl")
    return wheel


def require_changed(wheel: Path, upstream: Path, target: EngineTarget, *paths: str) -> dict[str, object]:
    """Require that a wheel has the first line in ``paths`` and, but for the files of the series, the upstream members."""
    with zipfile.ZipFile(wheel) as after, zipfile.ZipFile(upstream) as before:
        assert after.testzip() is None
        sums = [{i.filename: i.CRC for i in each.infolist() if ".dist-info/" not in i.filename} for each in (before, after)]
        assert sums[0].keys() == sums[1].keys()
        changed = {name for name in sums[0] if sums[0][name] != sums[1][name]}
        assert target.engine_tree is not None
        assert changed == {*patched_members("vllm", target.engine_tree), *paths}
        assert all(after.read(path).decode().startswith(COMMENT) for path in paths)
        (record,) = (json.loads(after.read(name)) for name in after.namelist() if name.endswith("sm120kit.json"))
        return record


def test_one_line_fix_of_the_own_repository(own: Path, target: EngineTarget, upstream: Path) -> None:
    clone = own.parent / "clone"
    sm120kit("patch", "edit", RECIPE, "--into", clone, cwd=own)
    commit_first_line(clone, FIXED)
    sm120kit("patch", "export", RECIPE, "--from", clone, cwd=own)
    sm120kit("recipe", "lock", RECIPE, cwd=own)
    record = require_changed(build(cwd=own), upstream, target, FIXED)
    assert not record.get("local")


def test_plain_diff_of_a_colleague(tmp_path: Path, sources: dict[str, str], target: EngineTarget, upstream: Path) -> None:
    before = sources[FIXED].splitlines(keepends=True)
    name = Path(FIXED).relative_to("vllm").as_posix()
    (tmp_path / "fix.diff").write_text("".join(difflib.unified_diff(before, [COMMENT, *before], name, name)))
    record = require_changed(build("--patch", "fix.diff", cwd=tmp_path), upstream, target, FIXED)
    assert [patch["slug"] for patch in record["local"]] == ["fix"]


def test_mailbox_of_three_commits(tmp_path: Path, sources: dict[str, str], target: EngineTarget, upstream: Path) -> None:
    clone = clone_of(sources, tmp_path / "clone")
    commit_first_line(clone, FIXED, SECOND, THIRD)
    (tmp_path / "pr.mbox").write_text(git("format-patch", "--stdout", "v0.33.0", cwd=clone) + "\n")
    wheel = build("--patch", "pr.mbox", cwd=tmp_path)
    record = require_changed(wheel, upstream, target, FIXED, SECOND, THIRD)
    assert len(record["local"]) == 3


def test_commit_of_a_fork(own: Path, sources: dict[str, str], target: EngineTarget, upstream: Path) -> None:
    fork = clone_of(sources, own.parent / "fork")
    commit_first_line(fork, FIXED)
    commit = git("rev-parse", "HEAD", cwd=fork)
    source = f'\n[source]\ngit = "{fork}"\ncommit = "{commit}"\n'
    (own / "recipes" / f"{RECIPE}.toml").write_text(target.path.read_text() + source)
    sm120kit("recipe", "lock", RECIPE, cwd=own)
    record = require_changed(build(cwd=own), upstream, target, FIXED)
    assert record["pin"]["commit"] == commit


def test_own_patches_of_a_former_release(own: Path) -> None:
    """Of two patches of vLLM 0.20.0, 0.33.0 contains one, and the other conflicts: that is the only thing to decide."""
    clone, moved = own.parent / "clone", own.parent / "moved"
    sm120kit("patch", "edit", "vllm-0.20.0", "--into", clone, cwd=own)
    for path, before, after in ((COMPARED, *UPSTREAM), (DESCRIBED, BEFORE, BEFORE + ADDED)):
        text = (clone / path).read_text()
        assert before in text
        (clone / path).write_text(text.replace(before, after))
        git("commit", "-qam", f"change {Path(path).stem}", cwd=clone)
    sm120kit("patch", "export", "vllm-0.20.0", "--from", clone, cwd=own)

    argv = ["patch", "rebase", "vllm-0.20.0", "--onto", RECIPE, "--into", moved]
    stopped = subprocess.run([sys.executable, "-m", "sm120kit", *argv], cwd=own, capture_output=True, text=True)
    assert stopped.returncode == 30 and git("diff", "--name-only", "--diff-filter=U", cwd=moved) == DESCRIBED, stopped.stderr
    conflict = re.compile(r"<{7} .*?^>{7} [^\n]*\n", re.DOTALL | re.MULTILINE)
    (moved / DESCRIBED).write_text(conflict.sub(AFTER + ADDED, (moved / DESCRIBED).read_text()))
    git("add", DESCRIBED, cwd=moved)
    git("-c", "core.editor=true", "rebase", "--continue", cwd=moved)

    sm120kit("patch", "export", RECIPE, "--from", moved, cwd=own)
    series = (own / "patches" / "vllm" / "series").read_text().split()
    assert series == ["change-symm-mem", "change-latency", "change-latency--0.33.0"]
    with zipfile.ZipFile(build(cwd=own)) as wheel:
        assert AFTER + ADDED in wheel.read(DESCRIBED).decode()
