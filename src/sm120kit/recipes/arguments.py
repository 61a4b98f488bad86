"""The arguments of a configuration's server: what its engine's parser and lockfile make of them."""

from __future__ import annotations

from itertools import pairwise

from sm120kit.core.errors import BadInput
from sm120kit.engines import Node, parser
from sm120kit.recipes import locate, lock_path, lockfile
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.schema import EngineRecipe

PORT = 8000
"""The server's port in its container."""
MODEL_DIRECTORY = "/model"
"""Where the directory of the model is mounted in a container, read-only."""


def require_known(configuration: Configuration) -> bool:
    """Reject a configuration whose arguments its engine's parser rejects.

    Returns whether they were checked: false if there are any, and the options of the engine were not recorded.

    Raises:
        BadInput: an argument is rejected, or needs a distribution that is not locked; the message has the reason.
    """
    if missing := missing_extras(configuration):
        engine = configuration.engine
        raise BadInput(
            f"{configuration.name}: its arguments need {', '.join(missing)}, which the lockfile of {engine} lacks",
            f"add it to environment.requires of the recipe and run `sm120kit recipe lock {engine}`; or omit the argument",
        )
    known = parser.load(configuration.engine)
    if known and (reason := parser.rejection(known, configuration.arguments)):
        raise BadInput(
            f"{configuration.name}: the argument parser of {configuration.engine} rejects: {reason}",
            f"correct its arguments; {parser.record_path(configuration.engine)} lists all options",
        )
    return known is not None or not configuration.arguments


def missing_extras(configuration: Configuration) -> tuple[str, ...]:
    """Distributions that an argument of a configuration needs and the lockfile of its engine lacks; none without a lockfile.

    Raises:
        Mismatch: the lockfile is damaged.
    """
    path = lock_path(locate(configuration.engine))
    if not path.is_file():
        return ()
    locked = {wheel.name for closure in lockfile.read(path).closures for wheel in closure.wheels}
    optional, pairs = configuration.served_by.optional, pairwise(configuration.words)
    needed = {optional[pair] for pair in pairs if pair in optional}
    return tuple(sorted(needed - locked))


def serve_arguments(
    configuration: Configuration,
    model: str = MODEL_DIRECTORY,
    address: tuple[str, int] = ("0.0.0.0", PORT),
    node: Node | None = None,
) -> tuple[str, ...]:
    """The arguments after the ``serve`` command of a configuration's engine.

    ``model`` is the model's directory in the container, and the server listens there on ``address``.
    """
    name = configuration.model.repository
    return configuration.served_by.serve_arguments(model, name, address, configuration.arguments, node)


def help_text(engine: EngineRecipe) -> str:
    """The usage of an engine's serve command, from the recorded options: a line each, without their descriptions."""
    known = parser.load(engine.name)
    command = " ".join(engine.serve)
    lines = [f"{engine.served_by.name} {engine.version}, served by: {command} [ARGUMENT]...", ""]
    if known is None:
        lines.append(f"The options of {engine.name} were not recorded.")
    else:
        options = sorted(known.options, key=lambda option: option.names)
        lines += [f"  {', '.join(option.names)} {_value(option)}".rstrip() for option in options if option.names]
    lines += ["", "This container has no NVIDIA driver. With a GPU (docker run --gpus all), --help describes the options."]
    return "".join(f"{line}\n" for line in lines)


def _value(option: parser.Option) -> str:
    """The values of an option in the form of argparse."""
    value = f"{{{','.join(option.choices)}}}" if option.choices else {"int": "INT", "float": "FLOAT"}.get(option.type, "VALUE")
    if isinstance(option.nargs, int):
        return " ".join([value] * option.nargs)
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}.get(option.nargs or "", value)
