"""What other distributions add to the command line, by entry points. Nothing of them is imported before it is needed.

``sm120kit.commands`` names mappings of commands by their path, such as ``("verify", "run")``; ``sm120kit.laboratory`` names
functions that commands of sm120kit use where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from sm120kit.core.errors import RequirementMissing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from sm120kit.cli.tree import Leaf

LABORATORY = "sm12x-lab"
"""The distribution with the commands below."""

ELSEWHERE = frozenset({("patch", "prove"), ("verify", "kernels"), ("verify", "ptx"), ("verify", "run")})
"""Commands that ``sm120kit`` has only with the laboratory."""


@cache
def commands() -> Mapping[tuple[str, ...], Leaf]:
    """The commands of all installed distributions, by path."""
    from importlib.metadata import entry_points

    found: dict[tuple[str, ...], Leaf] = {}
    for added in _loaded(entry_points(group="sm120kit.commands")):
        found |= added
    return found


def function(name: str) -> Callable[..., Any] | None:
    """The laboratory's function of that name; None if it is not installed."""
    from importlib.metadata import entry_points

    return next(_loaded(entry_points(group="sm120kit.laboratory", name=name)), None)


def _loaded(points: Iterable[EntryPoint]) -> Iterator[Any]:
    """What entry points name. A distribution of which only the metadata is found counts as not installed."""
    for point in points:
        try:
            yield point.load()
        except ModuleNotFoundError as error:
            if not f"{point.module}.".startswith(f"{error.name}."):
                raise


def required(what: str) -> RequirementMissing:
    """The error for a use of the laboratory where it is not installed."""
    return RequirementMissing(
        f"{what} requires the distribution {LABORATORY}",
        f"pip install {LABORATORY}, or in a clone: pip install ./src/sm12x_lab",
    )
