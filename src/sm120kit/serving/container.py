"""Decide which container serves a configuration: image, command, mounts, limits. :mod:`render` writes it for each runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from sm120kit.core.errors import NoModel
from sm120kit.core.state import Workspace, digest_of, disk_errors, mark_used
from sm120kit.engines import ApiKey, Node
from sm120kit.images.context import entrypoint
from sm120kit.images.records import Image
from sm120kit.recipes import EngineRecipe
from sm120kit.recipes.arguments import MODEL_DIRECTORY, PORT, serve_arguments
from sm120kit.recipes.configurations import Configuration

LOOPBACK = "127.0.0.1"
RDMA_DEVICES = "/dev/infiniband"
"""Directory of the devices through which programs transfer data by RDMA (linux, drivers/infiniband)."""
IMAGE_USER = "1000:1000"
"""The user in the images of sm120kit."""
ROOT_HOME, HOME = "/root", "/home/sm120kit"
"""Homes in the container: of root, the one that configurations name, and of the user in the images of sm120kit."""
TEMPORARY_GIB, HOME_GIB = 16, 2
"""Sizes of two tmpfs mounts, which take memory as they fill: /tmp, for compilers and torch; the home without its caches.

vLLM 0.19.1 and SGLang 0.5.11 write below the home (``~/.cache``, ``~/.config``, ``~/.triton``), ``/tmp`` and ``/dev/shm``, and
load and execute files in ``/tmp`` (``pynccl_allocator.py``, ``numa_utils.py``). Source: their ``envs.py`` and ``environ.py``.
"""


@dataclass(frozen=True)
class Mount:
    """A bind mount of a host directory."""

    source: Path
    target: str
    read_only: bool


@dataclass(frozen=True)
class Scratch:
    """A tmpfs of at most ``gib`` GiB, empty in each new container."""

    target: str
    gib: int


@dataclass(frozen=True)
class Service:
    """A container to start. ``image`` is an id or ``repository@digest``, never a tag; ``port`` is the host's, on the
    address ``listen``.

    ``labels`` are set only on containers that launch itself starts. With ``scratch`` the root file system is read-only, except
    for these directories and the writable mounts. ``user`` is the image's ``UID:GID``, "" if the image has none or names it.
    ``key`` is the API key that a user gave; pods have one from a Secret instead. A ``node`` of a server that spans several
    machines has the host's network.
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
    listen: str = LOOPBACK
    labels: dict[str, str] = field(default_factory=dict)
    scratch: tuple[Scratch, ...] = ()
    user: str = ""
    api_key: ApiKey = field(default_factory=lambda: ApiKey("SM120KIT_API_KEY"))
    key: str = field(default="", repr=False)
    node: Node | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of the host, or directories of them, that are not GPUs."""
        return (RDMA_DEVICES,) if self.node and self.node.rdma else ()

    @property
    def variables(self) -> dict[str, str]:
        """The environment with the API key, if there is one."""
        return self.environment | ({self.api_key.variable: self.key} if self.key else {})

    @property
    def command(self) -> tuple[str, ...]:
        """``argv``, through a shell if the engine takes its API key only as an argument, which docker's own lacks."""
        if not (self.key and self.api_key.arguments):
            return self.argv
        option, _ = self.api_key.arguments
        return ("/bin/sh", "-c", f'exec "$@" {option} "${self.api_key.variable}"', "sh", *self.argv)

    @property
    def url(self) -> str:
        """Root of the server on this host."""
        address = ip_address(self.listen)
        if address.is_unspecified:
            address = ip_address("::1" if address.version == 6 else LOOPBACK)
        return f"http://{_host(address)}:{self.port}"

    @property
    def published(self) -> str:
        """The port as Docker publishes it: ``ADDRESS:PORT:PORT in the container``."""
        return f"{_host(ip_address(self.listen))}:{self.port}:{PORT}"


def _host(address: IPv4Address | IPv6Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)


@dataclass(frozen=True)
class Placement:
    """Where a server runs on this host: ``gpus`` as (number, name), its address, ``workspace`` for its caches.

    ``key`` is the API key that requests must have, "" for that of the configuration, if it has one. ``node`` is this host
    among those that the server spans, None for this one alone.
    """

    gpus: Sequence[tuple[int, str]]
    port: int
    workspace: Workspace
    listen: str = LOOPBACK
    key: str = field(default="", repr=False)
    node: Node | None = None


def make_service(
    configuration: Configuration,
    engine: EngineRecipe,
    image: Image,
    image_name: str,
    model: Path,
    placement: Placement,
    *,
    planned: bool = False,
) -> Service:
    """The container of a configuration. Creates its cache directories on the host.

    With ``planned``, the model is not yet, or not completely, where a download cache has it.

    Raises:
        NoModel: files in the model folder are links to directories outside what can be mounted.
    """
    mounts = list(_model_mounts(model, planned=planned))
    path_in_container = "/".join((MODEL_DIRECTORY, *model.resolve().relative_to(mounts[0].source).parts))
    cache = cache_directory(configuration, image, [name for _, name in placement.gpus], placement.workspace)
    home = ROOT_HOME if image.user.partition(":")[0] in ("", "0", "root") else HOME
    for target in _cache_targets(configuration, home):
        source = cache / target.removeprefix(home).strip("/.").replace("/", "-")
        mounts.append(Mount(source, target, False))
        with disk_errors(source):
            source.mkdir(exist_ok=True)
            source.chmod(0o777)  # the container's user differs from this one; the parent directory is closed to everybody else
    # The entrypoint adds the compiled kernels of b12x to its cache, which is a mount.
    program = entrypoint(engine.serve) if engine.b12x else engine.serve
    scratch = (Scratch("/tmp", TEMPORARY_GIB), Scratch(home, HOME_GIB))
    node = placement.node
    # On the host's network the server must listen where the port would be published; only the first node serves.
    listen = LOOPBACK if node and node.rank else placement.listen
    address = (listen, placement.port) if node else ("0.0.0.0", PORT)
    return Service(
        name=f"sm120kit-{configuration.name}".replace(".", "-")[:63].rstrip("-"),  # the longest name of a Kubernetes Service
        image=image_name,
        argv=(*program, *serve_arguments(configuration, path_in_container, address, node)),
        environment=configuration.environment | (engine.served_by.node_environment(node) if node else {}),
        mounts=tuple(mounts),
        gpus=tuple(number for number, _ in placement.gpus),
        shm_gib=configuration.container.shm_gib,
        ipc_host=configuration.container.ipc_host,
        # Memory for RDMA is locked.
        ulimits=configuration.container.ulimits | ({"memlock": -1} if node and node.rdma else {}),
        port=placement.port,
        listen=listen,
        key="" if node and node.rank else placement.key,
        node=node,
        scratch=() if configuration.container.writable_root else scratch,
        user=image.user if re.fullmatch(r"[0-9]+(:[0-9]+)?", image.user) else "",
        api_key=engine.served_by.api_key,
    )


def api_key(configuration: Configuration) -> str:
    """The API key in a configuration's arguments or environment, "" without one."""
    variable = configuration.served_by.api_key.variable
    return configuration.option("--api-key") or configuration.environment.get(variable, "")


def risks(configuration: Configuration) -> tuple[str, ...]:
    """Privileges that a configuration grants to the container or the model, one line each with its reason."""
    privileges = (
        (
            configuration.container.ipc_host,
            "--ipc=host",
            "the container shares memory and semaphores with all processes of the host",
        ),
        (
            "--trust-remote-code" in configuration.words,
            "--trust-remote-code",
            "Python code of the checkpoint runs in the container",
        ),
        (
            configuration.hardware.nodes > 1,
            "--network=host",
            "the machines exchange data unencrypted, and who reaches their ports can run code in the containers",
        ),
        (configuration.container.writable_root, "writable_root", "the container can change its programs while it runs"),
    )
    return tuple(f"{flag}: {effect}; reason: {_reason(configuration, flag)}" for granted, flag, effect in privileges if granted)


def _reason(configuration: Configuration, flag: str) -> str:
    return next(
        (entry.reason for entry in configuration.ours if flag in entry.field), f"as published ({configuration.original})"
    )


def _cache_targets(configuration: Configuration, home: str) -> tuple[str, ...]:
    """Mount points of the caches. A path below the home is mounted from its first directory on.

    A parent directory that the runtime creates for a mount point belongs to root.
    """
    below = f"{ROOT_HOME}/"
    targets = [
        f"{home}/{target.removeprefix(below).partition('/')[0]}" if target.startswith(below) else target
        for target in configuration.container.caches
    ]
    return tuple(dict.fromkeys(targets))


def _model_mounts(model: Path, *, planned: bool = False) -> tuple[Mount, ...]:
    """The directory of the model, and the one that its files are in.

    A download cache has links: ``models--A--B/snapshots/COMMIT/FILE`` to ``../../blobs/DIGEST``, which can be a link to the
    blobs that all models share, ``../../blobs/XX/HASH``. Source: ``huggingface_hub.utils._shared_blobs``. Small files are not
    shared, so that those of a ``planned`` model do not show where its shards will be.
    """
    folder = model.resolve()
    if planned:
        return (Mount(folder.parents[1], MODEL_DIRECTORY, True), Mount(folder.parents[2] / "blobs", "/blobs", True))
    files = sorted(folder.iterdir())
    targets = {Path(os.path.normpath(path.parent / path.readlink())).parent for path in files if path.is_symlink()}
    root = Path(os.path.commonpath([folder, *targets]))
    shared = root.parent / "blobs"
    mountable = (root, shared) if root in (folder, *list(folder.parents)[:2]) else (folder,)
    for path in files:
        if not any(path.resolve().is_relative_to(directory) for directory in mountable):
            raise NoModel(
                f"{path} links to {path.resolve()}, outside the directory that is mounted", "put the files in one folder"
            )
    mounts = [Mount(root, MODEL_DIRECTORY, True)]
    if any(path.resolve().is_relative_to(shared) for path in files):
        mounts.append(Mount(shared, "/blobs", True))  # ../../blobs from /model/blobs
    return tuple(mounts)


def cache_directory(configuration: Configuration, image: Image, gpus: Sequence[str], workspace: Workspace) -> Path:
    """``<state>/caches/<key>/``, where compiled and tuned kernels outlive the container.

    The key covers the image's content, the GPUs' names, and the part of the configuration that decides which kernels run.
    """
    decides = {"engine", "model", "tensor_parallel", "expert_parallel", "arguments", "environment"}
    key = digest_of([image.content, sorted(gpus), configuration.model_dump(mode="json", include=decides)])
    directory = workspace.root / "caches" / key[:16]
    with disk_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.chmod(0o700)
        directory.mkdir(exist_ok=True)
    mark_used(directory)
    return directory
