"""Make the recipe of an upstream release: drafted from the nearest recipe, locked and planned before it appears.

Everything is made in a temporary directory. The FlashInfer recipe that an engine requires is made with it.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sm120kit import patches, recipes, sources
from sm120kit.core import reporting
from sm120kit.core.atomic_writes import write_together
from sm120kit.core.data_roots import top_root, writable_data_root, writable_folder
from sm120kit.core.errors import (
    AlreadyExists,
    BadInput,
    CommandFailed,
    FetchFailed,
    Mismatch,
    NotFound,
    PatchConflict,
    ResolutionFailed,
    SystemRefused,
    did_you_mean,
)
from sm120kit.core.records import Stage
from sm120kit.patches.checkout import series_files
from sm120kit.patches.drift import VERSION_H, cutlass_version
from sm120kit.patches.patch_records import PatchState, PatchStatus
from sm120kit.recipes import drafts, locked_toolchain, lockfile
from sm120kit.recipes.drafts import Draft, Python, Template, distribution, title
from sm120kit.recipes.load import read_toml
from sm120kit.recipes.locked_toolchain import FFI
from sm120kit.recipes.target import EngineTarget, FlashInferTarget, Target, resolve_flashinfer
from sm120kit.sources.git import Repository
from sm120kit.sources.index import ListedFile
from sm120kit.sources.releases import Releases
from sm120kit.sources.resolver import compatible_rank
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import Checkout, SdistPin
from sm120kit.sources.wheel_metadata import read_contents
from sm120kit.wheels import pipeline
from sm120kit.wheels._plan import generator_request
from sm120kit.wheels.build_records import BuildRequest
from sm120kit.wheels.generators import run_generators

LATEST = "latest"
_REFUSED = {PatchState.CONFLICTS: PatchConflict, PatchState.ALREADY_UPSTREAM: PatchConflict}


@dataclass(frozen=True)
class NewRecipeRequest:
    """The release that a recipe is made for; ``like`` is the recipe that it is drafted from, by default the nearest one.

    With ``unfinished``, only the TOML is written: not locked and not planned.
    """

    engine: str
    version: str
    like: str = ""
    overwrite: bool = False
    unfinished: bool = False


@dataclass(frozen=True)
class StagedRecipe:
    """A new recipe in a temporary directory, with its target there and the states of the patches on its source."""

    draft: Draft
    target: Target
    states: tuple[PatchStatus, ...]


@dataclass(frozen=True)
class NewerRelease:
    """A release that is newer than every recipe of its engine; ``uploaded`` is a day, or empty."""

    engine: str
    version: str
    uploaded: str
    newest_recipe: str


def parse_release(text: str) -> tuple[str, str]:
    """Engine and version of ``ENGINE@VERSION`` or ``ENGINE@latest``.

    Raises:
        NotFound: it has another form, or is another engine.
    """
    engine, _, version = text.partition("@")
    if engine not in (known := recipes.known_engines()):
        raise NotFound(f"unknown engine {engine!r}{did_you_mean(engine, known)}", f"engines: {', '.join(known)}")
    if not version:
        raise NotFound(f"{text} names no release", f"write {engine}@VERSION, or {engine}@{LATEST}")
    if version != LATEST:
        try:
            Version(version)
        except InvalidVersion:
            raise NotFound(f"{version!r} is not a version", f"write {engine}@VERSION, or {engine}@{LATEST}") from None
    return engine, version


def newer_releases(options: Options) -> list[NewerRelease]:
    """The releases on the package index that are newer than every recipe of their engine, the oldest first.

    Raises:
        FetchFailed, OfflineMiss: no release of an engine is listed.
    """
    releases, newer = Releases(options.origin), []
    for engine in recipes.known_engines():
        newest = max(map(Version, _versions(engine)), default=None)
        listed: dict[Version, ListedFile] = {}
        for file in releases.files(distribution(engine)):
            version = Version(file.version)
            if not version.is_prerelease and (newest is None or version > newest):
                listed.setdefault(version, file)
        for _, file in sorted(listed.items()):
            uploaded = file.uploaded.date().isoformat() if file.uploaded else ""
            newer.append(NewerRelease(engine, file.version, uploaded, f"{engine}-{newest}" if newest else ""))
    return newer


def _versions(engine: str) -> list[str]:
    """The versions of an engine that have a recipe without a variant."""
    parts = [name.split("-") for name in recipes.names()]
    return [rest[0] for name, *rest in parts if name == engine and len(rest) == 1]


@dataclass(frozen=True)
class RecipeMaker:
    """Makes the recipes of a request in ``directory``, which is temporary."""

    request: NewRecipeRequest
    options: Options
    directory: Path

    def make(self) -> tuple[StagedRecipe, ...]:
        """The recipes that are missing for the request, the FlashInfer recipe first; locked unless they stay unfinished.

        Raises:
            NotFound: the index lists no such release, or there is no recipe to draft from.
            AlreadyExists: the recipe exists, and is not to be replaced.
            SystemRefused: the directory of recipes cannot be written.
            PatchConflict: a patch does not fit the source.
            ResolutionFailed: the engine requires no particular FlashInfer, or its wheels cannot be resolved.
            Mismatch: the source contains no CUTLASS.
        """
        writable_data_root()
        if not os.access(directory := writable_folder(recipes.KIND), os.W_OK):
            raise SystemRefused(f"cannot write to {directory}", "check its permissions, or name a copy with SM120KIT_DATA")
        engine, files = self.request.engine, self._files(distribution(self.request.engine))
        version = self._version(files)
        template, variant = self._template(engine, version, files)
        self._require_new(f"{engine}-{version}{variant}")
        if engine == "flashinfer":
            return (self._flashinfer(version, template),)
        return self._engine(version, template, variant, files)

    @cached_property
    def _releases(self) -> Releases:
        return Releases(self.options.origin)

    def _files(self, name: str) -> list[ListedFile]:
        with reporting.step(f"reading the releases of {name}"):
            return self._releases.files(name)

    def _version(self, files: Sequence[ListedFile]) -> str:
        """The version of the request as the index lists it."""
        engine, version = self.request.engine, self.request.version
        released = list(dict.fromkeys(file.version for file in files))
        final = [each for each in released if not Version(each).is_prerelease]
        if version == LATEST:
            return (final or released)[0]
        for each in released:
            if Version(each) == Version(version):
                return each
        newest = ", ".join(final[:8])
        raise NotFound(
            f"the index lists no release {version} of {title(engine)}{did_you_mean(version, final)}",
            f"newest releases: {newest}",
        )

    def _template(self, engine: str, version: str, files: Sequence[ListedFile] = ()) -> tuple[Template, str]:
        """The recipe to draft from, and its variant with a dash."""
        variant = ""
        if self.request.like:
            path, recipe = recipes.load_with_path(self.request.like)
            if recipe.engine != engine:
                raise NotFound(f"{recipe.name} is a recipe of {recipe.engine}", f"name a recipe of {engine} with --like")
            variant = recipe.name.removeprefix(f"{engine}-{recipe.version}")
        else:
            released = [file.version for file in files or self._files(distribution(engine))]
            others = [each for each in _versions(engine) if Version(each) != Version(version)]
            if not others:
                raise NotFound(f"there is no recipe of {engine} to draft from", "write the first one, see docs/update.md")
            path = recipes.locate(f"{engine}-{drafts.nearest(version, others, released)}")
        return Template(path.stem, read_toml(path)), variant

    def _require_new(self, name: str) -> None:
        path = recipes.path_of(name)
        if path.exists() and not self.request.overwrite:
            raise AlreadyExists(f"{path} exists", "lock it again with `sm120kit recipe lock`, or replace it with --overwrite")

    def _flashinfer(self, version: str, template: Template, engine: str = "", ffi: str = "") -> StagedRecipe:
        """Make a FlashInfer recipe; the release ``engine`` requires it, with a version ``ffi`` of tvm-ffi or any."""
        listed = self._files(lockfile.FLASHINFER)
        sdist = next((f for f in listed if Version(f.version) == Version(version) and not f.filename.endswith(".whl")), None)
        if sdist is None:
            raise NotFound(f"the index lists no sdist of FlashInfer {version}", "its kernels are compiled from the sdist")
        if not sdist.location.sha256:
            raise FetchFailed(f"{sdist.location.shown} is listed without a sha256", "name an index that lists hashes")
        pin = SdistPin("flashinfer", lockfile.FLASHINFER, sdist.version, sdist.location.sha256)
        checkout = sources.fetch(pin, self.options.workspace, self.options.origin)
        repository = Repository(checkout.repository)
        draft = drafts.draft_flashinfer(
            template,
            sdist,
            _find_cutlass(repository, checkout, template),
            ffi or self._tvm_ffi(repository, checkout, template),
            engine,
        )
        if new := self._new_generators(repository, checkout, template):
            draft.decisions.append(
                f"generators that {template.name} lacks: {', '.join(new)}; add a module for those to compile"
            )
        target = self._flashinfer_target(draft)
        states = patches.status(checkout, target.recipe.inside, top_root() / "patches")
        if not self.request.unfinished:
            require_fitting(target.recipe.name, states)
            lockfile.create(target)
            self._keep_modules(draft, target)
            target = self._flashinfer_target(draft)
            lockfile.create(target)
        return StagedRecipe(draft, target, states)

    def _tvm_ffi(self, repository: Repository, checkout: Checkout, template: Template) -> str:
        """The version of tvm-ffi for a FlashInfer recipe that no engine requires: the template's, if the source permits it."""
        from email import message_from_bytes

        lines = message_from_bytes(repository.read(checkout.commit, "PKG-INFO")).get_all("Requires-Dist", [])
        specifier = next((line for line in lines if re.match(rf"{FFI}\b", line)), "").partition(";")[0].removeprefix(FFI)
        allowed = SpecifierSet(specifier.strip(" ()"))
        pins = dict(line.split("==") for line in template.data.get("environment", {}).get("requires", []))
        if FFI not in pins or allowed.contains(pins[FFI], prereleases=True):
            return str(pins.get(FFI, ""))
        for file in self._files(FFI):
            if allowed.contains(file.version):
                return file.version
        raise ResolutionFailed(f"the source requires {FFI} {allowed}, which the index does not list", "use another release")

    def _new_generators(self, repository: Repository, checkout: Checkout, template: Template) -> list[str]:
        """Generators of kernels for SM12x in a source that the template's source does not have."""
        former = resolve_flashinfer(template.name, self.options).checkout
        return sorted(_generators(repository, checkout) - _generators(Repository(former.repository), former))

    def _keep_modules(self, draft: Draft, target: FlashInferTarget) -> None:
        """Run the generators of the modules, and leave out those that fail."""
        recipe = target.recipe
        tools, ffi = locked_toolchain.compilers(target, recipe.archs), locked_toolchain.tvm_ffi(target)
        names: dict[str, tuple[str, ...]] = {}
        failures: dict[str, str] = {}
        with (
            self.options.workspace.scratch() as work,
            reporting.step(f"running generators of {recipe.name}"),
        ):
            patches.materialise(target.tree, work / "tree")
            for name, table in recipe.modules.items():
                try:
                    output = run_generators(work / "tree", work, {name: generator_request(table)}, recipe.archs, tools, ffi)
                    names[name] = output.modules[name].sources
                except CommandFailed as error:
                    failures[name] = _last_line(error.message)
        if not names:
            listed = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
            raise BadInput(
                f"no generator of {draft.template} runs on {recipe.name}\n{listed}", "name another recipe with --like"
            )
        drafts.keep_modules(draft, names, failures)

    def _engine(self, version: str, template: Template, variant: str, files: Sequence[ListedFile]) -> tuple[StagedRecipe, ...]:
        """Make the recipe of an engine, and that of the FlashInfer that it requires if there is none."""
        engine, environment = self.request.engine, template.data["environment"]
        python = Python(environment["python"], environment["platforms"][0])
        wheel, former = (_wheel(files, each, engine, python) for each in (version, template.version))
        with reporting.step(f"reading METADATA of {wheel.filename}"):
            contents = tuple(read_contents(each.filename, each.location, self.options.origin) for each in (wheel, former))
        required = drafts.requirements(contents[0], python)
        pinned = drafts.require_pin_of_flashinfer(engine, version, required)
        have = [each for each in _versions("flashinfer") if Version(each) == Version(pinned)]
        path = recipes.path_of(f"flashinfer-{have[0]}") if have else None
        if path:
            kernels: Template | Draft = Template(path.stem, read_toml(path))
            draft = drafts.draft_engine(template, wheel, (contents[0], contents[1]), kernels, variant)
            return (self._locked_engine(draft, resolve_flashinfer(path.stem, self.options)),)
        path = recipes.locate(template.data["flashinfer"])  # whose groups have what the engine requests
        of_flashinfer = Template(path.stem, read_toml(path))
        staged = self._flashinfer(pinned, of_flashinfer, f"{title(engine)} {version}", drafts.exact(required.get(FFI)))
        draft = drafts.draft_engine(template, wheel, (contents[0], contents[1]), staged.draft, variant)
        return staged, self._locked_engine(draft, staged.target.flashinfer)

    def _locked_engine(self, draft: Draft, flashinfer: FlashInferTarget) -> StagedRecipe:
        """Lock the first of the drafts of an engine that can be resolved."""
        failures: list[ResolutionFailed] = []
        for tried in [draft] if self.request.unfinished else drafts.resolvable(draft, failures):
            target = self._engine_target(tried, flashinfer)
            if self.request.unfinished:
                return StagedRecipe(tried, target, ())
            if target.recipe.pin and target.source:
                require_fitting(draft.name, target.source.statuses)
            try:
                lockfile.create(target)
            except ResolutionFailed as error:
                failures.append(error)
                continue
            locked = self._engine_target(tried, flashinfer)
            return StagedRecipe(tried, locked, locked.source.statuses if locked.source else ())
        failure = failures[-1]
        if "new flashinfer@" in failure.hint or 'write flashinfer = "' in failure.hint:
            raise failure
        raise ResolutionFailed(failure.message, "write the recipe with --draft, edit its environment, then lock it")

    def _flashinfer_target(self, draft: Draft) -> FlashInferTarget:
        """Write a draft to the temporary directory; returns its target there."""
        path = self._write(draft)
        return FlashInferTarget(recipes.read(path).require_kernels(), path, self.options, series_files())

    def _engine_target(self, draft: Draft, flashinfer: FlashInferTarget) -> EngineTarget:
        """As :meth:`_flashinfer_target`, for the draft of an engine."""
        path = self._write(draft)
        return EngineTarget(recipes.read(path).require_engine(), path, flashinfer)

    def _write(self, draft: Draft) -> Path:
        path = self.directory / f"{draft.name}.toml"
        path.write_text(draft.toml(), encoding="utf-8")
        return path


def require_fitting(name: str, states: Sequence[PatchStatus]) -> None:
    """Require that every patch for the version of a recipe's source applies to it.

    Raises:
        PatchConflict: one does not; the message lists all.
    """
    unfit = [state for state in states if state.state in _REFUSED]
    if unfit:
        listed = "\n".join(f"{s.project}/{s.slug}: {s.state}\n{s.detail}".rstrip() for s in unfit)
        raise _REFUSED[unfit[0].state](
            f"{name}: {len(unfit)} of {len(states)} patches do not fit\n{listed}",
            f"write the recipe with --draft, move the series with `sm120kit patch rebase`, then `sm120kit recipe lock {name}`",
        )


def plan(staged: Sequence[StagedRecipe]) -> object:
    """Plan the build of the last recipe, as ``build --dry-run`` does: its generators run and its tiles are checked.

    Raises:
        Sm120kitError: see :func:`sm120kit.wheels.pipeline.build`.
    """
    target = staged[-1].target
    group = "all" if "all" in target.recipe.groups else None
    return pipeline.build(target, BuildRequest(group=group, stage=Stage.PLAN))


def publish(staged: Sequence[StagedRecipe]) -> list[Path]:
    """Write finished recipes to the directory of recipes, all or none, each lockfile before its recipe; returns the files."""
    paths = (path for each in staged for path in (recipes.lock_path(each.target.path), each.target.path))
    files = [path for path in paths if path.is_file()]
    directory = writable_folder(recipes.KIND)
    written = {directory / file.name: file.read_bytes() for file in files}
    for lock in (recipes.lock_path(each.target.path) for each in staged):
        if (path := directory / lock.name) in written:
            written[path] = lockfile.text(lockfile.stored(lockfile.read(lock), path)).encode()
    write_together(written)
    return list(written)


def _wheel(files: Sequence[ListedFile], version: str, engine: str, python: Python) -> ListedFile:
    """The wheel of a version that an installer chooses for an environment."""
    ranked = []
    for file in files:
        if file.filename.endswith(".whl") and Version(file.version) == Version(version):
            rank = compatible_rank(parse_wheel_filename(file.filename)[3], python.version, python.platform)
            if rank is not None:
                ranked.append((rank, file.filename, file))
    if not ranked:
        raise NotFound(
            f"the index lists no wheel of {title(engine)} {version} for Python {python.version} on {python.platform}",
            "name a recipe for another Python or platform with --like",
        )
    return min(ranked, key=lambda entry: entry[:2])[2]


def _find_cutlass(repository: Repository, checkout: Checkout, template: Template) -> tuple[str, str]:
    """Path and version of CUTLASS in a source; of several, that at the template's path."""
    listed = repository.git("ls-tree", "-r", "-z", "--name-only", checkout.commit).stdout.split("\0")
    paths = [path.removesuffix(f"/{VERSION_H}") for path in listed if path.endswith(f"/{VERSION_H}")]
    former = template.data["sources"].get("cutlass", {}).get("path", "")
    path = former if former in paths else next(iter(paths), "")
    version = cutlass_version(repository.read(checkout.commit, f"{path}/{VERSION_H}").decode(errors="replace")) if path else ""
    if not version:
        problem = f"states no version in {path}/{VERSION_H}" if path else f"has no {VERSION_H}"
        raise Mismatch(
            f"{checkout.pin.project} {checkout.pin.version} {problem}: where is CUTLASS?", "write the recipe by hand"
        )
    return path, version


def _generators(repository: Repository, checkout: Checkout) -> set[str]:
    done = repository.git("grep", "-hoE", r"^def gen_\w*sm12\w*", checkout.commit, "--", "flashinfer/jit", check=False)
    return {line.removeprefix("def ") for line in done.stdout.split("\n") if line}


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("log:")]
    return lines[-1] if lines else "it failed"
