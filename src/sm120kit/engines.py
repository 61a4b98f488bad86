"""vLLM and SGLang: what an image of one is made of, and the part of it that is built here.

What is official is taken as locked; what is built is the patched FlashInfer wheel that the recipe rests on.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm120kit import build as builder
from sm120kit import lock as locks
from sm120kit import locking, pipeline, recipe
from sm120kit.errors import ToolchainUnsuitable
from sm120kit.records import Closure, Lock
from sm120kit.trees import Options


@dataclass(frozen=True)
class Engine:
    """An engine's recipe with its lock, and how far its FlashInfer wheel came: planned or built."""

    recipe: recipe.EngineRecipe
    lock: Lock
    build_id: str
    kernels: pipeline.Built

    @property
    def closure(self) -> Closure:
        """The wheels beside ours, for the first platform of the recipe."""
        wanted = self.recipe.environment.platforms[0]
        return next(one for one in self.lock.closures if one.platform == wanted)

    @property
    def wheels(self) -> tuple[Path, ...]:
        """What was built here, FlashInfer first; each takes the place of an official wheel."""
        return (self.kernels.wheel,)


def build(
    name: str,
    options: Options,
    *,
    group: str | None = None,
    to: pipeline.Stage = pipeline.Stage.PACK,
    tell: Callable[[str], None] = lambda message: None,
    watch: Callable[[builder.Progress], None] = lambda progress: None,
) -> Engine:
    """Check an engine's lock, then plan or build the FlashInfer wheel of its image. ``group`` is another one than the recipe's.

    Raises:
        LockDiffers: the lock of the engine or of its kernels is absent, edited or outdated.
        ToolchainUnsuitable: the image is for another machine, or the compilers are not the locked ones.
    """
    item = recipe.load_engine(name)
    held = locking.locked(name, options)
    if to in (pipeline.Stage.COMPILE, pipeline.Stage.PACK):
        machine = item.environment.platforms[0].split("_", 3)[3]
        if machine != platform.machine():
            raise ToolchainUnsuitable(
                f"{item.name} is built natively on {machine}; this machine is {platform.machine()}",
                "--dry-run plans it anywhere",
            )
        locking.require_toolchain(item.flashinfer, options)
    kernels = pipeline.build(
        item.flashinfer, options, archs=item.archs, group=group or item.kernels, to=to, tell=tell, watch=watch
    )
    return Engine(item, held, locks.build_id(held), kernels)
