"""From a configuration to a served model: the image, the checkpoint and the host meet here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import checkpoint, delivery, doctor, explain, launch, process, recipe, registry
from sm120kit.checkpoint import Checkpoint
from sm120kit.daemon import Daemon
from sm120kit.doctor import requirements
from sm120kit.errors import GpusTaken, NoSuchImage, NotHealthy, PortTaken, ServerDied
from sm120kit.host import Launched, launcher, probe
from sm120kit.launch import Ending, Fit, Outcome, Service
from sm120kit.launch.render import PATIENCE_SECONDS
from sm120kit.recipe import arguments, configuration
from sm120kit.recipe.configuration import Configuration
from sm120kit.records import Run, VerifiedImage
from sm120kit.verify import image as checks
from sm120kit.workspace import Workspace, write_record

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a start. ``problems`` names doctor's findings that break or slow it.

    ``published`` says that the image is named by its registry's digest, so that other hosts can have it. ``running`` are
    servers that were launched before.
    """

    configuration: Configuration
    image: VerifiedImage
    model: Checkpoint
    fit: Fit
    service: Service
    problems: tuple[str, ...]
    published: bool
    running: tuple[Launched, ...] = ()


def prepare(name: str, model: Path, image: str, index: Path, port: int, root: Path, workspace: Workspace) -> Prepared:
    """Load, look and judge. ``image`` names one of the daemon's; without, the index is asked for one of the engine.

    Raises:
        UnknownName: no such configuration, or no recipe of its engine.
        BadRecipe: a configuration that is not well-formed, or that the engine's argument parser refuses.
        NotVerified: the image did not pass its checks.
        Sm120kitError: whatever else does not fit; see :mod:`sm120kit.checkpoint` and :func:`sm120kit.launch.judge`.
    """
    wanted = configuration.load(name)
    engine = recipe.load_engine(wanted.engine)
    arguments.require_released(wanted)
    found = checkpoint.read(model)
    host = probe(root)
    if image:
        verified = checks.verified(image, Daemon(), workspace)
        image_name = verified.image.id
    else:
        # An image of an engine is for one kind of machine. Which one a recorded host is, it does not say.
        machine = engine.environment.platforms[0].split("_", 3)[3]
        entry = registry.find(wanted.engine, index, f"linux/{MACHINES[machine]}")
        registry.require_passed(entry.verified)
        verified, image_name = entry.verified, f"{entry.repository}@{entry.digest}"
    devices = [
        launch.Device(number, gpu.name or "unnamed GPU", requirements.memory_bytes(host, gpu))
        for number, gpu in requirements.suitable(host, wanted)
    ]
    fit = launch.judge(wanted, verified, found, devices)
    gpus = [(gpu.number, gpu.name) for gpu in fit.gpus]
    service = launch.make(wanted, engine, verified, image_name, model, gpus, workspace, port)
    findings = doctor.diagnose(host, doctor.checks_for(wanted))
    serious = (doctor.Impact.BREAKS, doctor.Impact.SLOWS)
    problems = tuple(finding.check for finding in findings if finding.verdict.impact in serious)
    return Prepared(wanted, verified, found, fit, service, problems, not image, host.launched)


def manifest(prepared: Prepared) -> str:
    """A Kubernetes manifest.

    Raises:
        NoSuchImage: the image has no digest in a registry.
    """
    if not prepared.published:
        raise NoSuchImage(
            f"a cluster cannot have {prepared.image.reference}: it is only in this daemon",
            "publish it (sm120kit publish) and leave --image out: then the index's digest is used",
        )
    return launch.kubernetes(prepared.service)


def run(
    prepared: Prepared,
    index: Path,
    workspace: Workspace,
    *,
    wait_seconds: float,
    tell: Callable[[str], None],
    progress: Callable[[float, str], None],
    work: Callable[[Run], None] | None = None,
) -> Run:
    """Start the container and stay until it ends. The record is written when the server is healthy, and again at the end.

    With ``work``, that is done with the healthy server's record, and then the server is stopped; see :func:`launch.serve`.

    Raises:
        PortTaken: another server listens on the port.
        GpusTaken: another one that was launched has the GPUs, perhaps one whose launcher was killed.
        ServerDied, NotHealthy: with what the log says about it.
    """
    service = own(prepared)
    if not launch.port_is_free(service.port):
        raise PortTaken(f"something listens on 127.0.0.1:{service.port} already", "stop it, or name another one with --port")
    if prepared.published:
        delivery.pull(prepared.configuration.engine, index, prepared.image.image.platform, workspace, tell)
    return serve(
        prepared.configuration,
        prepared.image,
        service,
        launch.docker_run(service, values=False),
        workspace,
        wait_seconds=wait_seconds,
        tell=tell,
        progress=progress,
        remove=("docker", "rm", "--force", service.name),
        work=work,
    )


def own(prepared: Prepared) -> Service:
    """The container with a name of its own, so that nothing else is removed when it ends, and labels by which it is found.

    Raises:
        GpusTaken: another server that was launched has one of its GPUs.
    """
    service = prepared.service
    for other in prepared.running:
        if set(other.gpus) & set(service.gpus):
            gone = "" if other.attended else "; the sm120kit launch that started it is gone"
            raise GpusTaken(
                f"{other.name} serves {other.configuration} on GPU {', '.join(map(str, other.gpus))}{gone}",
                f"docker stop {other.name}",
            )
    labels = {
        "sm120kit.configuration": prepared.configuration.name,
        "sm120kit.gpus": ",".join(map(str, service.gpus)),
        "sm120kit.launcher": launcher(),
    }
    return replace(service, name=f"{service.name}-{os.getpid()}", labels=labels)


def serve(
    wanted: Configuration,
    image: VerifiedImage,
    service: Service,
    argv: tuple[str, ...],
    workspace: Workspace,
    *,
    wait_seconds: float,
    tell: Callable[[str], None],
    progress: Callable[[float, str], None],
    remove: tuple[str, ...] = (),
    work: Callable[[Run], None] | None = None,
) -> Run:
    """Run the command line ``argv``, which serves at the service's URL, and keep its record. See :func:`run`.

    ``remove`` is run at the end, however it ends: a command line that had to be killed leaves its container behind.
    """
    now = time.gmtime()
    place = workspace.root / "runs" / f"{wanted.name}-{time.strftime('%Y%m%dT%H%M%SZ', now)}-{os.getpid()}"
    log, record = place.with_suffix(f"{place.suffix}.log"), place.with_suffix(f"{place.suffix}.json")
    kept = Run(
        configuration=wanted.name,
        engine=wanted.engine,
        image=image.image.content,
        image_name=service.image,
        model=str(service.mounts[0].source),
        argv=argv,
        environment=tuple(sorted(service.environment)),
        build_id=image.image.labels.get("sm120kit.build-id", ""),
        url=service.url,
        log=str(log),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
    )

    def healthy(seconds: float) -> None:
        nonlocal kept
        kept = replace(kept, healthy_seconds=round(seconds, 1))
        write_record(record, kept)
        tell(f"healthy after {seconds:.1f} s; unverified on SM120")
        tell(f"serving {wanted.model.repository} at {service.url}" + ("" if work else "; Ctrl-C stops it"))

    def do() -> None:
        assert work
        try:
            work(kept)
        except BaseException:
            write_record(record, replace(kept, ending=Ending.STOPPED))
            raise

    tell(f"log: {log}")
    try:
        outcome = launch.serve(
            argv,
            service.url,
            log,
            environment=service.environment,
            wait_seconds=wait_seconds,
            patience_seconds=PATIENCE_SECONDS,
            progress=progress,
            healthy=healthy,
            work=do if work else None,
        )
    finally:
        if remove:
            process.run(remove, check=False)
    kept = replace(
        kept,
        seconds=round(outcome.seconds, 1),
        ending=outcome.ending,
        exit_code=outcome.exit_code,
    )
    write_record(record, kept)
    tell(f"record: {record}")
    if outcome.ending is not Ending.STOPPED:
        raise _failure(outcome, log)
    return kept


def _failure(outcome: Outcome, log: Path) -> ServerDied | NotHealthy:
    with log.open("rb") as stream:
        said = explain.read(stream)
    known = [one for one in said.found if not one.rule.harmless]
    lines = [f"  {one.rule.id} (line {one.number}): {one.line}\n    cause: {one.rule.cause}" for one in known[:3]]
    lines = lines or [f"  {line}" for line in said.errors] or ["  nothing in its log looks like an error"]
    fix = f"{known[0].rule.fix}; " if known else ""
    hint = f"{fix}the whole log: {log}"
    shown = "\n".join(lines)
    if outcome.ending is Ending.NOT_HEALTHY:
        return NotHealthy(f"the server was not healthy after {outcome.seconds:.0f} s and was stopped\n{shown}", hint)
    when = "while it started" if outcome.healthy_seconds is None else "after it had been healthy"
    return ServerDied(f"the server ended by itself {when}, with exit code {outcome.exit_code}\n{shown}", hint)
