"""TOML to a ``Recipe``, or every reason why not."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
)

from sm120kit.errors import BadRecipe, UnknownName
from sm120kit.records import Arch, GitPin, Inside, Pin, SdistPin
from sm120kit.workspace import data_root

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
VersionText = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+]*$")]


def _below(path: str) -> str:
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path below the source")
    return path


Relative = Annotated[str, AfterValidator(_below)]
Words = Annotated[tuple[str, ...], Field(strict=False)]


class Strict(BaseModel):
    """A table that refuses keys it does not know and never converts types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SdistSource(Strict):
    """``sdist`` names the distribution on the Python index."""

    sdist: str
    version: VersionText
    sha256: Sha256


class GitSource(Strict):
    """``git`` is any URL that git understands; ``commit`` has 40 digits, never a branch or a tag."""

    git: str
    version: VersionText
    commit: Commit


class InsideSource(Strict):
    """A project that lies inside another source, patched with a series of its own."""

    inside: Name
    path: Relative
    version: VersionText


SOURCE_KINDS: dict[str, type[Strict]] = {"sdist": SdistSource, "git": GitSource, "inside": InsideSource}


def _kind_of(table: Any) -> str | None:
    """The key that names a source's kind, of a TOML table or of what was made of it."""
    keys = type(table).model_fields if isinstance(table, BaseModel) else table if isinstance(table, dict) else ()
    kinds = [kind for kind in SOURCE_KINDS if kind in keys]
    return kinds[0] if len(kinds) == 1 else None


Source = Annotated[
    Annotated[SdistSource, Tag("sdist")] | Annotated[GitSource, Tag("git")] | Annotated[InsideSource, Tag("inside")],
    Discriminator(
        _kind_of, custom_error_type="source_kind", custom_error_message="needs exactly one of the keys sdist, git, inside"
    ),
]


class UnitsLeftOut(Strict):
    """Translation units of a module that no SM12x code refers to: shell-style patterns of their file names."""

    units: str
    reason: str


class ModuleTable(Strict):
    """One shared object that the engine knows how to generate.

    ``generator`` is the engine's own ``python.module:function``. ``gib`` and ``seconds`` are estimates for a unit by file name
    pattern, used until the real cost of that unit has been measured. ``expect_kernels`` says how many kernels at least the
    finished module must hold, by shell-style pattern of the mangled name and, after ``@``, of the arch.
    """

    generator: Annotated[str, StringConstraints(pattern=r"^[\w.]+:[\w.]+$")]
    leave_out: Annotated[tuple[UnitsLeftOut, ...], Field(strict=False)] = ()
    gib: dict[str, float] = {}
    seconds: dict[str, float] = {}
    expect_kernels: dict[str, Annotated[int, Field(ge=1)]] = {}


class GroupTable(Strict):
    """What ``--kernels NAME`` builds.

    ``modules`` are compiled, linked and packed. ``samples`` are units (``module/file pattern``) that are compiled and checked
    but not packed, because their module is not complete without its other units.
    """

    summary: str
    modules: Words
    samples: Words = ()
    expect_sample_kernels: dict[str, Annotated[int, Field(ge=1)]] = {}


class Recipe(Strict):
    """What to build for one version of an engine: pinned sources, kernels, image."""

    edition: Literal[1]
    name: Name
    engine: Literal["flashinfer"]
    version: VersionText
    summary: str
    archs: Annotated[tuple[Annotated[Arch, Field(strict=False)], ...], Field(strict=False, min_length=1)]
    headers: Words = ()
    sources: dict[Name, Source]
    modules: dict[str, ModuleTable]
    groups: dict[Name, GroupTable]
    default_group: str

    @property
    def pin(self) -> Pin:
        """The source that is fetched; all others lie inside it."""
        for project, source in self.sources.items():
            if isinstance(source, SdistSource):
                return SdistPin(project, source.sdist, source.version, source.sha256)
            if isinstance(source, GitSource):
                return GitPin(project, source.git, source.commit, source.version)
        raise AssertionError("validated: one source is fetched")

    @property
    def inside(self) -> tuple[Inside, ...]:
        """Projects that the fetched source carries, in the order in which they are patched."""
        return tuple(
            Inside(project, source.path, source.version)
            for project, source in self.sources.items()
            if isinstance(source, InsideSource)
        )


def directory() -> Path:
    """Where the engine recipes lie."""
    return data_root() / "recipes" / "engines"


def names() -> list[str]:
    """All recipes, oldest version first."""
    from packaging.version import Version

    def order(name: str) -> tuple[str, Version]:
        engine, _, version = name.rpartition("-")
        return engine, Version(version)

    return sorted((path.stem for path in directory().glob("*.toml")), key=order)


def load(name: str) -> Recipe:
    """A recipe by name (``flashinfer-0.6.6``), as ``engine@version``, by engine alone, or by path to a TOML file.

    An engine alone means the one that ``DEFAULT_RECIPES`` names.

    Raises:
        UnknownName: there is none; the hint names the nearest.
        BadRecipe: it is not well-formed; the message lists every problem.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise UnknownName(f"no recipe file {name}", "name a recipe that `sm120kit recipe list` shows, or an existing file")
        return read(path)
    known = names()
    wanted = name.replace("@", "-")
    if wanted not in known:
        of_engine = [item for item in known if item.rpartition("-")[0] == wanted]
        if not of_engine:
            raise UnknownName(
                f"unknown recipe {name!r}{_did_you_mean(wanted, known)}",
                f"recipes: {', '.join(known) or 'none'} (in {directory()})",
            )
        wanted = DEFAULT_RECIPES.get(wanted, of_engine[-1])
    return read(directory() / f"{wanted}.toml")


DEFAULT_RECIPES = {"flashinfer": "flashinfer-0.6.6"}
"""What an engine's bare name means: the release whose kernels were compiled and checked most."""


def read(path: Path) -> Recipe:
    """Parse and validate one file; see :func:`load` for errors."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRecipe(f"{path}: not TOML: {error}", "README.md shows how a recipe looks") from error
    problems = list(_bad_references(data, path.stem))
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems += [line for item in error.errors() for line in _explain(item)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise BadRecipe(
            f"{path}: {len(problems)} problem{'s' * (len(problems) > 1)}\n{listed}",
            "correct the file; `sm120kit recipe check` looks again",
        )
    return recipe


def _bad_references(data: dict[str, Any], stem: str) -> Iterator[str]:
    """Names in a recipe that name nothing. Looks at the raw TOML, so that these are told beside problems of form."""

    def table(key: str) -> dict[str, dict[str, Any]]:
        value = data.get(key)
        return {k: v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}

    def words(value: Any) -> list[str]:
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    if "name" in data and data["name"] != stem:
        yield f"name: {data['name']!r} is not the file's name {stem!r}"
    fetched = [name for name, source in table("sources").items() if "sdist" in source or "git" in source]
    if len(fetched) != 1:
        yield f"sources: exactly one must be fetched (sdist or git); here: {', '.join(fetched) or 'none'}"
    for name, source in table("sources").items():
        if "inside" in source and source["inside"] not in fetched:
            near = _did_you_mean(source["inside"], fetched)
            yield f"sources.{name}.inside: {source['inside']!r} is not a fetched source{near}"
    for name, group in table("groups").items():
        for module in words(group.get("modules")) + [sample.split("/")[0] for sample in words(group.get("samples"))]:
            if module not in table("modules"):
                yield f"groups.{name}: no module {module!r}{_did_you_mean(module, table('modules'))}"
    default = data.get("default_group")
    if default is not None and default not in table("groups"):
        yield f"default_group: no group {default!r}{_did_you_mean(default, table('groups'))}"


def json_schema() -> str:
    """JSON Schema of an engine recipe, for editors."""
    return json.dumps(TypeAdapter(Recipe).json_schema(), indent=2)


def _explain(item: Any) -> Iterator[str]:
    location = [str(part) for part in item["loc"]]
    if location[0] == "sources" and len(location) > 2:
        del location[2]  # the kind, which is no key of the file
    where = ".".join(location)
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        yield f"{where}: unknown key{_did_you_mean(location[-1], _keys_at(location))}"
    elif kind == "missing":
        yield f"{where}: missing"
    elif kind == "string_pattern_mismatch":
        yield f"{where}: {value!r} {_PATTERN_WORDS.get(item['ctx']['pattern'], 'is not well-formed')}"
    elif kind == "value_error":
        yield f"{where}: {item['ctx']['error']}"
    else:
        yield f"{where}: {item['msg'][0].lower()}{item['msg'][1:]}; it is {value!r}"


_PATTERN_WORDS = {
    r"^[0-9a-f]{64}$": "is not a sha256 (64 hexadecimal digits)",
    r"^[0-9a-f]{40}$": "is not a commit (40 hexadecimal digits; a branch or tag can move)",
    r"^[\w.]+:[\w.]+$": "is not python.module:function",
}


def _keys_at(location: list[str]) -> list[str]:
    """Keys that the table around an unknown key knows."""
    tables: dict[str, list[type[Strict]]] = {
        "sources": list(SOURCE_KINDS.values()),
        "modules": [ModuleTable, UnitsLeftOut],
        "groups": [GroupTable],
    }
    kinds = tables.get(location[0], [Recipe]) if len(location) > 1 else [Recipe]
    return [name for kind in kinds for name in kind.model_fields]


def _did_you_mean(word: object, known: Iterable[object]) -> str:
    near = difflib.get_close_matches(str(word), [str(item) for item in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def group(recipe: Recipe, name: str | None) -> GroupTable:
    """A kernel group of a recipe; the default one without a name.

    Raises:
        UnknownName: there is no such group.
    """
    name = name or recipe.default_group
    if name not in recipe.groups:
        raise UnknownName(
            f"recipe {recipe.name} has no kernel group {name!r}{_did_you_mean(name, recipe.groups)}",
            "groups: " + "; ".join(f"{key} ({table.summary})" for key, table in recipe.groups.items()),
        )
    return recipe.groups[name]


def parse_arch(text: str) -> Arch:
    """``sm_120a``, ``sm_120f`` or ``sm_121a``.

    Raises:
        UnknownName: not an arch that SM12x can run.
    """
    try:
        return Arch(text)
    except ValueError:
        known = [str(arch) for arch in Arch]
        plain = re.sub(r"^(compute_|sm_?)?12\.?([01])", r"sm_12\2", text)
        raise UnknownName(
            f"unknown arch {text!r}{_did_you_mean(plain, known)}",
            f"archs: {', '.join(known)} (plain sm_120 lacks the block-scaled MMA instructions)",
        ) from None
