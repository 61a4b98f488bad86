"""Commits back to patch files: the other direction of ``apply``, byte by byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from sm120kit.errors import BadPatch, StateUnwritable
from sm120kit.gitrepo import Repository
from sm120kit.patches.form import parse, render
from sm120kit.patches.series import load, require_none, slug_lines, write_series
from sm120kit.patches.stack import REFS, Part
from sm120kit.records import PatchedTree
from sm120kit.workspace import disk_errors, write_atomic

_BASE = "refs/sm120kit/base"
"""In a repository that somebody edits a series in: the commit below the series."""

_PATCH = re.compile(r"\nPatch: ([\w.-]+)/([\w.-]+)$", re.MULTILINE)


_PLACES = re.compile(rb"^(index |@@ )[0-9a-f.,+ -]+(?:@@.*)?", re.MULTILINE)

_DIFF_FORM = """--full-index --no-renames --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/
--unified=3 --inter-hunk-context=0 --diff-algorithm=myers --indent-heuristic""".split()  # noqa: SIM905 - reads as on a command line


@dataclass(frozen=True)
class Exported:
    """A commit as the patch file ``<project>/<slug>.patch``."""

    project: str
    slug: str
    content: bytes


def diff(repository: Repository, before: str, after: str, below: str = "") -> bytes:
    """What changed between two trees or commits, in the one form that patch files have; paths are relative to ``below``."""
    relative = [f"--relative={below.strip('/')}/"] if below else []
    return repository.git("diff-tree", "-r", "-p", *_DIFF_FORM, *relative, before, after).raw


def export(repository: Repository, base: str, tip: str, parts: Sequence[Part]) -> tuple[Exported, ...]:
    """The commits above ``base`` up to ``tip`` as patch files, in order.

    A commit that ``apply`` made goes back to its file; a new one gets a slug from its subject.

    Raises:
        BadPatch: a commit is a merge, touches more than one project, or does not make a well-formed patch.
    """
    exported: list[Exported] = []
    for commit in repository.git("rev-list", "--reverse", f"{base}..{tip}").stdout.split():
        form = "%P%x00%an <%ae>%x00%aD%x00%B"
        told = repository.git("log", "-1", "--encoding=UTF-8", f"--format={form}", commit).raw.decode(errors="replace")
        parents, author, date, message = told.split("\0")
        where = f"{commit[:12]} ({message.partition(chr(10))[0]})"
        if " " in parents:
            raise BadPatch(f"{where} is a merge", "rebase, so that every commit is one patch")
        changed = (
            repository.git("diff-tree", "-r", "-z", "--name-only", "--no-renames", parents, commit).raw.decode().split("\0")
        )
        owners = {max((p for p in parts if name.startswith(p.prefix)), key=lambda p: len(p.prefix)) for name in changed if name}
        if len(owners) != 1:
            raise BadPatch(
                f"{where} touches {' and '.join(sorted(p.project for p in owners)) or 'nothing'}",
                "one commit is one patch of one project",
            )
        part = owners.pop()
        match = _PATCH.search(message)
        message = _PATCH.sub("", message)
        subject, _, body = message.strip().partition("\n")
        slug = match[2] if match else re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
        content = render(author, parsedate_to_datetime(date), subject, body, diff(repository, parents, commit, part.path))
        require_none(parse(part.project, Path(part.project) / f"{slug}.patch", content)[1])
        if any((item.project, item.slug) == (part.project, slug) for item in exported):
            raise BadPatch(f"{where}: there are two commits for {part.project}/{slug}", "squash them or change a subject")
        exported.append(Exported(part.project, slug, content))
    return tuple(exported)


def write_back(exported: Sequence[Exported], parts: Sequence[Part], root: Path) -> list[Path]:
    """Make the series of these projects hold what was exported, and return the files that changed.

    A file stays when only places differ: the same change, written for another version of the file that it changes.
    Patches that are not for these versions were not in the tree: they stay, each after the patch that it followed.
    """
    changed: list[Path] = []
    for part in parts:
        directory = root / part.project
        ours = {item.slug: item.content for item in exported if item.project == part.project}
        there = load(root, part.project)
        slugs = list(ours)
        before: str | None = None
        for patch in there:
            if not patch.is_for(part.version) and patch.slug not in ours:
                slugs.insert(slugs.index(before) + 1 if before in slugs else 0, patch.slug)
            before = patch.slug
        with disk_errors(directory):
            for patch in there:
                if patch.slug not in slugs:
                    (directory / f"{patch.slug}.patch").unlink()
                    changed.append(directory / f"{patch.slug}.patch")
            for slug, content in ours.items():
                file = directory / f"{slug}.patch"
                if not file.is_file() or _placeless(file.read_bytes()) != _placeless(content):
                    write_atomic(file, content)
                    changed.append(file)
        if [slug for _, slug in slug_lines(directory / "series")] != slugs:
            write_series(directory / "series", slugs)
            changed.append(directory / "series")
    return changed


def _placeless(content: bytes) -> bytes:
    """A patch file without line numbers and blob ids."""
    head, mark, rest = content.partition(b"\ndiff --git ")
    return head + mark + _PLACES.sub(rb"\1", rest)


def edit(tree: PatchedTree, directory: Path) -> None:
    """Make ``directory`` a git repository of its own with the series as commits on branch ``series``, for a person to work in.

    Raises:
        StateUnwritable: the directory is not empty.
    """
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise StateUnwritable(f"{directory} is not empty", "name a directory that does not exist yet")
    repository = Repository.init(directory / ".git")
    base = f"{tree.patches[0].commit}^" if tree.patches else tree.commit
    repository.git("fetch", "--quiet", tree.checkout.repository, f"{REFS}/{tree.commit}:refs/heads/series")
    repository.git("update-ref", _BASE, base)
    repository.git("symbolic-ref", "HEAD", "refs/heads/series")
    repository.git("config", "core.bare", "false")
    repository.git(f"--work-tree={directory}", "reset", "--quiet", "--hard")


def take_back(directory: Path, parts: Sequence[Part], root: Path) -> list[Path]:
    """Write the commits of a directory that :func:`edit` made back to the series below ``root``; the files that changed.

    Raises:
        BadPatch: it is no such directory, there are changes without a commit, or see :func:`export`.
    """
    repository = Repository(directory / ".git")
    if not repository.path.is_dir() or repository.git("rev-parse", "--quiet", "--verify", _BASE, check=False).returncode != 0:
        raise BadPatch(
            f"{directory} was not made by `sm120kit patch edit`", "start with `sm120kit patch edit RECIPE --into DIR`"
        )
    if changes := repository.git(f"--work-tree={directory}", "status", "--porcelain").stdout:
        raise BadPatch(f"{directory} has changes that are in no commit:\n{changes.rstrip()}", "commit or remove them")
    return write_back(export(repository, _BASE, "HEAD", parts), parts, root)
