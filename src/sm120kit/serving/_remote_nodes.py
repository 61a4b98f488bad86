"""Start a server's containers on other machines, over ssh: image and model are copied there, and all are stopped together.

A machine needs ``docker``, ``rsync`` and this user's key. Docker reaches its daemon as ``ssh://ADDRESS``
(https://docs.docker.com/engine/security/protect-access/), and everything has the same absolute path as here.
"""

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core import process, reporting
from sm120kit.core.errors import Mismatch, RequirementMissing, ResourceUnavailable, ServerFailed
from sm120kit.core.secrets import masked
from sm120kit.images import docker, loading
from sm120kit.images.oci import Layout
from sm120kit.serving import nodes, unified_memory
from sm120kit.serving._container import Service
from sm120kit.serving._render import docker_run

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
"""A connection on which nothing comes for 45 s ends (ssh_config(5), ServerAliveCountMax)."""
SHELL_SECONDS = 600
"""For a script: to write what the page cache holds takes longest."""
NODES_LABEL, RUN_LABEL = "sm120kit.nodes", "sm120kit.run"
"""Labels of the first machine's container, ``RUN@ADDRESS,...`` of the others, and of theirs: an identifier of their own."""
LOOK_SECONDS = 10.0
"""Between two looks at the containers of other machines, each of which is a connection."""
LOG_LINES = 20
MAX_LINKS = 40
"""Links that lead to links, as many as Linux follows (path_resolution(7)); links in a circle end there."""


@dataclass(frozen=True)
class RemoteMachine:
    """Another machine of a server, by its IP address."""

    address: str

    @property
    def _host(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address

    @property
    def docker_host(self) -> str:
        """Its daemon, as ``DOCKER_HOST`` names it."""
        return f"ssh://{self._host}"

    def shell(self, script: str) -> str:
        """The output of a shell script.

        Raises:
            ResourceUnavailable: the machine cannot be reached, or the script fails.
        """
        try:
            done = process.run_within((*SSH, self.address, script), SHELL_SECONDS)
        except process.Stopped as error:
            problem = f"{self.address}: no answer for {SHELL_SECONDS} s"
            raise ResourceUnavailable(problem, f"ssh {self.address} {shlex.quote(script)}") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ResourceUnavailable(
                f"{self.address}: {masked(reason)[:200]}",
                f"`ssh {self.address}` must log in without a password (ssh-copy-id), and docker and rsync be installed there",
            )
        return done.stdout

    def docker(self, *arguments: str, service: Service | None = None, check: bool = True) -> process.Completed:
        """Run docker here with the daemon there; values of a container's variables do not occur in command lines."""
        variables = (service.variables if service else {}) | {"DOCKER_HOST": self.docker_host}
        seconds = docker.LOAD_SECONDS if arguments[0] == "run" else None
        return docker.docker(*arguments, env=variables, check=check, seconds=seconds)

    def load(self, layout: Layout, manifest: str) -> str:
        """The id of an image of a layout in the daemon there; see :func:`sm120kit.images.loading.load_untagged`."""
        with reporting.step(f"copying the image to {self.address}"):
            return loading.load_untagged(layout, manifest, docker.Daemon(self.docker_host)).id

    def require(self) -> None:
        """Require a machine like this one, with what is needed.

        Raises:
            ResourceUnavailable: it cannot be reached.
            RequirementMissing: it lacks docker or rsync, or this machine does.
            Mismatch: it has another architecture.
        """
        if process.find_program("rsync") is None:
            raise RequirementMissing("there is no program rsync on this machine", "sudo apt install rsync")
        found = self.shell("uname -m && { command -v docker; command -v rsync; true; }").split()
        if found[0] != os.uname().machine:
            raise Mismatch(f"{self.address} is {found[0]}, this machine {os.uname().machine}", "name machines of one kind")
        for program in ("docker", "rsync"):
            if not any(path.endswith(f"/{program}") for path in found):
                raise RequirementMissing(f"{self.address} has no program {program}", f"install {program} there")

    def memory(self) -> tuple[int, int]:
        """The bytes of its memory, and those that are available."""
        lines = self.shell(f"cat {unified_memory.MEMINFO}").splitlines()
        kib = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines)}
        return int(kib["MemTotal"]) << 10, int(kib["MemAvailable"]) << 10

    def drop_page_cache(self) -> None:
        """See :func:`unified_memory.drop_page_cache`."""
        self.shell(f"sync; echo 3 > {unified_memory.DROP_CACHES}")

    def copy(self, paths: Iterable[Path]) -> None:
        """Copy files and links to the same places; what is there is not sent again, and an interrupted copy resumes.

        It may take hours; a connection that is dead ends it.

        Raises:
            CommandFailed: rsync fails.
        """
        names = b"\0".join(str(path.relative_to("/")).encode() for path in paths)
        options = ("--archive", "--partial", "--no-implied-dirs", "--from0", "--files-from=-", f"--rsh={shlex.join(SSH)}")
        with reporting.step(f"copying the model to {self.address}"):
            process.run(("rsync", *options, "/", f"{self._host}:/"), stdin=names)


def require_first(addresses: Sequence[str]) -> None:
    """Require that the first address of a server's machines is one of this machine, which starts all.

    Raises:
        ResourceUnavailable: it is another machine's.
    """
    first = addresses[0]
    with socket.socket(socket.AF_INET6 if ":" in first else socket.AF_INET) as probe:
        try:
            probe.bind((first, 0))
        except OSError as error:
            raise ResourceUnavailable(
                f"{first} is not an address of this machine, which would serve: {error.strerror}",
                "start it on the first machine of --nodes; or add --print, and start each machine by hand",
            ) from error


def model_files(service: Service, mounts: Iterable[str]) -> Iterator[Path]:
    """The files of a container's model, and of its ``mounts`` by their targets, with the files that links lead to."""
    folders = [mount.source for number, mount in enumerate(service.mounts) if number == 0 or mount.target in mounts]
    for folder in folders:
        if not folder.is_dir():
            yield folder
        for parent, directories, names in os.walk(folder):
            for path in (Path(parent, name) for name in (*directories, *names)):
                yield path
                for _ in range(MAX_LINKS):
                    if not path.is_symlink():
                        break
                    path = Path(os.path.normpath(path.parent / path.readlink()))
                    yield path


def copied(machine: RemoteMachine, service: Service, mounts: Iterable[str], layout: Layout, image: str) -> Service:
    """Copy everything that a container needs to a machine; returns the container from the image in the daemon there.

    ``image`` is an id in ``layout``.

    Raises:
        ResourceUnavailable, CommandFailed: the machine cannot be reached, or is full.
        NotVerified: see :meth:`RemoteMachine.load`.
    """
    lines = ["set -e", *nodes.cache_directories(service)]
    lines += [f"install -d {shlex.quote(str(mount.source.parent))}" for mount in service.mounts if mount.read_only]
    machine.shell("; ".join(lines))
    machine.copy(dict.fromkeys(model_files(service, mounts)))
    loaded = machine.load(layout, layout.require(image).digest)
    return replace(service, image=loaded, name=f"{service.name}-{service.port}")


@contextmanager
def running(services: Sequence[Service], run: str) -> Iterator[None]:
    """Run the containers of other machines, while the block runs and afterwards, unless it fails.

    They have the label :data:`RUN_LABEL` with the identifier ``run``, by which :func:`remove` finds them.

    Raises:
        ServerFailed: docker cannot start one.
    """
    with ExitStack() as started:
        for service in services:
            machine = _machine(service)
            argv = docker_run(replace(service, labels=service.labels | {RUN_LABEL: run}), values=False, detach=True)
            started.callback(remove, run, machine.address)
            if (done := machine.docker(*argv[1:], service=service, check=False)).returncode:
                raise ServerFailed(f"{machine.address}: {masked(done.stderr.strip())[:500]}", "see `docker info` there")
        yield
        started.pop_all()


def watched(services: Sequence[Service], progress: Callable[[float, str], None]) -> Callable[[float, str], None]:
    """A progress function that looks after the containers of other machines as well: it raises ServerFailed if one ended."""
    looked = time.monotonic()

    def look(seconds: float, line: str) -> None:
        nonlocal looked
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            for service in services:
                _require_running(service)
        progress(seconds, line)

    return look


def _require_running(service: Service) -> None:
    machine = _machine(service)
    if machine.docker("inspect", "--format", "{{.State.Running}}", service.name, check=False).stdout.strip() == "false":
        done = machine.docker("logs", "--tail", str(LOG_LINES), service.name, check=False)
        raise ServerFailed(
            f"the container on {machine.address} ended:\n{masked(done.stdout + done.stderr).strip()}",
            "the last lines of its log show why; `sm120kit explain FILE` explains a log",
        )


def remove(run: str, address: str) -> None:
    """Stop and remove the containers of a run on another machine; a warning if that is not known to have happened."""
    machine = RemoteMachine(address)
    listed = machine.docker("ps", "--all", "--quiet", f"--filter=label={RUN_LABEL}={run}", check=False)
    done = machine.docker("rm", "--force", *listed.stdout.split(), check=False) if listed.stdout.split() else listed
    if done.returncode:
        reporting.warn(f"the container on {address} was not removed: {masked(done.stderr.strip())[:200]}")


def _machine(service: Service) -> RemoteMachine:
    assert service.node is not None
    return RemoteMachine(service.node.address)
