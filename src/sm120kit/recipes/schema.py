"""The tables of a recipe as pydantic models. Nothing here reads a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.core.records import Arch
from sm120kit.core.urls import redacted
from sm120kit.engines import Engine, all_engines, find, of_recipe
from sm120kit.sources.source_records import GitPin, Pin, SdistPin, VendoredProject, WheelCommitPin, WheelPin

PINNED = r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,._-]+\])?==[0-9][0-9A-Za-z.]*$"
DAY = r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$"
PLATFORM = r"^manylinux_2_[0-9]+_(x86_64|aarch64)$"
VARIABLE = r"^[A-Z][A-Z0-9_]*$"
ADDED = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,7}$"
FILES = r"^[A-Za-z0-9_][A-Za-z0-9_.*?/+-]*$"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
VersionText = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+]*$")]


def _below(path: str) -> str:
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path below the source")
    return path


def _shareable(url: str) -> str:
    # The URL is copied to the lockfile, to wheels and to the provenance of images.
    without_user = re.sub(r"^ssh://[\w.-]+@", "ssh://", url)
    if redacted(without_user) != without_user:
        raise ValueError("has credentials, which would be published: leave them to git's credential helper")
    return url


RelativePath = Annotated[str, AfterValidator(_below)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Archs = Annotated[tuple[Annotated[Arch, Field(strict=False)], ...], Field(strict=False, min_length=1)]
FilePattern = Annotated[str, StringConstraints(pattern=FILES)]
PinnedText = Annotated[str, StringConstraints(pattern=PINNED)]
Platform = Annotated[str, StringConstraints(pattern=PLATFORM)]


class Strict(BaseModel):
    """A table that rejects unknown keys and never converts types."""

    # Validators are built when they are first used: a command reads one or two kinds of files.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := [*self.contradictions()]:
            raise ValueError("\n".join(problems))
        return self

    def contradictions(self) -> Iterator[str]:
        """Contradictions between fields, each of which is valid."""
        return iter(())


class SdistSource(Strict):
    """A source distribution; ``sdist`` is its name on the Python index."""

    sdist: str
    version: VersionText
    sha256: Sha256


class GitSource(Strict):
    """A git repository: ``git`` is an https or ssh URL, or ``file:///`` for a local one; ``commit`` has 40 digits."""

    git: Annotated[str, AfterValidator(_shareable)]
    version: VersionText
    commit: Commit


class InsideSource(Strict):
    """A project inside another source, patched with a series of its own; ``path`` is its directory there."""

    inside: Name
    path: RelativePath
    version: VersionText


SOURCE_KINDS: dict[str, type[Strict]] = {"sdist": SdistSource, "git": GitSource, "inside": InsideSource}


def _kind_of(table: Any) -> str | None:
    """The key that names the kind of a source, from its TOML table or from the model of it."""
    keys = type(table).model_fields if isinstance(table, BaseModel) else table if isinstance(table, dict) else ()
    kinds = [kind for kind in SOURCE_KINDS if kind in keys]
    return kinds[0] if len(kinds) == 1 else None


Source = Annotated[
    Annotated[SdistSource, Tag("sdist")] | Annotated[GitSource, Tag("git")] | Annotated[InsideSource, Tag("inside")],
    Discriminator(
        _kind_of, custom_error_type="source_kind", custom_error_message="needs exactly one of the keys sdist, git, inside"
    ),
]


def _wheel_name(name: str) -> str:
    try:
        parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise ValueError(f"{name!r} is not the file name of a wheel") from error
    return name


class WheelSource(Strict):
    """A wheel of an engine as the source of its patch series; ``wheel`` is its file name on the Python index.

    For an engine that publishes no sdist: only files of its Python package can be patched.
    """

    wheel: Annotated[str, AfterValidator(_wheel_name)]
    sha256: Sha256


class CommitSource(Strict):
    """A commit of an engine's repository, or of a fork: its Python files replace those of the locked wheel.

    ``git`` and ``commit`` are as in a :class:`GitSource`. Files that are compiled must be those of the release, of which the
    repository has a tag.
    """

    git: Annotated[str, AfterValidator(_shareable)]
    commit: Commit


class PatchedWheel(WheelSource):
    """A locked wheel of another distribution than the engine, of which a patch series changes files of the Python package."""

    @property
    def pin(self) -> WheelPin:
        """The wheel as a source. Its project, the name of the series, is that of the distribution."""
        name, version, _, _ = parse_wheel_filename(self.wheel)
        return WheelPin(name, name, str(version), self.sha256, self.wheel)


def _engine_source(table: Any) -> str:
    return "git" if isinstance(table, CommitSource) or (isinstance(table, dict) and "git" in table) else "wheel"


EngineSource = Annotated[
    Annotated[WheelSource, Tag("wheel")] | Annotated[CommitSource, Tag("git")], Discriminator(_engine_source)
]


class UnitsLeftOut(Strict):
    """Translation units of a module that no SM12x code uses; ``units`` is a shell-style pattern of their file names."""

    units: str
    reason: str


class UndefinedSymbols(Strict):
    """Functions that a module refers to but does not contain, as it never calls them; ``symbols`` is a shell-style pattern.

    A module with undefined functions loads if they are resolved when they are called, as FlashInfer loads it.
    """

    symbols: str
    reason: str


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return text


class RegroupTable(Strict):
    """Generated units that are compiled in other groups: those of one mainloop share one translation unit.

    Instantiating its mainloop takes most of the time of a kernel's unit, and kernels in the same unit share it. ``units`` is a
    shell-style pattern of file names; ``instantiation`` is a regular expression of one explicit instantiation in their text;
    ``into`` is the name of the unit in which it is compiled, with ``\\1`` for its first group.
    """

    units: str
    instantiation: Annotated[str, AfterValidator(_regular_expression)]
    into: Annotated[str, StringConstraints(pattern=r"^[^/]+\.cu$")]


class ModuleTable(Strict):
    """A shared object whose sources the engine generates.

    ``generator`` is the engine's own ``python.module:function`` and ``arguments`` its keyword arguments; the text
    ``torch.<name>`` is a data type. Units are named by shell-style patterns of their file names after ``regroup``. ``gib``
    (memory, GiB) and ``seconds`` are estimates for a unit, used until its cost has been measured. ``expect_kernels`` is the
    least number of kernels in the finished module, by shell-style pattern of the mangled name and, after ``@``, of the arch.
    Symbols of the finished module that match ``undefined`` need not resolve.
    """

    generator: Annotated[str, StringConstraints(pattern=r"^[\w.]+:[\w.]+$")]
    arguments: dict[str, str | bool | int] = {}
    regroup: Annotated[tuple[RegroupTable, ...], Field(strict=False)] = ()
    leave_out: Annotated[tuple[UnitsLeftOut, ...], Field(strict=False)] = ()
    gib: dict[str, float] = {}
    seconds: dict[str, float] = {}
    expect_kernels: dict[str, Annotated[int, Field(ge=1)]] = {}
    undefined: Annotated[tuple[UndefinedSymbols, ...], Field(strict=False)] = ()

    @property
    def call(self) -> dict[str, Any]:
        """The call of the generator, as the programs that run it read it: ``generator``, and ``arguments`` if there are any."""
        return {"generator": self.generator, **({"arguments": dict(self.arguments)} if self.arguments else {})}


class GroupTable(Strict):
    """A group of kernels, built with ``--kernels NAME``: ``modules`` are compiled, linked and packed."""

    summary: str
    modules: Strings


class OverrideTable(Strict):
    """A version that replaces the one that other distributions require, and the reason."""

    version: VersionText
    reason: str


class EnvironmentTable(Strict):
    """The wheels of a build's environment: ``recipe lock`` resolves them for each platform and locks them by hash.

    ``requires`` are exact (``name==version``); the resolver adds their dependencies. A platform is a wheel tag:
    ``manylinux_2_35_x86_64`` requires an x86_64 machine with glibc 2.35 or newer. With ``as_of``, files uploaded on that day or
    later are ignored, except those of ``requires``: an old engine gets the dependencies of its own time.
    """

    python: Annotated[str, StringConstraints(pattern=r"^3\.[0-9]+$")]
    platforms: Annotated[tuple[Platform, ...], Field(strict=False, min_length=1)]
    as_of: Annotated[str, StringConstraints(pattern=DAY)] = ""
    requires: Annotated[tuple[PinnedText, ...], Field(strict=False, min_length=1)]
    overrides: dict[Name, OverrideTable] = {}


class KnownBad(Strict):
    """A version that must not be in an environment, and the reason."""

    distribution: Name
    version: VersionText
    reason: str


class FilesLeftOut(Strict):
    """Files of a distribution that the image does not contain, because nothing in it uses them on SM12x.

    ``files`` are shell-style patterns of paths below site-packages, as RECORD has them; ``*`` also matches ``/``. ``imports``
    are Python modules that could miss them: the checks of the image import them.
    """

    distribution: Name
    files: Annotated[tuple[FilePattern, ...], Field(strict=False, min_length=1)]
    imports: Strings
    reason: str


class WrongRecord(Strict):
    """Files of a distribution of which RECORD in its upstream wheel has another hash, as of a file that was changed later.

    The sha256 of the wheel covers them. ``files`` are patterns as in :class:`FilesLeftOut`.
    """

    distribution: Name
    files: Annotated[tuple[FilePattern, ...], Field(strict=False, min_length=1)]
    reason: str


class AddedFile(Strict):
    """A text file that is added to the image as ``/opt/sm120kit/files/<path>``, by its sha256; ``reason`` is its use.

    It lies in ``files/`` of the user's repository, or of the built-in data.
    """

    path: Annotated[RelativePath, StringConstraints(pattern=ADDED)]
    sha256: Sha256
    reason: str


class EnginePart(Strict):
    """A part of an engine, and the reason why it is built from source or taken from the upstream wheel."""

    what: str
    reason: str


class InjectedTable(Strict):
    """The value of a variable that gives an engine's CMake project the directory of another project's sources.

    Either ``project``, which is taken from the patched sources of the FlashInfer recipe that the engine uses and must have the
    ``version`` that the engine requires; or ``project`` at a ``commit`` of the repository ``git``, as in a :class:`GitSource`,
    without patches; or empty ``files``, for a project of which nothing is compiled. ``definitions`` are CMake variables for
    directories below it.
    """

    project: Name | None = None
    version: VersionText | None = None
    git: Annotated[str, AfterValidator(_shareable)] | None = None
    commit: Commit | None = None
    files: Annotated[tuple[RelativePath, ...], Field(strict=False)] = ()
    definitions: dict[str, RelativePath] = {}
    reason: str

    def contradictions(self) -> Iterator[str]:
        """Fields of both kinds."""
        if (self.project is None) != (self.version is None) or (self.project is None) != bool(self.files):
            yield "needs either project and version, or files"
        if (self.git is None) != (self.commit is None) or (self.git and self.project is None):
            yield "git and commit belong together, beside project and version"

    @property
    def source(self) -> str:
        """Project and version, in prose; empty for files."""
        at = f" at {self.commit}" if self.commit else ""
        return f"{self.project} {self.version}{at}" if self.project else ""

    @property
    def pin(self) -> GitPin | None:
        """The commit of the project, unless FlashInfer's sources have it."""
        if self.project is None or self.version is None or self.git is None or self.commit is None:
            return None
        return GitPin(self.project, self.git, self.commit, self.version)


class TargetTable(Strict):
    """An extension module that is built from source, named after its CMake target.

    ``member`` is its path in the upstream wheel, ``units`` are all its sources. ``gib``, ``seconds`` and ``expect_kernels`` are
    as in a :class:`ModuleTable`. ``answers`` are Python expressions with the values they must have when the module is loaded as
    ``library``, without a GPU, after ``imports``.

    A member that the upstream wheel lacks ``overrides`` operators of a module that it has; that one is loaded before it.
    """

    member: RelativePath
    overrides: RelativePath | None = None
    units: Annotated[tuple[RelativePath, ...], Field(strict=False, min_length=1)]
    gib: dict[str, float] = {}
    seconds: dict[str, float] = {}
    expect_kernels: dict[str, Annotated[int, Field(ge=1)]] = {}
    imports: Strings = ()
    answers: dict[str, str] = {}


class FromSourceTable(Strict):
    """The parts of an engine that ``--from-source`` builds and puts into its upstream wheel.

    ``sha256`` is that of the engine's sdist. ``environment`` are the distributions of the closure that the build needs, with
    the compiler; ``injected`` has CMake variables as keys. ``files`` has the sha256 of each text in ``files/<recipe>/``, see
    :class:`AddedFile`, that is added to the source or replaces a file of it.
    """

    sha256: Sha256
    files: dict[Annotated[RelativePath, StringConstraints(pattern=ADDED)], Sha256] = {}
    environment: Annotated[tuple[Name, ...], Field(strict=False)]
    injected: dict[Annotated[str, StringConstraints(pattern=VARIABLE)], InjectedTable] = {}
    targets: Annotated[dict[str, TargetTable], Field(min_length=1)]


class FlashInferRecipe(Strict):
    """The kernels of a FlashInfer version: pinned sources, the modules to compile, and the compilers that the lockfile pins."""

    edition: Literal[1]
    name: Name
    engine: Literal["flashinfer"]
    version: VersionText
    summary: str
    archs: Archs
    headers: Strings = ()
    sources: dict[Name, Source]
    modules: dict[str, ModuleTable]
    groups: dict[Name, GroupTable]
    default_group: str
    environment: EnvironmentTable | None = None

    # What only the recipe of an engine has.
    delivers_image: ClassVar[bool] = False
    state: ClassVar[str] = "kernels"
    base: ClassVar[None] = None
    env: ClassVar[dict[str, str]] = {}
    serve: ClassVar[Strings] = ()
    patched: ClassVar[tuple[PatchedWheel, ...]] = ()
    known_bad: ClassVar[tuple[KnownBad, ...]] = ()
    leave_out: ClassVar[tuple[FilesLeftOut, ...]] = ()
    wrong_record: ClassVar[tuple[WrongRecord, ...]] = ()
    files: ClassVar[tuple[AddedFile, ...]] = ()
    b12x: ClassVar[None] = None

    @property
    def flashinfer(self) -> str:
        """The recipe of the kernels: this one."""
        return self.name

    @property
    def made_from(self) -> str:
        """The sources, in prose."""
        return ", ".join(f"{project} {source.version}" for project, source in self.sources.items())

    def contradictions(self) -> Iterator[str]:
        """References to undefined names."""
        fetched = [name for name, source in self.sources.items() if not isinstance(source, InsideSource)]
        if len(fetched) != 1:
            yield f"sources: exactly one must have sdist or git; these have: {', '.join(fetched) or 'none'}"
        for name, source in self.sources.items():
            if isinstance(source, InsideSource) and source.inside not in fetched:
                near = did_you_mean(source.inside, fetched)
                yield f"sources.{name}.inside: {source.inside!r} is not a fetched source{near}"
        for name, group in self.groups.items():
            for module in group.modules:
                if module not in self.modules:
                    yield f"groups.{name}: no module {module!r}{did_you_mean(module, self.modules)}"
        if self.default_group not in self.groups:
            yield f"default_group: no group {self.default_group!r}{did_you_mean(self.default_group, self.groups)}"

    def require_kernels(self) -> FlashInferRecipe:
        """This recipe, as :meth:`EngineRecipe.require_kernels` has none."""
        return self

    def require_engine(self) -> EngineRecipe:
        """Require the recipe of an engine.

        Raises:
            NotFound: always.
        """
        raise NotFound(
            f"{self.name} is a FlashInfer recipe, not a recipe of an engine", "`sm120kit recipe list` shows those of engines"
        )

    def inputs(self) -> dict[str, Any]:
        """The fields that decide the result, without prose and estimates, as in a lockfile."""
        prose: dict[str, Any] = {
            "summary": True,
            "sources": {"__all__": {"git"}},  # names a host; the commit is enough
            "groups": {"__all__": {"summary"}},
            "modules": {"__all__": {"gib", "seconds"}},
        }
        inputs = self.model_dump(mode="json", exclude=prose)
        for group in inputs["groups"].values():  # keys of recipes whose lockfiles users have
            group |= {"samples": [], "expect_sample_kernels": {}}
        for module in inputs["modules"].values():
            for key in ("arguments", "regroup"):
                if not module[key]:
                    del module[key]
        return inputs

    @property
    def pin(self) -> Pin:
        """The pin of the source that is fetched; all other sources lie inside it."""
        for project, source in self.sources.items():
            if isinstance(source, SdistSource):
                return SdistPin(project, source.sdist, source.version, source.sha256)
            if isinstance(source, GitSource):
                return GitPin(project, source.git, source.commit, source.version)
        raise AssertionError("validated: one source is fetched")

    @property
    def inside(self) -> tuple[VendoredProject, ...]:
        """Projects inside the fetched source, in the order in which they are patched."""
        return tuple(
            VendoredProject(project, source.path, source.version)
            for project, source in self.sources.items()
            if isinstance(source, InsideSource)
        )


Size = Annotated[int, Field(ge=1)]
Sizes = Annotated[tuple[Size, ...], Field(strict=False, min_length=1)]


class B12xExperts(Strict):
    """The experts of a layer on one GPU, as ``b12x_moe_fp4`` gets them, and the numbers of tokens of calls."""

    experts: Size
    hidden: Size
    inner: Size
    top_k: Size
    tokens: Sizes


class B12xGemm(Strict):
    """A linear layer on one GPU, ``n`` outputs from ``k`` inputs, and the numbers of rows of calls."""

    n: Size
    k: Size
    rows: Sizes


class B12xTable(Strict):
    """Kernels of b12x that are compiled into the image, for a GPU with ``sm_count`` SMs, as entries of b12x's cache."""

    sm_count: Size
    moe: Annotated[tuple[B12xExperts, ...], Field(strict=False)] = ()
    gemm: Annotated[tuple[B12xGemm, ...], Field(strict=False)] = ()


class EngineRecipe(Strict):
    """A version of an engine: locked upstream wheels, with our patched FlashInfer wheel instead of the upstream one.

    ``flashinfer`` is the name of the FlashInfer recipe and ``kernels`` the group of its modules in the image. ``state`` is
    ``resolved`` (the wheels are locked) or ``verified`` (an image with compiled modules has passed its checks, which need no
    GPU and do not run kernels on one). ``env`` is the environment of the image and ``serve`` the command that it runs.
    ``base`` is the name of a base in ``recipes/bases/``; without it, it is chosen at build time.
    ``source`` is the source of the engine's patch series; without it, that is the sdist of ``from_source`` or the locked wheel.
    ``patched`` are other wheels with patch series. To distributions in ``as_released``, which may be the engine, no patch of a
    series is applied.
    ``b12x`` are kernels of b12x that are compiled into the image. ``leave_out`` are files of locked wheels that the image does
    not contain, ``wrong_record`` files that are not compared with RECORD. ``files`` are added to the image.
    """

    edition: Literal[1]
    name: Name
    engine: Name
    version: VersionText
    summary: str
    state: Literal["resolved", "verified"]
    archs: Archs
    flashinfer: Name
    kernels: Name
    base: Name | None = None
    environment: EnvironmentTable
    env: dict[str, str] = {}
    serve: Strings
    built: Annotated[tuple[EnginePart, ...], Field(strict=False)]
    upstream: Annotated[tuple[EnginePart, ...], Field(strict=False)]
    source: EngineSource | None = None
    patched: Annotated[tuple[PatchedWheel, ...], Field(strict=False)] = ()
    from_source: FromSourceTable | None = None
    as_released: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    b12x: B12xTable | None = None
    known_bad: Annotated[tuple[KnownBad, ...], Field(strict=False)] = ()
    leave_out: Annotated[tuple[FilesLeftOut, ...], Field(strict=False)] = ()
    wrong_record: Annotated[tuple[WrongRecord, ...], Field(strict=False)] = ()
    files: Annotated[tuple[AddedFile, ...], Field(strict=False, max_length=100)] = ()

    @property
    def machine(self) -> str:
        """The machine that its image runs on: ``x86_64``, ``aarch64``."""
        return self.environment.platforms[0].split("_", 3)[3]

    delivers_image: ClassVar[bool] = True
    groups: ClassVar[dict[str, GroupTable]] = {}
    """Of kernels: those of its FlashInfer recipe."""
    sources: ClassVar[dict[str, Source]] = {}
    """Those of its FlashInfer recipe; its own is ``source``."""

    def contradictions(self) -> Iterator[str]:
        """Sources and pins that contradict each other, and names that are given twice."""
        pins = dict(pin.split("==") for pin in self.environment.requires)
        if pins.get(self.engine) != self.version:
            yield f"environment.requires: has no '{self.engine}=={self.version}', the engine itself"
        for bad in self.known_bad:
            if pins.get(bad.distribution) == bad.version:
                yield f"environment.requires: {bad.distribution} {bad.version} is known to be bad: {bad.reason}"
        if isinstance(self.source, WheelSource) and self.from_source:
            yield "source: set, but from_source has the engine's sdist"
        if isinstance(self.source, WheelSource):
            name, release, _, _ = parse_wheel_filename(self.source.wheel)
            if (name, str(release)) != (self.engine, self.version):
                yield f"source.wheel: {self.source.wheel!r} is not a wheel of {self.engine} {self.version}"
        projects = [self.engine, *(wheel.pin.project for wheel in self.patched)]
        if again := sorted({name for name in projects if projects.count(name) > 1}):
            yield f"patched: {', '.join(again)} twice; the engine's own series is that of source or from_source"
        patched = {*projects[0 if self.source or self.from_source else 1 :]}
        if both := sorted(patched & {*self.as_released}):
            yield f"as_released: {', '.join(both)}: the recipe has a source of it to which patches are applied"
        paths = [each.path for each in self.files]
        above = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
        if again := sorted({path for path in paths if paths.count(path) > 1 or path in above}):
            yield f"files: {', '.join(again)} is named twice, or is also a directory"

    def inputs(self) -> dict[str, Any]:
        """The fields that decide the result, without prose, as in a lockfile.

        Not ``as_released``: the sources and patches in the lockfile are those that are applied.
        """
        source = self.from_source
        injected, targets, added = (source.injected, source.targets, source.files) if source else ({}, {}, {})
        prose: dict[str, Any] = {
            **dict.fromkeys(("summary", "state", "built", "upstream", "as_released", "known_bad"), True),
            "environment": {"overrides": {"__all__": {"reason"}}},
            "leave_out": {"__all__": {"reason", "imports"}},
            "wrong_record": {"__all__": {"reason"}},
            "files": {"__all__": {"reason"}},
            "source": {"git"},  # names a host; the commit is enough
            "from_source": {
                **({} if added else {"files": True}),
                "injected": {key: {"reason", "git"} | ({"commit"} - table.model_fields_set) for key, table in injected.items()},
                "targets": {
                    key: {"gib", "seconds"} | ({"overrides"} - table.model_fields_set) for key, table in targets.items()
                },
            },
        }
        optional = ("base", "source", "patched", "from_source", "b12x", "leave_out", "wrong_record", "files")
        absent = dict.fromkeys((key for key in optional if not getattr(self, key)), True)
        return self.model_dump(mode="json", exclude=prose | absent)

    @property
    def made_from(self) -> str:
        """The FlashInfer recipe and its kernel group, in prose."""
        return f"{self.flashinfer} ({self.kernels})"

    def require_kernels(self) -> FlashInferRecipe:
        """Require a FlashInfer recipe.

        Raises:
            NotFound: always; the hint names the FlashInfer recipe that it uses.
        """
        raise NotFound(
            f"{self.name} is a recipe of {self.engine} and lists no kernels",
            f"the kernels of its FlashInfer are those of {self.flashinfer}; "
            f"kernels that {self.engine} has besides are not listed",
        )

    def require_engine(self) -> EngineRecipe:
        """This recipe, as :meth:`FlashInferRecipe.require_engine` has none."""
        return self

    @property
    def served_by(self) -> Engine:
        """The engine."""
        return of_recipe(self.engine)

    @property
    def pin(self) -> SdistPin | WheelPin | None:
        """The pin of the engine's own source, if parts of it are patched or built from source. See also :meth:`pin_on`."""
        if isinstance(self.source, WheelSource):
            return WheelPin(self.engine, self.engine, self.version, self.source.sha256, self.source.wheel)
        if self.source or not self.from_source:
            return None
        return SdistPin(self.engine, self.engine, self.version, self.from_source.sha256)

    def pin_on(self, wheel: WheelPin) -> WheelPin | SdistPin:
        """The pin of the engine's own source, of which the locked wheel is a part if the recipe has a commit or no source."""
        if not isinstance(self.source, CommitSource):
            return self.pin or wheel
        own = wheel.project, wheel.distribution, wheel.version, wheel.sha256, wheel.filename
        return WheelCommitPin(*own, self.source.git, self.source.commit)

    @property
    def inside(self) -> tuple[VendoredProject, ...]:
        """Projects inside the engine's own source: none has a patch series."""
        return ()


Recipe = FlashInferRecipe | EngineRecipe

FLASHINFER_KEY = "flashinfer"
"""The key ``engine`` of the recipes of kernels."""


def kind_of(engine: str) -> type[FlashInferRecipe] | type[EngineRecipe]:
    """The class of a recipe by its key ``engine``: that of kernels, unless it is an engine."""
    return EngineRecipe if find(engine) else FlashInferRecipe


def known_engines() -> tuple[str, ...]:
    """Every value of the key ``engine``."""
    return (FLASHINFER_KEY, *(engine.name for engine in all_engines()))
