"""Settings of the last stage of a Dockerfile, as the config of an image: the same with and without a builder that runs it.

Instructions and their effects: https://docs.docker.com/reference/dockerfile/. Instructions that make files are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sm120kit.core.errors import CommandFailed
from sm120kit.core.outside import parse_json

_NANOSECONDS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_SKIPPED = {"ADD", "ARG", "COPY", "RUN", "STOPSIGNAL", "SHELL"}


def image_settings(text: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config`` of an image built from a Dockerfile on a base with the config ``base``.

    Raises:
        CommandFailed: an instruction has a form that this function does not support.
    """
    config: dict[str, Any] = {key: value for key, value in base.items() if value}
    of_stage: set[str] = set()
    for instruction, rest in _instructions(text):
        if instruction == "FROM":
            config, of_stage = {key: value for key, value in base.items() if value}, set()
        elif instruction in _APPLY:
            try:
                _APPLY[instruction](config, rest)
            except (ValueError, KeyError, TypeError) as error:
                raise CommandFailed(f"{instruction} {rest}: {error}", "only the JSON form of commands is supported") from error
            of_stage.add(instruction)
            if instruction == "ENTRYPOINT" and "CMD" not in of_stage:
                config.pop("Cmd", None)  # that of the base belongs to another program
        elif instruction not in _SKIPPED:
            raise CommandFailed(f"the instruction {instruction} is not supported without Docker", "use --builder docker")
    return config


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        yield instruction.upper(), rest.strip()


def _env(config: dict[str, Any], rest: str) -> None:
    variables = dict(entry.split("=", 1) for entry in config.get("Env") or ())
    assignments = re.findall(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?=\s|$)', rest)
    if [f"{name}={value}" for name, value in assignments] != re.findall(r'(?:[^\s"]|"(?:[^"\\]|\\.)*")+', rest):
        raise ValueError('not of the form NAME=value or NAME="value"')
    before = dict(variables)
    for name, value in assignments:
        variables[name] = _expand(value[1:-1] if value.startswith('"') else value, before)
    config["Env"] = [f"{name}={value}" for name, value in variables.items()]


def _expand(value: str, variables: Mapping[str, str]) -> str:
    """Replace ``${NAME}`` and ``$NAME``; a backslash makes the next character literal."""

    def replaced(match: re.Match[str]) -> str:
        return match[1] if match[1] else variables.get(match[2] or match[3], "")

    return re.sub(r"\\(.)|\$\{(\w+)\}|\$(\w+)", replaced, value, flags=re.DOTALL)


def _healthcheck(config: dict[str, Any], rest: str) -> None:
    if rest.upper() == "NONE":
        config["Healthcheck"] = {"Test": ["NONE"]}
        return
    options, command = _groups(r"((?:--\S+\s+)*)CMD\s+(\[.*\])", rest)
    check: dict[str, Any] = {"Test": ["CMD", *parse_json(command)]}
    for name, value in re.findall(r"--([a-z-]+)=(\S+)", options):
        key = "".join(word.capitalize() for word in name.split("-"))
        check[key] = int(value) if name == "retries" else _duration(value)
    config["Healthcheck"] = check


def _duration(text: str) -> int:
    number, unit = _groups(r"(\d+)(ms|s|m|h)", text)
    return int(number) * _NANOSECONDS[unit]


def _groups(pattern: str, text: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text, re.DOTALL)
    if match is None:
        raise ValueError(f"{text!r} is not of a form that is supported")
    return match.groups()


def _command(key: str) -> Callable[[dict[str, Any], str], None]:
    def apply(config: dict[str, Any], rest: str) -> None:
        command = parse_json(rest)
        if not isinstance(command, list):
            raise ValueError("not a JSON array")
        config[key] = command

    return apply


def _text(key: str) -> Callable[[dict[str, Any], str], None]:
    def apply(config: dict[str, Any], rest: str) -> None:
        config[key] = rest

    return apply


_APPLY: dict[str, Callable[[dict[str, Any], str], None]] = {
    "ENV": _env,
    "HEALTHCHECK": _healthcheck,
    "CMD": _command("Cmd"),
    "ENTRYPOINT": _command("Entrypoint"),
    "USER": _text("User"),
    "WORKDIR": _text("WorkingDir"),
}
