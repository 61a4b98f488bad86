"""Upload and download blobs of a repository; an interrupted transfer continues where the connection dropped."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit, urlunsplit

from sm120kit.core.errors import Mismatch, NotFound, NotTrusted, RegistryFailed
from sm120kit.core.outside import integer
from sm120kit.images.distribution.registry_session import Reply, Request, Session, TransferFailed
from sm120kit.images.oci import Descriptor

CHUNK_BYTES = 2**26
"""Size of the chunks of an upload; a smaller blob is uploaded by a single request."""

_READ_BYTES = 2**20
_PROGRESS_BYTES = 2**20
"""A connection that transferred this much before it dropped does not count as a failed attempt."""
_CHUNK_REFUSED = (400, 404, 405, 411, 413, 415, 416, 501)
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Blobs:
    """The blobs of a repository. ``stop`` ends the transfers of other threads; ``advance`` is called with numbers of bytes."""

    session: Session
    repository: str
    advance: Callable[[int], None] = lambda count: None
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def _scope(self) -> str:
        return f"repository:{self.repository}:pull,push"

    def exists(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        request = Request("HEAD", f"/v2/{self.repository}/blobs/{digest}", self._scope)
        return self.session.request(request, f"looking up layer {digest}", (404,)).status != 404

    def upload(self, blob: Descriptor, path: Path) -> None:
        """Upload a blob from a file: in chunks, or if the registry refuses chunks, by one request.

        Raises:
            Mismatch: the file is not the blob.
            NotTrusted: the registry stored another blob.
            RegistryFailed: it does not respond, or refuses.
        """
        activity = f"uploading {blob.digest} to {self.session.registry}/{self.repository}"
        if path.stat().st_size != blob.size:
            raise Mismatch(f"{path} does not have {blob.size} bytes", "build the image again")
        if blob.size <= CHUNK_BYTES or not self._upload_in_chunks(blob, path, activity):
            self._upload_at_once(blob, path, activity)

    def mount(self, blob: Descriptor, source: str) -> bool:
        """Use the blob of another repository on the same registry; false if the registry does not support or allow it."""
        activity = f"mounting {blob.digest} from {self.session.registry}/{source}"
        query = urlencode({"mount": blob.digest, "from": source})
        scope = f"{self._scope} repository:{source}:pull"
        request = Request("POST", f"/v2/{self.repository}/blobs/uploads/?{query}", scope, {"Content-Length": "0"})
        try:
            reply = self.session.request(request, activity, (400, 404, 405))
        except RegistryFailed:  # no right to read the other repository
            return False
        if reply.status == 202:  # an upload was started instead
            self._cancel(reply, activity)
        return reply.status == 201

    def _cancel(self, reply: Reply, activity: str) -> None:
        with suppress(RegistryFailed):  # registries remove uploads that are not continued
            self.session.request(Request("DELETE", _location(reply, activity), self._scope), activity)

    def _start(self, activity: str) -> str:
        """Start an upload and return its URL."""
        request = Request("POST", f"/v2/{self.repository}/blobs/uploads/", self._scope, {"Content-Length": "0"})
        return _location(self.session.request(request, activity), activity)

    def _upload_in_chunks(self, blob: Descriptor, path: Path, activity: str) -> bool:
        """Upload a file in chunks; false if the registry refuses them."""
        url, offset, furthest, attempt = self._start(activity), 0, 0, 0
        while offset < blob.size:
            end = min(offset + CHUNK_BYTES, blob.size)
            chunk = _Part(path, offset, end, self)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Range": f"{offset}-{end - 1}",
                "Content-Length": str(end - offset),
            }
            try:
                with self.session.stream(
                    Request("PATCH", url, self._scope, headers, chunk.read), activity, _CHUNK_REFUSED
                ) as response:
                    if not response.is_success:
                        self.advance(-offset - chunk.sent)
                        return False
                    url = _location(Reply(response.status_code, str(response.url), dict(response.headers), b""), activity, url)
                offset = end
            except TransferFailed as failure:
                attempt += 1
                self.session.wait(failure, attempt, activity)
                url, received = self._stored(url, activity) or ("", 0)
                if not url or not offset <= received <= end:  # the registry has lost the upload
                    url, received = self._start(activity), 0
                self.advance(received - offset - chunk.sent)
                offset = received
            if offset > furthest:
                furthest, attempt = offset, 0
        return self._finish(url, blob, activity)

    def _stored(self, url: str, activity: str) -> tuple[str, int] | None:
        """URL of an upload and how many bytes of it the registry has; None if it no longer has the upload."""
        reply = self.session.request(Request("GET", url, self._scope), activity, (404, 405, 400))
        if reply.status >= 400:
            return None
        first, _, last = reply.headers.get("range", "").removeprefix("bytes=").partition("-")
        # An upload without data has the range 0-0, as one with a single byte has: that byte is sent again.
        end = _length(last) if first == "0" else None
        received = end + 1 if end else 0
        return _location(reply, activity, url), received

    def _finish(self, url: str, blob: Descriptor, activity: str) -> bool:
        """Complete an upload in chunks; false if the registry put the chunks together wrongly."""
        request = Request("PUT", _with_digest(url, blob.digest), self._scope, {"Content-Length": "0"})
        reply = self.session.request(request, activity, (400, 404, 416))
        if reply.status >= 400:
            if self.exists(blob.digest):  # it completed the upload before the connection dropped
                return True
            self.advance(-blob.size)
            return False
        _require_stored(reply, blob, activity)
        return True

    def _upload_at_once(self, blob: Descriptor, path: Path, activity: str) -> None:
        """Upload a file by one request."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}

        def attempt() -> None:
            part = _Part(path, 0, blob.size, self)
            request = Request("PUT", _with_digest(self._start(activity), blob.digest), self._scope, headers, part.read)
            try:
                with self.session.stream(request, activity, (400,)) as response:
                    reply = Reply(response.status_code, str(response.url), dict(response.headers), b"")
            except TransferFailed:
                self.advance(-part.sent)
                raise
            if reply.status == 400:
                raise NotTrusted(
                    f"{activity}: the registry received other bytes than were sent", "the same command uploads it again"
                )
            _require_stored(reply, blob, activity)

        self.session.retried(attempt, activity)

    def download(self, blob: Descriptor) -> Iterator[bytes]:
        """The content of a blob. Its end is reached only if size and digest are right.

        Raises:
            NotFound: the repository does not have it.
            NotTrusted: the registry delivers other content.
            RegistryFailed: it does not respond, or refuses.
        """
        activity = f"fetching {blob.digest} of {self.session.registry}/{self.repository}"
        url, scope = f"/v2/{self.repository}/blobs/{blob.digest}", f"repository:{self.repository}:pull"
        digest, offset, attempt = hashlib.sha256(), 0, 0
        while True:
            start = offset
            try:
                headers = {"Range": f"bytes={offset}-"} if offset else {}
                with self.session.stream(Request("GET", url, scope, headers), activity, (404,)) as response:
                    if response.status_code == 404:
                        raise NotFound(
                            f"{activity}: the registry does not have it",
                            "was the image published, and is it the right registry?",
                        )
                    skipped = 0 if response.status_code == 206 else offset  # not all registries support ranges
                    length = _length(response.headers.get("Content-Length", ""))
                    if length is not None and length != blob.size - offset + skipped:
                        raise _other(activity, f"has {length + offset - skipped} bytes, {blob.size} are in the manifest")
                    for received in self.session.chunks(response):
                        if self.stop.is_set():
                            raise CancelledError
                        chunk = received[skipped:]
                        skipped -= len(received) - len(chunk)
                        offset += len(chunk)
                        if offset > blob.size:
                            raise _other(activity, f"has more than {blob.size} bytes")
                        digest.update(chunk)
                        yield chunk
                        self.advance(len(chunk))
                if offset == blob.size:
                    break
                raise TransferFailed(f"{self.session.registry} sends {offset} of {blob.size} bytes")
            except TransferFailed as failure:
                attempt = attempt + 1 if offset - start < _PROGRESS_BYTES else 1
                self.session.wait(failure, attempt, activity)
        if f"sha256:{digest.hexdigest()}" != blob.digest:
            raise _other(activity, f"has the digest sha256:{digest.hexdigest()}")


class _Part:
    """Bytes ``start`` to ``end`` of a file, for a request that may be repeated; ``sent`` counts those that were read."""

    def __init__(self, path: Path, start: int, end: int, blobs: Blobs) -> None:
        self._path, self._start, self._end, self._blobs = path, start, end, blobs
        self.sent = 0

    def read(self) -> Iterator[bytes]:
        """The bytes, from the start for every request."""
        self._blobs.advance(-self.sent)
        self.sent = 0
        with self._path.open("rb") as file:
            file.seek(self._start)
            while self.sent < self._end - self._start:
                if self._blobs.stop.is_set():
                    raise CancelledError
                piece = file.read(min(_READ_BYTES, self._end - self._start - self.sent))
                if not piece:
                    raise Mismatch(f"{self._path} was truncated", "build the image again")
                yield piece
                self.sent += len(piece)
                self._blobs.advance(len(piece))


def _other(activity: str, problem: str) -> NotTrusted:
    return NotTrusted(f"{activity}: the registry's copy {problem}", "it was damaged or changed; nothing of it is kept")


def _location(reply: Reply, activity: str, default: str = "") -> str:
    """The URL with which an upload continues.

    Raises:
        RegistryFailed: the registry names none.
    """
    location = reply.headers.get("location", default)
    if not location:
        raise RegistryFailed(f"{activity}: the registry names no URL for the upload", "is it a registry?")
    return location


def _length(text: str) -> int | None:
    """A number of bytes, None if the text states none."""
    with suppress(ValueError):
        return integer(text) if text[:1] not in "+-" else None
    return None


def _with_digest(url: str, digest: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, urlencode({"digest": digest})]))))


def _require_stored(reply: Reply, blob: Descriptor, activity: str) -> None:
    """Require that the registry confirms the digest of a blob or manifest, if it returns one.

    Raises:
        NotTrusted: it returns another.
    """
    stored = reply.headers.get("docker-content-digest", blob.digest)
    if stored != blob.digest:
        shown = stored if _SHA256.fullmatch(stored) else repr(stored[:100])
        raise NotTrusted(f"{activity}: the registry stored {shown}", "contact the operator of the registry")
