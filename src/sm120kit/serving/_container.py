"""Decide which container serves a configuration: image, command, mounts, limits. :mod:`._render` writes it for each runtime."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import chain
from pathlib import Path

from sm120kit.core.digests import digest_of
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import NotFound
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.engines import ApiKey, Node
from sm120kit.images.image_inputs import server_program
from sm120kit.images.image_records import Image
from sm120kit.recipes import EngineRecipe
from sm120kit.recipes.arguments import HOME, MODEL_DIRECTORY, PORT, ROOT_HOME, serve_arguments
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import unified_memory

LOOPBACK = "127.0.0.1"
RDMA_DEVICES = "/dev/infiniband"
"""Directory of the devices through which programs transfer data by RDMA (linux, drivers/infiniband)."""
IMAGE_USER = "1000:1000"
"""The user in the images of sm120kit."""
SHARED_BLOBS_MARKER = ".huggingface-shared-blobs"
"""File that marks the directory of blobs that models share. Source: ``huggingface_hub.utils._shared_blobs``."""
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
    for these directories and the writable mounts. ``key`` is the API key that a user gave. A ``node`` of a server that spans
    several machines has the host's network. ``memory`` is the limit of its memory in bytes where GPUs share the host's, with a
    guard that stops the server before the system has none; 0 elsewhere.
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
    api_key: ApiKey = field(default_factory=lambda: ApiKey("SM120KIT_API_KEY"))
    key: str = field(default="", repr=False)
    node: Node | None = None
    memory: int = 0

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
        """``argv``, through a shell for a guard, and for an API key that the engine takes only as an argument."""
        guard = unified_memory.guarded() if self.memory else ""
        key = f' {self.api_key.arguments[0]} "${self.api_key.variable}"' if self.key and self.api_key.arguments else ""
        if not (guard or key):
            return self.argv
        return ("/bin/sh", "-c", f'{guard}exec "$@"{key}', "sh", *self.argv)

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
    among those that the server spans, None for this one alone. ``memory`` is the limit of :class:`Service`.
    """

    gpus: Sequence[tuple[int, str]]
    port: int
    workspace: Workspace
    listen: str = LOOPBACK
    key: str = field(default="", repr=False)
    node: Node | None = None
    memory: int = 0


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
        NotFound: a file in the model folder is a link to what is not mounted.
    """
    mounts = list(_model_mounts(model, planned=planned))
    cache = cache_directory(configuration, image, [name for _, name in placement.gpus], placement.workspace)
    home = ROOT_HOME if image.user.partition(":")[0] in ("", "0", "root") else HOME
    for target in _cache_targets(configuration, home):
        source = cache / target.removeprefix(home).strip("/.").replace("/", "-")
        mounts.append(Mount(source, target, False))
        with disk_errors(source):
            source.mkdir(exist_ok=True)
            source.chmod(0o777)  # the container's user differs from this one; the parent directory is closed to everybody else
    mounts += _given_mounts(configuration, planned=planned)
    program = server_program(engine)
    scratch = (Scratch("/tmp", TEMPORARY_GIB), Scratch(home, HOME_GIB))
    node = placement.node
    # On the host's network the server must listen where the port would be published; only the first node serves.
    listen = LOOPBACK if node and node.rank else placement.listen
    address = (listen, placement.port) if node else ("0.0.0.0", PORT)
    return Service(
        name=f"sm120kit-{configuration.name}".replace(".", "-")[:63].rstrip("-"),
        image=image_name,
        argv=(*program, *serve_arguments(configuration, mounts[0].target, address, node)),
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
        memory=placement.memory,
        scratch=() if configuration.container.writable_root else scratch,
        api_key=engine.served_by.api_key,
    )


def _given_mounts(configuration: Configuration, *, planned: bool) -> list[Mount]:
    """The mounts that a configuration states."""
    mounts = [Mount(Path(path).expanduser(), target, True) for target, path in configuration.container.mounts.items()]
    if absent := [mount.source for mount in mounts if not planned and not mount.source.exists()]:
        raise NotFound(f"{configuration.name}: container.mounts: {absent[0]} does not exist", "correct it in the configuration")
    return mounts


def api_key(configuration: Configuration) -> str:
    """The API key in a configuration's arguments or environment, "" without one."""
    key = configuration.served_by.api_key
    of_environment = "" if key.arguments else configuration.environment.get(key.variable, "")
    return configuration.option("--api-key") or of_environment


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
        (entry.reason for entry in configuration.deviations if flag in entry.field),
        f"as published ({configuration.original})" if configuration.original else "the configuration's arguments",
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
    """The folder of a model, and for a snapshot of a download cache the directories of the blobs that its files link to.

    A cache has links: ``models--A--B/snapshots/COMMIT/FILE`` to ``../../blobs/DIGEST``, which can be a link to a blob that
    models share, ``../../blobs/XX/HASH``. Source: ``huggingface_hub.utils._shared_blobs``. Small files are not shared, so that
    those of a ``planned`` model do not show where its shards will be. Below ``MODEL_DIRECTORY`` and ``/`` these directories are
    at the same places to each other as on the host.
    """
    folder = model.resolve()
    repository = folder.parents[1] if folder.parent.name == "snapshots" else Path()
    if not repository.name.startswith("models--"):
        own, blobs = Mount(folder, MODEL_DIRECTORY, True), []
    else:
        own = Mount(folder, f"{MODEL_DIRECTORY}/snapshots/{folder.name}", True)
        shared = repository.parent / "blobs"
        blobs = [Mount(repository / "blobs", f"{MODEL_DIRECTORY}/blobs", True)]
        blobs += [Mount(shared, "/blobs", True)] if planned or (shared / SHARED_BLOBS_MARKER).is_file() else []
    if planned:
        return (own, *blobs)
    paths = (Path(parent, name) for parent, *names in os.walk(folder) for name in chain(*names))
    directories = [mount.source for mount in (own, *blobs)]
    targets = [_mounted_target(path, directories) for path in paths if path.is_symlink()]
    # A blob that models share is reached through a link in the blobs of this one.
    ends = [any(target.is_relative_to(mount.source) for target in targets) for mount in blobs]
    return (own, *(mount for number, mount in enumerate(blobs) if any(ends[number:])))


def _mounted_target(link: Path, directories: Sequence[Path]) -> Path:
    """The file that a link leads to, in the container too: it is in one of the directories that are mounted."""
    text = link.readlink()
    targets = [Path(os.path.normpath(link.parent / text))]
    with suppress(OSError, RuntimeError):  # a loop
        targets.append(link.resolve())
    inside = [target for target in targets if any(target.is_relative_to(directory) for directory in directories)]
    if text.is_absolute() or len(inside) < 2:
        raise NotFound(
            f"{link} links to {targets[-1]}, which the container does not have: only {directories[0]} is mounted",
            "copy the file to the place of the link",
        )
    return targets[-1]


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
