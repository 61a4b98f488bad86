"""Package URLs (purl) of the contents of an image, the same in SBOM and provenance."""

from __future__ import annotations

from packageurl import PackageURL

from sm120kit.images.attestation._base_packages import BasePackage
from sm120kit.images.image_records import BuiltWheel
from sm120kit.sources.source_records import LockedWheel


def purl(kind: str, name: str, version: str, namespace: str | None = None, /, **qualifiers: str) -> PackageURL:
    """A package URL."""
    return PackageURL(type=kind, namespace=namespace, name=name, version=version, qualifiers=qualifiers or None)


def wheel_purl(wheel: LockedWheel) -> PackageURL:
    """The purl of a wheel. The version of a patched wheel has a local part, so that it matches no wheel on an index."""
    return purl("pypi", wheel.name, wheel.version, file_name=wheel.filename)


def official_wheel(built: BuiltWheel) -> tuple[LockedWheel, ...]:
    """The upstream wheel in which a patched wheel replaces some files; empty if it was built from source entirely."""
    official = built.origin.get("official")
    if official is None:
        return ()
    version = built.wheel.version.partition("+")[0]
    return (LockedWheel(built.wheel.name, version, official["wheel"], official["sha256"]),)


def image_purl(name: str, digest: str) -> PackageURL:
    """The purl of an image by the digest of its manifest."""
    return purl("oci", name, digest)


def base_purl(base: str) -> PackageURL:
    """The purl of a base, ``name@sha256:...``."""
    name, _, digest = base.partition("@")
    return image_purl(name, digest)


def package_purl(package: BasePackage) -> PackageURL:
    """The purl of a Debian package (purl-spec, types/deb): its namespace is the distribution, as ``debian``."""
    namespace = package.system.partition("-")[0] or "debian"
    qualifiers = {"arch": package.architecture} | ({"distro": package.system} if package.system else {})
    return purl("deb", package.name, package.version, namespace, **qualifiers)


def source_purl(pin: dict[str, str]) -> PackageURL:
    """The purl of a pinned source: an sdist or wheel, or a git commit."""
    if "commit" in pin:
        return purl("generic", pin["project"], pin["version"], vcs_url=f"git+{pin['url']}@{pin['commit']}")
    return purl("pypi", pin["distribution"], pin["version"])
