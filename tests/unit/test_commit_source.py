"""A commit of an engine's repository as its source: its Python files on the locked wheel, if what is compiled is equal."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from locked_engine import FILES, LAYERS, Site
from patch_series import KERNEL, changed, patch_text
from small_engine import make_wheel

from sm120kit import recipes, sources
from sm120kit.core.errors import BadInput, FetchFailed, Mismatch, NotFound, NotTrusted, OfflineMiss, Sm120kitError
from sm120kit.patches import edit
from sm120kit.recipes import lockfile
from sm120kit.recipes.target import EngineTarget, resolve
from sm120kit.sources import git
from sm120kit.sources.git import Repository
from sm120kit.wheels._overlay import build_overlay

NATIVE = {
    "csrc/a.cu": "kernel\n",
    "CMakeLists.txt": "project(vllm)\n",
    "setup.py": "setup()\n",
    "rust/src/lib.rs": "fn a() {}\n",
}
PYTHON = {name: text for name, text in FILES.items() if name.endswith(".py")} | {"vllm/__init__.py": "one = 1\n"}
RELEASE = {**PYTHON, **NATIVE, "tests/test_a.py": "pass\n", "tests/a.cu": "test\n", "vllm/not_packed.py": "x = 1\n"}


class Fork:
    """A git repository of the small vLLM whose tag ``v7.0`` is the release of the wheel."""

    def __init__(self, path: Path, top: str = "") -> None:
        self.path, self.top = path, top
        self.git("init", "-q", "-b", "main", str(path), cwd=path.parent)
        self.release = self.commit(RELEASE)
        self.git("tag", "v7.0")

    def git(self, *arguments: str, cwd: Path | None = None) -> str:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        identity = {f"GIT_{who}_{key}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
        options = {"cwd": cwd or self.path, "env": variables | identity, "check": True, "text": True}
        return subprocess.run(["git", *arguments], stdout=subprocess.PIPE, **options).stdout.strip()

    def commit(self, files: dict[str, str | None]) -> str:
        for name, text in files.items():
            file = self.path / self.top / name if name.startswith("vllm/") else self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            if text is not None:
                file.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "change")
        return self.git("rev-parse", "HEAD")


class Engine(Site):
    """The locked engine, whose recipe may name a commit of a fork."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        files = {name: text.encode() for name, text in {**FILES, **PYTHON, "vllm/_version.py": "7\n"}.items()}
        make_wheel(self.mirror, "vllm", "7.0", "cp38-abi3-linux_x86_64", files=files)
        self.lock()
        self.recipe = self.recipes / "vllm-7.0.toml"
        self.plain = self.recipe.read_text()
        self.fork = Fork(self.mirror / "vllm.git")

    def pin(self, commit: str, url: str = "https://example.com/me/vllm.git") -> EngineTarget:
        self.recipe.write_text(f'{self.plain}\n[source]\ngit = "{url}"\ncommit = "{commit}"\n')
        target = resolve("vllm-7.0", self.options).engine
        assert target is not None
        return target

    def wheel(self, *patches: Path) -> dict[str, bytes]:
        self.lock()
        target = self.target(*patches)
        repacked = build_overlay(target, target.engine_tree)
        assert repacked is not None
        with zipfile.ZipFile(repacked.wheel) as wheel:
            assert wheel.testzip() is None
            return {name: wheel.read(name) for name in wheel.namelist()}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
    return Engine(tmp_path)


MINE = {LAYERS: changed(KERNEL, 25, "mine\n"), "vllm/new.py": "new = 1\n", "vllm/other.py": None, "README.md": "mine\n"}


def test_python_files_of_a_commit_are_in_the_wheel(engine: Engine) -> None:
    target = engine.pin(engine.fork.commit({**MINE, "tests/a.cu": "changed\n", "vllm/not_packed.py": "x = 2\n"}))
    engine.lock()
    files = engine.wheel()
    package = {name: content.decode() for name, content in files.items() if name.startswith("vllm/")}
    expected = {**FILES, **PYTHON, "vllm/_version.py": "7\n", **MINE}
    assert package == {name: text for name, text in expected.items() if text is not None and name.startswith("vllm/")}
    (record,) = (json.loads(content) for name, content in files.items() if name.endswith("sm120kit.json"))
    assert record["pin"]["commit"] == engine.fork.git("rev-parse", "HEAD") and record["patches"] == []
    assert record["pin"]["sha256"] == next(w.sha256 for w in target.closure.wheels if w.name == "vllm")


def test_commit_and_its_tree_are_locked_and_the_url_is_not(engine: Engine) -> None:
    target = engine.pin(commit := engine.fork.commit(MINE))
    engine.lock()
    lock = lockfile.read(target.lock_path)
    (source,) = (source for source in lock.sources if source.project == "vllm")
    assert source.pinned.split()[:2] == ["commit", commit] and target.source and source.tree == target.source.checkout.tree
    build_id = resolve("vllm-7.0", engine.options).build_id
    engine.pin(commit, url=f"file://{engine.fork.path}")
    assert resolve("vllm-7.0", engine.options).build_id == build_id
    engine.pin(engine.fork.commit({"vllm/new.py": "new = 2\n"}))
    with pytest.raises(Mismatch, match="outdated"):
        assert resolve("vllm-7.0", engine.options).build_id


@pytest.mark.parametrize("form", ["path", "file URL", "mirror", "bundle"])
def test_repository_is_local_or_in_a_mirror(form: str, engine: Engine, tmp_path: Path) -> None:
    commit, elsewhere = engine.fork.commit(MINE), tmp_path / "elsewhere"
    url = {"path": str(elsewhere), "file URL": f"file://{elsewhere}"}.get(form, "https://example.com/me/vllm.git")
    if form == "bundle":
        engine.fork.git("bundle", "create", str(engine.mirror / "vllm.bundle"), "--all")
    if form != "mirror":
        engine.fork.path.rename(elsewhere)
    target, options = engine.pin(commit, url=url), engine.options
    assert target.source is not None
    sources.wheelhouse(target._wheels, options.workspace, options.origin)
    origin = options.origin if form in ("mirror", "bundle") else sources.Origin(offline=True)
    checkout = sources.fetch(target.source.pin, options.workspace, origin)
    assert Repository(checkout.repository).read(checkout.commit, "vllm/new.py") == b"new = 1\n"
    assert sources.fetch(target.source.pin, options.workspace, sources.Origin(offline=True)) == checkout, "cached"


def test_series_and_local_patches_are_above_the_commit(engine: Engine, tmp_path: Path) -> None:
    base = {LAYERS: str(MINE[LAYERS])}
    engine.put("vllm", "ten", patch_text(engine.patches.edit(LAYERS, 10, "ten\n", base, ""), "vllm", "==7.0"))
    engine.pin(engine.fork.commit(MINE))
    engine.lock()
    local = engine.diff("local.diff", LAYERS, 12, {LAYERS: changed(base[LAYERS], 10, "ten\n")})
    text = changed(changed(base[LAYERS], 10, "ten\n"), 12, "local.diff\n")
    assert engine.wheel(local)[LAYERS].decode() == text
    target = engine.target()
    assert target.source is not None
    edit(target.source.series_tree, into := tmp_path / "edit", "vllm-7.0", b"key")
    assert (into / LAYERS).read_text() == changed(base[LAYERS], 10, "ten\n")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"csrc/a.cu": "other\n"}, ["csrc/a.cu"]),
        ({"csrc/new.cuh": "new\n"}, ["csrc/new.cuh"]),
        ({"csrc/a.cu": None}, ["csrc/a.cu"]),
        ({"CMakeLists.txt": "other\n", "setup.py": "other()\n"}, ["CMakeLists.txt", "setup.py"]),
        ({"rust/src/lib.rs": "fn b() {}\n", "rust/Cargo.toml": "x\n"}, ["rust/Cargo.toml", "rust/src/lib.rs"]),
        ({"cmake/x.cmake": "x\n", "requirements.txt": "x\n"}, ["cmake/x.cmake"]),
    ],
)
def test_changed_native_files_are_listed_and_nothing_is_left(
    change: dict[str, str | None], named: list[str], engine: Engine
) -> None:
    commit = engine.fork.commit({**MINE, **change})
    target = engine.pin(commit)
    assert target.source is not None
    with pytest.raises(Mismatch) as error:
        sources.fetch(target.source.pin, engine.options.workspace, engine.options.origin)
    assert error.value.message.splitlines()[1:] == [f"  {name}" for name in named]
    assert commit in error.value.message and "tag v7.0" in error.value.message
    assert not [path for path in (engine.root / "state/checkouts").iterdir() if path.name.startswith("vllm")]


def test_a_fork_without_the_tag_of_the_release_is_refused(engine: Engine) -> None:
    commit = engine.fork.commit(MINE)
    engine.fork.git("tag", "-d", "v7.0")
    target = engine.pin(commit)
    with pytest.raises(NotFound, match=r"no tag v7\.0") as error:
        assert target.engine_tree
    assert "v7.0" in error.value.hint


def test_package_may_be_in_a_directory(engine: Engine, tmp_path: Path) -> None:
    """As ``python/sglang``; JIT sources in the package are a part of it, and those elsewhere are compiled."""
    engine.fork.path.rename(tmp_path / "old")
    fork = Fork(engine.fork.path, "python")
    engine.pin(fork.commit(MINE))
    assert engine.wheel()["vllm/new.py"] == b"new = 1\n"


def test_sources_beside_those_in_the_wheel_are_files_of_the_package(engine: Engine) -> None:
    files = {name: text.encode() for name, text in {**FILES, **PYTHON, "vllm/jit/a.cuh": "a\n"}.items()}
    make_wheel(engine.mirror, "vllm", "7.0", "cp38-abi3-linux_x86_64", files=files)
    engine.lock()
    engine.fork.commit({"vllm/jit/a.cuh": "a\n"})
    engine.fork.git("tag", "-f", "v7.0")
    engine.pin(engine.fork.commit({"vllm/jit/a.cuh": "b\n", "vllm/jit/new.cuh": "c\n"}))
    assert engine.wheel()["vllm/jit/a.cuh"] == b"b\n" and engine.wheel()["vllm/jit/new.cuh"] == b"c\n"


def test_links_and_commits_are_left_out(engine: Engine) -> None:
    engine.fork.commit(MINE)
    (engine.fork.path / "vllm/link.py").symlink_to("/etc/passwd")
    engine.fork.git("add", "-A")
    engine.fork.git("update-index", "--add", "--cacheinfo", f"160000,{engine.fork.release},docs/sub")
    engine.fork.git("commit", "-qm", "links")
    engine.pin(engine.fork.git("rev-parse", "HEAD"))
    assert "vllm/link.py" not in engine.wheel()
    engine.fork.git("update-index", "--add", "--cacheinfo", f"160000,{engine.fork.release},csrc/sub")
    engine.fork.git("commit", "-qm", "submodule that may be compiled")
    with pytest.raises(Mismatch, match="csrc/sub"):
        assert engine.pin(engine.fork.git("rev-parse", "HEAD")).engine_tree


def test_wheel_of_another_tree_than_the_tag_is_refused(engine: Engine) -> None:
    engine.fork.commit({"vllm/srt/deep.py": "other\n"})
    engine.fork.git("tag", "-f", "v7.0")
    with pytest.raises(Mismatch, match=r"tag v7\.0 is not what[^\n]*\n  vllm/srt/deep\.py"):
        assert engine.pin(engine.fork.commit(MINE)).engine_tree


def absent(engine: Engine) -> str:
    return "0" * 40


def a_tag(engine: Engine) -> str:
    engine.fork.git("tag", "-a", "annotated", "-m", "x")
    return engine.fork.git("rev-parse", "annotated")


def other_project(engine: Engine) -> str:
    return engine.fork.commit({"vllm/__init__.py": None})


def large_file(engine: Engine) -> str:
    return engine.fork.commit({"vllm/large.py": "#" * 5_000_000})


@pytest.mark.parametrize(
    ("make", "error"), [(absent, FetchFailed), (a_tag, FetchFailed), (other_project, BadInput), (large_file, BadInput)]
)
def test_unusable_commit_is_refused(make: Callable[[Engine], str], error: type[Sm120kitError], engine: Engine) -> None:
    commit = make(engine)
    with pytest.raises(error, match=commit) as raised:
        assert engine.pin(commit).engine_tree
    assert raised.value.hint
    assert not [path for path in (engine.root / "state/checkouts").iterdir() if path.name.startswith("vllm")]


def test_fetch_from_a_server_that_never_answers_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    target, options = engine.pin(engine.fork.commit(MINE)), engine.options
    sources.wheelhouse(target._wheels, options.workspace, options.origin)
    monkeypatch.setattr(git, "MAX_FETCH_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(FetchFailed, match="took more than"):
        assert target.source is not None
        sources.fetch(target.source.pin, options.workspace, sources.Origin(f"http://127.0.0.1:{server.getsockname()[1]}"))


def test_offline_without_a_mirror_names_the_commit(engine: Engine) -> None:
    target = engine.pin(engine.fork.commit(MINE))
    assert target.source is not None
    sources.wheelhouse(target._wheels, engine.options.workspace, engine.options.origin)
    with pytest.raises(OfflineMiss, match=engine.fork.git("rev-parse", "HEAD")) as error:
        sources.fetch(target.source.pin, engine.options.workspace, sources.Origin(offline=True))
    assert "vllm.git" in error.value.hint


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('git = "https://x.org/a/b"\ncommit = "main"', "source.commit: 'main' is not a commit"),
        ('git = "https://x.org/a/b"', "source.commit: missing"),
        (f'git = "https://u:p@x.org/a/b"\ncommit = "{"0" * 40}"', "source.git: has credentials"),
        (f'git = "https://x.org/a/b"\ncommit = "{"0" * 40}"\nwhel = "x"', "source.whel: unknown key"),
    ],
)
def test_problem_of_the_table_is_reported(source: str, message: str, engine: Engine) -> None:
    engine.recipe.write_text(f"{engine.plain}\n[source]\n{source}\n")
    with pytest.raises(BadInput, match=re.escape(message)):
        recipes.load("vllm-7.0")


def test_sdist_of_the_first_edition_is_ignored(engine: Engine) -> None:
    engine.recipe.write_text(f'{engine.plain}\n[source]\ngit = "x"\ncommit = "{"0" * 40}"\nsdist = "{"0" * 64}"\n')
    assert "sdist" not in recipes.load("vllm-7.0").model_dump()["source"]


def test_url_that_runs_a_program_is_refused(engine: Engine) -> None:
    target = engine.pin(engine.fork.commit(MINE), url="ext::sh -c true")
    assert target.source is not None
    with pytest.raises(NotTrusted, match="ext::"):
        sources.fetch(target.source.pin, engine.options.workspace, engine.options.origin)
