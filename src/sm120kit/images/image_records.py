"""Records of images: build context, local image, check results, published entry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sm120kit.core.digests import digest_of
from sm120kit.sources.debian import ARCHITECTURES
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

    ``kind`` names the suite of checks; ``reference`` is the name and tag that the image gets once verified.
    """

    digest: str
    kind: str
    base: str
    reference: str
    labels: dict[str, str]
    locked: tuple[LockedWheel, ...]
    ours: tuple[BuiltWheel, ...]


@dataclass(frozen=True)
class Image:
    """An image in a daemon.

    ``id`` is assigned by the daemon and differs between kinds of daemons. ``content`` is the sha256 of the unpacked layers
    and of the settings with which a container starts: equal in every daemon and registry. ``bytes`` is the
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
    def machine(self) -> str:
        """The machine it runs on, as wheels name it: ``aarch64``; "" for one of which no images are built."""
        names = {name: machine for machine, name in ARCHITECTURES.items()}
        return names.get(self.platform.partition("/")[2], "")

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
    return digest_of([[*layers], os, architecture, start_settings(config)])


_NAME = re.compile(r"sm120kit/[a-z0-9]+(?:[._-][a-z0-9]+)*:[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def image_name(kind: str, version: str, context: str, *, local: bool = False) -> str:
    """Name and tag of an image that sm120kit builds; ``context`` is the digest of its build context.

    ``local``: it has patches that are in no series.
    """
    return f"sm120kit/{kind}:{version.partition('+')[0]}-{'local' if local else 'sm120kit'}.{context[:12]}"


class CheckResult(StrEnum):
    """Result of a check of an image."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Check:
    """A check of an image with its result; ``detail`` is why it failed or was not run, ``seconds`` its elapsed time."""

    suite: str
    name: str
    verdict: CheckResult
    detail: str = ""
    seconds: float = 0.0

    @classmethod
    def judged(cls, suite: str, name: str, *problems: str) -> Check:
        """A check that fails if there are problems."""
        return cls(suite, name, CheckResult.FAILED if problems else CheckResult.PASSED, "; ".join(problems))


SERVED_PROMPT = "served_prompt"
"""The check of an engine's image that serves a model, and needs a GPU."""

Reported = tuple[Check, Mapping[str, str]]
"""A check with the facts that it established."""


@dataclass(frozen=True)
class VerifiedImage:
    """An image that passed its checks. Only :func:`sm120kit.images.checks.verify` creates one.

    ``suite`` is the sha256 of the programs of the checks; ``facts`` are what the checks reported, by name. The fact
    ``runtime`` is what ran the checks, see :class:`ContainerResult`.
    """

    image: Image
    reference: str
    suite: str
    checks: tuple[Check, ...]
    facts: dict[str, str]


@dataclass(frozen=True)
class ContainerResult:
    """Exit code and output of a program in a container, and what ran it: unshare or bubblewrap."""

    code: int
    stdout: str
    stderr: str
    runtime: str


@dataclass(frozen=True)
class Attestation:
    """Contents and origin of a published image, in two files beside the index: a CycloneDX SBOM and an in-toto statement.

    ``statement`` is a DSSE envelope if it is ``signed``, else the bare statement.
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
