"""Records of images: build context, local image, check results, published entry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from sm120kit.core.digests import digest_of
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels.build_records import Artifact


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel that sm120kit built. ``origin`` is the content of its ``sm120kit.json``: recipe, sources, patches, plan."""

    wheel: LockedWheel
    origin: dict[str, Any]


@dataclass(frozen=True)
class ImageContext:
    """All inputs of an image, which ``digest`` covers and identifies it by.

    ``kind`` names the suite of checks; ``reference`` is the name and tag that the image gets once verified. ``epoch`` is the
    time of its files, in seconds since 1970.
    """

    digest: str
    kind: str
    base: str
    reference: str
    epoch: int
    labels: dict[str, str]
    locked: tuple[LockedWheel, ...]
    ours: tuple[BuiltWheel, ...]


@dataclass(frozen=True)
class Image:
    """An image in a daemon.

    ``id`` is assigned by the daemon and differs between kinds of daemons. ``content`` is the sha256 of the unpacked layers,
    empty ones excluded, and of the settings with which a container starts: equal in every daemon and registry. ``bytes`` is the
    unpacked size.
    """

    id: str
    content: str
    platform: str
    layers: tuple[str, ...]
    labels: dict[str, str]
    user: str
    bytes: int

    @property
    def canonical_name(self) -> str:
        """The name and tag in its labels, or "" unless they follow from kind, version and context in its other labels.

        Labels alone prove nothing: an image can claim any name, also that of a foreign image.
        """
        kind, version, context = (
            self.labels.get(label, "") for label in ("sm120kit.kind", "org.opencontainers.image.version", "sm120kit.context")
        )
        name = image_name(kind, version, context, local="sm120kit.local" in self.labels)
        matches = _NAME.fullmatch(name) and _DIGEST.fullmatch(context) and self.labels.get("sm120kit.reference") == name
        return name if matches else ""


EMPTY_LAYER = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
"""Digest of an empty tar file, 1024 zero bytes. BuildKit creates such a layer for WORKDIR, the classic builder does not."""

_START_SETTINGS = (
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "Labels",
    "Shell",
    "StopSignal",
    "User",
    "Volumes",
    "WorkingDir",
)


def start_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with which a container starts, of the ``config`` of an image, by their names in Docker's API."""
    return {key: config[key] for key in _START_SETTINGS if config.get(key)}


def image_content(layers: Sequence[str], os: str, architecture: str, config: Mapping[str, Any]) -> str:
    """See :attr:`Image.content`; ``layers`` are digests of unpacked layers."""
    nonempty = [layer for layer in layers if layer != EMPTY_LAYER]
    return digest_of([nonempty, os, architecture, start_settings(config)])


_NAME = re.compile(r"sm120kit/[a-z0-9]+(?:[._-][a-z0-9]+)*:[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def image_name(kind: str, version: str, context: str, *, local: bool = False) -> str:
    """Name and tag of an image that sm120kit builds; ``context`` is the digest of its build context.

    ``local``: it has patches that are in no series.
    """
    return f"sm120kit/{kind}:{version.partition('+')[0]}-{'local' if local else 'sm120kit'}.{context[:12]}"


class Compression(StrEnum):
    """How published layers are compressed. Docker before 23 cannot pull zstd."""

    GZIP = "gzip"
    ZSTD = "zstd"


class CheckResult(StrEnum):
    """Result of a check of an image."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Check:
    """A check of an image with its result; ``detail`` is why it failed or was not run."""

    suite: str
    name: str
    verdict: CheckResult
    detail: str = ""


@dataclass(frozen=True)
class VerifiedImage:
    """An image that passed its checks. Only :func:`sm120kit.images.checks.verify` creates one.

    ``suite`` is the sha256 of the programs of the checks; ``facts`` are what the checks reported, by name. The fact
    ``runtime`` is what ran the checks, see :class:`ContainerResult`; a record without it was made with docker.
    """

    image: Image
    reference: str
    suite: str
    checks: tuple[Check, ...]
    facts: dict[str, str]


@dataclass(frozen=True)
class ContainerResult:
    """Exit code and output of a program in a container, and what ran it: docker, unshare or bubblewrap."""

    code: int
    stdout: str
    stderr: str
    runtime: str = "docker"


class ImageStore(Protocol):
    """Where local images are: a container daemon, or an OCI image layout in the state directory."""

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if it does not exist."""
        ...

    def find(self, reference: str) -> Image:
        """Look up an image that must exist.

        Raises:
            NotFound: it does not exist.
        """
        ...

    def images(self, label: str) -> list[tuple[Image, tuple[str, ...]]]:
        """All images with a label, each with its tags."""
        ...

    def base_of(self, image: Image) -> Image | None:
        """The base in an image's labels; None if they have none or it does not exist here."""
        ...

    def settings(self, reference: str) -> dict[str, Any]:
        """The settings with which a container of an image starts, see :func:`start_settings`."""
        ...

    def history(self, reference: str) -> tuple[str, ...]:
        """The build commands in the history of an image, newest first."""
        ...

    def run(self, image: str, argv: Sequence[str], files: Mapping[str, bytes]) -> ContainerResult:
        """Run a program as the image's user, in place of its entrypoint, without a network; ``files`` are below ``/tmp``."""
        ...

    def owners(self, image: str) -> dict[str, str] | None:
        """Owners ``uid:gid`` of the files that do not belong to root, by path; None if programs of :meth:`run` detect them."""
        ...

    def digests(self, image: str) -> dict[str, str]:
        """The sha256 of files in the form of RECORD, by absolute path, as far as they were computed when they were unpacked."""
        ...

    def fetch(self, image: str, path: str, into: Path) -> bool:
        """Copy a file or directory of an image below ``into``; false if the image does not have it.

        Raises:
            NotTrusted: it contains a link or a special file.
        """
        ...

    def tag(self, image: str, reference: str) -> None:
        """Tag an image. The tag moves if another image has it."""
        ...

    def remove(self, reference: str) -> None:
        """Remove a tag, and with the last of them the image."""
        ...


@dataclass(frozen=True)
class Attestation:
    """Contents and origin of a published image, in two files beside the index: a CycloneDX SBOM and an in-toto statement.

    ``statement`` is a DSSE envelope or a Sigstore bundle if it is ``signed``, else the bare statement.
    """

    sbom: Artifact
    statement: Artifact
    signed: bool


@dataclass(frozen=True)
class PublishedImage:
    """An entry of ``images.json``: a checked image and its location, ``repository@digest``.

    ``published`` is the time of its first listing, ``YYYY-MM-DDTHH:MM:SSZ``; "" in an index of an older sm120kit.
    """

    repository: str
    tag: str
    digest: str
    recipe: str
    build_id: str
    verified: VerifiedImage
    attested: Attestation | None = None
    published: str = ""
