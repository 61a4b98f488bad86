"""Export commits as patch files: the inverse of ``apply``, byte by byte."""

import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sm120kit.core.atomic_writes import write_together
from sm120kit.core.data_roots import built_in_below
from sm120kit.core.errors import AlreadyExists, BadInput, NotFound, PatchConflict
from sm120kit.core.outside import mail_date
from sm120kit.patches._apply import OWN_HEADERS
from sm120kit.patches._message import complete, is_complete, with_defaults
from sm120kit.patches.diff import Problem
from sm120kit.patches.drift import git_apply
from sm120kit.patches.format import Patch, normal_form, overlap, parse, render
from sm120kit.patches.patch_records import TreeProject, owner_of
from sm120kit.patches.series import built_in, load, needs, read, require_no_problems, series_content, slug_lines, slug_problem
from sm120kit.patches.series import projects as all_projects
from sm120kit.sources.git import Repository

_PATCH = re.compile(r"\nPatch: ([\w.-]+)/([\w.-]+)$", re.MULTILINE)
_APPLIES_TO = re.compile(r"^Applies-To:.*(?:\n[ \t].*)*", re.MULTILINE)

_DIFF_FORM = """--full-index --no-renames --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/
--unified=3 --inter-hunk-context=0 --diff-algorithm=myers --indent-heuristic""".split()  # noqa: SIM905 - reads as on a command line


@dataclass(frozen=True)
class Exported:
    """A commit of a repository as a patch, whose ``content`` is in normal form."""

    patch: Patch
    commit: str
    parent: str

    @property
    def title(self) -> str:
        """Commit id and subject, for messages."""
        return _title(self.commit, self.patch.subject)


def _title(commit: str, subject: str) -> str:
    return f"{commit[:12]} ({subject if len(subject) <= 72 else subject[:71] + '…'})"


def diff(repository: Repository, before: str, after: str, below: str = "") -> bytes:
    """The diff of two trees or commits in the form of patch files; paths are relative to the directory ``below``."""
    relative = [f"--relative={below.strip('/')}/"] if below else []
    return repository.git("diff-tree", "-r", "-p", *_DIFF_FORM, *relative, before, after).raw


def export(repository: Repository, base: str, tip: str, projects: Sequence[TreeProject]) -> tuple[Exported, ...]:
    """Export the commits above ``base`` up to ``tip`` as patches, in order.

    A commit that ``apply`` made keeps the name of its file; a new commit gets a slug from its subject, and placeholders for the
    trailers that it lacks.

    Raises:
        BadInput: a commit is a merge, touches more than one project or our own headers, or does not make a well-formed
            patch with a valid slug.
    """
    commits = repository.git("rev-list", "--reverse", f"{base}..{tip}").stdout.split()
    return tuple(_export_commit(repository, commit, projects) for commit in commits)


def _export_commit(repository: Repository, commit: str, projects: Sequence[TreeProject]) -> Exported:
    message = read_message(repository, commit)
    title = _title(commit, message.subject)
    if " " in message.parents:
        raise BadInput(f"{title} is a merge", "rebase, so that every commit is one patch")
    changed = repository.changed(message.parents, commit)
    project = _owner_of_changes(changed, projects, title)
    if own := [path for path in changed if project.project == "cutlass" and path.startswith(project.prefix + OWN_HEADERS)]:
        raise BadInput(f"{title} changes {own[0]}, a header of cutlass_overrides", "change it there, without a commit")
    if problem := slug_problem(message.slug):
        raise BadInput(
            f"{title}: its {'trailer Patch' if message.named else 'subject'} gives"
            f" {problem if message.slug else 'no file name'}",
            f"name the file in the last line of the commit message: Patch: {project.project}/NAME",
        )
    change = diff(repository, message.parents, commit, project.path)
    name = f"{project.project}/{message.slug}"
    body = message.body if is_complete(message.body) else complete(message.body, name, project.version)
    content = render(message.author, message.date, message.subject, body, change)
    return Exported(parse_own(project.project, message.slug, content), commit, message.parents)


@dataclass(frozen=True)
class CommitMessage:
    """Author, date and message of a commit, whose parents' ids are in ``parents``.

    ``named`` is the name of the patch in a trailer ``Patch``, which is not part of ``body``; empty if there is none.
    """

    author: str
    date: datetime
    subject: str
    body: str
    parents: str = ""
    named: str = ""

    @property
    def slug(self) -> str:
        """The slug of the patch: that of the trailer, or one from the subject, which may be empty."""
        return self.named.partition("/")[2] or slug_of(self.subject)


def slug_of(subject: str) -> str:
    """A slug from the words of a subject; empty if it has no ASCII letters or digits."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")


def read_message(repository: Repository, commit: str) -> CommitMessage:
    """Read the message of a commit.

    Raises:
        BadInput: its date is before 1900, or after 9998.
    """
    form = "%P%x00%an <%ae>%x00%aD%x00%B"
    log = repository.git("log", "-1", "--encoding=UTF-8", f"--format={form}", commit).raw.decode(errors="replace")
    parents, author, date, message = log.split("\0")
    match = _PATCH.search(message)
    subject, _, body = _PATCH.sub("", message).strip().partition("\n")
    try:
        authored = mail_date(date)
    except ValueError as error:
        raise BadInput(f"commit {commit}: {error}", "give it another with git commit --amend --date=now") from error
    return CommitMessage(author, authored, subject, body, parents, f"{match[1]}/{match[2]}" if match else "")


def parse_own(project: str, slug: str, content: bytes) -> Patch:
    """Parse a patch that must be well-formed."""
    patch, problems = parse(project, Path(project) / f"{slug}.patch", content)
    require_no_problems(problems)
    assert patch is not None
    return patch


def with_versions(patch: Patch, slug: str, applies_to: str) -> Patch:
    """A patch with another slug and another value of ``Applies-To``."""
    body = _APPLIES_TO.sub(f"Applies-To: {applies_to}", patch.body)
    return parse_own(patch.project, slug, normal_form(replace(patch, body=body)))


def _owner_of_changes(changed: Sequence[str], projects: Sequence[TreeProject], title: str) -> TreeProject:
    """The one project whose files a commit changes: of nested projects, the innermost that contains each file."""
    owners = {owner for path in changed if (owner := owner_of(path, projects))}
    if len(owners) != 1:
        raise BadInput(
            f"{title} touches {' and '.join(sorted(owner.project for owner in owners)) or 'nothing'}",
            "one commit is one patch of one project",
        )
    return owners.pop()


def write_back(
    repository: Repository,
    exported: Sequence[Exported],
    projects: Sequence[TreeProject],
    root: Path,
    overwrite: Collection[str] = (),
) -> list[Path]:
    """Make the series of these projects contain the exported patches, all or none; returns the files that changed.

    The diff of a file is not rewritten when it has the effect of the commit: its line numbers and blob ids may be those of
    another version of the file that it changes. Patches that are not for these versions were not in the tree: they stay, each
    after the patch that it followed. A commit of such a patch becomes a variant, see :func:`_variant`.

    ``overwrite`` has the names (``project/slug``) of patches whose file is replaced although it is for other versions.

    Raises:
        NotFound: ``overwrite`` has a name that is no patch.
        AlreadyExists: the file of a patch for other versions would be replaced.
        PatchConflict: a patch would be removed that another one names as required.
        BadInput: the series would not be well-formed, or a patch is not for the version of its project.
    """
    files: dict[Path, bytes | None] = {}
    kept: dict[str, Patch] = {patch.name: patch for each in all_projects(root) for patch in load(root, each)}
    removed: list[Patch] = []
    below_user = built_in_below(root) is not None
    names = {patch.name for project in projects for patch in load(root, project.project)}
    if unknown := sorted({*overwrite} - names):
        raise NotFound(f"no patch {', '.join(unknown)}", f"--overwrite takes the names of patches: {', '.join(sorted(names))}")
    for project in projects:
        directory = root / project.project
        existing = {patch.slug: patch for patch in load(root, project.project)}
        below, own = built_in(root, project.project), [slug for _, slug in slug_lines(directory / "series")]
        contents: dict[str, bytes] = {}
        for commit in exported:
            if commit.patch.project != project.project:
                continue
            patch = _file_of(repository, commit, project, existing, overwrite)
            patch = with_defaults(patch) if below_user else patch
            if patch.slug in contents:
                raise BadInput(f"{commit.title}: two commits are for {patch.name}", "squash them or change a subject")
            contents[patch.slug] = normal_form(patch)
            kept[patch.name] = patch
        slugs = list(contents)
        before = ""
        for patch in existing.values():
            if not patch.is_for(project.version) and patch.slug not in contents:
                slugs.insert(slugs.index(before) + 1 if before else 0, patch.slug)
            before = patch.slug if patch.slug in slugs else before
        _require_built_in_kept([patch for slug, patch in below.items() if slug not in slugs])
        for slug, content in contents.items():
            if slug not in existing or existing[slug].content != content:
                files[directory / f"{slug}.patch"] = content
        slugs = [slug for slug in slugs if slug not in below or slug in own or directory / f"{slug}.patch" in files]
        if own != slugs:
            files[directory / "series"] = series_content(directory / "series", slugs)
        removed += [kept.pop(patch.name) for patch in existing.values() if patch.slug not in {*slugs, *below}]
        files |= {directory / f"{slug}.patch": None for slug in own if slug not in slugs}
    _require_no_dependants(removed, kept.values())
    require_no_problems([problem for project in projects for problem in problems_after(files, root, project.project)])
    write_together(files)
    return list(files)


def _require_built_in_kept(missing: Sequence[Patch]) -> None:
    """Require that no built-in patch would be removed from below a user's series."""
    if missing:
        raise BadInput(
            f"built-in patches are not among the commits: {', '.join(patch.name for patch in missing)}",
            "keep their commits; to leave a patch out for a version, change its Applies-To",
        )


def _require_no_dependants(removed: Sequence[Patch], kept: Collection[Patch]) -> None:
    """Require that no patch names one that is removed as required, unless another variant of that is left for it."""
    lost = [(patch, gone) for gone in removed for patch in kept if needs(patch, gone)]
    lines = [f"  {patch.name} requires {gone.name}" for patch, gone in lost if not any(needs(patch, other) for other in kept)]
    if lines:
        raise PatchConflict(
            "\n".join(["patches need others that would be removed:", *lines]),
            "keep the commits of these, or remove the trailer Requires of the patches that need them",
        )


def _file_of(
    repository: Repository,
    commit: Exported,
    project: TreeProject,
    existing: Mapping[str, Patch],
    overwrite: Collection[str],
) -> Patch:
    """The patch that the file of a commit contains; its slug is that of a variant if the file is for other versions."""
    patch = commit.patch
    before = existing.get(patch.slug)
    if before and before.name not in overwrite and not before.is_for(project.version):
        patch = _variant(commit, project, existing)
        before = existing.get(patch.slug)
    if not patch.is_for(project.version):
        raise BadInput(
            f"{commit.title} is for {patch.trailer('Applies-To')}, which excludes {project.project} {project.version}",
            f"include {project.version}, the version in this directory; to drop the patch there, remove the commit",
        )
    if before is None or before.diff == patch.diff:
        return patch
    if has_effect(repository, before, commit, project):
        return replace(patch, diff=before.diff)
    lost = _first_lost(before.versions, patch.versions)
    if lost and before.name not in overwrite:
        raise AlreadyExists(
            f"{commit.title} changes the diff of {before.name} and excludes {project.project} {lost}, which loses it",
            f"keep its Applies-To ({before.trailer('Applies-To')}), or pass --overwrite {before.name}",
        )
    return patch


def _variant(commit: Exported, project: TreeProject, existing: Mapping[str, Patch]) -> Patch:
    """A commit ported from another version as the variant for this version: an existing one, or a new ``<family>--<version>``.

    If its ``Applies-To`` is still that of the other version, it gets that of the existing variant, or this version alone.
    """
    patch = commit.patch
    family = [other for other in existing.values() if other.family == patch.family]
    current = next((other for other in family if other.is_for(project.version)), None)
    slug = current.slug if current else f"{patch.family}--{re.sub('[^a-z0-9.]+', '-', project.version)}"
    if not patch.is_for(project.version):
        versions = current.trailer("Applies-To") if current else f"{project.project} =={project.version}"
        patch = with_versions(patch, slug, versions)
    for other in family:
        if other.slug != slug and (shared := overlap(other.versions, patch.versions)):
            raise AlreadyExists(
                f"{commit.title} is for {patch.trailer('Applies-To')}: {other.name} is for {project.project} {shared} already",
                f"exclude the versions of {other.name} ({other.trailer('Applies-To')}) to add {project.project}/{slug}"
                + (f", or pass --overwrite {other.name} to replace it" if other.slug == commit.patch.slug else ""),
            )
    return replace(patch, slug=slug)


def _first_lost(before: SpecifierSet, after: SpecifierSet) -> str:
    """A version in ``before`` that is not in ``after``, of those that either names; empty if there is none."""
    bounds = sorted({specifier.version.removesuffix(".*") for specifier in (*before, *after)})
    lost = (v for v in bounds if before.contains(v, prereleases=True) and not after.contains(v, prereleases=True))
    return next(lost, "")


def has_effect(repository: Repository, patch: Patch, commit: Exported, project: TreeProject) -> bool:
    """Whether a patch makes the tree of a commit from that of its parent."""
    with repository.index(commit.parent) as index:
        if git_apply(index, patch, project).returncode != 0:
            return False
        return index.write_tree() == repository.tree_of(commit.commit)


def problems_after(files: Mapping[Path, bytes | None], root: Path, project: str) -> list[Problem]:
    """The problems that the series of a project would have with these files, of which a copy is read."""
    directory = root / project
    before = {path: path.read_bytes() for path in (*directory.glob("*.patch"), directory / "series") if path.is_file()}
    with tempfile.TemporaryDirectory(prefix="sm120kit-series-") as scratch:
        copy = Path(scratch) / project
        copy.mkdir()
        for path, content in {**before, **files}.items():
            if path.parent == directory and content is not None:
                (copy / path.name).write_bytes(content)
        return [replace(problem, file=directory / problem.file.name) for problem in read(copy.parent, project)[1]]
