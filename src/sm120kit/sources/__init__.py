"""A pin becomes a checkout: a git repository with one base commit that is the same on every machine.

Nothing is taken on trust: an sdist must have the pinned sha256, a git source the pinned commit. So it does not matter who
delivers, and every configured place is asked in turn.

Air gaps. ``mirror`` is asked *instead of* the index or the git host, as with ``pip --no-index --find-links``: a directory or
URL that holds ``<file>`` or ``<sha256>/<file>`` for sdists (a state directory's ``downloads/`` is one) and, for git sources and
their submodules, a repository or bundle named like the last part of the URL or like the project. ``offline`` allows what was
fetched before and a mirror that is a local directory, nothing else.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from sm120kit.errors import OfflineMiss
from sm120kit.gitrepo import Repository
from sm120kit.records import Checkout, Pin, SdistPin
from sm120kit.sources import archive, download, places, upstream
from sm120kit.sources.resolver import resolve
from sm120kit.sources.wheels import wheelhouse
from sm120kit.workspace import Workspace, digest_of, disk_errors, publish_directory

__all__ = ["BASE", "fetch", "key_of", "resolve", "wheelhouse"]

BASE = "refs/heads/base"
"""Names the base commit in every checkout."""

_FORMAT = 1
"""Raise it when the same pin gives another base commit than before."""


def key_of(pin: Pin) -> str:
    """The name of a pin's checkout: readable, and different for every pin."""
    name = re.sub(r"[^\w.+-]", "-", f"{pin.project}-{pin.version}")
    return f"{name}-{digest_of([_FORMAT, pin])[:16]}"


def fetch(pin: Pin, workspace: Workspace, *, mirror: str | None = None, offline: bool = False) -> Checkout:
    """Have a pinned source as a checkout, from disk where it was fetched before.

    Raises:
        FetchFailed: no place delivered it.
        HashMismatch: a place delivered something else.
        UnsafeArchive: the sdist is damaged or has a member that cannot be in a tree.
        OfflineMiss: ``offline`` is set and it is not at hand.
        NotEnoughDisk, StateUnwritable: it cannot be stored.
    """
    key = key_of(pin)
    target = workspace.checkouts / key
    found = _checkout(pin, target)
    if found is not None:
        return found
    with workspace.locked(f"source-{key}"):
        found = _checkout(pin, target)
        if found is not None:
            return found
        _sweep(workspace, key)
        if isinstance(pin, SdistPin):
            packed = download.cached(pin, workspace.downloads)
            if packed is None:
                if offline and not places.is_local(mirror):
                    raise OfflineMiss(
                        f"{pin.distribution} {pin.version} was not fetched before and --offline is given",
                        f"copy its sdist to {workspace.downloads / pin.sha256}/ "
                        "or name a directory that holds it with --mirror",
                    )
                settings = places.settings_for(mirror)
                with contextlib.closing(places.client_for(settings)) as client:
                    packed = download.fetch(pin, workspace.downloads, key, places.find(pin, mirror, settings, client))
            with publish_directory(target) as beside:
                archive.import_sdist(pin, packed, Repository.init(beside), BASE)
        else:
            if offline and not places.is_local(mirror):
                raise OfflineMiss(
                    f"{pin.project} {pin.version} at {pin.commit} was not fetched before and --offline is given",
                    f"name a directory that holds a bare clone {places.repository_name(pin.url)} with --mirror, "
                    f"or copy a checkout to {target}",
                )
            with publish_directory(target) as beside:
                upstream.import_commit(pin, Repository.init(beside), BASE, mirror)
        found = _checkout(pin, target)
        assert found is not None, f"{target} has no base commit"
        return found


def _checkout(pin: Pin, target: Path) -> Checkout | None:
    if not target.is_dir():
        return None
    repository = Repository(target)
    asked = repository.git("log", "-1", "--format=%H %T", BASE, "--", check=False)
    ids = asked.stdout.split()
    return Checkout(pin, target, *ids) if asked.returncode == 0 else None


def _sweep(workspace: Workspace, key: str) -> None:
    """Remove what a run that was killed left behind. Call it with the pin's lock held: no other run can own these."""
    with disk_errors(workspace.root):
        for directory in (workspace.checkouts, workspace.downloads):
            for stale in directory.glob(f".{key}.*"):
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        damaged = workspace.checkouts / key
        if damaged.is_dir():
            shutil.rmtree(damaged)
