"""The HTTP client for package indexes and mirrors, with limits on responses. Imported only where something is fetched."""

import functools
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from httpx2 import HTTPError, Response, SyncByteStream
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import PyPIClient

from sm120kit.core.errors import FetchFailed
from sm120kit.core.outside import encoding, integer
from sm120kit.sources._settings import Settings

MAX_FILE_BYTES = 8 * 2**30
"""Limit for a downloaded file; the largest wheel today has 3 GB."""
MAX_PAGE_BYTES, MAX_PAGE_SECONDS, MAX_PAGE_ENTRIES = 32 * 2**20, 300, 100_000
"""Limits for an index page, which is read into memory, and for the body of a redirect or an error; for a page's links or
objects, for each of which unearth needs 0.1 ms. JSON has three objects a file."""


class Exceeded(Exception):
    """A server sends more than the limit."""


class RefusedRedirect(Exception):
    """A server redirects from https to http, or to another scheme."""


def connect(settings: Settings) -> PyPIClient:
    """An HTTP client with the settings of pip and uv, and the limits above.

    Raises:
        FetchFailed: the certificate bundle does not exist.
    """
    verify: bool | ssl.SSLContext = True
    if settings.certificates:
        if not Path(settings.certificates).is_file():
            raise FetchFailed(
                f"there is no certificate bundle {settings.certificates}",
                "pip's setting cert, PIP_CERT or SSL_CERT_FILE names it: correct or unset it",
            )
        verify = _trusting(settings.certificates)
    client = PyPIClient(trusted_hosts=settings.trusted_hosts, verify=verify, timeout=settings.timeout, follow_redirects=True)
    # A compressed response could be of any size in memory: request none, and do not decompress it (see _limit).
    client.headers["Accept-Encoding"] = "identity"
    client.event_hooks = {"response": [_limit]}
    client.auth = MultiDomainBasicAuth(prompting=False, index_urls=[*settings.index, *settings.extra_index])
    return client


@functools.cache
def _trusting(bundle: str) -> ssl.SSLContext:
    """The context of a certificate bundle; reading one takes 0.1 s, and each of 200 locked wheels is looked up."""
    return ssl.create_default_context(cafile=bundle)


def stream(client: PyPIClient, url: str, headers: Mapping[str, str] | None = None) -> AbstractContextManager[Response]:
    """Stream a file from a server, up to ``MAX_FILE_BYTES``."""
    return client.stream("GET", url, headers=headers, extensions={"sm120kit": "file"})


def size_of(client: PyPIClient, url: str) -> int | None:
    """The size of a file in bytes as its server states it; None if it states none."""
    try:
        response = client.head(url, extensions={"sm120kit": "file"})
    except (HTTPError, Exceeded, RefusedRedirect):
        return None
    return content_length(response) if response.status_code == 200 else None


def content_length(response: Response) -> int | None:
    """The size in bytes that a response states; None if it states none."""
    return _size(response.headers.get("Content-Length", ""))


def whole_length(response: Response) -> int | None:
    """The size in bytes of the file of which a response is a part; None if it states none, or one over the limit."""
    size = _size(response.headers.get("Content-Range", "").rpartition("/")[2])
    return None if size is None or size > MAX_FILE_BYTES else size


def _size(text: str) -> int | None:
    try:
        return max(0, integer(text))
    except ValueError:
        return None


def _limit(response: Response) -> None:
    """Limit the size of a response and the targets of redirects."""
    response.headers.pop("Content-Encoding", None)
    is_file = response.request.extensions.get("sm120kit") == "file" and not response.has_redirect_location
    limit = MAX_FILE_BYTES if is_file else MAX_PAGE_BYTES
    if response.has_redirect_location:
        target = response.url.join(response.headers["Location"])
        if target.scheme != response.url.scheme and (response.url.scheme, target.scheme) != ("http", "https"):
            raise RefusedRedirect(f"it redirects from {response.url.scheme} to {target.scheme}: {target}")
    if (content_length(response) or 0) > limit:
        raise Exceeded(_message(limit))
    response.encoding = encoding(response.charset_encoding)
    body = response.stream
    assert isinstance(body, SyncByteStream)
    response.stream = _LimitedBody(body, limit, is_page=not is_file)


_ENTRY_STARTS = (b"<a", b"<A", b"{")


class _LimitedBody(SyncByteStream):
    """The body of a response, up to ``limit`` bytes; of a page, up to ``MAX_PAGE_ENTRIES`` links or objects."""

    def __init__(self, body: SyncByteStream, limit: int, *, is_page: bool) -> None:
        self._body, self._limit, self._is_page = body, limit, is_page

    def __iter__(self) -> Iterator[bytes]:
        size, entries, ends = 0, 0, time.monotonic() + MAX_PAGE_SECONDS
        for chunk in self._body:
            size += len(chunk)
            if size > self._limit:
                raise Exceeded(_message(self._limit))
            if self._is_page and time.monotonic() > ends:
                raise Exceeded(f"it takes more than {MAX_PAGE_SECONDS} s")
            entries += sum(map(chunk.count, _ENTRY_STARTS)) if self._is_page else 0
            if entries > MAX_PAGE_ENTRIES:
                raise Exceeded(f"it has more than {MAX_PAGE_ENTRIES} links")
            yield chunk

    def close(self) -> None:
        self._body.close()


def _message(limit: int) -> str:
    shown = f"{limit / 2**30:g} GiB" if limit >= 2**30 else f"{limit / 2**20:g} MiB"
    return f"it sends more than {shown}"
