"""Push checked images to a registry and pull them by digest.

Tags are never moved: a tag that exists in the registry with another image is refused. A pulled image must have the content that
was verified, byte for byte; the digest alone only identifies the registry's copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.core.errors import AlreadyExists, NotVerified, RegistryFailed
from sm120kit.core.record_files import write_record
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.image_index import FORMAT, PublishedIndex, read_index, require_repository
from sm120kit.images.image_records import Attestation, CheckResult, Image, PublishedImage, VerifiedImage
from sm120kit.images.transports import ImageTransport, other_image


def publish(
    image: VerifiedImage,
    repository: str,
    index: Path,
    transport: ImageTransport,
    attest: Callable[[PublishedImage], Attestation],
) -> PublishedImage:
    """Push a checked image to ``repository`` and list it in ``index``, unless it is already listed and in the registry.

    ``attest`` writes SBOM and statement of the entry, new or already listed, and returns their record.

    Raises:
        NotVerified: the local image with that name is not the one that was verified, or a check failed.
        AlreadyExists: the registry has that tag with another image.
        RegistryFailed: the registry does not respond, or refuses the request.
    """
    require_repository(repository)
    require_passed(image)
    local = transport.inspect(image.reference)
    if local is None or local.content != image.image.content:
        raise NotVerified(
            f"{image.reference} is {'gone' if local is None else 'another image now'}: it was verified with content "
            f"{image.image.content}",
            f"sm120kit verify image {image.reference}",
        )
    published = read_index(index) if index.exists() else PublishedIndex(FORMAT, ())
    tag = image.reference.rpartition(":")[2]
    target = f"{repository}:{tag}"
    remote = transport.in_registry(repository, tag)
    listed = [entry for entry in published.images if (entry.repository, entry.tag) == (repository, tag)]
    if remote is not None and listed and listed[0].digest == remote and listed[0].verified.image.content == local.content:
        entry = listed[0]
    else:
        if remote is not None and not transport.has_content(local, repository, remote):
            raise AlreadyExists(
                f"{target} exists in the registry with another image: {remote}", "tags are never moved; build another image"
            )
        entry = PublishedImage(
            repository,
            tag,
            remote or _push(local, repository, tag, transport),
            local.labels.get("sm120kit.recipe", ""),
            local.labels.get("sm120kit.build-id", ""),
            image,
            published=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
    entry = replace(entry, attested=attest(entry))
    if listed != [entry]:
        unchanged = [other for other in published.images if other not in listed]
        write_record(index, PublishedIndex(FORMAT, tuple(sorted([*unchanged, entry], key=_order))))
    return entry


def _push(local: Image, repository: str, tag: str, transport: ImageTransport) -> str:
    """Push a local image and return its digest in the registry."""
    digest = transport.push(local, repository, tag)
    if transport.in_registry(repository, digest) is None:
        raise RegistryFailed(f"{repository} does not have {digest} after a push", "look at the registry's log")
    return digest


def pull(entry: PublishedImage, transport: ImageTransport) -> VerifiedImage:
    """Pull an image by digest and tag it if it is the image that was verified; otherwise remove it.

    Raises:
        NotVerified: the index lists it without passed checks or with a foreign name, or its content is not what was verified.
        AlreadyExists: another local image has its name.
        NotFound, NotTrusted, RegistryFailed: the registry does not deliver the listed image.
    """
    require_passed(entry.verified)
    require_canonical_name(entry.verified)
    expected, reference = entry.verified.image, entry.verified.reference
    local = transport.inspect(reference)
    if local is not None and local.content != expected.content:
        raise AlreadyExists(
            f"{reference} is another local image, with content {local.content}",
            f"remove it if it is not needed (docker rmi {reference}); tags are never moved",
        )
    pulled = transport.pull(expected, entry.repository, entry.digest)
    if pulled.content != expected.content or pulled.labels != expected.labels:
        transport.discard(pulled, entry.repository, entry.digest)
        raise other_image(f"{entry.repository}@{entry.digest}", pulled.content, pulled.labels, expected)
    transport.tag(pulled, reference)
    return entry.verified


def unresolved(images: Sequence[PublishedImage]) -> tuple[PublishedImage, ...]:
    """Entries whose digest their registry no longer has."""
    missing = []
    for entry in images:
        with RegistryClient(entry.repository) as client:
            if client.in_registry(entry.digest) is None:
                missing.append(entry)
    return tuple(missing)


def require_passed(image: VerifiedImage) -> None:
    """Require that a record has passed checks and no failed ones.

    Raises:
        NotVerified: it has none, or a check failed.
    """
    failed = [f"{check.suite}/{check.name}" for check in image.checks if check.verdict is CheckResult.FAILED]
    if failed or not any(check.verdict is CheckResult.PASSED for check in image.checks):
        raise NotVerified(
            f"{image.reference} did not pass its checks: {', '.join(failed) or 'none was run'}",
            f"sm120kit verify image {image.reference}",
        )


def require_canonical_name(image: VerifiedImage) -> None:
    """Require that the name of an image follows from kind, version and context in its labels.

    Raises:
        NotVerified: the record has another name, such as that of a foreign image.
    """
    name = image.image.canonical_name
    if not name or image.reference != name:
        raise NotVerified(
            f"the index lists an image as {image.reference!r}; its labels give the name {name or 'of no image of sm120kit'}",
            "it was not pulled; report it to the publisher of the index",
        )


def _order(entry: PublishedImage) -> tuple[str, str, str, str]:
    return entry.recipe, entry.build_id, entry.verified.image.platform, entry.tag
