"""Images: what goes in, what a daemon has, what the checks found, and what is published."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sm120kit.records.builds import Artifact
from sm120kit.records.locks import LockedWheel


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel that was built here. ``origin`` is what it says of itself: its ``sm120kit.json``."""

    wheel: LockedWheel
    origin: dict[str, Any]


@dataclass(frozen=True)
class ImageContext:
    """A ready build context. ``digest`` names everything that goes in, files, arguments and labels, and with it the image.

    ``kind`` is the Dockerfile's name and that of the image's checks; ``reference`` the name and tag that a verified image gets.
    ``locked`` and ``ours`` are installed, by ``installer``, which is not.
    """

    directory: Path
    digest: str
    kind: str
    base: str
    reference: str
    arguments: dict[str, str]
    labels: dict[str, str]
    installer: LockedWheel
    locked: tuple[LockedWheel, ...]
    ours: tuple[BuiltWheel, ...]


@dataclass(frozen=True)
class Image:
    """An image as a daemon has it.

    ``id`` is the daemon's own and differs between kinds of daemons; ``content`` is the sha256 of the layers, unpacked, and of
    the settings with which a container starts, and is the same in every daemon and registry and with either builder: layers
    without files do not count. ``bytes`` is unpacked.
    """

    id: str
    content: str
    platform: str
    layers: tuple[str, ...]
    labels: dict[str, str]
    user: str
    bytes: int


class Verdict(StrEnum):
    """What a check of an image came to."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Check:
    """One check of an image: ``suite`` and ``name``, and why it failed or was not run."""

    suite: str
    name: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class VerifiedImage:
    """An image that passed its checks, and what its container said. Only ``verify`` makes one.

    ``suite`` is the sha256 of the checks themselves.
    """

    image: Image
    reference: str
    suite: str
    checks: tuple[Check, ...]
    said: dict[str, str]


@dataclass(frozen=True)
class Attested:
    """What a published image is made of and how, in files beside the index: a CycloneDX SBOM and an in-toto statement.

    ``statement`` is a DSSE envelope when it is ``signed``, else the bare statement.
    """

    sbom: Artifact
    statement: Artifact
    signed: bool


@dataclass(frozen=True)
class PublishedImage:
    """Where a verified image can be had: ``repository@digest``. An entry of ``images.json``."""

    repository: str
    tag: str
    digest: str
    recipe: str
    build_id: str
    verified: VerifiedImage
    attested: Attested | None = None
