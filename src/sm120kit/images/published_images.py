"""Select a published image that is signed and recent enough, and pull it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import DaemonUnreachable, NotAttested, NotTrusted, RequirementMissing
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import attestation, checks, loading, registry
from sm120kit.images.docker import Daemon
from sm120kit.images.image_index import find_image, read_index
from sm120kit.images.image_records import PublishedImage, VerifiedImage
from sm120kit.images.label_changes import label_changes
from sm120kit.images.oci import Layout
from sm120kit.images.stores import EveryStore
from sm120kit.images.transports import ImageTransport, LayoutTransport


@dataclass(frozen=True)
class Source:
    """An index, and the requirements on its entries.

    ``key`` is the file of the public key or identity that must have signed an entry; without it the index is trusted as is,
    with a warning. ``minimum`` is a time as in :attr:`PublishedImage.published`: older images are refused. Images older than
    the newest one pulled before are refused as well, unless ``allow_older`` is set.
    """

    index: Path
    key: Path | None = None
    minimum: str = ""
    allow_older: bool = False


@dataclass(frozen=True)
class PulledImage:
    """A pulled image, and the changes since the last pull of the same recipe; None for the first pull."""

    verified: VerifiedImage
    changes: tuple[str, ...] | None


@dataclass(frozen=True)
class NewestImage:
    """Record of the newest image of a recipe that was pulled from one publisher."""

    published: str
    repository: str
    tag: str


def select(name: str, source: Source, platform: str, workspace: Workspace) -> PublishedImage:
    """Select an entry of an index by recipe name, tag or start of a build id, and require that it may be used.

    Raises:
        NotFound: there is none, or more than one.
        BadInput: see :func:`read_index`.
        NotVerified: it did not pass its checks, or its name does not follow from its labels.
        NotAttested: it is not signed by the key or identity of ``source``.
        NotTrusted: it is older than ``source`` allows.
    """
    entry = find_image(name, source.index, platform)
    registry.require_passed(entry.verified)
    registry.require_canonical_name(entry.verified)
    if source.key:
        attestation.verify(entry, source.index.parent, source.key)
    else:
        reporting.warn(f"{entry.repository}:{entry.tag}: signature not verified; pass `--trust KEY`")
    _require_recent(entry, source, workspace)
    return entry


def pull_and_load(entry: PublishedImage, source: Source, workspace: Workspace, *, load: bool | None = None) -> PulledImage:
    """Pull an entry that :func:`select` returned into the state directory; see :func:`pull`.

    ``load`` is whether it is loaded into the container daemon as well; by default if there is one.

    Raises:
        AlreadyExists: the daemon has another image with its name. Nothing is pulled.
        DaemonUnreachable, RequirementMissing: ``load`` is set and no daemon can be used.
    """
    registry.require_canonical_name(entry.verified)
    daemon = None if load is False else _daemon(required=bool(load))
    if daemon:
        loading.require_free(entry.verified.reference, entry.verified.image, daemon)
    layout = Layout(workspace.root / "oci")
    pulled = pull(entry, source, workspace, LayoutTransport(layout))
    if daemon:
        manifest = layout.find(pulled.verified.reference)
        assert manifest is not None
        loading.load(layout, manifest.digest, daemon)
    return pulled


def pull(entry: PublishedImage, source: Source, workspace: Workspace, transport: ImageTransport) -> PulledImage:
    """Pull an entry that :func:`select` returned, and record the image and its time of publishing.

    Raises:
        NotVerified, NotFound, NotTrusted, RegistryFailed, AlreadyExists: see :func:`sm120kit.images.registry.pull`.
    """
    pulled = registry.pull(entry, transport)
    write_record(checks.record_path(workspace, pulled.image), pulled)
    newest = _newest(entry, source, workspace)
    if newest is None or entry.published > newest.published:
        write_record(_newest_path(entry, source, workspace), NewestImage(entry.published, entry.repository, entry.tag))
    platform = entry.verified.image.platform
    last = workspace.root / "images" / "pulled" / f"{digest_of([entry.recipe, platform])}.json"
    before = read_record(VerifiedImage, last) if last.is_file() else None
    write_record(last, pulled)
    return PulledImage(pulled, label_changes(before.image, pulled.image) if before else None)


def require_signed(reference: str, source: Source, workspace: Workspace) -> None:
    """Require that a local image is listed by ``source`` and signed by its key or identity.

    Raises:
        NotFound: neither the state directory nor the daemon has the image.
        NotAttested: it is not listed, or :func:`sm120kit.images.attestation.verify` refuses it.
    """
    image = EveryStore(workspace).find(reference)
    listed = [entry for entry in read_index(source.index).images if entry.verified.image.content == image.content]
    if not listed:
        raise NotAttested(
            f"{source.index} lists no image with the content of {reference}", "pass the index that lists it with --index"
        )
    if source.key:
        attestation.verify(listed[0], source.index.parent, source.key)


def unresolved(index: Path) -> tuple[tuple[PublishedImage, ...], tuple[PublishedImage, ...]]:
    """All entries of an index, and those whose digest their registry no longer has."""
    listed = read_index(index).images
    return listed, registry.unresolved(listed)


def _daemon(*, required: bool) -> Daemon | None:
    """The container daemon; None if there is none and it is not required."""
    try:
        return Daemon()
    except (DaemonUnreachable, RequirementMissing):
        if required:
            raise
        return None


def _require_recent(entry: PublishedImage, source: Source, workspace: Workspace) -> None:
    """Refuse an image that is older than ``source`` allows: an index can list an outdated image whose signature is valid."""
    name, when = f"{entry.repository}:{entry.tag}", f"published {entry.published}" if entry.published else "without a date"
    if entry.published < source.minimum:
        raise NotTrusted(f"{name} is {when}, before --min {source.minimum}", "get the current index, or lower --min")
    if source.allow_older:
        return
    newest = _newest(entry, source, workspace)
    if newest and entry.published < newest.published:
        raise NotTrusted(
            f"{name} is {when}, older than {newest.repository}:{newest.tag}, published {newest.published} and pulled before",
            "get the current index; `sm120kit pull --allow-older` takes the older image, which --image names then",
        )


def _newest_path(entry: PublishedImage, source: Source, workspace: Workspace) -> Path:
    # A signature is valid in every repository that has a copy; without one, only the repository identifies the publisher.
    publisher = attestation.publisher_digest(source.key) if source.key else entry.repository
    key = digest_of([publisher, entry.recipe, entry.verified.image.platform])
    return workspace.root / "images" / "newest" / f"{key}.json"


def _newest(entry: PublishedImage, source: Source, workspace: Workspace) -> NewestImage | None:
    path = _newest_path(entry, source, workspace)
    if not path.is_file():
        return None
    try:
        return read_record(NewestImage, path)
    except ValueError as error:
        raise NotTrusted(
            f"cannot compare {entry.repository}:{entry.tag} with the newest image pulled before: {path} is damaged",
            "remove that file if the index is the current one",
        ) from error
