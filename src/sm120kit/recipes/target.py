"""Resolve the recipe that a command names, once: the recipe, its lockfile and its source trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit import recipes, sources
from sm120kit.core.data_roots import top_root
from sm120kit.core.errors import BadInput, Mismatch, NotFound
from sm120kit.patches.checkout import OVERRIDES, PATCHES, fetch_patched, series_files, series_of, with_series
from sm120kit.patches.drift import status, status_without_source
from sm120kit.patches.foreign import ImportTarget, place_of
from sm120kit.patches.format import Patch
from sm120kit.patches.local import apply_local, owner
from sm120kit.patches.mails import ForeignPatch
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree, PatchStatus, TreeProject, projects_in_tree
from sm120kit.recipes import lockfile
from sm120kit.recipes.load import lock_command
from sm120kit.recipes.recipe_records import Closure, Lock, LockedFile
from sm120kit.recipes.schema import EngineRecipe, FlashInferRecipe, Recipe
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import Checkout, LockedWheel, Pin, VendoredProject, WheelCommitPin, WheelPin


@dataclass(frozen=True)
class PatchSource:
    """The source of a recipe, to which the patch series of its projects are applied: unpatched and patched.

    ``recipe`` is the recipe as an argument of commands. ``inside`` are projects inside the source that ``pin`` fetches.
    ``files`` is from :func:`sm120kit.patches.checkout.series_files`. Checkout and tree are read, or fetched, when they are
    first used, because not every command needs them; then they stay. ``local`` is the tree with local patches above the
    series, None without any. No patch of a series is applied to a source ``as_released``.
    """

    recipe: str
    pin: Pin
    inside: tuple[VendoredProject, ...]
    options: Options
    files: Mapping[str, str]
    local: PatchedTree | None = None
    as_released: bool = False

    @property
    def projects(self) -> list[TreeProject]:
        """The projects of the source in the order in which they are patched."""
        return projects_in_tree(self.pin, self.inside)

    def has_version_of(self, patch: Patch) -> bool:
        """Whether a patch is for the version of a project of the source, and is applied to it."""
        return not self.as_released and any(
            part.project == patch.project and patch.is_for(part.version) for part in self.projects
        )

    @cached_property
    def is_patched(self) -> bool:
        """Whether a patch of its series is for its version. Nothing is fetched."""
        return any(map(self.has_version_of, series_of(self.pin, self.inside)))

    @property
    def statuses(self) -> tuple[PatchStatus, ...]:
        """The status of each patch of its series; the source is fetched only if one is for its version."""
        if self.is_patched:
            return status(self.checkout, self.inside, top_root() / PATCHES)
        versions = {part.project: part.version for part in self.projects}
        reason = "the recipe has it in as_released" if self.as_released else ""
        series = series_of(self.pin, self.inside)
        return tuple(status_without_source(patch, versions[patch.project], reason) for patch in series)

    @cached_property
    def checkout(self) -> Checkout:
        """The unpatched source, fetched if it is not cached."""
        return sources.fetch(self.pin, self.options.workspace, self.options.origin)

    @cached_property
    def series_tree(self) -> PatchedTree:
        """The source with its patch series applied; fetched and patched if it is not cached."""
        if self.as_released:
            return self.unpatched_tree
        return fetch_patched(self.pin, self.inside, self.options, self.files)

    @property
    def tree(self) -> PatchedTree:
        """The source that is built: with its patch series, and with local patches."""
        return self.local or self.series_tree

    @property
    def unpatched_tree(self) -> PatchedTree:
        """The source without the patch series."""
        return PatchedTree(self.checkout, self.inside, self.checkout.commit, self.checkout.tree, ())


class Target:
    """A recipe of either kind, as a command uses it, with the lockfile beside it."""

    recipe: Recipe
    path: Path
    if TYPE_CHECKING:  # a field of one class, a property of the other

        @property
        def options(self) -> Options:
            """The options of the command."""

        @property
        def flashinfer(self) -> FlashInferTarget:
            """The target of the kernels."""

    @property
    def engine(self) -> EngineTarget | None:
        """This target, if it is that of an engine."""
        return None

    @property
    def sources(self) -> tuple[PatchSource, ...]:
        """The sources of the recipe to which patch series are applied, an engine's own first."""
        raise NotImplementedError

    def python_trees(self, closures: Sequence[Closure]) -> tuple[PatchedTree, ...]:
        """The patched sources of an engine and of other wheels in ``closures``: a FlashInfer recipe has none."""
        return ()

    @property
    def local_patches(self) -> tuple[AppliedPatch, ...]:
        """The local patches of all sources, see :func:`with_local`."""
        trees = dict.fromkeys([self.flashinfer.local, *(source.local for source in self.sources)])
        return tuple(patch for tree in trees if tree for patch in tree.local)

    @property
    def argument(self) -> str:
        """The recipe as an argument of commands. See :func:`argument`."""
        return argument(self.path)

    @property
    def lock_command(self) -> str:
        """The command that locks the recipe."""
        return lock_command(self.lock_path)

    @property
    def lock_path(self) -> Path:
        """The lockfile, which may not exist."""
        return recipes.lock_path(self.path)

    @cached_property
    def lock(self) -> Lock:
        """Every input of a build: the lockfile, verified against the recipe and its sources, with the patch series.

        Raises:
            Mismatch: it does not exist, or it is edited or outdated.
        """
        return lockfile.verify(self)

    @cached_property
    def build_id(self) -> str:
        """The sha256 of :attr:`lock`, see there for errors."""
        return lockfile.build_id(self.lock)

    @cached_property
    def read_lock(self) -> Lock:
        """The lockfile as it is, not verified; a command reads it once.

        Raises:
            Mismatch: it does not exist, or its text is not what ``recipe lock`` writes.
        """
        return lockfile.read(self.lock_path)


@dataclass(frozen=True)
class FlashInferTarget(Target):
    """A FlashInfer recipe with its lockfile and its source tree, unpatched and patched.

    A command resolves its argument to a target once and passes that on. The lockfile is read when it is first used, because not
    every command needs it; then it stays. So do the trees, see :class:`PatchSource`.

    ``path`` is the file of the recipe. ``files`` is from :func:`sm120kit.patches.checkout.series_files`.
    """

    recipe: FlashInferRecipe
    path: Path
    options: Options
    files: Mapping[str, str]
    local: PatchedTree | None = None

    @property
    def flashinfer(self) -> FlashInferTarget:
        """This target, as :attr:`EngineTarget.flashinfer` is that of an engine."""
        return self

    @cached_property
    def source(self) -> PatchSource:
        """The source of the recipe."""
        return PatchSource(self.argument, self.recipe.pin, self.recipe.inside, self.options, self.files, self.local)

    @property
    def checkout(self) -> Checkout:
        """The unpatched source. See :attr:`PatchSource.checkout`."""
        return self.source.checkout

    @property
    def tree(self) -> PatchedTree:
        """The patched source. See :attr:`PatchSource.tree`."""
        return self.source.tree

    @property
    def sources(self) -> tuple[PatchSource, ...]:
        """The sources of the recipe: one."""
        return (self.source,)

    @property
    def overrides(self) -> tuple[LockedFile, ...]:
        """The files of the CUTLASS overrides, by path below their directory."""
        prefix = f"{OVERRIDES}/"
        return tuple(
            LockedFile(path.removeprefix(prefix), sha256) for path, sha256 in self.files.items() if path.startswith(prefix)
        )


@dataclass(frozen=True)
class EngineTarget(Target):
    """The recipe of an engine with its lockfile, its own source tree, and the target of the FlashInfer recipe that it uses.

    See :class:`FlashInferTarget`. To verify the lockfile means to verify that of the FlashInfer recipe as well. ``local`` are
    trees with local patches, by project.
    """

    recipe: EngineRecipe
    path: Path
    flashinfer: FlashInferTarget
    local: Mapping[str, PatchedTree] = field(default_factory=dict)

    @property
    def engine(self) -> EngineTarget:
        """This target."""
        return self

    @property
    def options(self) -> Options:
        """The options of the command."""
        return self.flashinfer.options

    @property
    def closure(self) -> Closure:
        """The upstream wheels of the image: those for the first platform of the recipe."""
        platform_tag = self.recipe.environment.platforms[0]
        return next(closure for closure in self.lock.closures if closure.platform == platform_tag)

    @cached_property
    def source(self) -> PatchSource | None:
        """The engine's own source: that in the recipe, or else its locked wheel; None if the recipe is not locked."""
        return self._own_source(self._wheels)

    @cached_property
    def packages(self) -> tuple[PatchSource, ...]:
        """The other wheels with patch series: those that the recipe lists, and locked ones whose project has a series."""
        return self._package_sources(self._wheels)

    @property
    def patched(self) -> tuple[PatchSource, ...]:
        """Those of :attr:`packages` that have a patch for their version, or that the recipe lists."""
        return tuple(source for source in self.packages if source.local or self._is_locked(source))

    @property
    def sources(self) -> tuple[PatchSource, ...]:
        """The sources to which patch series are applied, the engine's first."""
        return (*((self.source,) if self.source else ()), *self.packages)

    @property
    def _wheels(self) -> tuple[LockedWheel, ...]:
        """The locked wheels for the first platform, as the lockfile has them; none without one.

        It is not verified: that needs the trees of these wheels, and a series is edited while its lockfile is outdated.
        """
        return self._first_closure(self.read_lock.closures) if self.lock_path.is_file() else ()

    def _first_closure(self, closures: Sequence[Closure]) -> tuple[LockedWheel, ...]:
        platform = self.recipe.environment.platforms[0]
        return next((closure.wheels for closure in closures if closure.platform == platform), ())

    def _own_source(self, wheels: Sequence[LockedWheel]) -> PatchSource | None:
        recipe = self.recipe
        locked = next((_pin_of(wheel) for wheel in wheels if wheel.name == recipe.engine), None)
        pin = recipe.pin_on(locked) if locked else recipe.pin
        return self._source_of(pin, recipe.inside) if pin else None

    def _package_sources(self, wheels: Sequence[LockedWheel]) -> tuple[PatchSource, ...]:
        listed = [wheel.pin for wheel in self.recipe.patched]
        unnamed = with_series() - {self.recipe.engine, *(pin.project for pin in listed)}
        others = [_pin_of(wheel) for wheel in wheels if wheel.name in unnamed]
        return tuple(self._source_of(pin, ()) for pin in (*listed, *others))

    def _source_of(self, pin: Pin, inside: tuple[VendoredProject, ...]) -> PatchSource:
        return PatchSource(
            self.argument,
            pin,
            inside,
            self.options,
            self.flashinfer.files,
            self.local.get(pin.project),
            pin.project in self.recipe.as_released,
        )

    def _is_locked(self, source: PatchSource) -> bool:
        """Whether a source is an input of the lockfile: the recipe names it, or a patch of the series is for its version."""
        listed = (self.recipe.pin, *(wheel.pin for wheel in self.recipe.patched))
        return source.pin in listed or isinstance(source.pin, WheelCommitPin) or source.is_patched

    @property
    def engine_tree(self) -> PatchedTree | None:
        """The engine's own source with its series applied; None for a locked wheel without a patch for its version."""
        source = self.source
        return source.tree if source and (source.local or self._is_locked(source)) else None

    def python_trees(self, closures: Sequence[Closure]) -> tuple[PatchedTree, ...]:
        """The trees of the engine and of other wheels in ``closures`` with their series, if these change them."""
        wheels = self._first_closure(closures)
        own = self._own_source(wheels)
        every = (*((own,) if own else ()), *self._package_sources(wheels))
        return tuple(source.series_tree for source in every if self._is_locked(source))


def _pin_of(wheel: LockedWheel) -> WheelPin:
    """A locked wheel as a source; its project, the name of the series, is that of the distribution."""
    return WheelPin(wheel.name, wheel.name, wheel.version, wheel.sha256, wheel.filename)


def with_local(target: Target, patches: Sequence[ForeignPatch]) -> Target:
    """A target with local patches above its series. Its lockfile and build id stay those of the series."""
    engine = target.engine
    own = engine.sources if engine else ()
    flashinfer, *others = apply_local(patches, [target.flashinfer.source.series_tree, *(source.series_tree for source in own)])
    kernels = replace(target.flashinfer, local=flashinfer if flashinfer.local else None)
    changed = {tree.checkout.pin.project: tree for tree in others if tree.local}
    return replace(engine, flashinfer=kernels, local=changed) if engine else kernels


def argument(recipe: Path) -> str:
    """A recipe's file as an argument of commands: the recipe's name, or the path if it is outside the recipe directory."""
    return recipe.stem if recipe == recipes.path_of(recipe.stem) else str(recipe)


def pinned_versions(options: Options) -> dict[str, set[str]]:
    """The versions of each project that recipes of this data directory pin."""
    versions: dict[str, set[str]] = {}
    for project in (project for source in resolve_sources((), options) for project in source.projects):
        versions.setdefault(project.project, set()).add(project.version)
    return versions


def resolve(name: str, options: Options) -> Target:
    """Resolve a recipe by name. See :func:`sm120kit.recipes.locate` for the forms of a name.

    Raises:
        NotFound: there is no such recipe; the hint lists the recipes.
        BadInput: it is not well-formed; the message lists every problem.
    """
    return next(resolve_each([name], options))


def resolve_flashinfer(name: str, options: Options) -> FlashInferTarget:
    """Resolve a FlashInfer recipe. See :func:`resolve` for errors.

    Raises:
        NotFound: also for the recipe of an engine.
    """
    path, recipe = recipes.load_with_path(name)
    return FlashInferTarget(recipe.require_kernels(), path, options, series_files())


def resolve_source(name: str, options: Options, project: str = "") -> PatchSource:
    """Resolve a recipe to its source. See :func:`resolve` and :func:`require_source` for errors."""
    return require_source(resolve(name, options), project)


def resolve_sources(names: Iterable[str], options: Options) -> list[PatchSource]:
    """The sources of several recipes, or of all recipes that have one if ``names`` is empty.

    See :func:`resolve` and :func:`require_source` for errors.
    """
    if named := list(names):
        targets = [*resolve_each(named, options)]
        for target in targets:
            require_source(target)
    else:
        targets = [*resolve_each(recipes.names(), options)]
    return [source for target in targets for source in target.sources]


def require_source(target: Target, project: str = "") -> PatchSource:
    """The source of a target that contains ``project``, by default the first, an engine's own. Nothing is fetched.

    Raises:
        Mismatch: an engine has none, because its recipe is not locked.
        NotFound: no source contains the project.
    """
    for source in target.sources:
        if not project or project in (part.project for part in source.projects):
            return source
    name = target.recipe.name
    if not target.sources:
        raise Mismatch(
            f"{name} is not locked, and the source of {target.recipe.engine} is its locked wheel",
            f"lock it: {target.lock_command}",
        )
    every = ", ".join(part.project for source in target.sources for part in source.projects)
    raise NotFound(f"{name} has no source of {project}", f"it has sources of {every}")


def source_with(target: Target, patch: ForeignPatch, place: ImportTarget) -> PatchSource:
    """The source of a recipe that has the files of a patch: that of ``place.project``, or the first one in which they are.

    Raises:
        BadInput: the files are those of no source, or of several.
        NotFound, Mismatch: see :func:`require_source`.
    """
    first = require_source(target, place.project)
    if place.project or place.directory or place.strip is not None:
        return first
    try:
        if place_of(patch, first.tree, first.tree.tree, place).known:
            return first
    except BadInput:
        pass
    sources = [*target.sources, *([target.flashinfer.source] if target.engine else [])]
    return sources[owner(patch, [source.tree for source in sources])[0]]


def resolve_each(names: Iterable[str], options: Options) -> Iterator[Target]:
    """Resolve several recipes. A FlashInfer recipe is read once, even if several engines use it."""
    files = series_files()
    resolved: dict[Path, FlashInferTarget] = {}
    for name in names:
        path, recipe = recipes.load_with_path(name)
        used = recipes.locate(recipe.flashinfer) if recipe.delivers_image else path
        if used not in resolved:
            kernels = (recipes.read(used) if recipe.delivers_image else recipe).require_kernels()
            resolved[used] = FlashInferTarget(kernels, used, options, files)
        yield EngineTarget(recipe.require_engine(), path, resolved[used]) if recipe.delivers_image else resolved[used]
