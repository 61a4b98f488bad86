"""Credentials of registries as ``docker login`` stores them, read by the Docker SDK: in a file or with a credential helper.

https://docs.docker.com/reference/cli/docker/login/#credential-stores
"""

import base64
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120kit.core.errors import RegistryFailed
from sm120kit.core.outside import parse_json, read_found

DOCKER_HUB = "docker.io"

_HINT = "docker login stores credentials; without credHelpers and credsStore in ~/.docker/config.json no helper is used"


@dataclass(frozen=True)
class Credentials:
    """User name and password of a registry."""

    username: str = field(repr=False)
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of a header ``Authorization``."""
        return f"Basic {base64.b64encode(f'{self.username}:{self.password}'.encode()).decode()}"


def stored_credentials(registry: str) -> Credentials | None:
    """Look up the credentials of a registry, ``HOST[:PORT]``; None if ``docker login`` stored none, or without the SDK.

    Raises:
        RegistryFailed: the configuration file is malformed, or a credential helper fails.
    """
    directory = os.environ.get("DOCKER_CONFIG")
    path = (Path(directory) if directory else Path.home() / ".docker") / "config.json"
    try:
        config = parse_json(read_found(path))
        if not isinstance(config, dict):
            raise ValueError("no object")
        stored = _stored_login(config, registry)
        if stored.get("IdentityToken"):
            raise ValueError("an identity token is not read: docker login with a user name and a password or token")
        keys = ("Username", "Password")
        found = Credentials(*(str(stored.get(key) or stored.get(key.lower()) or "") for key in keys))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # the SDK checks neither the file nor what a helper prints
        raise RegistryFailed(
            f"{path} of docker login has no credentials for {registry} that can be used: {str(error)[:300] or error!r}", _HINT
        ) from error
    return found if found.username else None


def _stored_login(config: dict[str, Any], registry: str) -> dict[str, Any]:
    """What ``docker login`` stored for a registry, with the keys of the SDK; empty without an entry, or without the SDK."""
    try:
        from docker.auth import AuthConfig
    except ModuleNotFoundError:
        return {}
    with warnings.catch_warnings(action="ignore"):  # about a helper that is not on PATH, which raises as well
        return AuthConfig.load_config(None, config).resolve_authconfig(registry) or {}
