"""Run a server process for a piece of work: wait until ``/health`` answers, notice its death, stop it."""

import errno
import http.client
import socket
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.errors import Sm120kitError

POLL_SECONDS = 0.25
HEALTH_TIMEOUT_SECONDS = 3.0
DYING_SECONDS = 5.0
"""How long a server whose connections are closed may take to exit: docker's client exits after the container."""


class Ending(StrEnum):
    """How a server ended."""

    STOPPED = "stopped"
    DIED = "died"
    NOT_HEALTHY = "not healthy in time"
    NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Run:
    """The record of a launched server, ``<state>/runs/*.json``.

    ``image`` is the content digest of the checked image, ``image_name`` the id or ``repository@digest`` that was started,
    ``build_id`` that of the image (its label; "" without one), ``local`` its local patches, in the form of the label.
    ``environment`` has names of variables without values. ``started`` is UTC; durations are in seconds, None until they are
    known. ``ending`` is a value of :class:`Ending`, "" if it is not known to have ended: whether it runs, the daemon decides
    (:func:`.server_containers.state`).
    """

    configuration: str
    engine: str
    image: str
    image_name: str
    model: str
    argv: tuple[str, ...]
    environment: tuple[str, ...]
    url: str
    log: str
    started: str
    healthy_seconds: float | None = None
    seconds: float | None = None
    ending: str = ""
    exit_code: int | None = None
    build_id: str = ""
    local: str = ""


@dataclass(frozen=True)
class Outcome:
    """``healthy_seconds`` is None for a server that never was healthy; ``exit_code`` is negative for a signal (subprocess)."""

    ending: Ending
    healthy_seconds: float | None
    seconds: float
    exit_code: int | None


@dataclass(frozen=True)
class ServerProcess:
    """A command line that serves HTTP at ``url``, with output in ``log`` and ``environment`` added to this process's.

    It has ``wait_seconds`` to become healthy, and ``patience_seconds`` between SIGTERM and SIGKILL.
    """

    argv: Sequence[str]
    url: str
    log: Path
    wait_seconds: float
    patience_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


def serve(
    server: ServerProcess,
    work: Callable[[], None],
    *,
    progress: Callable[[float, str], None] = lambda seconds, line: None,
    on_healthy: Callable[[float], None] = lambda seconds: None,
) -> Outcome:
    """Start a server, call ``work`` once it is healthy, and stop it: SIGTERM, then SIGKILL.

    ``progress`` gets the seconds since the start and the log's last line until the server is healthy, ``on_healthy`` the
    seconds that took. What ``work`` or a signal raises (:func:`sm120kit.core.signals.handle`) is raised after the server has
    ended. If the server died during ``work``, an error of ``work`` is dropped and the outcome is :attr:`Ending.DIED`.
    """
    tail = _Tail(server.log)
    started = time.monotonic()
    healthy_after: float | None = None
    ending = Ending.DIED
    with process.background(server.argv, server.log, env=server.environment, patience=server.patience_seconds) as child:
        while child.poll() is None:
            seconds = time.monotonic() - started
            healthy = _is_healthy(server.url)
            progress(seconds, tail.last_line())  # after it: what is required of the running server is required of a healthy one
            if healthy and child.poll() is None:
                healthy_after = time.monotonic() - started
                on_healthy(healthy_after)
                ending = _ending_after(work, lambda: child.poll() is not None)
                break
            if seconds > server.wait_seconds:
                ending = Ending.NOT_HEALTHY
                break
            time.sleep(POLL_SECONDS)
    return Outcome(ending, healthy_after, time.monotonic() - started, child.poll())


def _ending_after(work: Callable[[], None], has_exited: Callable[[], bool]) -> Ending:
    """Call ``work``; DIED if the server exited meanwhile, also when ``work`` failed because of that."""
    try:
        work()
    except Sm120kitError:
        deadline = time.monotonic() + DYING_SECONDS
        while not has_exited():
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    return Ending.DIED if has_exited() else Ending.STOPPED


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def port_is_free(port: int, listen: str = "127.0.0.1") -> bool:
    """Whether no process listens on a port of an address of this host.

    A port that this user may not bind counts as free: the container daemon binds it.

    Raises:
        OSError: the port cannot be bound for another reason, such as EADDRNOTAVAIL: this host does not have the address.
    """
    with socket.socket(socket.AF_INET6 if ":" in listen else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen, port))
        except PermissionError:
            return True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _is_healthy(url: str) -> bool:
    """Whether ``/health`` answers with status 200. No proxy: the server is on loopback."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=HEALTH_TIMEOUT_SECONDS) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):  # refused, reset, 503 while it loads, or a truncated response
        return False


class _Tail:
    """The last line of a file that grows. Each call reads only what was appended since the one before."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._line = path, 0, ""

    def last_line(self) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                appended = file.read()
                self._offset += len(appended)
        except FileNotFoundError:
            return ""
        # Progress bars end their lines with a carriage return.
        lines = [line for line in appended.decode(errors="replace").replace("\r", "\n").split("\n") if line.strip()]
        self._line = lines[-1].strip() if lines else self._line
        return self._line
