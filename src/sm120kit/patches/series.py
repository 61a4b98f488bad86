"""A project's ordered list of patches, read from disk and judged as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from sm120kit.errors import BadPatch
from sm120kit.patches.diff import Problem
from sm120kit.patches.form import Patch, normal_form, overlap, parse
from sm120kit.workspace import disk_errors, write_atomic

RESERVED = "evidence"
"""The directory beside the projects that holds what proves patches; its files are in no series."""

_EVIDENCE = re.compile(r"\b(?:patches|tests)/[\w./-]*\w")
_SLUG = re.compile(r"[a-z0-9]+(?:[-._]{1,2}[a-z0-9]+)*")


def projects(root: Path) -> list[str]:
    """Every project that has patches below ``root``."""
    named = {path.parent.name for pattern in ("*/series", "*/*.patch") for path in root.glob(pattern)}
    return sorted(named - {RESERVED})


def load(root: Path, project: str) -> tuple[Patch, ...]:
    """The patches of a project in order; none when it has no series.

    Raises:
        BadPatch: with every problem of every file.
    """
    patches, problems = read(root, project)
    require_none(problems)
    return patches


def lint(root: Path) -> list[Problem]:
    """Everything that is wrong with any series below ``root``, and evidence that is named and not there."""
    found = []
    for project in projects(root):
        patches, problems = read(root, project)
        found += problems + [problem for patch in patches for problem in _absent_evidence(root, patch)]
    return found


def _absent_evidence(root: Path, patch: Patch) -> Iterator[Problem]:
    """Files of this repository that an ``Evidence`` trailer names; ``tests/`` is not in an installed copy."""
    for path in _EVIDENCE.findall(patch.trailer("Evidence")):
        if (root.parent / path).exists() or not (root.parent / path.partition("/")[0]).is_dir():
            continue
        line = next(n for n, line in enumerate(patch.content.split(b"\n"), 1) if line.startswith(b"Evidence:"))
        yield Problem(root / patch.project / f"{patch.slug}.patch", line, f"Evidence names {path}, which is not there")


def fix(root: Path) -> list[Path]:
    """Write every patch file that can be understood in its normal form; the files that changed."""
    changed = []
    for project in projects(root):
        for patch in read(root, project)[0]:
            file = root / project / f"{patch.slug}.patch"
            if normal_form(patch) != patch.content:
                write_atomic(file, normal_form(patch))
                changed.append(file)
    return changed


def require_none(problems: list[Problem]) -> None:
    """Raise :class:`BadPatch` when there are problems."""
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the patches"
        raise BadPatch("\n".join([count, *map(str, problems)]), "patches/README.md describes the format")


def read(root: Path, project: str) -> tuple[tuple[Patch, ...], list[Problem]]:
    """The patches that can be understood, in order, and all problems of a project."""
    directory, problems, patches = root / project, [], []
    lines = slug_lines(directory / "series")
    first_line: dict[str, int] = {}
    for number, slug in lines:
        if slug in first_line:
            problems.append(Problem(directory / "series", number, f"{slug} is in line {first_line[slug]} already"))
            continue
        first_line[slug] = number
        file = directory / f"{slug}.patch"
        if not _SLUG.fullmatch(slug):
            problems.append(Problem(directory / "series", number, f"{slug!r} is no slug: lower case words with '-' between"))
        elif not file.is_file() or file.is_symlink():
            problems.append(Problem(directory / "series", number, f"there is no file {slug}.patch"))
        else:
            patch, found = parse(project, file, file.read_bytes())
            problems += found
            patches += [patch] if patch else []
    for file in sorted(directory.glob("*.patch")):
        if file.stem not in first_line:
            problems.append(Problem(file, 1, f"not in {directory / 'series'}"))
    for one, other in combinations(patches, 2):
        shared = overlap(one.versions, other.versions) if one.family == other.family else ""
        if shared:
            where = next((n for n, line in enumerate(other.content.split(b"\n"), 1) if line.startswith(b"Applies-To:")), 1)
            text = f"Applies-To overlaps that of {one.slug}: both hold for {project} {shared}"
            problems.append(Problem(directory / f"{other.slug}.patch", where, text))
    return tuple(patches), problems


def slug_lines(series: Path) -> list[tuple[int, str]]:
    """The slugs of a series file with their line numbers."""
    text = series.read_text(encoding="utf-8") if series.is_file() else ""
    slugs = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.split("\n"), 1)]
    return [(number, slug) for number, slug in slugs if slug]


def write_series(series: Path, slugs: list[str]) -> None:
    """Make a series file list ``slugs``. A comment stays above the slug that it was above, as long as that is listed."""
    above: dict[str, list[str]] = {}
    comments: list[str] = []
    for line in series.read_text(encoding="utf-8").splitlines() if series.is_file() else []:
        slug = line.partition("#")[0].strip()
        if slug:
            above[slug] = [*comments, line]
            comments = []
        else:
            comments.append(line)
    lines = [line for slug in slugs for line in above.get(slug, [slug])] + comments
    with disk_errors(series):
        series.parent.mkdir(parents=True, exist_ok=True)
        series.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
