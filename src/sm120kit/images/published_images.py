"""Select a published image that is signed and recent enough, and pull it by digest. Tags are never moved."""

from dataclasses import dataclass
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import AlreadyExists, DaemonUnreachable, NotAttested, NotTrusted, NotVerified, RequirementMissing
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import attestation, checks, loading
from sm120kit.images.distribution import RegistryClient, RemoteImage
from sm120kit.images.docker import Daemon
from sm120kit.images.image_index import find_image, read_index
from sm120kit.images.image_records import CheckResult, Image, PublishedImage, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout


@dataclass(frozen=True)
class Source:
    """An index, and the requirements on its entries.

    ``key`` is the file of the public key that must have signed an entry; without it the index is trusted as is,
    with a warning. Images older than
    the newest one pulled before are refused as well, unless ``allow_older`` is set.
    """

    index: Path
    key: Path | None = None
    allow_older: bool = False


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
        NotAttested: it is not signed with the key of ``source``.
        NotTrusted: it is older than ``source`` allows.
    """
    entry = find_image(name, source.index, platform)
    _require_listed(entry.verified)
    if source.key:
        attestation.verify(entry, source.index.parent, source.key)
    else:
        reporting.warn(f"{entry.repository}:{entry.tag}: signature not verified; pass `--trust KEY`")
    _require_recent(entry, source, workspace)
    return entry


def pull_and_load(entry: PublishedImage, source: Source, workspace: Workspace, *, load: bool | None = None) -> VerifiedImage:
    """Pull an entry that :func:`select` returned into the state directory; see :func:`pull`.

    ``load`` is whether it is loaded into the container daemon as well; by default if there is one.

    Raises:
        AlreadyExists: the daemon has another image with its name. Nothing is pulled.
        DaemonUnreachable, RequirementMissing: ``load`` is set and no daemon can be used.
    """
    _require_listed(entry.verified)
    daemon = None if load is False else _daemon(required=bool(load))
    if daemon:
        loading.require_free(entry.verified.reference, entry.verified.image, daemon)
    pulled = pull(entry, source, workspace)
    if daemon:
        layout = Layout(workspace.root / "oci")
        loading.load(layout, layout.require(pulled.reference).digest, daemon)
    return pulled


def pull(entry: PublishedImage, source: Source, workspace: Workspace) -> VerifiedImage:
    """Pull an entry that :func:`select` returned by its digest, tag it, and record the image and its time of publishing.

    It must have the content that was verified, byte for byte: the digest alone only identifies the registry's copy.

    Raises:
        NotVerified: the index lists it without passed checks or with a foreign name, or its content is not what was verified.
        AlreadyExists: another local image has its name.
        NotFound, NotTrusted, RegistryFailed: the registry does not deliver the listed image.
        ResourceUnavailable: the state directory's file system is too small.
    """
    _require_listed(entry.verified)
    expected, reference, layout = entry.verified.image, entry.verified.reference, Layout(workspace.root / "oci")
    present = layout.find(reference)
    if present and (local := layout.image(present.digest)).content != expected.content:
        raise AlreadyExists(
            f"{reference} is another local image, with content {local.content}",
            f"remove it if it is not needed (sm120kit image rm {reference}); tags are never moved",
        )
    with RegistryClient(entry.repository) as client:
        remote = client.image(entry.digest)
        if remote.content != expected.content or remote.labels != expected.labels:
            raise _other_image(f"{entry.repository}@{entry.digest}", remote, expected)
        present_bytes = sum(layout.path(layer).stat().st_size for layer in {*remote.diff_ids} if layout.has(layer))
        require_disk(layout.directory, max(0, expected.bytes - present_bytes), "the image")
        layout.tag(client.pull(layout, remote).digest, reference)
    write_record(checks.record_path(workspace, expected), entry.verified)
    newest = _newest(entry, source, workspace)
    if newest is None or entry.published > newest.published:
        write_record(_newest_path(entry, source, workspace), NewestImage(entry.published, entry.repository, entry.tag))
    return entry.verified


def require_signed(reference: str, source: Source, workspace: Workspace) -> None:
    """Require that a local image is listed by ``source`` and signed with its key.

    Raises:
        NotFound: the state directory does not have the image.
        NotAttested: it is not listed, or :func:`sm120kit.images.attestation.verify` refuses it.
    """
    image = LocalImages(workspace).find(reference)
    listed = [entry for entry in read_index(source.index).images if entry.verified.image.content == image.content]
    if not listed:
        raise NotAttested(
            f"{source.index} lists no image with the content of {reference}", "pass the index that lists it with --index"
        )
    if source.key:
        attestation.verify(listed[0], source.index.parent, source.key)


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


def _require_listed(image: VerifiedImage) -> None:
    """Require that an image in an index passed, and that its name follows from kind, version and context in its labels."""
    require_passed(image)
    name = image.image.canonical_name
    if not name or image.reference != name:
        raise NotVerified(
            f"the index lists an image as {image.reference!r}; its labels give the name {name or 'of no image of sm120kit'}",
            "it was not pulled; report it to the publisher of the index",
        )


def _other_image(shown: str, remote: RemoteImage, expected: Image) -> NotVerified:
    """The error about an image in a registry that is not the one that was verified."""
    labels, names = remote.labels, {**remote.labels, **expected.labels}
    differ = sorted(key for key in names if labels.get(key) != expected.labels.get(key))
    return NotVerified(
        f"{shown} is not the image that was verified: its content is {remote.content}, not {expected.content}"
        + (f"; labels that differ: {', '.join(differ)}" if differ else ""),
        "nothing of it is kept; report it to the publisher of the index",
    )


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
    publisher = attestation.fingerprint(source.key) if source.key else entry.repository
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
