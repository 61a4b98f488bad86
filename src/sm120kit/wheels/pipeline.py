"""Build wheels in stages: fetch, patch, plan, compile, pack. A stage whose record exists is not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sm120kit.core.errors import BadInput
from sm120kit.patches.mails import ForeignPatch
from sm120kit.recipes import target as targets
from sm120kit.recipes.target import FlashInferTarget, Target
from sm120kit.sources.run_options import Options
from sm120kit.wheels import _kernel_wheel, flashinfer, image_wheels
from sm120kit.wheels.build_records import BuildRequest, Stage, WheelBuild
from sm120kit.wheels.compile import Progress
from sm120kit.wheels.image_wheels import EngineBuild

KERNEL_WHEEL = "kernels"
"""The argument of commands for our own kernels, where others name a recipe."""


@dataclass(frozen=True)
class KernelWheelTarget:
    """Our own kernels, compiled against the patched CUTLASS of a FlashInfer recipe."""

    flashinfer: FlashInferTarget
    engine: None = None


BuildTarget = Target | KernelWheelTarget
"""What ``build`` builds."""


def resolve(argument: str, options: Options, patches: Sequence[ForeignPatch] = ()) -> BuildTarget:
    """Resolve the argument of ``build``: a recipe, see :func:`sm120kit.recipes.target.resolve`, or ``kernels[@RECIPE]``.

    Local ``patches`` are applied above the series, see :func:`sm120kit.recipes.target.with_local`.

    Raises:
        BadInput: the kernel wheel is given local patches.
    """
    product, _, recipe = argument.partition("@")
    if product != KERNEL_WHEEL:
        target = targets.resolve(argument, options)
        return targets.with_local(target, patches) if patches else target
    if patches:
        raise BadInput(f"{argument} takes no local patches", "build an engine, or flashinfer, with --patch")
    return KernelWheelTarget(targets.resolve_flashinfer(recipe or "flashinfer", options))


def require_machine(target: BuildTarget, request: BuildRequest) -> None:
    """Require the architecture and the memory that a build needs, as far as they follow from the recipe. Nothing is fetched.

    Raises:
        RequirementMissing: an engine's kernels are compiled on machines of another architecture.
        ResourceUnavailable: the largest unit does not fit.
    """
    if target.engine:
        recipe = target.engine.recipe
        if request.stage is Stage.PACK:
            image_wheels.require_compilable(recipe, request)
        request = replace(request, archs=recipe.archs, group=request.group or recipe.kernels, machine=recipe.machine)
    if target.engine or target is target.flashinfer:
        flashinfer.require_memory(target.flashinfer, request)


def build(
    target: BuildTarget, request: BuildRequest, watch: Callable[[Progress], None] = lambda progress: None
) -> WheelBuild | EngineBuild:
    """Build the wheels of a target up to the stage of the request. ``watch`` is called twice a second while units compile.

    Raises:
        Sm120kitError: a stage failed; see the function of each kind of target.
    """
    if target.engine:
        return image_wheels.build(target.engine, request, watch)
    if target is target.flashinfer:
        return flashinfer.build(target.flashinfer, request, watch)
    return _kernel_wheel.build(target.flashinfer, request, watch)
