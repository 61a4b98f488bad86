"""Fetch the wheels of a lockfile to disk, each in a directory named by its sha256, and unpack them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from sm120kit.core import process, reporting
from sm120kit.core.errors import OfflineMiss
from sm120kit.core.state import Workspace, publish_directory, require_disk
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


UNPACKED_RATIO = 4
"""Bytes of unpacked files for each byte of a wheel, rounded up: 1.8 for the CUDA wheels, 3.6 for tvm-ffi."""


def unpack_wheels(wheels: Sequence[Path], directory: Path, python: str) -> None:
    """Unpack wheels into ``directory``, completely or not at all, without their dependencies. Requires a lock on ``directory``.

    ``python`` is the version that the wheels are for (``3.12``); no Python of that version needs to be installed.

    Raises:
        CommandFailed: they are not for this Python or machine.
        NotEnoughDisk, StateUnwritable: they cannot be stored.
    """
    if directory.is_dir():
        return
    from uv import find_uv_bin

    size = sum(wheel.stat().st_size for wheel in wheels)
    require_disk(directory, UNPACKED_RATIO * size, f"unpacking {len(wheels)} wheels")
    if size > 10**8:
        reporting.info(f"unpacking {len(wheels)} wheels, {size / 1e9:.1f} GB packed")
    with publish_directory(directory) as staging:
        argv: list[str | Path] = [find_uv_bin(), "pip", "install", "--no-deps", "--no-index", "--offline", "--no-config"]
        argv += ["--no-cache", "--no-python-downloads", "--quiet", "--python", sys.executable, "--python-version", python]
        process.run([*argv, "--target", staging, *wheels], tied=True)
