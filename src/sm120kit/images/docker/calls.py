"""Calls to the daemon and to registries: errors of the Docker SDK become sm120kit's, transient failures are retried."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from sm120kit.core import reporting
from sm120kit.core.errors import DaemonUnreachable, NotFound, NotTrusted, RegistryFailed, ResourceUnavailable
from sm120kit.core.retry import ATTEMPTS, pause

T = TypeVar("T")

_TRANSIENT = ("500", "502", "503", "504", "toomanyrequests", "timeout", "eof", "connection reset", "connection refused")


class TransferError(Exception):
    """An error of a registry, as the daemon passes it on in the stream of a push or pull."""


def report_status(line: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Report a line of the stream of a push or pull. Lines of progress are skipped.

    Raises:
        TransferError: the line is an error, which ends the stream.
    """
    if "error" in line:
        raise TransferError(str(line["error"]))
    status = str(line.get("status", ""))
    if status and not line.get("progressDetail"):
        report(f"{line['id']}: {status}" if "id" in line else status)


def registry_call(activity: str, request: Callable[[], T]) -> T:
    """Run ``request``, which contacts a registry through the daemon. Transient failures are retried.

    Raises:
        NotFound: the registry does not have the image.
        NotTrusted: it delivers damaged content.
        RegistryFailed: it does not respond, or refuses the request.
        ResourceUnavailable, DaemonUnreachable: as for :func:`daemon_call`.
    """
    from docker.errors import APIError, NotFound

    for attempt in range(1, ATTEMPTS + 1):
        with daemon_call(activity):
            try:
                return request()
            except (APIError, TransferError) as error:
                message = str(error.explanation if isinstance(error, APIError) and error.explanation else error)
                require_disk_space(message)
                if isinstance(error, NotFound) or "manifest unknown" in message or "not found" in message:
                    raise NotFound(
                        f"{activity}: {message}", "is it the right registry, and was the image published?"
                    ) from error
                if "filesystem layer verification failed" in message or "unexpected EOF" in message or "mismatch" in message:
                    raise NotTrusted(f"{activity}: {message}", "the registry's copy was damaged or changed") from error
                if attempt == ATTEMPTS or not any(sign in message.lower() for sign in _TRANSIENT):
                    raise RegistryFailed(f"{activity}: {message}", "the same command resumes where it stopped") from error
                pause(attempt)
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def daemon_call(activity: str) -> Iterator[None]:
    """Translate exceptions of the Docker SDK while the block runs. ``activity`` is part of the messages.

    Raises:
        NotFound: the daemon has no such object.
        ResourceUnavailable: the file system of its images is full.
        DaemonUnreachable: it does not respond, or refuses the request.
    """
    import requests
    from docker.errors import APIError, DockerException
    from urllib3.exceptions import HTTPError

    try:
        with reporting.working(activity):
            yield
    except APIError as error:
        message = str(error.explanation or error)
        require_disk_space(message)
        if error.status_code == 404:
            raise NotFound(f"{activity}: {message}") from error
        raise DaemonUnreachable(f"{activity}: the daemon refuses: {message}", "look at the daemon's log") from error
    except (DockerException, requests.RequestException, HTTPError, ConnectionError, json.JSONDecodeError) as error:
        raise DaemonUnreachable(
            f"{activity}: the container daemon does not respond: {_cause(error) or error}",
            "start it, or set DOCKER_HOST to its socket; the same command resumes where it stopped",
        ) from error


def _cause(error: BaseException) -> str:
    """The message of the operating system in an error of the SDK, which quotes exceptions inside others; empty without one."""
    inner = [each for each in (*error.args, error.__cause__, error.__context__) if isinstance(each, BaseException)]
    own = error.strerror if isinstance(error, OSError) and error.strerror else ""
    return next(filter(None, map(_cause, inner)), own)


def require_disk_space(message: str) -> None:
    """Detect a full disk in an error message of the daemon.

    Raises:
        ResourceUnavailable: the message reports a full disk.
    """
    if "no space left on device" in message:
        raise ResourceUnavailable(
            f"the file system of the daemon's images is full: {message}",
            "free some space; the same command resumes where it stopped",
        )
