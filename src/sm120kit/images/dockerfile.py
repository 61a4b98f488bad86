"""Write an image as the context of ``docker build``: its layers, and a Dockerfile that adds them and repeats its settings.

The files are those of the image, for builders and pipelines that take nothing but a Dockerfile. Instructions:
https://docs.docker.com/reference/dockerfile/.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm120kit.core.errors import BadInput, SystemRefused
from sm120kit.core.temporary import publish_directory
from sm120kit.images.image_records import start_settings
from sm120kit.images.loading import verify
from sm120kit.images.oci import Layout

_HINT = "sm120kit image export IMAGE FILE.tar writes it for docker load"
_DURATIONS = {"Interval": "interval", "Timeout": "timeout", "StartPeriod": "start-period"}


def export_dockerfile(layout: Layout, manifest: str, path: Path) -> None:
    """Write a new directory with a ``Dockerfile`` and a tar archive for each layer.

    Archives are hard links to the blobs of ``layout`` where the file system permits: they must not be changed.

    Raises:
        BadInput: a setting has a form that a Dockerfile cannot have.
        Mismatch: a blob of the layout differs from its digest. Nothing was written.
        SystemRefused: the directory exists, or cannot be written.
        ResourceUnavailable: the file system is full.
    """
    if path.exists():
        raise SystemRefused(f"{path} exists", "name a directory that does not exist yet")
    verify(layout, manifest)
    names = {f"{number:02}.tar": layer for number, layer in enumerate(layout.layers(manifest))}
    config = layout.config(manifest)
    platform = f"# docker build --platform {config['os']}/{config['architecture']} .\n"
    added = "".join(f"ADD {name} /\n" for name in names)
    settings = "".join(f"{line}\n" for line in _instructions(start_settings(config.get("config") or {})))
    with publish_directory(path) as directory:
        for name, layer in names.items():
            _link(layout.path(layer.digest), directory / name)
        (directory / "Dockerfile").write_text(f"{platform}FROM scratch\n{added}{settings}")


def _link(blob: Path, target: Path) -> None:
    """Write a hard link, or on another file system, or one without hard links, a copy."""
    try:
        os.link(blob, target)
    except OSError:
        shutil.copyfile(blob, target)


def _instructions(settings: Mapping[str, Any]) -> Iterator[str]:
    """The instructions for the settings of an image, by their names in Docker's API: those that sm120kit's images have."""
    if other := settings.keys() - {"Labels", "Env", "WorkingDir", "User", "Entrypoint", "Healthcheck"}:
        raise BadInput(f"an image of sm120kit has no setting {min(other)}", _HINT)
    for name, value in sorted(settings.get("Labels", {}).items()):
        yield f"LABEL {_quoted(name)}={_quoted(value)}"
    for entry in settings.get("Env", ()):
        name, _, value = entry.partition("=")
        yield f"ENV {name}={_quoted(value)}"
    if "WorkingDir" in settings:
        yield f"WORKDIR {_quoted(settings['WorkingDir'])[1:-1]}"
    if "User" in settings:
        yield f"USER {_quoted(settings['User'])[1:-1]}"
    if "Entrypoint" in settings:
        yield f"ENTRYPOINT {json.dumps(settings['Entrypoint'])}"
    if check := settings.get("Healthcheck"):
        options = [f"--{option}={check[key] // 10**6}ms" for key, option in _DURATIONS.items() if check.get(key)]
        options += [f"--retries={check['Retries']}"] if check.get("Retries") else []
        yield " ".join(["HEALTHCHECK", *options, "CMD", json.dumps(check["Test"][1:])])


def _quoted(value: str) -> str:
    """A value in double quotes that the builder does not expand."""
    if any(ord(character) < 32 for character in value):
        raise BadInput(f"a Dockerfile cannot have the setting {value[:80]!r}", _HINT)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'
