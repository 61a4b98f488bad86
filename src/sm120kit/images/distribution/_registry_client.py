"""Push and pull images of a layout, and files, by the HTTP API of a registry.

Layers are compressed when they are pushed and decompressed while they are pulled. Every blob is verified by its digest in both
directions, and every pulled layer by its diff id in the config as well.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

from sm120kit.core import reporting
from sm120kit.core.archives import max_unpacked_bytes
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, Mismatch, NotFound, NotTrusted, RegistryFailed
from sm120kit.core.outside import open_found, parse_json
from sm120kit.core.parallel import in_parallel
from sm120kit.core.temporary import owned_directory
from sm120kit.images import oci
from sm120kit.images.distribution import _compression
from sm120kit.images.distribution._credentials import DOCKER_HUB
from sm120kit.images.distribution._registry_session import Request, Session, TransferFailed
from sm120kit.images.image_records import image_content
from sm120kit.images.oci import CONFIG, INDEX, LAYER, MANIFEST, MAX_DOCUMENT_BYTES, Descriptor, Layout, manifest_of

T = TypeVar("T")

TRANSFERS = 4
"""Layers that are transferred at once."""
MAX_LAYERS = 500
"""Limit for the layers of an image; Docker's is 127."""

_READ_BYTES = 2**20
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_HINT = "the registry's copy was damaged or changed; nothing of it is kept"

Advance = Callable[[int], None]
"""Is called with numbers of bytes that were transferred; negative ones have to be transferred again."""


@dataclass(frozen=True)
class RemoteImage:
    """An image in a registry: digest and layers of its manifest, and the bytes of its config."""

    digest: str
    layers: tuple[Descriptor, ...]
    config: bytes

    @property
    def diff_ids(self) -> tuple[str, ...]:
        """The digests of the uncompressed layers that the config lists."""
        return tuple(parse_json(self.config)["rootfs"]["diff_ids"])

    @property
    def labels(self) -> dict[str, str]:
        """The labels in the config."""
        return (parse_json(self.config).get("config") or {}).get("Labels") or {}

    @property
    def content(self) -> str:
        """See :attr:`Image.content`; true only if the layers have their diff ids."""
        config = parse_json(self.config)
        return image_content(self.diff_ids, config["os"], config["architecture"], config.get("config") or {})


class RegistryClient:
    """The registry of a repository, ``registry/name``."""

    def __init__(self, repository: str) -> None:
        """Connect at the first request, with the credentials that ``docker login`` stored.

        Raises:
            RegistryFailed: they cannot be read.
        """
        self.repository = repository
        host, self._name = _split(repository)
        self._session = Session(host)
        self._stop = threading.Event()

    def close(self) -> None:
        """Close all connections."""
        self._stop.set()
        self._session.close()

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def in_registry(self, reference: str) -> str | None:
        """The digest of the manifest with a tag or digest; None if the registry does not have it.

        Raises:
            NotTrusted: it delivers another manifest than the requested one.
            RegistryFailed: it does not respond, or refuses.
        """
        try:
            return self._document(reference).digest
        except NotFound:
            return None

    def image(self, reference: str) -> RemoteImage:
        """The image with a tag or digest.

        Raises:
            NotFound: the registry does not have it.
            NotTrusted: it delivers other content.
            RegistryFailed: it does not respond or refuses, or it is not the image of a container.
        """
        shown = f"{self.repository}@{reference}" if reference.startswith("sha256:") else f"{self.repository}:{reference}"
        manifest = self._document(reference)
        try:
            if manifest.media_type != MANIFEST:
                raise BadInput(f"its media type is {manifest.media_type[:100]!r}")
            layers = tuple(map(Descriptor.from_json, manifest.document["layers"]))
            described = Descriptor.from_json(manifest.document["config"])
            if described.size > MAX_DOCUMENT_BYTES or len(layers) > MAX_LAYERS:
                raise BadInput(f"it has a config of {described.size} bytes and {len(layers)} layers")
            image = RemoteImage(manifest.digest, layers, self._download(described, b"".join))
            oci.require_config(parse_json(image.config))
            if len(image.diff_ids) != len(layers):
                raise BadInput(f"its config lists {len(image.diff_ids)} layers, its manifest {len(layers)}")
            for diff_id in image.diff_ids:
                Descriptor.from_json({"mediaType": LAYER, "digest": diff_id, "size": 0})
            _ = image.content
        except (KeyError, TypeError, ValueError, AttributeError, BadInput) as error:
            problem = error.message if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            raise RegistryFailed(
                f"{shown} is not an image that containers start from: {problem[:300]}", "name an image"
            ) from error
        return image

    def push(self, layout: Layout, manifest: str, tag: str) -> str:
        """Push an image of a layout and return the digest of its manifest in the registry. The tag is written last.

        Layers that the repository has are not sent.

        Raises:
            Mismatch: a blob of the layout differs from its digest. Nothing was uploaded.
            NotTrusted: the registry stored other content.
            RegistryFailed: it does not respond, or refuses.
        """
        with reporting.step("verifying the layers of the image"):
            layout.verify(manifest)
        sizes = dict(sorted(((layer.digest, layer.size) for layer in layout.layers(manifest)), key=lambda each: -each[1]))
        with reporting.task(f"pushing {self.repository}", sum(sizes.values()), transfer=True) as advance:
            jobs = [partial(self._push_layer, layout, layer, size, advance) for layer, size in sizes.items()]
            pushed = dict(zip(sizes, in_parallel(jobs, TRANSFERS, self.close), strict=True))
        config = Descriptor.from_json(layout.manifest(manifest)["config"])
        self._send(config, layout.path(config.digest))
        return self._put_manifest(tag, manifest_of(config, [pushed[layer.digest] for layer in layout.layers(manifest)]))

    def push_index(self, images: Mapping[str, str], version: str) -> str:
        """Push an index of images that the repository has: digests by platform (``os/machine``). Returns ``TAG@DIGEST``.

        The tag has ``version`` and a part of the digest, so that it never moves.

        Raises:
            NotFound: the repository does not have an image.
            NotTrusted, RegistryFailed: see :meth:`push`.
        """
        manifests = []
        for platform, image in sorted(images.items()):
            system, _, architecture = platform.partition("/")
            found = self._document(image)
            described = Descriptor(found.media_type, found.digest, found.size).as_json()
            manifests.append(described | {"platform": {"os": system, "architecture": architecture}})
        content = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, sort_keys=True).encode()
        sha256 = hashlib.sha256(content).hexdigest()
        tag = f"{version}-multiarch.{sha256[:12]}"
        return f"{tag}@{self._put_manifest(tag, content, INDEX)}"

    def pull(self, layout: Layout, image: RemoteImage) -> Descriptor:
        """Pull an image into a layout, without a reference, and return its manifest there.

        Layers that the layout has are not fetched; their contents are verified.

        Raises:
            NotFound: the registry does not have a layer.
            NotTrusted: it delivers other content than manifest and config list, or a layer that unpacks to too much.
            RegistryFailed: it does not respond, or refuses.
            ResourceUnavailable, SystemRefused: the layout cannot be written.
        """
        blobs_of = dict(zip(image.diff_ids, image.layers, strict=True))
        missing = [diff_id for diff_id in blobs_of if not _has(layout, diff_id)]
        sizes = {blobs_of[diff_id].digest: blobs_of[diff_id].size for diff_id in missing}
        with reporting.task(f"pulling {self.repository}", sum(sizes.values()), transfer=True) as advance:
            # The largest first, so that no thread is left with it at the end.
            missing.sort(key=lambda diff_id: -blobs_of[diff_id].size)
            jobs = [partial(self._fetch, blobs_of[diff_id], diff_id, layout, advance) for diff_id in missing]
            in_parallel(jobs, TRANSFERS, self.close)
        config = layout.add_blob(image.config, CONFIG)
        layers = [Descriptor(LAYER, diff_id, layout.path(diff_id).stat().st_size) for diff_id in image.diff_ids]
        return layout.add_manifest(manifest_of(config, layers))

    def _push_layer(self, layout: Layout, layer: str, size: int, advance: Advance) -> Descriptor:
        """Push a layer, unless the repository has it. Returns its compressed form, which the version of zstd decides."""
        with owned_directory(layout.directory / "partial", "") as directory:
            blob = _compression.compress(layout.path(layer), directory / "layer", self._require_running)
            self._send(blob, directory / "layer", lambda count: advance(count * size // blob.size))
            return blob

    def _fetch(self, blob: Descriptor, diff_id: str, layout: Layout, advance: Advance) -> None:
        def store(received: Iterator[bytes]) -> None:
            with layout.writer() as writer:
                for piece in _uncompressed(blob, received):
                    writer.write(piece)
                _require_diff_id(writer.digest, diff_id, blob)
                writer.commit(LAYER)

        self._download(blob, store, advance)

    def _send(self, blob: Descriptor, path: Path, advance: Advance = lambda count: None) -> None:
        """Upload a blob from a file by one request, unless the repository has it; from the start after an interruption."""
        looked_up = Request("HEAD", f"/v2/{self._name}/blobs/{blob.digest}", self._push_scope)
        if self._session.request(looked_up, f"looking up layer {blob.digest}", (404,)).status != 404:
            advance(blob.size)
            return
        activity = f"uploading {blob.digest} to {self.repository}"
        if path.stat().st_size != blob.size:
            raise Mismatch(f"{path} does not have {blob.size} bytes", "build the image again")
        self._session.retried(lambda: self._upload(blob, path, activity, advance), activity)

    @property
    def _push_scope(self) -> str:
        return f"repository:{self._name}:pull,push"

    def _upload(self, blob: Descriptor, path: Path, activity: str, advance: Advance) -> None:
        sent = 0

        def content() -> Iterator[bytes]:  # from the start for every request
            nonlocal sent
            advance(-sent)
            sent = 0
            with open_found(path) as file:
                while piece := file.read(_READ_BYTES):
                    self._require_running()
                    yield piece
                    sent += len(piece)
                    advance(len(piece))

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        request = Request("PUT", self._upload_url(activity, blob.digest), self._push_scope, headers, content)
        try:
            with self._session.stream(request, activity, (400,)) as response:
                status, stored = response.status_code, response.headers.get("docker-content-digest", blob.digest)
        except TransferFailed:
            advance(-sent)
            raise
        if status == 400:
            hint = "the same command uploads it again"
            raise NotTrusted(f"{activity}: the registry received other bytes than were sent", hint)
        if stored != blob.digest:
            shown = stored if _SHA256.fullmatch(stored) else repr(stored[:100])
            raise NotTrusted(f"{activity}: the registry stored {shown}", "contact the operator of the registry")

    def _upload_url(self, activity: str, digest: str) -> str:
        """Start the upload of a blob and return the URL that stores it."""
        request = Request("POST", f"/v2/{self._name}/blobs/uploads/", self._push_scope, {"Content-Length": "0"})
        location = self._session.request(request, activity).headers.get("location", "")
        with suppress(ValueError):
            parts = urlsplit(location)
            if location:
                return urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, urlencode({"digest": digest})]))))
        raise RegistryFailed(f"{activity}: the registry names no URL for the upload: {location[:100]!r}", "is it a registry?")

    def _download(self, blob: Descriptor, use: Callable[[Iterator[bytes]], T], advance: Advance = lambda count: None) -> T:
        """The result of ``use``, which gets the content of a blob, from the start after an interruption.

        The end of the content is reached only if size and digest are right.
        """
        activity = f"fetching {blob.digest} of {self.repository}"
        return self._session.retried(lambda: use(self._content(blob, activity, advance)), activity)

    def _content(self, blob: Descriptor, activity: str, advance: Advance) -> Iterator[bytes]:
        request = Request("GET", f"/v2/{self._name}/blobs/{blob.digest}", f"repository:{self._name}:pull")
        digest, received = hashlib.sha256(), 0
        try:
            with self._session.stream(request, activity, (404,)) as response:
                if response.status_code == 404:
                    hint = "was the image published, and is it the right registry?"
                    raise NotFound(f"{activity}: the registry does not have it", hint)
                stated = response.headers.get("Content-Length", str(blob.size))
                if stated != str(blob.size):
                    raise _other(activity, f"has {stated[:40]} bytes, {blob.size} are in the manifest")
                for chunk in self._session.chunks(response):
                    self._require_running()
                    received += len(chunk)
                    if received > blob.size:
                        raise _other(activity, f"has more than {blob.size} bytes")
                    digest.update(chunk)
                    advance(len(chunk))
                    yield chunk
            if received < blob.size:
                raise TransferFailed(f"{self._session.registry} sends {received} of {blob.size} bytes")
        except TransferFailed:
            advance(-received)
            raise
        if f"sha256:{digest.hexdigest()}" != blob.digest:
            raise _other(activity, f"has the digest sha256:{digest.hexdigest()}")

    def _require_running(self) -> None:
        """End this thread's transfer once another has failed."""
        if self._stop.is_set():
            raise CancelledError

    def _put_manifest(self, tag: str, content: bytes, media_type: str = MANIFEST) -> str:
        """Write a tag, unless it is there, and return the digest of the manifest or index, which is read back."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if self.in_registry(tag) == digest:
            return digest
        activity = f"pushing {self.repository}:{tag}"
        headers = {"Content-Type": media_type, "Content-Length": str(len(content))}
        url, scope = f"/v2/{self._name}/manifests/{tag}", self._push_scope
        self._session.request(Request("PUT", url, scope, headers, lambda: [content]), activity)
        if (stored := self._document(tag).digest) != digest:
            raise NotTrusted(f"{activity}: the registry stored {stored}, not {digest}", "contact its operator")
        return digest

    def _document(self, reference: str) -> _Document:
        """A manifest or index, verified by its digest if that is the reference."""
        url, scope = f"/v2/{self._name}/manifests/{reference}", f"repository:{self._name}:pull"
        request = Request("GET", url, scope, {"Accept": f"{MANIFEST}, {INDEX}"})
        reply = self._session.request(request, f"looking up {self.repository}, {reference}", (404,))
        if reply.status == 404:
            raise NotFound(f"{self.repository} has no image {reference}", "is it the right registry, and was it published?")
        digest = f"sha256:{hashlib.sha256(reply.body).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise NotTrusted(f"{self.repository}@{reference}: the registry delivers {digest}", _HINT)
        try:
            document = parse_json(reply.body)
            if not isinstance(document, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise RegistryFailed(f"{self.repository}: {reference} is not a manifest: {error}", "is it a registry?") from error
        media_type = str(document.get("mediaType") or reply.headers.get("content-type", "").partition(";")[0])
        return _Document(digest, media_type, document, len(reply.body))


@dataclass(frozen=True)
class _Document:
    """A manifest or index of a registry."""

    digest: str
    media_type: str
    document: dict[str, Any]
    size: int


def _uncompressed(blob: Descriptor, received: Iterator[bytes]) -> Iterator[bytes]:
    """The uncompressed content of a layer, whose compressed content is verified."""
    left = limit = max_unpacked_bytes(blob.size)
    for piece in _compression.decompressed(blob, received):
        left -= len(piece)
        if left < 0:
            raise NotTrusted(f"layer {blob.digest} unpacks to more than {limit / 2**30:.1f} GiB, the limit for its size", _HINT)
        yield piece
    for _ in received:  # what the decompressor has not read belongs to the digest as well
        pass


def _other(activity: str, problem: str) -> NotTrusted:
    return NotTrusted(f"{activity}: the registry's copy {problem}", _HINT)


def _split(repository: str) -> tuple[str, str]:
    """Registry and name of a repository; a repository without a registry is one of Docker Hub."""
    host, _, name = repository.partition("/")
    return (host, name) if "." in host or ":" in host or host == "localhost" else (DOCKER_HUB, repository)


def _has(layout: Layout, diff_id: str) -> bool:
    """Whether a layout has a layer, unchanged. A changed one is fetched again."""
    if not layout.has(diff_id):
        return False
    if f"sha256:{file_sha256(layout.path(diff_id))}" == diff_id:
        return True
    layout.path(diff_id).unlink()
    return False


def _require_diff_id(digest: str, diff_id: str, blob: Descriptor) -> None:
    if digest != diff_id:
        raise NotTrusted(f"layer {blob.digest} unpacks to {digest}, its config lists {diff_id}", _HINT)
