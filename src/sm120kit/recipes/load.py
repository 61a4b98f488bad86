"""Read TOML files strictly: a validated record, or one error that lists every problem of the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from sm120kit.core import outside
from sm120kit.core.errors import BadInput, did_you_mean
from sm120kit.recipes.schema import (
    ADDED,
    DAY,
    FILES,
    FLASHINFER_KEY,
    PINNED,
    PLATFORM,
    VARIABLE,
    EngineRecipe,
    Recipe,
    kind_of,
    known_engines,
)

T = TypeVar("T", bound=BaseModel)


def read(path: Path) -> Recipe:
    """Read the file of a recipe.

    Raises:
        BadInput: the file is not well-formed; the message lists every problem.
    """
    data = read_toml(path, "docs/recipes.md describes recipes")
    hint = "correct the file and run `sm120kit recipe check` again"
    engine = str(data.get("engine", FLASHINFER_KEY))
    if engine not in known_engines():
        raise BadInput(f"{path}: engine: {engine!r} is none of {', '.join(known_engines())}", hint)
    return validate(kind_of(engine), data, path, hint, _bad_references(data, path.stem))


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        BadInput: the file cannot be read or is not TOML.
    """
    try:
        return outside.read_toml(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}", "name a file that you may read") from error
    except ValueError as error:
        raise BadInput(f"{path}: not TOML: {error}", hint) from error


def validate(kind: type[T], data: dict[str, Any], path: Path, hint: str = "", contradictions: Iterable[str] = ()) -> T:
    """Validate the content of a file as a ``kind``; ``contradictions`` are problems that the caller detected in it.

    Raises:
        BadInput: the content does not fit ``kind``, or there are contradictions; the message lists every problem.
    """
    problems = list(contradictions)
    try:
        record = kind.model_validate(data)
    except ValidationError as error:
        problems += [_explain(details, kind) for details in error.errors()]
    if problems:
        raise BadInput(problems_message(path, problems), hint)
    return record


def _bad_references(data: dict[str, Any], stem: str) -> Iterator[str]:
    """References to undefined names in a recipe. Reads the raw TOML, so that they are reported with problems of form."""

    def table(key: str) -> dict[str, dict[str, Any]]:
        value = data.get(key)
        return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}

    def strings(value: Any) -> list[str]:
        return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []

    if "name" in data and data["name"] != stem:
        yield f"name: {data['name']!r} is not the file's name {stem!r}"
    yield from _unfit_environment(data)
    if data.get("base") and data.get("base_image"):
        yield "base_image: set, but there is a base"
    if kind_of(str(data.get("engine"))) is EngineRecipe:
        yield from _unfit_source(data)
        return
    fetched = [name for name, source in table("sources").items() if "sdist" in source or "git" in source]
    if len(fetched) != 1:
        yield f"sources: exactly one must have sdist or git; these have: {', '.join(fetched) or 'none'}"
    for name, source in table("sources").items():
        if "inside" in source and source["inside"] not in fetched:
            near = did_you_mean(source["inside"], fetched)
            yield f"sources.{name}.inside: {source['inside']!r} is not a fetched source{near}"
    for name, group in table("groups").items():
        for module in strings(group.get("modules")) + [sample.split("/")[0] for sample in strings(group.get("samples"))]:
            if module not in table("modules"):
                yield f"groups.{name}: no module {module!r}{did_you_mean(module, table('modules'))}"
    default = data.get("default_group")
    if isinstance(default, str) and default not in table("groups"):
        yield f"default_group: no group {default!r}{did_you_mean(default, table('groups'))}"


def _unfit_source(data: dict[str, Any]) -> Iterator[str]:
    """A wheel of another release as the source of an engine, or a second source."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    source, engine, version = data.get("source"), data.get("engine"), data.get("version")
    if source is not None and data.get("from_source") is not None:
        yield "source: set, but from_source has the engine's sdist"
    if data.get("kernel_source") is not None and data.get("from_source") is not None:
        yield "kernel_source: set, but from_source has the engine's sdist"
    if not isinstance(source, dict) or not isinstance(source.get("wheel"), str):
        return
    with contextlib.suppress(InvalidWheelFilename):
        name, release, _, _ = parse_wheel_filename(source["wheel"])
        if (name, str(release)) != (engine, version):
            yield f"source.wheel: {source['wheel']!r} is not a wheel of {engine} {version}"


def _unfit_environment(data: dict[str, Any]) -> Iterator[str]:
    """Pins that contradict the recipe itself: the engine is not required, or a version is known to be bad."""
    environment = data.get("environment")
    requires = environment.get("requires") if isinstance(environment, dict) else None
    entries = requires if isinstance(requires, list) else []
    pins = dict(pin.split("==", 1) for pin in entries if isinstance(pin, str) and "==" in pin)
    engine, version = data.get("engine"), data.get("version")
    if kind_of(str(engine)) is EngineRecipe and pins.get(str(engine)) != version:
        yield f"environment.requires: has no '{engine}=={version}', the engine itself"
    listed = data.get("known_bad")
    for bad in listed if isinstance(listed, list) else []:
        if (
            isinstance(bad, dict)
            and bad.get("version") is not None
            and pins.get(str(bad.get("distribution"))) == bad["version"]
        ):
            yield f"environment.requires: {bad['distribution']} {bad['version']} is known to be bad: {bad.get('reason')}"


def json_schema() -> str:
    """JSON Schema of a recipe of any kind, for editors."""
    return json.dumps(TypeAdapter(Recipe).json_schema(), indent=2)


def problems_message(path: Path, problems: Sequence[str]) -> str:
    """The problems of a file as an error message: a line with their number, then a line for each."""
    listed = "\n".join(f"  {problem}" for problem in problems)
    return f"{path}: {len(problems)} problem{'s' * (len(problems) > 1)}\n{listed}"


def _explain(details: Any, kind: type[BaseModel]) -> str:
    """A line for an error of pydantic: the key with its tables, the problem, and a known key with a similar name."""
    location = [str(part) for part in details["loc"]]
    known = _keys_at(location[:-1], kind)
    tag = {"sources": 2, "source": 1}.get(location[0])
    if tag and len(location) > tag:
        del location[tag]  # that of the source's kind, not a key of the file
    key = ".".join(location)
    error, value = details["type"], details["input"]
    if error == "extra_forbidden":
        return f"{key}: unknown key{did_you_mean(location[-1], known)}"
    if error == "missing":
        return f"{key}: missing"
    if error == "string_pattern_mismatch":
        return f"{key}: {value!r} {_PATTERN_TEXTS.get(details['ctx']['pattern'], 'is not well-formed')}"
    if error == "value_error":
        return f"{key}: {details['ctx']['error']}"
    return f"{key}: {details['msg'][0].lower()}{details['msg'][1:]}; it is {value!r}"


_PATTERN_TEXTS = {
    r"^[0-9a-f]{64}$": "is not a sha256 (64 hexadecimal digits)",
    r"^[0-9a-f]{40}$": "is not a commit (40 hexadecimal digits; a branch or tag can move)",
    r"^[\w.]+:[\w.]+$": "is not python.module:function",
    PINNED: "is not pinned: write name==version",
    DAY: "is not a day: write YYYY-MM-DD",
    ADDED: "is not a path of at most 8 names below files/",
    FILES: "is not a path below site-packages, or a shell-style pattern of such paths",
    PLATFORM: "is not a platform: write manylinux_2_<glibc>_x86_64 or manylinux_2_<glibc>_aarch64",
    VARIABLE: "is not the name of a variable: capital letters, digits and _",
}


def _keys_at(location: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """Keys of the table at a location. A part that is no key is the name or index of one of several tables."""
    tables = [kind]
    for part in location:
        fields = [table.model_fields[part] for table in tables if part in table.model_fields]
        tables = [table for field in fields for table in _tables_in(field.annotation)] or tables
    return [name for table in tables for name in table.model_fields]


def _tables_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _tables_in(argument)
