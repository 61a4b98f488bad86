"""Remove and rename patch files, with everything that names them below ``patches/``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core.atomic_writes import write_together
from sm120kit.core.errors import AlreadyExists, BadInput, NotFound, PatchConflict, nearest
from sm120kit.patches import evidence
from sm120kit.patches.apply import compose
from sm120kit.patches.export import problems_after
from sm120kit.patches.foreign import require_free
from sm120kit.patches.format import RELATIONS, Patch, normal_form
from sm120kit.patches.patch_records import PatchedTree, PatchState
from sm120kit.patches.series import (
    load,
    load_for_tree,
    projects,
    read_own,
    renamed_series,
    require_no_problems,
    require_own,
    requiring,
    series_content,
    slug_lines,
    slug_problem,
)

_SEARCHED = ("docs", "tests", "src", "recipes", "image_programs", "ci", "patches")
"""Directories whose files :func:`mentions` reads, and the files beside them."""

_MAX_BYTES = 2**20


@dataclass(frozen=True)
class Mention:
    """A file that names a patch: the first line that does, and how many do."""

    file: Path
    line: int
    count: int


def find(root: Path, name: str) -> Patch:
    """Find a patch of a series by ``project/slug`` or by a unique slug.

    Raises:
        NotFound: no series has it, or those of several projects.
    """
    every = [patch for project in projects(root) for patch in load(root, project)]
    matches = [patch for patch in every if name in (patch.name, patch.slug)]
    if len(matches) > 1:
        names = ", ".join(patch.name for patch in matches)
        raise NotFound(f"{len(matches)} projects have a patch {name}", f"choose from {names}")
    if not matches:
        near = nearest(name, [patch.name for patch in every])
        raise NotFound(f"no series has a patch {name!r}", f"nearest: {near}; `sm120kit patch list` lists all; or a file")
    return matches[0]


def dependents(patch: Patch, tree: PatchedTree, root: Path, overrides: Path) -> list[str]:
    """The names of the patches that apply to the source of ``tree`` with a patch, but not without it."""
    series = load_for_tree(tree.checkout.pin, tree.inside, root)
    without = [other for other in series if other.name != patch.name]
    (_, before), (_, after) = (compose(tree.checkout, tree.inside, chosen, overrides) for chosen in (series, without))
    applied = {step.patch.name for step in before if step.status.state is PatchState.APPLIES}
    return [s.patch.name for s in after if s.patch.name in applied and s.status.state is not PatchState.APPLIES]


def drop(patch: Patch, root: Path, required_by: Mapping[str, Sequence[str]], *, dependants: bool = False) -> list[Path]:
    """Remove a patch: its file, its line in the series and its proof; returns the files that changed.

    ``required_by`` has by recipe the patches that do not apply without it. With ``dependants``, those and the patches that name
    it as required are removed with it. A proof that another patch names as its evidence stays.

    Raises:
        PatchConflict: there are such patches, and they are not to be removed.
    """
    require_own(root, patch)
    lines = [f"  {name} in {recipe} does not apply without it" for recipe, names in required_by.items() for name in names]
    named = requiring(patch, root)
    lines += [f"  {name} requires it" for name in named]
    if lines and not dependants:
        raise PatchConflict(
            "\n".join([f"other patches need {patch.name}:", *lines]),
            "drop or change them first, or remove them with it: --with-dependants",
        )
    gone = {patch.name, *named, *(name for names in required_by.values() for name in names)}
    every = [other for project in projects(root) for other in load(root, project)]
    for other in every:
        if other.name in gone:
            require_own(root, other)
    kept = [other for other in every if other.name not in gone]
    files: dict[Path, bytes | None] = {}
    for name in sorted(gone):
        directory, slug = (root / name).parent, name.partition("/")[2]
        files[directory / f"{slug}.patch"] = None
        slugs = [each for _, each in slug_lines(directory / "series") if f"{directory.name}/{each}" not in gone]
        files[directory / "series"] = series_content(directory / "series", slugs)
        proof = evidence.path_of(root, name)
        if proof.is_file() and not any(f"{name}.json" in other.trailer("Evidence") for other in kept):
            files[proof] = None
    write_together(files)
    return list(files)


def rename(patch: Patch, slug: str, root: Path) -> list[Path]:
    """Rename a patch and its variants: files, lines of the series, proofs, and the trailers that name these.

    Returns the files that changed, old and new. If ``slug`` has another family than the patch, all variants get it.

    Raises:
        BadInput: ``slug`` is no slug.
        AlreadyExists: another patch or proof has the name.
    """
    require_own(root, patch)
    if problem := slug_problem(slug):
        raise BadInput(problem, "patches/README.md describes the names of patches")
    directory = root / patch.project
    family = slug.partition("--")[0]
    slugs = {patch.slug: slug}
    if family != patch.family:
        variants = [other.slug for other in load(root, patch.project) if other.family == patch.family and other != patch]
        slugs |= {old: family + old.removeprefix(patch.family) for old in variants}
    names = {f"{patch.project}/{old}": f"{patch.project}/{new}" for old, new in ({patch.family: family} | slugs).items()}
    files: dict[Path, bytes | None] = {}
    for old, new in slugs.items():
        require_free(root, patch.project, new)
        proof, renamed = (evidence.path_of(root, f"{patch.project}/{name}") for name in (old, new))
        if proof.is_file():
            if renamed.exists():
                raise AlreadyExists(f"{renamed} exists already", "choose another name, or remove it")
            content = proof.read_bytes()
            before, after = (f'"patch": "{patch.project}/{name}"'.encode() for name in (old, new))
            files |= {proof: None, renamed: content.replace(before, after)}
    for project in projects(root):
        for other in read_own(root, project)[0]:
            new = slugs.get(other.slug, other.slug) if project == patch.project else other.slug
            body = other.body
            body = renamed_relations(body, names)
            for renaming in slugs.items():
                proofs = [f"{evidence.PROOFS}/{patch.project}/{name}.json" for name in renaming]
                body = re.sub(rf"(?<![\w./-]){re.escape(proofs[0])}(?![\w-])", proofs[1], body)
            if new != other.slug or body != other.body:
                files[root / project / f"{other.slug}.patch"] = None
                files[root / project / f"{new}.patch"] = normal_form(replace(other, body=body))
    files[directory / "series"] = renamed_series(directory / "series", slugs)
    require_no_problems([problem for project in projects(root) for problem in problems_after(files, root, project)])
    write_together(files)
    return list(files)


def renamed_relations(body: str, names: Mapping[str, str]) -> str:
    """The message of a patch with other names of patches in its trailers ``Requires`` and ``Conflicts``."""

    def renamed(match: re.Match[str]) -> str:
        return re.sub(r"[\w.-]+/[\w.-]+", lambda name: names.get(name[0], name[0]), match[0])

    return re.sub(rf"^(?:{'|'.join(RELATIONS)}):.*(?:\n[ \t].*)*", renamed, body, flags=re.MULTILINE)


def mentions(patch: Patch, directory: Path) -> Iterator[Mention]:
    """The files of a repository that name a patch by its slug, and the files beside its documentation, sources and tests.

    Binary files and those of more than 1 MiB are left out.
    """
    proof = f"{patch.name}.json"
    named = re.compile(rf"(?<![\w-]){re.escape(patch.slug)}(?![\w-])|\b{re.escape(proof)}\b".encode())
    files = [path for path in directory.glob("*") if path.is_file()]
    files += [path for name in _SEARCHED for path in (directory / name).rglob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(files):
        if path.stat().st_size > _MAX_BYTES or "__pycache__" in path.parts:
            continue
        content = path.read_bytes()
        lines = [] if b"\0" in content else [n for n, line in enumerate(content.split(b"\n"), 1) if named.search(line)]
        if lines:
            yield Mention(path, lines[0], len(lines))
