"""Credentials of registries as ``docker login`` stores them: in its configuration file or with a credential helper.

https://docs.docker.com/reference/cli/docker/login/#credential-stores
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120kit.core import process
from sm120kit.core.errors import RegistryFailed
from sm120kit.core.outside import parse_json, read_found

DOCKER_HUB = "docker.io"
_HUB_KEY = "https://index.docker.io/v1/"
"""The name under which ``docker login`` stores the credentials of Docker Hub."""
_TOKEN_USER = "<token>"
"""The user name with which a credential helper marks an identity token."""


@dataclass(frozen=True)
class Credentials:
    """User name and password of a registry, or an ``identity_token`` that is exchanged for tokens."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of a header ``Authorization``."""
        return f"Basic {base64.b64encode(f'{self.username}:{self.password}'.encode()).decode()}"


def stored_credentials(registry: str) -> Credentials | None:
    """Look up the credentials of a registry, ``HOST[:PORT]``; None if ``docker login`` stored none.

    A helper for the registry (``credHelpers``) comes before the general one (``credsStore``), and that before the file.

    Raises:
        RegistryFailed: the configuration file is malformed, or a credential helper fails.
    """
    directory = os.environ.get("DOCKER_CONFIG")
    path = (Path(directory) if directory else Path.home() / ".docker") / "config.json"
    try:
        config = parse_json(read_found(path))
        if not isinstance(config, dict):
            raise ValueError("no object")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _malformed(path, str(error)) from error
    key = _HUB_KEY if registry == DOCKER_HUB else registry
    helpers = config.get("credHelpers") or {}
    auths = config.get("auths") or {}
    if not isinstance(helpers, dict) or not isinstance(auths, dict):
        raise _malformed(path, "credHelpers and auths are objects")
    helper = helpers.get(key) or config.get("credsStore")
    if helper and (stored := _from_helper(str(helper), key)):
        return stored
    stored = next((value for name, value in auths.items() if _host_of(name) == _host_of(key)), None)
    return _from_file(stored, path) if stored else None


def _host_of(name: str) -> str:
    """The host of a key of ``auths``, which may be a URL."""
    return (name.partition("://")[2] or name).partition("/")[0]


def _from_file(stored: Any, path: Path) -> Credentials | None:
    if not isinstance(stored, dict):
        raise _malformed(path, "an entry of auths is an object")
    if token := stored.get("identitytoken"):
        return Credentials(identity_token=str(token))
    try:
        username, _, password = base64.b64decode(str(stored.get("auth", "")), validate=True).decode().partition(":")
    except ValueError as error:
        raise _malformed(path, "an entry of auths has an auth that is not base64") from error
    return Credentials(username, password.rstrip("\0")) if username else None


def _from_helper(helper: str, key: str) -> Credentials | None:
    """Run ``docker-credential-HELPER get``; None if it has no credentials for the registry."""
    program = f"docker-credential-{helper}"
    path = process.find_program(program)
    if path is None:
        raise RegistryFailed(f"docker login stored its credentials with {program}, which is not on PATH", _HINT)
    try:
        done = process.run([path, "get"], stdin=key.encode(), check=False)
        if done.returncode != 0:
            # Message of a helper without an entry: credentials/error.go in docker/docker-credential-helpers.
            if "credentials not found" in done.stdout + done.stderr:
                return None
            raise RegistryFailed(f"{program} get fails for {key}: {(done.stderr or done.stdout).strip()[:200]}", _HINT)
        stored = parse_json(done.raw)
        username, secret = str(stored["Username"]), str(stored["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise RegistryFailed(f"{program} get prints no credentials for {key}", _HINT) from error
    return Credentials(identity_token=secret) if username == _TOKEN_USER else Credentials(username, secret)


def _malformed(path: Path, problem: str) -> RegistryFailed:
    return RegistryFailed(f"{path} is not a configuration file of docker login: {problem}", "correct it, or run docker login")


_HINT = "docker login stores credentials; without credHelpers and credsStore in ~/.docker/config.json no helper is used"
