"""``sm120kit launch``: serve a model as a configuration says, in an image that passed its checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import State

if TYPE_CHECKING:
    from sm120kit.launching import Prepared

QUIET_SECONDS = 30
"""How often the log's last line is told where there is no terminal to show it on."""


def launch_(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration by name, or a .toml file.")],
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="The model's folder.")],
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="An image that passed its checks; default: the index's.")
    ] = "",
    index: Annotated[Path, typer.Option("--index", metavar="FILE", help="The list of published images.")] = Path("images.json"),
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port on 127.0.0.1.")] = 8000,
    wait: Annotated[int, typer.Option("--wait", metavar="SECONDS", help="How long it may take to become healthy.")] = 1800,
    print_only: Annotated[bool, typer.Option("--print", help="Print the docker command; start nothing.")] = False,
    compose: Annotated[str, typer.Option("--compose", metavar="FILE|-", help="Write a compose file; start nothing.")] = "",
    kubernetes: Annotated[str, typer.Option("--kubernetes", metavar="FILE|-", help="Write a manifest; start nothing.")] = "",
    root: Annotated[
        Path, typer.Option("--root", metavar="DIR", help="Plan for a host that doctor recorded.", show_default=False)
    ] = Path("/"),
    state: State = None,
) -> None:
    """Serve a model until Ctrl-C: image, checkpoint and memory are checked before anything starts.

    The server listens on 127.0.0.1 only. Its log and a record are kept in the state directory.
    """
    import shlex

    from sm120kit import launch, launching
    from sm120kit.workspace import Workspace

    planned = print_only or bool(compose or kubernetes)
    if root != Path("/") and not planned:
        raise typer.BadParameter("a recorded host cannot start anything", param_hint="--root")
    workspace = Workspace.open(state)
    found = launching.prepare(config, model, image, index, port, root, workspace)
    _show(found)
    if print_only:
        console.data(shlex.join(launch.docker_run(found.service)))
    if compose:
        _write(compose, launch.compose(found.service))
    if kubernetes:
        _write(kubernetes, launching.manifest(found))
    if planned:
        console.say("unverified on SM120")
        return
    told = 0.0

    with console.status() as show:

        def progress(seconds: float, line: str) -> None:
            nonlocal told
            show(f"{seconds:.0f} s  {line[:120]}")
            if seconds - told >= QUIET_SECONDS:
                told = seconds
                console.say(f"{seconds:.0f} s: {line[:200]}")

        kept = launching.run(found, index, workspace, wait_seconds=wait, tell=console.say, progress=progress)
    console.say(f"stopped after {kept.seconds} s")


def _write(place: str, text: str) -> None:
    from sm120kit.workspace import write_atomic

    if place == "-":
        console.data(text.rstrip("\n"))
    else:
        write_atomic(Path(place), text.encode())
        console.say(f"written: {place}")


def _show(found: Prepared) -> None:
    model, wanted = found.model, found.configuration.model
    sizes = ", ".join(f"{dtype} {count / 1e9:.1f} GB" for dtype, count in model.bytes_by_dtype.items())
    vectors = f", {' and '.join(map(str, model.vector_sizes))} elements per scale" if model.vector_sizes else ""
    console.say(f"model    {model.architecture}, {model.quantization}{vectors}; {model.weight_bytes / 1e9:.1f} GB: {sizes}")
    console.say(f"         {len(model.bf16)} tensors are BF16; {len(model.mtp) or 'no'} MTP tensors")
    console.say(f"         the configuration is for {wanted.repository}, {wanted.quantization}")
    if model.claimed_vector_size and model.vector_sizes and model.claimed_vector_size not in model.vector_sizes:
        console.say(
            f"         its config.json claims {model.claimed_vector_size} elements per scale; the tensors say otherwise"
        )
    for line in found.fit.lines():
        console.say(line)
    if found.problems:
        config = found.configuration.name
        console.say(f"doctor   {', '.join(found.problems)}: sm120kit doctor {config} says what to do")
