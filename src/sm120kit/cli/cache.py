"""``sm120kit cache``: the size of the state directory, and the removal of entries."""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from sm120kit.cli.options import Json, Sources, argument, option
from sm120kit.core import console
from sm120kit.core.disk import size
from sm120kit.core.errors import DaemonUnreachable, NotFound, RequirementMissing, did_you_mean
from sm120kit.core.workspace import Workspace
from sm120kit.images import state_entries
from sm120kit.images.state_entries import StateEntry
from sm120kit.serving import server_containers

HOURS = {"h": 1, "d": 24, "w": 7 * 24}
UNUSED = "30d"
"""The age from which entries are removed if neither age nor kind is given."""


def cache(
    kinds: Annotated[list[str] | None, argument("KIND", "With --clean: kinds to remove; default: all but records.")] = None,
    clean: Annotated[bool, option("--clean", "Remove entries.")] = False,
    dry_run: Annotated[bool, option("--dry-run", "With --clean: list the entries; remove nothing.")] = False,
    older: Annotated[
        str, option("--older AGE", f"Entries not used for this long, such as 12h or 8w; default without KIND: {UNUSED}.")
    ] = "",
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Show and free the disk space of the state directory.

    Without --clean: the size of each kind of entries. Sizes are disk usage; a file that two entries share counts once.

    With --clean: removes the entries that were not used for 30 days, or those of a kind or age. Records are removed only if
    KIND names them: they cannot be created again. Tagged images are kept, and what running servers use. Waits until no other
    command uses the directory.
    """
    workspace = Workspace.at(sources.state)
    if clean:
        _clean(workspace, kinds or [], older, dry_run=dry_run, json=json)
    elif kinds or dry_run or older:
        raise typer.BadParameter("KIND, --dry-run and --older require --clean")
    else:
        _show_usage(workspace, json=json)


def _show_usage(workspace: Workspace, *, json: bool) -> None:
    if workspace.root.exists() and not workspace.root.is_dir():
        raise NotFound(f"{workspace.root} is not a directory", "name the state directory with --state or SM120KIT_STATE")
    kinds = state_entries.usage(state_entries.entries(workspace.root))
    total = sum(row["bytes"] for row in kinds)
    if json:
        console.json_data({"state": workspace.root, "bytes": total, "kinds": kinds})
        return
    console.table(
        ("kind", "what", "entries", "size", "last used"),
        (
            (row["kind"], row["what"], row["entries"], size(row["bytes"]), _ago(row["last_used"]))
            for row in kinds
            if row["entries"]
        ),
    )
    console.data(f"{size(total)} in {workspace.root}")


def _clean(workspace: Workspace, kinds: list[str], older: str, *, dry_run: bool, json: bool) -> None:
    chosen, seconds = _chosen(kinds, older)

    def find() -> list[StateEntry]:
        listed = [entry for entry in state_entries.entries(workspace.root) if entry.kind in chosen]
        return _unused(state_entries.removable(workspace.root, listed, seconds))

    if workspace.is_new() or dry_run:  # nothing to lock
        _show(find(), dry_run=dry_run, json=json)
        return
    with workspace.maintenance():
        removed = find()
        state_entries.detach(workspace.root, removed)
        _remove(removed, json=json)


def _chosen(kinds: list[str], older: str) -> tuple[list[str], float]:
    """The kinds of which entries are removed, and the seconds since their last use."""
    known = [kind.name for kind in state_entries.KINDS]
    for name in kinds:
        if name not in known:
            raise NotFound(f"unknown kind {name!r}{did_you_mean(name, known)}", f"kinds: {', '.join(known)}")
    age = older or ("" if kinds else UNUSED)
    return kinds or [kind.name for kind in state_entries.KINDS if kind.reproducible], _seconds(age) if age else -1.0


def _unused(entries: list[StateEntry]) -> list[StateEntry]:
    """Entries without the caches, records and logs of servers that run, which outlive the command that started them.

    If docker's daemon does not respond, any server may run: none of these is removable.
    """
    kept = [entry for entry in entries if entry.kind not in ("servers", "records")]
    if len(kept) == len(entries):
        return entries
    try:
        return state_entries.without(entries, server_containers.in_use())
    except RequirementMissing:
        return entries
    except DaemonUnreachable as error:
        console.info(f"servers and records are kept: {error.message}")
        return kept


def _remove(removed: Sequence[StateEntry], *, json: bool) -> None:
    bytes_ = state_entries.freed(removed)
    with console.progress() as progress:
        task = progress.add_task("removing", total=len(removed))
        for entry in removed:
            state_entries.remove(entry)
            progress.advance(task)
    _show(removed, dry_run=False, json=json, bytes_=bytes_)


def _show(removed: Sequence[StateEntry], *, dry_run: bool, json: bool, bytes_: int | None = None) -> None:
    """Print entries and the disk space that removing them frees: ``bytes_``, where the files are removed already."""
    total = state_entries.freed(removed) if bytes_ is None else bytes_
    if json:
        rows = [asdict(entry) | {"paths": list(map(str, entry.paths))} for entry in removed]
        console.json_data({"dry_run": dry_run, "bytes": total, "entries": rows})
        return
    if dry_run:
        console.table(
            ("kind", "entry", "size", "last used"),
            (
                (entry.kind, entry.name, size(taken), _ago(entry.used))
                for entry, taken in zip(removed, state_entries.sizes(removed), strict=True)
            ),
        )
    count = f"{len(removed)} entr{'y' if len(removed) == 1 else 'ies'}"
    console.data(f"{'would remove' if dry_run else 'removed'} {count}, {size(total)}")


def _ago(used: float | None) -> str:
    """The time since ``used``, in hours or days."""
    if used is None:
        return ""
    hours = max(0.0, time.time() - used) / 3600
    if hours < 1:
        return "within the hour"
    return f"{hours:.0f} hours ago" if hours < 48 else f"{hours / 24:.0f} days ago"


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d{1,9})([hdw])", age)
    if not match:
        raise typer.BadParameter(f"{age!r} is not an age, such as 12h, 30d or 8w", param_hint="--older")
    return float(match[1]) * HOURS[match[2]] * 3600
