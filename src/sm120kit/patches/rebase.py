"""Move a series to another version: merge its patches three-way, stop at conflicts, write the result to the series.

The directory of a rebase is a git repository like that of :func:`sm120kit.patches.edit`, with the patches moved so far as
commits on branch ``series``. Its git configuration records what is left to do. Before files of the directory or of the series
are replaced, the record names the intended state, so that :func:`resume` completes what a killed process began.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sm120kit.core.atomic_writes import write_atomic, write_together
from sm120kit.core.data_roots import REPOSITORY_FILE, built_in_below
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadInput, Mismatch, PatchConflict, SystemRefused
from sm120kit.core.locks import exclusive
from sm120kit.core.temporary import owned_directory, publish_directory, remove_abandoned
from sm120kit.patches import evidence, ranges
from sm120kit.patches.apply import REFS, apply, base_commit, commit_patch
from sm120kit.patches.drift import DiffFit, apply_fitting, fit_patch
from sm120kit.patches.edits import BASE, SERIES, EditRecord
from sm120kit.patches.export import Exported, export, with_versions, write_back
from sm120kit.patches.format import Patch, normal_form, overlap
from sm120kit.patches.patch_records import PatchedTree, PatchState, TreeProject, projects_in_tree
from sm120kit.patches.rebase_directory import (
    ANEW,
    FileWrite,
    MoveState,
    PatchMove,
    RebaseRecord,
    changes_in,
    head_of,
    opened,
    read_record,
    require_known_files,
    set_files,
    switched,
    unknown_files,
    write_state,
)
from sm120kit.patches.series import load_for_tree, series_content, slug_lines, slug_problem
from sm120kit.patches.threeway import HunkState, Merge, Pick, hunk_states, merge, recommit
from sm120kit.sources.git import GitIndex, Repository

_OLD = "refs/sm120kit/old"
"""In the directory of a rebase: the old version with its series."""


_MARKER = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
_UNMERGED = ("DD", "AU", "UD", "UA", "DU", "AA", "UU")
"""The states of unmerged files in ``git status``."""


@dataclass(frozen=True)
class SeriesMove:
    """The two trees of a rebase and the files of the series.

    ``recipes`` are the recipes of ``old`` and ``onto`` as arguments of commands; ``onto`` is not patched. ``key``
    seals the record of the directory. ``pinned`` has, for each project, the versions that recipes pin.
    """

    old: PatchedTree
    onto: PatchedTree
    recipes: tuple[str, str]
    root: Path
    overrides: Path
    key: bytes
    pinned: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def old_projects(self) -> list[TreeProject]:
        """The projects of the old tree."""
        return projects_in_tree(self.old.checkout.pin, self.old.inside)

    @property
    def projects(self) -> list[TreeProject]:
        """The projects of the new tree."""
        return projects_in_tree(self.onto.checkout.pin, self.onto.inside)

    @property
    def commits(self) -> dict[str, str]:
        """The commit of each patch on the old tree, by name."""
        return {f"{patch.project}/{patch.slug}": patch.commit for patch in self.old.patches}

    @property
    def pins(self) -> str:
        """The digest of the pins of both trees."""
        return digest_of([[tree.checkout.pin, tree.inside] for tree in (self.old, self.onto)])

    def load(self, root: Path | None = None) -> list[Patch]:
        """The patches of all projects, for any version, in order."""
        return load_for_tree(self.onto.checkout.pin, self.onto.inside, root or self.root)

    @property
    def series(self) -> str:
        """The digest of the patches of all projects."""
        return digest_of([[patch.name, patch.sha256] for patch in self.load()])


@dataclass(frozen=True)
class RebaseProgress:
    """How far a rebase came: ``conflicts`` are the files to resolve; without any, ``changed`` are the files of the series.

    ``provable`` are the names of the patches whose file changed and that have probes.
    """

    moves: tuple[PatchMove, ...]
    conflicts: tuple[str, ...] = ()
    changed: tuple[Path, ...] = ()
    provable: tuple[str, ...] = ()


def begin(move: SeriesMove, directory: Path) -> RebaseProgress:
    """Move the patches of the old version to the new one, until one conflicts or all are moved and written to the series.

    Patches that are for the new version already, and those with a variant for it, are applied as they are. Those that are fixed
    upstream in the new version, by ``Fixed-In``, are left out of it.

    Raises:
        SystemRefused: the directory is not empty.
        BadInput: the new tree lacks a project that has patches.
        PatchConflict: a patch that is for the new version and not for the old one does not apply.
        BadInput: see :func:`sm120kit.patches.export.write_back`.
    """
    directory = directory.absolute()
    _require_projects(move)
    with disk_errors(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise SystemRefused(f"{directory} is not empty", "name a directory that does not exist yet")
    with publish_directory(directory) as new:
        gitdir = new / ".git"
        Repository.init(gitdir)
        with opened(new) as repository:
            old, onto = move.old, move.onto
            repository.fetch(old.checkout.repository, f"{REFS}/{old.commit}:{_OLD}")
            source = Repository(onto.checkout.repository)
            base, tree = base_commit(source, onto.checkout, onto.inside, move.overrides)
            source.set_ref(f"{REFS}/{base}", base)
            repository.fetch(source.path, f"{REFS}/{base}:{BASE}")
            record = RebaseRecord(move.recipes, move.pins, move.series, base, base, tree, tuple(_todo(move)))
            record = _advance(repository, move, replace(record, moves=tuple(_not_moved(move))))
            for ref, commit in ((_OLD, old.commit), (BASE, base)):
                write_atomic(gitdir / ref, f"{commit}\n".encode())
            write_atomic(gitdir / "HEAD", f"ref: {SERIES}\n".encode())
            set_files(repository, new, record)
        Repository(gitdir).make_worktree()
        write_state(gitdir, record, move.key)
    with opened(directory) as repository:
        return _progress(repository, move, directory, record)


def recipes_of(directory: Path, key: bytes) -> tuple[str, str]:
    """The old and the new recipe of a rebase, as arguments of commands.

    Raises:
        Mismatch: no rebase is in progress in the directory.
    """
    with opened(directory.absolute()) as repository:
        return read_record(repository, directory, key).recipes


def resume(move: SeriesMove, directory: Path) -> RebaseProgress:
    """Continue a rebase after its conflicts are resolved, or after it was interrupted.

    A resolution is staged, or committed on branch ``series``. See :func:`begin` for what follows.

    Raises:
        Mismatch: no rebase is in progress in the directory, or the pins or the series changed since.
        PatchConflict: conflicts are not resolved.
        BadInput: the directory has changes that are not part of the resolution, or another branch than ``series``; or see
            :func:`begin`.
    """
    directory = directory.absolute()
    with _locked(directory, move.key) as (repository, record):
        _require_unchanged(move, directory, record)
        head = head_of(repository, directory)
        if record.before:
            require_known_files(repository, directory, (record.before, record.tree))
            (directory / ".git/index.lock").unlink(missing_ok=True)
            set_files(repository, directory, record)
            record = switched(directory, record, move.key)
            head = head_of(repository, directory)
        if not record.writes or head not in (record.head, record.rewritten):
            record = _collect(repository, directory, replace(record, writes=()), head)
            before = record.tree
            record = replace(_advance(repository, move, record), before=before)
            write_state(directory / ".git", record, move.key)
            set_files(repository, directory, record)
            record = switched(directory, record, move.key)
        return _progress(repository, move, directory, record)


def abort(directory: Path, root: Path, key: bytes) -> None:
    """Remove the directory of a rebase with the patches moved so far. The series below ``root`` is as before.

    Raises:
        Mismatch: no rebase is in progress in the directory.
        BadInput: it contains work that is not part of the rebase: changes of other files than those with conflicts, new
            files, other branches.
    """
    directory = directory.absolute()
    remove_abandoned(directory.parent, f".{directory.name}.")
    with _locked(directory, key) as (repository, record):
        listed = repository.git("ls-remote", "--quiet", "--", directory / ".git").stdout.splitlines()
        refs = {line.partition("\t")[2]: line.partition("\t")[0] for line in listed}
        own = [f"  {ref}" for ref in refs if ref not in ("HEAD", SERIES) and not ref.startswith("refs/sm120kit/")]
        trees = [record.before or record.tree, record.tree, refs.get("HEAD", record.head)]
        own += [f"  {path}" for path in unknown_files(repository, directory, trees) if path not in record.conflicts]
        if own:
            raise BadInput(
                "\n".join([f"{directory} contains work that is not part of the rebase:", *own]),
                f"move it elsewhere first, or remove all: rm -r {directory}",
            )
        _write_files(repository, root, directory, [replace(w, before=w.after, after=w.before) for w in record.writes])
        with owned_directory(directory.parent, f".{directory.name}.") as trash:
            directory.rename(trash / "aborted")


@contextmanager
def _locked(directory: Path, key: bytes) -> Iterator[tuple[Repository, RebaseRecord]]:
    """The repository and the record of a directory, which nobody else works on. Of others' directories no lock is opened."""
    with opened(directory) as repository:
        read_record(repository, directory, key)
        with exclusive(directory / ".git/sm120kit.lock", str(directory)):
            yield repository, read_record(repository, directory, key)


def _require_projects(move: SeriesMove) -> None:
    """Require that the new tree has every project of the old tree."""
    names = {project.project for project in move.projects}
    missing = [project for project in move.old_projects if project.project not in names]
    if missing:
        listed = ", ".join(project.project for project in missing)
        raise BadInput(
            f"recipe {move.recipes[1]} has no source {listed}, whose patches are to be moved",
            f"name a recipe of {move.old.checkout.pin.project}, or add [sources.{missing[0].project}] to that one",
        )


def _not_moved(move: SeriesMove) -> Iterator[PatchMove]:
    """The patches of the old tree that the new version does not need: it has a fix of its own, or a variant is for it."""
    versions = {project.project: project.version for project in move.projects}
    patches = move.load()
    for patch in (patch for patch in patches if patch.name in move.commits):
        version = versions[patch.project]
        if patch.is_fixed_in(version):
            yield PatchMove(patch.name, MoveState.UPSTREAM, f"Fixed-In: {patch.project} {patch.trailer('Fixed-In')}")
        elif not patch.is_for(version):
            family = (p for p in patches if (p.project, p.family) == (patch.project, patch.family))
            if variant := next((p for p in family if p.is_for(version)), None):
                yield PatchMove(patch.name, MoveState.HAS_VARIANT, f"{variant.name} is for {patch.project} {version}")


def _todo(move: SeriesMove) -> Iterator[str]:
    """The patches of the new series in order: those for the new version, and those of the old one that are to be moved."""
    versions = {project.project: project.version for project in move.projects}
    skipped = {moved.name for moved in _not_moved(move)}
    for patch in move.load():
        if patch.name not in skipped and (patch.is_for(versions[patch.project]) or patch.name in move.commits):
            yield patch.name


def _advance(repository: Repository, move: SeriesMove, record: RebaseRecord) -> RebaseRecord:
    """Move patches until one conflicts or none is left. Only objects are written."""
    patches = {patch.name: patch for patch in move.load()}
    projects = {project.project: project for project in move.projects}
    while record.todo and not record.entries:
        patch = patches[record.todo[0]]
        version = projects[patch.project].version
        fit, exact = _apply_exactly(repository, patch, projects[patch.project], record.tree)
        applies = fit.state is PatchState.APPLIES
        if patch.name not in move.commits:
            if not applies:
                raise PatchConflict(
                    f"{patch.name} is for {patch.project} {version} and does not apply to the series so far:"
                    f" {fit.state}\n" + "\n".join(fit.lines),
                    f"recipe {move.recipes[0]} does not have it, so it cannot be merged: correct it first",
                )
            moved, tree = PatchMove(patch.name, MoveState.APPLIES, "\n".join(fit.lines)), exact
        else:
            pick = Pick(move.commits[patch.name], record.tree, patch.project, tuple(move.old_projects), tuple(move.projects))
            merged = merge(repository, pick, (f"{patch.project}-{version}", patch.name))
            if applies and (merged.entries or merged.tree == exact):
                moved, tree = PatchMove(patch.name, MoveState.APPLIES, "\n".join(fit.lines)), exact
            else:
                moved, tree = _describe(repository, pick, merged, patch), merged.tree
            if moved.state is MoveState.CONFLICTS:
                return replace(record, tree=tree, entries=merged.entries, pick=merged.commit).with_move(moved)
        if tree != record.tree:
            record = replace(record, head=commit_patch(repository, patch, tree, record.head), tree=tree)
        record = replace(record, todo=record.todo[1:]).with_move(moved)
    return record


def _apply_exactly(repository: Repository, patch: Patch, project: TreeProject, tree: str) -> tuple[DiffFit, str]:
    """Try a patch on a tree as ``apply`` does, whatever its ``Applies-To``; how it fits, and the tree above it."""
    with repository.index(tree) as index:
        fit = fit_patch(index, patch, project)
        if fit.state is not PatchState.APPLIES:
            return fit, tree
        apply_fitting(index, patch, project)
        return fit, index.write_tree()


def _describe(repository: Repository, pick: Pick, merged: Merge, patch: Patch) -> PatchMove:
    """The state of a merged patch, with the hunks of each file that need a look."""
    states = hunk_states(repository, pick)
    by_file: dict[tuple[str, str], list[str]] = {}
    for hunk, state, present in states:
        there = f"; what it adds is there already, at {', '.join(map(str, present))}" if present else ""
        if state is not HunkState.MERGED or there:
            by_file.setdefault((hunk.path, f"{state}{there}"), []).append(str(hunk.number))
    detail = [
        f"  {path}: hunk{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {text}" for (path, text), numbers in by_file.items()
    ]
    if merged.entries:
        return PatchMove(patch.name, MoveState.CONFLICTS, "\n".join([*detail, f"  Drop-When: {patch.trailer('Drop-When')}"]))
    if merged.tree == pick.onto:
        return PatchMove(patch.name, MoveState.UPSTREAM)
    upstream = any(state is HunkState.UPSTREAM for _, state, _ in states)
    return PatchMove(patch.name, MoveState.PARTLY_UPSTREAM if upstream else MoveState.MERGED, "\n".join(detail))


def _collect(repository: Repository, directory: Path, record: RebaseRecord, head: str) -> RebaseRecord:
    """Take up what was done in the directory: commits on branch ``series``, and the staged resolution of conflicts."""
    changes = changes_in(repository, GitIndex(repository, directory / ".git/index"), directory)
    proceed = f"sm120kit patch rebase --continue {directory}"
    if unmerged := [path for state, path in changes if state in _UNMERGED]:
        raise PatchConflict(
            "\n".join([f"{record.todo[0]} has conflicts in {directory}:", *(f"  {path}" for path in unmerged)]),
            f"edit these files, `git add` or `git rm` them, then {proceed}",
        )
    if unstaged := [path for state, path in changes if state[1] != " "]:
        raise BadInput(
            "\n".join([f"{directory} has changes that are not staged:", *(f"  {path}" for path in unstaged)]),
            f"`git add` what belongs to the resolution and remove the rest, then {proceed}",
        )
    tree = GitIndex(repository, directory / ".git/index").write_tree()
    if marked := [path for path in record.conflicts if _has_markers(repository, tree, path)]:
        raise PatchConflict(
            "\n".join([f"conflict markers are left in {directory}:", *(f"  {path}" for path in marked)]),
            f"resolve them, `git add` the files, then {proceed}",
        )
    if changes and (head != record.head or not record.entries):
        raise BadInput(
            "\n".join([f"{directory} has uncommitted changes:", *(f"  {path}" for _, path in changes)]),
            f"commit or remove them, then {proceed}",
        )
    if record.entries:
        name = record.todo[0]
        if changes:
            head = recommit(repository, record.pick, tree, head)
        state = MoveState.RESOLVED if head != record.head else MoveState.LEFT_OUT
        moves = (*record.moves[:-1], PatchMove(name, state, record.moves[-1].detail))
        record = replace(record, todo=record.todo[1:], moves=moves, entries=(), pick="")
    return replace(record, head=head, tree=tree)


def _has_markers(repository: Repository, tree: str, path: str) -> bool:
    try:
        return _MARKER.search(repository.read(tree, path)) is not None
    except FileNotFoundError:
        return False


def _progress(repository: Repository, move: SeriesMove, directory: Path, record: RebaseRecord) -> RebaseProgress:
    """How far the rebase came. When every patch is moved, write the series and make the directory one of ``edit``."""
    if record.entries:
        return RebaseProgress(record.moves, tuple(record.conflicts))
    if not record.writes:
        record = _plan_writes(repository, move, record)
        write_state(directory / ".git", record, move.key)
    write_atomic(directory / ".git" / SERIES, f"{record.head}\n".encode())
    _write_files(repository, move.root, directory, record.writes)
    patches = move.load()
    versions = {project.project: project.version for project in move.projects}
    present = {patch.name: patch.sha256 for patch in patches if patch.is_for(versions[patch.project])}
    commits = repository.git("rev-list", "--reverse", f"{record.base}..{record.head}").stdout.split()
    onto = move.onto
    edited = EditRecord.of(move.recipes[1], onto.checkout.pin, onto.inside, present, commits)
    write_state(directory / ".git", None, move.key, edited.section(move.key))
    changed = tuple(move.root / write.path for write in record.writes)
    provable = [
        patch.name
        for patch in patches
        if patch.probes and patch.name in present and move.root / patch.project / f"{patch.slug}.patch" in changed
    ]
    return RebaseProgress(record.moves, changed=changed, provable=tuple(provable))


def _plan_writes(repository: Repository, move: SeriesMove, record: RebaseRecord) -> RebaseRecord:
    """The files of the series with which the new tree is that of the rebase, and the old tree is as before.

    They are written to a copy of the series, and both trees are patched from that.

    Raises:
        BadInput: they would not have this effect.
    """
    projects = [project.project for project in move.projects]
    exported = export(repository, record.base, record.head, move.projects)
    with tempfile.TemporaryDirectory(prefix="sm120kit-series-") as scratch:
        root = Path(scratch) / move.root.name
        if built_in_below(move.root):
            shutil.copyfile(move.root.parent / REPOSITORY_FILE, root.parent / REPOSITORY_FILE)
        for project in projects:
            if (move.root / project).is_dir():
                shutil.copytree(move.root / project, root / project)
        final, overwrite = _final_patches(repository, move, exported, root)
        write_back(repository, final, move.projects, root, overwrite)
        old = apply(move.old.checkout, move.old.inside, root, move.overrides)
        onto = apply(move.onto.checkout, move.onto.inside, root, move.overrides)
        for tree, expected, recipe in zip((old, onto), (move.old.tree, record.tree), move.recipes, strict=True):
            if tree.tree != expected:
                raise BadInput(
                    f"with these commits, the series would not give the tree of recipe {recipe} that it should",
                    "keep the Applies-To of patches of other versions",
                )
        fetch = ["fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--"]
        repository.git(*fetch, onto.checkout.repository, f"{REFS}/{onto.commit}:{REFS}/{onto.commit}")
        writes = []
        for project in projects:
            names = sorted({p.name for base in (move.root, root) for p in (base / project).glob("*") if p.is_file()})
            for name in names:
                before, after = (_content(base / project / name) for base in (move.root, root))
                if before != after:
                    blobs = (repository.write(content) if content is not None else "" for content in (before, after))
                    writes.append(FileWrite(f"{project}/{name}", *blobs))
    return replace(record, head=onto.commit, rewritten=record.head, writes=tuple(writes))


def _final_patches(
    repository: Repository, move: SeriesMove, exported: Sequence[Exported], root: Path
) -> tuple[list[Exported], list[str]]:
    """The exported patches with their final file names and version ranges, and the names of those that replace a file.

    A patch that applies unchanged needs at most a wider range. A patch that was merged becomes a variant for the new version;
    if the old patch was for that version as well, its range ends there, in its file below ``root``.
    """
    old = {project.project: project.version for project in move.old_projects}
    new = {project.project: project.version for project in move.projects}
    projects = {project.project: project for project in move.projects}
    existing = {patch.name: patch for patch in move.load(root)}
    final, overwrite, kept = [], [], set()
    for commit in exported:
        patch, before = commit.patch, existing.get(commit.patch.name)
        if before is None or patch.trailer("Applies-To") != before.trailer("Applies-To"):
            final.append(commit)
            continue
        version, pinned = new[patch.project], move.pinned.get(patch.project, ())
        _, exact = _apply_exactly(repository, before, projects[patch.project], repository.tree_of(commit.parent))
        unchanged = exact == repository.tree_of(commit.commit)
        if before.is_for(version) and (unchanged or not before.is_for(old[patch.project])):
            kept.add(before.name)
            final.append(commit)
            continue
        wider = _widened(before, version, pinned, existing.values())
        if unchanged and wider:
            overwrite.append(before.name)
            final.append(replace(commit, patch=with_versions(patch, patch.slug, f"{patch.project} {wider}")))
            continue
        versions = f"=={version}"
        if before.is_for(version):
            versions = ranges.split(_range(before), old[patch.project], version, pinned)[1]
        slug = f"{patch.family}--{re.sub('[^a-z0-9.]+', '-', version)}"
        proof = f"{evidence.PROOFS}/{patch.project}"
        body = patch.body.replace(f"{proof}/{patch.slug}.json", f"{proof}/{slug}.json")
        final.append(replace(commit, patch=with_versions(replace(patch, body=body), slug, f"{patch.project} {versions}")))
    for patch in existing.values():
        version, kept_version = new[patch.project], old[patch.project]
        if patch.is_for(version) and patch.is_for(kept_version) and patch.name not in kept:
            first = ranges.split(_range(patch), kept_version, version, move.pinned.get(patch.project, ()))[0]
            shortened = with_versions(patch, patch.slug, f"{patch.project} {first}")
            directory = root / patch.project
            listed = [slug for _, slug in slug_lines(directory / "series")]
            if patch.slug not in listed:  # a built-in patch below a user's series
                write_atomic(directory / "series", series_content(directory / "series", [*listed, patch.slug]))
            write_atomic(directory / f"{patch.slug}.patch", normal_form(shortened))
    return final, overwrite


def _widened(patch: Patch, version: str, pinned: Collection[str], patches: Collection[Patch]) -> str:
    """The range of a patch with a version added; empty if it would add another version that matters.

    Those are versions that recipes pin and versions of other variants.
    """
    wider = ranges.widen(_range(patch), version)
    added = [other for other in pinned if other != version and ranges.contains(wider, other) and not patch.is_for(other)]
    family = [p for p in patches if (p.project, p.family) == (patch.project, patch.family) and p.slug != patch.slug]
    taken = any(overlap(other.versions, SpecifierSet(wider)) for other in family)
    return "" if added or taken or not ranges.contains(wider, version) else wider


def _range(patch: Patch) -> str:
    """The version range in ``Applies-To``."""
    return patch.trailer("Applies-To").partition(" ")[2]


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _write_files(repository: Repository, root: Path, directory: Path, writes: Sequence[FileWrite]) -> None:
    """Write files of the series, all or none; those that were written already stay.

    Raises:
        Mismatch: a file has neither the content before nor the one after.
    """
    files: dict[Path, bytes | None] = {}
    for write in writes:
        project, _, name = write.path.partition("/")
        if slug_problem(project) or (name != "series" and slug_problem(name.removesuffix(".patch"))):
            raise Mismatch(f"the record of {directory} names {write.path!r}, which is no file of a series", ANEW)
        path = root / project / name
        before, after = (repository.git("cat-file", "blob", blob).raw if blob else None for blob in (write.before, write.after))
        if _content(path) not in (before, after):
            raise Mismatch(f"{path} changed since the rebase in {directory} began", ANEW)
        files[path] = after
    write_together(files)


def _require_unchanged(move: SeriesMove, directory: Path, record: RebaseRecord) -> None:
    """Require the pins and the series with which a rebase began; while the series is written, its files are compared."""
    if record.pins != move.pins:
        raise Mismatch(f"{directory} was made from other sources than those that {' and '.join(move.recipes)} pin", ANEW)
    if not record.writes and record.series != move.series:
        raise Mismatch(f"the series changed since the rebase in {directory} began; its result would undo that", ANEW)
