"""A proxy before any OpenAI-compatible server, with a fault in the requests that reach it or in the answers that it sends."""

from __future__ import annotations

import http.client
import http.server
import json
import random
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from answer_faults import ANSWER_FAULTS
from loopback import http_served

LONG = 1500
"""Characters from which faults of long prompts begin."""


class Seen:
    """What a proxy remembers between requests."""

    def __init__(self) -> None:
        self.lock, self.random = threading.Lock(), random.Random(0)
        self.running, self.left_over = 0, ""
        self.answers: dict[Any, bytes] = {}
        self.other = b""


Change = Callable[[dict[str, Any], Seen], object]


def _text(body: dict[str, Any], change: Callable[[str], str]) -> None:
    """Change the text of a prompt or of a chat's last message."""
    if isinstance(body.get("prompt"), str):
        body["prompt"] = change(body["prompt"])
    elif body.get("messages") and isinstance(body["messages"][-1].get("content"), str):
        body["messages"][-1] = {**body["messages"][-1], "content": change(body["messages"][-1]["content"])}


def _length(body: dict[str, Any]) -> int:
    return len(json.dumps(body.get("messages") or body.get("prompt")))


def left_over_text(body: dict[str, Any], seen: Seen) -> None:
    """A request after a long one begins with the end of that one."""
    before, seen.left_over = seen.left_over, ""
    if _length(body) > LONG:
        _text(body, lambda text: setattr(seen, "left_over", text[-400:]) or text)
    elif before:
        _text(body, lambda text: before + text)


REQUEST_FAULTS: dict[str, tuple[str, Change]] = {
    "proxy-dropped-middle": (
        "the middle third of a long prompt is left out",
        lambda body, seen: _text(
            body, lambda text: text[: len(text) // 3] + text[-(len(text) // 3) :] if len(text) > LONG else text
        ),
    ),
    "proxy-window": (
        "of a long prompt only the last 600 characters are read",
        lambda body, seen: _text(body, lambda text: text[-600:] if len(text) > LONG else text),
    ),
    "proxy-last-message": (
        "of a chat only the last message is read",
        lambda body, seen: body.update(messages=body["messages"][-1:]) if "messages" in body else None,
    ),
    "proxy-no-template": (
        "a chat is joined without its template",
        lambda body, seen: (
            body.update(chat_template="{% for each in messages %}{{ each['content'] }}\n{% endfor %}")
            if "messages" in body
            else None
        ),
    ),
    "proxy-sampled": ("temperature 0 is ignored", lambda body, seen: body.update(temperature=1.0)),
    "proxy-race": (
        "one request of twelve is computed with other numbers",
        lambda body, seen: body.update(temperature=1.0) if seen.random.random() < 1 / 12 else None,
    ),
    "proxy-busy": (
        "with more than four requests at once, numbers are others",
        lambda body, seen: body.update(temperature=1.0) if seen.running > 4 else None,
    ),
    "proxy-penalty": (
        "tokens of the prompt are penalized although nobody asks for it",
        lambda body, seen: body.update(repetition_penalty=1.3),
    ),
    "proxy-left-over": ("a request after a long one begins with the end of that one", left_over_text),
    "proxy-lower-case": ("the tokenizer makes capital letters small", lambda body, seen: _text(body, str.lower)),
}
"""Faults of requests: what they do, and the change."""
CACHE_FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "proxy-answer-of-length": lambda body: (_length(body), body.get("stream")),
    "proxy-answer-of-prefix": lambda body: (json.dumps(body.get("messages") or body.get("prompt"))[:200], body.get("stream")),
}
"""Faults of a cache of answers: by the length of a prompt, by its begin."""
OTHER = "proxy-answer-of-other"
"""A request of several at once gets the answer of the one that ended before it."""
PROXY_FAULTS = (*REQUEST_FAULTS, *CACHE_FAULTS, OTHER, *ANSWER_FAULTS)


@contextmanager
def fault_proxy(server: str, fault: str = "") -> Iterator[str]:
    """The URL of a proxy before ``server`` while the block runs. Without a fault it forwards only."""
    upstream, seen = urllib.parse.urlsplit(server), Seen()
    damage = ANSWER_FAULTS.get(fault)

    def damaged(line: bytes, number: int) -> bytes:
        if damage is None or not line.startswith(b"data: {"):
            return line
        document = {**json.loads(line[6:]), "number": number}
        if document.get("choices"):
            document = damage(document, True)
        return b"data: " + json.dumps(document).encode() + b"\n"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: object) -> None:
            pass

        def forward(self, content: bytes | None) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(str(upstream.hostname), upstream.port, timeout=300)
            names = ("Content-Type", "Authorization")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            connection.request(self.command, self.path, content, headers)
            return connection.getresponse()

        def reply(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):  # the client has given up
                self.wfile.write(content)

        def do_GET(self) -> None:
            response = self.forward(None)
            self.reply(response.status, response.headers.get("Content-Type", "application/json"), response.read())

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.path.endswith("completions"):
                response = self.forward(content)
                self.reply(response.status, "application/json", response.read())
                return
            with seen.lock:
                seen.running += 1
            try:
                self.complete(json.loads(content))
            finally:
                with seen.lock:
                    seen.running -= 1

        def complete(self, body: dict[str, Any]) -> None:
            key = CACHE_FAULTS[fault](body) if fault in CACHE_FAULTS else None
            if fault in REQUEST_FAULTS:
                with seen.lock:
                    REQUEST_FAULTS[fault][1](body, seen)
            response = self.forward(json.dumps(body).encode())
            if body.get("stream"):
                answer = b"".join(damaged(line, number // 2) for number, line in enumerate(response))
                kind = "text/event-stream"
            else:
                answer, kind = response.read(), "application/json"
                if damage is not None and response.status == 200:
                    answer = json.dumps(damage(json.loads(answer), False)).encode()
            if fault == OTHER and seen.running > 1:
                with seen.lock:
                    answer, seen.other = seen.other or answer, answer
            if key is not None and response.status == 200:
                answer = seen.answers.setdefault(key, answer)
            self.reply(response.status, kind, answer)

    with http_served(Handler) as url:
        yield url
