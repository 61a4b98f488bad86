"""How a daemon and its registries are asked: what they refuse becomes an error of ours, and what may pass is asked again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from sm120kit.errors import DaemonUnreachable, HashMismatch, NoSuchImage, NotEnoughDisk, RegistryFailed

T = TypeVar("T")

ATTEMPTS = 4
"""How often a registry is asked that fails for a reason that may pass."""
PAUSE_SECONDS = 0.5

_MAY_PASS = ("500", "502", "503", "504", "toomanyrequests", "timeout", "eof", "connection reset", "connection refused")


class Refused(Exception):
    """What a daemon says a registry said."""


def follow(answer: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Pass on one line of a push or pull.

    Raises:
        Refused: it is the last one, and an error.
    """
    if "error" in answer:
        raise Refused(str(answer["error"]))
    status = str(answer.get("status", ""))
    if status and not answer.get("progressDetail"):
        tell(f"{answer['id']}: {status}" if "id" in answer else status)


def patiently(doing: str, ask: Callable[[], T]) -> T:
    """Ask a registry, again when what is wrong may pass.

    Raises:
        NoSuchImage, HashMismatch, RegistryFailed, NotEnoughDisk, DaemonUnreachable: as they say.
    """
    from docker.errors import APIError, NotFound

    for attempt in range(1, ATTEMPTS + 1):
        with told(doing):
            try:
                return ask()
            except (APIError, Refused) as error:
                words = str(error.explanation if isinstance(error, APIError) and error.explanation else error)
                full_disk(words)
                if isinstance(error, NotFound) or "manifest unknown" in words or "not found" in words:
                    raise NoSuchImage(f"{doing}: {words}", "is it the right registry, and was the image published?") from error
                if "filesystem layer verification failed" in words or "unexpected EOF" in words or "mismatch" in words:
                    raise HashMismatch(f"{doing}: {words}", "what the registry has was damaged or changed") from error
                if attempt == ATTEMPTS or not any(sign in words.lower() for sign in _MAY_PASS):
                    raise RegistryFailed(f"{doing}: {words}", "the same command goes on where it was") from error
                time.sleep(PAUSE_SECONDS * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """Turn what the SDK raises when the daemon does not answer into an error of ours.

    Raises:
        NoSuchImage, NotEnoughDisk, DaemonUnreachable: as they say.
    """
    import requests
    from docker.errors import APIError, DockerException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except APIError as error:
        words = str(error.explanation or error)
        full_disk(words)
        if error.status_code == 404:
            raise NoSuchImage(f"{doing}: {words}") from error
        raise DaemonUnreachable(f"{doing}: the daemon refuses: {words}", "look at the daemon's log") from error
    except (DockerException, requests.RequestException, HTTPError, ConnectionError, json.JSONDecodeError) as error:
        raise DaemonUnreachable(
            f"{doing}: the container daemon does not answer: {error}",
            "start it, or name its socket with DOCKER_HOST; nothing is half done, and the same command goes on",
        ) from error


def full_disk(words: str) -> None:
    """Find a full disk in what a daemon says.

    Raises:
        NotEnoughDisk: it is one.
    """
    if "no space left on device" in words:
        raise NotEnoughDisk(
            f"the file system of the daemon's images is full: {words}", "free some space; the same command goes on"
        )
