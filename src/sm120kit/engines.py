"""vLLM and SGLang: what an image of one is made of, and the part of it that is built here.

What is official is taken as locked; what is built is the patched FlashInfer wheel that the recipe rests on. Where the engine's
series changes files of its own package, its official wheel is packed again with these; where that is asked for, also with
extension modules that are built from its source.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import build as builder
from sm120kit import fromsource, locking, pipeline, recipe
from sm120kit import lock as locks
from sm120kit.errors import ToolchainUnsuitable
from sm120kit.records import Closure, Lock
from sm120kit.trees import Options
from sm120kit.workspace import digest_of


@dataclass(frozen=True)
class Engine:
    """An engine's recipe with its lock, and how far its FlashInfer wheel came: planned or built.

    ``source`` is the same of its own wheel, when that is packed again.
    """

    recipe: recipe.EngineRecipe
    lock: Lock
    build_id: str
    kernels: pipeline.Built
    source: fromsource.Built | None = None

    @property
    def closure(self) -> Closure:
        """The wheels beside ours, for the first platform of the recipe."""
        wanted = self.recipe.environment.platforms[0]
        locked = next(one for one in self.lock.closures if one.platform == wanted)
        if self.source is None:
            return locked
        wheels = tuple(wheel for wheel in locked.wheels if wheel.name != self.recipe.engine)
        return replace(locked, wheels=wheels, sha256=digest_of(wheels))

    @property
    def wheels(self) -> tuple[Path, ...]:
        """What was built here, FlashInfer first; each takes the place of an official wheel."""
        return (self.kernels.wheel, *([self.source.wheel] if self.source else []))


def build(
    name: str,
    options: Options,
    *,
    group: str | None = None,
    from_source: bool = False,
    to: pipeline.Stage = pipeline.Stage.PACK,
    tell: Callable[[str], None] = lambda message: None,
    watch: Callable[[builder.Progress], None] = lambda progress: None,
) -> Engine:
    """Check an engine's lock, then plan or build the FlashInfer wheel of its image. ``group`` is another one than the recipe's.

    Before that, the engine's official wheel is packed again where its series changes files of its package, and with
    ``from_source`` also with the recipe's extension modules, which are built then.

    Raises:
        UnknownName: nothing of the engine can be built from source.
        PatchConflict: a patch of the engine's own package was not made for the official wheel.
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
    if from_source:
        source = _from_source(item, held, options, to, tell, watch)
    else:
        source = fromsource.overlay(item, held, options, pack=to is pipeline.Stage.PACK, tell=tell)
    kernels = pipeline.build(
        item.flashinfer, options, archs=item.archs, group=group or item.kernels, to=to, tell=tell, watch=watch
    )
    return Engine(item, held, locks.build_id(held), kernels, source)


def _from_source(
    item: recipe.EngineRecipe,
    held: Lock,
    options: Options,
    to: pipeline.Stage,
    tell: Callable[[str], None],
    watch: Callable[[builder.Progress], None],
) -> fromsource.Built | None:
    """The stages of :func:`build` for the engine's own modules; None before there is a plan."""
    if to in (pipeline.Stage.FETCH, pipeline.Stage.PATCH):
        fromsource.source(item, options)
        return None
    decided = fromsource.decide(item, held, options)
    if to is pipeline.Stage.PLAN:
        return fromsource.Built(decided.plan, builder.overlaid(item.engine, decided.tree))
    return fromsource.build(decided, options, pack=to is pipeline.Stage.PACK, tell=tell, watch=watch)
