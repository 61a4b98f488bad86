"""The checked image of an engine with local patches, for a server that is started with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sm120kit.core.errors import CheckFailed
from sm120kit.images import checks
from sm120kit.images.delivery import engine_image, prepare
from sm120kit.patches.local import read_local
from sm120kit.recipes.target import resolve, with_local
from sm120kit.sources.run_options import Options
from sm120kit.wheels import image_wheels
from sm120kit.wheels.build_records import BuildRequest
from sm120kit.wheels.compile import Progress


def patched_image(recipe: str, patches: Sequence[Path], options: Options, watch: Callable[[Progress], None]) -> str:
    """Build and check the image of an engine with local patches, as `build ENGINE --patch` does, and return its name.

    Raises:
        CheckFailed: a check of the image failed.
        Sm120kitError: see the stages.
    """
    local = read_local(patches, options.origin)
    target = with_local(resolve(recipe, options), local).engine
    assert target is not None
    base = prepare("", target.recipe, target.closure, options)
    image = engine_image(image_wheels.build(target, BuildRequest(), watch), base, options).image
    report = checks.verify_once(image, options.workspace)
    if report.verified is None:
        failed = [f"{check.suite}/{check.name}: {check.detail}" for check in report.checks if check.verdict == "failed"]
        raise CheckFailed("\n  ".join(["the image with these patches failed checks:", *failed]), "correct the patch")
    return report.verified.reference
