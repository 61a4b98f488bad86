"""How each patch of a series fits a version: applies, conflicts, already upstream, or not for this version.

git applies each patch to a temporary index; no working directory is involved. There is no fuzz: every context line must match
exactly. A hunk may apply some lines away from the line it was written for if it fits nowhere else; its
status reports the offset.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from sm120kit.core.errors import BadInput, Mismatch
from sm120kit.core.process import Completed
from sm120kit.patches._locate import Fit, changed, line_of, places
from sm120kit.patches.diff import FILE_MODES, FileChange, blob_id
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import PatchState, PatchStatus, TreeProject, owner_of, projects_in_tree
from sm120kit.patches.series import load_for_tree
from sm120kit.sources.git import GitIndex, Repository
from sm120kit.sources.source_records import Checkout, VendoredProject

MAX_PLACES = 20
"""Limit for the lines that an ambiguous hunk is reported for."""

VERSION_H = "include/cutlass/version.h"
"""The file with CUTLASS's version."""

_ERROR = re.compile(r"^error: (?!patch failed: )(.*)(?<!patch does not apply)$", re.MULTILINE)
"""What git reports of files, apart from hunks that do not fit."""


@dataclass(frozen=True)
class Step:
    """A patch, its status on the tree below it, and the git tree id above it: unchanged if the patch was not applied."""

    patch: Patch
    status: PatchStatus
    tree: str


def status(checkout: Checkout, inside: tuple[VendoredProject, ...], root: Path) -> tuple[PatchStatus, ...]:
    """The status of each patch of each project in a checkout, on top of the patches before it that apply.

    Raises:
        BadInput: a series is not well-formed.
    """
    patches = load_for_tree(checkout.pin, inside, root)
    return tuple(step.status for step in complete_steps(steps(checkout, inside, patches, checkout.tree)))


def status_without_source(patch: Patch, version: str, reason: str = "") -> PatchStatus:
    """The status of a patch that is not for ``version`` of its project, or not applied to it for another ``reason``."""
    return PatchStatus(patch.project, patch.slug, version, PatchState.NOT_FOR_THIS_VERSION, reason or _not_for(patch))


def _not_for(patch: Patch) -> str:
    return f"it is for {patch.trailer('Applies-To')}"


def steps(checkout: Checkout, inside: tuple[VendoredProject, ...], patches: Sequence[Patch], tree: str) -> Iterator[Step]:
    """Try patches in order, each on ``tree`` with the patches before it that apply.

    Raises:
        BadInput: a patch changes files outside its project, or git rejects it.
        BadInput: the checkout has no directory at the path of a project inside it.
        Mismatch: the checkout contains another version of CUTLASS than the recipe names.
    """
    repository = Repository(checkout.repository)
    projects = projects_in_tree(checkout.pin, inside)
    by_name = {project.project: project for project in projects}
    _require_projects(repository, tree, projects)
    with repository.index(tree) as index:
        for patch in patches:
            project = by_name[patch.project]
            state, detail = _try_patch(index, patch, project)
            if state is PatchState.APPLIES:
                before, tree = tree, index.write_tree()
                _require_own_files(repository, (before, tree), patch, project, projects)
            yield Step(patch, PatchStatus(project.project, patch.slug, project.version, state, detail), tree)


def complete_steps(tried: Iterable[Step]) -> Iterator[Step]:
    """Steps, where a patch conflicts that applies without one that it requires, or with one that it excludes.

    What it requires in a project that is not in the tree is not known, and not required.
    """
    steps = list(tried)
    applied = [step.patch for step in steps if step.status.state is PatchState.APPLIES]
    projects = {step.patch.project for step in steps}
    for step in steps:
        problems = [
            f"  it requires {name}, which is not applied"
            for name in step.patch.requires
            if name.partition("/")[0] in projects and not any(other.is_named((name,)) for other in applied)
        ]
        excluded = [other.name for other in applied if other.is_named(step.patch.excludes)]
        problems += [f"  it excludes {name}, which is applied" for name in excluded]
        if problems and step.patch in applied:
            step = replace(step, status=replace(step.status, state=PatchState.CONFLICTS, detail="\n".join(problems)))
        yield step


def _try_patch(index: GitIndex, patch: Patch, project: TreeProject) -> tuple[PatchState, str]:
    """Apply a patch to an index if it applies; its state, and the detail of it."""
    if not patch.is_for(project.version):
        return PatchState.NOT_FOR_THIS_VERSION, _not_for(patch)
    placed = [_place(index, patch, file, project) for file in patch.files]
    check = git_apply(index, patch, project, "--check")
    moved = any(starts != [line_of(hunk)] for file in placed for hunk, starts in file.hunks)
    # A patch that only adds lines may apply a second time at another line, so a hunk with an offset may be upstream already.
    undo = ("--check", "--reverse")
    if (check.returncode != 0 or moved) and git_apply(index, patch, project, *undo).returncode == 0:
        return PatchState.ALREADY_UPSTREAM, f"Drop-When: {patch.trailer('Drop-When')}"
    problems = [line for file in placed for line in _problems(file, patch, project)]
    if check.returncode != 0:
        problems += [f"  {error}" for error in _ERROR.findall(check.stderr)] or ([] if problems else [check.stderr.strip()])
    if problems:
        return PatchState.CONFLICTS, "\n".join(problems)
    before = index.write_tree() if moved else ""
    result = git_apply(index, patch, project)
    if result.returncode != 0:
        raise BadInput(f"{patch.name}: git rejects it\n{result.stderr.strip()}")
    if misplaced := [line for file in placed for line in _misplaced(index, file, project)] if moved else []:
        index.git("read-tree", before)
        return PatchState.CONFLICTS, "\n".join(misplaced)
    fixed = [f"Fixed-In {patch.trailer('Fixed-In')}: upstream has its own fix"] * patch.is_fixed_in(project.version)
    return PatchState.APPLIES, "; ".join([*fixed, *(line for file in placed for line in _offsets(file))])


def git_apply(index: GitIndex, patch: Patch, project: TreeProject, *options: str) -> Completed:
    """Run ``git apply`` of a patch in an index, with the paths of the patch below the directory of its project."""
    directory = [f"--directory={project.prefix}"] if project.prefix else []
    arguments = ["apply", "--cached", "--whitespace=nowarn", "-p1", *directory, *options, "-"]
    return index.git(*arguments, stdin=patch.diff, check=False)


@dataclass(frozen=True)
class _PlacedFile:
    """A file that a patch changes, the content that it has in a tree, and where each hunk fits there."""

    change: FileChange
    content: bytes
    hunks: tuple[Fit, ...]


def _place(index: GitIndex, patch: Patch, change: FileChange, project: TreeProject) -> _PlacedFile:
    read = index.git("cat-file", "blob", f":0:{project.prefix}{change.path}", check=False)
    hunks = [hunk for hunk in patch.hunks if hunk.path == change.path]
    if read.returncode != 0 or not change.old.strip("0"):
        return _PlacedFile(change, b"", ())  # git compares the two sides of a file that is created
    return _PlacedFile(change, read.raw, tuple(places(hunks, read.raw, blob_id(read.raw) == change.old)))


def _misplaced(index: GitIndex, file: _PlacedFile, project: TreeProject) -> Iterator[str]:
    """A line for a file in which git applied a hunk elsewhere: it takes the nearest place, out of order as well."""
    path = file.change.path
    if file.hunks and index.git("cat-file", "blob", f":0:{project.prefix}{path}").raw != changed(file.hunks, file.content):
        lines = ", ".join(str(start) for _, (start,) in file.hunks)
        yield (
            f"  {path}: its hunks fit in their order at lines {lines}, but git would apply one nearer to its own line."
            " Make its diff for this version in a directory of `sm120kit patch edit`"
        )


def _problems(file: _PlacedFile, patch: Patch, project: TreeProject) -> Iterator[str]:
    """A line for each hunk that fits at no line or at several, and for the version of the file."""
    unfit = [(hunk, starts) for hunk, starts in file.hunks if len(starts) != 1]
    for hunk, starts in unfit:
        name = f"  {hunk.path}:{hunk.start}: hunk {hunk.number} {hunk.header} (line {hunk.line} of {patch.slug}.patch)"
        lines = ", ".join(map(str, starts[:MAX_PLACES])) + (", ..." if len(starts) > MAX_PLACES else "")
        yield (
            f"{name} does not fit"
            if not starts
            else (
                f"{name} is ambiguous: it fits at lines {lines}. Make its diff for this version in a directory of"
                " `sm120kit patch edit`"
            )
        )
    if unfit:
        blob = blob_id(file.content)
        own = blob == file.change.old
        found = ", which is that of the tree: its hunks or its index line are corrupt"
        other = f"; {project.project} {project.version} has blob {blob[:12]}"
        made_for = f"  {file.change.path}: the patch was made for the version with blob {file.change.old[:12]}"
        yield f"{made_for}{found if own else other}"


def _offsets(file: _PlacedFile) -> Iterator[str]:
    """A line for each offset of hunks that fit at another line than theirs."""
    hunks_at: dict[int, list[str]] = {}
    for hunk, (start,) in file.hunks:
        hunks_at.setdefault(start - line_of(hunk), []).append(str(hunk.number))
    for offset, hunks in hunks_at.items():
        if offset:
            which = f"hunks {', '.join(hunks)} lie" if len(hunks) > 1 else f"hunk {hunks[0]} lies"
            yield f"{file.change.path}: {which} {abs(offset)} lines further {'down' if offset > 0 else 'up'}"


def _require_projects(repository: Repository, tree: str, projects: list[TreeProject]) -> None:
    """Require a directory for each project inside a tree, and CUTLASS to have the version of the recipe."""
    for project in projects:
        if project.path:
            try:
                repository.subtree(tree, project.path)
            except FileNotFoundError:
                own = projects[-1]
                raise BadInput(
                    f"{own.project} {own.version} has no directory {project.path}, where {project.project} should be",
                    f"correct the path of [sources.{project.project}] in the recipe",
                ) from None
        if project.project == "cutlass":
            _require_cutlass(repository, tree, project)


def _require_cutlass(repository: Repository, tree: str, cutlass: TreeProject) -> None:
    """Require the version that CUTLASS's ``version.h`` states. No other project with a series lies inside another."""
    path = f"{cutlass.prefix}{VERSION_H}"
    try:
        text = repository.read(tree, path).decode(errors="replace")
    except FileNotFoundError:
        text = ""
    version = cutlass_version(text)
    if not version or Version(version) != Version(cutlass.version):
        raise Mismatch(
            f"{path} states {f'version {version}' if version else 'no version'}; the recipe has cutlass {cutlass.version}",
            "correct version or path of [sources.cutlass] in the recipe",
        )


def cutlass_version(text: str) -> str:
    """The version in the text of CUTLASS's ``version.h``; empty if it states none."""
    defines = dict(re.findall(r"^#define CUTLASS_(MAJOR|MINOR|PATCH) +(\d+)$", text, re.MULTILINE))
    return ".".join(defines[name] for name in ("MAJOR", "MINOR", "PATCH")) if len(defines) == 3 else ""


def _require_own_files(
    repository: Repository, trees: tuple[str, str], patch: Patch, project: TreeProject, projects: list[TreeProject]
) -> None:
    """Require that a patch changed only plain files of its project, and into the blobs of its index lines.

    ``trees`` are the trees before and after it. If a file is not the version that the patch was made for, its blob ids differ
    on both sides.
    """
    problems = []
    made_for = {f"{project.prefix}{file.path}": file for file in patch.files if file.old}
    raw = repository.git("diff-tree", "-r", "-z", "--raw", "--numstat", "--no-renames", *trees).raw.split(b"\0")
    pairs = sum(token.startswith(b":") for token in raw[::2])
    for modes, name in zip(raw[: 2 * pairs : 2], raw[1 : 2 * pairs : 2], strict=True):
        path = name.decode(errors="replace")
        old_mode, new_mode, *blobs, _ = modes.decode().removeprefix(":").split()
        owner = owner_of(path, projects)
        if owner != project:
            problems.append(f"  {path} is not a file of {project.project}" + (f" but of {owner.project}" if owner else ""))
        if not {old_mode, new_mode} <= {"000000", *FILE_MODES}:
            problems.append(f"  {path} is a link or submodule, not a plain file")
        file = made_for.get(path)
        if file and (file.old == blobs[0]) != (file.new == blobs[1]):
            problems.append(
                f"  {path}: the index line (line {file.line} of {patch.slug}.patch) was made for the version with blob"
                f" {file.old} and gives {file.new}; applied to {blobs[0]}, the patch gives {blobs[1]}:"
                " the index line or a hunk is corrupt"
            )
    binary = [token.removeprefix(b"-\t-\t").decode(errors="replace") for token in raw[2 * pairs :] if token[:4] == b"-\t-\t"]
    problems += [f"  {path} is a binary file: only text can be reviewed" for path in binary]
    if not raw[:-1]:
        problems.append("  it changes nothing")
    if problems:
        raise BadInput("\n".join([f"{patch.name} on {project.project} {project.version}:", *problems]))
