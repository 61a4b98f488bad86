"""Launch a configuration: check image, checkpoint and host, start the container, and record the run."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from sm120kit import serving
from sm120kit.core import reporting
from sm120kit.core.errors import BadRecord, NoAnswer, ResourceUnavailable, ServerFailed
from sm120kit.core.locks import host_turn
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.secrets import masked, register
from sm120kit.core.urls import Endpoint
from sm120kit.core.workspace import Workspace
from sm120kit.hosts import doctor, log_rules
from sm120kit.hosts.facts import DETACHED, LAUNCHER_LABEL, launcher_label
from sm120kit.images import image_inputs as contexts
from sm120kit.images import loading
from sm120kit.images import published_images as published
from sm120kit.images.docker import LOAD_SECONDS, Daemon, docker
from sm120kit.images.image_records import Image, PublishedImage, VerifiedImage
from sm120kit.images.oci import Layout
from sm120kit.images.published_images import Source
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import (
    Device,
    Ending,
    Fit,
    Outcome,
    Placement,
    Run,
    ServerProcess,
    Service,
    _remote_nodes,
    allreduce,
    answer,
    checkpoint,
    server_containers,
    unified_memory,
)
from sm120kit.serving._container import IMAGE_USER
from sm120kit.serving._remote_nodes import RemoteMachine
from sm120kit.serving._render import PATIENCE_SECONDS
from sm120kit.serving.answer import Answer
from sm120kit.serving.checkpoint import Checkpoint
from sm120kit.serving.resolve import NO_IMAGE, ResolvedLaunch, require_port

STARTS = "the start of a server"
"""Name of the lock of a host from the selection of free GPUs until the container on them runs; then the daemon decides."""


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that passed its checks. ``problems`` are doctor's findings that break or slow the server, or its all-reduce.

    ``image`` is None if there is none, which only a launch that is not started can be. ``published`` is the entry in the index
    ``source``, None for an image that only this host has. ``devices`` are the host's GPUs that the server may use.
    """

    configuration: Configuration
    image: VerifiedImage | None
    model: Checkpoint
    fit: Fit
    service: Service
    problems: tuple[doctor.Finding, ...]
    source: Source
    published: PublishedImage | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch; the server has ``wait_seconds`` to become healthy.

    ``progress`` gets the seconds since the start and the log's last line until it is healthy, ``on_answer`` the answer to a
    first request, which is sent only if it is set.
    """

    workspace: Workspace
    wait_seconds: float
    progress: Callable[[float, str], None] = lambda seconds, line: None
    on_answer: Callable[[Endpoint, Answer], None] | None = None


def require_model(configuration: Configuration, model: Path) -> None:
    """Require a model folder of the configuration's architecture: before the host, as it may be wrong on every host."""
    serving.require_architecture(configuration, checkpoint.read(model))


def prepare(resolved: ResolvedLaunch, model: Path, workspace: Workspace, facts: Checkpoint | None = None) -> PreparedLaunch:
    """Check that a model folder can be served. Starts nothing. With ``facts``, the folder is planned, and not read."""
    configuration, host, location, method = resolved.configuration, resolved.host, resolved.location, resolved.allreduce
    planned = facts is not None
    facts = facts or checkpoint.read(model)
    fit = serving.check_fit(configuration, facts, resolved.gpus)
    service = allreduce.using(_service(resolved, model, workspace, planned=planned), configuration, method)
    if not (location.node and location.node.rank):  # once for all machines
        for risk in serving.risks(configuration):
            reporting.warn(f"{configuration.name}: {risk}")
    findings = () if resolved.assumed else doctor.diagnose(host, doctor.checks_for(configuration))
    serious = (doctor.Impact.BREAKS, doctor.Impact.SLOWS)
    problems = tuple(one for one in findings if one.verdict.impact in serious or (one.verdict.impact and one.check == method))
    return PreparedLaunch(
        configuration, resolved.image, facts, fit, service, problems, resolved.source, resolved.published, resolved.devices
    )


def run(prepared: PreparedLaunch, options: LaunchOptions, work: Callable[[Run], None]) -> Run:
    """Start a container, call ``work`` with the record of its healthy server, and stop it; see :func:`serving.serve`.

    The record is written before the start, and completed at the end.

    Raises:
        ResourceUnavailable: another process has the port, or a launched container the GPUs, also after its launcher was killed.
        ServerFailed: with the known errors in its log.
    """
    service = _with_image(prepared, prepared.service, options.workspace)
    with ExitStack() as starting:
        starting.enter_context(host_turn(STARTS))
        prepared, record = _recorded(replace(prepared, service=_on_free_gpus(prepared, service)), options)
        waiting = True

        def progress(seconds: float, line: str) -> None:
            nonlocal waiting
            if waiting and server_containers.state(record.path) == "running":
                waiting = False
                starting.close()
                server_containers.require_gpus(record.path)
            options.progress(seconds, line)

        argv = serving.docker_run(prepared.service, values=False)
        with server_containers.removed_at_end(record.path):
            return serve(prepared, argv, replace(options, progress=progress), work, record=record)


def start(prepared: PreparedLaunch, options: LaunchOptions) -> Run:
    """Start a container that outlives this process, and wait until it answers a request. Any failure removes it."""
    service = _with_image(prepared, prepared.service, options.workspace)
    with ExitStack() as starting:
        starting.enter_context(host_turn(STARTS))
        prepared, record = _recorded(replace(prepared, service=_on_free_gpus(prepared, service)), options, detached=True)
        with record.completed_on_failure(), server_containers.removed_on_failure(record.path):
            _start_detached(prepared, record, options)
            starting.close()
            server_containers.require_gpus(record.path)
            _await_answer(prepared, record, options)
    service = prepared.service
    reporting.info(f"serving {prepared.configuration.model.repository} at {service.url}; sm120kit stop {service.name} stops it")
    return record.run


def require_machines(resolved: ResolvedLaunch, *, drop_caches: bool = False) -> None:
    """Require the machines that a server spans, before its model is downloaded: this one first, the others over ssh."""
    node = resolved.location.node
    assert node is not None
    _remote_nodes.require_first(node.addresses)
    for address in node.addresses[1:]:
        machine = RemoteMachine(address)
        machine.require()
        if drop_caches:
            machine.drop_page_cache()


@contextmanager
def with_machines(launches: Sequence[PreparedLaunch], options: LaunchOptions) -> Iterator[tuple[PreparedLaunch, LaunchOptions]]:
    """The launch on this machine, the first, while the containers of the others run, which outlive the block unless it fails.

    Image and model are copied to them.
    """
    first, others = launches[0], launches[1:]
    assert first.image is not None and first.service.node is not None
    if first.published:
        published.pull(first.published, first.source, options.workspace)
    layout, mounts, run = Layout(options.workspace.root / "oci"), first.configuration.container.mounts, uuid.uuid4().hex
    services = []
    for each in others:
        assert each.service.node is not None
        machine = RemoteMachine(each.service.node.address)
        if each.configuration.hardware.unified:
            total, available = machine.memory()
            gpus = [replace(gpu, bytes=total, used=total - available) for gpu in each.fit.gpus]
            serving.check_fit(each.configuration, each.model, gpus)
        service = labelled_service(each.service, each.configuration, options.workspace.root, detached=True)
        labels = {name: value for name, value in service.labels.items() if name != server_containers.RECORD_LABEL}
        service = replace(each.service, labels=labels)
        services.append(_remote_nodes.copied(machine, service, mounts, layout, first.image.image.id))
    entries = ",".join(f"{run}@{address}" for address in first.service.node.addresses[1:])
    labelled = replace(first.service, labels={_remote_nodes.NODES_LABEL: entries})
    with _remote_nodes.running(services, run):
        watching = replace(options, progress=_remote_nodes.watched(services, options.progress))
        yield replace(first, service=labelled), watching


def _recorded(prepared: PreparedLaunch, options: LaunchOptions, *, detached: bool = False) -> tuple[PreparedLaunch, RunRecord]:
    """A launch whose container has labels, and its record, which is on disk before the container can be."""
    record = RunRecord(prepared, options)
    service = labelled_service(prepared.service, prepared.configuration, record.path, detached=detached)
    prepared = replace(prepared, service=service)
    if detached:
        _remove_ended(prepared.service)
    argv = serving.docker_run(prepared.service, values=False, detach=detached)
    record.write(argv=tuple(map(masked, argv)))
    return prepared, record


def _start_detached(prepared: PreparedLaunch, record: RunRecord, options: LaunchOptions) -> None:
    """Start the container of a launch."""
    reporting.info(f"log: {record.log}")
    argv = serving.docker_run(prepared.service, values=False, detach=True)
    started = docker(*argv[1:], env=prepared.service.variables, seconds=LOAD_SECONDS)
    if started.returncode:
        record.log.parent.mkdir(parents=True, exist_ok=True)
        record.log.write_text(masked(started.stderr))
        record.write(ending=Ending.DIED, exit_code=started.returncode)
        raise _failure(Outcome(Ending.DIED, None, 0, started.returncode), record.log)


def _await_answer(prepared: PreparedLaunch, record: RunRecord, options: LaunchOptions) -> None:
    """Wait until the server in a detached container has answered a request."""
    service = prepared.service

    follow = ("docker", "logs", "--follow", service.name)
    outcome = serving.serve(
        ServerProcess(follow, service.url, record.log, options.wait_seconds, PATIENCE_SECONDS),
        lambda: _request(service, prepared.configuration, options),
        progress=options.progress,
        on_healthy=record.write_healthy,
    )
    if outcome.ending is not Ending.STOPPED:  # of following the log
        code = server_containers.exit_code(service.name)
        record.write(ending=outcome.ending, exit_code=code, seconds=round(outcome.seconds, 1))
        raise _failure(replace(outcome, exit_code=code), record.log)


class RunRecord:
    """The record of a server that is about to start, and its file. It has no ending while the server runs."""

    def __init__(self, prepared: PreparedLaunch, options: LaunchOptions) -> None:
        configuration, service = prepared.configuration, prepared.service
        assert prepared.image is not None
        now = time.gmtime()
        stem = f"{configuration.name}-{time.strftime('%Y%m%dT%H%M%SZ', now)}-{os.getpid()}"
        paths = (options.workspace.root / "runs" / f"{stem}-{number}.json" for number in count(1))
        self.path = next(path for path in paths if not path.exists())
        self.log, self._started = self.path.with_suffix(".log"), time.monotonic()
        register(service.key or serving.api_key(configuration))
        self.run = Run(
            configuration=configuration.name,
            engine=configuration.engine,
            image=prepared.image.image.content,
            image_name=service.image,
            model=str(service.mounts[0].source),
            argv=(),
            environment=tuple(sorted(service.variables)),
            build_id=prepared.image.image.labels.get("sm120kit.build-id", ""),
            local=prepared.image.image.labels.get(contexts.LOCAL, ""),
            url=service.url,
            log=str(self.log),
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        )

    def write(self, **changes: object) -> None:
        """Change fields of the record and write it. An ending that ``stop`` recorded meanwhile stays."""
        with suppress(OSError, BadRecord):
            if ending := read_record(Run, self.path).ending:
                changes["ending"] = ending
        self.run = replace(self.run, **changes)  # type: ignore[arg-type]
        write_record(self.path, self.run)

    def write_healthy(self, seconds: float) -> None:
        """Note and report how long the server took to become healthy."""
        self.write(healthy_seconds=round(seconds, 1))
        reporting.info(f"healthy after {seconds:.1f} s; unverified on SM120")

    @contextmanager
    def completed_on_failure(self) -> Iterator[None]:
        """Record that the run has ended if the block fails, unless the record has its ending already.

        Only for a ``with`` statement: as an abandoned generator it would take its own clean-up for a failure.
        """
        try:
            yield
        except BaseException as error:
            if not self.run.ending:
                ending = Ending.NO_ANSWER if isinstance(error, NoAnswer) else Ending.STOPPED
                self.write(ending=ending, seconds=round(time.monotonic() - self._started, 1))
            raise


def _remove_ended(service: Service) -> None:
    """Remove a container with a service's name that has ended."""
    for other in server_containers.listed():
        if other.name == service.name:
            if not other.ended:
                raise ResourceUnavailable(
                    f"{other.name} exists and serves {other.url}: {other.state}",
                    f"sm120kit stop {other.name}, or choose another port with --port",
                )
            server_containers.stop(other)


def _request(service: Service, configuration: Configuration, options: LaunchOptions) -> None:
    """Send the first request to a server, if one is to be sent."""
    if options.on_answer:
        endpoint = Endpoint.parse(service.url, service.key or serving.api_key(configuration))
        options.on_answer(endpoint, answer.request(endpoint))


def _with_image(launch: PreparedLaunch | ResolvedLaunch, service: Service, workspace: Workspace) -> Service:
    """The container from an image that the daemon has: pulled from the registry, or loaded from the state directory.

    GPUs and port are required before that, as it takes long.
    """
    service = _on_free_gpus(launch, service)
    assert launch.image is not None
    if launch.published:
        published.pull(launch.published, launch.source, workspace)
    return replace(service, image=loaded(launch.image, workspace))


def idle_service(resolved: ResolvedLaunch, model: Path, workspace: Workspace) -> Service:
    """The container of a launch, to run another program than the server in it: image in the daemon, GPUs free."""
    return _with_image(resolved, _service(resolved, model, workspace, planned=True), workspace)


def _service(resolved: ResolvedLaunch, model: Path, workspace: Workspace, *, planned: bool) -> Service:
    location = resolved.location
    gpus = [(gpu.number, gpu.name) for gpu in resolved.gpus]
    unified = resolved.gpus[0].bytes if resolved.configuration.hardware.unified else None
    memory = unified_memory.limit(unified) if unified else 0
    placement = Placement(gpus, location.port, workspace, location.listen, location.key, location.node, memory)
    image = resolved.image.image if resolved.image else Image("", "", "", (), {}, IMAGE_USER, 0)
    return serving.make_service(
        resolved.configuration, resolved.engine, image, resolved.image_name, model, placement, planned=planned
    )


def _on_free_gpus(launch: PreparedLaunch | ResolvedLaunch, service: Service) -> Service:
    """The container on GPUs that no server has at the time of the call: its own, or others of the same kind."""
    running = [each for each in server_containers.listed() if each.running]
    taken = {int(number): each for each in running for number in each.gpus.split(",") if number.isdecimal()}
    if conflicts := sorted(set(service.gpus) & set(taken)):
        own = [device for device in launch.devices if device.number in service.gpus]
        equal = [each for each in launch.devices if any((each.name, each.bytes) == (used.name, used.bytes) for used in own)]
        if len([device for device in equal if device.number not in taken]) < len(service.gpus):
            other = taken[conflicts[0]]
            message = f"{other.name} serves {other.configuration} on GPU {other.gpus.replace(',', ', ')}"
            raise ResourceUnavailable(message, f"sm120kit stop {other.name}")
        names = {number: other.name for number, other in taken.items()}
        chosen = serving.select_gpus(launch.configuration, equal, names)
        service = replace(service, gpus=tuple(device.number for device in chosen))
    require_port(service.port, service.listen)
    return service


def require_daemon(resolved: ResolvedLaunch, workspace: Workspace) -> None:
    """Require what a launch needs of docker, before its model is downloaded: program, daemon, and a name for the image.

    Raises:
        RequirementMissing: there is no docker program.
        DaemonUnreachable: the daemon does not respond.
        AlreadyExists: the daemon has another image with the name of one that is to be loaded.
    """
    daemon = Daemon()
    server_containers.listed()
    image = resolved.image
    if image and (resolved.published or Layout(workspace.root / "oci").find(image.image.id)):
        loading.require_free(image.reference, image.image, daemon)


def loaded(image: VerifiedImage, workspace: Workspace) -> str:
    """The id of a checked image in the daemon, into which it is loaded if only the state directory has it.

    Raises:
        DaemonUnreachable: no daemon responds.
        AlreadyExists, NotVerified: see :func:`sm120kit.images.loading.load`.
    """
    layout = Layout(workspace.root / "oci")
    manifest = layout.find(image.image.id)
    return loading.load(layout, manifest.digest, Daemon()).id if manifest else image.image.id


def missing_image(prepared: PreparedLaunch, workspace: Workspace) -> str:
    """What must be done before a launch's command line can be run; "" if its image is in the daemon or a registry."""
    if prepared.image is None:
        name = prepared.configuration.engine
        return f"no image of {name} is on this host; replace {NO_IMAGE} by the one that `sm120kit build {name}` builds"
    if prepared.published is None and Layout(workspace.root / "oci").find(prepared.image.image.id):
        reference = prepared.image.reference
        return f"the image is in the state directory; before this can be run: sm120kit image load {reference}"
    return ""


def labelled_service(service: Service, configuration: Configuration, record: Path, *, detached: bool = False) -> Service:
    """The container with a name of its own, so that its removal affects no other, and labels that identify it and its record.

    The name ends with this process's id, or with the port if the container is ``detached`` and outlives this process.
    """
    labels = {
        server_containers.CONFIGURATION_LABEL: configuration.name,
        server_containers.GPUS_LABEL: ",".join(map(str, service.gpus)),
        server_containers.URL_LABEL: service.url,
        server_containers.RECORD_LABEL: str(record.resolve()),
        LAUNCHER_LABEL: DETACHED if detached else launcher_label(),
    }
    suffix = service.port if detached else os.getpid()
    return replace(service, name=f"{service.name}-{suffix}", labels=service.labels | labels)


def serve(
    prepared: PreparedLaunch,
    argv: tuple[str, ...],
    options: LaunchOptions,
    work: Callable[[Run], None],
    *,
    record: RunRecord | None = None,
) -> Run:
    """Run the command line ``argv``, which serves at the service's URL, for ``work``, and record the run. See :func:`run`."""
    service, record = prepared.service, record or RunRecord(prepared, options)
    record.write(argv=tuple(map(masked, argv)))

    def on_healthy(seconds: float) -> None:
        record.write_healthy(seconds)
        reporting.info(f"serving {prepared.configuration.model.repository} at {service.url}")

    reporting.info(f"log: {record.log}")
    server = ServerProcess(argv, service.url, record.log, options.wait_seconds, PATIENCE_SECONDS, service.variables)
    with record.completed_on_failure():
        outcome = serving.serve(server, lambda: work(record.run), progress=options.progress, on_healthy=on_healthy)
    record.write(seconds=round(outcome.seconds, 1), ending=outcome.ending, exit_code=outcome.exit_code)
    reporting.info(f"record: {record.path}")
    if record.run.ending != Ending.STOPPED:
        raise _failure(outcome, record.log)
    return record.run


def _failure(outcome: Outcome, log: Path) -> ServerFailed:
    with log.open("rb") as stream:
        explained = log_rules.explain(stream, ended=outcome.ending is not Ending.NOT_HEALTHY)
    known = [match for match in explained.found if match.kind is not log_rules.Kind.HARMLESS]
    lines = [f"  {match.rule.id} (line {match.number}): {match.line}\n    cause: {match.cause}" for match in known[:3]]
    lines = lines or [f"  {error.line}" for error in explained.errors] or ["  nothing in its log looks like an error"]
    fix = f"{' '.join(known[0].fixes)} " if known else ""
    hint = f"{fix}the whole log: {log}"
    shown = "\n".join(lines)
    if outcome.ending is Ending.NOT_HEALTHY:
        return ServerFailed(f"the server was not healthy after {outcome.seconds:.0f} s and was stopped\n{shown}", hint)
    when = "while it started" if outcome.healthy_seconds is None else "after it had been healthy"
    return ServerFailed(f"the server exited {when}, with exit code {outcome.exit_code}\n{shown}", hint)
