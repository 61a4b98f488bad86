"""Compare the compilers of this environment with those that a lockfile pins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm120kit.core import toolchain
from sm120kit.core.errors import ToolchainUnsuitable
from sm120kit.core.records import Toolchain
from sm120kit.recipes.records import Lock

if TYPE_CHECKING:
    from sm120kit.recipes.target import FlashInferTarget

FFI = "apache-tvm-ffi"
"""The distribution whose headers modules are compiled with, and whose library they call at run time."""


def toolchain_differences(lock: Lock, tools: Toolchain) -> tuple[str, ...]:
    """Compilers whose version is not the locked one. A build with them works, but its result has another digest."""
    pins = dict(line.split("==") for line in (lock.recipe.get("environment") or {}).get("requires", ()))
    installed = {"nvidia-cuda-nvcc": tools.nvcc_version, FFI: toolchain.installed_version(FFI)}
    different = [name for name, version in installed.items() if pins.get(name, version) != version]
    return tuple(f"{name} {installed[name]}, the lockfile has {pins[name]}" for name in different)


def require_toolchain(target: FlashInferTarget) -> None:
    """Require the compilers that the lockfile of a FlashInfer recipe pins: an engine's closure has libraries that fit these.

    Raises:
        ToolchainUnsuitable: other versions are installed; the hint is the command that installs the locked ones.
        LockDiffers: see :func:`sm120kit.recipes.lockfile.verify`.
    """
    differences = toolchain_differences(target.lock, toolchain.find(headers=target.recipe.headers))
    if differences:
        pins = [f"{line.split()[0]}=={line.split()[-1]}" for line in differences]
        raise ToolchainUnsuitable(
            "\n  ".join([f"these compilers are not those that the lockfile of {target.recipe.name} pins:", *differences]),
            f"in the environment of sm120kit: pip install {' '.join(pins)}",
        )
