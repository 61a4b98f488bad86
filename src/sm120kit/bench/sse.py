"""Read server-sent events from a byte stream (WHATWG HTML, "Server-sent events", section 9.2.6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSentEvent:
    """An event: its name (``message`` if the server sends none) and its data lines, joined."""

    name: str
    data: str


class Reader:
    """Cut a byte stream into events, wherever a read ends: inside a line, a CRLF or a UTF-8 character."""

    def __init__(self) -> None:
        self._pending = b""
        self._started = False
        self._name = ""
        self._data: list[bytes] = []

    def feed(self, read: bytes) -> list[ServerSentEvent]:
        """The events that this read completes."""
        self._pending += read
        if not self._started:
            if b"\xef\xbb\xbf".startswith(self._pending[:3]) and len(self._pending) < 3:
                return []
            self._pending = self._pending.removeprefix(b"\xef\xbb\xbf")
            self._started = True
        # A CR at the end may be half of a CRLF: keep it for the next read.
        last_cr = b"\r" if self._pending.endswith(b"\r") else b""
        lines = self._pending.removesuffix(last_cr).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._pending = lines.pop() + last_cr
        return [event for line in lines if (event := self._line(line)) is not None]

    @property
    def incomplete(self) -> bool:
        """Whether the stream was cut off inside an event: bytes are left without a blank line after them."""
        return bool(self._pending.strip(b"\r") or self._data)

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            name, data = self._name, self._data
            self._name, self._data = "", []
            return ServerSentEvent(name or "message", b"\n".join(data).decode("utf-8", "replace")) if data else None
        field, _, value = line.partition(b":")  # a comment has an empty field
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None
