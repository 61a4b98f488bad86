"""One TOML file to a recipe or to what else is read as strictly, or every reason why not."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from sm120kit.errors import BadRecipe
from sm120kit.recipe.schema import (
    DAY,
    KINDS,
    PINNED,
    PLATFORM,
    VARIABLE,
    EngineRecipe,
    Recipe,
)

T = TypeVar("T", bound=BaseModel)


def read(path: Path) -> Recipe | EngineRecipe:
    """Parse and validate one file.

    Raises:
        BadRecipe: it is not well-formed; the message lists every problem.
    """
    data = toml(path, "README.md shows how a recipe looks")
    kind = KINDS.get(str(data.get("engine")), Recipe)
    way_out = "correct the file; `sm120kit recipe check` looks again"
    return validated(kind, data, path, way_out, _bad_references(data, path.stem))


def toml(path: Path, hint: str = "") -> dict[str, Any]:
    """The content of a file.

    Raises:
        BadRecipe: it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRecipe(f"{path}: not TOML: {error}", hint) from error


def validated(kind: type[T], data: dict[str, Any], path: Path, hint: str = "", contradictions: Iterable[str] = ()) -> T:
    """What the content of a file says.

    Raises:
        BadRecipe: it is not of this kind, or contradicts itself; the message lists every problem.
    """
    found = list(contradictions)
    try:
        item = kind.model_validate(data)
    except ValidationError as error:
        found += [_explain(problem, kind) for problem in error.errors()]
    if found:
        raise BadRecipe(told(path, found), hint)
    return item


def _bad_references(data: dict[str, Any], stem: str) -> Iterator[str]:
    """Names in a recipe that name nothing. Looks at the raw TOML, so that these are told beside problems of form."""

    def table(key: str) -> dict[str, dict[str, Any]]:
        value = data.get(key)
        return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}

    def words(value: Any) -> list[str]:
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    if "name" in data and data["name"] != stem:
        yield f"name: {data['name']!r} is not the file's name {stem!r}"
    yield from _unfit_environment(data)
    if KINDS.get(str(data.get("engine"))) is EngineRecipe:
        return
    fetched = [name for name, source in table("sources").items() if "sdist" in source or "git" in source]
    if len(fetched) != 1:
        yield f"sources: exactly one must be fetched (sdist or git); here: {', '.join(fetched) or 'none'}"
    for name, source in table("sources").items():
        if "inside" in source and source["inside"] not in fetched:
            near = did_you_mean(source["inside"], fetched)
            yield f"sources.{name}.inside: {source['inside']!r} is not a fetched source{near}"
    for name, group in table("groups").items():
        for module in words(group.get("modules")) + [sample.split("/")[0] for sample in words(group.get("samples"))]:
            if module not in table("modules"):
                yield f"groups.{name}: no module {module!r}{did_you_mean(module, table('modules'))}"
    default = data.get("default_group")
    if default is not None and default not in table("groups"):
        yield f"default_group: no group {default!r}{did_you_mean(default, table('groups'))}"


def _unfit_environment(data: dict[str, Any]) -> Iterator[str]:
    """Pins that contradict the recipe itself: an engine that is not asked for, a version that is known to be bad."""
    environment = data.get("environment")
    asked = environment.get("requires") if isinstance(environment, dict) else None
    pins = dict(pin.split("==", 1) for pin in asked if isinstance(pin, str) and "==" in pin) if isinstance(asked, list) else {}
    engine, version = data.get("engine"), data.get("version")
    if KINDS.get(str(engine)) is EngineRecipe and pins.get(str(engine)) != version:
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
    return json.dumps(TypeAdapter(Recipe | EngineRecipe).json_schema(), indent=2)


def told(path: Path, found: Sequence[str]) -> str:
    """The problems of a file as a message."""
    listed = "\n".join(f"  {problem}" for problem in found)
    return f"{path}: {len(found)} problem{'s' * (len(found) > 1)}\n{listed}"


def _explain(item: Any, kind: type[BaseModel]) -> str:
    """What is wrong: the key with its tables, what it is or lacks, and a known key that is near."""
    location = [str(part) for part in item["loc"]]
    known = _keys_at(location[:-1], kind)
    if location[0] == "sources" and len(location) > 2:
        del location[2]  # the kind, which is no key of the file
    where = ".".join(location)
    what, value = item["type"], item["input"]
    if what == "extra_forbidden":
        return f"{where}: unknown key{did_you_mean(location[-1], known)}"
    if what == "missing":
        return f"{where}: missing"
    if what == "string_pattern_mismatch":
        return f"{where}: {value!r} {_PATTERN_WORDS.get(item['ctx']['pattern'], 'is not well-formed')}"
    if what == "value_error":
        return f"{where}: {item['ctx']['error']}"
    return f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}; it is {value!r}"


_PATTERN_WORDS = {
    r"^[0-9a-f]{64}$": "is not a sha256 (64 hexadecimal digits)",
    r"^[0-9a-f]{40}$": "is not a commit (40 hexadecimal digits; a branch or tag can move)",
    r"^[\w.]+:[\w.]+$": "is not python.module:function",
    PINNED: "is not pinned: write name==version",
    DAY: "is not a day: write YYYY-MM-DD",
    PLATFORM: "is not a platform: write manylinux_2_<glibc>_x86_64 or manylinux_2_<glibc>_aarch64",
    VARIABLE: "is not the name of a variable: capital letters, digits and _",
}


def _keys_at(location: Sequence[str], kind: type[BaseModel]) -> list[str]:
    """Keys that the table at a location knows. What is no key of a table names one of several, or counts them."""
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


def did_you_mean(word: object, known: Iterable[object]) -> str:
    near = difflib.get_close_matches(str(word), [str(item) for item in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
