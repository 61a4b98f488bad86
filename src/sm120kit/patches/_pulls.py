"""Fetch a pull request, ``owner/project#123``, as the mailbox of its commits.

GitHub, and forges with its addresses, serve it at ``<forge>/owner/project/pull/123.patch``.
"""

import ipaddress
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, FetchFailed, OfflineMiss
from sm120kit.core.urls import redacted
from sm120kit.sources.origin import Origin

VARIABLE, FORGE = "SM120KIT_FORGE", "https://github.com"
"""The environment variable with the URL of another forge, and the default."""

MAX_BYTES = 16 * 2**20
MAX_SECONDS = 60.0
MAX_REDIRECTS = 5

_FORM = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)#([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class PullRequest:
    """A pull request: its text, its URL as a mailbox, and the name of a file for it."""

    text: str
    url: str
    file: Path


def find_pull_request(text: str) -> PullRequest | None:
    """Read ``owner/project#123``; None for anything else.

    Raises:
        BadInput: :data:`VARIABLE` is not the URL of a forge.
    """
    if not (match := _FORM.fullmatch(text)):
        return None
    forge = os.environ.get(VARIABLE) or FORGE
    parts = urlsplit(forge)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        raise BadInput(f"{VARIABLE} is {redacted(forge)!r}, not the URL of a forge", "write https://HOST")
    owner, project, number = match.groups()
    url = f"{forge.rstrip('/')}/{owner}/{project}/pull/{number}.patch"
    return PullRequest(text, url, Path(f"{owner}-{project}-{number}.patch"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Refused(Exception):
    """The forge does not deliver a pull request, or too much or too slowly."""


def fetch_pull_request(pull: PullRequest, origin: Origin) -> bytes:
    """Fetch the mails of a pull request: at most ``MAX_BYTES``, in at most ``MAX_SECONDS``.

    Raises:
        OfflineMiss: ``origin`` is offline or has a mirror instead of the network.
        FetchFailed: the forge does not deliver it.
    """
    hint = f"save {redacted(pull.url)} as {pull.file} (curl -Lo {pull.file} URL), then name that file instead of {pull.text}"
    if origin.offline or origin.mirror:
        raise OfflineMiss(f"{pull.text} is fetched from {redacted(pull.url)}, which --offline or --mirror excludes", hint)
    import httpx2

    from sm120kit.sources import index_client

    try:
        with reporting.step(f"fetching {pull.text}"):
            return _received(pull.url, origin)
    except (httpx2.HTTPError, httpx2.InvalidURL, index_client.Exceeded, index_client.RefusedRedirect, _Refused) as error:
        reason = redacted(str(error) or type(error).__name__)
        raise FetchFailed(f"{pull.text} could not be fetched from {redacted(pull.url)}: {reason}", hint) from error


def _received(url: str, origin: Origin) -> bytes:
    from sm120kit.sources import index_client

    ends, received = time.monotonic() + MAX_SECONDS, bytearray()
    with index_client.connect(origin.settings()) as client:
        client.max_redirects = MAX_REDIRECTS
        with index_client.stream(client, url) as response:
            if response.status_code != 200:
                raise _Refused(f"HTTP status {response.status_code} {response.reason_phrase}")
            for chunk in response.iter_raw():
                received += chunk
                if len(received) > MAX_BYTES:
                    raise _Refused(f"it sends more than {MAX_BYTES / 2**20:g} MiB")
                if time.monotonic() > ends:
                    raise _Refused(f"it takes more than {MAX_SECONDS:g} s")
    return bytes(received)
