"""Build the wheels of an image of vLLM or SGLang that are not upstream wheels.

These are the patched FlashInfer wheel that the recipe names, the wheels of which a patch series changes files (the upstream
ones are packed again), the engine's own among them, and the engine's if extension modules are requested from source. All other
wheels are the upstream ones of the lockfile.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core.digests import digest_of
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.records import Stage
from sm120kit.patches.patch_records import AppliedPatch
from sm120kit.recipes import NO_KERNELS, EngineRecipe, cross_tools, locked_toolchain
from sm120kit.recipes.recipe_records import Closure, Lock
from sm120kit.recipes.target import EngineTarget
from sm120kit.wheels import _from_source, flashinfer
from sm120kit.wheels._overlay import build_overlay, patched_members, require_effect
from sm120kit.wheels.build_records import BuildRequest, RepackedWheel, WheelBuild
from sm120kit.wheels.compile import Progress


@dataclass(frozen=True)
class EngineBuild:
    """An engine's recipe with its lock, its FlashInfer wheel, and the wheels that are packed again, the engine's own first.

    All are planned or built, up to the stage of the request. ``build_id`` is that of the lock, ``official`` are its wheels,
    ``local`` the local patches.
    """

    recipe: EngineRecipe
    lock: Lock
    build_id: str
    official: Closure
    flashinfer: WheelBuild
    repacked: tuple[RepackedWheel, ...] = ()
    local: tuple[AppliedPatch, ...] = ()

    @property
    def closure(self) -> Closure:
        """The upstream wheels of the image: without those that are packed again."""
        if not self.repacked:
            return self.official
        ours = {each.plan.engine for each in self.repacked}
        wheels = tuple(wheel for wheel in self.official.wheels if wheel.name not in ours)
        return replace(self.official, wheels=wheels, sha256=digest_of(wheels))

    @property
    def wheels(self) -> dict[Path, str]:
        """The wheels that were built with their sha256, FlashInfer first; each replaces an upstream wheel."""
        packed = {each.wheel: each.artifacts.wheel.sha256 for each in self.repacked if each.artifacts}
        return self.flashinfer.wheels | packed


def require_compilable(recipe: EngineRecipe, request: BuildRequest) -> None:
    """Require that this machine can compile what a recipe's image contains.

    Raises:
        RequirementMissing: it cannot.
    """
    machine, own = recipe.machine, platform.machine()
    if machine != own and request.from_source:
        raise RequirementMissing(
            f"{recipe.name} is for {machine}: its own modules are compiled from source on such a machine; this one is {own}",
            "leave out --from-source: the modules are those of the upstream wheel",
        )
    if machine != own and (request.group or recipe.kernels) != NO_KERNELS and not cross_tools.is_supported(machine):
        raise RequirementMissing(
            f"the kernels of {recipe.name} are for {machine}, and nothing is compiled for it on {own}",
            f"--kernels {NO_KERNELS} builds its image without compiled kernels; --dry-run plans it on any machine",
        )


def build(
    target: EngineTarget, request: BuildRequest, watch: Callable[[Progress], None] = lambda progress: None
) -> EngineBuild:
    """Verify an engine's lockfile, then plan or build the wheels of its image that are not upstream wheels.

    The group of the request replaces the kernel group of the recipe. FlashInfer's wheel is built last.

    Raises:
        NotFound: nothing of the engine can be built from source.
        PatchConflict: a patch of the engine's own package, or of another, is not for the upstream wheel.
        Mismatch: the lockfile of the engine or of its FlashInfer recipe is missing, edited or outdated.
        RequirementMissing: the image is for another machine, or the compilers are not the locked ones.
    """
    recipe, lock = target.recipe, target.lock
    for tree in target.local.values():
        if not request.from_source or tree.checkout.pin.project != recipe.engine:
            require_effect(tree)
    pack = request.stage is Stage.PACK
    if pack:
        require_compilable(recipe, request)
        if (request.group or recipe.kernels) != NO_KERNELS:
            locked_toolchain.require_locked(target.flashinfer)
    if request.from_source:
        own = _build_from_source(target, request.stage, watch)
    else:
        own = build_overlay(target, target.engine_tree, pack=pack)
    repacked = (own, *(build_overlay(target, source.tree, pack=pack) for source in target.patched))
    kernels = replace(request, archs=recipe.archs, group=request.group or recipe.kernels, machine=recipe.machine)
    wheel = flashinfer.build(target.flashinfer, kernels, watch)
    return EngineBuild(
        recipe, lock, target.build_id, target.closure, wheel, tuple(filter(None, repacked)), target.local_patches
    )


def _build_from_source(target: EngineTarget, stage: Stage, watch: Callable[[Progress], None]) -> RepackedWheel | None:
    """Plan or build an engine's own wheel with extension modules from source; None before the stage ``plan``."""
    if stage in (Stage.FETCH, Stage.PATCH):
        _from_source.fetch_source(target)
        return None
    build = _from_source.plan_extensions(target)
    if stage is Stage.PLAN:
        return RepackedWheel(build.plan, patched_members(target.recipe.engine, build.tree))
    return _from_source.build_extensions(build, target.options, watch)
