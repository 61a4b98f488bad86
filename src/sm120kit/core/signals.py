"""Turn signals that end a command into an exception in the main thread, so that context managers clean up."""

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by Ctrl-C, by service managers and container engines, and when a terminal closes."""


class Interrupted(BaseException):
    """A signal of :data:`SIGNALS` arrived. Not a KeyboardInterrupt, which typer turns into a silent exit."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.signal = received


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise :class:`Interrupted`; a second signal, as timeout(1) sends, does not interrupt the cleanup."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise Interrupted(signal.Signals(signum))


def handle() -> None:
    """Install :func:`interrupt` for every signal that is not ignored.

    nohup(1) ignores SIGHUP, a shell SIGINT of its background jobs; they stay ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
