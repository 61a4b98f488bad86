"""How each patch of a series fits a version: applies, conflicts, already upstream, or not for this version.

git applies each patch to a temporary index; no working directory is involved. There is no fuzz: every context line must match
exactly. A hunk may apply some lines away from the line it was written for if it fits nowhere else; its
status reports the offset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from sm120kit.core.errors import BadInput, Mismatch
from sm120kit.core.process import Completed
from sm120kit.patches._conflicts import describe, explain
from sm120kit.patches._locate import ambiguities
from sm120kit.patches.diff import FILE_MODES, Hunk, blob_id
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import HunkConflict, PatchState, PatchStatus, TreeProject, owner_of, projects_in_tree
from sm120kit.patches.series import load_for_tree
from sm120kit.sources.git import GitIndex, Repository
from sm120kit.sources.source_records import Checkout, VendoredProject

MAX_PLACES = 20
"""Limit for the lines that an ambiguous hunk is reported for."""

VERSION_H = "include/cutlass/version.h"
"""The file with CUTLASS's version."""

_OFFSET = re.compile(r"Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)\.")


@dataclass(frozen=True)
class Step:
    """A patch, its status on the tree below it, and the git tree id above it: unchanged if the patch was not applied."""

    patch: Patch
    status: PatchStatus
    tree: str


@dataclass(frozen=True)
class DiffFit:
    """How the diff of a patch fits files: it applies, is already upstream, or conflicts.

    ``lines`` describe offsets or conflicts; ``conflicts`` are the paths of files with a conflict, relative to the project.
    """

    state: PatchState
    lines: tuple[str, ...] = ()
    conflicts: frozenset[str] = frozenset()


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
            state, detail, conflicts = _try_patch(index, patch, project)
            if state is PatchState.APPLIES:
                before, tree = tree, index.write_tree()
                _require_own_files(repository, (before, tree), patch, project, projects)
            yield Step(patch, PatchStatus(project.project, patch.slug, project.version, state, detail, conflicts), tree)


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


def _try_patch(index: GitIndex, patch: Patch, project: TreeProject) -> tuple[PatchState, str, tuple[HunkConflict, ...]]:
    """Apply a patch to an index if it applies; its state, the detail of it, and conflicts."""
    if not patch.is_for(project.version):
        return PatchState.NOT_FOR_THIS_VERSION, _not_for(patch), ()
    fit = fit_patch(index, patch, project)
    if fit.state is PatchState.APPLIES:
        apply_fitting(index, patch, project)
        return fit.state, "; ".join(fit.lines), ()
    conflicts = list(explain(index, patch, project, fit.conflicts))
    lines = [*_explained(fit.lines, conflicts, patch, project), *_made_for(index, patch, project, fit.conflicts)]
    return fit.state, "\n".join(lines), tuple(conflicts)


def _explained(lines: Sequence[str], conflicts: Sequence[HunkConflict], patch: Patch, project: TreeProject) -> Iterator[str]:
    """The lines of a fit, where git names one hunk of a file, with every hunk that does not fit and why."""
    explained = {conflict.path for conflict in conflicts}
    yield from (line for line in lines if not any(line.startswith(f"  {path}:") for path in explained))
    hunks = {(hunk.path, hunk.number): hunk for hunk in patch.hunks}
    for conflict in conflicts:
        hunk = hunks[conflict.path, conflict.hunk]
        yield f"  {hunk.path}:{hunk.start}: {_hunk_name(hunk, patch)} does not fit"
        yield from describe(conflict, project.project, project.version)


def fit_patch(index: GitIndex, patch: Patch, project: TreeProject) -> DiffFit:
    """Compare the diff of a patch with the files in an index, whatever versions the patch is for. The index stays as it is."""
    check = git_apply(index, patch, project, "--check")
    offsets = _offsets(check.stderr, project)
    # A patch that only adds lines may apply a second time at another line, so a hunk with an offset may be upstream already.
    undo = ("--check", "--reverse")
    if (check.returncode != 0 or offsets) and git_apply(index, patch, project, *undo).returncode == 0:
        return DiffFit(PatchState.ALREADY_UPSTREAM, (f"Drop-When: {patch.trailer('Drop-When')}",))
    if check.returncode != 0:
        lines, paths = _conflicts(check.stderr, patch, project)
        return DiffFit(PatchState.CONFLICTS, tuple(lines), paths)
    if ambiguous := tuple(_ambiguous(index, patch, project, _searched(index, patch, project, offsets))):
        return DiffFit(PatchState.CONFLICTS, ambiguous)
    return DiffFit(PatchState.APPLIES, tuple(_describe(offsets)))


def apply_fitting(index: GitIndex, patch: Patch, project: TreeProject) -> None:
    """Apply a patch to an index that it fits.

    Raises:
        BadInput: git rejects it.
    """
    result = git_apply(index, patch, project)
    if result.returncode != 0:
        raise BadInput(f"{patch.name}: git rejects it\n{result.stderr.strip()}")


def git_apply(index: GitIndex, patch: Patch, project: TreeProject, *options: str) -> Completed:
    """Run ``git apply`` of a patch in an index, with the paths of the patch below the directory of its project."""
    directory = [f"--directory={project.prefix}"] if project.prefix else []
    arguments = ["apply", "--cached", "--verbose", "--whitespace=nowarn", "-p1", *directory, *options, "-"]
    return index.git(*arguments, stdin=patch.diff, check=False)


def _offsets(output: str, project: TreeProject) -> dict[str, dict[int, int]]:
    """By path and number, the hunks that apply at another line than the patch gives: by how many lines, from ``git apply``."""
    offsets: dict[str, dict[int, int]] = {}
    path = ""
    for line in output.splitlines():
        match = _OFFSET.match(line)
        if line.startswith("Checking patch "):
            path = line.removeprefix("Checking patch ").removesuffix("...").removeprefix(project.prefix)
        elif match:
            offsets.setdefault(path, {})[int(match[1])] = int(match[2])
    return offsets


def _describe(offsets: dict[str, dict[int, int]]) -> Iterator[str]:
    """A line per file and offset."""
    for path, by_number in offsets.items():
        hunks_at: dict[int, list[str]] = {}
        for number, offset in by_number.items():
            hunks_at.setdefault(offset, []).append(str(number))
        for offset, hunks in hunks_at.items():
            plural = len(hunks) > 1
            yield (
                f"{path}: {'hunks' if plural else 'hunk'} {', '.join(hunks)} {'lie' if plural else 'lies'}"
                f" {abs(offset)} lines further {'down' if offset > 0 else 'up'}"
            )


def _searched(
    index: GitIndex, patch: Patch, project: TreeProject, offsets: dict[str, dict[int, int]]
) -> dict[str, dict[int, int]]:
    """The hunks whose line number does not decide where they belong, as in :func:`_offsets`.

    Those are hunks that git applies at another line, and all in a file of which the ``index`` line names another version: lines
    may lie above them that the patch was not made for.
    """
    searched = {path: dict(by_number) for path, by_number in offsets.items()}
    for file in patch.files:
        hunks = [hunk.number for hunk in patch.hunks if hunk.path == file.path]
        if not hunks or not file.old.strip("0"):
            continue
        content = index.git("cat-file", "blob", f":0:{project.prefix}{file.path}").raw
        if not blob_id(content).startswith(file.old):
            searched[file.path] = dict.fromkeys(hunks, 0) | searched.get(file.path, {})
    return searched


def _ambiguous(index: GitIndex, patch: Patch, project: TreeProject, searched: dict[str, dict[int, int]]) -> Iterator[str]:
    """A line per hunk that fits at several lines and whose own line does not decide."""
    for path, by_number in searched.items():
        content = index.git("cat-file", "blob", f":0:{project.prefix}{path}").raw
        hunks = [hunk for hunk in patch.hunks if hunk.path == path]
        for hunk, starts in ambiguities(hunks, by_number, content):
            places = ", ".join(map(str, starts[:MAX_PLACES])) + (", ..." if len(starts) > MAX_PLACES else "")
            applied = hunk.start + by_number[hunk.number]
            reason = "does not fit there" if applied != hunk.start else "was made for another version of the file"
            yield (
                f"  {path}:{hunk.start}: {_hunk_name(hunk, patch)} {reason} and is ambiguous: git would apply it"
                f" at line {applied}; it fits at {f'lines {places}' if starts else 'no line in the order of the hunks'}."
                " Make its diff for this version in a directory of `sm120kit patch edit`"
            )


def _conflicts(output: str, patch: Patch, project: TreeProject) -> tuple[list[str], frozenset[str]]:
    """Conflicts of a patch from the output of ``git apply``: a line per file with its path, line and hunk, and the paths."""
    conflicts, paths = [], set()
    for line in output.splitlines():
        if not line.startswith("error: ") or line.endswith(("patch does not apply", "while searching for:")):
            continue
        text = line.removeprefix("error: ").removeprefix("patch failed: ").removeprefix(project.prefix)
        path, _, reason = text.partition(":")
        paths.add(path)
        hunks = [hunk for hunk in patch.hunks if hunk.path == path]
        if reason.isdigit():
            hunk = next((hunk for hunk in hunks if hunk.start == int(reason)), None)
            conflicts.append(f"  {path}:{reason}: {_hunk_name(hunk, patch) if hunk else 'a hunk'} does not fit")
        elif hunks and reason == " does not exist in index":
            conflicts.append(f"  {path}:{hunks[0].start}: {_hunk_name(hunks[0], patch)}: there is no such file")
        elif hunks and reason == " already exists in index":
            conflicts.append(f"  {path}:1: {_hunk_name(hunks[0], patch)}: the file exists already, with other content")
        else:
            conflicts.append(f"  {text}")
    return conflicts, frozenset(paths)


def _made_for(index: GitIndex, patch: Patch, project: TreeProject, paths: frozenset[str]) -> list[str]:
    """The versions of the conflicting files: per file, the blob that its diff was made from and the tree's."""
    lines = []
    for file in patch.files:
        if file.path in paths and file.old.strip("0"):
            entry = index.git("ls-files", "--stage", "-z", "--", f":(literal){project.prefix}{file.path}").stdout
            blob = entry.split()[1] if entry else ""
            made_for = f"  {file.path}: the patch was made for the version with blob {file.old[:12]}"
            if blob == file.old:
                lines.append(f"{made_for}, which is that of the tree: its hunks or its index line are corrupt")
            else:
                lines.append(
                    f"{made_for}; {project.project} {project.version} has {f'blob {blob[:12]}' if blob else 'no such file'}"
                )
    return lines


def _hunk_name(hunk: Hunk, patch: Patch) -> str:
    return f"hunk {hunk.number} {hunk.header} (line {hunk.line} of {patch.slug}.patch)"


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
