"""Build wheels in stages: fetch, patch, plan, compile, pack. A stage whose record exists is not run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm120kit.recipes import target as targets
from sm120kit.recipes.target import EngineTarget, FlashInferTarget
from sm120kit.sources.context import Options
from sm120kit.wheels.records import BuildRequest, Stage, WheelBuild

if TYPE_CHECKING:
    from sm120kit.wheels.compile import Progress
    from sm120kit.wheels.engines import EngineBuild

KERNEL_WHEEL = "kernels"
"""The argument of commands for our own kernels, where others name a recipe."""


@dataclass(frozen=True)
class KernelWheelTarget:
    """Our own kernels, compiled against the patched CUTLASS of a FlashInfer recipe."""

    flashinfer: FlashInferTarget


def resolve(argument: str, options: Options) -> FlashInferTarget | EngineTarget | KernelWheelTarget:
    """Resolve the argument of ``build``: a recipe, see :func:`sm120kit.recipes.target.resolve`, or ``kernels[@RECIPE]``."""
    product, _, recipe = argument.partition("@")
    if product == KERNEL_WHEEL:
        return KernelWheelTarget(targets.resolve_flashinfer(recipe or "flashinfer", options))
    return targets.resolve(argument, options)


def require_machine(target: FlashInferTarget | EngineTarget | KernelWheelTarget, request: BuildRequest) -> None:
    """Require the architecture and the memory that a build needs, as far as they follow from the recipe. Nothing is fetched.

    Raises:
        ToolchainUnsuitable: an engine's kernels are compiled on machines of another architecture.
        NotEnoughMemory: the largest unit does not fit.
    """
    from sm120kit.wheels import engines, flashinfer

    if isinstance(target, EngineTarget):
        recipe = target.recipe
        if request.stage in (Stage.COMPILE, Stage.PACK):
            engines.require_native(recipe, request)
        request = replace(request, archs=recipe.archs, group=request.group or recipe.kernels)
        flashinfer.require_memory(target.flashinfer, request)
    elif not isinstance(target, KernelWheelTarget):
        flashinfer.require_memory(target, request)


def build(
    target: FlashInferTarget | EngineTarget | KernelWheelTarget,
    request: BuildRequest,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> WheelBuild | EngineBuild:
    """Build the wheels of a target up to the stage of the request. ``watch`` is called twice a second while units compile.

    Raises:
        Sm120kitError: a stage failed; see the function of each kind of target.
    """
    if isinstance(target, EngineTarget):
        from sm120kit.wheels import engines

        return engines.build(target, request, watch)
    if isinstance(target, KernelWheelTarget):
        from sm120kit.wheels import kernel_wheel

        return kernel_wheel.build(target.flashinfer, request, watch)
    from sm120kit.wheels import flashinfer

    return flashinfer.build(target, request, watch)
