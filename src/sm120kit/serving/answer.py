"""Request one short completion from a server, as its users will."""

import json
import shlex
import time
from dataclasses import dataclass
from typing import Any

from sm120kit.core import server_requests
from sm120kit.core.errors import NoAnswer
from sm120kit.core.outside import parse_json
from sm120kit.core.urls import Endpoint

TOKENS = 16
TIMEOUT_SECONDS = 600.0
"""For each wait for bytes of the server. The first request compiles kernels that the image does not have."""
LIMIT_BYTES = 64 << 20
PROMPT = "Hello"


@dataclass(frozen=True)
class Answer:
    """The first answer of a server: the model's name there, its text, and the seconds that it took."""

    model: str
    text: str
    seconds: float


def request(endpoint: Endpoint) -> Answer:
    """Request a chat completion of at most ``TOKENS`` tokens from the first model of a server.

    Raises:
        NoAnswer: the server lists no model, or answers without a completion.
    """
    import httpx2

    started = time.monotonic()
    try:
        model = str(_json(endpoint, "GET", "/v1/models")["data"][0]["id"])
        answer = _json(endpoint, "POST", "/v1/chat/completions", body(model) | {"max_tokens": TOKENS})
        message = answer["choices"][0]["message"]
        # A reasoning parser puts the first tokens into another field.
        text = next((str(message[key]) for key in ("content", "reasoning_content", "reasoning") if message.get(key)), "")
    except httpx2.HTTPError as error:
        raise NoAnswer(f"{endpoint.url} does not answer: {endpoint.without_secrets(str(error))}", _HINT) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoAnswer(f"{endpoint.url} answers without a completion", _HINT) from error
    return Answer(model, text, time.monotonic() - started)


def body(model: str) -> dict[str, Any]:
    """A chat completion request."""
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}]}


def curl(endpoint: Endpoint, model: str, variable: str) -> str:
    """The same request as a line for a shell, which reads the API key from ``variable``."""
    key = f' -H "Authorization: Bearer ${variable}"' if endpoint.headers else ""
    url = shlex.quote(f"{endpoint.url}/v1/chat/completions")
    return f"curl {url}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body(model)))}"


_HINT = "sm120kit logs shows what the server prints"


def _json(endpoint: Endpoint, method: str, path: str, sent: object = None) -> Any:
    """The JSON of a response."""
    response = server_requests.request(endpoint, method, path, sent, seconds=TIMEOUT_SECONDS, limit=LIMIT_BYTES)
    if response.status_code != 200:
        text = endpoint.without_secrets(response.text)[:400]
        raise NoAnswer(f"{method} {path} answers with status {response.status_code}: {text}", _HINT)
    return parse_json(response.content)
