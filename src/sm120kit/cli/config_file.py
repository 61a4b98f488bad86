"""The user's configuration file: options in TOML, for all commands or for a single one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120kit.cli import plugins
from sm120kit.cli.options import SHARED
from sm120kit.core.errors import BadInput

if TYPE_CHECKING:
    from sm120kit.cli.tree import Command, Group

VARIABLE = "SM120KIT_CONFIG"
HINT = "docs/configuration.md describes the file; `sm120kit COMMAND --help` lists a command's options"


class Defaults(dict[str, Any]):
    """The values of the configuration file for a command, by parameter. The file is read at the first lookup."""

    def __init__(self, root: Group, command: Command) -> None:
        super().__init__()
        self._root, self._command, self._read = root, command, False

    def get(self, name: str, default: Any = None) -> Any:
        if not self._read:
            self._read = True
            self.update(values(self._root, self._command))
        return super().get(name, default)


def values(root: Group, command: Command) -> dict[str, Any]:
    """The values for ``command`` by parameter name: those of its table, else those outside all tables.

    Raises:
        BadInput: the file cannot be read, is not TOML, or has unknown keys or values of the wrong type.
    """
    content, options = _content(), command.settable()
    shared = {name: content[name] for name in SHARED & content.keys() & options.keys()}
    problems = [*_problems(content, root, ()), *_wrong(shared, options, "")]
    if problems:
        raise BadInput("\n  ".join([f"{path()}:", *problems]), HINT)
    table = content
    for name in command.path:
        table = table.get(name, {})
    return {options[name].name: _expanded(value) for name, value in (shared | table).items()}


def path() -> Path:
    """The file that ``SM120KIT_CONFIG`` names, else ``config.toml`` in the user's configuration directory."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    import platformdirs

    return platformdirs.user_config_path("sm120kit") / "config.toml"


def _content() -> dict[str, Any]:
    from sm120kit.core.outside import read_toml

    file = path()
    try:
        return read_toml(file)
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise BadInput(f"{VARIABLE} names {file}, which does not exist", f"correct or unset {VARIABLE}") from None
        return {}
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}", f"{VARIABLE} names another file") from error
    except ValueError as error:
        raise BadInput(f"{file} is not TOML: {error}", HINT) from error


def _problems(table: Mapping[str, Any], group: Group, path: tuple[str, ...]) -> Iterator[str]:
    """All problems in the table of a group: unknown names, and values of the wrong type."""
    shared = () if path else SHARED
    for name, value in table.items():
        where = ".".join((*path, name))
        command = group.commands.get(name)
        if command is None:
            if name not in shared and (*path, name) not in plugins.ELSEWHERE:
                yield f"unknown key {where!r}{_near(name, (*group.commands, *shared))}"
        elif not isinstance(value, dict):
            yield f"{where!r} is a command: write a table [{where}]"
        elif hasattr(command, "commands"):
            yield from _problems(value, command, (*path, name))
        else:
            yield from _wrong(value, command.settable(), f" in [{where}]")


def _wrong(values: Mapping[str, Any], options: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, value in values.items():
        if name not in options:
            yield f"unknown key {name!r}{where}{_near(name, options)}"
        elif expected := _expected(options[name], value):
            yield f"{name!r}{where} is {value!r}; {expected}"


def _expected(option: Any, value: Any) -> str:
    """The type that an option takes, or nothing if ``value`` has it."""
    if option.is_flag:
        return "" if isinstance(value, bool) else "expected true or false"
    if option.multiple:
        return "" if isinstance(value, list) and all(isinstance(text, str) for text in value) else "expected a list of strings"
    return "" if isinstance(value, str | int | float) and not isinstance(value, bool) else "expected one value"


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _expanded(value: Any) -> Any:
    """The value with a leading ``~/`` replaced by the home directory, as a shell does."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value
