"""Images in the state directory, an OCI image layout: inspected, run and compared without a container daemon.

A program runs in a root file system of the image's layers (:mod:`._rootfs`) that it cannot write, with a ``/tmp``
and a home directory of its own, without network and capabilities, alone in a process namespace. Which program isolates it
depends on what this system permits:

``unshare``     a user namespace, in which this user appears as the image's user, and so do the owners of all files. The
                kernel's overlayfs combines the layers: Linux 5.11 or newer
``bubblewrap``  where only ``bwrap`` may create user namespaces (AppArmor), or overlayfs is refused. It has no overlayfs (0.8):
                all files of the image become hard links and are removed afterwards, a minute for vLLM 0.33.0 on a busy machine

Programs of an image for another machine are run by an emulator (:mod:`sm120kit.recipes.cross_tools`), which the first way
registers for its namespace only: Linux 6.7 or newer.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core import process, sandbox
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import NotTrusted, RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _rootfs
from sm120kit.images.image_records import ContainerResult, Image, start_settings
from sm120kit.images.oci import Layout
from sm120kit.recipes.cross_tools import CrossTools, cross_tools
from sm120kit.sources.run_options import Options

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` of a container whose image sets none, as Docker has it."""

_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_FOREIGN_REMEDY = "use Linux 6.7 or newer, or a machine of the image's architecture"


@dataclass(frozen=True)
class _Container:
    """A root file system and the settings of the programs in it. ``layers`` are lowest first, above them our mount points."""

    layers: tuple[Path, ...]
    directory: Path
    writable: dict[str, Path]
    uid: int
    gid: int
    env: dict[str, str]
    cwd: str
    emulator: CrossTools | None


class LocalImages:
    """The images in ``<state>/oci``."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.layout = Layout(workspace.root / "oci")

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if the layout does not have it."""
        manifest = self.layout.find(reference)
        return None if manifest is None else self.layout.image(manifest.digest)

    def find(self, reference: str) -> Image:
        """Look up an image that must exist.

        Raises:
            NotFound: the layout does not have it.
        """
        return self.layout.image(self.layout.require(reference).digest)

    def images(self, label: str) -> list[tuple[Image, tuple[str, ...]]]:
        """All images with a label, each with its tags."""
        images = ((self.layout.image(manifest.digest), tags) for manifest, tags in self.layout.images())
        return [(image, tags) for image, tags in images if label in image.labels]

    def settings(self, reference: str) -> dict[str, Any]:
        """The settings with which a container of an image starts, see :func:`sm120kit.images.image_records.start_settings`."""
        return start_settings(self._config(reference).get("config") or {})

    def history(self, reference: str) -> tuple[str, ...]:
        """The build commands in the history of an image, newest first."""
        steps = self._config(reference).get("history") or []
        return tuple(str(step.get("created_by", "")) for step in reversed(steps))

    def digests(self, image: str) -> dict[str, str]:
        """The sha256 of files, by path, which were computed while the layers were unpacked."""
        return _rootfs.digests(self._layers(image))

    def run(self, image: str, argv: Sequence[str], files: Mapping[str, bytes]) -> ContainerResult:
        """Run a program as the image's user, in place of its entrypoint, without a network; ``files`` are below ``/tmp``.

        An emulator runs the programs of an image for another machine.

        Raises:
            RequirementMissing: this system does not permit namespaces, or cannot run programs for the image's machine.
            BadInput: the image has no such user as it names.
        """
        with self._container(image, files) as container:
            runtime, command = _isolated(container, argv)
            variables = dict.fromkeys(os.environ) | {"PATH": os.environ.get("PATH", DEFAULT_PATH)}
            done = process.run(command, env=variables, check=False, tied=True)
        return ContainerResult(done.returncode, done.stdout, done.stderr, runtime)

    def require_runtime(self, image: str) -> None:
        """Require that programs can run in an image, as :meth:`run` runs them.

        Raises:
            RequirementMissing, BadInput: as for :meth:`run`.
        """
        with self._container(image, {}) as container:
            _isolated(container, [])

    def file(self, image: str, path: str) -> Path | None:
        """A file of an image, which must not be changed; None if it does not have it.

        Raises:
            NotTrusted: it is a link.
        """
        return self.files(image, path).get("")

    def files(self, image: str, path: str) -> dict[str, Path]:
        """The files below a directory of an image by their paths relative to it; they must not be changed.

        Raises:
            NotTrusted: one of them is a link.
        """
        entry = _rootfs.find(self._layers(image), path)
        if entry is None:
            return {}
        found = {}
        for member in [entry, *(_rootfs.walk(entry.below, entry.path) if entry.below else ())]:
            if member.source.is_symlink():
                raise NotTrusted(f"{image}: member {member.path!r} is a link", "sm120kit builds no such image")
            if not member.below:
                found[member.path[len(entry.path) + 1 :]] = member.source
        return found

    def tag(self, image: str, reference: str) -> None:
        """Tag an image. The tag moves if another image has it."""
        self.layout.tag(self.layout.require(image).digest, reference)

    def _config(self, reference: str) -> dict[str, Any]:
        return self.layout.config(self.layout.require(reference).digest)

    def _layers(self, image: str) -> tuple[Path, ...]:
        return _rootfs.layers(self.layout, self.layout.require(image).digest, self._workspace)

    @contextmanager
    def _container(self, image: str, files: Mapping[str, bytes]) -> Iterator[_Container]:
        """A container of an image with its own ``/tmp`` and home directory, which are removed with the block."""
        layers, settings = self._layers(image), self.settings(image)
        user = _rootfs.user_of(layers, settings.get("User", ""))
        env = dict(variable.partition("=")[::2] for variable in settings.get("Env") or ())
        env = {"PATH": DEFAULT_PATH, "HOSTNAME": "sm120kit", "HOME": user["home"]} | env
        with self._workspace.scratch() as directory, disk_errors(directory):
            for name in ("root", "tmp", "points/dev", "points/etc", "points/proc", "points/sys", "points/tmp"):
                (directory / name).mkdir(parents=True)
            for name, text in (("hosts", _HOSTS), ("hostname", "sm120kit\n"), ("resolv.conf", "")):
                (directory / "points" / "etc" / name).write_text(text)
            for name, content in files.items():
                path = directory / "tmp" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            (directory / "tmp").chmod(0o1777)
            writable = {"/tmp": directory / "tmp"}
            home = _rootfs.find(layers, user["home"])
            if home is not None and home.below:
                writable[user["home"]] = directory / "home"
                (directory / "home").mkdir()
                _rootfs.combine(home.below, directory / "home", home.path, link=False)
            cwd = settings.get("WorkingDir") or "/"
            emulator = self._emulator(self.layout.image(self.layout.require(image).digest))
            yield _Container((*layers, directory / "points"), directory, writable, user["uid"], user["gid"], env, cwd, emulator)

    def _emulator(self, image: Image) -> CrossTools | None:
        """What runs the programs of an image for another machine, fetched if need be."""
        native = image.machine in ("", platform.machine())
        return None if native else cross_tools(image.machine, Options(self._workspace))


def _isolated(container: _Container, argv: Sequence[str]) -> tuple[str, list[str | Path]]:
    """The first runtime that works here, and its command for a program in a container."""

    def bubblewrap() -> tuple[list[str | Path], None]:
        if container.emulator:
            raise RequirementMissing("it registers no emulator for programs of another machine")
        return [*_bubblewrap(container, Path("/")), "true"], None

    trials = {"unshare": lambda: (_command(container, []), None), "bubblewrap": bubblewrap}
    problem = "this system does not permit running a program in a root file system of its own"
    hint = _FOREIGN_REMEDY if container.emulator else sandbox.remedy()
    runtime = sandbox.first_working(trials, problem, hint)
    if runtime == "bubblewrap":
        return runtime, [*_bubblewrap(container, _copy(container)), "--", *argv]
    return f"unshare, {container.emulator.emulator.name}" if container.emulator else runtime, _command(container, argv)


def _copy(container: _Container) -> Path:
    """A directory with the files of all layers, as hard links."""
    directory = container.directory / "copy"
    directory.mkdir()
    _rootfs.combine(container.layers, directory)
    return directory


def _command(container: _Container, argv: Sequence[str]) -> list[str | Path]:
    directory = container.layers[0].parents[1]
    request = {
        "layers": [os.path.relpath(layer, directory) for layer in reversed(container.layers)],
        "directory": str(directory),
        "root": str(container.directory / "root"),
        "writable": {path: str(source) for path, source in container.writable.items()},
        "argv": list(argv),
        "env": container.env,
        "cwd": container.cwd,
    }
    if container.emulator:
        request |= {"emulator": str(container.emulator.emulator), "machine": container.emulator.machine}
    return sandbox.unshared(request, container.uid, container.gid)


def _bubblewrap(container: _Container, root: Path) -> list[str | Path]:
    """The command of bubblewrap, to which the program is appended."""
    argv: list[str | Path] = [*sandbox.BUBBLEWRAP, "--unshare-user", "--uid", str(container.uid), "--gid", str(container.gid)]
    argv += ["--ro-bind", root, "/", "--dev", "/dev", "--proc", "/proc", "--ro-bind", "/sys", "/sys"]
    if root != Path("/"):
        for path, source in container.writable.items():
            argv += ["--bind", source, path]
        argv += ["--clearenv", "--hostname", "sm120kit", "--chdir", container.cwd]
        for name, value in container.env.items():
            argv += ["--setenv", name, value]
    return argv
