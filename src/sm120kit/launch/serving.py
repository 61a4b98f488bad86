"""A server from start to stop: any command line that serves HTTP at a URL and answers ``/health`` when it is ready."""

from __future__ import annotations

import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sm120kit import process
from sm120kit.errors import Sm120kitError

POLL_SECONDS = 0.25
ASK_SECONDS = 3.0
DYING_SECONDS = 5.0
"""How long a server whose connections are gone may take to end: docker's client ends after the container."""


class Ending(StrEnum):
    """How a server ended."""

    STOPPED = "stopped"
    DIED = "died"
    NOT_HEALTHY = "not healthy in time"


@dataclass(frozen=True)
class Outcome:
    """``healthy_seconds`` is None when it never was; ``exit_code`` is negative for a signal, as subprocess has it."""

    ending: Ending
    healthy_seconds: float | None
    seconds: float
    exit_code: int | None


def serve(
    argv: Sequence[str],
    url: str,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    wait_seconds: float,
    patience_seconds: float,
    progress: Callable[[float, str], None] = lambda seconds, line: None,
    healthy: Callable[[float], None] = lambda seconds: None,
    work: Callable[[], None] | None = None,
) -> Outcome:
    """Start ``argv`` with its output in ``log``, wait until it is healthy, and then until it dies or a signal asks to stop.

    ``progress`` is given the seconds and the log's last line while it starts, ``healthy`` is called once. SIGINT, SIGTERM and
    SIGHUP stop it: SIGTERM, and SIGKILL when it has not ended after ``patience_seconds``. Call it in the main thread.

    With ``work``, that is done once it is healthy, and then it is stopped. All three signals then do what SIGINT did before:
    they interrupt, and what that raises is raised after the server has ended, as is what ``work`` raises of itself. A server
    that died meanwhile is told in the outcome instead.
    """
    tail = _Tail(log)
    started = time.monotonic()
    since: float | None = None
    signals = _signals() if work is None else _interruptions()
    with signals as asked, process.started(argv, log, env=environment, patience=patience_seconds) as child:
        while True:
            seconds = time.monotonic() - started
            if child.poll() is not None:
                ending = Ending.DIED
                break
            if asked:
                ending = Ending.STOPPED
                break
            if since is None:
                progress(seconds, tail.last())
                if _answers(f"{url}/health") and child.poll() is None:
                    since = seconds
                    healthy(seconds)
                    if work is not None:
                        ending = _do(work, lambda: child.poll() is not None)
                        break
                elif seconds > wait_seconds:
                    ending = Ending.NOT_HEALTHY
                    break
            time.sleep(POLL_SECONDS)
    return Outcome(ending, since, time.monotonic() - started, child.poll())


def _do(work: Callable[[], None], ended: Callable[[], bool]) -> Ending:
    """How the server fared while ``work`` was done."""
    try:
        work()
    except Sm120kitError:
        until = time.monotonic() + DYING_SECONDS
        while not ended():
            if time.monotonic() > until:
                raise
            time.sleep(POLL_SECONDS)
    return Ending.DIED if ended() else Ending.STOPPED


def port_is_free(port: int) -> bool:
    """Whether nobody listens on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    """Whether a server says that it is well. Loopback never goes through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ASK_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # refused, reset, 503 while it loads, or half an answer
        return False


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP interrupt as SIGINT does; what is yielded stays empty."""
    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, signal.getsignal(signal.SIGINT)) for kind in kinds}
    try:
        yield []
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that grows with each signal that asks to stop."""
    asked: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, lambda number, frame: asked.append(number)) for kind in kinds}
    try:
        yield asked
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class _Tail:
    """The last line of a file that grows; only what is new is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._line = path, 0, ""

    def last(self) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
                self._at += len(new)
        except FileNotFoundError:
            return ""
        # Progress bars end their lines with a carriage return.
        lines = [line for line in new.decode(errors="replace").replace("\r", "\n").split("\n") if line.strip()]
        self._line = lines[-1].strip() if lines else self._line
        return self._line
