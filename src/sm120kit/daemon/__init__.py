"""The one door to the container daemon: the only import of ``docker``."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.daemon import building
from sm120kit.daemon.asking import follow, patiently, told
from sm120kit.errors import DaemonUnreachable, NoSuchImage, ToolchainMissing
from sm120kit.records import Image, ImageContext
from sm120kit.workspace import digest_of

_STARTS_WITH = ("Cmd", "Entrypoint", "Env", "ExposedPorts", "Healthcheck", "Labels", "Shell", "StopSignal", "User", "Volumes")
_PATIENCE_SECONDS = 600

EMPTY_LAYER = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
"""Of 1024 zero bytes, a tar file without members: BuildKit makes one of WORKDIR, the classic builder none."""
DAEMONS_OWN = (".dockerenv", "dev", "etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf", "proc", "sys")
"""What a daemon puts into each container, over what the image has there: these paths, and whatever is below them."""


@dataclass(frozen=True)
class Ran:
    """What a container left: its exit code and both streams."""

    code: int
    stdout: str
    stderr: str


class Daemon:
    """A container daemon that answers, over the API that ``DOCKER_HOST`` or the default socket names."""

    def __init__(self) -> None:
        """Connect.

        Raises:
            DaemonUnreachable: nothing answers.
            ToolchainMissing: the Docker SDK is not installed.
        """
        try:
            import docker
        except ModuleNotFoundError as error:
            raise ToolchainMissing("the Docker SDK for Python is not installed", "pip install 'sm120kit[docker]'") from error
        with told("connecting"):
            self._client = docker.from_env(timeout=_PATIENCE_SECONDS)  # which asks the daemon for its version

    def inspect(self, reference: str) -> Image | None:
        """An image by id, tag or digest, or None when it is not here."""
        from docker.errors import ImageNotFound

        with told(f"inspecting {reference}"):
            try:
                found = self._client.api.inspect_image(reference)
            except ImageNotFound:
                return None
        config = found["Config"]
        layers = tuple(found["RootFS"].get("Layers") or ())
        starts = _settings(config)
        return Image(
            id=found["Id"],
            content=digest_of([[one for one in layers if one != EMPTY_LAYER], found["Os"], found["Architecture"], starts]),
            platform=f"{found['Os']}/{found['Architecture']}",
            layers=layers,
            labels=config.get("Labels") or {},
            user=config.get("User") or "",
            bytes=found["Size"],
        )

    def base_of(self, image: Image) -> Image | None:
        """The base that an image's labels name, or None when they name none or it is not here."""
        digest, name = (image.labels.get(f"org.opencontainers.image.base.{what}", "") for what in ("digest", "name"))
        return self.inspect(f"{name}@{digest}" if name else digest) if digest else None

    def settings(self, reference: str) -> dict[str, Any]:
        """The settings with which a container of an image starts, by Docker's names for them.

        Raises:
            NoSuchImage: it is not here.
        """
        with told(f"inspecting {reference}"):
            return _settings(self._client.api.inspect_image(reference)["Config"])

    def find(self, reference: str) -> Image:
        """An image that has to be here.

        Raises:
            NoSuchImage: it is not.
        """
        found = self.inspect(reference)
        if found is None:
            raise NoSuchImage(f"there is no image {reference}", "sm120kit image makes it, sm120kit pull fetches it")
        return found

    def history(self, reference: str) -> tuple[str, ...]:
        """The commands that an image says it was made with, newest first."""
        with told(f"inspecting {reference}"):
            return tuple(step["CreatedBy"] for step in self._client.api.history(reference))

    def build(self, context: ImageContext, network: str, tell: Callable[[str], None]) -> str:
        """Build the ``Dockerfile`` of a context and return the image's id.

        With BuildKit where the ``docker`` program can drive it (buildx, or a version older than 23), else with the classic
        builder: the same content. Buildx attaches provenance and SBOM where the daemon can hold them, that is with the
        containerd image store. BuildKit cannot name a base by the id of a local image; that always takes the classic builder.

        Raises:
            ImageBuildFailed: a step failed.
            DaemonUnreachable, NotEnoughDisk: as they say.
        """
        return building.build(self._client, context, network, tell)

    def run(self, image: str, argv: Sequence[str], files: Mapping[str, bytes], *, network: str = "none") -> Ran:
        """Run a program in a container of ``image`` without its entrypoint; ``files`` are put below ``/tmp`` first.

        The container has no network unless asked, no capabilities, and is gone afterwards.
        """
        with self._container(image, argv, network) as container:
            with told(f"starting {image}"):
                container.put_archive("/tmp", _packed(files))
                container.start()
                code = container.wait()["StatusCode"]
                out, err = (container.logs(stdout=first, stderr=not first).decode(errors="replace") for first in (True, False))
            return Ran(int(code), out, err)

    def fetch(self, image: str, path: str, into: Path) -> bool:
        """Unpack a directory of an image below ``into``; false when the image does not have it."""
        from docker.errors import NotFound

        with self._container(image, ["true"], "none") as container, told(f"reading {image}"):
            try:
                pieces, _ = container.get_archive(path)
            except NotFound:
                return False
            with tempfile.TemporaryFile() as packed:
                for piece in pieces:
                    packed.write(piece)
                packed.seek(0)
                with tarfile.open(fileobj=packed) as archive:
                    archive.extractall(into, filter="data")
        return True

    @contextlib.contextmanager
    def filesystem(self, image: str) -> Iterator[tarfile.TarFile]:
        """All files of an image, as a tar stream that can be read once, front to back; nothing is written to disk.

        What the daemon itself puts into a container is among them, see :data:`DAEMONS_OWN`.

        Raises:
            DaemonUnreachable: the stream ended too early.
        """
        with self._container(image, ["true"], "none") as container, told(f"reading {image}"):
            try:
                stream = io.BufferedReader(_Stream(container.export()), 2**20)
                with tarfile.open(fileobj=stream, mode="r|", bufsize=2**20) as archive:
                    yield archive
            except tarfile.ReadError as error:
                raise DaemonUnreachable(f"reading {image}: the daemon's answer ends too early: {error}", "ask again") from error

    @contextlib.contextmanager
    def _container(self, image: str, argv: Sequence[str], network: str) -> Iterator[Any]:
        with told(f"starting {image}"):
            container = self._client.containers.create(
                image,
                list(argv[1:]),
                entrypoint=[argv[0]],
                network_mode=network,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
            )
        try:
            yield container
        finally:
            with contextlib.suppress(Exception):  # the daemon may be gone, and then so is the container
                container.remove(force=True)

    def tag(self, image: str, reference: str) -> None:
        """Give an image a name. One that had it loses it."""
        repository, _, tag = reference.rpartition(":")
        with told(f"tagging {reference}"):
            self._client.api.tag(image, repository, tag)

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last one."""
        from docker.errors import ImageNotFound

        with told(f"removing {reference}"), contextlib.suppress(ImageNotFound):
            self._client.api.remove_image(reference)

    def in_registry(self, reference: str) -> str | None:
        """The digest under which a registry has ``repository:tag`` or ``repository@digest``, or None.

        Raises:
            RegistryFailed: it does not answer, or refuses.
        """
        from docker.errors import APIError, NotFound

        def ask() -> str | None:
            try:
                return str(self._client.images.get_registry_data(reference).id)
            except NotFound:
                return None
            except APIError as error:
                if "manifest unknown" in str(error).lower():
                    return None
                raise

        return patiently(f"asking for {reference}", ask)

    def push(self, reference: str, tell: Callable[[str], None]) -> str:
        """Push ``repository:tag`` and return the digest that the registry gave it.

        Raises:
            RegistryFailed: it does not answer, or refuses.
        """
        repository, _, tag = reference.rpartition(":")

        def push() -> str:
            digest = ""
            for answer in self._client.api.push(repository, tag=tag, stream=True, decode=True):
                follow(answer, tell)
                digest = answer.get("aux", {}).get("Digest", digest)
            return digest

        return patiently(f"pushing {reference}", push)

    def pull(self, reference: str, tell: Callable[[str], None]) -> Image:
        """Pull ``repository@digest``.

        Raises:
            NoSuchImage: the registry does not have it.
            HashMismatch: it delivers something else.
            RegistryFailed: it does not answer, or refuses.
        """

        def pull() -> None:
            for answer in self._client.api.pull(reference, stream=True, decode=True):
                follow(answer, tell)

        patiently(f"pulling {reference}", pull)
        found = self.inspect(reference)
        if found is None:
            raise DaemonUnreachable(f"the daemon pulled {reference} and does not have it", "look at its log")
        return found


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in (*_STARTS_WITH, "WorkingDir") if config.get(key)}


class _Stream(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _packed(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in _with_directories(files.items()):
            member = tarfile.TarInfo(name)
            member.mode, member.size = (0o755, 0) if content is None else (0o644, len(content))
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            archive.addfile(member, None if content is None else io.BytesIO(content))
    return packed.getvalue()


def _with_directories(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes | None]]:
    seen: set[str] = set()
    for name, content in files:
        for parent in reversed([str(parent) for parent in Path(name).parents if str(parent) != "."]):
            if parent not in seen:
                seen.add(parent)
                yield parent, None
        yield name, content
