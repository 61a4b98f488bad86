"""A recipe is tied to its lock: made, checked before every build, and compared with the machine that builds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

from sm120kit import lock as locks
from sm120kit import recipe, sources, toolchain
from sm120kit.errors import LockDiffers, ToolchainUnsuitable
from sm120kit.records import Closure, Lock, LockedFile, Toolchain
from sm120kit.trees import Options, patched, patched_tree
from sm120kit.workspace import data_root, file_sha256, write_atomic

FFI = "apache-tvm-ffi"
"""The distribution with whose headers modules are compiled, and whose library they call at run time."""


def lock(name: str, options: Options, *, upgrade: bool = False) -> tuple[Lock, Path]:
    """Lock a recipe and write the lock beside it.

    Wheels that answer the same environment stay as they are; in a changed one, versions stay where they fit. With ``upgrade``
    neither holds.

    Raises:
        ResolutionFailed, FetchFailed, OfflineMiss: the wheels could not be resolved.
        LockDiffers: the recipe of an engine rests on one that is not locked, or differently.
    """
    item, path = recipe.load_any(name), recipe.lock_path(name)
    kernels = kernels_of(item)
    held = _old_lock(path)
    closures = []
    for platform in item.environment.platforms if item.environment else ():
        kept = None if upgrade else locks.usable(held, item, platform)
        closures.append(kept or _resolved(item, platform, held, options, upgrade=upgrade))
    made = _lock_of(item, kernels, closures, options)
    write_atomic(path, locks.text(made).encode())
    return made, path


def locked(name: str, options: Options) -> Lock:
    """The lock of a recipe, after making sure that it is what would be locked now. Needs no network once sources are there.

    Raises:
        LockDiffers: it is not there, edited or outdated; the message names every field that differs.
    """
    item, path = recipe.load_any(name), recipe.lock_path(name)
    held = locks.read(path)
    found = locks.differences(held, _lock_of(item, kernels_of(item), held.closures, options))
    if found:
        count = f"{len(found)} difference{'s' * (len(found) > 1)}"
        raise LockDiffers(
            "\n  ".join([f"the lock of {item.name} is not what would be built now: {count}", *found]),
            f"if that is meant, lock it again: sm120kit recipe lock {item.name}; else restore what was changed",
        )
    return held


def kernels_of(item: recipe.Recipe | recipe.EngineRecipe) -> recipe.Recipe:
    """The recipe whose kernels an engine brings; a recipe of kernels is its own."""
    return item if isinstance(item, recipe.Recipe) else recipe.load(item.flashinfer)


def _old_lock(path: Path) -> Lock | None:
    try:
        return locks.read(path)
    except LockDiffers:
        return None


def _resolved(
    item: recipe.Recipe | recipe.EngineRecipe, platform: str, held: Lock | None, options: Options, *, upgrade: bool
) -> Closure:
    assert item.environment is not None
    kernels = kernels_of(item)
    before = [one.wheels for one in held.closures if one.platform == platform] if held and not upgrade else []
    wheels = sources.resolve(
        locks.wanted(item, kernels),
        item.environment.python,
        platform,
        options.workspace,
        overrides={name: table.version for name, table in item.environment.overrides.items()},
        constraints=locks.constraints(item, kernels),
        as_of=item.environment.as_of,
        prefer=before[0] if before else (),
        mirror=options.mirror,
        offline=options.offline,
    )
    return locks.closure(platform, item.environment.python, wheels, replaced=item is not kernels)


def _lock_of(
    item: recipe.Recipe | recipe.EngineRecipe, kernels: recipe.Recipe, closures: Sequence[Closure], options: Options
) -> Lock:
    rests_on = "" if item is kernels else f"{kernels.name} {locks.build_id(locked(kernels.name, options))}"
    root = data_root() / "cutlass_overrides"
    ours = [LockedFile(str(path.relative_to(root)), file_sha256(path)) for path in sorted(root.rglob("*")) if path.is_file()]
    source = item.source if isinstance(item, recipe.EngineRecipe) else None
    of_engine = patched(source, (), options) if source else None
    return locks.make(item, kernels, patched_tree(kernels, options), ours, closures, rests_on, of_engine)


def tied(name: str, options: Options, tell: Callable[[str], None]) -> Lock | None:
    """The lock that a build is tied to; None for a recipe that was never locked, which is told.

    Raises:
        LockDiffers: the lock is edited or outdated.
    """
    if not recipe.lock_path(name).is_file():
        tell(f"{name} is not locked, so nothing says whether this build is like an earlier one: sm120kit recipe lock {name}")
        return None
    return locked(name, options)


def toolchain_differences(held: Lock, tools: Toolchain) -> tuple[str, ...]:
    """In what the compilers at hand are not the locked ones: a build with them works, but its result has another digest."""
    pins = dict(line.split("==") for line in (held.recipe.get("environment") or {}).get("requires", ()))
    here = {"nvidia-cuda-nvcc": tools.nvcc_version, FFI: _version(FFI)}
    return tuple(f"{name} {here[name]}, the lock has {pins[name]}" for name in here if pins.get(name, here[name]) != here[name])


def require_toolchain(kernels: str, options: Options) -> None:
    """Make sure that kernels are compiled with the locked compilers: an engine brings the libraries that fit these.

    Raises:
        ToolchainUnsuitable: they are others.
    """
    found = toolchain_differences(locked(kernels, options), toolchain.find(headers=recipe.load(kernels).headers))
    if found:
        wanted = [f"{line.split()[0]}=={line.split()[-1]}" for line in found]
        raise ToolchainUnsuitable(
            "\n  ".join([f"these compilers are not those of the lock of {kernels}:", *found]),
            f"in the environment of sm120kit: pip install {' '.join(wanted)}",
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
