"""A project's series: read it from disk, report every problem in it, write it.

The series below a user's ``patches/`` lie above the built-in ones: each patch comes after the built-in patches of its project,
or in the place of the built-in patch of the same name.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from sm120kit.core.data_roots import built_in_below, origin_of
from sm120kit.core.errors import BadInput, SystemRefused
from sm120kit.core.outside import read_found, read_toml
from sm120kit.patches import evidence
from sm120kit.patches._message import to_fill_in
from sm120kit.patches.diff import Problem
from sm120kit.patches.format import MAX_PATCH_BYTES, Patch, overlap, parse
from sm120kit.patches.patch_records import projects_in_tree
from sm120kit.sources.source_records import Pin, VendoredProject


@dataclass(frozen=True)
class Wanted:
    """A change of a project that no series has; ``reason`` has its origin and why it is missing."""

    project: str
    slug: str
    reason: str


def wanted(root: Path, projects: Collection[str]) -> tuple[Wanted, ...]:
    """The wanted changes of ``projects``; none if there is no list below ``root``, the built-in ``patches/``."""
    file = root / "wanted.toml"
    listed = read_toml(file) if file.is_file() else {}
    return tuple(
        Wanted(project, slug, reason) for project in listed if project in projects for slug, reason in listed[project].items()
    )


MAX_SLUG, MAX_SERIES_BYTES = 100, 2**20
"""Limits for a slug, so that names of patch and evidence files are short enough for any file system; for a series file."""

_SLUG = re.compile(r"[a-z0-9]+(?:[-._]{1,2}[a-z0-9]+)*")


def projects(root: Path) -> list[str]:
    """Every project that has patches below ``root``."""
    roots = [root, *filter(None, [built_in_below(root)])]
    return sorted({path.parent.name for each in roots for pattern in ("*/series", "*/*.patch") for path in each.glob(pattern)})


def load(root: Path, project: str) -> tuple[Patch, ...]:
    """The patches of a project in order; empty without a series.

    Raises:
        BadInput: a patch or the series is not well-formed; the message has every problem of every file.
    """
    patches, problems = read(root, project)
    require_no_problems(problems)
    return patches


def load_for_tree(pin: Pin, inside: tuple[VendoredProject, ...], root: Path) -> list[Patch]:
    """The patches of every project in a tree, in the order in which they are applied. See :func:`load` for errors."""
    return [patch for project in projects_in_tree(pin, inside) for patch in load(root, project.project)]


def lint(root: Path) -> list[Problem]:
    """Every problem in every series below ``root``, placeholders, and evidence that is missing or for other hunks."""
    problems = []
    every = [patch for project in projects(root) for patch in read(root, project)[0]]
    for project in projects(root):
        patches, problems_of_project = read(root, project)
        problems += problems_of_project
        problems += _relation_problems(root, patches, every)
        for patch in read_own(root, project)[0]:
            problems += to_fill_in(patch, root / project / f"{patch.slug}.patch")
            problems += evidence.problems(root, patch)
    return problems


def _relation_problems(root: Path, patches: Sequence[Patch], every: Sequence[Patch]) -> Iterator[Problem]:
    """Names in trailers of a project's patches that no patch has, or that a patch later in the series has."""
    for position, patch in enumerate(patches):
        file = root / patch.project / f"{patch.slug}.patch"
        for name in (*patch.requires, *patch.excludes):
            line = next(n for n, text in enumerate(patch.content.split(b"\n"), 1) if name.encode() in text)
            named = [other for other in every if other.is_named((name,))]
            if not named:
                yield Problem(file, line, f"there is no patch {name}")
            elif name in patch.requires and all(other in patches[position:] for other in named):
                yield Problem(file, line, f"it requires {name}, which comes later in the series")


def requiring(patch: Patch, root: Path) -> list[str]:
    """The names of the patches that name a patch as required, and of those that require these in turn."""
    every = [other for project in projects(root) for other in load(root, project)]
    found, last = [patch], [patch]
    while last:
        last = [other for other in every if other not in found and any(needs(other, needed) for needed in last)]
        found += last
    return [other.name for other in every if other in found and other != patch]


def needs(patch: Patch, needed: Patch) -> bool:
    """Whether a patch names another as required; of the variants in a family, it is one for a version of its own."""
    both = patch.project != needed.project or overlap(patch.versions, needed.versions)
    return needed.is_named(patch.requires) and bool(both)


def require_no_problems(problems: list[Problem]) -> None:
    """Raise :class:`BadInput` with all problems, if there are any."""
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the patches"
        raise BadInput("\n".join([count, *map(str, problems)]), "patches/README.md describes the format")


def built_in(root: Path, project: str) -> dict[str, Patch]:
    """The built-in patches of a project below a user's ``patches/``, by slug; none for a ``patches/`` of another kind."""
    below = built_in_below(root)
    return {patch.slug: patch for patch in load(below, project)} if below else {}


def origin(root: Path, patch: Patch) -> str:
    """Where a patch comes from, in words. See :func:`sm120kit.core.data_roots.origin_of`."""
    below = built_in_below(root)
    file = f"{patch.name}.patch"
    return origin_of(below is not None and (root / file).is_file(), below is not None and (below / file).is_file())


def require_own(root: Path, patch: Patch) -> None:
    """Require that a patch is in the series below ``root`` itself.

    Raises:
        SystemRefused: it is a built-in patch, below a user's.
    """
    if not (root / patch.project / f"{patch.slug}.patch").is_file():
        raise SystemRefused(
            f"{patch.name} is built in, and {root} contains patches of your own",
            f"override it: sm120kit patch edit RECIPE --into DIR, change its commit, and export it; its Applies-To can exclude"
            f" versions ({patch.trailer('Applies-To')})",
        )


def read(root: Path, project: str) -> tuple[tuple[Patch, ...], list[Problem]]:
    """The patches of a project that can be parsed, in order, and all problems of the project."""
    patches, problems = read_own(root, project)
    own = {patch.slug: patch for patch in patches}
    replaced = [own.pop(slug, patch) for slug, patch in built_in(root, project).items()]
    every = (*replaced, *own.values())
    for earlier, later in combinations(every, 2):
        shared = overlap(earlier.versions, later.versions) if earlier.family == later.family else ""
        if shared:
            numbered = enumerate(later.content.split(b"\n"), 1)
            number = next((number for number, line in numbered if line.startswith(b"Applies-To:")), 1)
            text = f"Applies-To overlaps that of {earlier.slug}: both hold for {project} {shared}"
            problems.append(Problem(root / project / f"{later.slug}.patch", number, text))
    return every, problems


def read_own(root: Path, project: str) -> tuple[tuple[Patch, ...], list[Problem]]:
    """The patches of a project below ``root`` itself that can be parsed, in order, and all problems of their files."""
    directory, problems, patches = root / project, [], []
    first_line: dict[str, int] = {}
    for number, slug in slug_lines(directory / "series"):
        if slug in first_line:
            problems.append(Problem(directory / "series", number, f"{slug} is in line {first_line[slug]} already"))
            continue
        first_line[slug] = number
        file = directory / f"{slug}.patch"
        if problem := slug_problem(slug):
            problems.append(Problem(directory / "series", number, problem))
        elif not file.is_file() or file.is_symlink():
            problems.append(Problem(directory / "series", number, f"there is no file {slug}.patch"))
        else:
            patch, problems_of_patch = parse(project, file, _content(file, MAX_PATCH_BYTES))
            problems += problems_of_patch
            patches += [patch] if patch else []
    for file in sorted(directory.glob("*.patch")):
        if file.stem not in first_line:
            problems.append(Problem(file, 1, f"not in {directory / 'series'}: add a line {file.stem}, or remove the file"))
    return tuple(patches), problems


def slug_lines(series: Path) -> list[tuple[int, str]]:
    """The slugs of a series file with their line numbers."""
    text = _text(series)
    slugs = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.split("\n"), 1)]
    return [(number, slug) for number, slug in slugs if slug]


def series_content(series: Path, slugs: list[str]) -> bytes:
    """The content of a series file that lists ``slugs``.

    A comment directly above a slug belongs to it. One that an empty line follows stays when the slug is removed.
    """
    above: dict[str, list[str]] = {}
    comments: list[str] = []
    for line in _text(series).splitlines():
        slug = line.partition("#")[0].strip()
        if not slug:
            comments.append(line)
            continue
        if slug not in slugs:
            kept = max((number for number, comment in enumerate(comments, 1) if not comment.strip()), default=0)
            comments = comments[:kept]
            continue
        above[slug] = [*comments, line]
        comments = []
    lines = [line for slug in slugs for line in above.get(slug, [slug])] + comments
    return "".join(f"{line}\n" for line in lines).encode()


def slug_problem(slug: str) -> str:
    """The reason why a slug cannot name a patch file; empty if it can."""
    if not _SLUG.fullmatch(slug):
        return f"{slug[:MAX_SLUG]!r} is no slug: lower case words with '-' between"
    return f"a slug of {len(slug)} characters: {MAX_SLUG} are allowed" if len(slug) > MAX_SLUG else ""


def _text(series: Path) -> str:
    """The text of a series file; empty if there is none."""
    try:
        return _content(series, MAX_SERIES_BYTES).decode() if series.is_file() else ""
    except UnicodeDecodeError as error:
        raise BadInput(f"{series} is not text: {error}", "patches/README.md describes the format") from error


def _content(file: Path, limit: int) -> bytes:
    try:
        return read_found(file, limit)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}", "patches/README.md describes the format") from error
