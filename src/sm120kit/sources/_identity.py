"""Check that a fetched source is the project and version of its pin, which a sha256 or commit does not show."""

from packaging.metadata import parse_email
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm120kit.core.errors import Mismatch
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import GitPin, Pin, WheelPin

_HEAD_BYTES = 2**20
"""Bytes that are read of a file; PKG-INFO has some kilobytes, with name and version first."""


def require_identity(pin: Pin, repository: Repository, commit: str) -> None:
    """Compare ``PKG-INFO`` of an sdist, ``METADATA`` of a wheel, ``version.txt`` of FlashInfer's git repository with the pin.

    Other git sources have no file with their version. The version of CUTLASS, alone or inside another project, is compared by
    :mod:`sm120kit.patches`.

    Raises:
        Mismatch: it is another project or version, or lacks its metadata, which PEP 517, PEP 643 and PEP 427 require.
    """
    if not isinstance(pin, GitPin):
        file = f"{'-'.join(pin.filename.split('-')[:2])}.dist-info/METADATA" if isinstance(pin, WheelPin) else "PKG-INFO"
        metadata, _ = parse_email(_head(repository, commit, file))
        name, version = metadata.get("name", ""), metadata.get("version", "")
        expected, digest = pin.distribution, f"sha256 {pin.sha256}"
    elif pin.project == "flashinfer":
        name, version = pin.project, _head(repository, commit, "version.txt").decode(errors="replace").strip()
        expected, file, digest = pin.project, "version.txt", f"commit {pin.commit}"
    else:
        return
    if canonicalize_name(name) != canonicalize_name(expected) or not _equal(version, pin.version):
        actual = f"{name} {version}" if name and version else "no name and version"
        raise Mismatch(
            f"the source of {pin.project} with {digest} has {actual} in {file}; the recipe has {expected} {pin.version}",
            "correct version or pin in the recipe",
        )


def _head(repository: Repository, commit: str, path: str) -> bytes:
    try:
        return repository.read(commit, path)[:_HEAD_BYTES]
    except FileNotFoundError:
        return b""


def _equal(actual: str, pinned: str) -> bool:
    try:
        return Version(actual) == Version(pinned)
    except InvalidVersion:
        return False
