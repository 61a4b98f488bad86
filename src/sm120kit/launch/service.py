"""What is started: one container with everything that a configuration sets, whoever starts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm120kit.errors import NoModel
from sm120kit.recipe import EngineRecipe
from sm120kit.recipe.configuration import Configuration
from sm120kit.records import VerifiedImage
from sm120kit.workspace import Workspace, digest_of, disk_errors

PORT = 8000
"""The server's port in the container."""
MODEL = "/model"
"""Where the model folder is mounted, read-only."""
ROOT_HOME, HOME = "/root", "/home/sm120kit"
"""Homes in the container: of root, which configurations write, and of the user that our images have."""


@dataclass(frozen=True)
class Mount:
    """A directory of the host in the container."""

    source: Path
    target: str
    read_only: bool


@dataclass(frozen=True)
class Service:
    """A container to start. ``image`` is an id or ``repository@digest``, never a tag; ``port`` is the host's, on loopback.

    ``labels`` are those of a container that launch itself starts.
    """

    name: str
    image: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    mounts: tuple[Mount, ...]
    gpus: tuple[int, ...]
    shm_gib: int
    ipc_host: bool
    ulimits: dict[str, int]
    port: int
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the server answers on this host."""
        return f"http://127.0.0.1:{self.port}"


def make(
    wanted: Configuration,
    engine: EngineRecipe,
    image: VerifiedImage,
    image_name: str,
    model: Path,
    gpus: Sequence[tuple[int, str]],
    workspace: Workspace,
    port: int,
) -> Service:
    """Decide what is started, and make the folders of its caches. ``gpus`` are numbers and names.

    Raises:
        NoModel: files of the model's folder are links to places that would have to be mounted too.
    """
    root = _root(model)
    place_in = "/".join((MODEL, *model.resolve().relative_to(root).parts))
    place = caches(wanted, image, [name for _, name in gpus], workspace)
    home = ROOT_HOME if image.image.user.partition(":")[0] in ("", "0", "root") else HOME
    mounts = [Mount(root, MODEL, True)]
    for target in _cache_mounts(wanted, home):
        source = place / target.removeprefix(home).strip("/.").replace("/", "-")
        mounts.append(Mount(source, target, False))
        with disk_errors(source):
            source.mkdir(exist_ok=True)
            source.chmod(0o777)  # the container's user is another one; the folder above keeps everybody else out
    return Service(
        name=f"sm120kit-{wanted.name}".replace(".", "-")[:63].rstrip("-"),  # as long as a Kubernetes Service's may be
        image=image_name,
        argv=(*engine.serve, *arguments(wanted, engine, place_in)),
        environment=dict(wanted.environment),
        mounts=tuple(mounts),
        gpus=tuple(number for number, _ in gpus),
        shm_gib=wanted.container.shm_gib,
        ipc_host=wanted.container.ipc_host,
        ulimits=dict(wanted.container.ulimits),
        port=port,
    )


def arguments(wanted: Configuration, engine: EngineRecipe, model: str = MODEL) -> tuple[str, ...]:
    """What a configuration says after the engine's ``serve``. ``model`` is the model's folder in the container."""
    named = (model,) if engine.engine == "vllm" else ("--model-path", model)
    return (*named, "--served-model-name", wanted.model.repository, "--host", "0.0.0.0", "--port", str(PORT), *wanted.arguments)


def _cache_mounts(wanted: Configuration, home: str) -> tuple[str, ...]:
    """Where caches are mounted: what lies right below the home, whole. A folder made on the way to a mount would be root's."""
    below = f"{ROOT_HOME}/"
    targets = [
        f"{home}/{target.removeprefix(below).partition('/')[0]}" if target.startswith(below) else target
        for target in wanted.container.caches
    ]
    return tuple(dict.fromkeys(targets))


def _root(model: Path) -> Path:
    """What to mount so that links among the model's files lead somewhere: a download cache links to ``../../blobs``."""
    folder = model.resolve()
    targets = {path.resolve().parent for path in folder.iterdir() if path.is_symlink()}
    root = Path(os.path.commonpath([folder, *targets]))
    if root not in (folder, *list(folder.parents)[:2]):
        away = next(
            path for path in sorted(folder.iterdir()) if path.is_symlink() and not path.resolve().is_relative_to(folder)
        )
        raise NoModel(f"{away} is a link to {away.resolve()}, which the container does not see", "put the files in one folder")
    return root


def caches(wanted: Configuration, image: VerifiedImage, gpus: Sequence[str], workspace: Workspace) -> Path:
    """Where compiled and tuned kernels outlive the container: a folder per image, kind of GPUs and what decides kernels."""
    decides = {"engine", "model", "tensor_parallel", "expert_parallel", "arguments", "environment"}
    key = digest_of([image.image.content, sorted(gpus), wanted.model_dump(mode="json", include=decides)])
    place = workspace.root / "caches" / key[:16]
    with disk_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.parent.chmod(0o700)
        place.mkdir(exist_ok=True)
    return place
