"""What the user told pip and uv about indexes, so that nobody has to tell it twice."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from sm120kit.process import run


@dataclass(frozen=True)
class Settings:
    """What the user told pip and uv about indexes. ``index`` is empty when nothing but the default one is meant."""

    index: tuple[str, ...] = ()
    extra_index: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    certificates: str = ""
    timeout: float = 30.0


def read_settings() -> Settings:
    """Settings of pip (configuration files and ``PIP_*``) and of uv (``UV_*``).

    A name that pip takes from the environment replaces the one in its files, as with pip itself.
    """
    return settings_from(_pip_settings(), os.environ)


def settings_from(pip: Mapping[str, str], env: Mapping[str, str]) -> Settings:
    """Settings from ``pip config list`` as names and values, and the environment."""

    def pips(name: str) -> str:
        for section in (":env:", "install", "download", "global"):
            if f"{section}.{name}" in pip:
                return pip[f"{section}.{name}"]
        return env.get(f"PIP_{name.upper().replace('-', '_')}", "")

    def words(*values: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(word for value in values for word in value.split()))

    named = [
        re.sub(r"^[\w-]+=(?=\S+://|[./])", "", word) for word in words(env.get("UV_DEFAULT_INDEX", ""), env.get("UV_INDEX", ""))
    ]
    default_count = len(words(env.get("UV_DEFAULT_INDEX", "")))
    certificates = next(
        filter(
            None, [pips("cert"), *(env.get(name, "") for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))]
        ),
        "",
    )
    return Settings(
        index=words(pips("index-url"), *named[:default_count], env.get("UV_INDEX_URL", "")),
        extra_index=words(pips("extra-index-url"), *named[default_count:], env.get("UV_EXTRA_INDEX_URL", "")),
        find_links=words(pips("find-links"), env.get("UV_FIND_LINKS", "").replace(",", " ")),
        no_index=any(value.lower() in ("1", "true", "yes", "on") for value in (pips("no-index"), env.get("UV_NO_INDEX", ""))),
        trusted_hosts=words(pips("trusted-host"), env.get("UV_INSECURE_HOST", "")),
        certificates=certificates,
        timeout=float(pips("default-timeout") or pips("timeout") or Settings.timeout),
    )


def _pip_settings() -> dict[str, str]:
    """What ``pip config list`` says; without a pip beside this Python its files are unknown, and ``PIP_*`` still counts."""
    asked = run([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"], check=False)
    settings = {}
    for line in asked.stdout.splitlines() if asked.returncode == 0 else []:
        name, equals, value = line.partition("=")
        if equals:
            with contextlib.suppress(ValueError, SyntaxError):
                settings[name] = str(ast.literal_eval(value))
    return settings
