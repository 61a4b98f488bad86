"""The tables of a recipe. Nothing here reads a file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from sm120kit.records import Arch, GitPin, Inside, Pin, SdistPin

PINNED = r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,._-]+\])?==[0-9][0-9A-Za-z.]*$"
DAY = r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$"
PLATFORM = r"^manylinux_2_[0-9]+_(x86_64|aarch64)$"
VARIABLE = r"^[A-Z][A-Z0-9_]*$"

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
Archs = Annotated[tuple[Annotated[Arch, Field(strict=False)], ...], Field(strict=False, min_length=1)]
PinnedText = Annotated[str, StringConstraints(pattern=PINNED)]
Platform = Annotated[str, StringConstraints(pattern=PLATFORM)]


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


class OverrideTable(Strict):
    """A version that takes the place of what a distribution demands, and why."""

    version: VersionText
    reason: str


class EnvironmentTable(Strict):
    """The wheels that go with a build: resolved by ``recipe lock`` for each platform and locked by hash.

    ``requires`` are exact (``name==version``); what they need in turn is for the resolver to find. A platform is a wheel tag:
    ``manylinux_2_35_x86_64`` asks for an x86_64 machine with glibc 2.35 or newer. With ``as_of``, nothing that was uploaded on
    that day or later is considered, but for what is named here: so an old engine meets the dependencies of its own time.
    """

    python: Annotated[str, StringConstraints(pattern=r"^3\.[0-9]+$")]
    platforms: Annotated[tuple[Platform, ...], Field(strict=False, min_length=1)]
    as_of: Annotated[str, StringConstraints(pattern=DAY)] = ""
    requires: Annotated[tuple[PinnedText, ...], Field(strict=False, min_length=1)]
    overrides: dict[Name, OverrideTable] = {}


class KnownBad(Strict):
    """A version that must not be in an environment, and why."""

    distribution: Name
    version: VersionText
    reason: str


class Part(Strict):
    """A part of an engine, and why it is built here or stays official."""

    what: str
    reason: str


class InjectedTable(Strict):
    """What fills a variable by which an engine's CMake project is told where another project's sources lie.

    Either ``project``, one that lies patched in the sources of the FlashInfer that the recipe rests on, in just the ``version``
    that the engine asks for; or empty ``files`` that stand in for a project of which nothing is compiled. ``definitions`` are
    CMake variables that name directories below it.
    """

    project: Name | None = None
    version: VersionText | None = None
    files: Annotated[tuple[Relative, ...], Field(strict=False)] = ()
    definitions: dict[str, Relative] = {}
    reason: str

    @model_validator(mode="after")
    def _one_kind(self) -> InjectedTable:
        if (self.project is None) != (self.version is None) or (self.project is None) != bool(self.files):
            raise ValueError("needs either project and version, or files")
        return self


class TargetTable(Strict):
    """One extension module that is built: its name is that of its CMake target.

    ``member`` is its place in the official wheel, ``units`` are its sources, all of them. ``gib`` and ``seconds`` are estimates
    for a unit by file name pattern, and ``expect_kernels`` is as in a :class:`ModuleTable`. Loaded without a GPU as
    ``library``, after ``imports``, it must give these ``answers`` to Python expressions.
    """

    member: Relative
    units: Annotated[tuple[Relative, ...], Field(strict=False, min_length=1)]
    gib: dict[str, float] = {}
    seconds: dict[str, float] = {}
    expect_kernels: dict[str, Annotated[int, Field(ge=1)]] = {}
    imports: Words = ()
    answers: dict[str, str] = {}


class FromSourceTable(Strict):
    """What ``--from-source`` builds of an engine and puts into its official wheel.

    ``sha256`` is of the engine's sdist. ``environment`` are distributions of the closure that the build needs, the compiler
    among them; ``injected`` is by variable.
    """

    sha256: Sha256
    environment: Annotated[tuple[Name, ...], Field(strict=False)]
    injected: dict[Annotated[str, StringConstraints(pattern=VARIABLE)], InjectedTable] = {}
    targets: Annotated[dict[str, TargetTable], Field(min_length=1)]


class Recipe(Strict):
    """The kernels of one FlashInfer version: pinned sources, what is compiled, and the compilers that the lock pins."""

    edition: Literal[1]
    name: Name
    engine: Literal["flashinfer"]
    version: VersionText
    summary: str
    archs: Archs
    headers: Words = ()
    sources: dict[Name, Source]
    modules: dict[str, ModuleTable]
    groups: dict[Name, GroupTable]
    default_group: str
    environment: EnvironmentTable | None = None

    def inputs(self) -> dict[str, Any]:
        """What decides the result, without prose and estimates: what a lock holds."""
        prose: dict[str, Any] = {
            "summary": True,
            "sources": {"__all__": {"git"}},  # a host's name; the commit says it all
            "groups": {"__all__": {"summary"}},
            "modules": {"__all__": {"gib", "seconds"}},
        }
        return self.model_dump(mode="json", exclude=prose)

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


class EngineRecipe(Strict):
    """One version of vLLM or SGLang: official wheels, locked, and our patched FlashInfer wheel in the place of the official.

    ``flashinfer`` names the recipe it rests on and ``kernels`` the group of modules that its wheel carries. ``state`` is
    ``resolved`` (its wheels are locked; no image made of them has passed its tests) or ``verified`` (one has; that needs no
    GPU and says nothing about how kernels run on one). ``env`` is set and ``serve`` started in the image. ``base_image`` is
    empty when it is given at build time.
    """

    edition: Literal[1]
    name: Name
    engine: Literal["vllm", "sglang"]
    version: VersionText
    summary: str
    state: Literal["resolved", "verified"]
    archs: Archs
    flashinfer: Name
    kernels: Name
    base_image: Annotated[str, StringConstraints(pattern=r"^(\S+@sha256:[0-9a-f]{64})?$")] = ""
    environment: EnvironmentTable
    env: dict[str, str] = {}
    serve: Words
    built: Annotated[tuple[Part, ...], Field(strict=False)]
    official: Annotated[tuple[Part, ...], Field(strict=False)]
    from_source: FromSourceTable | None = None
    known_bad: Annotated[tuple[KnownBad, ...], Field(strict=False)] = ()

    def inputs(self) -> dict[str, Any]:
        """What decides the result, without prose: what a lock holds."""
        prose: dict[str, Any] = {
            **dict.fromkeys(("summary", "state", "built", "official", "known_bad"), True),
            "environment": {"overrides": {"__all__": {"reason"}}},
            "from_source": {"injected": {"__all__": {"reason"}}, "targets": {"__all__": {"gib", "seconds"}}},
        }
        return self.model_dump(mode="json", exclude=prose if self.from_source else {**prose, "from_source": True})

    @property
    def source(self) -> SdistPin | None:
        """The engine's own source, where a part of it can be built here."""
        return SdistPin(self.engine, self.engine, self.version, self.from_source.sha256) if self.from_source else None


KINDS: dict[str, type[Recipe] | type[EngineRecipe]] = {"flashinfer": Recipe, "vllm": EngineRecipe, "sglang": EngineRecipe}
"""What a recipe is, by its key ``engine``."""
