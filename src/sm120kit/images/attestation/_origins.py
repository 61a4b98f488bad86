"""What is installed in an image: its base's Debian packages, and licences and suppliers as METADATA and copyright files state.

Nothing is guessed: what a package does not state is empty.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.parser import HeaderParser
from email.utils import getaddresses

from sm120kit.core.errors import NotTrusted
from sm120kit.images._wheel_layers import VENV
from sm120kit.images.image_records import Image, ImageContext
from sm120kit.images.local_images import LocalImages
from sm120kit.recipes import bases

Read = Callable[[str], str]
"""Reads a text of an image by its absolute path; empty if the image has no such file."""

_CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(?!OSI Approved$)(.+)")
_LONGEST_NAME = 100
"""Characters of the name of a licence: the field ``License`` of METADATA is a name or the whole text."""
_COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z0-9][\w.+-]*[\w+])")


@dataclass(frozen=True)
class PackageOrigin:
    """The licences of a package, as an SPDX expression or by names, and its supplier; empty if unknown."""

    expression: str = ""
    licenses: tuple[str, ...] = ()
    supplier: str = ""


UNKNOWN = PackageOrigin()


def of_wheel(metadata: str) -> PackageOrigin:
    """What the METADATA of a wheel states (core metadata 2.4: License-Expression; before: classifiers, License)."""
    fields = HeaderParser().parsestr(metadata)
    classifiers = map(_CLASSIFIER.fullmatch, fields.get_all("Classifier", ()))
    names = tuple(match[1] for match in classifiers if match)
    text = fields.get("License", "").strip()
    if not names and 0 < len(text) <= _LONGEST_NAME and "\n" not in text and text != "UNKNOWN":
        names = (text,)
    addresses = [fields.get(f"{role}-email", "") for role in ("Maintainer", "Author")]
    people = [fields.get("Maintainer", ""), fields.get("Author", ""), *(name or mail for name, mail in getaddresses(addresses))]
    supplier = next((person.strip() for person in people if person.strip() not in ("", "UNKNOWN")), "")
    return PackageOrigin(fields.get("License-Expression", "").strip(), names, supplier)


def of_debian_package(maintainer: str, copyright_file: str) -> PackageOrigin:
    """The maintainer of a Debian package, and the licences in its copyright file.

    They are the fields ``License`` if the file is machine-readable (DEP-5), else the licences of Debian's that it refers to.
    """
    if copyright_file.startswith("Format:"):
        names = re.findall(r"^License:[ \t]*(\S.*)$", copyright_file, re.MULTILINE)
    else:
        names = _COMMON.findall(copyright_file)
    return PackageOrigin(licenses=tuple(sorted({name.strip() for name in names})), supplier=maintainer)


def of_wheels(image: Image, context: ImageContext, read: Read) -> dict[str, PackageOrigin]:
    """What the wheels that are installed in an image state, by the name of their file."""
    site = f"/{VENV}/lib/python{image.labels.get('sm120kit.python', '')}/site-packages"
    wheels = (*context.locked, *(built.wheel for built in context.ours))
    directories = {wheel.filename: "-".join(wheel.filename.split("-")[:2]) for wheel in wheels}
    return {name: of_wheel(read(f"{site}/{directory}.dist-info/METADATA")) for name, directory in directories.items()}


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
