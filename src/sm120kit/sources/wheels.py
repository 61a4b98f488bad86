"""The wheels of a lock on disk, each in a directory named by its sha256."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from sm120kit import console
from sm120kit.errors import OfflineMiss
from sm120kit.records import LockedWheel
from sm120kit.sources import download, places
from sm120kit.workspace import Workspace


def wheelhouse(
    wheels: Sequence[LockedWheel], workspace: Workspace, *, mirror: str | None = None, offline: bool = False
) -> tuple[Path, ...]:
    """Every wheel as a file, in the order of ``wheels``; fetched where it is not at hand. What is there stays for the next run.

    Raises:
        FetchFailed: no place delivered one.
        HashMismatch: a place delivered something else.
        OfflineMiss: ``offline`` is set and some are not at hand.
        NotEnoughDisk, StateUnwritable: one cannot be stored.
    """
    with workspace.locked("wheels"):
        for stale in workspace.downloads.glob(".wheel-*"):  # of a run that was killed
            stale.unlink()
        here = [download.cached(wheel, workspace.downloads) for wheel in wheels]
        absent = [wheel for wheel, path in zip(wheels, here, strict=True) if path is None]
        if absent and offline and not places.is_local(mirror):
            listed = ", ".join(wheel.filename for wheel in absent[:3]) + (", ..." if len(absent) > 3 else "")
            raise OfflineMiss(
                f"{len(absent)} of {len(wheels)} wheels were not fetched before and --offline is given: {listed}",
                f"name a directory that holds them with --mirror, or copy each to {workspace.downloads}/<sha256>/",
            )
        if absent:
            console.say(f"fetching {len(absent)} of {len(wheels)} wheels")
            settings = places.settings_for(mirror)
            with contextlib.closing(places.client_for(settings)) as client:
                fetched = {
                    wheel: download.fetch(
                        wheel, workspace.downloads, f"wheel-{wheel.name}", places.find(wheel, mirror, settings, client)
                    )
                    for wheel in absent
                }
        return tuple(path or fetched[wheel] for wheel, path in zip(wheels, here, strict=True))
