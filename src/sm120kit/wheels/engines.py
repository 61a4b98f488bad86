"""Build the wheels of an image of vLLM or SGLang that are not official.

These are the patched FlashInfer wheel that the recipe names, and the engine's own wheel if its patch series changes files of
its package (the official wheel is packed again) or if extension modules are requested from source. All other wheels are the
official ones of the lockfile.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit.core.errors import ToolchainUnsuitable
from sm120kit.core.state import digest_of
from sm120kit.recipes import NO_KERNELS, EngineRecipe, toolchain
from sm120kit.recipes.records import Closure, Lock
from sm120kit.recipes.target import EngineTarget
from sm120kit.wheels import flashinfer
from sm120kit.wheels.overlay import build_overlay, patched_members
from sm120kit.wheels.records import BuildRequest, RepackedWheel, Stage, WheelBuild

if TYPE_CHECKING:
    from sm120kit.wheels.compile import Progress


@dataclass(frozen=True)
class EngineBuild:
    """An engine's recipe with its lock, its FlashInfer wheel, and its own wheel if that is packed again.

    Both wheels are planned or built, up to the stage of the request. ``build_id`` is the sha256 of the lockfile, ``official``
    are its wheels.
    """

    recipe: EngineRecipe
    lock: Lock
    build_id: str
    official: Closure
    flashinfer: WheelBuild
    engine: RepackedWheel | None = None

    @property
    def closure(self) -> Closure:
        """The official wheels of the image: without the engine's if that is packed again."""
        if self.engine is None:
            return self.official
        wheels = tuple(wheel for wheel in self.official.wheels if wheel.name != self.recipe.engine)
        return replace(self.official, wheels=wheels, sha256=digest_of(wheels))

    @property
    def wheels(self) -> dict[Path, str]:
        """The wheels that were built with their sha256, FlashInfer first; each replaces an official wheel."""
        own = self.engine.artifacts if self.engine else None
        return self.flashinfer.wheels | ({self.engine.wheel: own.wheel.sha256} if self.engine and own else {})


def require_native(recipe: EngineRecipe, request: BuildRequest) -> None:
    """Require that this machine has the architecture of a recipe's image, unless nothing is compiled.

    Raises:
        ToolchainUnsuitable: it has another.
    """
    machine = recipe.environment.platforms[0].split("_", 3)[3]
    compiles = request.from_source or (request.group or recipe.kernels) != NO_KERNELS
    if compiles and machine != platform.machine():
        raise ToolchainUnsuitable(
            f"the kernels of {recipe.name} are compiled natively on {machine}; this machine is {platform.machine()}",
            f"--kernels {NO_KERNELS} builds its image without compiled kernels; --dry-run plans it on any machine",
        )


def build(
    target: EngineTarget, request: BuildRequest, watch: Callable[[Progress], None] = lambda progress: None
) -> EngineBuild:
    """Verify an engine's lockfile, then plan or build the wheels of its image that are not official.

    The group of the request replaces the kernel group of the recipe. The engine's own wheel is built first.

    Raises:
        UnknownName: nothing of the engine can be built from source.
        PatchConflict: a patch of the engine's own package is not for the official wheel.
        LockDiffers: the lockfile of the engine or of its FlashInfer recipe is missing, edited or outdated.
        ToolchainUnsuitable: the image is for another machine, or the compilers are not the locked ones.
    """
    recipe, lock = target.recipe, target.lock
    if request.stage in (Stage.COMPILE, Stage.PACK):
        require_native(recipe, request)
        if (request.group or recipe.kernels) != NO_KERNELS:
            toolchain.require_locked(target.flashinfer)
    if request.from_source:
        own = _build_from_source(target, request.stage, watch)
    else:
        own = build_overlay(target, pack=request.stage is Stage.PACK)
    kernels = replace(request, archs=recipe.archs, group=request.group or recipe.kernels)
    wheel = flashinfer.build(target.flashinfer, kernels, watch)
    return EngineBuild(recipe, lock, target.build_id, target.closure, wheel, own)


def _build_from_source(target: EngineTarget, stage: Stage, watch: Callable[[Progress], None]) -> RepackedWheel | None:
    """Plan or build an engine's own wheel with extension modules from source; None before the stage ``plan``."""
    from sm120kit.wheels import from_source

    if stage in (Stage.FETCH, Stage.PATCH):
        from_source.require_source(target)
        return None
    build = from_source.plan_extensions(target)
    if stage is Stage.PLAN:
        return RepackedWheel(build.plan, patched_members(target.recipe.engine, build.tree))
    return from_source.build_extensions(build, target.options, pack=stage is Stage.PACK, watch=watch)
