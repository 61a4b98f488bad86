"""Lines that show in a pipe or a log, where no display is, that a long command still runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT_SECONDS = 20.0
"""Time without output after which a line is printed."""

LONG_SECONDS = 5.0
"""Time after which an activity is worth a line."""

Status = Callable[[], str | None]
"""The state of an activity: empty if the last printed line describes it, None if there is nothing new to print."""


class Heartbeat:
    """Current activities, and the time of the last output. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._label, self._since, self._printed = "", time.monotonic(), 0.0
        self._activities: list[tuple[Status, float]] = []

    def printed(self, text: str) -> None:
        """Record that a message was printed; its first line labels activities without a status of their own."""
        with self._lock:
            self._label = text.partition("\n")[0]
            self._since = self._printed = time.monotonic()

    @contextmanager
    def during(self, status: Status = str) -> Iterator[None]:
        """Register an activity that may take long, until the block ends."""
        activity = status, time.monotonic()
        with self._lock:
            self._activities.append(activity)
        try:
            yield
        finally:
            with self._lock:
                self._activities.remove(activity)

    def line(self) -> str:
        """The line to print now; empty without a long activity, or shortly after other output."""
        with self._lock:
            now = time.monotonic()
            if now - self._printed < SILENT_SECONDS:
                return ""
            long_running = [status for status, since in self._activities if now - since >= LONG_SECONDS]
            lines = [text for status in long_running if (text := status()) is not None]
            if not lines:
                return ""
            self._printed = now
            return next(filter(None, reversed(lines)), f"{self._label or 'running'}: {now - self._since:.0f} s")
