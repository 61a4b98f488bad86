"""Fetch pinned sources as checkouts: git repositories with one base commit that is the same on every machine.

An sdist or wheel must have the pinned sha256 and a git source the pinned commit, whichever server delivers it. All configured
locations are tried in turn.

Air gaps: ``mirror`` is used *instead of* the index or the git host, as with ``pip --no-index --find-links``. It is a directory
or URL that holds ``<file>`` or ``<sha256>/<file>`` for sdists and wheels (as ``downloads/`` of a state directory does) and, for
git sources and their submodules, a repository or bundle named like the last part of the URL or like the project. ``offline``
allows only cached sources and a mirror that is a local directory.
"""

import contextlib
import re
import shutil
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import OfflineMiss
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.sources import _archive, _commits, _download, _git_urls, _identity, index, wheel_commits
from sm120kit.sources._wheels import UNPACKED_RATIO, known_sizes, sizes, unfetched, unpack_wheels, wheelhouse
from sm120kit.sources.git import Repository
from sm120kit.sources.origin import DEFAULT, Origin
from sm120kit.sources.resolver import Requirements, resolve_wheels
from sm120kit.sources.source_records import Checkout, GitPin, Pin, SdistPin, WheelCommitPin, WheelPin

__all__ = [
    "BASE",
    "UNPACKED_RATIO",
    "Origin",
    "Requirements",
    "checkout_name",
    "fetch",
    "known_sizes",
    "resolve_wheels",
    "sizes",
    "unfetched",
    "unpack_wheels",
    "wheelhouse",
]

BASE = "refs/heads/base"
"""Ref of the base commit in every checkout."""

_FORMAT = 1
"""Increment it when the base commit of a pin changes."""


def checkout_name(pin: Pin) -> str:
    """The directory name of a pin's checkout: project, version, and a digest that is unique to the pin."""
    name = re.sub(r"[^\w.+-]", "-", f"{pin.project}-{pin.version}")
    return f"{name}-{digest_of([_FORMAT, pin])[:16]}"


def fetch(pin: Pin, workspace: Workspace, origin: Origin = DEFAULT) -> Checkout:
    """Fetch a pinned source, or return the cached checkout.

    Raises:
        FetchFailed: no location delivered it.
        NotTrusted: a location delivered other content.
        NotTrusted, BadInput: the archive is damaged, too large, or has a member that cannot be in a tree.
        NotTrusted: a git URL is of a form that is not allowed.
        Mismatch: it is another project or version than the pin names.
        OfflineMiss: ``origin`` is offline and the source is not cached.
        ResourceUnavailable, SystemRefused: it cannot be stored.
    """
    key = checkout_name(pin)
    target = workspace.checkouts / key
    if (checkout := _checkout(pin, target)) is not None:
        return checkout
    with workspace.exclusive(f"source-{key}"), reporting.step(f"fetching {pin.project} {pin.version}"):
        if (checkout := _checkout(pin, target)) is not None:
            return checkout
        _remove_leftovers(workspace, key)
        packed = None if isinstance(pin, GitPin) else _packed(pin, key, workspace, origin)
        if isinstance(pin, GitPin | WheelCommitPin) and not (origin.reachable or _git_urls.transport_of(pin.url) == "file"):
            raise OfflineMiss(
                f"{pin.project} {pin.version} at {pin.commit} is not cached and --offline is given",
                f"name a directory that holds a bare clone {index.repository_name(pin.url)} with --mirror, "
                f"or copy a checkout to {target}",
            )
        with publish_directory(target) as directory:
            repository = Repository.init(directory)
            if isinstance(pin, GitPin):
                _commits.import_commit(pin, repository, BASE, origin.mirror)
            else:
                assert packed is not None
                if isinstance(pin, WheelCommitPin):
                    wheel_commits.import_wheel_commit(pin, packed, repository, BASE, origin.mirror)
                elif isinstance(pin, WheelPin):
                    _archive.import_wheel(pin, packed, repository, BASE)
                else:
                    _archive.import_sdist(pin, packed, repository, BASE)
            _identity.require_identity(pin, repository, BASE)
        checkout = _checkout(pin, target)
        assert checkout is not None, f"{target} has no base commit"
        return checkout


def _packed(pin: SdistPin | WheelPin, key: str, workspace: Workspace, origin: Origin) -> Path:
    """The pinned sdist or wheel, from ``downloads/`` or fetched to it."""
    file, kind = (pin.wheel, "wheel") if isinstance(pin, WheelPin) else (pin, "sdist")
    if (packed := _download.cached(file, workspace.downloads)) is not None:
        return packed
    if not origin.reachable:
        raise OfflineMiss(
            f"{pin.distribution} {pin.version} is not cached and --offline is given",
            f"copy its {kind} to {workspace.downloads / pin.sha256}/ or name a directory that holds it with --mirror",
        )
    from sm120kit.sources.index_client import connect

    settings = origin.settings()
    with contextlib.closing(connect(settings)) as client:
        locations = index.find(file, origin.mirror, settings, client)
        return _download.fetch(file, workspace.downloads, key, locations)


def _checkout(pin: Pin, target: Path) -> Checkout | None:
    """The checkout at ``target``, or None when it does not exist or is damaged."""
    if not target.is_dir():
        return None
    repository = Repository(target)
    log = repository.git("log", "-1", "--format=%H %T", BASE, "--", check=False)
    if log.returncode != 0:
        return None
    mark_used(target)
    return Checkout(pin, target, *log.stdout.split())


def _remove_leftovers(workspace: Workspace, key: str) -> None:
    """Remove files of a killed run. Requires the lock of the pin, so that no other run uses them."""
    with disk_errors(workspace.root):
        for directory in (workspace.checkouts, workspace.downloads):
            for leftover in directory.glob(f".{key}.*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        damaged = workspace.checkouts / key
        if damaged.is_dir():
            shutil.rmtree(damaged)
