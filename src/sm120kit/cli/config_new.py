"""``sm120kit config new``: write a configuration for a model, or from how it is started elsewhere."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sm120kit.cli.options import Overwrite, Sources, argument, gpu_count, option
from sm120kit.cli.server_plan import PlannedServer
from sm120kit.core import console
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import read_found, read_input_text
from sm120kit.engines import parser
from sm120kit.recipes import configuration_file, configurations, launch_command
from sm120kit.recipes.imported_configuration import ImportedConfiguration, imported
from sm120kit.serving import derived_configuration
from sm120kit.serving.served_model import served_model

MAX_BYTES = 2**20
"""Limit for a script, compose file or recipe."""


def new(
    words: Annotated[
        list[str] | None,
        argument(
            "MODEL", "A repository of the Hugging Face Hub, a folder, or a configuration; after --: options of the engine."
        ),
    ] = None,
    source: Annotated[
        str,
        option(
            "--from FILE|-",
            (
                "How a server is started elsewhere: a docker run, vllm serve or sglang.launch_server line, a compose file,"
                " or a recipe of sparkrun or eugr."
            ),
        ),
    ] = "",
    name: Annotated[str, option("--name NAME", "The name of the configuration.")] = "",
    *,
    server: PlannedServer,
    sources: Sources,
    overwrite: Overwrite = False,
) -> None:
    """Write a configuration for a model, or from how a server is started elsewhere.

    For a model it is what `plan` shows. It is written to configurations/ of your repository (`sm120kit init`). What --from
    cannot express is listed; options are judged by the recorded parser of the newest version of the engine, or of --engine.
    """
    given = words or []
    named = [word for word in given[:1] if not word.startswith("-")]
    arguments = given[len(named) :]
    if bool(named) == bool(source) or (arguments and not arguments[0].startswith("-")):
        raise typer.BadParameter("name either one model or --from FILE; options of the engine follow --")
    if name and not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise typer.BadParameter(f"{name!r} has other characters than a-z, 0-9, '.', '_' and '-'", param_hint="--name")
    if source:
        data, name, comments = _imported(source, server, name, arguments)
    else:
        served = served_model(server.request(named[0], arguments, sources), server.root, planned=True)
        name, comments = name or served.configuration.name, served.notes
        data = configuration_file.content(served.configuration.model_copy(update={"name": name}))
    path = configuration_file.write(name, configuration_file.text({**data, "name": name}, comments), overwrite=overwrite)
    for comment in comments:
        console.info(f"  {comment}")
    configurations.load(str(path))
    console.info(f"written: {path}")
    console.data(name)


def _imported(
    source: str, server: PlannedServer, name: str, arguments: list[str]
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """The content of a configuration that is made from a file, its name, and what it does not express.

    Raises:
        BadInput: the file starts no server of an engine, or one that the engine's parser or image refuses.
        NotFound: there is no such engine or GPU.
    """
    directory = Path(source).parent if source != "-" else None
    try:
        launch = launch_command.read(_text(source), lambda file: _beside(file, directory))
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadInput(f"{source}: {reason}", "it takes a docker run or engine's line, a compose file, or a recipe") from error
    launch = replace(launch, arguments=(*launch.arguments, *arguments))
    unified = server.gpu == "dgx-spark" or (launch.unified and not server.gpu)
    recipe = derived_configuration.imported_engine(launch.engine, server.engine, unified=unified)
    made = imported(launch, recipe, name or "imported", (directory or Path()).absolute())
    if made.problems:
        raise BadInput(_problems(source, made), "correct the file, or name another engine with --engine")
    kind = server.gpu or ("dgx-spark" if unified else "")
    data = made.data
    if kind:
        gpus = gpu_count(server.gpus) or derived_configuration.gpus_of(data)
        data = {
            **data,
            "hardware": data.get("hardware", {})
            | derived_configuration.planned_gpus(kind, gpus).model_dump(mode="json", exclude_defaults=True),
        }
    name = name or derived_configuration.name_of(data)
    if parser.load(recipe.name) is None:
        console.info(f"not checked: the options of {recipe.name} were not recorded")
    return data, name, tuple(f"left out: {text}" for text in made.left_out)


def _problems(source: str, made: ImportedConfiguration) -> str:
    listed = "".join(f"\n  {problem}" for problem in made.problems)
    return f"{source}: {len(made.problems)} problem{'s' * (len(made.problems) > 1)}{listed}"


def _text(source: str) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises:
        OSError, ValueError: it cannot be read, is too large, or no UTF-8.
    """
    if source != "-":
        return read_input_text(Path(source), MAX_BYTES)
    content = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"standard input has more than {MAX_BYTES >> 20} MiB")
    return content.decode()


def _beside(file: str, directory: Path | None) -> str | None:
    """The text of a file beside the imported one; None if it cannot be read."""
    if directory is None or Path(file).is_absolute() or ".." in Path(file).parts:
        return None
    try:
        return read_found(directory / file, MAX_BYTES).decode()
    except (OSError, ValueError):
        return None
