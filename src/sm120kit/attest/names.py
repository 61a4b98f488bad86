"""Package URLs (purl) of what an image is made of, the same in SBOM and provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm120kit.errors import ToolchainMissing
from sm120kit.records import BuiltWheel, LockedWheel

if TYPE_CHECKING:
    from packageurl import PackageURL


def purl(kind: str, name: str, version: str, **qualifiers: str) -> PackageURL:
    """A package URL.

    Raises:
        ToolchainMissing: the SBOM library, which brings it, is not installed.
    """
    try:
        from packageurl import PackageURL
    except ModuleNotFoundError as error:
        raise ToolchainMissing("cyclonedx-python-lib is not installed", "pip install 'sm120kit[docker]'") from error
    return PackageURL(type=kind, name=name, version=version, qualifiers=qualifiers or None)


def of_wheel(wheel: LockedWheel) -> PackageURL:
    """A wheel on a Python index, or one of ours: its version has a local part, which no index has."""
    return purl("pypi", wheel.name, wheel.version, file_name=wheel.filename)


def packed_again(built: BuiltWheel) -> tuple[LockedWheel, ...]:
    """The official wheel that a wheel of ours is but for a few files, when it was not built from source as a whole."""
    official = built.origin.get("official")
    if official is None:
        return ()
    version = built.wheel.version.partition("+")[0]
    return (LockedWheel(built.wheel.name, version, official["wheel"], official["sha256"]),)


def of_image(name: str, digest: str, repository: str = "") -> PackageURL:
    """An image by the digest of its manifest. ``repository`` is ``registry/path``, ``name`` its last part."""
    return purl("oci", name, digest, **({"repository_url": repository} if repository else {}))


def of_base(base: str) -> PackageURL | None:
    """A base image, ``name@sha256:...``; None when it is the id of a local one, which no registry knows."""
    repository, _, digest = base.rpartition("@")
    return of_image(repository.rpartition("/")[2], digest, repository) if repository else None


def of_source(pin: dict[str, str]) -> PackageURL:
    """A pinned source: an sdist, or a git commit."""
    if "commit" in pin:
        return purl("generic", pin["project"], pin["version"], vcs_url=f"git+{pin['url']}@{pin['commit']}")
    return purl("pypi", pin["distribution"], pin["version"])
