"""An OCI image layout on disk: blobs named by their sha256, and an index of images with their references.

https://github.com/opencontainers/image-spec/blob/main/image-layout.md. Layers are not compressed, so that the digest of a layer
is its diff id; those that images share are stored once. A blob is
written to a temporary file and renamed, the index is replaced under a lock: a killed process leaves nothing half done.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import file_sha256
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadInput, Mismatch, NotFound
from sm120kit.core.locks import exclusive
from sm120kit.core.outside import parse_json, read_found
from sm120kit.core.temporary import owned_directory

if TYPE_CHECKING:
    from sm120kit.images.image_records import Image

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
INDEX = "application/vnd.oci.image.index.v1+json"
REFERENCE = "org.opencontainers.image.ref.name"

MAX_DOCUMENT_BYTES = 4 * 2**20
"""Limit for manifests and configs, that of registries (OCI distribution-spec, "Pushing Manifests")."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ID = re.compile(r"(sha256:)?[0-9a-f]{12,64}")
"""A digest, or its first digits as tables print them."""
_BUFFER = 2**20


@dataclass(frozen=True)
class Descriptor:
    """A blob by media type, digest (``sha256:<64 hexadecimal digits>``) and size in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The form in manifests and indexes."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return document | ({"annotations": self.annotations} if self.annotations else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Descriptor:
        """Read the form in manifests and indexes.

        Raises:
            BadInput: a key is missing or malformed.
        """
        try:
            digest, size = _require_digest(document["digest"]), document["size"]
            if not isinstance(size, int) or size < 0:
                raise ValueError(size)
            return cls(str(document["mediaType"]), digest, size, dict(document.get("annotations") or {}))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{str(document)[:200]} is not an OCI descriptor", "the image is damaged: fetch it again") from error


_SETTINGS: dict[str, type] = {"User": str, "WorkingDir": str, "Labels": dict, "Env": list, "Entrypoint": list, "Cmd": list}


def require_config(config: Mapping[str, Any]) -> None:
    """Require the form of an image's config (OCI image-spec, config.md) where sm120kit reads it.

    Raises:
        ValueError: a value has another type.
    """
    settings, history = config.get("config") or {}, config.get("history") or []
    if not isinstance(settings, dict) or not isinstance(history, list) or not all(isinstance(step, dict) for step in history):
        raise ValueError("config or history has another form than that of an image")
    values: list[tuple[str, type, Any]] = [(key, str, config.get(key)) for key in ("os", "architecture")]
    values += [(key, kind, settings[key]) for key, kind in _SETTINGS.items() if settings.get(key) is not None]
    for key, kind, value in values:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{key} of an image cannot be {str(value)[:100]!r}")


@dataclass(frozen=True)
class _Listed:
    """An image in the index: its entry without a reference, and its references."""

    entry: dict[str, Any]
    references: set[str] = field(default_factory=set)


class BlobWriter:
    """A new blob, hashed while it is written; see :meth:`Layout.writer`."""

    def __init__(self, layout: Layout, path: Path) -> None:
        self._layout = layout
        self._path = path
        self._hash = hashlib.sha256()
        self._file = path.open("wb", buffering=_BUFFER)
        self.size = 0

    def write(self, data: bytes) -> int:
        """Append bytes; returns their number."""
        with disk_errors(self._path):
            self._file.write(data)
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    @property
    def digest(self) -> str:
        """The digest of what was written."""
        return f"sha256:{self._hash.hexdigest()}"

    def commit(self, media_type: str) -> Descriptor:
        """Add the blob to the layout. An existing blob of that digest is kept.

        It is not forced to the disk, which would take as long again: after a power failure a blob may be short, and then
        :meth:`Layout.has` is false.

        Raises:
            ResourceUnavailable, SystemRefused: it cannot be stored.
        """
        blob = Descriptor(media_type, self.digest, self.size)
        with disk_errors(self._path):
            self._file.flush()
            if not self._layout.has(blob.digest, blob.size):
                self._path.replace(self._layout.path(blob.digest))
        return blob

    def close(self) -> None:
        """Close the temporary file; what is not committed is lost."""
        with suppress(OSError):  # a full disk was reported by the write
            self._file.close()


class Layout:
    """An OCI image layout in a directory, which is created by the first write."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._blobs = directory / "blobs" / "sha256"

    def path(self, digest: str) -> Path:
        """The path of a blob, which need not exist.

        Raises:
            BadInput: ``digest`` is not a sha256 digest.
        """
        return self._blobs / _require_digest(digest).removeprefix("sha256:")

    def has(self, digest: str, size: int | None = None) -> bool:
        """Whether a blob exists, with ``size`` bytes if given; :meth:`verify` compares contents."""
        try:
            return self.path(digest).stat().st_size == size or size is None
        except OSError:
            return False

    @contextmanager
    def writer(self) -> Iterator[BlobWriter]:
        """Write a new blob. Without a commit, its file is removed; that of a killed process by the next writer.

        Raises:
            ResourceUnavailable, SystemRefused: it cannot be stored.
        """
        self._create()
        with ExitStack() as stack:
            with disk_errors(self.directory):
                directory = stack.enter_context(owned_directory(self.directory / "partial", ""))
                blob = BlobWriter(self, directory / "blob")
            stack.callback(blob.close)
            yield blob

    def add_blob(self, content: bytes, media_type: str) -> Descriptor:
        """Store a small blob, unless it exists."""
        known = Descriptor(media_type, f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
        if self.has(known.digest, known.size):
            return known
        with self.writer() as blob:
            blob.write(content)
            return blob.commit(media_type)

    def read(self, digest: str) -> bytes:
        """A small blob: a manifest or config.

        Raises:
            Mismatch: it is missing, too large, or does not have its digest.
        """
        path = self.path(digest)
        try:
            content = read_found(path, MAX_DOCUMENT_BYTES)
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
            raise _damaged(path, "does not have the sha256 of its name")
        return content

    def add_image(self, layers: Sequence[Descriptor], config: Mapping[str, Any]) -> Descriptor:
        """Store config and manifest of an image of layers that the layout has, lowest first. Returns the manifest.

        ``config`` has everything but ``rootfs`` (OCI image-spec, config.md).

        Raises:
            Mismatch: a layer is missing or has another size.
        """
        rootfs = {"type": "layers", "diff_ids": [layer.digest for layer in layers]}
        packed_config = self.add_blob(_canonical({**config, "rootfs": rootfs}), CONFIG)
        return self.add_manifest(manifest_of(packed_config, layers))

    def add_manifest(self, content: bytes) -> Descriptor:
        """Store the bytes of a manifest whose config and layers the layout has, and list it as an image.

        Raises:
            Mismatch: a blob is missing or has another size.
            BadInput: it is not a manifest.
        """
        manifest = self.add_blob(content, MANIFEST)
        self._require_blobs(self.manifest(manifest.digest))
        if manifest.digest in self._read_index():
            return manifest
        config = self.config(manifest.digest)
        platform = {key: config[key] for key in ("architecture", "os", "variant") if key in config}
        with self._index() as listed:
            listed.setdefault(manifest.digest, _Listed(manifest.as_json() | {"platform": platform}))
        return manifest

    def manifest(self, digest: str) -> dict[str, Any]:
        """A manifest by its digest.

        Raises:
            Mismatch: it is missing or changed.
            BadInput: it is not the manifest of an image.
        """
        document = self._document(digest)
        if not isinstance(document.get("config"), dict) or not isinstance(document.get("layers"), list):
            raise BadInput(f"{self.path(digest)} is not the manifest of an image", "the image is damaged: fetch it again")
        return document

    def layers(self, digest: str) -> tuple[Descriptor, ...]:
        """The layers of an image, lowest first, by the digest of its manifest."""
        return tuple(map(Descriptor.from_json, self.manifest(digest)["layers"]))

    def config(self, manifest_digest: str) -> dict[str, Any]:
        """The config of an image.

        Raises:
            Mismatch: it is missing or changed.
            BadInput: it is none.
        """
        return self._document(Descriptor.from_json(self.manifest(manifest_digest)["config"]).digest, require_config)

    def image(self, manifest_digest: str) -> Image:
        """An image as a container daemon describes it, where the digest of the config is its id."""
        from sm120kit.images.image_records import Image, image_content

        manifest, config = self.manifest(manifest_digest), self.config(manifest_digest)
        settings, layers = config.get("config") or {}, self.layers(manifest_digest)
        digests = tuple(layer.digest for layer in layers)
        return Image(
            id=manifest["config"]["digest"],
            content=image_content(digests, config["os"], config["architecture"], settings),
            platform=f"{config['os']}/{config['architecture']}",
            layers=digests,
            labels=settings.get("Labels") or {},
            user=settings.get("User") or "",
            bytes=sum(layer.size for layer in layers),
        )

    def images(self) -> list[tuple[Descriptor, tuple[str, ...]]]:
        """All manifests, each with its references."""
        listed = sorted(self._read_index().items())
        return [(Descriptor.from_json(image.entry), tuple(sorted(image.references))) for _, image in listed]

    def find(self, reference: str) -> Descriptor | None:
        """The manifest with a reference, or with the digest of the manifest or config; None if there is none.

        Of a digest the first 12 digits are enough.

        Raises:
            BadInput: several images begin with these digits, or one that may is damaged.
        """
        images = self.images()
        for manifest, references in images:
            if reference in (*references, manifest.digest):
                return manifest
        if not _ID.fullmatch(reference):
            return None
        begin, found, damaged = f"sha256:{reference.removeprefix('sha256:')}", [], None
        for manifest, _ in images:
            try:
                if manifest.digest.startswith(begin) or self.manifest(manifest.digest)["config"]["digest"].startswith(begin):
                    found.append(manifest)
            except (Mismatch, BadInput) as error:
                damaged = error
        if len(found) > 1:
            raise BadInput(f"{len(found)} images begin with {reference}", "give the whole digest, which --json prints")
        if damaged and not found:  # it may be the one
            raise damaged
        return found[0] if found else None

    def require(self, reference: str) -> Descriptor:
        """The manifest of an image that must exist; see :meth:`find`.

        Raises:
            NotFound: the layout does not have it.
        """
        manifest = self.find(reference)
        if manifest is None:
            raise NotFound(f"there is no image {reference}", "sm120kit build builds it, sm120kit pull fetches it")
        return manifest

    def tag(self, manifest_digest: str, reference: str) -> None:
        """Give an image a reference. It moves if another image has it.

        Raises:
            NotFound: the layout does not have the image.
        """
        present = self._read_index().get(manifest_digest)
        if present and reference in present.references:
            return
        with self._index() as listed:
            if manifest_digest not in listed:
                raise NotFound(f"{self.directory} has no image {manifest_digest}", "sm120kit build builds one")
            for image in listed.values():
                image.references.discard(reference)
            listed[manifest_digest].references.add(reference)

    def untag(self, reference: str) -> None:
        """Remove a reference if it exists. The image stays."""
        with self._index() as listed:
            for image in listed.values():
                image.references.discard(reference)

    def remove(self, *manifest_digests: str) -> int:
        """Remove images with their references, and their blobs that no other image has. Returns the bytes that this frees.

        If another image is damaged, only the manifests are removed: which layers it has cannot be determined.
        """
        own = set(manifest_digests)
        with self._index() as listed:
            for digest in manifest_digests:
                listed.pop(digest, None)
            try:
                kept = {blob for digest in listed for blob in self._blobs_of(digest)}
            except (Mismatch, BadInput):
                kept = set()
            else:
                for digest in manifest_digests:
                    with suppress(Mismatch, BadInput):  # a damaged image can be removed
                        own |= self._blobs_of(digest)
        freed = 0
        for digest in own - kept:
            with suppress(FileNotFoundError):
                freed += self.path(digest).stat().st_size
                self.path(digest).unlink()
        return freed

    def used(self) -> set[Path]:
        """The files of images with a reference: manifests, configs and layers, which may be missing.

        Raises:
            Mismatch, BadInput: an image is damaged, so that its files cannot be determined.
        """
        listed = [manifest for manifest, references in self.images() if references]
        return {self.path(blob) for manifest in listed for blob in self._blobs_of(manifest.digest)}

    def detach(self, paths: Collection[Path]) -> None:
        """Remove images without a reference from the index that have one of these files, before the files are removed.

        The caller makes sure that no build runs: :meth:`sm120kit.core.workspace.Workspace.maintenance`.
        """
        with self._index() as listed:
            for digest in [digest for digest, image in listed.items() if not image.references]:
                if any(self.path(blob) in paths for blob in self._blobs_of(digest)):
                    del listed[digest]

    def verify(self, digest: str) -> None:
        """Compare every blob of an image with its size and sha256.

        Raises:
            Mismatch: one is missing or changed.
        """
        manifest = self.manifest(digest)
        self._require_blobs(manifest)
        for blob in sorted(self._blobs_of(digest)):
            if f"sha256:{file_sha256(self.path(blob))}" != blob:
                raise _damaged(self.path(blob), "does not have the sha256 of its name")

    def _document(self, digest: str, require: Callable[[dict[str, Any]], None] = lambda document: None) -> dict[str, Any]:
        try:
            document = parse_json(self.read(digest))
            if not isinstance(document, dict):
                raise ValueError("no object")
            require(document)
        except ValueError as error:
            raise BadInput(f"{self.path(digest)} is damaged: {error}", "the image is damaged: fetch it again") from error
        return document

    def _blobs_of(self, digest: str) -> set[str]:
        """The digests of all blobs of an image."""
        manifest = self.manifest(digest)
        return {digest, *(Descriptor.from_json(blob).digest for blob in (manifest["config"], *manifest["layers"]))}

    def _require_blobs(self, manifest: Mapping[str, Any]) -> None:
        for blob in map(Descriptor.from_json, (manifest["config"], *manifest["layers"])):
            if not self.has(blob.digest, blob.size):
                raise _damaged(self.path(blob.digest), f"is missing or does not have {blob.size} bytes")

    @contextmanager
    def _index(self) -> Iterator[dict[str, _Listed]]:
        """The images of the index by digest, to be changed in place; they are written when the block succeeds."""
        self._create()
        with exclusive(self.directory / "index.lock", f"images in {self.directory}"):
            listed = self._read_index()
            yield listed
            self._write_index(listed)

    def _read_index(self) -> dict[str, _Listed]:
        path = self.directory / "index.json"
        listed: dict[str, _Listed] = {}
        try:
            for entry in parse_json(read_found(path))["manifests"]:
                described = Descriptor.from_json(entry)
                bare = {key: value for key, value in entry.items() if key != "annotations"}
                reference = described.annotations.get(REFERENCE)
                listed.setdefault(described.digest, _Listed(bare)).references.update([str(reference)] if reference else ())
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, BadInput) as error:
            raise _damaged(path, f"is not the index of an OCI image layout: {error}") from error
        return listed

    def _write_index(self, listed: Mapping[str, _Listed]) -> None:
        named = [(reference, digest) for digest, image in listed.items() for reference in image.references or [""]]
        entries = [
            listed[digest].entry | ({"annotations": {REFERENCE: reference}} if reference else {})
            for reference, digest in sorted(named)
        ]
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        write_atomic(self.directory / "index.json", json.dumps(document, sort_keys=True, indent=2).encode() + b"\n")

    def _create(self) -> None:
        with disk_errors(self.directory):
            for directory in (self._blobs, self.directory / "partial"):
                directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / "oci-layout").is_file():
                write_atomic(self.directory / "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            if not (self.directory / "index.json").is_file():
                with exclusive(self.directory / "index.lock", f"images in {self.directory}"):
                    if not (self.directory / "index.json").is_file():
                        self._write_index({})


def manifest_of(config: Descriptor, layers: Sequence[Descriptor]) -> bytes:
    """The manifest of an image: the same bytes for the same config and layers."""
    blobs = {"config": config.as_json(), "layers": [layer.as_json() for layer in layers]}
    return _canonical({"schemaVersion": 2, "mediaType": MANIFEST, **blobs})


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _require_digest(digest: str) -> str:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise BadInput(f"{digest!r} is not a sha256 digest", "the image is damaged: fetch it again")
    return digest


def _damaged(path: Path, problem: str) -> Mismatch:
    return Mismatch(f"{path} {problem}", f"rm {path}, then build or pull the image again")
