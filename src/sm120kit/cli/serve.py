"""``sm120kit serve``: serve a model as a configuration describes, from a verified image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import ConfigName, PublishedImages, State
from sm120kit.core import console

if TYPE_CHECKING:
    from sm120kit.recipes.configurations import Configuration
    from sm120kit.serving.launch import LaunchOptions, PreparedLaunch

HOST = Path("/")


@dataclass(frozen=True)
class LaunchedServer:
    """Options of a server that is launched to be measured, and stopped afterwards."""

    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Launch CONFIG with this model folder, then stop it.")
    ] = None
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="With --checkpoint: a verified image; default: from the index.")
    ] = ""
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, metavar="PORT", help="With --checkpoint: the port on 127.0.0.1.")
    ] = 8000
    wait: Annotated[int, typer.Option("--wait", metavar="SECONDS", help="With --checkpoint: time limit to become healthy.")] = (
        1800
    )
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, metavar="N", help="With --checkpoint: restart N times and measure again.")
    ] = 0
    state: State = None

    def prepare(self, configuration: Configuration, images: PublishedImages) -> tuple[PreparedLaunch, LaunchOptions]:
        """A checked launch of a configuration, and its options.

        Raises:
            Sm120kitError: see :func:`sm120kit.serving.launch.prepare`.
        """
        from sm120kit.core.state import Workspace
        from sm120kit.serving import launch

        assert self.checkpoint is not None
        workspace = Workspace.open(self.state)
        prepared = launch.prepare(configuration, self.checkpoint, self.image, images.source(), self.port, HOST, workspace)
        return prepared, launch.LaunchOptions(workspace, self.wait, console.info)


@dataclass(frozen=True)
class ServerOptions:
    """The image of a server, and how it is started."""

    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="A verified image; default: from the index.")] = ""
    port: Annotated[int, typer.Option("--port", min=1, max=65535, metavar="PORT", help="The port on 127.0.0.1.")] = 8000
    wait: Annotated[int, typer.Option("--wait", metavar="SECONDS", help="Time limit to become healthy.")] = 1800
    state: State = None


@dataclass(frozen=True)
class PlannedOutput:
    """Options that write the container of a launch instead of starting it."""

    print_only: Annotated[bool, typer.Option("--print", help="Print the docker command; start nothing.")] = False
    compose: Annotated[str, typer.Option("--compose", metavar="FILE|-", help="Write a compose file; start nothing.")] = ""
    kubernetes: Annotated[str, typer.Option("--kubernetes", metavar="FILE|-", help="Write a manifest; start nothing.")] = ""
    root: Annotated[
        Path, typer.Option("--root", metavar="DIR", help="Plan for a host that doctor recorded.", show_default=False)
    ] = HOST

    def __bool__(self) -> bool:
        return self.print_only or bool(self.compose or self.kubernetes)

    def write(self, prepared: PreparedLaunch) -> None:
        """Write the selected forms of the container."""
        import shlex

        from sm120kit import serving
        from sm120kit.serving import launch

        if self.print_only:
            console.data(shlex.join(serving.docker_run(prepared.service)), credentials=True)
        if self.compose:
            _write(self.compose, serving.compose(prepared.service))
        if self.kubernetes:
            _write(self.kubernetes, launch.manifest(prepared))
            secret = f"kubectl create secret generic {serving.secret_name(prepared.service)} --from-file=api-key=/dev/stdin"
            console.info(f"create the Secret with its API key once: openssl rand -hex 32 | tr -d '\\n' | {secret}")
        console.info("unverified on SM120")


def serve_(
    config: ConfigName,
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model folder.")],
    *,
    server: ServerOptions,
    images: PublishedImages,
    planned: PlannedOutput,
) -> None:
    """Serve a model as a configuration describes.

    Runs until Ctrl-C. Image, checkpoint and memory are checked before anything starts. The server listens on 127.0.0.1 only.
    Its log and a record of the run are written to the state directory.
    """
    from sm120kit.core.state import Workspace
    from sm120kit.recipes import configurations
    from sm120kit.serving import launch

    if planned.root != HOST and not planned:
        raise typer.BadParameter("nothing can be started on a recorded host", param_hint="--root")
    workspace = Workspace.open(server.state)
    configuration = configurations.load(config)
    prepared = launch.prepare(configuration, model, server.image, images.source(), server.port, planned.root, workspace)
    _show(prepared)
    if planned:
        planned.write(prepared)
        if launch.needs_load(prepared, workspace):
            reference = prepared.image.reference
            console.info(f"the image is in the state directory; before this can be run: sm120kit image load {reference}")
        return
    with console.status() as show:

        def progress(seconds: float, line: str) -> None:
            show(f"{seconds:.0f} s  {line[:120]}")

        run = launch.run(prepared, launch.LaunchOptions(workspace, server.wait, console.info, progress))
    console.info(f"stopped after {run.seconds} s")


def _write(destination: str, text: str) -> None:
    """Write to a file, or to standard output for ``-``."""
    from sm120kit.core.state import write_atomic

    if destination == "-":
        console.data(text.rstrip("\n"), credentials=True)
    else:
        write_atomic(Path(destination), text.encode())
        console.info(f"written: {destination}")


def _show(prepared: PreparedLaunch) -> None:
    facts, expected = prepared.model, prepared.configuration.model
    sizes = ", ".join(f"{dtype} {count / 1e9:.1f} GB" for dtype, count in facts.bytes_by_dtype.items())
    vectors = f", {' and '.join(map(str, facts.vector_sizes))} elements per scale" if facts.vector_sizes else ""
    console.info(f"model    {facts.architecture}, {facts.quantization}{vectors}; {facts.weight_bytes / 1e9:.1f} GB: {sizes}")
    console.info(f"         {len(facts.bf16)} tensors are BF16; {len(facts.mtp) or 'no'} MTP tensors")
    console.info(f"         the configuration is for {expected.repository}, {expected.quantization}")
    if facts.claimed_vector_size and facts.vector_sizes and facts.claimed_vector_size not in facts.vector_sizes:
        console.info(f"         config.json claims {facts.claimed_vector_size} elements per scale, unlike the tensors")
    for line in prepared.fit.lines():
        console.info(line)
    if prepared.problems:
        name = prepared.configuration.name
        console.info(f"doctor   {', '.join(prepared.problems)}: for remedies run sm120kit doctor {name}")
