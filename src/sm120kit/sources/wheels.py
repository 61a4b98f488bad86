"""Fetch the wheels of a lockfile to disk, each in a directory named by its sha256."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.errors import OfflineMiss
from sm120kit.core.state import Workspace
from sm120kit.sources import download, index
from sm120kit.sources.origin import DEFAULT, Origin
from sm120kit.sources.records import LockedWheel


def wheelhouse(wheels: Sequence[LockedWheel], workspace: Workspace, origin: Origin = DEFAULT) -> tuple[Path, ...]:
    """The path of every wheel, in the order of ``wheels``. Wheels that are not cached are fetched to ``downloads/``.

    Raises:
        FetchFailed: no location delivered a wheel.
        HashMismatch: a location delivered other content.
        OfflineMiss: ``origin`` is offline and some wheels are not cached.
        NotEnoughDisk, StateUnwritable: a wheel cannot be stored.
    """
    with workspace.exclusive("wheels"):
        for leftover in workspace.downloads.glob(".wheel-*"):  # of a killed run
            leftover.unlink()
        cached = [download.cached(wheel, workspace.downloads) for wheel in wheels]
        absent = [wheel for wheel, path in zip(wheels, cached, strict=True) if path is None]
        if absent and not origin.reachable:
            listed = ", ".join(wheel.filename for wheel in absent[:3]) + (", ..." if len(absent) > 3 else "")
            raise OfflineMiss(
                f"{len(absent)} of {len(wheels)} wheels are not cached and --offline is given: {listed}",
                f"name a directory that holds them with --mirror, or copy each to {workspace.downloads}/<sha256>/",
            )
        if absent:
            reporting.info(f"fetching {len(absent)} of {len(wheels)} wheels")
            settings = origin.settings()
            from sm120kit.sources.client import connect

            with contextlib.closing(connect(settings)) as client:
                fetched = {
                    wheel: download.fetch(
                        wheel, workspace.downloads, f"wheel-{wheel.name}", index.find(wheel, origin.mirror, settings, client)
                    )
                    for wheel in absent
                }
        return tuple(path or fetched[wheel] for wheel, path in zip(wheels, cached, strict=True))
