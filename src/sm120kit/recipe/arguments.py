"""What an engine's own argument parser knows, as ``tests/arguments/collect.py`` recorded it from the locked wheel.

A record lies beside its recipe, ``recipes/engines/<recipe>.arguments.json``. With it, an option that the engine does not know
is found where neither engine nor image is at hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sm120kit.errors import BadRecipe
from sm120kit.recipe.configuration import Configuration
from sm120kit.recipe.reading import did_you_mean
from sm120kit.workspace import data_root

FORMAT = 1

_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "loads": json.loads}
"""Types that are checked here. The others are functions of the engine, which only it can ask."""


@dataclass(frozen=True)
class Option:
    """One option by its names; none for a positional argument. ``nargs`` and ``choices`` as argparse has them."""

    names: tuple[str, ...]
    nargs: str | int | None
    type: str
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Arguments:
    """What the parser of the engine's wheel (by sha256) knows. ``answers`` are what it said itself to each configuration that
    names this recipe: "" when it accepted its command line.
    """

    recipe: str
    wheel_sha256: str
    options: tuple[Option, ...]
    answers: dict[str, str]


def place_of(recipe: str) -> Path:
    """Where the record of a recipe lies."""
    return data_root() / "recipes" / "engines" / f"{recipe}.arguments.json"


def load(recipe: str) -> Arguments | None:
    """The record of a recipe, or None when its parser was not asked."""
    place = place_of(recipe)
    if not place.is_file():
        return None
    found = json.loads(place.read_text())
    options = tuple(
        Option(tuple(one["names"]), one["nargs"], one["type"], None if one["choices"] is None else tuple(one["choices"]))
        for one in found["options"]
    )
    return Arguments(found["recipe"], found["wheel"]["sha256"], options, found["answers"])


def require_known(wanted: Configuration) -> None:
    """Refuse a configuration with arguments that its engine's parser would refuse, but for those that it says are unreleased.

    One of an engine that was not asked passes.

    Raises:
        BadRecipe: which, and why.
    """
    known = load(wanted.engine)
    why = refusal(known, released(wanted)) if known else ""
    if why:
        raise BadRecipe(
            f"{wanted.name}: the argument parser of {wanted.engine} refuses: {why}",
            f"correct its arguments; {place_of(wanted.engine)} has all options",
        )


def require_released(wanted: Configuration) -> None:
    """Refuse a configuration that its engine could not start with.

    Raises:
        BadRecipe: as :func:`require_known`, or it has arguments that are unreleased.
    """
    require_known(wanted)
    if wanted.unreleased:
        words = ", ".join(wanted.unreleased.arguments)
        raise BadRecipe(
            f"{wanted.engine} would refuse {words} of {wanted.name}: {wanted.unreleased.reason}",
            "copy the configuration to a file, replace them there, and take out [unreleased]; its figures are those with them",
        )


def released(wanted: Configuration) -> tuple[str, ...]:
    """A configuration's arguments without those that are unreleased."""
    words = list(wanted.arguments)
    for phrase in wanted.unreleased.arguments if wanted.unreleased else ():
        part = phrase.split()
        at = next((at for at in range(len(words)) if words[at : at + len(part)] == part), None)
        if at is None:
            raise BadRecipe(
                f"{wanted.name}: unreleased.arguments: {phrase!r} is not in arguments", "write it as it stands there"
            )
        del words[at : at + len(part)]
    return tuple(words)


def refusal(known: Arguments, argv: Sequence[str]) -> str:
    """Why the parser would refuse these arguments, or "". Options are as its help has them: written out, with dashes."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for option in known.options:
        if not option.names:
            parser.add_argument("positional", nargs=option.nargs)
        elif option.nargs == 0:
            parser.add_argument(*option.names, action="store_true")
        else:
            action = parser.add_argument(*option.names, nargs=option.nargs, type=_TYPES.get(option.type, str))
            action.choices = None if option.choices is None else _Words(option.choices)
    try:
        _, rest = parser.parse_known_args(list(argv))
    except ValueError as error:
        return str(error)
    names = [name for option in known.options for name in option.names]
    return "; ".join(f"unknown argument {word}{did_you_mean(word, names)}" for word in rest)


class _Words(tuple[str, ...]):
    """Choices as words, for values of any type."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(str(value))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
