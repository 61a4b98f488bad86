"""The container daemon: images, containers and registries. The only package that imports ``docker``."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm120kit.core.archives import ChunkReader
from sm120kit.core.errors import DaemonUnreachable, NotFound, RequirementMissing
from sm120kit.core.outside import parse_json
from sm120kit.images.docker.calls import daemon_call, registry_call, report_status, require_disk_space
from sm120kit.images.docker.unpacking import unpack
from sm120kit.images.image_records import ContainerResult, Image, image_content, start_settings

_TIMEOUT_SECONDS = 600


class Daemon:
    """A connection to the daemon that ``docker`` uses: at ``DOCKER_HOST``, or of its context, as of rootless docker."""

    def __init__(self) -> None:
        """Connect.

        Raises:
            DaemonUnreachable: the daemon does not respond, or the context does not exist or is damaged.
            RequirementMissing: the Docker SDK is not installed.
        """
        try:
            import docker
        except ModuleNotFoundError as error:
            raise RequirementMissing("the Docker SDK for Python is not installed", "pip install 'sm120kit[docker]'") from error
        _require_context()
        with daemon_call("connecting"):
            self._client = docker.from_env(timeout=_TIMEOUT_SECONDS)  # queries the daemon's version

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if the daemon does not have it."""
        from docker.errors import ImageNotFound

        with daemon_call(f"inspecting {reference}"):
            try:
                image = self._client.api.inspect_image(reference)
            except ImageNotFound:
                return None
        config = image["Config"]
        layers = tuple(image["RootFS"].get("Layers") or ())
        return Image(
            id=image["Id"],
            content=image_content(layers, image["Os"], image["Architecture"], config),
            platform=f"{image['Os']}/{image['Architecture']}",
            layers=layers,
            labels=config.get("Labels") or {},
            user=config.get("User") or "",
            bytes=image["Size"],
        )

    def images(self, label: str) -> list[tuple[Image, tuple[str, ...]]]:
        """All images with a label, each with its tags."""
        with daemon_call("listing images"):
            listed = self._client.api.images(filters={"label": label})
        tags = {
            entry["Id"]: tuple(sorted(tag for tag in entry["RepoTags"] or () if tag != "<none>:<none>")) for entry in listed
        }
        images = ((self.inspect(id_), names) for id_, names in tags.items())
        return [(image, names) for image, names in images if image is not None]

    def base_of(self, image: Image) -> Image | None:
        """The base in an image's labels; None if they have none or the daemon does not have it."""
        digest, name = (image.labels.get(f"org.opencontainers.image.base.{key}", "") for key in ("digest", "name"))
        return self.inspect(f"{name}@{digest}" if name else digest) if digest else None

    def settings(self, reference: str) -> dict[str, Any]:
        """The settings with which a container of an image starts, by their names in Docker's API.

        Raises:
            NotFound: the daemon does not have it.
        """
        with daemon_call(f"inspecting {reference}"):
            return start_settings(self._client.api.inspect_image(reference)["Config"])

    def find(self, reference: str) -> Image:
        """Look up an image that must exist.

        Raises:
            NotFound: the daemon does not have it.
        """
        image = self.inspect(reference)
        if image is None:
            raise NotFound(f"there is no image {reference}", "sm120kit build builds it, sm120kit pull fetches it")
        return image

    def history(self, reference: str) -> tuple[str, ...]:
        """The build commands in the history of an image, newest first."""
        with daemon_call(f"inspecting {reference}"):
            return tuple(step["CreatedBy"] for step in self._client.api.history(reference))

    def run(self, image: str, argv: Sequence[str], files: Mapping[str, bytes], *, network: str = "none") -> ContainerResult:
        """Run a program in a new container of ``image`` in place of its entrypoint; ``files`` are copied below ``/tmp`` first.

        The container has no capabilities, by default no network, and is removed afterwards.
        """
        with self._container(image, argv, network) as container:
            with daemon_call(f"starting {image}"):
                container.put_archive("/tmp", _packed(files))
                container.start()
                code = container.wait()["StatusCode"]
                out, err = (container.logs(stdout=first, stderr=not first).decode(errors="replace") for first in (True, False))
            return ContainerResult(int(code), out, err)

    def fetch(self, image: str, path: str, into: Path) -> bool:
        """Unpack a file or directory of an image below ``into``; false if the image does not have it.

        Raises:
            NotTrusted: see :func:`sm120kit.images.docker.unpacking.unpack`.
        """
        from docker.errors import NotFound

        with self._container(image, ["true"], "none") as container, daemon_call(f"reading {image}"):
            try:
                chunks, _ = container.get_archive(path)
            except NotFound:
                return False
            with tempfile.TemporaryFile() as packed:
                for chunk in chunks:
                    packed.write(chunk)
                packed.seek(0)
                unpack(packed, into, image)
        return True

    def owners(self, image: str) -> None:
        """Programs in a container detect the owners of files."""

    def digests(self, image: str) -> dict[str, str]:
        """The daemon has no digests of files."""
        return {}

    @contextlib.contextmanager
    def _container(self, image: str, argv: Sequence[str], network: str) -> Iterator[Any]:
        with daemon_call(f"starting {image}"):
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
            with contextlib.suppress(Exception):  # without the daemon there is no container either
                container.remove(force=True)

    def layers(self) -> list[tuple[str, ...]]:
        """The layers of every image, lowest first."""
        with daemon_call("listing images"):
            ids = {entry["Id"] for entry in self._client.api.images()}
        images = (self.inspect(id_) for id_ in sorted(ids))
        return [image.layers for image in images if image is not None]

    def load(self, archive: Iterable[bytes]) -> str:
        """Load an archive of an image without a tag, and return the id that the daemon reports; "" if it reports none.

        Raises:
            ResourceUnavailable: the file system of its images is full.
            DaemonUnreachable: it does not respond, or rejects the archive.
        """
        loaded = ""
        with daemon_call("loading an image"):
            for event in self._client.api.load_image(archive, quiet=True):
                if message := event.get("error"):
                    require_disk_space(str(message))
                    raise DaemonUnreachable(f"loading an image: the daemon refuses: {message}", "look at the daemon's log")
                _, found, id_ = str(event.get("stream", "")).partition("Loaded image ID: ")
                loaded = id_.strip() if found else loaded
        return loaded

    @contextlib.contextmanager
    def saved(self, reference: str) -> Iterator[tarfile.TarFile]:
        """The archive of an image as ``docker save`` writes it, a stream that can be read once, front to back.

        Raises:
            DaemonUnreachable: it does not respond, or the stream is truncated.
        """
        with daemon_call(f"reading {reference}"):
            try:
                stream = io.BufferedReader(ChunkReader(self._client.api.get_image(reference)), 2**20)
                with tarfile.open(fileobj=stream, mode="r|", bufsize=2**20) as archive:
                    yield archive
            except tarfile.ReadError as error:
                raise DaemonUnreachable(
                    f"reading {reference}: the daemon's stream is truncated: {error}", "run the same command again"
                ) from error

    def tag(self, image: str, reference: str) -> None:
        """Tag an image. The tag moves if another image has it."""
        repository, _, tag = reference.rpartition(":")
        with daemon_call(f"tagging {reference}"):
            self._client.api.tag(image, repository, tag)

    def remove(self, reference: str) -> None:
        """Remove a tag or digest, and with the last of them the image."""
        from docker.errors import ImageNotFound

        with daemon_call(f"removing {reference}"), contextlib.suppress(ImageNotFound):
            self._client.api.remove_image(reference)

    def in_registry(self, reference: str) -> str | None:
        """The digest of ``repository:tag`` or ``repository@digest`` in its registry; None if the registry does not have it.

        Raises:
            RegistryFailed: the registry does not respond, or refuses the request.
        """
        from docker.errors import APIError, NotFound

        def request() -> str | None:
            try:
                return str(self._client.images.get_registry_data(reference).id)
            except NotFound:
                return None
            except APIError as error:
                if "manifest unknown" in str(error).lower():
                    return None
                raise

        return registry_call(f"looking up {reference}", request)

    def push(self, reference: str, report: Callable[[str], None]) -> str:
        """Push ``repository:tag`` and return its digest in the registry.

        Raises:
            RegistryFailed: the registry does not respond, or refuses the request.
        """
        repository, _, tag = reference.rpartition(":")

        def push() -> str:
            digest = ""
            for event in self._client.api.push(repository, tag=tag, stream=True, decode=True):
                report_status(event, report)
                digest = event.get("aux", {}).get("Digest", digest)
            return digest

        return registry_call(f"pushing {reference}", push)

    def pull(self, reference: str, report: Callable[[str], None]) -> Image:
        """Pull ``repository@digest``.

        Raises:
            NotFound: the registry does not have it.
            NotTrusted: it delivers other content.
            RegistryFailed: it does not respond, or refuses the request.
        """

        def pull() -> None:
            for event in self._client.api.pull(reference, stream=True, decode=True):
                report_status(event, report)

        registry_call(f"pulling {reference}", pull)
        image = self.inspect(reference)
        if image is None:
            raise DaemonUnreachable(f"the daemon pulled {reference} and does not have it", "look at its log")
        return image


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


def _require_context() -> None:
    """Raise DaemonUnreachable if docker's configuration or context is unusable: the SDK fails or uses the default socket."""
    from docker.context import ContextAPI, config
    from docker.utils.config import find_config_file

    if path := find_config_file():
        try:
            damaged = "" if isinstance(parse_json(Path(path).read_bytes()), dict) else "it is no object"
        except (OSError, ValueError) as error:
            damaged = str(error)
        if damaged:
            raise DaemonUnreachable(f"{path} cannot be used: {damaged}", "mend it, or name another directory in DOCKER_CONFIG")
    if os.environ.get("DOCKER_HOST"):
        return
    name = os.environ.get("DOCKER_CONTEXT") or config.get_current_context_name() or "default"
    hint = "docker context ls lists them; or set DOCKER_HOST to the socket of the daemon"
    try:
        context = ContextAPI.get_context(name)
    except Exception as error:  # the SDK reads meta.json without checking it
        raise DaemonUnreachable(f"docker context {name} is damaged: {error!r}", hint) from error
    if context is None:
        raise DaemonUnreachable(f"docker context {name} does not exist", hint)
    if "docker" not in context.endpoints:
        raise DaemonUnreachable(f"docker context {name} has no endpoint of docker", hint)
