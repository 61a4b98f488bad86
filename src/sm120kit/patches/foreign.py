"""Import a diff or mail that was not made for a series: it becomes a patch file whose trailers are to be filled in.

git decides what a diff is and where it applies, as for ``git apply``: plain diffs, blank lines as context, other prefixes of
paths and text around the diff are accepted. The patch file has the diff of the two trees.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from sm120kit.core import reporting
from sm120kit.core.atomic_writes import write_together
from sm120kit.core.data_roots import built_in_below
from sm120kit.core.errors import AlreadyExists, BadInput, NotFound, PatchConflict
from sm120kit.patches._export import diff, parse_own, problems_after, slug_of
from sm120kit.patches._locate import changed, fit_with_fuzz, places
from sm120kit.patches._message import SUBJECT, complete, to_fill_in, with_defaults
from sm120kit.patches.diff import FILE_MODES, Hunk, Problem, blob_id, path_problem, sides, split_lines
from sm120kit.patches.drift import MAX_PLACES
from sm120kit.patches.format import Patch, normal_form, render
from sm120kit.patches.mails import ForeignPatch
from sm120kit.patches.patch_records import PatchedTree, TreeProject, owner_of, projects_in_tree
from sm120kit.patches.series import built_in, require_no_problems, series_content, slug_lines, slug_problem
from sm120kit.sources.git import Content, GitIndex, Repository
from sm120kit.sources.wheel_commits import BESIDE

if TYPE_CHECKING:
    from unidiff.patch import PatchedFile

_BY_HAND = "apply it by hand in a directory of `sm120kit patch edit`, commit, and use `sm120kit patch export`"
_NO_TEXT = "leave that part out of the diff: a patch changes plain text files only"
_OPTIONS = "--project names the project, --strip N and --directory DIR change the paths, --recipe chooses the version"
_CHANGED = re.compile(rb"^--- (?!/dev/null)", re.MULTILINE)
_BLOBS = re.compile(rb"^index [0-9a-f]{7,40}\.\.", re.MULTILINE)
_WITHOUT_CONTEXT = re.compile(rb"^@@ -[1-9]\d*,0 \+", re.MULTILINE)
_INDEX = re.compile(r"^index ([0-9a-f]{7,40})\.\.", re.MULTILINE)
_MODE = re.compile(r"^(new file|new) mode (100644|100755)$", re.MULTILINE)
_WITHOUT_NEW = re.compile(rb"^@@ -[\d,]+ \+[1-9]\d*,0 @@", re.MULTILINE)
_COMBINED = re.compile(rb"^@@@+ -", re.MULTILINE)
_NO_FILE = re.compile(r"^ (?:create mode|mode change \d+ =>) (?!100)(\d+) (.*)$", re.MULTILINE)
_END = re.compile(rb"^\\ .*$", re.MULTILINE)
"""Below a last line without a line end; what follows the backslash depends on the language."""
_SUMMARY = re.compile(r'^ (create|delete) (?:mode \d+ )?"?(.*?)"?$', re.MULTILINE)
_NAMED = re.compile(rb"^(?:---|\+\+\+) ([^\t\n]+)", re.MULTILINE)
EXISTS = " exists already"
"""How the reason ends where a diff creates a file that is there: elsewhere, it would create another one."""

_RENAMED = re.compile(rb"^(rename from|rename to|copy to) ([^\n]+)$", re.MULTILINE)
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
"""A byte of a name as git quotes it."""


@dataclass(frozen=True)
class ImportTarget:
    """The place of an imported patch: ``project`` and ``slug`` are derived from the patch if they are empty.

    ``strip`` leading directories are removed from its paths, which ``a/`` and ``b/`` count among: by default one, or none where
    only that gives files of the source. Then the paths are below ``directory``.
    """

    project: str = ""
    slug: str = ""
    strip: int | None = None
    directory: str = ""


@dataclass(frozen=True)
class Imported:
    """A patch file that was written, what is to be filled in, and the files of the diff that the source does not have."""

    file: Path
    to_fill_in: tuple[Problem, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Files:
    """The paths of a diff in the order of its sections, those that it creates, and those that it removes or renames.

    ``special``: what its binary files, links and submodules are, by path.
    """

    paths: tuple[str, ...]
    created: Set[str]
    removed: Set[str]
    special: Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """The files of a diff in a tree: it applies with ``strip`` below ``directory``, without the files ``left_out``.

    ``known``: the tree has the directories of all files that it creates.
    """

    project: TreeProject
    strip: int
    directory: str
    left_out: tuple[str, ...]
    known: bool

    @property
    def arguments(self) -> list[str]:
        below = [f"--directory={self.directory}"] if self.directory else []
        return [f"-p{self.strip}", *below, *self.limits("exclude", self.left_out)]

    def limits(self, option: str, paths: Iterable[str]) -> Iterator[str]:
        """Options of ``git apply`` that include or exclude paths of the diff."""
        return (f"--{option}=" + re.sub(r"([\\*?\[])", r"\\\1", self.directory + path) for path in paths)


def import_patches(
    foreign: Sequence[ForeignPatch], tree: PatchedTree, target: ImportTarget, root: Path
) -> tuple[Imported, ...]:
    """Append patches to the series below ``root``, for the versions in ``tree``: all of them, or none if one is refused.

    ``tree`` has the series applied.

    Raises:
        BadInput: a part of a diff is refused, or its files belong to no project or several.
        PatchConflict: one does not apply to the tree with those before it, or is contained in it.
        AlreadyExists: there is a patch of its name.
        NotFound: the tree does not contain ``target.project``.
    """
    if len(foreign) > 1 and target.slug:
        raise BadInput(
            f"--name is for one patch, and there are {len(foreign)}", "leave it out: each is named after its subject"
        )
    above, written, imported = tree.tree, dict[Path, bytes | None](), list[Imported]()
    for each in of_the_source(foreign):
        patch, left_out, above = _import(each, tree, above, target)
        if built_in_below(root):
            patch = replace(patch, content=normal_form(with_defaults(patch)))
        directory = root / patch.project
        file, series = directory / f"{patch.slug}.patch", directory / "series"
        require_free(root, patch.project, patch.slug)
        if file in written:
            raise BadInput(f"two patches of {each.file} have the subject {patch.subject!r}", "change one")
        slugs = [slug for _, slug in slug_lines(series)]
        new = [path.stem for path in written if path.parent == directory and path != series]
        written |= {file: patch.content, series: series_content(series, [*slugs, *new, patch.slug])}
        imported.append(Imported(file, tuple(to_fill_in(patch, file)), left_out))
    require_no_problems([p for name in {path.parent.name for path in written} for p in problems_after(written, root, name)])
    write_together(written)
    return tuple(imported)


def require_free(root: Path, project: str, slug: str) -> None:
    """Require that no patch has this name.

    Raises:
        AlreadyExists: a series or a file has it.
    """
    file = root / project / f"{slug}.patch"
    listed = [name for _, name in slug_lines(file.with_name("series"))]
    if file.exists() or file.is_symlink() or slug in listed or slug in built_in(root, project):
        raise AlreadyExists(f"there is a patch {project}/{slug} already", "choose another name")


def _import(foreign: ForeignPatch, tree: PatchedTree, above: str, target: ImportTarget) -> tuple[Patch, tuple[str, ...], str]:
    """A patch of the tree ``above``, the files that are left out, and the tree that it gives."""
    own = foreign.message
    place = guessed_place(foreign, tree, above, target)
    project = place.project
    slug = target.slug or own.slug or slug_of(foreign.file.stem)
    if problem := slug_problem(slug):
        reason = f"{foreign.file}: {problem}" if slug else f"the subject of {foreign.file} gives no file name"
        raise BadInput(reason, "name it with --name SLUG")
    subject, body = own.subject or SUBJECT, complete(own.body, f"{project.project}/{slug}", project.version)
    after = applied_tree(foreign, tree, above, place)
    content = render(
        own.author, own.date, subject, body, diff(Repository(tree.checkout.repository), above, after, project.path)
    )
    result = parse_own(project.project, slug, content)
    if not result.is_for(project.version):
        raise BadInput(
            f"{foreign.file} is for {result.trailer('Applies-To')}, which excludes {project.project} {project.version}",
            "choose another --recipe, or change its Applies-To",
        )
    return result, place.left_out, after


def applied_tree(foreign: ForeignPatch, tree: PatchedTree, above: str, place: Place) -> str:
    """The tree that a diff gives of the tree ``above``.

    Raises:
        BadInput: a part of it is a binary file, link or submodule.
        PatchConflict: it does not apply, changes nothing, or would replace a file or directory that it does not name.
    """
    repository = Repository(tree.checkout.repository)
    files = _files(foreign, repository, place.strip)
    for path in files.special.keys() - place.left_out:
        raise BadInput(f"{foreign.file}: {path} {files.special[path]}", _NO_TEXT)
    with repository.index(above) as index:
        after = _applied_by_git(index, foreign, place) or _placed_by_hunks(foreign, tree, above, place)
    changes = repository.changed(above, after)
    if not changes:
        raise PatchConflict(f"{foreign.file} changes nothing in the source", "leave it out, or choose another recipe")
    if others := sorted({*changes} - {place.directory + path for path in (*files.paths, *files.removed)}):
        raise PatchConflict(
            f"{foreign.file} makes a file or directory in place of {others[0]}", "remove that in the diff first"
        )
    return after


def _applied_by_git(index: GitIndex, foreign: ForeignPatch, place: Place) -> str:
    """The tree with a diff; empty where neither its lines nor its blob ids decide where its hunks are."""
    before = index.write_tree()
    arguments = ["apply", "--cached", "--verbose", "--whitespace=nowarn", *place.arguments]
    result = index.git(*arguments, "-", stdin=foreign.diff, check=False)
    if result.returncode == 0 and " (offset " not in result.stderr:
        return index.write_tree()
    if not _BLOBS.search(foreign.diff):
        return ""
    index.git("read-tree", before)
    elsewhere = ("-C", index.file.parent)  # --cached or not, it writes empty files
    merged = index.git(*elsewhere, *arguments, "--3way", "--unidiff-zero", "-", stdin=foreign.diff, check=False)
    decided = merged.returncode == 0 and "Falling back to direct application" not in merged.stderr
    return index.write_tree() if decided else ""


def _placed_by_hunks(foreign: ForeignPatch, tree: PatchedTree, above: str, place: Place) -> str:
    """The tree with a diff whose hunks fit exactly one place each, though not at their lines or with all of their context."""
    from unidiff.errors import UnidiffParseError  # imported here: most commands parse no patch
    from unidiff.patch import PatchSet

    where = f"{place.project.project} {place.project.version} with its series"
    repository, changes = Repository(tree.checkout.repository), dict[str, Content]()
    with repository.index(above) as index:
        undo = ("apply", "--cached", "--check", "--reverse", *place.arguments, "-")
        decided = not _WITHOUT_NEW.search(foreign.diff)  # reversed, such a hunk fits anywhere
        if decided and index.git(*undo, stdin=foreign.diff, check=False).returncode == 0:
            raise PatchConflict(f"{where} contains {foreign.file} already", "leave it out, or choose another recipe")
        paths, entries = _files(foreign, repository, place.strip).paths, _entries(repository.path, above)
        try:
            files = PatchSet(
                line.decode("latin-1") for line in split_lines(_END.sub(rb"\\ No newline at end of file", foreign.diff))
            )
            problems = list[str]()
            without_hunks = [path for path, file in zip(paths, files, strict=True) if not file and path not in place.left_out]
            for path, file in zip(paths, files, strict=True):
                full = place.directory + path
                if full not in changes and (entry := entries.get(full, ("", "")))[0] in FILE_MODES:
                    changes[full] = entry[0], repository.git("cat-file", "blob", entry[1]).raw
                problems += _change(changes, full, file) if file and path not in place.left_out else []
        except (UnidiffParseError, ValueError) as error:
            raise PatchConflict(f"{foreign.file}: {error}", _BY_HAND) from error
        if problems:
            message = "\n  ".join([f"{foreign.file} does not apply to {where}:", *problems])
            raise PatchConflict(message, f"choose another recipe, or {_BY_HAND}")
        index.put(changes)
        if without_hunks:
            arguments = ("apply", "--cached", *place.arguments, *place.limits("include", without_hunks), "-")
            if (rest := index.git(*arguments, stdin=foreign.diff, check=False)).returncode:
                raise PatchConflict(f"{foreign.file} does not apply to {where}:\n  {rest.stderr.strip()}", _BY_HAND)
        return index.write_tree()


def _change(contents: dict[str, Content], path: str, file: PatchedFile) -> Iterator[str]:
    """Change the content of a file, or yield why that cannot be done."""
    header = "".join(map(str, file.patch_info or ()))
    modes, (mode, before) = dict(_MODE.findall(header)), contents.get(path) or ("", b"")
    hunks = [Hunk(path, number, hunk.source_start, "", 0, *sides(hunk)) for number, hunk in enumerate(file, 1)]
    if _RENAMED.search(header.encode("latin-1")):
        yield f"{path}: it is renamed and changed, beside hunks that are not at their lines"
    elif not before and file.is_added_file:
        contents[path] = modes.get("new file", mode or FILE_MODES[0]), b"".join(hunks[0].new)
    elif not mode:
        yield f"{path}: there is no such file, or it is no plain file"
    elif file.is_removed_file and before == b"".join(hunks[0].old):
        contents[path] = None
    elif file.is_removed_file:
        yield f"{path}: it is deleted, but has other content"
    else:
        blob = _INDEX.search(header)
        found = places(hunks, before, blob_id(before).startswith(blob[1]) if blob else None, fit_with_fuzz)
        unfit = [(hunk, starts) for hunk, (_, starts) in zip(hunks, found, strict=True) if len(starts) != 1]
        for hunk, starts in unfit:
            lines = ", ".join(map(str, starts[:MAX_PLACES]))
            yield f"{path}:{hunk.start}: hunk {hunk.number} fits {f'several lines: {lines}' if starts else 'no line'}"
        if unfit:
            return
        if (after := changed(found, before)) is None:
            yield f"{path}: a line follows the end of the file"
            return
        contents[path] = modes.get("new", mode), after
        for hunk, (cut, _) in zip(hunks, found, strict=True):
            if less := len(hunk.old) - len(cut.old):
                reporting.info(f"{path}: hunk {hunk.number} applies without {less} lines of context, which differ: review it")


@functools.lru_cache(32)
def _files(foreign: ForeignPatch, repository: Repository, strip: int) -> _Files:
    """The paths of a diff without ``strip`` leading directories."""
    if _COMBINED.search(foreign.diff):
        remedy = "make it against one parent: git diff COMMIT^1 COMMIT"
        raise BadInput(f"{foreign.file} has the combined diff of a merge, which git does not apply", remedy)
    if _WITHOUT_CONTEXT.search(foreign.diff) and not _BLOBS.search(foreign.diff):
        raise BadInput(f"{foreign.file}: a hunk adds lines without context", "make it with context: git diff -U3, or diff -u")
    arguments = ("apply", f"-p{strip}")
    listed = repository.git(*arguments, "--numstat", "-z", "-", stdin=foreign.diff, check=False)
    if listed.returncode != 0:
        reason = next(iter(listed.stderr.strip().splitlines()), "git does not accept it").removeprefix("error: ")
        raise BadInput(f"{foreign.file}: {reason}", f"make it again with git diff --no-color; or {_BY_HAND}")
    rows = [row.split(b"\t", 2) for row in listed.raw.split(b"\0") if row]
    paths = [row[2].decode(errors="replace") for row in rows]
    if len(re.findall(rb"^diff --git ", foreign.diff, re.MULTILINE)) > len(rows):
        raise BadInput(f"{foreign.file}: git ignores a part of it, such as a binary file", _NO_TEXT)
    for path in paths:
        if problem := path_problem(path):
            raise BadInput(f"{foreign.file}: the path {path!r} {problem}", _BY_HAND)
    summary = repository.git(*arguments, "--summary", "-", stdin=foreign.diff).stdout
    named = [*_SUMMARY.findall(summary)]
    for kind, quoted in _RENAMED.findall(foreign.diff):
        name = _OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), quoted.strip(b'"')).decode(errors="replace")
        named.append((kind.decode(), "/".join(name.split("/")[max(strip - 1, 0) :])))
    removed = frozenset(path for kind, path in named if kind in ("delete", "rename from"))
    special = {path: f"has mode {mode}: not a plain file" for mode, path in _NO_FILE.findall(summary)}
    special |= {path: "is a binary file" for row, path in zip(rows, paths, strict=True) if row[0] == b"-"}
    return _Files(tuple(paths), frozenset(path for _, path in named) - removed, removed, special)


def of_the_source(foreign: Sequence[ForeignPatch]) -> list[ForeignPatch]:
    """Those of several patches that are not of tests and documentation alone, which are left out; a single one stays."""
    kept = [patch for patch in foreign if not _beside(patch)] or list(foreign)
    for patch in foreign:
        if patch not in kept:
            reporting.info(f"left out {patch.message.subject or patch.file}: it changes only tests and documentation")
    return kept


def _beside(foreign: ForeignPatch) -> bool:
    named = re.findall(rb"^(?:---|\+\+\+) [^\s/]+/([^\t\n]*)", foreign.diff, re.MULTILINE)
    return bool(named) and all(BESIDE & {*PurePosixPath(path.decode(errors="replace")).parts[:-1]} for path in named)


def guessed_place(foreign: ForeignPatch, tree: PatchedTree, above: str, target: ImportTarget) -> Place:
    """Where the files of a diff are, see :func:`place_of`; without options, also where the directory of a package differs.

    Paths may be relative to the package, or have directories above those of the tree: ``python/sglang/...``, or those of an
    installation. That new files could be there is no reason to put them there.
    """
    if target.strip is not None or target.directory or not _CHANGED.search(foreign.diff):
        return place_of(foreign, tree, above, target)
    deepest = max(path.count(b"/") for path in _NAMED.findall(foreign.diff))
    stripped = (replace(target, strip=strip) for strip in range(2, deepest))
    problems = []
    for guess in (target, replace(target, directory=tree.checkout.pin.project), *stripped):
        try:
            return place_of(foreign, tree, above, guess)
        except BadInput as error:
            problems.append(error)
            if EXISTS in error.message:
                break
    raise problems[0]


def place_of(foreign: ForeignPatch, tree: PatchedTree, above: str, target: ImportTarget) -> Place:
    """Where the files of a diff are: where those that it changes exist and those that it creates do not.

    The directories of new files decide between several projects.
    """
    repository, projects = Repository(tree.checkout.repository), projects_in_tree(tree.checkout.pin, tree.inside)
    names = [project.project for project in projects]
    if target.project and target.project not in names:
        raise NotFound(f"no project {target.project} in the source of this recipe", f"projects: {', '.join(names)}")
    existing = _entries(tree.checkout.repository, above)
    refused: list[list[str]] = []
    exists = False
    unread: list[BadInput] = []
    found: list[Place] = []
    for strip in (1, 0) if target.strip is None else (target.strip,):
        if exists:
            break
        try:
            files = _files(foreign, repository, strip)
            named = dict(zip(files.paths, _files(foreign, repository, min(strip, 1)).paths, strict=True))
        except BadInput as error:
            unread.append(error)
            continue
        for prefix in dict.fromkeys(project.prefix for project in projects):
            directory = prefix + (f"{target.directory.strip('/')}/" if target.directory else "")
            place, wrong = _fit(foreign, (named, files.created), directory, existing, projects)
            if place and target.project in ("", place.project.project):
                found.append(replace(place, strip=strip))
            elif wrong:
                refused.append(wrong)
        exists = any(EXISTS in text for wrong in refused for text in wrong)
    if found := [place for place in found if place.known or not exists]:
        return _only(foreign, found)
    if unread and not refused:
        raise unread[0]
    nearest = min(refused, key=len) if refused else [f"its files are not those of {target.project}"]
    problems = (f"  {text}" for text in sorted(nearest))
    raise BadInput("\n".join([f"{foreign.file} is not for this source:", *problems]), _OPTIONS)


@functools.lru_cache(8)
def _entries(repository: Path, tree: str) -> Mapping[str, tuple[str, str]]:
    """The mode and the blob id of each file of a tree."""
    listed = Repository(repository).git("ls-tree", "-r", "-z", tree).raw.split(b"\0")
    rows = (row.partition(b"\t") for row in listed if row)
    return {os.fsdecode(name): (fields[:6].decode(), fields[-40:].decode()) for fields, _, name in rows}


def _only(foreign: ForeignPatch, found: Sequence[Place]) -> Place:
    """The place whose directories exist, of those that strip the same number of directories, the first number first."""
    best = next((place for place in found if place.known), found[0])
    usable = [place for place in found if (place.known, place.strip) == (best.known, best.strip)]
    if len(usable) == 1:
        return best
    names = " or ".join(sorted({place.project.project for place in usable}))
    raise BadInput(f"the files of {foreign.file} can be those of {names}", _OPTIONS)


def _is_filled(entry: tuple[str, str] | None) -> bool:
    """Whether there is something other than an empty file, which a diff without a header of git fills as if it created it."""
    return entry is not None and entry[1] != blob_id(b"")


def _fit(
    foreign: ForeignPatch,
    named: tuple[Mapping[str, str], Set[str]],
    directory: str,
    existing: Mapping[str, tuple[str, str]],
    projects: Sequence[TreeProject],
) -> tuple[Place | None, list[str]]:
    """The place of a diff below a directory, or the reasons why it cannot be there.

    ``named`` are its paths, each with that in its author's tree, and those that are created.
    """
    paths, created = named
    tops = {path.removeprefix(directory).partition("/")[0] for path in existing if created and path.startswith(directory)}
    absent = [path for path in paths if path not in created and directory + path not in existing]
    new = [path for path in paths if path in created and path.partition("/")[0] not in tops]
    left_out = tuple(path for path in (*absent, *new) if BESIDE & {*PurePosixPath(paths[path]).parts[:-1]})
    wrong = [f"{directory}{path} does not exist" for path in absent if path not in left_out]
    wrong += [f"{directory}{path}{EXISTS}" for path in paths if path in created and _is_filled(existing.get(directory + path))]
    kept = [path for path in paths if path not in left_out]
    if wrong or not kept:
        return None, wrong or [f"{path} is not in this distribution" for path in left_out[:1]]
    owners = {owner for path in kept if (owner := owner_of(directory + path, projects))}
    if len(owners) > 1:
        both = " and ".join(sorted(owner.project for owner in owners))
        raise BadInput(f"{foreign.file} changes files of {both}", "one patch is of one project: split it")
    files = [path for path in kept if path in created]
    directories = {path.rpartition("/")[0] for path in existing if files}
    known = all("/" in path and (directory + path).rpartition("/")[0] in directories for path in files)
    return Place(owners.pop(), 1, directory, left_out, known), []
