"""A configuration from how a server is started elsewhere: a command line, a compose file, or a recipe of another tool."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import read_found, read_input_text
from sm120kit.engines import parser
from sm120kit.recipes import launch_command
from sm120kit.recipes.imported_configuration import ImportedConfiguration, imported
from sm120kit.serving import derived_configuration

_MAX_BYTES = 2**20
"""Limit for a script, compose file or recipe."""
_FORMS = "it takes a docker run or engine's line, a compose file, or a recipe"


@dataclass(frozen=True)
class StartedElsewhere:
    """The file that starts a server, and what else a user names: options, engine or recipe, kind and number of GPUs."""

    source: str
    arguments: tuple[str, ...] = ()
    engine: str = ""
    gpu: str = ""
    gpus: int | None = None

    def configuration(self, name: str) -> tuple[dict[str, Any], str, tuple[str, ...]]:
        """The content of a configuration that is made from the file, its name, and what it does not express.

        Raises:
            BadInput: the file starts no server of an engine, or one that the engine's parser or image refuses.
            NotFound: there is no such engine or GPU.
        """
        directory = Path(self.source).parent if self.source != "-" else None
        try:
            launch = launch_command.read(_text(self.source), lambda file: _beside(file, directory))
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise BadInput(f"{self.source}: {reason}", _FORMS) from error
        launch = replace(launch, arguments=(*launch.arguments, *self.arguments))
        unified = self.gpu == "dgx-spark" or (launch.unified and not self.gpu)
        recipe = derived_configuration.imported_engine(launch.engine, self.engine, unified=unified)
        made = imported(launch, recipe, name or "imported", (directory or Path()).absolute())
        if made.problems:
            raise BadInput(_problems(self.source, made), "correct the file, or name another engine with --engine")
        kind = self.gpu or ("dgx-spark" if unified else "")
        data = made.data
        if kind:
            gpus = self.gpus or derived_configuration.gpus_of(data)
            data = {
                **data,
                "hardware": data.get("hardware", {})
                | derived_configuration.planned_gpus(kind, gpus).model_dump(mode="json", exclude_defaults=True),
            }
        name = name or derived_configuration.name_of(data)
        if parser.load(recipe.name) is None:
            reporting.info(f"not checked: the options of {recipe.name} were not recorded")
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
        return read_input_text(Path(source), _MAX_BYTES)
    content = sys.stdin.buffer.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"standard input has more than {_MAX_BYTES >> 20} MiB")
    return content.decode()


def _beside(file: str, directory: Path | None) -> str | None:
    """The text of a file beside the imported one; None if it cannot be read."""
    if directory is None or Path(file).is_absolute() or ".." in Path(file).parts:
        return None
    try:
        return read_found(directory / file, _MAX_BYTES).decode()
    except (OSError, ValueError):
        return None
