"""Containers of this host that ``serve`` started, identified by their labels: list them, read their logs, stop them."""

import calendar
import errno
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core import process, reporting
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadRecord, DaemonUnreachable, NotFound, ResourceUnavailable, SystemRefused
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import MARKER
from sm120kit.hosts.facts import LAUNCHER_LABEL
from sm120kit.images.docker import LOAD_SECONDS, docker
from sm120kit.serving import _remote_nodes
from sm120kit.serving._render import PATIENCE_SECONDS
from sm120kit.serving._supervise import Ending, Run

URL_LABEL, RECORD_LABEL = "sm120kit.url", "sm120kit.record"
CONFIGURATION_LABEL, GPUS_LABEL = "sm120kit.configuration", "sm120kit.gpus"


@dataclass(frozen=True)
class ServingContainer:
    """A container that serves a configuration, or did until it exited.

    ``state`` is docker's, such as "running" or "exited", ``started`` sorts, ``gpus`` are numbers with commas between them.
    ``record`` is the file with its :class:`Run`; ``mounts`` are directories of this host, and ``nodes`` the containers of the
    run on other machines.
    """

    name: str
    configuration: str
    gpus: str
    url: str
    state: str
    record: str
    started: str = ""
    mounts: tuple[str, ...] = ()
    nodes: str = ""

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.state == "running"

    @property
    def ended(self) -> bool:
        """Whether it ran and does not any more; a container that is created or paused neither runs nor has ended."""
        return self.state in ("exited", "dead")


def listed() -> tuple[ServingContainer, ...]:
    """The containers on this host that ``serve`` started, newest first.

    Raises:
        RequirementMissing: there is no docker program.
        DaemonUnreachable: its daemon does not respond.
    """
    return _inspected("--all", f"--filter=label={LAUNCHER_LABEL}")


def _inspected(*options: str) -> tuple[ServingContainer, ...]:
    """The containers that ``docker ps`` lists with these options.

    Go omits zeros at the end of a time, and the first letter of a name is a slash. A label can have any character, so that
    docker prints one JSON list a line.
    """
    done = docker("ps", "--quiet", "--no-trunc", *options)
    if done.returncode:
        raise DaemonUnreachable(
            f"the servers of this host cannot be listed: {done.stderr.strip()}",
            "start docker, or set DOCKER_HOST to its socket",
        )
    fields = (".Name", ".State.Status", ".State.StartedAt", ".Config.Labels", ".Mounts")
    listing = f"[{','.join(f'{{{{json {field}}}}}' for field in fields)}]"
    # A container that was removed in between has an empty line or none, and makes the exit code 1.
    asked = ("inspect", "--format", listing, *done.stdout.split())
    lines = docker(*asked).stdout.splitlines() if done.stdout.strip() else []
    return tuple(_container(*parse_json(line)) for line in lines if line)


def _container(
    name: str, state: str, started: str, labels: Mapping[str, str] | None, mounts: Sequence[Mapping[str, str]] | None
) -> ServingContainer:
    keys = (CONFIGURATION_LABEL, GPUS_LABEL, URL_LABEL, RECORD_LABEL, _remote_nodes.NODES_LABEL)
    configuration, gpus, url, record, nodes = ((labels or {}).get(key, "") for key in keys)
    sources = tuple(mount["Source"] for mount in mounts or () if mount.get("Source"))
    return ServingContainer(name.lstrip("/"), configuration, gpus, url, state, record, started.rstrip("Z"), sources, nodes)


def find(name: str) -> ServingContainer:
    """The container with a name, or of a configuration; without a name, the only one.

    Raises:
        NotFound: there is none, or more than one.
    """
    every = listed()
    matches = [each for each in every if name in ("", each.name, each.configuration)]
    exact = [each for each in every if each.name == name]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    names = ", ".join(each.name for each in matches or every)
    if not matches:
        raise NotFound(f"no server is named {name}" if name else "no server was started", f"servers: {names or 'none'}")
    raise NotFound(f"{len(matches)} servers match", f"name one of {names}")


def logs(container: ServingContainer, on_line: Callable[[str], None], *, follow: bool) -> None:
    """Pass each line that a server printed to ``on_line``; with ``follow`` until it exits.

    It has no time limit: whoever reads the lines may pause, and ends it.
    """
    process.run_lines(("docker", "logs", *["--follow"] * follow, container.name), on_line)


def stop(container: ServingContainer) -> None:
    """Stop a container, complete the log and the record of its run, and remove it.

    Raises:
        SystemRefused: the record cannot be read, or nothing be written beside it: it is another user's. The server runs on.
        BadRecord: the record is damaged. The server runs on.
    """
    path = Path(container.record)
    record = _record(container, path) if container.record else None
    if record:  # before it ends, so that a serve that waits for it does not take it for dead
        started = _started(container, record)
        record = replace(record, ending=record.ending or (Ending.DIED if container.ended else Ending.STOPPED))
        write_record(path, record)
    docker("stop", "--time", str(PATIENCE_SECONDS), container.name, check=True)
    if record:
        _complete_log(container.name, path.with_suffix(".log"))
        seconds = time.time() - calendar.timegm(started)
        write_record(path, replace(record, exit_code=exit_code(container.name), seconds=round(seconds, 1)))
    remove(container.name)
    for run, _, address in (entry.partition("@") for entry in container.nodes.split(",") if entry):
        _remote_nodes.remove(run, address)


def _record(container: ServingContainer, path: Path) -> Run | None:
    """The record of a container's run; None if it was removed. The path is a label, which others can set."""
    try:
        path.lstat()
        if not _is_record(path):
            raise OSError(errno.EPERM, "it is not in a state directory of sm120kit")
        record = read_record(Run, path)
        with tempfile.TemporaryFile(dir=path.parent):
            return record
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SystemRefused(
            f"the record of {container.name} cannot be completed: {path}: {error.strerror}",
            f"stop it as the user who started it, or without its record: docker rm --force {container.name}",
        ) from error


def _started(container: ServingContainer, record: Run) -> time.struct_time:
    """When a run was started, in UTC."""
    try:
        return time.strptime(record.started, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError as error:
        raise BadRecord(
            f"{container.record} is damaged: it was started at {record.started[:40]!r}",
            f"stop it without its record: docker rm --force {container.name}",
        ) from error


def _is_record(path: Path) -> bool:
    """Whether a path is that of a record in a state directory, without links."""
    marker = path.parent.parent / MARKER
    named = path.is_absolute() and path.parent.name == "runs" and path.suffix == ".json"
    return named and os.path.realpath(path) == str(path) and marker.is_file() and not marker.is_symlink()


def _complete_log(name: str, log: Path) -> None:
    """Replace a log by everything that a container printed, unless docker has less, as without a log driver."""
    part = log.with_name(f".{log.name}.{os.getpid()}")
    try:
        with disk_errors(log):
            with part.open("wb") as file:
                code = process.run_within(("docker", "logs", name), LOAD_SECONDS, output=file).returncode
            if code == 0 and (not log.exists() or part.stat().st_size >= log.stat().st_size):
                part.replace(log)
    except process.Stopped:
        reporting.warn(f"the log of {name} is not complete: docker did not end it within {LOAD_SECONDS} s")
    finally:
        part.unlink(missing_ok=True)


def in_use() -> frozenset[Path]:
    """The files of containers that run on this host: mounts, also of those that a compose file started; records and logs.

    Raises:
        RequirementMissing: there is no docker program.
        DaemonUnreachable: its daemon does not respond.
    """
    containers = _inspected()
    used = {Path(source).resolve() for container in containers for source in container.mounts}
    records = [Path(container.record).resolve() for container in containers if container.record]
    return frozenset((*used, *records, *(record.with_suffix(".log") for record in records)))


def require_gpus(record: Path) -> None:
    """Require that the running container of a run was the first on its GPUs: two users can select the same at once.

    Raises:
        ResourceUnavailable: a container that was started before it, and runs, has one of them.
        DaemonUnreachable: see :func:`in_use`.
    """
    running = sorted((each for each in listed() if each.running), key=lambda container: container.started)
    own = next((each for each in running if each.record == str(record.resolve())), None)
    for first in itertools.takewhile(lambda container: container is not own, running if own else ()):
        if own and (common := sorted({*own.gpus.split(",")} & {*first.gpus.split(",")} - {""})):
            raise ResourceUnavailable(
                f"{first.name} was started on GPU {', '.join(common)} at the same time", f"sm120kit stop {first.name}"
            )


def exit_code(name: str) -> int | None:
    """The exit code of a container, None if there is no such container."""
    done = docker("inspect", "--format", "{{.State.ExitCode}}", name)
    return int(done.stdout) if done.returncode == 0 else None


def state(record: Path) -> str:
    """The state of the container of a run, as the daemon has it, such as "running" or "exited"; "" without a container.

    Raises:
        RequirementMissing: there is no docker program.
        DaemonUnreachable: its daemon does not respond.
    """
    return next((each.state for each in _inspected("--all", f"--filter=label={RECORD_LABEL}={record.resolve()}")), "")


@contextmanager
def removed_at_end(record: Path) -> Iterator[None]:
    """Remove the container of a run when the block ends: a docker client that was killed leaves it behind."""
    try:
        yield
    finally:
        _remove_of(record)


@contextmanager
def removed_on_failure(record: Path) -> Iterator[None]:
    """Remove the container of a run if the block fails."""
    try:
        yield
    except BaseException:
        _remove_of(record)
        raise


def _remove_of(record: Path) -> None:
    """Remove the container of a run, also one that runs. Unlike a name, the label identifies who started it."""
    listing = ("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={RECORD_LABEL}={record.resolve()}")
    if ids := docker(*listing).stdout.split():
        docker("rm", "--force", *ids)


def remove(name: str) -> None:
    """Remove a container, also one that runs."""
    docker("rm", "--force", name)
