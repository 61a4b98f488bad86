"""Build wheels in stages: fetch, patch, plan, compile, pack. A stage whose record exists is not run again."""

from collections.abc import Callable
from dataclasses import replace

from sm120kit.core.records import Stage
from sm120kit.recipes.target import Target
from sm120kit.wheels import flashinfer, image_wheels
from sm120kit.wheels.build_records import BuildRequest, WheelBuild
from sm120kit.wheels.compile import Progress
from sm120kit.wheels.image_wheels import EngineBuild


def require_machine(target: Target, request: BuildRequest) -> None:
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
    flashinfer.require_memory(target.flashinfer, request)


def build(
    target: Target, request: BuildRequest, watch: Callable[[Progress], None] = lambda progress: None
) -> tuple[WheelBuild, EngineBuild | None]:
    """Build the wheels of a target up to the stage of the request: FlashInfer's, and those of an engine, if it is one.

    ``watch`` is called twice a second while units compile.

    Raises:
        Sm120kitError: a stage failed; see the function of each kind of target.
    """
    if target.engine:
        engine = image_wheels.build(target.engine, request, watch)
        return engine.flashinfer, engine
    return flashinfer.build(target.flashinfer, request, watch), None
