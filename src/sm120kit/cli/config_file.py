"""The user's configuration file: options in TOML, for all commands or for a single one."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm120kit.cli.options import SHARED
from sm120kit.core.errors import BadInput, did_you_mean

VARIABLE = "SM120KIT_CONFIG"
HINT = "docs/configuration.md describes the file; `sm120kit COMMAND --help` lists a command's options"


def values(path: tuple[str, ...], options: Mapping[str, Any], commands: set[str]) -> dict[str, Any]:
    """The values for the command at ``path`` by parameter name: those of its table, else those before all tables.

    ``options`` are its options by name, ``commands`` the names of all commands and groups.

    Raises:
        BadInput: the file cannot be read, is not TOML, or has unknown keys, or lists for options that take one value.
    """
    content = _content()
    table: Any = content
    for name in path:
        table = table.get(name, {}) if isinstance(table, dict) else table
    shared = {name: content[name] for name in content.keys() & SHARED & options.keys()}
    problems = [
        f"unknown key {name!r}{did_you_mean(name, (*SHARED, *commands))}" for name in content if name not in SHARED | commands
    ]
    if not isinstance(table, dict):
        problems.append(f"{'.'.join(path)!r} is a command: write a table [{'.'.join(path)}]")
        table = {}
    chosen = shared | table
    problems += _problems(chosen, options, f" for `sm120kit {' '.join(path)}`")
    if problems:
        raise BadInput("\n  ".join([f"{file()}:", *problems]), HINT)
    return {options[name].name: _expanded(value) for name, value in chosen.items()}


def _problems(chosen: Mapping[str, Any], options: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, value in chosen.items():
        if name not in options:
            yield f"unknown key {name!r}{where}{did_you_mean(name, options)}"
        elif isinstance(value, dict) or isinstance(value, list) != options[name].multiple:
            yield f"{name!r}{where} is {value!r}; expected {'a list of values' if options[name].multiple else 'one value'}"


def file() -> Path:
    """The file that ``SM120KIT_CONFIG`` names, else ``config.toml`` in the user's configuration directory."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    import platformdirs

    return platformdirs.user_config_path("sm120kit") / "config.toml"


def _content() -> dict[str, Any]:
    from sm120kit.core.outside import read_toml

    path = file()
    try:
        return read_toml(path)
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise BadInput(f"{VARIABLE} names {path}, which does not exist", f"correct or unset {VARIABLE}") from None
        return {}
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", f"{VARIABLE} names another file") from error
    except ValueError as error:
        raise BadInput(f"{path} is not TOML: {error}", HINT) from error


def _expanded(value: Any) -> Any:
    """The value with a leading ``~/`` replaced by the home directory, as a shell does."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value
