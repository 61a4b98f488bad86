"""Fetch the wheels of a lockfile to disk, each in a directory named by its sha256, and unpack them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit.core import process, reporting
from sm120kit.core.disk import require_disk
from sm120kit.core.parallel import in_parallel
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import Workspace
from sm120kit.sources import _download, index
from sm120kit.sources.origin import DEFAULT, Origin
from sm120kit.sources.resolver import uv_program
from sm120kit.sources.source_records import LockedWheel

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient


@dataclass(frozen=True)
class _Sizes:
    """The record of sizes in bytes, by sha256."""

    bytes: dict[str, int]


def wheelhouse(wheels: Sequence[LockedWheel], workspace: Workspace, origin: Origin = DEFAULT) -> tuple[Path, ...]:
    """The path of every wheel, in the order of ``wheels``. Those that are not cached are fetched to ``downloads/``.

    Several are fetched at once, after the free disk space is checked.

    Raises:
        FetchFailed: no location delivered a wheel.
        NotTrusted: a location delivered other content.
        OfflineMiss: ``origin`` is offline and some wheels are not cached.
        ResourceUnavailable, SystemRefused: a wheel cannot be stored.
    """
    return _download.fetch_all(wheels, "wheel", workspace, lambda absent: _fetch_all(absent, len(wheels), workspace, origin))


def sizes(wheels: Sequence[LockedWheel], workspace: Workspace, origin: Origin = DEFAULT) -> dict[LockedWheel, int]:
    """The size in bytes of every wheel that is cached or whose location states it; queried once for each wheel.

    Raises:
        FetchFailed: the mirror is not a directory.
    """
    known = known_sizes(wheels, workspace)
    unknown = [wheel for wheel in wheels if wheel not in known]
    if unknown and origin.reachable:
        with _client(origin) as client:
            _look_up(unknown, origin, client, workspace)
    return known | known_sizes(unknown, workspace)


def known_sizes(wheels: Sequence[LockedWheel], workspace: Workspace) -> dict[LockedWheel, int]:
    """As :func:`sizes`, of the wheels that are cached or were queried before: nothing is queried."""
    stated = _stated(workspace)
    for wheel in wheels:
        path = workspace.downloads / wheel.sha256 / wheel.filename
        if path.is_file():
            stated[wheel.sha256] = path.stat().st_size
    return {wheel: stated[wheel.sha256] for wheel in wheels if wheel.sha256 in stated}


def _stated(workspace: Workspace) -> dict[str, int]:
    """The sizes of wheels that locations stated, by sha256."""
    record = _record(workspace)
    return read_record(_Sizes, record).bytes if record.is_file() else {}


def _record(workspace: Workspace) -> Path:
    return workspace.cache / "wheel-sizes.json"


def _look_up(
    wheels: Sequence[LockedWheel], origin: Origin, client: PyPIClient, workspace: Workspace
) -> dict[LockedWheel, index.Locations]:
    """Find the locations of wheels, and record the sizes that they state."""
    settings, stated = origin.settings(), _stated(workspace)
    with reporting.task(f"looking up {len(wheels)} wheels", len(wheels)) as advance:

        def look_up(wheel: LockedWheel) -> tuple[index.Locations, int | None]:
            locations = index.find(wheel, origin.mirror, settings, client)
            size = stated.get(wheel.sha256) or index.size_of(locations)
            advance()
            return locations, size

        locations_and_sizes = dict(
            zip(wheels, in_parallel([partial(look_up, wheel) for wheel in wheels], _download.PARALLEL), strict=True)
        )
    new = {wheel.sha256: size for wheel, (_, size) in locations_and_sizes.items() if size is not None}
    write_record(_record(workspace), _Sizes(_stated(workspace) | new))
    return {wheel: locations for wheel, (locations, _) in locations_and_sizes.items()}


def _fetch_all(absent: Sequence[LockedWheel], count: int, workspace: Workspace, origin: Origin) -> dict[LockedWheel, Path]:
    """Fetch ``absent`` of ``count`` wheels, the largest first."""
    names = [wheel.filename for wheel in absent]
    origin.require_reachable(f"{len(absent)} of {count} wheels", names, workspace.downloads)
    with _client(origin) as client:
        locations, stated = _look_up(absent, origin, client, workspace), _stated(workspace)
        total, what = sum(stated.get(wheel.sha256, 0) for wheel in absent), f"fetching {len(absent)} of {count} wheels"
        require_disk(workspace.downloads, total, what)
        reporting.info(f"{what}, {total / 1e6:,.0f} MB")
        with reporting.task(what, total, transfer=True) as advance:

            def fetch(wheel: LockedWheel) -> Path:
                return _download.fetch(wheel, workspace.downloads, f"wheel-{wheel.name}", locations[wheel], advance)

            largest_first = sorted(absent, key=lambda wheel: -stated.get(wheel.sha256, 0))
            jobs = [partial(fetch, wheel) for wheel in largest_first]
            return dict(zip(largest_first, in_parallel(jobs, _download.PARALLEL), strict=True))


@contextlib.contextmanager
def _client(origin: Origin) -> Iterator[PyPIClient]:
    from sm120kit.sources.index_client import connect

    with contextlib.closing(connect(origin.settings())) as client:
        yield client


def unfetched(wheels: Sequence[LockedWheel], workspace: Workspace) -> tuple[LockedWheel, ...]:
    """The wheels that are not in ``downloads/``. Their contents are not read."""
    return tuple(wheel for wheel in wheels if not (workspace.downloads / wheel.sha256 / wheel.filename).is_file())


UNPACKED_RATIO = 3
"""Bytes of unpacked files for each byte of a wheel, rounded up; 1.8 for the CUDA wheels."""


def unpack_wheels(wheels: Sequence[Path], directory: Path, python: str, machine: str = "") -> None:
    """Unpack wheels into ``directory``, completely or not at all, without their dependencies. Requires a lock on ``directory``.

    ``python`` is the version that the wheels are for (``3.12``), ``machine`` their machine, by default this one; no Python of
    that version needs to be installed.

    Raises:
        CommandFailed: they are not for this Python or machine.
        ResourceUnavailable, SystemRefused: they cannot be stored.
    """
    if directory.is_dir():
        return
    size = sum(wheel.stat().st_size for wheel in wheels)
    require_disk(directory, UNPACKED_RATIO * size, f"unpacking {len(wheels)} wheels")
    if size > 10**8:
        reporting.info(f"unpacking {len(wheels)} wheels, {size / 1e9:.1f} GB packed")
    with publish_directory(directory) as staging:
        argv: list[str | Path] = [uv_program(), "pip", "install", "--no-deps", "--no-index", "--offline", "--no-config"]
        argv += ["--no-cache", "--no-python-downloads", "--quiet", "--python", sys.executable, "--python-version", python]
        argv += ["--python-platform", f"{machine}-manylinux_2_40"] if machine else []
        process.run([*argv, "--target", staging, *wheels], tied=True)
