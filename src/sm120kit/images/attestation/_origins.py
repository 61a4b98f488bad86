"""Licences and suppliers of what is installed in an image, as METADATA of wheels and Debian's copyright files state them.

Nothing is guessed: what a package does not state is empty.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import HeaderParser
from email.utils import getaddresses

from sm120kit.images._wheel_layers import VENV
from sm120kit.images.image_records import Image, ImageContext

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
