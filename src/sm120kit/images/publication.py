"""Push a checked image of the state directory to a registry, and list it in an index with SBOM and provenance.

Tags are never moved: a tag that the registry has with another image is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.core.errors import AlreadyExists, NotVerified
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import attestation, checks
from sm120kit.images import image_inputs as contexts
from sm120kit.images.attestation import Signer, _base_packages, _origins
from sm120kit.images.checks.quick import left_out
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.image_index import FORMAT, PublishedIndex, any_machine, read_index, require_repository
from sm120kit.images.image_records import Attestation, PublishedImage, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.images.published_images import require_passed


def publish(
    reference: str,
    repository: str,
    index: Path,
    workspace: Workspace,
    signer: Signer | None = None,
    *,
    allow_local: bool = False,
) -> PublishedImage:
    """Publish a checked image of the state directory, with SBOM and provenance beside the index.

    An entry of the index that has a statement keeps it unless ``signer`` is to sign it.

    Raises:
        NotFound, NotVerified: the state directory does not have it, it did not pass all current checks, or it has local patches
            and ``allow_local`` is not set.
        NotAttested: there is no record of its build.
        AlreadyExists: the registry has that tag with another image.
        RegistryFailed: the registry does not respond, or refuses the request.
    """
    require_repository(repository)
    store = LocalImages(workspace)
    verified = checks.require_verified(reference, store, workspace)
    if (patches := verified.image.labels.get(contexts.LOCAL)) and not allow_local:
        raise NotVerified(
            f"{reference} has local patches, which no series has: {patches}",
            "make them permanent with `sm120kit patch import` and build again, or pass --allow-local",
        )
    if left_out(verified.checks):
        raise NotVerified(f"{reference} passed quick checks only", f"sm120kit verify image {reference}")
    context = contexts.context_of(verified.image, workspace)

    def attest(entry: PublishedImage) -> Attestation:
        if entry.attested and not signer:
            return entry.attested
        packages = _base_packages.installed(verified.image, store, workspace)
        wheels = _origins.of_wheels(verified.image, context, _base_packages.reader(verified.image, store, workspace))
        return attestation.write(entry, context, index.parent, signer, packages, wheels)

    return list_published(verified, repository, index, store.layout, attest)


def list_published(
    image: VerifiedImage,
    repository: str,
    index: Path,
    layout: Layout,
    attest: Callable[[PublishedImage], Attestation],
) -> PublishedImage:
    """Push an image of a layout and list it in ``index``, unless it is already listed and in the registry.

    ``attest`` writes SBOM and statement of the entry, new or already listed, and returns their record.

    Raises:
        NotVerified: a check failed.
        AlreadyExists, RegistryFailed: see :func:`publish`.
    """
    require_passed(image)
    published = read_index(index) if index.exists() else PublishedIndex(FORMAT, ())
    tag, labels = image.reference.rpartition(":")[2], image.image.labels
    listed = [entry for entry in published.images if (entry.repository, entry.tag) == (repository, tag)]
    digest = push(image, repository, layout)
    if listed and listed[0].digest == digest and listed[0].verified.image.content == image.image.content:
        entry = listed[0]
    else:
        recipe, build_id = labels.get("sm120kit.recipe", ""), labels.get("sm120kit.build-id", "")
        entry = PublishedImage(repository, tag, digest, recipe, build_id, image, published=_now())
    entry = replace(entry, attested=attest(entry))
    if listed != [entry]:
        unchanged = [other for other in published.images if other not in listed]
        write_record(index, PublishedIndex(FORMAT, tuple(sorted([*unchanged, entry], key=_order))))
    return entry


def publish_for_all_machines(entry: PublishedImage, index: Path) -> str:
    """Push an OCI index of a published image and the newest ones of its recipe for other machines in its repository.

    Returns its name with tag and digest; "" if ``index`` lists the image for one kind of machine only.

    Raises:
        NotFound, NotTrusted, RegistryFailed: see :meth:`RegistryClient.push_index`.
    """
    family = [
        listed
        for listed in read_index(index).images
        if listed.repository == entry.repository and any_machine(listed.recipe) == any_machine(entry.recipe)
    ]
    by_age = [*sorted(family, key=lambda listed: listed.published), entry]
    newest = {listed.verified.image.platform: listed.digest for listed in by_age}
    if len(newest) == 1:
        return ""
    version = entry.verified.image.labels["org.opencontainers.image.version"].partition("+")[0]
    with RegistryClient(entry.repository) as client:
        return f"{entry.repository}:{client.push_index(newest, version)}"


def push(image: VerifiedImage, repository: str, layout: Layout) -> str:
    """Push an image of a layout with the tag of its name, unless the registry has it. Returns its digest there.

    Raises:
        AlreadyExists, RegistryFailed: see :func:`publish`.
    """
    tag = image.reference.rpartition(":")[2]
    with RegistryClient(repository) as client:
        digest = client.in_registry(tag)
        if digest is None:
            return client.push(layout, layout.require(image.image.id).digest, tag)
        remote = client.image(digest)
        if remote.content != image.image.content:
            raise AlreadyExists(
                f"{repository}:{tag} exists in the registry with another image: {digest}",
                "tags are never moved; build another image",
            )
    return digest


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _order(entry: PublishedImage) -> tuple[str, str, str, str]:
    return entry.recipe, entry.build_id, entry.verified.image.platform, entry.tag
