"""Moving a series to another version: merges, conflicts, interruptions, and the files that are written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from patch_series import (
    BASE,
    BUILDER,
    CUTLASS,
    KERNEL,
    KEY,
    LAUNCHER,
    VERSION_H,
    PatchDirectory,
    changed,
    checkout_of,
    git_in,
    inside,
    patch_text,
    two_projects,
    version_h,
)

from sm120kit import patches
from sm120kit.core.errors import BadInput, Mismatch, PatchConflict, SystemRefused
from sm120kit.patches import ranges
from sm120kit.patches.edits import EditRecord
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.patches.rebase import SeriesMove, abort, begin, recipes_of, resume
from sm120kit.patches.rebase_directory import MoveState
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin, VendoredProject

NAMES = ("flashinfer-0.6.6", "flashinfer-0.7.2")
NEW = {**BASE, VERSION_H: version_h("4.5.0"), "new.py": "new\n"}
"""The files of the new version; tests change them further."""


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    return PatchDirectory(tmp_path)


def move_of(patch_dir: PatchDirectory, files: dict[str, str] = NEW, path: str = CUTLASS, **pinned: set[str]) -> SeriesMove:
    """The move of the series from FlashInfer 0.6.6 with CUTLASS 4.2.1 to 0.7.2 with 4.5.0, at ``path``."""
    old = checkout_of(patch_dir.path / "old-repository", BASE)
    onto = checkout_of(patch_dir.path / "new-repository", files, "0.7.2")
    tree = patches.apply(old, inside(), patch_dir.root, patch_dir.overrides)
    unpatched = PatchedTree(onto, (VendoredProject("cutlass", path, "4.5.0"),), onto.commit, onto.tree, ())
    return SeriesMove(tree, unpatched, NAMES, patch_dir.root, patch_dir.overrides, KEY, pinned)


def states(moves: Sequence[object]) -> dict[str, str]:
    return {move.name: str(move.state) for move in moves}  # type: ignore[attr-defined]


def applied(move: SeriesMove) -> tuple[str, str]:
    """The trees of both versions with the present series."""
    old = patches.apply(move.old.checkout, move.old.inside, move.root, move.overrides)
    return old.tree, patches.apply(move.onto.checkout, move.onto.inside, move.root, move.overrides).tree


def applies_to(patch_dir: PatchDirectory) -> dict[str, str]:
    loaded = [patch for project in patches.projects(patch_dir.root) for patch in patches.load(patch_dir.root, project)]
    return {patch.name: patch.trailer("Applies-To").partition(" ")[2] for patch in loaded}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def output(directory: Path, *arguments: str) -> str:
    """What git prints in a directory, as a developer runs it."""
    return subprocess.run(["git", "-C", directory, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def tree_in(directory: Path) -> str:
    return output(directory, "rev-parse", "refs/heads/series^{tree}")


def conflicting(patch_dir: PatchDirectory) -> SeriesMove:
    """A series whose second of three patches conflicts with the new version."""
    two_projects(patch_dir)
    return move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n")})


RESOLVED = changed(changed(changed(KERNEL, 10, "ten\n"), 11, "eleven\n"), 12, "twelve both\n")


def test_patches_that_apply_unchanged(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A range is widened if nothing else lies between; the diff of the file stays. Comments and order of the series stay."""
    two_projects(patch_dir)
    before = contents(patch_dir.root)
    move = move_of(patch_dir, {**NEW, BUILDER: "inserted\n" + KERNEL})
    progress = begin(move, tmp_path / "work")
    assert set(states(progress.moves).values()) == {"applies unchanged"}
    assert applies_to(patch_dir) == {
        "cutlass/first": ">=4.2,<=4.5.0",
        "cutlass/second": ">=4.2,<=4.5.0",
        "flashinfer/third": ">=0.6,<=0.7.2",
    }
    after = contents(patch_dir.root)
    assert after["cutlass/series"] == before["cutlass/series"]
    for name in ("cutlass/first.patch", "cutlass/second.patch", "flashinfer/third.patch"):
        assert after[name].partition(b"\ndiff ")[2] == before[name].partition(b"\ndiff ")[2]
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))
    assert patches.lint(patch_dir.root) == []


@pytest.mark.parametrize("versions", [">=4.2,<4.4.2", ">=4.2"])
@pytest.mark.parametrize(("fixed", "moved"), [("4.5.0", False), ("4.4", False), ("4.6.0", True)])
def test_patch_that_is_fixed_upstream_is_not_moved(
    patch_dir: PatchDirectory, tmp_path: Path, versions: str, fixed: str, moved: bool
) -> None:
    """Upstream's own fix conflicts with the patch: there is nothing to resolve."""
    text = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=versions)
    patch_dir.put(
        "first", text.replace(b"Upstream-Status: Pending\n", f"Upstream-Status: Pending\nFixed-In: {fixed}\n".encode())
    )
    move = move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 10, "ten upstream\n")})
    progress = begin(move, tmp_path / "work")
    assert bool(progress.conflicts) == moved
    assert states(progress.moves) == {"cutlass/first": "conflicts" if moved else "already upstream"}
    if not moved:
        assert applied(move) == (move.old.tree, move.onto.tree)


def test_series_of_a_user_is_moved(patch_dir: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in patches below it that must change are overridden in the user's repository; they stay as they are."""
    built_in = PatchDirectory(tmp_path / "built-in")
    two_projects(built_in)
    (built_in.path / "recipes").mkdir()
    monkeypatch.setenv("SM120KIT_DATA", str(built_in.path))
    (patch_dir.path / "sm120kit.toml").write_text("edition = 1\n")
    patch_dir.put("own", patch_text(patch_dir.edit(LAUNCHER, 20, "own\n", below=""), "flashinfer", "==0.6.*"), "flashinfer")
    before = contents(built_in.root)
    move = replace(move_of(patch_dir), overrides=built_in.overrides)
    move = replace(move, old=patches.apply(move.old.checkout, move.old.inside, patch_dir.root, built_in.overrides))
    progress = begin(move, tmp_path / "work")
    assert {*states(progress.moves)} == {"cutlass/first", "cutlass/second", "flashinfer/third", "flashinfer/own"}
    assert patch_dir.root / "flashinfer/own.patch" in progress.changed
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))
    assert contents(built_in.root) == before and patches.lint(patch_dir.root) == []


def test_range_is_not_widened_over_versions_of_other_recipes(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.3"))
    progress = begin(move_of(patch_dir, cutlass={"4.2.1", "4.4.2", "4.5.0"}), tmp_path / "work")
    assert applies_to(patch_dir) == {"cutlass/first": ">=4.2,<4.3", "cutlass/first--4.5.0": "==4.5.0"}
    assert {path.name for path in progress.changed} == {"first--4.5.0.patch", "series"}


def test_merged_patch_becomes_a_variant(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Upstream changed the context: git merges what ``git apply`` refuses. The evidence of the variant is its own."""
    text = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.4.2")
    old = patch_dir.put(
        "first", text.replace(b"tests/unit/test_patches.py", b"src/sm12x_lab/receipts/patches/cutlass/first.json")
    )
    before = old.read_bytes()
    move = move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n")})
    progress = begin(move, tmp_path / "work")
    assert states(progress.moves) == {"cutlass/first": "merged"}
    assert old.read_bytes() == before
    assert applies_to(patch_dir)["cutlass/first--4.5.0"] == "==4.5.0"
    assert (
        b"Evidence: src/sm12x_lab/receipts/patches/cutlass/first--4.5.0.json\n"
        in (old.parent / "first--4.5.0.patch").read_bytes()
    )
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))


def test_range_that_includes_the_new_version_is_split(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A patch that claims the new version and conflicts there: both files stay right, and the old tree does not change."""
    old = patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.6"))
    diff = old.read_bytes().partition(b"\ndiff ")[2]
    move = move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n")})
    begin(move, tmp_path / "work")
    assert applies_to(patch_dir) == {"cutlass/first": ">=4.2,<4.5.0", "cutlass/first--4.5.0": ">=4.5.0,<4.6"}
    assert old.read_bytes().partition(b"\ndiff ")[2] == diff
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))


def test_patch_that_is_upstream(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Its range ends before the new version if it includes that."""
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.6"))
    launcher = patch_text(patch_dir.edit(LAUNCHER, 3, "three\n", below=""), "flashinfer", "<0.7", "launcher: x")
    third = patch_dir.put("third", launcher, "flashinfer")
    before = third.read_bytes()
    new = {**NEW, BUILDER: "more\n" + changed(KERNEL, 10, "ten\n"), LAUNCHER: changed(KERNEL, 3, "three\n")}
    move = move_of(patch_dir, new)
    progress = begin(move, tmp_path / "work")
    assert set(states(progress.moves).values()) == {"already upstream"}
    assert applies_to(patch_dir) == {"cutlass/first": ">=4.2,<4.5.0", "flashinfer/third": "<0.7"}
    assert third.read_bytes() == before
    assert applied(move)[0] == move.old.tree


def test_patch_that_is_partly_upstream(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    both = changed(changed(KERNEL, 5, "five\n"), 25, "twentyfive\n")
    patch_dir.put("first", patch_text(patch_dir.diff(BASE, {BUILDER: both})))
    progress = begin(move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 5, "five\n")}), tmp_path / "work")
    (moved,) = progress.moves
    assert moved.state is MoveState.PARTLY_UPSTREAM
    assert moved.detail.strip() == f"{BUILDER}: hunk 1: already upstream"
    assert b"five\n" not in (patch_dir.root / "cutlass/first--4.5.0.patch").read_bytes().replace(b"twentyfive", b"")


def test_nested_project_at_another_path(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    moved = {name.replace(CUTLASS, "deps/cutlass"): text for name, text in NEW.items()}
    moved["deps/cutlass/include/cutlass/builder.inl"] = changed(KERNEL, 13, "thirteen upstream\n")
    move = move_of(patch_dir, moved, "deps/cutlass")
    progress = begin(move, tmp_path / "work")
    assert states(progress.moves)["cutlass/second"] == "merged"
    text = (tmp_path / "work/deps/cutlass/include/cutlass/builder.inl").read_text()
    assert "ten\neleven\nline 12\nthirteen upstream\n" in text
    assert (tmp_path / "work/deps/cutlass/include/sm120kit/sf.hpp").is_file()
    assert b"+++ b/include/cutlass/builder.inl" in (patch_dir.root / "cutlass/second--4.5.0.patch").read_bytes()
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))


def test_variant_for_the_new_version_is_kept(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions="<4.4"))
    new = {**NEW, BUILDER: changed(KERNEL, 10, "ten upstream\n")}
    patch_dir.put("first--4.5", patch_text(patch_dir.diff(new, {BUILDER: changed(KERNEL, 10, "ten!\n")}), versions=">=4.5"))
    before = contents(patch_dir.root)
    progress = begin(move_of(patch_dir, new), tmp_path / "work")
    assert states(progress.moves) == {"cutlass/first": "has a variant", "cutlass/first--4.5": "applies unchanged"}
    assert progress.changed == ()
    assert contents(patch_dir.root) == before


def test_conflict_is_resolved_and_staged(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The resolution gets the patch's author, date and message; the directory then is that of ``edit``."""
    move, work = conflicting(patch_dir), tmp_path / "work"
    before = contents(patch_dir.root)
    progress = begin(move, work)
    assert progress.conflicts == (BUILDER,)
    assert states(progress.moves) == {"cutlass/first": "merged", "cutlass/second": "conflicts"}
    text = (work / BUILDER).read_text()
    assert "<<<<<<< cutlass-4.5.0\nline 11\ntwelve upstream\n" in text
    assert "eleven\nline 12\n>>>>>>> cutlass/second\n" in text
    assert recipes_of(work, KEY) == NAMES
    with pytest.raises(PatchConflict, match="second has conflicts") as error:
        resume(move, work)
    assert error.value.hint.endswith(f"sm120kit patch rebase --continue {work}")
    git_in(work, "add", BUILDER)
    with pytest.raises(PatchConflict, match="conflict markers are left"):
        resume(move, work)
    assert contents(patch_dir.root) == before
    (work / BUILDER).write_text(RESOLVED)
    with pytest.raises(BadInput, match="not staged"):
        resume(move, work)
    git_in(work, "add", BUILDER)
    progress = resume(move, work)
    assert states(progress.moves)["cutlass/second"] == "resolved"
    assert applies_to(patch_dir) == {
        "cutlass/first": ">=4.2,<4.4.2",
        "cutlass/first--4.5.0": "==4.5.0",
        "cutlass/second": ">=4.2,<4.4.2",
        "cutlass/second--4.5.0": "==4.5.0",
        "flashinfer/third": ">=0.6,<=0.7.2",
    }
    assert applied(move) == (move.old.tree, tree_in(work))
    assert output(work, "log", "--format=%an", "-3", "series").splitlines() == ["Jo Doe"] * 3


def test_finished_directory_is_that_of_edit(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    (work / BUILDER).write_text(RESOLVED)
    git_in(work, "add", BUILDER)
    resume(move, work)
    onto = move.onto
    tree = patches.apply(onto.checkout, onto.inside, patch_dir.root, patch_dir.overrides)
    patches.edit(tree, tmp_path / "edit", NAMES[1], KEY)
    records = []
    for directory in (work, tmp_path / "edit"):
        records.append(EditRecord.read(Repository(tmp_path / "new-repository"), directory / ".git/config", KEY))
        git_in(directory, "diff", "--quiet", "HEAD")
    assert records[0] == records[1] is not None
    with pytest.raises(Mismatch, match="no rebase is in progress"):
        resume(move, work)
    with pytest.raises(Mismatch, match="no rebase is in progress"):
        abort(work, patch_dir.root, KEY)
    assert patches.export_edits(work, NAMES[1], onto.checkout.pin, onto.inside, patch_dir.root, KEY) == []


def test_conflict_is_resolved_by_a_commit_and_by_leaving_out(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """``git commit`` keeps the prepared message; without changes, the patch is not for the new version."""
    two_projects(patch_dir)
    new = {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n"), LAUNCHER: changed(KERNEL, 3, "three upstream\n")}
    move, work = move_of(patch_dir, new), tmp_path / "work"
    begin(move, work)
    (work / BUILDER).write_text(RESOLVED)
    git_in(work, "add", BUILDER)
    git_in(work, "commit", "-q", "--no-edit")
    progress = resume(move, work)
    assert progress.conflicts == (LAUNCHER,)
    git_in(work, "reset", "-q", "--hard")
    progress = resume(move, work)
    assert states(progress.moves) == {
        "cutlass/first": "merged",
        "cutlass/second": "resolved",
        "flashinfer/third": "left out",
    }
    assert applies_to(patch_dir)["flashinfer/third"] == "==0.6.*"
    assert applies_to(patch_dir)["cutlass/second--4.5.0"] == "==4.5.0"
    assert applied(move) == (move.old.tree, tree_in(work))


def test_abort_leaves_nothing_behind(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    move, work = conflicting(patch_dir), tmp_path / "area/work"
    before = contents(patch_dir.root)
    begin(move, work)
    abort(work, patch_dir.root, KEY)
    assert list(work.parent.iterdir()) == []
    assert contents(patch_dir.root) == before


def test_abort_refuses_to_remove_other_work(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    (work / "notes.txt").write_text("mine\n")
    (work / "setup.py").write_text("mine\n")
    git_in(work, "branch", "mine")
    with pytest.raises(BadInput) as error:
        abort(work, patch_dir.root, KEY)
    assert error.value.message.splitlines()[1:] == ["  refs/heads/mine", "  notes.txt", "  setup.py"]
    assert (work / "notes.txt").read_text() == "mine\n"
    git_in(work, "branch", "-D", "-q", "mine")
    (work / "notes.txt").unlink()
    git_in(work, "checkout", "-q", "HEAD", "--", "setup.py")
    abort(work, patch_dir.root, KEY)
    assert not work.exists()


def test_continue_refuses_other_changes(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A file that is not part of the resolution is neither committed nor lost; another branch is not continued."""
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    (work / BUILDER).write_text("resolved\n")
    git_in(work, "add", BUILDER)
    (work / "notes.txt").write_text("mine\n")
    with pytest.raises(BadInput, match=r"not staged:\n  notes\.txt"):
        resume(move, work)
    (work / "notes.txt").unlink()
    git_in(work, "symbolic-ref", "HEAD", "refs/heads/topic")
    with pytest.raises(BadInput, match="is not branch series"):
        resume(move, work)


def test_wrong_directories_and_recipes(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    move, work = conflicting(patch_dir), tmp_path / "work"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(SystemRefused, match="is not empty"):
        begin(move, tmp_path / "full")
    for directory in (tmp_path / "full", tmp_path / "nowhere"):
        with pytest.raises(Mismatch, match="no rebase is in progress"):
            abort(directory, patch_dir.root, KEY)
    tree = patches.apply(move.onto.checkout, (), patch_dir.root / "none", patch_dir.overrides)
    patches.edit(tree, tmp_path / "edit", NAMES[1], KEY)
    with pytest.raises(Mismatch, match="no rebase is in progress"):
        recipes_of(tmp_path / "edit", KEY)
    with pytest.raises(BadInput, match=r"flashinfer-0\.7\.2 has no source cutlass"):
        begin(replace(move, onto=replace(move.onto, inside=())), work)
    begin(move, work)
    other = replace(move.onto, inside=(VendoredProject("cutlass", CUTLASS, "4.5.1"),))
    with pytest.raises(Mismatch, match="other sources"):
        resume(replace(move, onto=other), work)
    series = patch_dir.root / "flashinfer/third.patch"
    series.write_bytes(series.read_bytes().replace(b"Why it exists.", b"Why it still exists."))
    with pytest.raises(Mismatch, match="the series changed"):
        resume(move, work)


def test_directory_runs_no_program(patch_dir: PatchDirectory, tmp_path: Path, hostile_git: Path) -> None:
    """Neither the settings of the user nor those of the directory are applied."""
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    trap = tmp_path / "trap"
    (work / ".git/hooks").mkdir(exist_ok=True)
    hook = work / ".git/hooks/post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {trap}\n")
    hook.chmod(0o755)
    with (work / ".git/config").open("a") as config:
        config.write(f'[core]\n\tfsmonitor = touch {trap}\n[filter "x"]\n\tclean = touch {trap}\n')
    (work / ".git/info").mkdir(exist_ok=True)
    (work / ".git/info/attributes").write_text("* filter=x\n")
    with pytest.raises(PatchConflict):
        resume(move, work)
    abort(work, patch_dir.root, KEY)
    assert not trap.exists()


KILLED = """
import importlib, os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import test_patch_rebase as tests
from sm120kit.core import signals
from sm120kit.patches import rebase
directory, (module, _, function), kind = Path(sys.argv[2]), sys.argv[3].rpartition("."), int(sys.argv[4])
signals.handle()
module = importlib.import_module(f"sm120kit.{module}")
real = getattr(module, function)
def killed(*arguments, **options):
    if sys.argv[5] == "after":
        real(*arguments, **options)
    os.kill(os.getpid(), kind)
setattr(module, function, killed)
rebase.resume(tests.existing_move(tests.PatchDirectory(directory)), directory / "work")
"""


def existing_move(patch_dir: PatchDirectory) -> SeriesMove:
    """The move that another process began."""
    sides = []
    for name, version in (("old-repository", "0.6.6"), ("new-repository", "0.7.2")):
        commit, tree = Repository(patch_dir.path / name).git("log", "-1", "--format=%H %T", "refs/heads/made").stdout.split()
        commit = Repository(patch_dir.path / name).commit_tree(tree, None, "b")
        pin = GitPin("flashinfer", "file:///nowhere", "0" * 40, version)
        sides.append(Checkout(pin, patch_dir.path / name, commit, tree))
    tree = patches.apply(sides[0], inside(), patch_dir.root, patch_dir.overrides)
    onto = PatchedTree(sides[1], inside("4.5.0"), sides[1].commit, sides[1].tree, ())
    return SeriesMove(tree, onto, NAMES, patch_dir.root, patch_dir.overrides, KEY)


POINTS = [
    ("patches.rebase.set_files", "before", signal.SIGKILL, "continue"),
    ("patches.rebase.set_files", "after", signal.SIGTERM, "continue"),
    ("patches.rebase_directory.write_atomic", "before", signal.SIGKILL, "abort"),
    ("patches.rebase._plan_writes", "before", signal.SIGKILL, "continue"),
    ("patches.rebase._write_files", "before", signal.SIGTERM, "continue"),
    ("patches.rebase._write_files", "before", signal.SIGKILL, "abort"),
    ("patches.rebase._write_files", "after", signal.SIGKILL, "continue"),
    ("patches.rebase._write_files", "after", signal.SIGTERM, "abort"),
]


@pytest.mark.parametrize(("point", "when", "kind", "end"), POINTS)
def test_killed_in_the_middle(patch_dir: PatchDirectory, point: str, when: str, kind: signal.Signals, end: str) -> None:
    move, work = conflicting(patch_dir), patch_dir.path / "work"
    before = contents(patch_dir.root)
    begin(move, work)
    (work / BUILDER).write_text(RESOLVED)
    git_in(work, "add", BUILDER)
    arguments = [str(Path(__file__).parent), str(patch_dir.path), point, str(int(kind)), when]
    path = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert ended.returncode in (-kind, 1), ended.stderr
    if end == "abort":
        abort(work, patch_dir.root, KEY)
        assert not work.exists()
        assert contents(patch_dir.root) == before
        return
    resume(move, work)
    assert applies_to(patch_dir)["cutlass/second--4.5.0"] == "==4.5.0"
    assert applied(move) == (move.old.tree, tree_in(work))
    git_in(work, "diff", "--quiet", "HEAD")


def test_files_changed_after_an_interruption_are_not_lost(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A switch is repeated only if every file is as before or after it; an index without files is no loss."""
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    (work / BUILDER).write_text(RESOLVED)
    git_in(work, "add", BUILDER)
    arguments = [str(Path(__file__).parent), str(tmp_path), "patches.rebase.set_files", str(int(signal.SIGKILL)), "before"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, capture_output=True)
    (work / LAUNCHER).write_text("mine\n")
    (work / ".git/index").unlink()
    (work / ".git/index.lock").write_text("")
    with pytest.raises(BadInput, match=rf"neither as before nor as after it:\n  {LAUNCHER}"):
        resume(move, work)
    assert (work / LAUNCHER).read_text() == "mine\n"
    (work / LAUNCHER).unlink()
    resume(move, work)
    assert "three\n" in (work / LAUNCHER).read_text()


@pytest.mark.parametrize(
    ("versions", "keep", "at", "pinned", "expected"),
    [
        (">=4.2,<4.6", "4.2.1", "4.5.0", (), (">=4.2,<4.5.0", ">=4.5.0,<4.6")),
        (">=4.2", "4.2.1", "4.5.0", ("4.4",), (">=4.2,<4.5.0", ">=4.5.0")),
        (">=4.2", "4.2.1", "4.5.0", ("4.6",), (">=4.2,!=4.5.0", "==4.5.0")),
        (">=4.2,<4.6", "4.5.0", "4.2.1", (), (">4.2.1,<4.6", ">=4.2,<=4.2.1")),
    ],
)
def test_split_of_a_range(versions: str, keep: str, at: str, pinned: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert ranges.split(versions, keep, at, pinned) == expected


@pytest.mark.parametrize(
    ("versions", "version", "expected"),
    [
        (">=4.2,<4.3", "4.5.0", ">=4.2,<=4.5.0"),
        ("==0.6.6", "0.7.2.post1", ">=0.6.6,<=0.7.2.post1"),
        ("~=0.6.6", "0.7.2", ">=0.6.6,<=0.7.2"),
        (">=4.2,<4.3", "4.1", ">=4.1,<4.3"),
        (">=4.2,!=4.5.0", "4.5.0", ">=4.2"),
    ],
)
def test_wider_range(versions: str, version: str, expected: str) -> None:
    assert ranges.widen(versions, version) == expected
    assert ranges.contains(expected, version)


def record_in(directory: Path) -> dict[str, object]:
    return dict(json.loads(output(directory, "config", "sm120kit.rebase.state")))


def test_record_that_was_not_written_with_this_state_directory_is_not_followed(
    patch_dir: PatchDirectory, tmp_path: Path
) -> None:
    """A directory of somebody else, whose record orders files of the series to be replaced."""
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    (tmp_path / "precious").write_text("mine\n")
    (work / ".git/sm120kit.lock").unlink(missing_ok=True)
    (work / ".git/sm120kit.lock").symlink_to(tmp_path / "precious")
    before = contents(patch_dir.root)
    present = output(work, "hash-object", "-w", str(patch_dir.root / "cutlass/series"))
    theirs = output(work, "hash-object", "-w", str(patch_dir.root / "flashinfer/series"))
    record = record_in(work)
    orders = [{"path": "cutlass/series", "before": theirs, "after": present}]
    for changes in ({"writes": orders}, {"todo": []}, {"recipes": list(reversed(NAMES))}):
        git_in(work, "config", "sm120kit.rebase.state", json.dumps(record | changes))
        with pytest.raises(Mismatch, match="was not begun with this state directory"):
            abort(work, patch_dir.root, KEY)
        with pytest.raises(Mismatch, match="was not begun with this state directory"):
            resume(move, work)
        with pytest.raises(Mismatch, match="was not begun with this state directory"):
            recipes_of(work, KEY)
    assert contents(patch_dir.root) == before and (tmp_path / "precious").read_text() == "mine\n"


def test_rebase_of_another_state_directory_is_not_aborted(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    move, work = conflicting(patch_dir), tmp_path / "work"
    begin(move, work)
    with pytest.raises(Mismatch, match="was not begun with this state directory"):
        abort(work, patch_dir.root, b"another")
    abort(work, patch_dir.root, KEY)
    assert not work.exists()
