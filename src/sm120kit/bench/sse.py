"""Read server-sent events from a byte stream (WHATWG HTML, "Server-sent events", section 9.2.6), in linear time."""

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 4 * 2**20
"""Limit of an event: those of an answer have some hundred bytes, with log probabilities some kilobytes."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerSentEvent:
    """An event: its name (``message`` if the server sends none) and its data lines, joined."""

    name: str
    data: str


class Reader:
    """Cut a byte stream into events, wherever a read ends: inside a line, a CRLF or a UTF-8 character.

    A CR ends its line at once: an event is complete with the read that has its end, not with the next one.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._started = self._after_cr = self._too_long = False
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, read: bytes) -> list[ServerSentEvent]:
        """The events that this read completes; none after an event of more than ``MAX_EVENT_BYTES``."""
        if not read or self._too_long:
            return []
        ended_with_cr = read.endswith(b"\r")
        if self._after_cr:
            read = read.removeprefix(b"\n")
        self._after_cr = ended_with_cr
        first, *others = _LINE_END.split(read)
        self._pending += first
        events = []
        for line in others:
            events.append(self._line(bytes(self._pending)))
            self._pending = bytearray(line)
        self._too_long = self._size + len(self._pending) > MAX_EVENT_BYTES
        return [event for event in events if event is not None]

    @property
    def problem(self) -> str:
        """Why the stream so far cannot be the whole answer; "" if it ends between two events."""
        if self._too_long:
            return f"an event has more than {MAX_EVENT_BYTES // 2**20} MiB"
        return "the stream ended inside an event" if self._pending or self._data else ""

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not self._started:
            self._started, line = True, line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            name, data = self._name, self._data
            self._name, self._data, self._size = "", [], 0
            return ServerSentEvent(name or "message", b"\n".join(data).decode("utf-8", "replace")) if data else None
        field, _, value = line.partition(b":")  # a comment has an empty field
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None
