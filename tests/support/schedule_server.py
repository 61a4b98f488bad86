"""An OpenAI-compatible streaming server that sends tokens at known times, for tests and benchmarks of the client.

A request's ``schedule`` has the times: the first chunk after ``first`` seconds, the next every ``interval``, ``tokens`` in all,
``per_chunk`` in each, ``first_chunk`` in the first, the first ``reasoning`` of them as reasoning; ``fault`` names an error to
make. A late chunk does not delay the next one. Answers with the same ``together`` begin when that many wait, with the same
``capacity`` wait until fewer than that many run; their
prompts have 7 tokens, those of requests without a schedule one for each word.
The defaults are the arguments of the server: ``max_tokens`` tokens, a chunk every ``INTERVAL`` seconds. With ``log``, a line of
that file gets the times of the request and of each send.

Usage: ``schedule_server.py [PORT [INTERVAL [FIRST [PER_CHUNK [FIRST_CHUNK]]]]]``; it prints its port. ``/health`` has status
200, and ``/metrics`` the content of the file that ``METRICS`` names. With ``OWNER`` in the environment its model has this
owner, and it counts tokens in each event if ``continuous_usage_stats`` is set; without, it refuses this option.
``TLS_CERTIFICATE`` names the PEM file of its certificate and key; with ``TLS_CLIENTS``, clients need a certificate of this CA.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import ssl
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

MODEL = "schedule"
SLOTS: dict[int, asyncio.Semaphore] = {}
"""Answers that may run at once, by the ``capacity`` of their schedules."""
BARRIERS: dict[int, asyncio.Barrier] = {}
"""Answers that begin at once, by ``together``."""
OWNER, METRICS = os.environ.get("OWNER", ""), os.environ.get("METRICS", "")
WORD = os.environ.get("WORD", "tok ")
"""The text of each token."""
NAMES = ("interval", "first", "per_chunk", "first_chunk")


@contextmanager
def schedule_server(*defaults: float, script: str = __file__, **environment: str) -> Iterator[str]:
    """The URL of a server that runs while the block does; ``script`` is a copy of this file."""
    argv = [sys.executable, script, "0", *map(str, defaults)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as server:
        assert server.stdout
        try:
            scheme = "https" if environment.get("TLS_CERTIFICATE") else "http"
            yield f"{scheme}://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def event(delta: dict[str, str] | None = None, finish: str | None = None, usage: dict[str, object] | None = None) -> bytes:
    content = {
        "id": "x",
        "object": "chat.completion.chunk",
        "model": MODEL,
        "choices": [] if delta is None and finish is None else [{"index": 0, "delta": delta or {}, "finish_reason": finish}],
        "usage": usage,
    }
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def chunked(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def prompt_tokens(request: dict[str, object]) -> int:
    """The words of a prompt, and four tokens for each message of a chat."""
    messages = request.get("messages", [])
    texts = [str(request.get("prompt", "")), *(str(message["content"]) for message in messages)]
    return sum(len(text.split()) for text in texts) + 4 * len(messages)


class Answer:
    def __init__(self, writer: asyncio.StreamWriter, schedule: dict[str, object], counting: bool) -> None:
        self.writer, self.fault, self.counting = writer, schedule.get("fault", ""), counting
        self.first, self.interval = float(schedule.get("first", 0)), float(schedule.get("interval", 0))
        self.tokens, self.per_chunk = int(schedule.get("tokens", 1)), int(schedule.get("per_chunk", 1))
        self.first_chunk = int(schedule.get("first_chunk", self.per_chunk))
        self.reasoning = int(schedule.get("reasoning", 0))
        self.word = str(schedule.get("word", WORD))
        self.packer = zlib.compressobj(wbits=31)
        self.log = str(schedule.get("log", ""))
        self.capacity = int(schedule.get("capacity", 10**6))
        self.prompt_tokens = 7

    def send(self, body: bytes) -> None:
        if self.fault == "gzip":
            body = self.packer.compress(body) + self.packer.flush(zlib.Z_SYNC_FLUSH)
        if self.fault == "split":  # the worst case: every 7 bytes, inside characters, CRLFs and chunk headers
            for start in range(0, len(body), 7):
                self.writer.write(chunked(body[start : start + 7]))
        else:
            self.writer.write(chunked(body))

    async def run(self) -> bool:
        """Send the answer. Returns whether the connection stays open."""
        if self.fault == "500":
            self.writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 9\r\n\r\nno memory")
            return True
        if self.fault == "json":
            self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n")
            self.writer.write(b'{"choices": []}')
            return True
        encoding = f"Content-Encoding: {self.fault}\r\n".encode() if self.fault in ("gzip", "br") else b""
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + encoding)
        self.writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        self.send(event({"role": "assistant", "content": ""}))
        clock = asyncio.get_running_loop().time
        due = clock() + self.first
        requested, times = time.perf_counter(), []
        sent = 0
        while sent < self.tokens:
            await asyncio.sleep(max(0.0, due - clock()))
            count = min(self.per_chunk if sent else self.first_chunk, self.tokens - sent)
            kind = "reasoning_content" if sent < self.reasoning else "content"
            sent += count
            self.send(event({kind: self.word * count}, usage={"completion_tokens": sent} if self.counting else None))
            times.append(time.perf_counter())
            due += self.interval
            if self.fault == "comments":
                self.send(b": keep-alive\n\n")
            if sent >= self.tokens // 2:
                if self.fault == "disconnect":
                    await self.writer.drain()
                    return False
                if self.fault == "stall":
                    await asyncio.sleep(3600)
                if self.fault == "error event":
                    self.send(b'event: error\ndata: {"error": {"message": "out of blocks"}}\n\n')
                    self.send(b"")
                    return True
        self.send(event({}, "stop"))
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
        if self.fault != "no usage":
            self.send(event(usage=usage))
        if self.fault != "no done":
            self.send(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        if self.log:  # a second later, when no stream is running
            asyncio.get_running_loop().call_later(1, self.write, {"requested": requested, "sent": times})
        return True

    def write(self, times: dict[str, object]) -> None:
        with Path(self.log).open("a") as log:
            log.write(json.dumps(times) + "\n")


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, defaults: dict[str, float]) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if not head.startswith(b"POST "):
                model = {"id": MODEL, "root": "/nowhere", "created": 1} | ({"owned_by": OWNER} if OWNER else {})
                responses = {b"/v1/models": json.dumps({"data": [model]}).encode(), b"/health": b"{}"}
                if METRICS:
                    responses[b"/metrics"] = Path(METRICS).read_bytes()
                body = responses.get(head.split()[1], b"")
                status = b"200 OK" if body else b"404 Not Found"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
                writer.write(b"" if head.startswith(b"HEAD ") else body)
                continue
            length = next(
                int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            )
            request = json.loads(await reader.readexactly(length))
            counting = bool(request.get("stream_options", {}).get("continuous_usage_stats"))
            if counting and not OWNER:
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 14\r\n\r\nunknown option")
                continue
            schedule = (
                {"tokens": request.get("max_tokens") or request.get("max_completion_tokens", 1), "interval": 0.002}
                | defaults
                | request.get("schedule", {})
            )
            answer = Answer(writer, schedule, counting)
            answer.prompt_tokens = 7 if "schedule" in request else prompt_tokens(request)
            if together := schedule.get("together"):
                await BARRIERS.setdefault(together, asyncio.Barrier(together)).wait()
            async with SLOTS.setdefault(answer.capacity, asyncio.Semaphore(answer.capacity)):
                stays_open = await answer.run()
            if not stays_open:
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def tls() -> ssl.SSLContext | None:
    if "TLS_CERTIFICATE" not in os.environ:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(os.environ["TLS_CERTIFICATE"])
    if clients := os.environ.get("TLS_CLIENTS"):
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def main(port: int, defaults: dict[str, float]) -> None:
    server = await asyncio.start_server(lambda reader, writer: serve(reader, writer, defaults), "127.0.0.1", port, ssl=tls())
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    try:
        # select() waits to the microsecond, epoll in whole milliseconds.
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
            values = zip(NAMES, map(float, takewhile(lambda text: not text.startswith("--"), sys.argv[2:])), strict=False)
            runner.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0, dict(values)))
    except KeyboardInterrupt:
        sys.exit(130)
