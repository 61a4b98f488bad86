"""Read the package index settings of the user's pip and uv."""

import ast
import contextlib
import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from sm120kit.core.outside import number
from sm120kit.core.process import run

MAX_TIMEOUT = 86400.0
"""Longest timeout in seconds; operating systems refuse very large ones."""


@dataclass(frozen=True)
class Settings:
    """Package index settings of pip and uv. ``index`` is empty for the default index; ``timeout`` is in seconds."""

    index: tuple[str, ...] = ()
    extra_index: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    certificates: str = ""
    timeout: float = 30.0


def read_settings() -> Settings:
    """Settings of pip (configuration files and ``PIP_*``) and of uv (``UV_*``).

    As in pip itself, a variable takes precedence over the same setting in a file.
    """
    return settings_from(_options(frozenset(os.environ.items())), os.environ)


def settings_from(pip: Mapping[str, str], env: Mapping[str, str]) -> Settings:
    """Settings from the names and values of ``pip config list``, and from the environment."""

    def option(name: str) -> str:
        for section in (":env:", "install", "download", "global"):
            if f"{section}.{name}" in pip:
                return pip[f"{section}.{name}"]
        return env.get(f"PIP_{name.upper().replace('-', '_')}", "")

    def split(*values: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(word for value in values for word in value.split()))

    named = [
        re.sub(r"^[\w-]+=(?=\S+://|[./])", "", word) for word in split(env.get("UV_DEFAULT_INDEX", ""), env.get("UV_INDEX", ""))
    ]
    default_count = len(split(env.get("UV_DEFAULT_INDEX", "")))
    certificates = next(
        filter(
            None,
            [option("cert"), *(env.get(name, "") for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))],
        ),
        "",
    )
    return Settings(
        index=split(option("index-url"), *named[:default_count], env.get("UV_INDEX_URL", "")),
        extra_index=split(option("extra-index-url"), *named[default_count:], env.get("UV_EXTRA_INDEX_URL", "")),
        find_links=split(option("find-links"), env.get("UV_FIND_LINKS", "").replace(",", " ")),
        no_index=any(value.lower() in ("1", "true", "yes", "on") for value in (option("no-index"), env.get("UV_NO_INDEX", ""))),
        trusted_hosts=split(option("trusted-host"), env.get("UV_INSECURE_HOST", "")),
        certificates=certificates,
        timeout=_seconds(option("default-timeout") or option("timeout")),
    )


def _seconds(text: str) -> float:
    """The timeout that a setting states; the default if it states none that can be waited for, as pip itself refuses it."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := number(text.strip())) <= MAX_TIMEOUT:
            return seconds
    return Settings.timeout


@functools.cache
def _options(environment: frozenset[tuple[str, str]]) -> dict[str, str]:
    """The output of ``pip config list``, queried once for each ``environment``.

    Empty where this Python has no pip, so that only ``PIP_*`` variables apply.
    """
    listed = run([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"], check=False)
    settings = {}
    for line in listed.stdout.splitlines() if listed.returncode == 0 else []:
        name, equals, value = line.partition("=")
        if equals:
            with contextlib.suppress(ValueError, SyntaxError):
                settings[name] = str(ast.literal_eval(value))
    return settings
