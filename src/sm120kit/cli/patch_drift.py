"""``sm120kit patch drift``: how the patches fit every release that the package index offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from packaging.version import InvalidVersion, Version

from sm120kit.cli.options import Json, Sources, patches_root
from sm120kit.core import console
from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.engines import all_engines
from sm120kit.patches import matrix
from sm120kit.patches.matrix import UPSTREAMS, StateRun, Upstream
from sm120kit.patches.patch_records import PatchState, ReleaseDrift
from sm120kit.sources.releases import Releases


def _projects(incomplete: str) -> list[str]:
    return [name for name in matrix.with_releases(patches_root(), _upstreams()) if name.startswith(incomplete)]


def _upstreams() -> tuple[Upstream, ...]:
    return (*UPSTREAMS, *(Upstream(engine.name, engine.name, engine.first_release) for engine in all_engines()))


def drift(
    projects: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROJECT", autocompletion=_projects, help="Projects with a patch series; default: all."),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="VERSION", help="First release; the default depends on the project, such as FlashInfer 0.6.0."
        ),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Also pre-releases and yanked releases.")] = False,
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Show the state of each patch on every release that the package index offers.

    A patch of CUTLASS is tried on the CUTLASS inside each FlashInfer release. Of a patch that is not for a version, it is
    shown whether its diff would apply. Sdists are downloaded once. Exit code 1 if a release cannot be fetched or imported.
    """
    root = patches_root()
    known = matrix.with_releases(root, _upstreams())
    for name in projects or ():
        if name not in known:
            message = f"{name!r} is no project with a patch series and releases{did_you_mean(name, known)}"
            raise NotFound(message, f"projects: {', '.join(known)}")
    if since:
        _require_version(since)
    selected = [name for name in known if name in (projects or known)]
    options = sources.run_options()
    releases = Releases(options.workspace, options.origin)
    rows = matrix.drift_matrix(_upstreams(), selected, root, releases, since=since, every=every)
    summaries = list(matrix.summaries(rows, selected, root))
    if json:
        console.json_data({"releases": rows, "patches": summaries})
    else:
        names = list(dict.fromkeys((cell.project, cell.slug) for row in rows for cell in row.cells))
        listed = [(f"{project}/{slug}", run) for project, slug in names for run in matrix.runs(rows, project, slug)]
        console.table(("patch", "releases", "", "version", "state", "detail"), (_cells(name, run) for name, run in listed))
        console.table(
            ("patch", "applies to", "not needed from", "reason", "Drop-When"),
            ((each.patch, _range((each.first, each.last)), each.without, each.reason, each.drop_when) for each in summaries),
        )
        if failed := list(_failed(rows)):
            console.table(("release", "error"), failed)
    if any(row.error for row in rows):
        raise typer.Exit(1)


def _require_version(text: str) -> None:
    try:
        Version(text)
    except InvalidVersion as error:
        raise typer.BadParameter(f"{text!r} is not a version", param_hint="--since") from error


def _cells(name: str, run: StateRun) -> tuple[object, ...]:
    detail = run.cell.detail.strip() if run.cell.state is PatchState.CONFLICTS else ""
    project = run.cell.project
    return name, _range(run.releases), len(run.releases), f"{project} {_range(run.versions)}", run.cell.label, detail


def _range(versions: Sequence[str]) -> str:
    """The first and the last version; empty without any."""
    return " to ".join(dict.fromkeys(filter(None, (versions[0], versions[-1]))))


def _failed(rows: Sequence[ReleaseDrift]) -> Iterator[tuple[str, str]]:
    yield from ((f"{row.project} {row.version}", row.error) for row in rows if row.error)
