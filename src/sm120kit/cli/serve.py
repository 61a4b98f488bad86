"""``sm120kit serve``: serve a model as a configuration describes, from a checked image."""

import functools
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from sm120kit import probes, serving
from sm120kit.cli import verify_server
from sm120kit.cli.build import watcher
from sm120kit.cli.options import (
    ApiKey,
    Draft,
    ImageIndex,
    LocalPatches,
    Overwrite,
    PlannedGpu,
    ServerArguments,
    ServeTarget,
    ServingEngine,
    Sources,
    gpu_count,
    option,
)
from sm120kit.core import console, reporting
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import require_new
from sm120kit.core.urls import Endpoint, read_key
from sm120kit.core.workspace import Workspace
from sm120kit.engines.engine import Node
from sm120kit.hosts.doctor import Impact
from sm120kit.images.delivery import patched_image
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import Device, launch, nodes, server_containers, unified_memory
from sm120kit.serving import answer as answers
from sm120kit.serving.answer import Answer
from sm120kit.serving.checkpoint import Checkpoint
from sm120kit.serving.launch import LaunchOptions, PreparedLaunch
from sm120kit.serving.resolve import ServerLocation, on_node, resolve
from sm120kit.serving.served_model import ModelToServe, ServeRequest, model_folder, served_model

HOST = Path("/")
INTERFACE = "eth0"
"""An example of a network interface."""

Image = Annotated[str, option("--image IMAGE", "A checked image; default: from the index, or on this host.")]


@dataclass(frozen=True)
class LaunchedServer(ImageIndex):
    """Options of a server that is launched to be measured, and stopped afterwards."""

    model: Annotated[Path | None, option("--model DIR", "Launch CONFIG with this model folder, then stop it.")] = None
    image: Annotated[
        str, option("--image IMAGE", "With --model: a checked image; default: from the index, or on this host.")
    ] = ""
    wait: Annotated[int, option("--wait SECONDS", "With --model: time limit to become healthy.", min=1)] = 1800
    restarts: Annotated[int, option("--restarts N", "With --model: restart N times and measure again.", min=0)] = 0

    def prepare(
        self, configuration: Configuration, workspace: Workspace, allreduce: str = "auto"
    ) -> tuple[PreparedLaunch, LaunchOptions]:
        """A checked launch of a configuration, and its options."""
        assert self.model is not None
        launch.require_model(configuration, self.model)
        location = ServerLocation(serving.free_port(), allreduce=allreduce)
        resolved = resolve(configuration, self.image, self.source(), location, workspace)
        prepared = launch.prepare(resolved, self.model, workspace)
        return prepared, LaunchOptions(workspace, self.wait)


@dataclass(frozen=True)
class ServerOptions:
    """The image of a server, its address and GPUs, and how it is started."""

    image: Image = ""
    port: Annotated[int, option("--port PORT", "The port on this host.", min=1, max=65535)] = 8000
    listen: Annotated[str, option("--listen ADDRESS", "The address; other than loopback requires an API key.")] = "127.0.0.1"
    api_key: ApiKey = ""
    gpus: Annotated[
        str,
        option(
            "--gpus NUMBERS",
            "The GPUs, as nvidia-smi numbers them, such as 2,3; default: the first free ones. With --gpu: how many.",
        ),
    ] = ""
    allreduce: Annotated[
        str,
        option(
            "--allreduce METHOD",
            "All-reduce between the GPUs: auto, what `sm120kit tune` found, else the engine's; or nccl, custom, pcie-ipc, ...",
        ),
    ] = "auto"
    gpu: PlannedGpu = ""
    engine: ServingEngine = ""
    draft: Draft = ""
    wait: Annotated[int, option("--wait SECONDS", "Time limit to become healthy.", min=1)] = 1800
    drop_caches: Annotated[
        bool, option("--drop-caches", "Drop the page cache before the start, which takes memory of a DGX Spark.")
    ] = False
    verify: Annotated[bool, option("--verify", "Probe the server after its first answer; stop it if it answers wrongly.")] = (
        False
    )
    patch: LocalPatches = None

    def location(self) -> ServerLocation:
        """Where the server runs.

        Raises:
            typer.BadParameter: the address is no IP address, or the GPUs are no different numbers.
        """
        nodes.address(self.listen, "--listen")
        key = read_key(self.api_key)
        if self.gpu:
            return ServerLocation(self.port, self.listen, key, allreduce=self.allreduce, elsewhere=True)
        words = [word.strip() for word in self.gpus.split(",")] if self.gpus else []
        if not all(re.fullmatch("[0-9]{1,4}", word) for word in words) or len({*map(int, words)}) < len(words):
            raise typer.BadParameter(f"{self.gpus!r} is not a list of different numbers, such as 2,3", param_hint="--gpus")
        return ServerLocation(self.port, self.listen, key, gpus=tuple(sorted(map(int, words))), allreduce=self.allreduce)

    def count(self) -> int | None:
        """The number of GPUs that are named, or with --gpu planned for; None if it is left open.

        Raises:
            typer.BadParameter: it is none.
        """
        return gpu_count(self.gpus) if self.gpu else len(self.location().gpus) or None


@dataclass(frozen=True)
class ModelSource:
    """Where the model comes from."""

    model: Annotated[Path | None, option("--model DIR", "A model folder; default: from the Hugging Face Hub.")] = None
    revision: Annotated[
        str, option("--revision REVISION", "Download this commit, branch or tag, without --model; default: CONFIG's.")
    ] = ""

    def folder(
        self, served: ModelToServe, gpus: Sequence[Device], *, planned: bool, offline: bool
    ) -> tuple[Path, Checkpoint | None]:
        """The named folder, or that of the Hub's cache; downloads what is missing if it fits, see :func:`model_folder`."""
        if self.model:
            return self.model, None
        fits = functools.partial(serving.check_fit, served.configuration, gpus=gpus)
        return model_folder(served, self.revision, fits, planned=planned, offline=offline)


@dataclass(frozen=True)
class SpannedNodes:
    """The machines that a server spans."""

    nodes: Annotated[
        str,
        option("--nodes ADDRESS", "Span machines with these IP addresses, separated by commas; the first, this one, serves."),
    ] = ""
    interface: Annotated[
        str, option("--interface NAME,...", "With --nodes: the network interface of all or of each of them.")
    ] = ""
    rdma: Annotated[str, option("--rdma NAME,...", "With --nodes: their RDMA devices, see `rdma link`; default: TCP.")] = ""


@dataclass(frozen=True)
class PlannedOutput(SpannedNodes):
    """Options that write the containers of a launch instead of starting them."""

    print_only: Annotated[bool, option("--print", "Print the docker command; start nothing.")] = False
    compose: Annotated[str, option("--compose FILE|-", "Write a compose file, with --nodes a directory of them.")] = ""
    overwrite: Overwrite = False
    root: Annotated[Path | None, option("--root FILE", "Plan for another host: its doctor --json.")] = None

    def __bool__(self) -> bool:
        return self.print_only or bool(self.compose)

    def require_planned(self, server: ServerOptions) -> None:
        """Require that options agree on whether something is started.

        Raises:
            typer.BadParameter: they do not.
        """
        if self and server.verify:
            raise typer.BadParameter("nothing is started that could be probed", param_hint="--verify")
        if self and server.patch:
            raise typer.BadParameter(
                "nothing is built to print: build with `sm120kit build`, then name the image by --image", param_hint="--patch"
            )
        if self and server.drop_caches:
            raise typer.BadParameter("nothing is started", param_hint="--drop-caches")
        if self.root and not self:
            raise typer.BadParameter("nothing can be started on a recorded host", param_hint="--root")
        if server.gpu and not self:
            raise typer.BadParameter("it plans for another machine: add --print or --compose", param_hint="--gpu")

    def machines(self, port: int) -> tuple[Node | None, ...]:
        """The machines, or None for this one alone."""
        if not self.nodes:
            for named, value in (("--interface", self.interface), ("--rdma", self.rdma)):
                if value:
                    raise typer.BadParameter(f"{named} requires --nodes", param_hint=named)
            return (None,)
        if self.compose not in ("", "-") and Path(self.compose).is_file():
            raise typer.BadParameter(f"{self.compose} is a file; with --nodes, name a directory", param_hint="--compose")
        return nodes.spanned(self.nodes, self.interface, self.rdma, port)

    def or_unnamed(self, machines: tuple[Node | None, ...], needed: int) -> tuple[Node | None, ...]:
        """The machines; if none are named, for commands that are only printed ``needed`` ones with addresses of examples."""
        if machines != (None,) or needed == 1 or not self.print_only or self.compose:
            return machines
        addresses = tuple(f"192.0.2.{number}" for number in range(1, needed + 1))  # RFC 5737
        console.info(f"{', '.join(addresses)} and {INTERFACE} are examples: name yours with --nodes and --interface")
        return tuple(Node(rank, addresses, INTERFACE) for rank in range(needed))

    def write(self, prepared: Sequence[PreparedLaunch], config: str) -> None:
        """Write the selected forms of the container, or of those of several nodes.

        ``config`` is a name, or the absolute path of a file.

        Raises:
            SystemRefused: a file exists that may not be overwritten, or cannot be written.
        """
        spans = prepared[0].service.node is not None
        files = [_node_file(self.compose, rank) if spans else Path(self.compose) for rank in range(len(prepared))]
        if self.compose not in ("", "-"):
            for file in files:
                require_new(file, "--compose", self.overwrite)
        if self.print_only:
            scripts = [nodes.script(each.service, config) if spans else _docker_line(each) for each in prepared]
            console.data("\n\n".join(scripts), credentials=True)
        written = nodes.compose_file if spans else lambda service, config: serving.compose(service)
        texts = [written(each.service, config) for each in prepared] if self.compose else []
        if self.compose == "-":
            console.data("---\n".join(texts).rstrip("\n"), credentials=True)
        else:
            for file, text, each in zip(files, texts, prepared, strict=False):
                _write(file, text, each)
        console.info("unverified on SM120")


def _docker_line(prepared: PreparedLaunch) -> str:
    return shlex.join(serving.docker_run(prepared.service))


def serve_(
    config: ServeTarget,
    arguments: ServerArguments = None,
    *,
    model: ModelSource,
    server: ServerOptions,
    images: ImageIndex,
    planned: PlannedOutput,
    sources: Sources,
) -> None:
    """Serve a configuration, a repository of the Hugging Face Hub, or a folder.

    A repository or folder is served as the configuration for it and these GPUs describes, or as its config.json and headers
    suggest: `sm120kit plan` prints how. Options of the engine after -- override the configuration's.

    With --patch, first builds the image with these diffs. Downloads the model if it is not on this host, checks image,
    checkpoint and memory, starts the server, and prints a request for curl when it has answered one. The server runs until
    `sm120kit stop`, and listens on 127.0.0.1 without --listen.
    """
    machines, root = planned.machines(server.port), planned.root or HOST
    planned.require_planned(server)
    location = server.location()
    workspace = sources.workspace()
    if model.model and model.revision:
        raise typer.BadParameter(f"it is for downloads; --model names {model.model}", param_hint="--revision")
    if server.patch and server.image:
        raise typer.BadParameter("the image is built with these patches: leave out --image", param_hint="--patch")
    words = tuple(arguments or ())
    count = server.count()
    request = ServeRequest(config, server.engine, server.gpu, server.draft, count, words, model.revision, sources.offline)
    served = served_model(request, root, planned=bool(planned))
    configuration = served.configuration
    if served.derived:
        show_derived(served)
    if model.model:
        launch.require_model(configuration, model.model)
    machines = planned.or_unnamed(machines, configuration.hardware.nodes)
    location = replace(location, node=machines[0], elsewhere=bool(planned) and (served.elsewhere or location.elsewhere))
    image = server.image
    if server.patch:
        server_containers.listed()  # without docker, nothing is built
        with watcher() as watch:
            image = patched_image(configuration.engine, server.patch, sources.run_options(), watch)
    first = resolve(configuration, image, images.source(), location, workspace, root=root, planned=bool(planned))
    every = [first, *(on_node(first, node) for node in machines[1:])]
    if not planned:
        launch.require_daemon(first, workspace)
        if len(machines) > 1:
            launch.require_machines(first, drop_caches=server.drop_caches)
    folder, facts = model.folder(served, first.gpus, planned=bool(planned), offline=sources.offline)
    launches = [launch.prepare(resolved, folder, workspace, facts) for resolved in every]
    prepared = launches[0]
    _show(prepared)
    named = str(Path(config).absolute()) if config.endswith(".toml") else "" if served.derived else configuration.name
    if first.assumed:
        console.info(f"this host does not have {configuration.hardware.gpu}: planned for one that does; there, run before:")
        for line in nodes.preparation(prepared.service, named):
            console.info(f"  {line}")
    show_problems(prepared, named, root)
    if planned:
        planned.write(launches, named)
        _show_needed(prepared, folder, workspace)
    else:
        _start(launches, server, workspace)


def _start(launches: Sequence[PreparedLaunch], server: ServerOptions, workspace: Workspace) -> None:
    """Start a server, on all its machines, and show its first answer."""
    if server.drop_caches:
        unified_memory.drop_page_cache()
    with console.status() as show, ExitStack() as machines:

        def progress(seconds: float, line: str) -> None:
            show(f"{seconds:.0f} s  {line[:120]}")

        on_answer = _verify_answer if server.verify else _show_answer
        options = LaunchOptions(workspace, server.wait, progress, on_answer)
        prepared = launches[0]
        if len(launches) > 1:
            prepared, options = machines.enter_context(launch.with_machines(launches, options))
        launch.start(prepared, options)


def _show_needed(prepared: PreparedLaunch, folder: Path, workspace: Workspace) -> None:
    """Show what machines need before what was written can be run."""
    if hint := launch.missing_image(prepared, workspace):
        console.info(hint)
    if prepared.service.node:
        _, *others = (str(mount.source) for mount in prepared.service.mounts if mount.read_only)
        blobs = f", and the files that it links to in {' and '.join(others)}" if others else ""
        console.info(f"each machine needs {prepared.configuration.model.repository} in {folder.resolve()}{blobs}")
        if prepared.image:
            console.info(f"each machine needs the image {prepared.service.image}")


def show_derived(served: ModelToServe) -> None:
    """Show a configuration that no file has, and what a user may want to decide otherwise."""
    configuration = served.configuration
    console.info(f"derived  {configuration.engine}: {shlex.join(configuration.arguments)}")
    for note in served.notes:
        console.info(f"         {note}")


def _show_answer(endpoint: Endpoint, answer: Answer) -> None:
    console.info(f"first answer after {answer.seconds:.1f} s: {answer.text!r}")
    console.data(answers.curl(endpoint, answer.model, "SM120KIT_API_KEY"))


def _verify_answer(endpoint: Endpoint, answer: Answer) -> None:
    """Show the first answer, then probe the server."""
    _show_answer(endpoint, answer)
    verification = probes.verify(probes.VerifiedServer(endpoint, answer.model))
    verify_server.show(verification)
    verify_server.require_no_fault(verification, "sm120kit verify server writes all requests and answers to a file")


def _node_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"node-{rank}.yaml"


def _write(file: Path, text: str, prepared: PreparedLaunch) -> None:
    """Write a file, which other users cannot read if the server has an API key."""
    secret = prepared.service.key or serving.api_key(prepared.configuration)
    write_atomic(file, text.encode(), 0o600 if secret else 0o644)
    console.info(f"written: {file}")


def _show(prepared: PreparedLaunch) -> None:
    facts, expected = prepared.model, prepared.configuration.model
    vectors = f", {' and '.join(map(str, facts.vector_sizes))} elements per scale" if facts.vector_sizes else ""
    names = ", ".join(facts.architectures) or "unknown architecture"
    console.info(f"model    {names}, {facts.quantization}{vectors}; {facts.weight_bytes / 1e9:.1f} GB")
    mtp = f"{len(facts.mtp) or 'no'} MTP tensors" if facts.tensors else "whether it has MTP tensors is unknown"
    console.info(f"         {mtp}")
    console.info(f"         the configuration is for {expected.repository}, {expected.quantization}")
    if facts.claimed_vector_size and facts.vector_sizes and facts.claimed_vector_size not in facts.vector_sizes:
        console.info(f"         config.json claims {facts.claimed_vector_size} elements per scale, unlike the tensors")
    for line in prepared.fit.lines():
        console.info(line)


def show_problems(prepared: PreparedLaunch, config: str, root: Path) -> None:
    """Show what doctor finds on the host at ``root``: what breaks the server as warnings."""
    for finding in prepared.problems:
        text = f"{finding.check} {finding.verdict.impact}: {finding.verdict.fact}"
        if finding.verdict.impact is Impact.BREAKS:
            reporting.warn(f"doctor: {text}; {finding.verdict.consequence}")
        else:
            console.info(f"doctor   {text}")
    if prepared.problems:
        recorded = ["--root", str(root)] if root != HOST else []
        command = ["sm120kit", "doctor", *[config] * bool(config), *recorded]
        console.info(f"doctor   remedies: {shlex.join(command)}")
