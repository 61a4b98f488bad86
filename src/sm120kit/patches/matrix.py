"""The drift matrix: how each patch of the series fits every release that the package index offers.

Of an sdist, only the files that patches change are imported. A release's states are stored by the sha256 of the sdist, the
directories of the projects in it and the sha256 of each patch, so that what has not changed is not tried again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import FetchFailed, Mismatch, NotTrusted, OfflineMiss
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import mark_used
from sm120kit.patches.drift import VERSION_H, apply_fitting, cutlass_version, fit_patch
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import DriftCell, PatchState, ReleaseDrift, TreeProject
from sm120kit.patches.series import load, projects
from sm120kit.sources.git import Repository
from sm120kit.sources.releases import Release, Releases, import_files

_FORMAT = 1
"""Part of the keys of stored results: raised when they change for the same input."""

_REF = "refs/heads/base"


@dataclass(frozen=True)
class Upstream:
    """A project with sdists: its distribution, the first version that is considered, and the path of CUTLASS in the sdist."""

    project: str
    distribution: str
    since: str
    cutlass: str = ""

    @property
    def projects(self) -> tuple[str, ...]:
        """The projects in an sdist, in the order in which they are patched."""
        return ("cutlass", self.project) if self.cutlass else (self.project,)


UPSTREAMS = (
    Upstream("flashinfer", "flashinfer-python", "0.6.0", "3rdparty/cutlass"),
    Upstream("b12x", "b12x", "0.8"),
)
"""The projects beside engines whose releases are on package indexes. Only FlashInfer has CUTLASS in its sdists."""


@dataclass(frozen=True)
class DriftSummary:
    """A patch over the releases that were tried.

    ``first`` and ``last`` are the first and last release that it is for and applies to, ``without`` the first after ``first``
    that no longer needs it, for ``reason``; all are empty where there is none.
    """

    patch: str
    first: str
    last: str
    without: str
    reason: str
    drop_when: str


@dataclass(frozen=True)
class StateRun:
    """Successive releases on which a patch has the same state; ``versions`` are those of its project."""

    releases: tuple[str, ...]
    versions: tuple[str, ...]
    cell: DriftCell


@dataclass(frozen=True)
class _Imported:
    """The files of an sdist that patches change, as a commit; the versions of the projects, the git entry of each file."""

    commit: str
    versions: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True)
class _Series:
    """The patches for an upstream's sdists, and the results of this run by content."""

    upstream: Upstream
    patches: tuple[Patch, ...]
    results: dict[object, tuple[DriftCell, ...]]

    def paths(self) -> list[str]:
        """The paths in the sdist that decide how the patches fit."""
        paths = {self._prefix(patch.project) + file.path for patch in self.patches for file in patch.files}
        if self.upstream.cutlass:
            paths.add(f"{self.upstream.cutlass}/{VERSION_H}")
        return sorted(paths)

    def _prefix(self, project: str) -> str:
        return self.tree_project(project, "").prefix

    def tree_project(self, project: str, version: str) -> TreeProject:
        """A project in the sdist."""
        return TreeProject(project, "" if project == self.upstream.project else self.upstream.cutlass, version)


def with_releases(root: Path, upstreams: Sequence[Upstream]) -> list[str]:
    """The projects with a patch series below ``root`` whose releases are on package indexes."""
    released = {project for upstream in upstreams for project in upstream.projects}
    return [project for project in projects(root) if project in released]


def drift_matrix(
    upstreams: Sequence[Upstream],
    projects: Sequence[str],
    root: Path,
    releases: Releases,
    *,
    since: str = "",
    every: bool = False,
) -> list[ReleaseDrift]:
    """Try the patches of projects on every release from ``since`` on, default: that of ``upstreams``; the oldest first.

    A release that cannot be fetched or imported has an error instead of states. ``every``: also pre-releases and yanked ones.

    Raises:
        BadInput: a series is not well-formed.
        FetchFailed, OfflineMiss: no release of a project is listed.
    """
    upstreams = [upstream for upstream in upstreams if not set(projects).isdisjoint(upstream.projects)]
    series = [_Series(each, tuple(patch for name in each.projects for patch in load(root, name)), {}) for each in upstreams]
    listed = [
        (each, release)
        for each in series
        for release in releases.find(
            each.upstream.project, each.upstream.distribution, since or each.upstream.since, every=every
        )
    ]
    rows = [_row(each, release, releases) for each, release in listed]
    return [replace(row, cells=tuple(cell for cell in row.cells if cell.project in projects)) for row in rows]


def _row(series: _Series, release: Release, releases: Releases) -> ReleaseDrift:
    pin, directory = release.pin, releases.workspace.cache / "drift"
    patches = [[patch.project, patch.sha256] for patch in series.patches]
    record = directory / f"{digest_of([_FORMAT, pin, series.upstream.cutlass, patches])}.json"
    if record.is_file():
        mark_used(record)
        return read_record(ReleaseDrift, record)
    imports = directory / digest_of([_FORMAT, pin, series.paths()])
    try:
        if not imports.is_dir():
            _import(series, release, releases, imports)
    except (FetchFailed, NotTrusted, OfflineMiss, Mismatch) as error:
        return ReleaseDrift(pin.project, pin.version, pin.sha256, error=error.message)
    mark_used(imports)
    imported = read_record(_Imported, imports / "files.json")
    repository = Repository(imports / "repository")
    cells = tuple(cell for name in series.upstream.projects for cell in _cells(series, name, imported, repository))
    row = ReleaseDrift(pin.project, pin.version, pin.sha256, cells)
    write_record(record, row)
    return row


def _import(series: _Series, release: Release, releases: Releases, target: Path) -> None:
    """Write the files of a release that decide how patches fit as a repository and a record below ``target``.

    Raises:
        Mismatch: CUTLASS in it states no version.
    """
    pin, workspace = release.pin, releases.workspace
    with workspace.exclusive("drift"):
        if target.is_dir():
            return
        sdist = releases.sdist(release)
        with reporting.step(f"importing {pin.project} {pin.version}"), publish_directory(target) as directory:
            repository = Repository.init(directory / "repository")
            import_files(pin, sdist, series.paths(), repository, _REF)
            listed = repository.git("ls-tree", "-r", "-z", _REF).raw.decode(errors="surrogateescape").split("\0")
            files = {path: entry for entry, _, path in (line.partition("\t") for line in listed if line)}
            versions = {pin.project: pin.version}
            if series.upstream.cutlass:
                path = f"{series.upstream.cutlass}/{VERSION_H}"
                text = repository.read(_REF, path).decode(errors="replace") if path in files else ""
                versions["cutlass"] = cutlass_version(text)
                if not versions["cutlass"]:
                    raise Mismatch(f"{sdist.name}: {path} states no version", "leave out releases before it with --since")
            commit = repository.git("rev-parse", _REF).stdout.strip()
            write_record(directory / "files.json", _Imported(commit, versions, files))


def _cells(series: _Series, name: str, imported: _Imported, repository: Repository) -> tuple[DriftCell, ...]:
    """The states of a project's patches: each on top of those before it that are for the version and apply.

    They depend only on the files that the patches change and on which patches are for the version; results for equal ones are
    computed once.
    """
    version = imported.versions[name]
    project = series.tree_project(name, version)
    patches = [patch for patch in series.patches if patch.project == name]
    blobs = tuple(imported.files.get(project.prefix + file.path) for patch in patches for file in patch.files)
    key = (name, tuple(patch.is_for(version) for patch in patches), blobs)
    if key not in series.results:
        with repository.index(imported.commit) as index:
            cells = []
            for patch in patches:
                cell = DriftCell(name, patch.slug, version, PatchState.NOT_FOR_THIS_VERSION)
                variant = next((other.slug for other in patches if other.family == patch.family and other.is_for(version)), "")
                if variant and variant != patch.slug:
                    cells.append(replace(cell, variant=variant))
                    continue
                fit = fit_patch(index, patch, project)
                applies = fit.state is PatchState.APPLIES
                if variant and applies:
                    apply_fitting(index, patch, project)
                cell = replace(cell, detail="\n".join(fit.lines), fit=fit.state, offset=applies and bool(fit.lines))
                cells.append(replace(cell, state=fit.state) if variant else cell)
            series.results[key] = tuple(cells)
    return tuple(replace(cell, version=version) for cell in series.results[key])


def runs(rows: Sequence[ReleaseDrift], project: str, slug: str) -> list[StateRun]:
    """The states of a patch over the releases, with successive equal states as one."""
    cells = [(row.version, cell) for row in rows for cell in row.cells if (cell.project, cell.slug) == (project, slug)]
    grouped = [list(group) for _, group in groupby(cells, lambda pair: (pair[1].label, _conflict(pair[1])))]
    return [
        StateRun(tuple(release for release, _ in group), tuple(dict.fromkeys(cell.version for _, cell in group)), group[0][1])
        for group in grouped
    ]


def _conflict(cell: DriftCell) -> str:
    return cell.detail if cell.state is PatchState.CONFLICTS else ""


def summaries(rows: Sequence[ReleaseDrift], projects: Sequence[str], root: Path) -> Iterator[DriftSummary]:
    """Each patch of projects over the releases. None is needed by a release that contains it, or from ``Fixed-In`` on."""
    for patch in (patch for project in projects for patch in load(root, project)):
        cells = [(row.version, cell) for row in rows for cell in row.cells if cell.project == patch.project]
        cells = [(release, cell) for release, cell in cells if cell.slug == patch.slug]
        applied = [release for release, cell in cells if cell.state is PatchState.APPLIES]
        after = cells[next((at for at, (release, _) in enumerate(cells) if release in applied[:1]), 0) :]
        without, reason = next(
            ((release, reason) for release, cell in after if (reason := _reason_without(patch, cell))), ("", "")
        )
        first, last = (applied[0], applied[-1]) if applied else ("", "")
        yield DriftSummary(patch.name, first, last, without, reason, patch.trailer("Drop-When"))


def _reason_without(patch: Patch, cell: DriftCell) -> str:
    """Why a release does not need a patch; empty if it may."""
    if cell.fit is PatchState.ALREADY_UPSTREAM:
        return str(cell.fit)
    return f"Fixed-In: {patch.project} {patch.trailer('Fixed-In')}" if patch.is_fixed_in(cell.version) else ""
