"""Build an engine's own wheel with extension modules from its own source, for SM12x alone (``--from-source``).

The upstream wheel is packed again with these modules and the patched files of the engine's package. Source and patches, the
projects that the engine requires, the compiler and the libraries all come from the engine's lockfile. The build runs without a
network where the system permits that, and fails if it fetched something.
"""

import importlib.metadata
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from sm120kit import patches, recipes, sources
from sm120kit.core import reporting, toolchain
from sm120kit.core.errors import BadInput, NotFound
from sm120kit.core.memory import Costs
from sm120kit.core.records import Toolchain
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes.added_files import read_added_sources
from sm120kit.recipes.locked_toolchain import NVCC
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources.git import Repository
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import GitPin, LockedWheel
from sm120kit.wheels import _extensions
from sm120kit.wheels import _plan as plans
from sm120kit.wheels._extensions import BuildSite, ExtensionBuild
from sm120kit.wheels._overlay import locked_wheels, patched_members, write_patched_members
from sm120kit.wheels._published_wheels import build_once
from sm120kit.wheels.build_records import Artifacts, RepackedWheel
from sm120kit.wheels.compile import CompileSettings, Progress


def require_source(target: EngineTarget) -> PatchedTree:
    """Fetch an engine's own source and return its patched tree.

    Raises:
        NotFound: nothing of the engine can be built from source.
        BadInput: the recipe names a commit, which is the source of Python files only.
    """
    if target.recipe.from_source and target.recipe.source:
        raise BadInput(
            f"{target.recipe.name}: source has a commit, whose Python files are packed; nothing of it is compiled",
            "leave out --from-source, or the table source",
        )
    if target.recipe.from_source is None or target.engine_tree is None:
        names = recipes.names(recipes.EngineRecipe)
        capable = [name for name in names if recipes.load_engine(name).from_source]
        raise NotFound(
            f"{target.recipe.name} has nothing that can be built from source",
            "its recipe gives the reason for each upstream part; "
            f"engines with a part that can be built: {', '.join(capable) or 'none'}",
        )
    return target.engine_tree


def fetch_source(target: EngineTarget) -> None:
    """Fetch an engine's own source and the commits of projects that its modules require. See :func:`require_source`."""
    require_source(target)
    assert target.recipe.from_source is not None
    for filled in target.recipe.from_source.injected.values():
        if filled.pin:
            sources.fetch(filled.pin, target.options.workspace, target.options.origin)


def plan_extensions(target: EngineTarget) -> ExtensionBuild:
    """Plan the build of an engine's extension modules from its lockfile.

    Raises:
        NotFound: nothing of the engine can be built from source.
        BadInput: the lockfile lacks a wheel that the recipe names for the build, or another CUTLASS is required.
        RequirementMissing: no host compiler, no cmake, or no Python for the locked wheels.
    """
    tree, recipe, flashinfer = require_source(target), target.recipe, target.flashinfer.tree
    repository = Repository(flashinfer.checkout.repository)
    carried = {
        project.project: (project.version, repository.subtree(flashinfer.commit, project.path)) for project in flashinfer.inside
    }
    locked = locked_wheels(target)
    wheels = _environment_wheels(recipe, locked)
    python, python_version = _extensions.find_python(recipe.environment.python)
    _extensions.cmake_program()
    versions = {name: importlib.metadata.version(name) for name in ("cmake", "ninja")} | {"python": python_version}
    host, host_version = toolchain.host_compiler()
    nvcc_version = locked[NVCC].version
    tools = Toolchain(_extensions.cuda_home_of(nvcc_version), nvcc_version, host, host_version)
    costs = Costs(target.options.workspace.cache / "costs.json")
    environment = plans.BuildEnvironment(tools, versions, costs.of)
    plan = plans.plan_extensions(recipe, tree, carried, locked[recipe.engine], wheels, environment)
    return ExtensionBuild(recipe, tree, flashinfer, plan, locked[recipe.engine], wheels, versions, python)


def _environment_wheels(recipe: recipes.EngineRecipe, locked: dict[str, LockedWheel]) -> tuple[LockedWheel, ...]:
    """The wheels that are installed for the build."""
    assert recipe.from_source is not None
    names = recipe.from_source.environment
    absent = [name for name in names if name not in locked]
    if absent or NVCC not in names:
        raise BadInput(
            f"{recipe.name}: the build environment "
            + (f"names {', '.join(absent)}, which the lockfile lacks" if absent else f"has no compiler: no {NVCC}"),
            "correct from_source.environment; the lockfile lists the locked wheels",
        )
    return tuple(locked[name] for name in sorted(names))


def build_extensions(
    build: ExtensionBuild, options: Options, watch: Callable[[Progress], None] = lambda progress: None
) -> RepackedWheel:
    """Build planned extension modules and pack the wheel.

    An interrupted build resumes. Once the wheel exists, the work directory with its environment is removed.

    Raises:
        FetchFailed, NotTrusted, OfflineMiss: a locked wheel could not be fetched.
        PatchConflict: a patch of the engine's own package is not for the upstream wheel.
        CommandFailed, CheckFailed, ResourceUnavailable, CompileFailed, RequirementMissing: the build failed.
    """
    plan, recipe, workspace = build.plan, build.recipe, options.workspace
    planned = RepackedWheel(plan, patched_members(recipe.engine, build.tree))
    name = f"{recipe.name}-from-source-{plan.digest[:12]}"

    source = _with_files(build.tree, read_added_sources(recipe))

    def make(directory: Path) -> Artifacts:
        required = _required(build, options)  # before gigabytes of wheels
        *wheels, official = sources.wheelhouse((*build.wheels, build.official), workspace, options.origin)
        site = BuildSite(workspace.work(name), build.python, _extensions.network_isolation())
        files = write_patched_members(recipe.engine, build.tree, official, site.work / "overlay")
        sources.unpack_wheels(wheels, site.environment, recipe.environment.python)
        for project, tree in {_extensions.SOURCE: source, **required}.items():
            patches.materialise(tree, site.work / project)
        reporting.info(
            "building without a network"
            if site.isolation
            else "this system permits no build without a network: whether the build fetched something is checked afterwards"
        )
        _extensions.compile_extensions(build, site, CompileSettings.of(options, watch))
        reporting.info("checking the modules")
        artifacts = _extensions.publish_extensions(build, site, official, files, directory)
        shutil.rmtree(site.work)
        return artifacts

    return build_once(planned, name, options, make)


def _required(build: ExtensionBuild, options: Options) -> dict[str, PatchedTree]:
    """The trees of the projects that the engine requires, by project; a commit is fetched if it is not cached."""
    flashinfer = build.flashinfer
    paths = {project.project: project.path for project in flashinfer.inside}
    required = {}
    for filled in build.table.injected.values():
        if filled.pin:
            required[filled.pin.project] = _commit_tree(filled.pin, options)
        elif filled.project:
            tree = Repository(flashinfer.checkout.repository).subtree(flashinfer.commit, paths[filled.project])
            required[filled.project] = replace(flashinfer, tree=tree)
    return required


def _with_files(tree: PatchedTree, files: Mapping[str, str]) -> PatchedTree:
    """A tree with texts by path added, or in place of its own."""
    with Repository(tree.checkout.repository).index(tree.tree) as index:
        for path, text in files.items():
            index.add(path, text.encode())
        return replace(tree, tree=index.write_tree())


def _commit_tree(pin: GitPin, options: Options) -> PatchedTree:
    """The tree of a commit, without patches; fetched if it is not cached."""
    checkout = sources.fetch(pin, options.workspace, options.origin)
    return PatchedTree(checkout, (), checkout.commit, checkout.tree, ())
