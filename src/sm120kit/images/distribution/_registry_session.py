"""Requests to a registry: authentication, redirects, limits and retries.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md, https://distribution.github.io/distribution/spec/auth/token/
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from sm120kit import __version__
from sm120kit.core import reporting
from sm120kit.core.errors import RegistryFailed
from sm120kit.core.outside import integer, mail_date, parse_json
from sm120kit.core.retry import ATTEMPTS, pause
from sm120kit.core.secrets import masked, register
from sm120kit.core.server_requests import certificates
from sm120kit.core.urls import is_loopback
from sm120kit.images.distribution._credentials import DOCKER_HUB, stored_credentials
from sm120kit.images.oci import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    import httpx2

MAX_WAIT_SECONDS, MAX_DOCUMENT_SECONDS = 120, 300
"""Limits for ``Retry-After``, beyond which a registry has refused, and for the time that a manifest, config or token takes."""
MAX_REDIRECTS = 5

T = TypeVar("T")

_MAX_ERROR_BYTES = 2**18
_TIMEOUT_SECONDS = 60
_CHALLENGE = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"|(\w+)=([^\s,"]+)')
_HUB_HOST = "registry-1.docker.io"
_RESUME = "the same command resumes where it stopped"


class TransferFailed(Exception):
    """A request failed for a reason that may pass. ``wait`` is how many seconds the registry requests to wait, if it does."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True)
class Request:
    """A request. ``url`` is a path on the registry, or an absolute URL that the registry returned.

    ``scope`` are the rights that its token needs, separated by spaces. ``body`` is called for every attempt; it needs a header
    ``Content-Length``.
    """

    method: str
    url: str
    scope: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Iterable[bytes]] | None = None


@dataclass(frozen=True)
class Reply:
    """A complete response with a body of at most ``MAX_DOCUMENT_BYTES``. The keys of ``headers`` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Session:
    """A connection to a registry, ``HOST[:PORT]``. Plain http is used for loopback addresses only.

    Its methods can be called by several threads at once.
    """

    def __init__(self, registry: str) -> None:
        """Connect at the first request.

        Raises:
            RegistryFailed: docker login's configuration is malformed, or its credential helper fails.
        """
        import httpx2

        self.registry = registry
        host = _HUB_HOST if registry == DOCKER_HUB else registry
        self._loopback = is_loopback(httpx2.URL(f"http://{host}").host)
        self._base = httpx2.URL(f"{'http' if self._loopback else 'https'}://{host}")
        self._credentials = stored_credentials(registry)
        self._lock = threading.Lock()
        self._authorizations: dict[str, str] = {}
        self._client = httpx2.Client(
            headers={"User-Agent": f"sm120kit/{__version__}", "Accept-Encoding": "identity"},
            timeout=_TIMEOUT_SECONDS,
            trust_env=not self._loopback,  # no proxy for loopback
            verify=certificates(),
        )

    def close(self) -> None:
        """Close all connections; requests of other threads fail."""
        self._client.close()

    def request(self, request: Request, activity: str, accept: Collection[int] = ()) -> Reply:
        """Send a request, repeatedly if it fails for a reason that may pass, and read the response.

        Other statuses than 2xx and those in ``accept`` are errors.

        Raises:
            RegistryFailed: the registry does not respond, refuses, or sends more than ``MAX_DOCUMENT_BYTES``.
        """

        def attempt() -> Reply:
            with self.stream(request, activity, accept) as response:
                return Reply(response.status_code, dict(response.headers), self._document(response, activity))

        return self.retried(attempt, activity)

    def retried(self, attempt: Callable[[], T], activity: str) -> T:
        """The result of ``attempt``, which is repeated if it raises :class:`TransferFailed`.

        Raises:
            RegistryFailed: the last attempt failed.
        """
        for number in itertools.count(1):
            try:
                return attempt()
            except TransferFailed as failure:
                self._wait(failure, number, activity)
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, failure: TransferFailed, attempt: int, activity: str) -> None:
        """Wait before a request is repeated, unless it failed too often or the registry requests to wait too long."""
        wait = failure.wait or 0
        if attempt >= ATTEMPTS or wait > MAX_WAIT_SECONDS:
            later = f"; {self.registry} accepts the next request in {wait:.0f} s" if wait > MAX_WAIT_SECONDS else ""
            raise RegistryFailed(f"{activity}: {failure}{later}", _RESUME) from failure
        if failure.wait is None:
            pause(attempt)
        else:
            reporting.info(f"{self.registry} limits requests: waiting {wait:.0f} s")
            time.sleep(wait)

    @contextmanager
    def stream(self, request: Request, activity: str, accept: Collection[int] = ()) -> Iterator[httpx2.Response]:
        """Send a request once; the body of the response is not read. See :meth:`request`.

        Redirects of GET and HEAD are followed: from https to https only, and to other hosts without credentials.

        Raises:
            TransferFailed: the connection failed, or the status is that of an overloaded server.
            RegistryFailed: the registry refuses.
        """
        with self._translated():
            response = self._send(request, activity)
            try:
                if not response.is_success and response.status_code not in accept:
                    self._refused(response, activity)
                yield response
            finally:
                response.close()

    def chunks(self, response: httpx2.Response) -> Iterator[bytes]:
        """The body of a response as it was sent, in pieces as they arrive: none is lost when the connection drops.

        Raises:
            TransferFailed: the connection failed.
        """
        with self._translated():
            yield from response.iter_raw()

    def _document(self, response: httpx2.Response, activity: str) -> bytes:
        """The body of a response, of at most ``MAX_DOCUMENT_BYTES``."""
        body, ends = b"", time.monotonic() + MAX_DOCUMENT_SECONDS
        for chunk in self.chunks(response):
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES or time.monotonic() > ends:
                limit = f"{MAX_DOCUMENT_BYTES >> 20} MiB, or for more than {MAX_DOCUMENT_SECONDS} s,"
                problem = f"{self.registry} sends more than {limit} where a document is expected"
                raise RegistryFailed(f"{activity}: {problem}", "is it a registry?")
        return body

    @contextmanager
    def _translated(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except httpx2.TransportError as error:
            problem = self._shown(str(error)) or type(error).__name__
            raise TransferFailed(f"{self.registry} does not respond, or drops the connection: {problem}") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise RegistryFailed(f"{self.registry}: {self._shown(str(error))}", "is it a registry?") from error

    def _send(self, request: Request, activity: str) -> httpx2.Response:
        """Send a request with an authorization, which is renewed once, and follow redirects."""
        url = self._base.join(request.url)
        for _ in range(MAX_REDIRECTS + 1):
            response = self._send_authorized(request, url, activity)
            if not response.has_redirect_location or request.method not in ("GET", "HEAD"):
                return response
            response.close()
            url = self._allowed(url.join(response.headers["Location"]), activity)
        raise RegistryFailed(f"{activity}: {self.registry} redirects more than {MAX_REDIRECTS} times", "is it a registry?")

    def _send_authorized(self, request: Request, url: httpx2.URL, activity: str) -> httpx2.Response:
        """Only the registry itself gets an authorization, no host to which it redirects."""
        self._allowed(url, activity)
        if _origin(url) != _origin(self._base):
            return self._send_once(request, url, "")
        with self._lock:
            authorization = self._authorizations.get(request.scope, "")
        own = False  # an authorization of another thread may have expired; one that this request got has not
        while (response := self._send_once(request, url, authorization)).status_code == 401:
            response.close()
            if own:
                raise self._unauthorized(activity)
            challenge = response.headers.get("WWW-Authenticate", "")
            with self._lock:
                own = authorization == self._authorizations.get(request.scope, "")
                if own:
                    self._authorizations[request.scope] = self._authorize(challenge, request.scope, activity)
                authorization = self._authorizations[request.scope]
        return response

    def _send_once(self, request: Request, url: httpx2.URL, authorization: str) -> httpx2.Response:
        headers = dict(request.headers) | ({"Authorization": authorization} if authorization else {})
        content = request.body() if request.body else b""
        return self._client.send(self._client.build_request(request.method, url, headers=headers, content=content), stream=True)

    def _allowed(self, url: httpx2.URL, activity: str) -> httpx2.URL:
        """Require https; on loopback also http, within loopback."""
        if url.scheme == "https" or (url.scheme == "http" and self._loopback and is_loopback(url.host)):
            return url
        raise RegistryFailed(
            f"{activity}: {self.registry} redirects to {url.scheme}://{url.host}, which is not https",
            "contact the operator of the registry",
        )

    def _authorize(self, challenge: str, scope: str, activity: str) -> str:
        """The value of ``Authorization`` for a challenge of the registry: basic, or a token for ``scope``."""
        import httpx2

        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic" and self._credentials:
            return self._credentials.basic
        if kind.lower() != "bearer":
            raise self._unauthorized(activity)
        parameters = {name or bare: value or word for name, value, bare, word in _CHALLENGE.findall(rest)}
        realm = self._allowed(httpx2.URL(parameters.get("realm", "")), activity)
        token = self._token(realm, parameters.get("service", ""), scope or parameters.get("scope", ""), activity)
        return f"Bearer {token}"

    def _token(self, realm: httpx2.URL, service: str, scope: str, activity: str) -> str:
        """Get a token from the server that the registry names."""
        queries = [("service", service)] if service else []
        queries += [("scope", part) for part in scope.split()]
        headers = {"Authorization": self._credentials.basic} if self._credentials else {}
        url = realm.copy_with(params=[*realm.params.multi_items(), *queries])
        response = self._client.send(self._client.build_request("GET", url, headers=headers), stream=True)
        try:
            if response.status_code in (400, 401, 403):
                raise self._unauthorized(activity)
            if not response.is_success:
                self._refused(response, activity)
            document = parse_json(self._document(response, activity))
            token = document.get("token") or document["access_token"]
            if not isinstance(token, str) or not token.isascii() or not token.isprintable():
                raise ValueError("no token")
            return token
        except (ValueError, KeyError, AttributeError) as error:
            raise RegistryFailed(
                f"{activity}: {realm.host} returns no token for {self.registry}", "contact the operator of the registry"
            ) from error
        finally:
            response.close()

    def _unauthorized(self, activity: str) -> RegistryFailed:
        if self._credentials is None:
            return RegistryFailed(
                f"{activity}: {self.registry} requires credentials, and docker login stored none",
                f"docker login {self.registry}; `pip install 'sm120kit[docker]'` to read what it stores",
            )
        return RegistryFailed(
            f"{activity}: {self.registry} refuses the credentials that docker login stored",
            f"docker login {self.registry}; does the account have access to the repository?",
        )

    def _refused(self, response: httpx2.Response, activity: str) -> None:
        """Raise the error of a response that is not a success."""
        status = response.status_code
        text = b""
        for chunk in response.iter_raw():
            text += chunk
            if len(text) >= _MAX_ERROR_BYTES:
                break
        message = f"HTTP status {status} {response.reason_phrase}{self._errors(text)}"
        if status in (408, 425, 429) or status >= 500:
            raise TransferFailed(f"{self.registry}: {message}", _retry_after(response.headers.get("Retry-After", "")))
        raise RegistryFailed(
            f"{activity}: {self.registry}: {message}",
            f"docker login {self.registry}; does the account have access to the repository?"
            if status == 403
            else "contact the operator of the registry",
        )

    def _errors(self, text: bytes) -> str:
        """The messages in the error document of a registry."""
        try:
            errors = parse_json(text)["errors"]
            messages = [f"{error['code']}: {error.get('message', '')}" for error in errors]
        except (ValueError, KeyError, TypeError, AttributeError):
            return ""
        return f": {self._shown('; '.join(messages))[:300]}" if messages else ""

    def _shown(self, text: str) -> str:
        """A text without credentials, which servers may repeat."""
        if self._credentials:
            register(self._credentials.password, self._credentials.basic.partition(" ")[2])
        register(*(value.partition(" ")[2] for value in self._authorizations.values()))
        return masked(text)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _retry_after(value: str) -> float | None:
    """Seconds in a header ``Retry-After``: a number, or a date."""
    with suppress(ValueError):
        return float(integer(value.strip()))
    with suppress(ValueError):
        return max(0.0, mail_date(value).timestamp() - time.time())
    return None
