"""Settings that a server publishes, as a digest: a restart with other flags has another one."""

from __future__ import annotations

from typing import Any

from sm120kit.bench import client
from sm120kit.bench._metrics import metrics_of
from sm120kit.core.digests import digest_of
from sm120kit.core.outside import parse_json
from sm120kit.core.urls import Endpoint
from sm120kit.engines import all_engines


def published(server: Endpoint) -> dict[str, str]:
    """``settings_sha256``, the digest of the settings that a server publishes; empty if it publishes none."""
    metrics = metrics_of(server)
    found = (engine.settings(_info(server, engine.info_path), metrics) for engine in all_engines())
    settings = next(filter(None, found), {})
    return {"settings_sha256": digest_of(settings)} if settings else {}


def _info(server: Endpoint, path: str) -> dict[str, Any]:
    import httpx2

    try:
        about = parse_json(client.get(server, path).content)
    except (httpx2.HTTPError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
