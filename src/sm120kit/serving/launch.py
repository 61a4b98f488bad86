"""Launch a configuration: check image, checkpoint and host, start the container, and record the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import recipes, serving
from sm120kit.core import process, reporting
from sm120kit.core.errors import GpusTaken, NoSuchImage, NotHealthy, PortTaken, ServerDied
from sm120kit.core.state import Workspace, write_record
from sm120kit.core.urls import REDACTED, redacted
from sm120kit.hosts import doctor, log_rules
from sm120kit.hosts.doctor import requirements
from sm120kit.hosts.facts import LaunchedContainer, launcher_label, probe
from sm120kit.images import checks, loading, published
from sm120kit.images import context as images
from sm120kit.images.docker import Daemon
from sm120kit.images.oci import Layout
from sm120kit.images.published import Source
from sm120kit.images.records import PublishedImage, VerifiedImage
from sm120kit.images.stores import EveryStore
from sm120kit.images.transports import DaemonTransport
from sm120kit.recipes import arguments
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import Ending, Fit, Outcome, Placement, Run, ServerProcess, Service, checkpoint
from sm120kit.serving.checkpoint import Checkpoint
from sm120kit.serving.render import PATIENCE_SECONDS

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Machines of wheel platform tags, and the architectures of image platforms."""


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that passed its checks. ``problems`` names doctor's findings that break or slow the server.

    ``published`` is the entry in the index ``source``, None for an image that only this host has. ``running`` are the
    containers that other launches started on this host.
    """

    configuration: Configuration
    image: VerifiedImage
    model: Checkpoint
    fit: Fit
    service: Service
    problems: tuple[str, ...]
    source: Source
    published: PublishedImage | None = None
    running: tuple[LaunchedContainer, ...] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch; the server has ``wait_seconds`` to become healthy.

    ``report`` gets lines for the user, ``progress`` the seconds since the start and the log's last line until it is healthy.
    """

    workspace: Workspace
    wait_seconds: float
    report: Callable[[str], None]
    progress: Callable[[float, str], None] = lambda seconds, line: None


def prepare(
    configuration: Configuration, model: Path, image: str, source: Source, port: int, root: Path, workspace: Workspace
) -> PreparedLaunch:
    """Check that a configuration can be served from a model folder on the host at ``root``. Starts nothing.

    ``image`` names one in the state directory or the daemon; if it is empty, the index ``source`` must list one of the
    configuration's engine. If the source has a key, an image by name must have been built on this host, or be listed and
    signed.

    Raises:
        UnknownName: no recipe builds the configuration's engine.
        BadRecipe: the engine's argument parser refuses the configuration's arguments.
        NotVerified: the image did not pass its checks.
        NotAttested, RolledBack: see :func:`published.select`.
        Sm120kitError: any other problem; see :mod:`sm120kit.serving.checkpoint` and :func:`sm120kit.serving.check_fit`.
    """
    engine = recipes.load_engine(configuration.engine)
    arguments.require_released(configuration)
    facts = checkpoint.read(model)
    host = probe(root)
    if image:
        verified, entry = checks.require_verified(image, EveryStore(workspace), workspace), None
        image_name = verified.image.id
        if source.key and not images.built_locally(verified.image, workspace):
            published.require_signed(image, source, workspace)
    else:
        # The records of a host do not include its architecture; the engine's images are for one only.
        machine = engine.environment.platforms[0].split("_", 3)[3]
        entry = published.select(configuration.engine, source, f"linux/{MACHINES[machine]}", workspace)
        verified, image_name = entry.verified, f"{entry.repository}@{entry.digest}"
    devices = [
        serving.Device(number, gpu.name or "unnamed GPU", requirements.memory_bytes(host, gpu))
        for number, gpu in requirements.suitable(host, configuration)
    ]
    fit = serving.check_fit(configuration, verified, facts, devices)
    placement = Placement([(gpu.number, gpu.name) for gpu in fit.gpus], port, workspace)
    service = serving.make_service(configuration, engine, verified, image_name, model, placement)
    for risk in serving.risks(configuration):
        reporting.warn(f"{configuration.name}: {risk}")
    findings = doctor.diagnose(host, doctor.checks_for(configuration))
    serious = (doctor.Impact.BREAKS, doctor.Impact.SLOWS)
    problems = tuple(finding.check for finding in findings if finding.verdict.impact in serious)
    return PreparedLaunch(configuration, verified, facts, fit, service, problems, source, entry, host.launched)


def manifest(prepared: PreparedLaunch) -> str:
    """The Kubernetes manifest of a launch.

    Raises:
        NoSuchImage: the image has no digest in a registry.
    """
    if not prepared.published:
        raise NoSuchImage(
            f"{prepared.image.reference} exists only in this daemon; a cluster cannot pull it",
            "publish it (sm120kit publish) and omit --image: then the index's digest is used",
        )
    return serving.kubernetes(prepared.service)


def run(prepared: PreparedLaunch, options: LaunchOptions, work: Callable[[Run], None] | None = None) -> Run:
    """Start the container and wait until it ends. The record is written when the server is healthy, and again at the end.

    ``work`` is called with the record of the healthy server, which is stopped afterwards; see :func:`serving.serve`.

    Raises:
        PortTaken: another process listens on the port.
        GpusTaken: another launched container has the GPUs, also one whose launcher was killed.
        ServerDied, NotHealthy: with the known errors in its log.
    """
    service = labelled_service(prepared)
    if not serving.port_is_free(service.port):
        raise PortTaken(f"127.0.0.1:{service.port} is in use", "stop what listens there, or choose another port with --port")
    if prepared.published:
        published.pull(prepared.published, prepared.source, options.workspace, DaemonTransport(Daemon(), options.report))
    else:
        service = replace(service, image=loaded(prepared.image, options.workspace))
    argv = serving.docker_run(service, values=False)
    remove = ("docker", "rm", "--force", service.name)
    return serve(replace(prepared, service=service), argv, options, remove=remove, work=work)


def loaded(image: VerifiedImage, workspace: Workspace) -> str:
    """The id of a verified image in the daemon, into which it is loaded if only the state directory has it.

    Raises:
        DaemonUnreachable: no daemon responds.
        TagTaken, NotVerified: see :func:`sm120kit.images.loading.load`.
    """
    layout = Layout(workspace.root / "oci")
    manifest = layout.find(image.image.id)
    return loading.load(layout, manifest.digest, Daemon()).id if manifest else image.image.id


def needs_load(prepared: PreparedLaunch, workspace: Workspace) -> bool:
    """Whether the image of a launch is in the state directory, and must be loaded before its command line can be run."""
    return prepared.published is None and Layout(workspace.root / "oci").find(prepared.image.image.id) is not None


def labelled_service(prepared: PreparedLaunch) -> Service:
    """The container with a name of this process's own, so that its removal affects no other, and labels that identify it.

    Raises:
        GpusTaken: another launched container has one of its GPUs.
    """
    service = prepared.service
    for other in prepared.running:
        if set(other.gpus) & set(service.gpus):
            orphaned = "" if other.attended else "; the sm120kit serve that started it is gone"
            raise GpusTaken(
                f"{other.name} serves {other.configuration} on GPU {', '.join(map(str, other.gpus))}{orphaned}",
                f"docker stop {other.name}",
            )
    labels = {
        "sm120kit.configuration": prepared.configuration.name,
        "sm120kit.gpus": ",".join(map(str, service.gpus)),
        "sm120kit.launcher": launcher_label(),
    }
    return replace(service, name=f"{service.name}-{os.getpid()}", labels=labels)


def serve(
    prepared: PreparedLaunch,
    argv: tuple[str, ...],
    options: LaunchOptions,
    *,
    remove: tuple[str, ...] = (),
    work: Callable[[Run], None] | None = None,
) -> Run:
    """Run the command line ``argv``, which serves at the service's URL, and record the run. See :func:`run`.

    ``remove`` is a command line that runs at the end in any case: a docker client that was killed leaves its container behind.
    """
    configuration, service = prepared.configuration, prepared.service
    now = time.gmtime()
    stem = f"{configuration.name}-{time.strftime('%Y%m%dT%H%M%SZ', now)}-{os.getpid()}"
    log, record_path = (options.workspace.root / "runs" / f"{stem}.{suffix}" for suffix in ("log", "json"))
    record = Run(
        configuration=configuration.name,
        engine=configuration.engine,
        image=prepared.image.image.content,
        image_name=service.image,
        model=str(service.mounts[0].source),
        argv=_without_secrets(argv, configuration),
        environment=tuple(sorted(service.environment)),
        build_id=prepared.image.image.labels.get("sm120kit.build-id", ""),
        url=service.url,
        log=str(log),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
    )

    def on_healthy(seconds: float) -> None:
        nonlocal record
        record = replace(record, healthy_seconds=round(seconds, 1))
        write_record(record_path, record)
        options.report(f"healthy after {seconds:.1f} s; unverified on SM120")
        stop = "" if work else "; Ctrl-C stops it"
        options.report(f"serving {configuration.model.repository} at {service.url}{stop}")

    def recorded_work() -> None:
        assert work
        try:
            work(record)
        except BaseException:
            write_record(record_path, replace(record, ending=Ending.STOPPED))
            raise

    options.report(f"log: {log}")
    server = ServerProcess(argv, service.url, log, options.wait_seconds, PATIENCE_SECONDS, service.environment)
    try:
        outcome = serving.serve(server, progress=options.progress, on_healthy=on_healthy, work=recorded_work if work else None)
    finally:
        if remove:
            process.run(remove, check=False)
    record = replace(record, seconds=round(outcome.seconds, 1), ending=outcome.ending, exit_code=outcome.exit_code)
    write_record(record_path, record)
    options.report(f"record: {record_path}")
    if outcome.ending is not Ending.STOPPED:
        raise _failure(outcome, log)
    return record


def _without_secrets(argv: tuple[str, ...], configuration: Configuration) -> tuple[str, ...]:
    """A command line as records and receipts contain it."""
    key = serving.api_key(configuration)
    return tuple(redacted(text.replace(key, REDACTED) if key else text) for text in argv)


def _failure(outcome: Outcome, log: Path) -> ServerDied | NotHealthy:
    with log.open("rb") as stream:
        explained = log_rules.explain(stream, ended=outcome.ending is not Ending.NOT_HEALTHY)
    known = [match for match in explained.found if match.rule.kind is not log_rules.Kind.HARMLESS]
    lines = [f"  {match.rule.id} (line {match.number}): {match.line}\n    cause: {match.rule.cause}" for match in known[:3]]
    lines = lines or [f"  {error.line}" for error in explained.errors] or ["  nothing in its log looks like an error"]
    fix = f"{' '.join(known[0].fixes)} " if known else ""
    hint = f"{fix}the whole log: {log}"
    shown = "\n".join(lines)
    if outcome.ending is Ending.NOT_HEALTHY:
        return NotHealthy(f"the server was not healthy after {outcome.seconds:.0f} s and was stopped\n{shown}", hint)
    when = "while it started" if outcome.healthy_seconds is None else "after it had been healthy"
    return ServerDied(f"the server exited {when}, with exit code {outcome.exit_code}\n{shown}", hint)
