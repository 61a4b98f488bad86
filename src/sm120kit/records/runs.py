"""Servers that were launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A server that was launched. ``image`` is the content of a verified image and ``image_name`` what was started.

    ``build_id`` is the sha256 of the lock that the image was made from, as its label says, "" when there is none.
    ``environment`` are names of variables; their values are not kept. ``started`` is UTC, durations are in seconds, None before
    there is one. ``ending`` is "running", "stopped", "died" or "not healthy in time".
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
    ending: str = "running"
    exit_code: int | None = None
    build_id: str = ""
