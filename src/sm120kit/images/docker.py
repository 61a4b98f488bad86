"""The container daemon, into which images are loaded. The only module that imports ``docker``."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sm120kit.core import reporting
from sm120kit.core.errors import DaemonUnreachable, NotFound, RequirementMissing, ResourceUnavailable
from sm120kit.core.outside import parse_json
from sm120kit.images.image_records import Image, image_content

_TIMEOUT_SECONDS = 600


class Daemon:
    """A connection to the daemon that ``docker`` uses: at ``DOCKER_HOST``, or of its context, as of rootless docker."""

    def __init__(self) -> None:
        """Connect.

        Raises:
            DaemonUnreachable: the daemon does not respond, or the context does not exist or is damaged.
            RequirementMissing: the Docker SDK is not installed.
        """
        try:
            import docker
        except ModuleNotFoundError as error:
            raise RequirementMissing("the Docker SDK for Python is not installed", "pip install 'sm120kit[docker]'") from error
        _require_context()
        with daemon_call("connecting"):
            self._client = docker.from_env(timeout=_TIMEOUT_SECONDS)  # queries the daemon's version

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if the daemon does not have it."""
        from docker.errors import ImageNotFound

        with daemon_call(f"inspecting {reference}"):
            try:
                image = self._client.api.inspect_image(reference)
            except ImageNotFound:
                return None
        config = image["Config"]
        layers = tuple(image["RootFS"].get("Layers") or ())
        return Image(
            id=image["Id"],
            content=image_content(layers, image["Os"], image["Architecture"], config),
            platform=f"{image['Os']}/{image['Architecture']}",
            layers=layers,
            labels=config.get("Labels") or {},
            user=config.get("User") or "",
            bytes=image["Size"],
        )

    def find(self, reference: str) -> Image:
        """Look up an image that must exist.

        Raises:
            NotFound: the daemon does not have it.
        """
        image = self.inspect(reference)
        if image is None:
            raise NotFound(f"there is no image {reference}", "sm120kit build builds it, sm120kit pull fetches it")
        return image

    def load(self, archive: Iterable[bytes]) -> str:
        """Load an archive of an image without a tag, and return the id that the daemon reports; "" if it reports none.

        Raises:
            ResourceUnavailable: the file system of its images is full.
            DaemonUnreachable: it does not respond, or rejects the archive.
        """
        loaded = ""
        with daemon_call("loading an image"):
            for event in self._client.api.load_image(archive, quiet=True):
                if message := event.get("error"):
                    require_disk_space(str(message))
                    raise DaemonUnreachable(f"loading an image: the daemon refuses: {message}", "look at the daemon's log")
                _, found, id_ = str(event.get("stream", "")).partition("Loaded image ID: ")
                loaded = id_.strip() if found else loaded
        return loaded

    def tag(self, image: str, reference: str) -> None:
        """Tag an image. The tag moves if another image has it."""
        repository, _, tag = reference.rpartition(":")
        with daemon_call(f"tagging {reference}"):
            self._client.api.tag(image, repository, tag)


def stored_login(config: dict[str, Any], registry: str) -> dict[str, Any]:
    """What ``docker login`` stored for a registry, with the keys of the SDK; empty without an entry, or without the SDK.

    ``config`` is docker's configuration. Whatever it or a helper contains that is malformed raises an exception of any kind.
    """
    try:
        from docker.auth import AuthConfig
    except ModuleNotFoundError:
        return {}
    with warnings.catch_warnings(action="ignore"):  # about a helper that is not on PATH, which raises as well
        return AuthConfig.load_config(None, config).resolve_authconfig(registry) or {}


def _require_context() -> None:
    """Raise DaemonUnreachable if docker's configuration or context is unusable: the SDK fails or uses the default socket."""
    from docker.context import ContextAPI, config
    from docker.utils.config import find_config_file

    if path := find_config_file():
        try:
            damaged = "" if isinstance(parse_json(Path(path).read_bytes()), dict) else "it is no object"
        except (OSError, ValueError) as error:
            damaged = str(error)
        if damaged:
            raise DaemonUnreachable(f"{path} cannot be used: {damaged}", "mend it, or name another directory in DOCKER_CONFIG")
    if os.environ.get("DOCKER_HOST"):
        return
    name = os.environ.get("DOCKER_CONTEXT") or config.get_current_context_name() or "default"
    hint = "docker context ls lists them; or set DOCKER_HOST to the socket of the daemon"
    try:
        context = ContextAPI.get_context(name)
    except Exception as error:  # the SDK reads meta.json without checking it
        raise DaemonUnreachable(f"docker context {name} is damaged: {error!r}", hint) from error
    if context is None:
        raise DaemonUnreachable(f"docker context {name} does not exist", hint)
    if "docker" not in context.endpoints:
        raise DaemonUnreachable(f"docker context {name} has no endpoint of docker", hint)


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
