"""Read TOML files and lockfiles strictly: a validated record, or one error that lists every problem of the file."""

import functools
import hashlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from sm120kit.core import outside
from sm120kit.core.data_roots import data_root, folders
from sm120kit.core.errors import BadInput, Mismatch, did_you_mean
from sm120kit.core.outside import read_found
from sm120kit.core.record_files import first_problem, record_json
from sm120kit.recipes.schema import (
    ADDED,
    DAY,
    FILES,
    FLASHINFER_KEY,
    PINNED,
    PLATFORM,
    VARIABLE,
    Recipe,
    Strict,
    kind_of,
    known_engines,
)

T = TypeVar("T", bound=BaseModel)
L = TypeVar("L")


def read(path: Path) -> Recipe:
    """Read the file of a recipe.

    Raises:
        BadInput: the file is not well-formed; the message lists every problem.
    """
    data = read_toml(path, "docs/update.md describes recipes")
    hint = "correct the file and run `sm120kit recipe check` again"
    data.pop("kernel_source", None)  # of the first edition: for a list of tiles that is no more
    for group in data["groups"].values() if isinstance(data.get("groups"), dict) else ():
        for key in ("samples", "expect_sample_kernels") if isinstance(group, dict) else ():
            group.pop(key, None)  # of the first edition: units that were compiled and not packed
    if isinstance(data.get("source"), dict) and "commit" in data["source"]:
        data["source"].pop("sdist", None)  # of the first edition: of a repository without a tag of the release
    engine = str(data.get("engine", FLASHINFER_KEY))
    if engine not in known_engines():
        raise BadInput(f"{path}: engine: {engine!r} is none of {', '.join(known_engines())}", hint)
    gone = ["base_image: an image is no base any more; base names one, as debian-12"] if data.pop("base_image", "") else []
    return validate(kind_of(engine), data, path, hint, [*gone, *other_name(data, path.stem)])


def other_name(data: dict[str, Any], stem: str) -> list[str]:
    """The problem of a file whose key ``name`` is not the file's name; none without the key."""
    name = data.get("name", stem)
    return [] if name == stem else [f"name: {name!r} is not the file's name {stem!r}"]


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
        problems += [problem for details in error.errors() for problem in _explain(details, kind)]
    if problems:
        raise BadInput(problems_message(path, problems), hint)
    return record


def read_entries(kind: type[T], name: str, table: str) -> tuple[T, ...]:
    """The tables ``[[table]]`` of the built-in file ``recipes/<name>.toml``.

    Raises:
        BadInput: the file is not well-formed; the message lists every problem.
    """
    path = data_root() / "recipes" / f"{name}.toml"
    field: dict[str, Any] = {table: (Annotated[tuple[kind, ...], Field(strict=False)], ...)}  # type: ignore[valid-type]
    listed: tuple[T, ...] = getattr(validate(create_model("File", __base__=Strict, **field), read_toml(path), path), table)
    return listed


MAX_PROBLEMS, MAX_CHARACTERS = 100, 400
"""Limits for the problems that are listed, and for the characters of each."""


def problems_message(path: Path, problems: Sequence[str]) -> str:
    """The problems of a file as an error message: a line with their number, then a line for each."""
    shown = [*problems[:MAX_PROBLEMS], *["..."] * (len(problems) > MAX_PROBLEMS)]
    listed = "\n".join(f"  {problem[:MAX_CHARACTERS]}" for problem in shown)
    return f"{path}: {len(problems)} problem{'s' * (len(problems) > 1)}\n{listed}"


def _explain(details: Any, kind: type[BaseModel]) -> list[str]:
    """Lines for an error of pydantic: the key with its tables, the problem, and a known key with a similar name."""
    location = [str(part) for part in details["loc"]]
    if not location:  # of the whole file: a line for each of its contradictions
        return str(details["ctx"]["error"]).splitlines()
    known = _keys_at(location[:-1], kind)
    tag = {"sources": 2, "source": 1}.get(location[0])
    if tag and len(location) > tag:
        del location[tag]  # that of the source's kind, not a key of the file
    key = ".".join(part if part.isprintable() else repr(part) for part in location if part != "[key]")[: MAX_CHARACTERS // 2]
    error, value = details["type"], details["input"]
    if error == "extra_forbidden":
        return [f"{key}: unknown key{did_you_mean(location[-1], known)}"]
    if error == "missing":
        return [f"{key}: missing"]
    if error == "string_pattern_mismatch":
        return [f"{key}: {value!r} {_PATTERN_TEXTS.get(details['ctx']['pattern'], 'is not well-formed')}"]
    if error == "value_error":
        return [f"{key}: {details['ctx']['error']}"]
    if location[0] == "environment":  # the value may be a secret
        return [f"{key}: is not a text"]
    return [f"{key}: {details['msg'][0].lower()}{details['msg'][1:]}; it is {value!r}"]


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
    r"^[!-<>-~]+$": "is not the name of a variable: ASCII without =, blanks and control characters",
    r"^([0-9a-f]{40}|unpinned)$": "is not a commit (40 hexadecimal digits; a branch or tag can move), nor unpinned",
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


def lock_command(path: Path) -> str:
    """The command that writes a lockfile: it names the recipe or base by path if that is not where names are looked up."""
    name = path.name.removesuffix(".lock.json")
    known = path.parent in (*folders("engines"), *folders("bases"))
    return shlex.join(("sm120kit", "recipe", "lock", name if known else str(path.with_name(f"{name}.toml"))))


def read_locked(kind: type[L], path: Path) -> tuple[L, str]:
    """Read a lockfile as a ``kind``, and return its build id, the sha256 of its text in hexadecimal, as well.

    Raises:
        Mismatch: the file does not exist, or its text is not what ``recipe lock`` writes.
    """
    name, again = path.name.removesuffix(".lock.json"), lock_command(path)
    try:
        content = read_found(path)
    except FileNotFoundError as error:
        raise Mismatch(f"{name} is not locked: there is no {path}", f"lock it: {again}") from error
    except OSError as error:
        raise Mismatch(f"{path} cannot be read: {error.strerror}", f"lock it: {again}") from error
    lock: L = _parse(kind, path, content)  # type: ignore[arg-type]
    return lock, hashlib.sha256(content).hexdigest()


@functools.lru_cache(maxsize=16)
def _parse(kind: type[Any], path: Path, content: bytes) -> Any:
    hint = f"write it again: {lock_command(path)}"
    try:
        lock = TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        raise Mismatch(f"{path} is not a lockfile: {first_problem(error)}", hint) from error
    if record_json(lock).encode() != content:
        raise Mismatch(f"{path} was edited: it has keys or spaces that `recipe lock` does not write", hint)
    return lock
