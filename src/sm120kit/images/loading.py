"""Hand images of a layout to other programs: a container daemon, or an archive for podman, skopeo and containerd.

Archives have the files of an OCI layout and the ``manifest.json`` of ``docker save``, so that every Docker loads them
(https://github.com/moby/docker-image-spec). They are streamed from the blobs; nothing is written in between.
"""

import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from sm120kit.core import reporting
from sm120kit.core.archives import file_chunks
from sm120kit.core.atomic_writes import replacing
from sm120kit.core.disk import disk_errors, require_disk
from sm120kit.core.errors import AlreadyExists, NotVerified
from sm120kit.images.docker import Daemon
from sm120kit.images.image_records import Image
from sm120kit.images.oci import INDEX, REFERENCE, Descriptor, Layout

_CONTAINERD_NAME = "io.containerd.image.name"
"""Annotation with the complete name, which containerd and Docker with containerd's image store read."""


def load(layout: Layout, manifest: str, daemon: Daemon) -> Image:
    """Load an image of a layout into a daemon, and tag it as in the layout, where only checked images have tags.

    Returns the image as the daemon describes it.

    Raises:
        NotVerified: the daemon loaded other content.
        AlreadyExists: the daemon has another image with a tag of this one. Nothing was loaded.
        DaemonUnreachable, ResourceUnavailable: the daemon does not respond, or refuses.
    """
    image = layout.image(manifest)
    references = _listed(layout, manifest)[1]
    for reference in references:
        require_free(reference, image, daemon)
    loaded = load_untagged(layout, manifest, daemon, references)
    for reference in references:
        daemon.tag(loaded.id, reference)
    return loaded


def load_untagged(layout: Layout, manifest: str, daemon: Daemon, references: Iterable[str] = ()) -> Image:
    """The image of a layout in a daemon, into which it is loaded unless it is there, by its id or one of ``references``.

    Raises:
        NotVerified, DaemonUnreachable, ResourceUnavailable: see :func:`load`.
    """
    image = layout.image(manifest)
    # With containerd's image store, the id of an image is the digest of its manifest.
    inspected = map(daemon.inspect, (image.id, manifest, *references))
    loaded = next((listed for listed in inspected if listed and listed.content == image.content), None)
    if loaded is None:
        loaded = _send(layout, manifest, daemon)
    if loaded.content != image.content:
        raise NotVerified(
            f"{daemon.name} loaded {loaded.id} with content {loaded.content}; that of {image.id} is {image.content}",
            f"docker rmi {loaded.id}; look at the daemon's log",
        )
    return loaded


def require_free(reference: str, image: Image, daemon: Daemon) -> None:
    """Require that a daemon has no other image with the name of this one.

    Raises:
        AlreadyExists: it has one.
    """
    taken = daemon.inspect(reference)
    if taken is not None and taken.content != image.content:
        raise AlreadyExists(
            f"{reference} is another local image, with content {taken.content}",
            f"docker rmi {reference} if it is not needed; tags are never moved",
        )


def _send(layout: Layout, manifest: str, daemon: Daemon) -> Image:
    """Load an image without a tag."""
    with reporting.task("loading the image into the daemon", _size(layout, manifest), transfer=True) as advance:
        loaded = daemon.load(_counted(archive(layout, manifest, ()), advance))
    return daemon.find(loaded or layout.image(manifest).id)


def export(layout: Layout, manifest: str, path: Path) -> None:
    """Write an image, with its tags, to a file as an archive.

    Raises:
        Mismatch: a blob of the layout differs from its digest. Nothing was written.
        ResourceUnavailable: the file system is full.
    """
    require_disk(path.parent, _size(layout, manifest), f"the archive {path}")
    with disk_errors(path), replacing(path) as file:
        stream(layout, manifest, file)


def stream(layout: Layout, manifest: str, file: IO[bytes]) -> None:
    """Write an image, with its tags, to ``file`` as an archive.

    Raises:
        Mismatch: a blob of the layout differs from its digest. Nothing was written.
    """
    verify(layout, manifest)
    pieces = archive(layout, manifest, _listed(layout, manifest)[1])
    with reporting.task("writing the archive", _size(layout, manifest), transfer=True) as advance:
        for piece in _counted(pieces, advance):
            file.write(piece)


def verify(layout: Layout, manifest: str) -> None:
    """Compare the blobs of an image with their digests.

    Raises:
        Mismatch: one differs.
    """
    with reporting.step("verifying the layers of the image"):
        layout.verify(manifest)


def _size(layout: Layout, manifest: str) -> int:
    return sum(blob.size for blob in _blobs(layout, manifest))


def archive(layout: Layout, manifest: str, references: Iterable[str]) -> Iterator[bytes]:
    """An image as a stream of an archive. Owners, modes and times are fixed."""
    document = layout.manifest(manifest)
    saved = {
        "Config": _member(document["config"]["digest"]),
        "RepoTags": list(references) or None,
        "Layers": [_member(layer.digest) for layer in layout.layers(manifest)],
    }
    for name, content in _documents(layout, manifest, references).items():
        yield from _file(name, len(content), iter([content]))
    for name in ("blobs", "blobs/sha256"):  # skopeo cannot give one without an entry to root, except as root
        yield _directory(name)
    yield from _file("manifest.json", len(_json([saved])), iter([_json([saved])]))
    for blob in _blobs(layout, manifest):
        yield from _file(_member(blob.digest), blob.size, file_chunks(layout.path(blob.digest)))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _documents(layout: Layout, manifest: str, references: Iterable[str]) -> dict[str, bytes]:
    """The files of an OCI layout beside its blobs."""
    listed, _ = _listed(layout, manifest)
    named = [{REFERENCE: reference, _CONTAINERD_NAME: f"docker.io/{reference}"} for reference in references]
    entries = [Descriptor(listed.media_type, manifest, listed.size, annotations).as_json() for annotations in named or [{}]]
    return {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}),
    }


def _blobs(layout: Layout, manifest: str) -> list[Descriptor]:
    """Every blob of an image once: manifest, config, layers."""
    listed, _ = _listed(layout, manifest)
    blobs = (listed, Descriptor.from_json(layout.manifest(manifest)["config"]), *layout.layers(manifest))
    return list({blob.digest: blob for blob in blobs}.values())


def _listed(layout: Layout, manifest: str) -> tuple[Descriptor, tuple[str, ...]]:
    """The entry of an image in the index of its layout, and its references."""
    return next((entry, references) for entry, references in layout.images() if entry.digest == manifest)


def _member(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _directory(name: str) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    return member.tobuf(tarfile.PAX_FORMAT)


def _file(name: str, size: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    member = tarfile.TarInfo(name)
    member.size = size
    yield member.tobuf(tarfile.PAX_FORMAT)
    yield from pieces
    yield bytes(-size % tarfile.BLOCKSIZE)


def _counted(pieces: Iterator[bytes], advance: reporting.Advance) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        advance(len(piece))
