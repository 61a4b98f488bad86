"""Publish a checked image of the state directory or the container daemon, with SBOM and provenance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit.core.errors import NotVerified
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images import image_inputs as contexts
from sm120kit.images.image_records import Attestation, Compression, PublishedImage
from sm120kit.images.oci import Layout
from sm120kit.images.stores import EveryStore

if TYPE_CHECKING:
    from sm120kit.images.attestation import Signer


@dataclass(frozen=True)
class PublishOptions:
    """How an image is published: compression of its layers (an image of the daemon: always gzip), and signature.

    ``local``: also an image with local patches.
    """

    compression: Compression = Compression.GZIP
    sign: Signer | None = None
    local: bool = False


def publish(
    reference: str,
    repository: str,
    index: Path,
    workspace: Workspace,
    options: PublishOptions,
    report: Callable[[str], None] = lambda line: None,
) -> PublishedImage:
    """Publish a checked image of the state directory or the daemon, with SBOM and provenance beside the index.

    See :func:`sm120kit.images.registry.publish` and :func:`sm120kit.images.attestation.write`. An entry of the index that has
    a statement keeps it unless it is to be signed.

    Raises:
        NotVerified: it has local patches, which ``options`` do not allow.
    """
    from sm120kit.images import attestation, registry, transports
    from sm120kit.images.attestation import base_packages, origins

    layout = Layout(workspace.root / "oci")
    transport = transports.transport_of(reference, layout, options.compression, report)
    store = EveryStore(workspace)
    verified = checks.require_verified(reference, store, workspace)
    if (patches := verified.image.labels.get(contexts.LOCAL)) and not options.local:
        raise NotVerified(
            f"{reference} has local patches, which no series has: {patches}",
            "make them permanent with `sm120kit patch import` and build again, or pass --allow-local",
        )
    context = contexts.context_of(verified.image, workspace)

    def attest(entry: PublishedImage) -> Attestation:
        if entry.attested and not options.sign:
            return entry.attested
        packages = base_packages.installed(verified.image, store, workspace)
        wheels = origins.of_wheels(verified.image, context, base_packages.reader(verified.image, store, workspace))
        return attestation.write(entry, context, index.parent, options.sign, packages, wheels)

    return registry.publish(verified, repository, index, transport, attest)
