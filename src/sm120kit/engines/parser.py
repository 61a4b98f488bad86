"""What the argument parser of an engine accepts, from the record of its options and the engine's rules of spelling.

``nox -s arguments`` records the options of the parser in the locked wheel, in ``recipes/engines/<recipe>.arguments.json``
beside the recipe.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from pydantic_core import SchemaValidator, ValidationError, core_schema

from sm120kit import engines
from sm120kit.core import data_roots
from sm120kit.core.errors import BadInput, did_you_mean
from sm120kit.core.outside import file_problem, parse_json

Schema = Mapping[str, Any]
"""A JSON schema of the values that pydantic accepts."""
_SUFFIX = ".arguments.json"
_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "loads": parse_json}
"""Types of values that are checked, beside those of the engine. All others are functions that are not available."""


@dataclass(frozen=True)
class Option:
    """An option with its names; no names for a positional argument. ``nargs`` and ``choices`` as in argparse.

    ``type`` names the function that converts a value, and the one that this is made with. ``keys`` are those of a JSON object,
    each with the JSON schema of its values.
    """

    names: tuple[str, ...]
    nargs: str | int | None
    type: str
    choices: tuple[str, ...] | None
    keys: Mapping[str, Schema] | None = None


@dataclass(frozen=True)
class ParserRecord:
    """The options of the parser in an engine's wheel (by sha256).

    ``answers`` are the parser's own error messages for each configuration that names this recipe; empty for a command line
    that it accepts. ``models`` are the names of :meth:`sm120kit.engines.Engine.model_names`, with the choices of the options of
    parsers; empty in records of engines that are not made anew.
    """

    recipe: str
    wheel_sha256: str
    options: tuple[Option, ...]
    answers: dict[str, str]
    models: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self, option: Option) -> tuple[str, ...]:
        """The names of an option, those that the parser's help does not show included."""
        return (*option.names, *engines.of_recipe(self.recipe).hidden_names(option.names))

    @cached_property
    def every_name(self) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(name for option in self.options for name in self.names(option))


def record_path(recipe: str) -> Path:
    """Path of the record of a recipe's options."""
    return data_roots.find("engines", f"{recipe}{_SUFFIX}")


def load(recipe: str) -> ParserRecord | None:
    """The recorded options of a recipe's engine, or None without a record.

    Raises:
        BadInput: the record is damaged.
    """
    path = record_path(recipe)
    return None if file_problem(path) else _read(path, path.stat().st_mtime_ns)


@lru_cache
def _read(path: Path, changed: int) -> ParserRecord:
    try:
        record = parse_json(path.read_bytes())
        models = {kind: tuple(names) for kind, names in record.get("models", {}).items()}
        return ParserRecord(
            record["recipe"], record["wheel"]["sha256"], tuple(map(_option, record["options"])), record["answers"], models
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not a record of arguments: {error!r}", "restore it") from error


def _option(table: dict[str, Any]) -> Option:
    choices, keys = table["choices"], table.get("keys")
    if isinstance(keys, list):  # of records of the first edition, which users have: without types
        keys = {key: {} for key in keys}
    if keys:  # earlier records have a list of types and, after "=", values
        keys = {name: _schema(taken) if isinstance(taken, list) else dict(taken) for name, taken in keys.items()}
    return Option(tuple(table["names"]), table["nargs"], table["type"], None if choices is None else tuple(choices), keys)


def _schema(taken: Sequence[str]) -> Schema:
    kinds = [{"enum": [kind[1:], *_whole(kind[1:])]} if kind.startswith("=") else {"type": kind} for kind in taken]
    return {"anyOf": kinds} if kinds else {}


def _whole(text: str) -> list[int]:
    return [int(text)] if text.isdecimal() else []


def rejection(record: ParserRecord, argv: Sequence[str]) -> str:
    """The reasons why the engine's parser rejects ``argv``; empty if it accepts."""
    return "; ".join(rejections(record, argv))


def rejections(record: ParserRecord, argv: Sequence[str]) -> list[str]:
    """Each reason why the engine's parser rejects ``argv``, which itself stops at the first."""
    parser, reasons = _parser(record), list[str]()
    try:
        rest = engines.of_recipe(record.recipe).spelled(argv)
    except ValueError as error:
        return [str(error)]
    while len(reasons) < MAX_REASONS:
        try:
            _, unknown = parser.parse_known_args(rest)
        except ValueError as error:
            reasons.append(str(error))
            if (fewer := _without(rest, str(error))) == rest:
                return reasons
            rest = fewer
        else:
            reasons += [f"unknown argument {word}{did_you_mean(word, record.every_name)}" for word in unknown]
            return reasons or list(engines.of_recipe(record.recipe).contradictions(options(record.recipe, argv), record.models))
    return reasons


MAX_REASONS = 20
"""Limit for the number of reasons that are listed."""


def _without(argv: list[str], message: str) -> list[str]:
    """A command line without the option that a message of argparse is about, and its values."""
    names = re.sub("^(argument|ambiguous option:) ", "", message).partition(":")[0].partition(" ")[0].split("/")
    first = next((number for number, word in enumerate(argv) if word.partition("=")[0] in names), len(argv))
    end = next((number for number in range(first + 1, len(argv)) if argv[number].startswith("--")), len(argv))
    return argv[:first] + argv[end:]


def _parser(record: ParserRecord) -> _Parser:
    engine, parser = engines.of_recipe(record.recipe), _Parser(add_help=False)
    for option in record.options:
        if not option.names:
            parser.add_argument("positional", nargs=option.nargs)
        elif option.nargs == 0:
            parser.add_argument(*record.names(option), action="store_true")
        else:
            action = parser.add_argument(*option.names, nargs=option.nargs, type=_converter(engine, option))
            action.choices = None if option.choices is None else _TextChoices(option.choices)
    return parser


def _converter(engine: engines.Engine, option: Option) -> Callable[[str], object]:
    """A function that raises for a value which the engine refuses, by the option's name or by its type, if that is known."""
    outer, _, made_with = option.type.partition(" ")
    known = {**_TYPES, **dict.fromkeys(engine.options.get("memory_share", ()), _share), **engine.types}
    convert = known.get(option.names[0]) or known.get(made_with or outer, str)
    if option.keys is not None:
        convert = partial(_object, known=option.keys, convert=convert)
    return partial(_value, convert=convert) if outer in engine.optional_types else convert


def _share(text: str) -> None:
    """A share of the memory (vLLM: config/cache.py); SGLang starts with others, without memory or with more than there is."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not above 0 and at most 1")


def _value(text: str, convert: Callable[[str], object]) -> object:
    """A value, or None."""
    return None if text in _ABSENT else convert(text)


_ABSENT = ("", "None")
"""Values that an optional type takes for none."""


def _object(text: str, known: Mapping[str, Schema], convert: Callable[[str], object]) -> object:
    """A JSON object with keys that are ``known`` and values of their schemas."""
    try:
        table = convert(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON") from error
    if not isinstance(table, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")
    for key, value in table.items():
        if key not in known and (key := key.replace("-", "_")) not in known:
            raise argparse.ArgumentTypeError(f"no key {key[:80]!r}{did_you_mean(key, known)}")
        try:
            SchemaValidator(_pydantic(known[key], known[key].get("$defs", {}))).validate_python(value)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            why = next((each["msg"] for each in problems[::-1] if each["type"] != "none_required"), problems[-1]["msg"])
            raise argparse.ArgumentTypeError(f"{key[:80]} is {repr(value)[:80]}: {why[:200]}") from error
    return table


def _pydantic(schema: Schema, defined: Mapping[str, Schema]) -> core_schema.CoreSchema:
    """What pydantic, by which engines validate, has for a JSON schema."""
    schema = defined[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return core_schema.literal_schema(values)
    if "anyOf" in schema:
        return core_schema.union_schema([_pydantic(each, defined) for each in schema["anyOf"]])
    limits = {short: schema[name] for name, short in _LIMITS.items() if name in schema}
    kind = schema.get("type")
    if kind == "array":
        places, more = [_pydantic(each, defined) for each in schema.get("prefixItems", ())], schema.get("items", {})
        lengths = {short: schema[name] for name, short in _LENGTHS.items() if name in schema}
        plain = core_schema.list_schema(_pydantic(more, defined) if isinstance(more, dict) else None, **lengths)
        return core_schema.tuple_schema(places) if places else plain
    if kind == "object" and "properties" in schema:
        required, fields = schema.get("required", ()), schema["properties"].items()
        made = {
            name: core_schema.typed_dict_field(_pydantic(each, defined), required=name in required) for name, each in fields
        }
        return core_schema.typed_dict_schema(
            made, extra_behavior="forbid" if schema.get("additionalProperties") is False else "ignore"
        )
    if kind == "object":
        more = schema.get("additionalProperties")
        return core_schema.dict_schema(values_schema=_pydantic(more, defined) if isinstance(more, dict) else None)
    if kind in ("integer", "number"):
        return core_schema.int_schema(**limits) if kind == "integer" else core_schema.float_schema(**limits)
    return _PLAIN.get(str(kind), core_schema.any_schema())


_PLAIN: dict[str, core_schema.CoreSchema] = {
    "string": core_schema.str_schema(),
    "boolean": core_schema.bool_schema(),
    "null": core_schema.none_schema(),
}
_LIMITS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}
_LENGTHS = {"minItems": "min_length", "maxItems": "max_length"}


def words(recipe: str, argv: Sequence[str]) -> tuple[str, ...]:
    """A command line as the engine of a recipe reads it: names in full, each value a word of its own.

    Abbreviations and short names, also ``-n2``, are expanded if the options were recorded. What the parser refuses stays.
    """
    record = load(recipe)
    names = record.every_name if record else ()
    short = {name: option.names[0] for option in (record.options if record else ()) for name in option.names if name[1] != "-"}
    apart = [
        part
        for word in _words(recipe, argv)
        for part in ((word[:2], word[2:]) if word[:2] in short and word not in short else (word,))
    ]
    return tuple(short.get(word) or _in_full(word, names) for word in apart)


def options(recipe: str, argv: Sequence[str]) -> dict[str, str]:
    """The last value of each option of a command line, by its name in full; that of a flag is what follows it."""
    read = words(recipe, argv)
    return {name: value for name, value in pairwise([*read, ""]) if name.startswith("-")}


def split(recipe: str, argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A command line as options in full, each with its own words; "" for a positional argument, which is one word.

    Values end where the recorded option takes no more of them; those of an option that is not recorded, before the next one.
    """
    record, rest = load(recipe), list(argv)
    nargs = {name: option.nargs for option in record.options for name in record.names(option)} if record else {}
    groups = []
    while rest:
        word, *rest = rest
        option, *value = words(recipe, (word,)) if _is_option(word) else ("",)
        joined = "=" in word or (bool(value) and not word.startswith("--"))
        count = 0 if not option or joined else _count(nargs.get(option, "*"), rest)
        groups.append((option, [word, *rest[:count]]))
        rest = rest[count:]
    return groups


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit() and word != "-"


def _count(nargs: str | int | None, rest: Sequence[str]) -> int:
    """How many of the following words are values of an option."""
    free = next((number for number, word in enumerate(rest) if _is_option(word)), len(rest))
    limit = nargs if isinstance(nargs, int) else {None: 1, "?": 1}.get(nargs, len(rest))
    return min(limit, free)


def _words(recipe: str, argv: Sequence[str]) -> Iterator[str]:
    engine, spelled = engines.find_of_recipe(recipe), list(argv)
    if engine:
        with contextlib.suppress(ValueError):
            spelled = engine.spelled(argv)
    for word in spelled:
        yield from word.split("=", 1) if word.startswith("-") else (word,)


def _in_full(word: str, names: Iterable[str]) -> str:
    """The option that a word abbreviates, if it is one only."""
    if not word.startswith("--") or word in names:
        return word
    starting = [name for name in names if name.startswith(word)]
    return starting[0] if len(starting) == 1 else word


class _TextChoices(tuple[str, ...]):
    """Choices that are compared as text, for values of any type."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(str(value))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
