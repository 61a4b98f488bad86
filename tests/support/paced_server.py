"""A server that keeps a schedule of tens of thousands of tokens per second: one loop, blocking sockets, prepared bytes.

Usage: ``paced_server.py [PORT]``; it prints its port. A request has a ``schedule`` of ``users``, ``first``, ``interval``,
``tokens`` and ``log``. When ``users`` requests have arrived, all answers begin: token k of each is due after ``first + k *
interval`` seconds, as an engine's step has a token for each. After the last answer, the file ``log`` gets the times of requests
and sent tokens by connection, and how late each token was, in seconds.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(content: object) -> bytes:
    body = b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    """An event of about the size of vLLM's."""
    about = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1790000000}
    return chunked(about | {"model": "paced", "choices": choices, "usage": usage})


TOKEN = event([{"index": 0, "delta": {"content": " tok"}, "logprobs": None, "finish_reason": None}])


def request(connection: socket.socket) -> dict[str, Any]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(1 << 16)
    return dict(json.loads(body)["schedule"])


def answer(connections: list[socket.socket], requested: list[float], schedule: dict[str, Any]) -> None:
    """Send all answers, each token when it is due."""
    clock, tokens = time.perf_counter, int(schedule["tokens"])
    for connection in connections:
        connection.sendall(HEAD)
    due = [clock() + schedule["first"] + number * schedule["interval"] for number in range(tokens)]
    sent: list[list[float]] = [[] for _ in connections]
    streams = list(zip(connections, sent, strict=True))
    for moment in due:
        while (wait := moment - clock()) > 0:
            time.sleep(wait)
        for connection, times in streams:
            connection.sendall(TOKEN)
            times.append(clock())
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    end = event([{"index": 0, "delta": {}, "finish_reason": "stop"}]) + event([], usage) + chunked(b"[DONE]") + b"0\r\n\r\n"
    for connection in connections:
        connection.sendall(end)
    if schedule.get("log"):
        late = [when - moment for times in sent for when, moment in zip(times, due, strict=True)]
        partial = Path(schedule["log"] + ".partial")
        partial.write_text(json.dumps({"requested": requested, "sent": sent, "late": late}))
        partial.rename(schedule["log"])


def main(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    print(listener.getsockname()[1], flush=True)
    while True:
        connections: list[socket.socket] = []
        requested: list[float] = []
        schedule: dict[str, Any] = {"users": 1}
        while len(connections) < schedule["users"]:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            schedule = request(connection)
            connections.append(connection)
            requested.append(time.perf_counter())
        answer(connections, requested, schedule)
        for connection in connections:
            connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
