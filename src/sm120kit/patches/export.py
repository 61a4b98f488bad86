"""Commits back to patch files: the other direction of ``apply``, byte by byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from sm120kit.errors import BadPatch
from sm120kit.gitrepo import Repository
from sm120kit.patches.form import parse, render
from sm120kit.patches.series import load, require_none, slug_lines, write_series
from sm120kit.patches.stack import Part
from sm120kit.workspace import disk_errors, write_atomic

_PATCH = re.compile(r"\nPatch: ([\w.-]+)/([\w.-]+)$", re.MULTILINE)


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
                if not file.is_file() or file.read_bytes() != content:
                    write_atomic(file, content)
                    changed.append(file)
        if [slug for _, slug in slug_lines(directory / "series")] != slugs:
            write_series(directory / "series", slugs)
            changed.append(directory / "series")
    return changed
