"""``sm120kit config new``: write a configuration for a model, or from how it is started elsewhere."""

import re
from typing import Annotated

import typer

from sm120kit.cli.options import Overwrite, Sources, argument, gpu_count, option
from sm120kit.cli.server_plan import PlannedServer
from sm120kit.core import console
from sm120kit.recipes import configuration_file, configurations
from sm120kit.serving.imported_server import StartedElsewhere
from sm120kit.serving.served_model import served_model


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
        wanted = StartedElsewhere(source, tuple(arguments), server.engine, server.gpu, gpu_count(server.gpus))
        data, name, comments = wanted.configuration(name)
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
