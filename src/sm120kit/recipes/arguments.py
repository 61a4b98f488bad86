"""Check a configuration's arguments against the options of its engine, without the engine.

``recipe new --arguments`` and ``tests/arguments/collect.py`` record the options of the argument parser in the locked wheel, in
``recipes/engines/<recipe>.arguments.json`` beside the recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from sm120kit.core.errors import BadRecipe
from sm120kit.core.outside import parse_json
from sm120kit.core.state import data_root
from sm120kit.engines import Node
from sm120kit.recipes import locate, lock_path, lockfile
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.load import did_you_mean
from sm120kit.recipes.schema import EngineRecipe

PORT = 8000
"""The server's port in its container."""
MODEL_DIRECTORY = "/model"
"""Where the directory of the model is mounted in a container, read-only."""

_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "loads": parse_json}
"""Types of values that are checked. All others are functions of the engine, which is not available."""


@dataclass(frozen=True)
class Option:
    """An option with its names; no names for a positional argument. ``nargs`` and ``choices`` as in argparse."""

    names: tuple[str, ...]
    nargs: str | int | None
    type: str
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Arguments:
    """The options of the parser in an engine's wheel (by sha256).

    ``answers`` are the parser's own error messages for each configuration that names this recipe; empty for a command line
    that it accepts.
    """

    recipe: str
    wheel_sha256: str
    options: tuple[Option, ...]
    answers: dict[str, str]


def record_path(recipe: str) -> Path:
    """Path of the record of a recipe's options."""
    return data_root() / "recipes" / "engines" / f"{recipe}.arguments.json"


def load(recipe: str) -> Arguments | None:
    """The recorded options of a recipe's engine, or None without a record.

    Raises:
        BadRecipe: the record is damaged.
    """
    path = record_path(recipe)
    if not path.is_file():
        return None
    try:
        record = parse_json(path.read_bytes())
        options = tuple(map(_option, record["options"]))
        return Arguments(record["recipe"], record["wheel"]["sha256"], options, record["answers"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecipe(f"{path} is not a record of arguments: {error!r}", "restore it") from error


@cache
def recorded() -> tuple[Arguments, ...]:
    """All records of options, by recipe.

    Raises:
        BadRecipe: a record is damaged.
    """
    suffix = ".arguments.json"
    names = sorted(path.name.removesuffix(suffix) for path in record_path("").parent.glob(f"*{suffix}"))
    return tuple(record for name in names if (record := load(name)))


def accepts(record: Arguments, name: str, value: str = "") -> bool | None:
    """Whether a parser has an option and, if given, permits its value; None if it has the option without a list of values."""
    option = next((option for option in record.options if name in option.names), None)
    if option is None or not value:
        return option is not None
    return None if option.choices is None else value in option.choices


def _option(table: dict[str, Any]) -> Option:
    choices = table["choices"]
    return Option(tuple(table["names"]), table["nargs"], table["type"], None if choices is None else tuple(choices))


def require_known(configuration: Configuration) -> None:
    """Reject a configuration whose arguments its engine's parser rejects.

    A configuration passes if there is no record of its engine's options.

    Raises:
        BadRecipe: an argument is rejected, or needs a distribution that is not locked; the message has the reason.
    """
    if missing := missing_extras(configuration):
        engine = configuration.engine
        raise BadRecipe(
            f"{configuration.name}: its arguments need {', '.join(missing)}, which the lockfile of {engine} lacks",
            f"add it to environment.requires of the recipe and run `sm120kit recipe lock {engine}`; or omit the argument",
        )
    known = load(configuration.engine)
    reason = rejection(known, configuration.arguments) if known else ""
    if reason:
        raise BadRecipe(
            f"{configuration.name}: the argument parser of {configuration.engine} rejects: {reason}",
            f"correct its arguments; {record_path(configuration.engine)} lists all options",
        )


def missing_extras(configuration: Configuration) -> tuple[str, ...]:
    """Distributions that an argument of a configuration needs and the lockfile of its engine lacks; none without a lockfile.

    Raises:
        LockDiffers: the lockfile is damaged.
    """
    path = lock_path(locate(configuration.engine))
    if not path.is_file():
        return ()
    locked = {wheel.name for closure in lockfile.read(path).closures for wheel in closure.wheels}
    optional = configuration.served_by.optional
    pairs = pairwise([word for argument in configuration.arguments for word in argument.split("=", 1)])
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


def rejection(known: Arguments, argv: Sequence[str]) -> str:
    """The reason why the engine's parser rejects ``argv``; empty if it accepts. Abbreviated options are rejected."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for option in known.options:
        if not option.names:
            parser.add_argument("positional", nargs=option.nargs)
        elif option.nargs == 0:
            parser.add_argument(*option.names, action="store_true")
        else:
            action = parser.add_argument(*option.names, nargs=option.nargs, type=_TYPES.get(option.type, str))
            action.choices = None if option.choices is None else _TextChoices(option.choices)
    try:
        _, rest = parser.parse_known_args(list(argv))
    except ValueError as error:
        return str(error)
    names = [name for option in known.options for name in option.names]
    return "; ".join(f"unknown argument {argument}{did_you_mean(argument, names)}" for argument in rest)


def help_text(engine: EngineRecipe) -> str:
    """The usage of an engine's serve command, from the recorded options: a line each, without their descriptions."""
    known = load(engine.name)
    command = " ".join(engine.serve)
    lines = [f"{engine.served_by.name} {engine.version}, served by: {command} [ARGUMENT]...", ""]
    if known is None:
        lines.append(f"The options of {engine.name} were not recorded.")
    else:
        options = sorted(known.options, key=lambda option: option.names)
        lines += [f"  {', '.join(option.names)} {_value(option)}".rstrip() for option in options if option.names]
    lines += ["", "This container has no NVIDIA driver. With a GPU (docker run --gpus all), --help describes the options."]
    return "".join(f"{line}\n" for line in lines)


def _value(option: Option) -> str:
    """The values of an option in the form of argparse."""
    value = f"{{{','.join(option.choices)}}}" if option.choices else {"int": "INT", "float": "FLOAT"}.get(option.type, "VALUE")
    if isinstance(option.nargs, int):
        return " ".join([value] * option.nargs)
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}.get(option.nargs or "", value)


class _TextChoices(tuple[str, ...]):
    """Choices that are compared as text, for values of any type."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(str(value))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
