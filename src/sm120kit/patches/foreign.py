"""Import a diff, mail or commit that was not made for a series: it becomes a patch file whose trailers are to be filled in.

The diff is parsed as strictly as that of a patch of a series, so that no part of it is ignored. Only blob ids may be missing or
abbreviated: it is applied to the patched source of a recipe, and the patch file has the diff of the two trees.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sm120kit.core.errors import BadPatch, PatchAlreadyUpstream, PatchConflict, PatchOverwritten, UnknownName
from sm120kit.core.outside import mail_date, read_input
from sm120kit.core.state import write_together
from sm120kit.patches.diff import Diff, Problem, scan
from sm120kit.patches.drift import steps
from sm120kit.patches.export import CommitMessage, diff, parse_own, problems_after, read_message, slug_of
from sm120kit.patches.format import Patch, render
from sm120kit.patches.message import AUTHOR, SUBJECT, complete, to_fill_in
from sm120kit.patches.records import PatchedTree, PatchState, TreeProject, owner_of, projects_in_tree
from sm120kit.patches.series import require_no_problems, series_content, slug_lines, slug_problem
from sm120kit.sources.git import Repository

_BY_HAND = (
    "apply it by hand in a directory of `sm120kit patch edit`, commit, and use `sm120kit patch export`;"
    " `sm120kit patch new` prints a commit message"
)
_DIFF = re.compile(rb"^diff --git ", re.MULTILINE)
_FIRST_LINE = re.compile(rb"^From [0-9a-f]{40} Mon Sep 17 00:00:00 2001$", re.MULTILINE)
_HEADER = re.compile(rb"(?:From [^\n]*\n)?(?:[A-Za-z-]+: [^\n]*\n(?:[ \t][^\n]*\n)*)+(?=\n)")


@dataclass(frozen=True)
class ForeignPatch:
    """A diff with the message that it came with. The paths in ``diff`` are those of its author's tree.

    ``file`` is where it was read from, and the diff begins at its line ``line``.
    """

    file: Path
    line: int
    message: CommitMessage
    diff: bytes


@dataclass(frozen=True)
class ImportTarget:
    """The place of an imported patch: ``project`` and ``slug`` are derived from the patch if they are empty.

    ``strip`` leading directories are removed from its paths, which ``a/`` and ``b/`` count among.
    """

    project: str = ""
    slug: str = ""
    strip: int = 1


def read_diff(file: Path) -> ForeignPatch:
    """Read the output of ``git diff``, ``git show`` or ``git format-patch``, or a mail with a patch.

    Raises:
        BadPatch: the file cannot be read, or contains no git diff or several commits.
    """
    try:
        content = read_input(file)
    except OSError as error:
        raise BadPatch(f"{file} cannot be read: {error.strerror}", "name a file, or a commit with --repository") from error
    if len(_FIRST_LINE.findall(content)) > 1:
        raise BadPatch(f"{file} contains several commits", "split it with `git mailsplit` and import them one by one")
    header = _HEADER.match(content)
    if header and re.search(rb"^(From|Subject): ", header[0], re.MULTILINE):
        own, body = _read_mail(content)
    else:
        own, body = None, content
    start = _DIFF.search(body)
    if not start:
        raise BadPatch(f"{file} has no line 'diff --git': it is not a git diff", "make one with git diff or git format-patch")
    if own is None:
        above = textwrap.dedent(body[: start.start()].decode(errors="replace")).strip()
        own = CommitMessage(AUTHOR, _now(), "", above)
    change = body[start.start() :]
    return ForeignPatch(file, content[: max(content.find(change), 0)].count(b"\n") + 1, own, change)


def _read_mail(content: bytes) -> tuple[CommitMessage, bytes]:
    """The message of a mail and the text below it, decoded as ``git am`` does."""
    with tempfile.TemporaryDirectory(prefix="sm120kit-mail-") as scratch:
        body, below = Path(scratch) / "message", Path(scratch) / "patch"
        repository = Repository.init(Path(scratch) / "repository")
        info = repository.git("mailinfo", "-b", "--encoding=UTF-8", body, below, stdin=content).stdout
        fields = dict(line.partition(": ")[::2] for line in info.splitlines())
        try:
            date = mail_date(fields.get("Date", ""))
        except ValueError:
            date = _now()
        author = f"{fields['Author']} <{fields['Email']}>" if {"Author", "Email"} <= fields.keys() else AUTHOR
        text = body.read_bytes().decode(errors="replace")
        return CommitMessage(
            author, date.replace(tzinfo=date.tzinfo or UTC), fields.get("Subject", ""), text
        ), below.read_bytes()


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def read_commit(directory: Path, revision: str) -> ForeignPatch:
    """Read a commit of a git repository, whose configuration is not applied.

    Raises:
        BadPatch: the directory has no repository or no such commit, or the commit has not exactly one parent.
    """
    git_directory = directory / ".git"
    if not git_directory.exists():
        git_directory = directory
    with tempfile.TemporaryDirectory(prefix="sm120kit-commit-") as scratch:
        repository = Repository.init(Path(scratch) / "repository")
        where = f"--git-dir={git_directory.absolute()}"
        parsed = repository.git(where, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", check=False)
        commit = parsed.stdout.strip()
        result = parsed
        if parsed.returncode == 0:
            source = git_directory.absolute()
            result = repository.fetch(source, f"{commit}:refs/heads/imported", options=("--depth=2",), check=False)
        if result.returncode != 0:
            reason = next(iter(result.stderr.strip().splitlines()), "no such revision").removeprefix("fatal: ")
            raise BadPatch(f"{revision} of {directory} cannot be read: {reason}", "name a commit of a git repository")
        own = read_message(repository, commit)
        if len(own.parents.split()) != 1:
            kind = "a merge" if own.parents else "the first commit of its repository"
            raise BadPatch(f"{revision} of {directory} is {kind}", "name a commit with one parent")
        return ForeignPatch(Path(f"{slug_of(own.subject) or commit[:12]}.patch"), 1, own, diff(repository, own.parents, commit))


def import_patch(foreign: ForeignPatch, tree: PatchedTree, target: ImportTarget, root: Path) -> tuple[Path, list[Problem]]:
    """Write a patch to the end of a series below ``root``, for the version in ``tree``; returns its file and its placeholders.

    ``tree`` has the series applied.

    Raises:
        BadPatch: a part of the diff is refused, or its files belong to no project or several.
        PatchConflict, PatchAlreadyUpstream: it does not apply to the tree, or the tree contains it.
        PatchOverwritten: there is a patch of its name.
        UnknownName: the tree does not contain ``target.project``.
    """
    own, repository = foreign.message, Repository(tree.checkout.repository)
    scanned = _scan(foreign, foreign.diff)
    project, paths = _place(foreign, scanned, tree, target)
    slug = target.slug or own.slug or slug_of(foreign.file.stem)
    if problem := slug_problem(slug):
        reason = f"{foreign.file}: {problem}" if slug else f"the subject of {foreign.file} gives no file name"
        raise BadPatch(reason, "name it with --name SLUG")
    require_free(root, project.project, slug)
    change = _with_paths(foreign.diff, paths)
    scanned = _scan(foreign, change)
    subject, body = own.subject or SUBJECT, complete(own.body, f"{project.project}/{slug}", project.version)
    hunks, files = scanned.hunks, scanned.files
    patch = Patch(project.project, slug, own.author, own.date, subject, body, (), SpecifierSet(), change, hunks, b"", files)
    (step,) = steps(tree.checkout, tree.inside, [patch], tree.tree)
    where = f"{project.project} {project.version} with its series"
    if step.status.state is PatchState.CONFLICTS:
        raise PatchConflict(
            f"{foreign.file} does not apply to {where}:\n{step.status.detail}", f"choose another --recipe, or {_BY_HAND}"
        )
    if step.status.state is PatchState.ALREADY_UPSTREAM:
        raise PatchAlreadyUpstream(f"{where} contains {foreign.file} already", "choose another --recipe")
    content = render(own.author, own.date, subject, body, diff(repository, tree.tree, step.tree, project.path))
    result = parse_own(project.project, slug, content)
    if not result.is_for(project.version):
        raise BadPatch(
            f"{foreign.file} is for {result.trailer('Applies-To')}, which excludes {project.project} {project.version}",
            "choose another --recipe, or change its Applies-To",
        )
    directory = root / project.project
    file, series = directory / f"{slug}.patch", directory / "series"
    slugs = [*(name for _, name in slug_lines(series)), slug]
    written: dict[Path, bytes | None] = {file: content, series: series_content(series, slugs)}
    require_no_problems(problems_after(written, root, project.project))
    write_together(written)
    return file, list(to_fill_in(result, file))


def require_free(root: Path, project: str, slug: str) -> None:
    """Require that no patch has this name.

    Raises:
        PatchOverwritten: a series or a file has it.
    """
    file = root / project / f"{slug}.patch"
    if file.exists() or file.is_symlink() or slug in [name for _, name in slug_lines(file.with_name("series"))]:
        raise PatchOverwritten(f"there is a patch {project}/{slug} already", "choose another name")


def _scan(foreign: ForeignPatch, change: bytes) -> Diff:
    """Parse the diff of a foreign patch.

    Raises:
        BadPatch: a part of it is refused; the message has all problems.
    """
    problems: list[Problem] = []
    scanned = scan(change, foreign.file, foreign.line, problems, full_index=False)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {foreign.file}"
        raise BadPatch("\n".join([count, *map(str, problems)]), _BY_HAND)
    return scanned


def _place(foreign: ForeignPatch, scanned: Diff, tree: PatchedTree, target: ImportTarget) -> tuple[TreeProject, dict[str, str]]:
    """The project that a diff changes, and by path in the diff, the path relative to the project's root.

    The files are below the root of the tree or of a project in it: where those that the diff changes exist, those that it
    creates do not, and the directories of those do.
    """
    projects = projects_in_tree(tree.checkout.pin, tree.inside)
    names = [project.project for project in projects]
    if target.project and target.project not in names:
        raise UnknownName(f"no project {target.project} in the source of this recipe", f"projects: {', '.join(names)}")
    stripped = {file.path: "/".join(file.path.split("/")[max(target.strip - 1, 0) :]) for file in scanned.files}
    if not all(stripped.values()):
        raise BadPatch(f"{foreign.file}: a path has fewer than {target.strip + 1} parts", "pass a smaller --strip")
    started = {hunk.path: hunk.start for hunk in reversed(scanned.hunks)}
    created = {file.path for file in scanned.files if started.get(file.path) == 0 or (file.old and not file.old.strip("0"))}
    existing = set(Repository(tree.checkout.repository).paths(tree.tree))
    directories = {path.rpartition("/")[0] for path in existing}
    places: dict[str, TreeProject] = {}
    fresh: set[str] = set()
    problems: list[str] = []
    for prefix in {project.prefix for project in projects}:
        full = {path: prefix + name for path, name in stripped.items()}
        wrong = [name for path, name in full.items() if (name in existing) == (path in created)]
        owners = {owner for name in full.values() if (owner := owner_of(name, projects))}
        if target.project and target.project not in {owner.project for owner in owners}:
            continue
        if wrong:
            problems.append(f"  {wrong[0]} {'exists already' if wrong[0] in existing else 'does not exist'}")
        elif len(owners) > 1:
            names = sorted(owner.project for owner in owners)
            raise BadPatch(f"{foreign.file} changes files of {' and '.join(names)}", "one patch is of one project: split it")
        else:
            (places[prefix],) = owners
            if all(full[path].rpartition("/")[0] in directories for path in created):
                fresh.add(prefix)
    usable = sorted(fresh or places)
    if len(usable) != 1:
        options = "--project names the project, --strip N removes leading directories, --recipe chooses the version"
        if usable:
            raise BadPatch(
                f"the files of {foreign.file} can be those of {' or '.join(sorted({places[p].project for p in usable}))}",
                options,
            )
        problems = problems or [f"  its files are not those of {target.project}"]
        raise BadPatch("\n".join([f"{foreign.file} is not for this source:", *sorted(problems)]), options)
    (prefix,) = usable
    project = places[prefix]
    return project, {path: (prefix + name).removeprefix(project.prefix) for path, name in stripped.items()}


def _with_paths(change: bytes, paths: Mapping[str, str]) -> bytes:
    """A diff with other paths in the headers of its files; it was parsed without a problem."""
    lines, old, new = change.split(b"\n"), b"", b""
    for number, line in enumerate(lines):
        if line.startswith(b"diff --git a/"):
            old = line[len(b"diff --git a/") : (len(line) + len(b"diff --git ")) // 2]
            new = paths[old.decode()].encode()
            lines[number] = b"diff --git a/%s b/%s" % (new, new)
        elif line.startswith(b"@@ "):
            old = b""
        elif old and line.removesuffix(b"\t") in (b"--- a/" + old, b"+++ b/" + old):
            lines[number] = line[:6] + new + line[6 + len(old) :]
    return b"\n".join(lines)
