"""A series on top of a checkout: how each patch stands to it, and the commits that come out.

No working directory is involved: git applies a patch to a throwaway index. There is no fuzz, ever: every context line must be
there exactly. A hunk may lie some lines away from where it was written for; its status says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit.errors import BadPatch, BadRecipe, PatchAlreadyUpstream, PatchConflict
from sm120kit.gitrepo import Index, Repository
from sm120kit.patches.diff import FILE_MODES, Hunk
from sm120kit.patches.form import Patch
from sm120kit.patches.series import load
from sm120kit.process import Completed
from sm120kit.records import AppliedPatch, Checkout, Inside, PatchedTree, PatchState, PatchStatus, Pin

REFS = "refs/sm120kit/patched"
"""Below it, each patched commit is named by itself, so that nothing collects it."""

OVERRIDES_MESSAGE = """\
overrides: add the headers of cutlass_overrides

They lie before CUTLASS's own on the include path. The patches above hook into them.
"""

_OFFSET = re.compile(r"Hunk #(\d+) succeeded at \d+ \(offset (-?\d+) lines?\)\.")


@dataclass(frozen=True)
class Part:
    """A project in a tree: ``path`` is empty for the one that the tree itself is."""

    project: str
    path: str
    version: str

    @property
    def prefix(self) -> str:
        """What is before the path of each of its files."""
        return f"{self.path.strip('/')}/" if self.path else ""


@dataclass(frozen=True)
class Step:
    """A patch, how it stands to the tree below it, and the tree above it: the same one when it was not applied."""

    patch: Patch
    status: PatchStatus
    tree: str


def parts_of(pin: Pin, inside: tuple[Inside, ...]) -> list[Part]:
    """The projects of a tree in the order in which they are patched: those inside first."""
    own = Part(pin.project, "", pin.version)
    return [*(Part(item.project, item.path, item.version) for item in inside), own]


def status(checkout: Checkout, inside: tuple[Inside, ...], root: Path) -> tuple[PatchStatus, ...]:
    """How each patch of each project in a checkout stands to it, on top of those of its series that apply.

    Raises:
        BadPatch: a series is not well-formed.
    """
    return tuple(step.status for step in _walk(checkout, inside, root, checkout.tree))


def apply(checkout: Checkout, inside: tuple[Inside, ...], root: Path, overrides: Path) -> PatchedTree:
    """Put our headers and every patch for these versions on top of a checkout, as commits that are the same everywhere.

    Whole or not at all: when one patch does not fit, no ref of the repository changes.

    Raises:
        BadPatch: a series is not well-formed, a patch leaves its project, or an override would hide an upstream header.
        PatchConflict: patches do not apply; names each with file, line and hunk.
        PatchAlreadyUpstream: the checkout already has what a patch does.
    """
    repository = Repository(checkout.repository)
    commit, tree = checkout.commit, _with_overrides(repository, checkout, inside, overrides)
    if tree != checkout.tree:
        commit = repository.commit_tree(tree, commit, OVERRIDES_MESSAGE)
    steps = list(_walk(checkout, inside, root, tree))
    _require_fitting(steps)
    applied = []
    for step in steps:
        if step.status.state is PatchState.APPLIES:
            patch, tree = step.patch, step.tree
            date = f"@{int(patch.date.timestamp())} {patch.date:%z}"
            commit = repository.commit_tree(tree, commit, message_of(patch), author=patch.author, date=date)
            applied.append(AppliedPatch(patch.project, patch.slug, patch.sha256, commit))
    repository.point(f"{REFS}/{commit}", commit)
    return PatchedTree(checkout, inside, commit, tree, tuple(applied))


def compose(
    checkout: Checkout, inside: tuple[Inside, ...], chosen: Sequence[Patch], overrides: Path | None
) -> tuple[str, tuple[Step, ...]]:
    """The tree below some patches, with our headers unless ``overrides`` is None, and each patch as it stands on those before.

    They have to be in the order of projects in which a series is applied. No commit is made.
    """
    tree = _with_overrides(Repository(checkout.repository), checkout, inside, overrides) if overrides else checkout.tree
    return tree, tuple(_steps(checkout, inside, chosen, tree))


def message_of(patch: Patch) -> str:
    """The message of a patch's commit: its own, and a last trailer that names its file."""
    return f"{patch.subject}\n\n{patch.body}\nPatch: {patch.name}\n"


def _require_fitting(steps: list[Step]) -> None:
    conflicts = [step.status for step in steps if step.status.state is PatchState.CONFLICTS]
    if conflicts:
        told = [f"{s.project}/{s.slug} does not apply to {s.project} {s.version}:\n{s.detail}" for s in conflicts]
        raise PatchConflict(
            "\n".join(told),
            "tighten its Applies-To and add a variant <slug>--<name>.patch for this version",
        )
    upstream = [step for step in steps if step.status.state is PatchState.ALREADY_UPSTREAM]
    if upstream:
        told = [
            f"{step.patch.name} is already in {step.status.project} {step.status.version}"
            f" (Applies-To: {step.patch.trailer('Applies-To')}; Drop-When: {step.patch.trailer('Drop-When')})"
            for step in upstream
        ]
        raise PatchAlreadyUpstream("\n".join(told), "end its Applies-To below this version, or drop it if Drop-When has come")


def _walk(checkout: Checkout, inside: tuple[Inside, ...], root: Path, tree: str) -> Iterator[Step]:
    """Every patch in order, each on top of those before it that apply."""
    return _steps(checkout, inside, in_order(checkout.pin, inside, root), tree)


def in_order(pin: Pin, inside: tuple[Inside, ...], root: Path) -> list[Patch]:
    """The patches of every project of a tree, in the order in which they are applied."""
    return [patch for part in parts_of(pin, inside) for patch in load(root, part.project)]


def _steps(checkout: Checkout, inside: tuple[Inside, ...], patches: Sequence[Patch], tree: str) -> Iterator[Step]:
    repository = Repository(checkout.repository)
    parts = parts_of(checkout.pin, inside)
    by_project = {part.project: part for part in parts}
    _require_parts(repository, tree, parts)
    with repository.index(tree) as index:
        for patch in patches:
            part = by_project[patch.project]
            state, detail = _put(index, patch, part)
            if state is PatchState.APPLIES:
                before, tree = tree, index.write_tree()
                _require_inside(repository, before, tree, patch, part, parts)
            yield Step(patch, PatchStatus(part.project, patch.slug, part.version, state, detail), tree)


def _put(index: Index, patch: Patch, part: Part) -> tuple[PatchState, str]:
    """Apply a patch to an index if it fits; how it stands and why."""
    if not patch.is_for(part.version):
        return PatchState.NOT_FOR_THIS_VERSION, f"it is for {patch.trailer('Applies-To')}"
    forward = _git_apply(index, patch, part, "--check")
    moved = _moved(forward.stderr, part)
    fits = forward.returncode == 0
    # A patch that only adds lines may fit a second time somewhere else, so one that had to move must not be there already.
    if (not fits or moved) and _git_apply(index, patch, part, "--check", "--reverse").returncode == 0:
        return PatchState.ALREADY_UPSTREAM, f"Drop-When: {patch.trailer('Drop-When')}"
    if not fits:
        return PatchState.CONFLICTS, "\n".join(_conflicts(forward.stderr, patch, part))
    done = _git_apply(index, patch, part)
    if done.returncode != 0:
        raise BadPatch(f"{patch.name}: git refuses it\n{done.stderr.strip()}")
    return PatchState.APPLIES, "; ".join(moved)


def _git_apply(index: Index, patch: Patch, part: Part, *options: str) -> Completed:
    where = [f"--directory={part.prefix}"] if part.prefix else []
    words = ["apply", "--cached", "--verbose", "--whitespace=nowarn", "-p1", *where, *options, "-"]
    return index.git(*words, stdin=patch.diff, check=False)


def _moved(said: str, part: Part) -> list[str]:
    """Hunks that were found elsewhere than they say."""
    found: dict[tuple[str, int], list[str]] = {}
    path = ""
    for line in said.splitlines():
        match = _OFFSET.match(line)
        if line.startswith("Checking patch "):
            path = line.removeprefix("Checking patch ").removesuffix("...").removeprefix(part.prefix)
        elif match:
            found.setdefault((path, int(match[2])), []).append(match[1])
    return [
        f"{path}: {'hunk' if len(hunks) == 1 else 'hunks'} {', '.join(hunks)} {'lies' if len(hunks) == 1 else 'lie'}"
        f" {abs(offset)} lines further {'down' if offset > 0 else 'up'}"
        for (path, offset), hunks in found.items()
    ]


def _conflicts(said: str, patch: Patch, part: Part) -> list[str]:
    """What git said, as one line for each file that a patch does not fit: file, line, hunk."""
    found = []
    for line in said.splitlines():
        if not line.startswith("error: ") or line.endswith(("patch does not apply", "while searching for:")):
            continue
        text = line.removeprefix("error: ").removeprefix("patch failed: ").removeprefix(part.prefix)
        path, _, reason = text.partition(":")
        hunks = [hunk for hunk in patch.hunks if hunk.path == path]
        if reason.isdigit():
            hunk = next((hunk for hunk in hunks if hunk.start == int(reason)), None)
            found.append(f"  {path}:{reason}: {_named(hunk, patch) if hunk else 'a hunk'} does not fit")
        elif hunks and reason == " does not exist in index":
            found.append(f"  {path}:{hunks[0].start}: {_named(hunks[0], patch)}: there is no such file")
        elif hunks and reason == " already exists in index":
            found.append(f"  {path}:1: {_named(hunks[0], patch)}: the file is there already, with other content")
        else:
            found.append(f"  {text}")
    return found


def _named(hunk: Hunk, patch: Patch) -> str:
    return f"hunk {hunk.number} {hunk.header} (line {hunk.line} of {patch.slug}.patch)"


def _require_parts(repository: Repository, tree: str, parts: list[Part]) -> None:
    for part in parts:
        if part.path:
            try:
                repository.subtree(tree, part.path)
            except FileNotFoundError:
                own = parts[-1]
                raise BadRecipe(
                    f"{own.project} {own.version} has no directory {part.path}, where {part.project} should be",
                    f"correct the path of [sources.{part.project}] in the recipe",
                ) from None


def _require_inside(repository: Repository, before: str, after: str, patch: Patch, part: Part, parts: list[Part]) -> None:
    """Hold a patch to its project by what it did, whatever its text looks like."""
    problems = []
    raw = repository.git("diff-tree", "-r", "-z", "--raw", "--no-renames", before, after).raw.split(b"\0")
    for told, name in zip(raw[:-1:2], raw[1::2], strict=True):
        path = name.decode(errors="replace")
        old_mode, new_mode = told.decode().removeprefix(":").split()[:2]
        owner = max((p for p in parts if path.startswith(p.prefix)), key=lambda p: len(p.prefix), default=None)
        if owner != part:
            problems.append(f"  {path} is not a file of {part.project}" + (f" but of {owner.project}" if owner else ""))
        if not {old_mode, new_mode} <= {"000000", *FILE_MODES}:
            problems.append(f"  {path} is a link or submodule, not a plain file")
    if not raw[:-1]:
        problems.append("  it changes nothing")
    if problems:
        raise BadPatch("\n".join([f"{patch.name} on {part.project} {part.version}:", *problems]))


def _with_overrides(repository: Repository, checkout: Checkout, inside: tuple[Inside, ...], overrides: Path) -> str:
    """The tree of a checkout with our headers among CUTLASS's, where it carries CUTLASS."""
    base = overrides / "include"
    files = sorted(path for path in base.rglob("*") if path.is_file() and not path.name.startswith("."))
    part = next((part for part in parts_of(checkout.pin, inside) if part.project == "cutlass"), None)
    if part is None or not files:
        return checkout.tree
    there = set(repository.paths(checkout.tree, f"{part.prefix}include"))
    with repository.index(checkout.tree) as index:
        for file in files:
            path = f"{part.prefix}include/{file.relative_to(base).as_posix()}"
            if path in there:
                raise BadPatch(
                    f"{file} would hide {path} of {part.project} {part.version}",
                    "give it a name of its own below include/sm120kit and let a patch hook into it",
                )
            index.add(path, file.read_bytes())
        return index.write_tree()
