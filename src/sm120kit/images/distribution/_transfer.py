"""Upload and download blobs of a repository. A transfer that is interrupted starts again, up to four times."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

from sm120kit.core.errors import Mismatch, NotFound, NotTrusted, RegistryFailed
from sm120kit.images.distribution._registry_session import Request, Session, TransferFailed
from sm120kit.images.oci import Descriptor

T = TypeVar("T")

_READ_BYTES = 2**20
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
        """Upload a blob from a file by one request.

        Raises:
            Mismatch: the file is not the blob.
            NotTrusted: the registry stored another blob.
            RegistryFailed: it does not respond, or refuses.
        """
        activity = f"uploading {blob.digest} to {self.session.registry}/{self.repository}"
        if path.stat().st_size != blob.size:
            raise Mismatch(f"{path} does not have {blob.size} bytes", "build the image again")
        self.session.retried(lambda: self._upload(blob, path, activity), activity)

    def _upload(self, blob: Descriptor, path: Path, activity: str) -> None:
        sent = 0

        def content() -> Iterator[bytes]:  # from the start for every request
            nonlocal sent
            self.advance(-sent)
            sent = 0
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    self.require_running()
                    yield piece
                    sent += len(piece)
                    self.advance(len(piece))

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        request = Request("PUT", _with_digest(self._start(activity), blob.digest), self._scope, headers, content)
        try:
            with self.session.stream(request, activity, (400,)) as response:
                status, stored = response.status_code, response.headers.get("docker-content-digest", blob.digest)
        except TransferFailed:
            self.advance(-sent)
            raise
        if status == 400:
            raise NotTrusted(
                f"{activity}: the registry received other bytes than were sent", "the same command uploads it again"
            )
        if stored != blob.digest:
            shown = stored if _SHA256.fullmatch(stored) else repr(stored[:100])
            raise NotTrusted(f"{activity}: the registry stored {shown}", "contact the operator of the registry")

    def _start(self, activity: str) -> str:
        """Start an upload and return its URL."""
        request = Request("POST", f"/v2/{self.repository}/blobs/uploads/", self._scope, {"Content-Length": "0"})
        location = self.session.request(request, activity).headers.get("location", "")
        if not location:
            raise RegistryFailed(f"{activity}: the registry names no URL for the upload", "is it a registry?")
        return location

    def download(self, blob: Descriptor, use: Callable[[Iterator[bytes]], T]) -> T:
        """The result of ``use``, which gets the content of a blob, from the start after an interruption.

        The end of the content is reached only if size and digest are right.

        Raises:
            NotFound: the repository does not have it.
            NotTrusted: the registry delivers other content.
            RegistryFailed: it does not respond, or refuses.
        """
        activity = f"fetching {blob.digest} of {self.session.registry}/{self.repository}"
        return self.session.retried(lambda: use(self._content(blob, activity)), activity)

    def _content(self, blob: Descriptor, activity: str) -> Iterator[bytes]:
        request = Request("GET", f"/v2/{self.repository}/blobs/{blob.digest}", f"repository:{self.repository}:pull")
        digest, received = hashlib.sha256(), 0
        try:
            with self.session.stream(request, activity, (404,)) as response:
                if response.status_code == 404:
                    hint = "was the image published, and is it the right registry?"
                    raise NotFound(f"{activity}: the registry does not have it", hint)
                stated = response.headers.get("Content-Length", str(blob.size))
                if stated != str(blob.size):
                    raise _other(activity, f"has {stated[:40]} bytes, {blob.size} are in the manifest")
                for chunk in self.session.chunks(response):
                    self.require_running()
                    received += len(chunk)
                    if received > blob.size:
                        raise _other(activity, f"has more than {blob.size} bytes")
                    digest.update(chunk)
                    self.advance(len(chunk))
                    yield chunk
            if received < blob.size:
                raise TransferFailed(f"{self.session.registry} sends {received} of {blob.size} bytes")
        except TransferFailed:
            self.advance(-received)
            raise
        if f"sha256:{digest.hexdigest()}" != blob.digest:
            raise _other(activity, f"has the digest sha256:{digest.hexdigest()}")

    def require_running(self) -> None:
        """End this thread's transfer once another has failed."""
        if self.stop.is_set():
            raise CancelledError


def _other(activity: str, problem: str) -> NotTrusted:
    return NotTrusted(f"{activity}: the registry's copy {problem}", "it was damaged or changed; nothing of it is kept")


def _with_digest(url: str, digest: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, urlencode({"digest": digest})]))))
