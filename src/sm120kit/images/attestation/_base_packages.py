"""Debian packages of the base of an image, from dpkg's list and the copyright files in it."""

from contextlib import suppress
from dataclasses import dataclass

from sm120kit.core.errors import NotTrusted
from sm120kit.images.attestation._origins import UNKNOWN, PackageOrigin, Read, of_debian_package
from sm120kit.images.image_records import Image
from sm120kit.images.local_images import LocalImages
from sm120kit.recipes import bases


@dataclass(frozen=True)
class BasePackage:
    """An installed package; ``system`` is ``ID-VERSION`` as ``debian-12``, ``sha256`` is that of its file, "" if unknown."""

    name: str
    version: str
    architecture: str
    system: str
    sha256: str = ""
    origin: PackageOrigin = UNKNOWN


def installed(image: Image, store: LocalImages) -> tuple[BasePackage, ...]:
    """The packages of an image's base, sorted; empty if ``store`` does not have the base, or it has no dpkg.

    Packages of a base of ``recipes/bases/`` have the sha256 of its lock.
    """
    base = store.inspect(image.labels.get("org.opencontainers.image.base.digest", ""))
    if base is None:
        return ()
    read = reader(base, store)
    status, described = map(read, ("/var/lib/dpkg/status", "/usr/lib/os-release"))
    settings = dict(line.split("=", 1) for line in described.splitlines() if "=" in line)
    system = "-".join(settings[key].strip("\"'") for key in ("ID", "VERSION_ID") if key in settings)
    name = image.labels.get("org.opencontainers.image.base.name", "")
    locked = bases.read_lock(name, image.machine) if name in bases.of_images() else ()
    files = {(package.name, package.version, package.architecture): package.sha256 for package in locked}
    packages = []
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if line[:1].isalpha() and ": " in line)
        key = fields.get("Package", ""), fields.get("Version", ""), fields.get("Architecture", "")
        if fields.get("Status", "").endswith(" installed"):
            origin = of_debian_package(fields.get("Maintainer", ""), read(f"/usr/share/doc/{key[0]}/copyright"))
            packages.append(BasePackage(*key, system, files.get(key, ""), origin))
    return tuple(sorted(packages, key=lambda package: (package.name, package.architecture)))


def reader(image: Image, store: LocalImages) -> Read:
    """Reads texts of an image. A link is not followed: what it leads to may be outside."""

    def read(path: str) -> str:
        with suppress(NotTrusted):
            if file := store.file(image.id, path):
                return file.read_text(errors="replace")
        return ""

    return read
