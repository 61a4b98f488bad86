"""Push a checked image of the state directory to a registry, and list it in an index with SBOM and provenance.

Tags are never moved: a tag that the registry has with another image is refused.
"""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.core.errors import AlreadyExists, NotVerified
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import attestation, checks
from sm120kit.images import image_inputs as contexts
from sm120kit.images.attestation import _origins
from sm120kit.images.checks.quick import left_out
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.image_index import FORMAT, PublishedIndex, any_machine, read_index, require_repository
from sm120kit.images.image_records import Image, PublishedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.images.published_images import require_passed


def publish(
    reference: str,
    repository: str,
    index: Path,
    workspace: Workspace,
    key: Path | None = None,
    *,
    allow_local: bool = False,
) -> PublishedImage:
    """Publish a checked image of the state directory, with SBOM and provenance beside the index.

    An entry of the index that has a statement keeps it unless ``key`` is to sign it.

    Raises:
        NotFound, NotVerified: the state directory does not have it, it did not pass all current checks, or it has local patches
            and ``allow_local`` is not set.
        NotAttested: there is no record of its build.
        AlreadyExists: the registry has that tag with another image.
        RegistryFailed: the registry does not respond, or refuses the request.
    """
    require_repository(repository)
    if key:
        attestation.require_private_key(key)
    store = LocalImages(workspace)
    verified = checks.require_verified(reference, store, workspace)
    labels = verified.image.labels
    if (patches := labels.get(contexts.LOCAL)) and not allow_local:
        raise NotVerified(
            f"{reference} has local patches, which no series has: {patches}",
            "make them permanent with `sm120kit patch import` and build again, or pass --allow-local",
        )
    if left_out(verified.checks):
        raise NotVerified(f"{reference} passed quick checks only", f"sm120kit verify image {reference}")
    require_passed(verified)
    context = contexts.context_of(verified.image, workspace)
    published = read_index(index) if index.exists() else PublishedIndex(FORMAT, ())
    tag = verified.reference.rpartition(":")[2]
    listed = [entry for entry in published.images if (entry.repository, entry.tag) == (repository, tag)]
    digest = _push(verified.image, repository, tag, store.layout)
    if listed and listed[0].digest == digest and listed[0].verified.image.content == verified.image.content:
        entry = listed[0]
    else:
        recipe, build_id = labels.get("sm120kit.recipe", ""), labels.get("sm120kit.build-id", "")
        entry = PublishedImage(repository, tag, digest, recipe, build_id, verified, published=_now())
    if key or not entry.attested:
        packages = _origins.installed(verified.image, store)
        wheels = _origins.of_wheels(verified.image, context, _origins.reader(verified.image, store))
        entry = replace(entry, attested=attestation.write(entry, context, index.parent, key, packages, wheels))
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


def _push(image: Image, repository: str, tag: str, layout: Layout) -> str:
    """Push an image of a layout, unless the registry has it. Returns its digest there; see :func:`publish` for errors."""
    with RegistryClient(repository) as client:
        digest = client.in_registry(tag)
        if digest is None:
            return client.push(layout, layout.require(image.id).digest, tag)
        if client.image(digest).content != image.content:
            raise AlreadyExists(
                f"{repository}:{tag} exists in the registry with another image: {digest}",
                "tags are never moved; build another image",
            )
    return digest


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _order(entry: PublishedImage) -> tuple[str, str, str, str]:
    return entry.recipe, entry.build_id, entry.verified.image.platform, entry.tag
