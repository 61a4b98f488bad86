"""URLs with credentials: the part that can be shown and stored, and the part that only requests contain."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sm120kit.core.errors import BadInput, InvalidOption
from sm120kit.core.outside import read_input_text
from sm120kit.core.secrets import REDACTED, SHORTEST, masked, redacted, register, register_header, register_url

__all__ = ["REDACTED", "Endpoint", "is_url", "read_header", "read_key", "redacted"]


@dataclass(frozen=True)
class Endpoint:
    """The root of an HTTP server. ``url`` can be shown and stored; ``query`` and ``headers`` are only for requests."""

    url: str
    query: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, text: str, api_key: str = "", headers: Mapping[str, str] | None = None) -> Endpoint:
        """Separate a URL from its credentials. A trailing ``/v1`` belongs to the API and is removed; HOST:PORT is HTTP.

        ``api_key`` is sent as OpenAI-compatible servers expect it: ``Authorization: Bearer``. ``headers`` are sent with it.

        Raises:
            BadInput: it is not an http(s) URL with a host, or has a user name in addition to an API key.
        """
        text = f"http://{text}" if _HOST_AND_PORT.match(text) else text
        register(api_key)
        register_url(text)
        shown = redacted(text) if "://" in text else text.rpartition("@")[2]
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            # The reason may quote a password.
            raise BadInput(f"{shown} is not a URL with a host and a port", _FORM) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"{shown} is not an http(s) URL with a host", _FORM)
        sent = {**(headers or {}), **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        user = parts.netloc.rpartition("@")[0]
        if user and api_key:
            raise BadInput(
                f"{shown} has a user name, and an API key is given: a request can have only one of them",
                "remove the user name from the URL, or unset the API key",
            )
        if user:
            name, _, password = user.partition(":")
            pair = f"{unquote(name)}:{unquote(password)}".encode()
            sent["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        for header, value in sent.items():
            register_header(header, value)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        root = f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/').removesuffix('/v1')}"
        return cls(root, parts.query, sent)

    def request_url(self, path: str) -> str:
        """The URL of a request. It contains credentials and must not be shown."""
        return f"{self.url}{path}{f'?{self.query}' if self.query else ''}"

    def without_secrets(self, text: str) -> str:
        """A text of the server without the credentials of the request, which servers may repeat."""
        for header in self.headers.values():
            for part in (header, header.partition(" ")[2]):
                if len(part) >= SHORTEST:
                    text = text.replace(part, REDACTED)
        return masked(text)


_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}(?:/|$)")


def is_url(text: str) -> bool:
    """Whether a text is a URL, or a host with a port: no name of a configuration or file."""
    return "://" in text or bool(_HOST_AND_PORT.match(text))


_FORM = "the root of a server looks like http://127.0.0.1:8000"


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is on loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_header(text: str) -> tuple[str, str]:
    """Name and value of a header, from the file in ``@FILE``."""
    text = _content(text, "--header")
    name, _, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not (name and value and text.isascii() and text.isprintable()) or set(name) & set(' "(),/:;<=>?@[\\]{}'):
        raise InvalidOption("--header", "a header is NAME:VALUE in printable ASCII characters")
    return name, value


def read_key(text: str, option: str = "--api-key") -> str:
    """The key, or the content of the file in ``@FILE``."""
    text = _content(text, option)
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise InvalidOption(option, "a key consists of printable ASCII characters without spaces")
    register(text)
    return text


def _content(text: str, option: str) -> str:
    """A value, or the content of the file in ``@FILE``."""
    if not text.startswith("@"):
        return text
    try:
        content = read_input_text(Path(text[1:]).expanduser()).strip()
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or "not a text file"
        raise InvalidOption(option, f"cannot read {text[1:]}: {reason}") from error
    if not content:
        raise InvalidOption(option, "the file is empty")
    return content
