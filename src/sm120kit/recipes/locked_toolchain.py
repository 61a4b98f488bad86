"""The compilers of a FlashInfer recipe and tvm-ffi: what is installed, else the wheels of the recipe's lockfile.

The wheels are unpacked into ``<state>/cache/toolchains``, so that the environment of sm120kit needs none of them. They contain
no code for a particular Python: compilers, headers, and the library of tvm-ffi.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit import sources
from sm120kit.core import toolchain
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.records import Arch, Toolchain
from sm120kit.core.workspace import mark_used
from sm120kit.recipes.cross_tools import cross_tools
from sm120kit.recipes.lockfile import read
from sm120kit.sources.source_records import LockedWheel

if TYPE_CHECKING:
    from sm120kit.recipes.recipe_records import Closure, Lock
    from sm120kit.recipes.target import FlashInferTarget

FFI = "apache-tvm-ffi"
"""The distribution whose headers modules are compiled with, and whose library they call at run time."""

NVCC = "nvidia-cuda-nvcc"
"""The distribution of the CUDA compiler."""

_PROGRAMS = (NVCC, "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl")
"""Distributions of the toolkit without libraries that modules are linked with."""


@dataclass(frozen=True)
class TvmFfi:
    """The package of tvm-ffi: ``directory`` contains ``include`` and ``lib``."""

    version: str
    directory: Path

    @property
    def include(self) -> Path:
        """The headers of tvm-ffi and DLPack."""
        return self.directory / "include"

    @property
    def library(self) -> Path:
        """The library that compiled modules call."""
        return self.directory / "lib" / "libtvm_ffi.so"


def compilers(
    target: FlashInferTarget, archs: Sequence[Arch] = (), headers: Sequence[str] | None = None, *, unpack: bool = True
) -> Toolchain:
    """The CUDA toolkit and the C++ compiler for a FlashInfer recipe.

    ``CUDA_HOME`` counts whatever its version. Another installed toolkit is used if its nvcc is the locked one and it has the
    ``headers``, by default those that the recipe names; otherwise the locked wheels are fetched and unpacked. For a recipe
    without a lockfile, any toolkit of :func:`sm120kit.core.toolchain.find` is used.

    Without ``unpack``, as for a plan, the locked wheels are not fetched: their directory may not exist yet.

    Raises:
        RequirementMissing: no C++ compiler, or no nvcc and no lockfile; or the toolkit in ``CUDA_HOME`` does not do.
        FetchFailed, NotTrusted, OfflineMiss, ResourceUnavailable: the locked wheels could not be fetched or unpacked.
    """
    needed = target.recipe.headers if headers is None else headers
    wheels = locked_compilers(_locked(target))
    locked = next((wheel.version for wheel in wheels if wheel.name == NVCC), "")
    if not locked:
        return toolchain.find(archs, needed)
    if os.environ.get("CUDA_HOME"):
        try:
            return toolchain.find(archs, needed)
        except RequirementMissing as error:
            hint = f"unset CUDA_HOME: the compilers of the lockfile of {target.recipe.name} are used instead"
            raise RequirementMissing(error.message, hint) from error
    host = toolchain.host_compiler()
    try:
        return toolchain.find(archs, needed, locked)
    except RequirementMissing:
        home = Path("nvidia") / f"cu{locked.partition('.')[0]}"
        if not unpack:
            return Toolchain(_unpacked(target, wheels) / home, locked, *host)
        return toolchain.at(_unpack(target, wheels) / home, archs, needed)


def cross_compilers(target: FlashInferTarget, machine: str, archs: Sequence[Arch] = ()) -> Toolchain:
    """The compilers for another machine: this machine's nvcc, a host compiler for the other one, its locked CUDA libraries.

    Raises:
        RequirementMissing: none are locked for this machine and the other one; see also :func:`compilers`.
        FetchFailed and others: see :func:`sm120kit.recipes.cross_tools.cross_tools`.
    """
    own, tools = compilers(target, archs), cross_tools(machine, target.options)
    unpacked = _unpack(target, locked_libraries(_locked(target, machine)), machine)
    libraries = unpacked / "nvidia" / f"cu{own.nvcc_version.partition('.')[0]}" / "lib"
    return replace(
        own,
        host_compiler=str(tools.compiler),
        host_version=tools.compiler_version(),
        machine=machine,
        libraries=libraries,
        emulator=tools.emulation,
    )


def tvm_ffi(target: FlashInferTarget, machine: str = "", *, unpack: bool = True) -> TvmFfi:
    """The locked tvm-ffi of a FlashInfer recipe: the installed package if that has the version, else the unpacked wheel.

    For another ``machine`` than this one it is the wheel for that. Without ``unpack``, the wheel is not fetched: its directory
    may not exist yet.

    Raises:
        RequirementMissing: the recipe is not locked, and no tvm-ffi is installed.
        FetchFailed, NotTrusted, OfflineMiss, ResourceUnavailable: the wheel could not be fetched or unpacked.
    """
    wheels = locked_tvm_ffi(_locked(target, machine))
    if machine in ("", platform.machine()):
        installed, spec = toolchain.installed_version(FFI), importlib.util.find_spec("tvm_ffi")
        if spec is not None and spec.origin is not None and all(wheel.version == installed for wheel in wheels):
            return TvmFfi(installed, Path(spec.origin).parent)
    if not wheels:
        raise RequirementMissing(
            f"{target.recipe.name} is not locked and {FFI}, which its modules are compiled with, is not installed",
            f"lock it: {target.lock_command}",
        )
    directory = _unpack(target, wheels, machine) if unpack else _unpacked(target, wheels)
    return TvmFfi(wheels[0].version, directory / "tvm_ffi")


def locked_compilers(wheels: Sequence[LockedWheel]) -> tuple[LockedWheel, ...]:
    """The wheels of a closure that make up the CUDA toolkit."""
    return tuple(wheel for wheel in wheels if wheel.name.startswith("nvidia-"))


def locked_libraries(wheels: Sequence[LockedWheel]) -> tuple[LockedWheel, ...]:
    """The wheels of a closure with the CUDA libraries that modules are linked with."""
    return tuple(wheel for wheel in locked_compilers(wheels) if wheel.name not in _PROGRAMS)


def locked_tvm_ffi(wheels: Sequence[LockedWheel]) -> tuple[LockedWheel, ...]:
    """The wheel of tvm-ffi in a closure; none or one."""
    return tuple(wheel for wheel in wheels if wheel.name == FFI)


def _unpacked_name(wheels: Sequence[LockedWheel]) -> str:
    return digest_of(sorted((wheel.filename, wheel.sha256) for wheel in wheels))


def _locked(target: FlashInferTarget, machine: str = "") -> tuple[LockedWheel, ...]:
    """The wheels in the lockfile of a target for a machine, by default this one. It need not fit the present series."""
    closure = _closure(target, machine)
    return closure.wheels if closure else ()


def _closure(target: FlashInferTarget, machine: str = "") -> Closure | None:
    if not target.lock_path.is_file():
        return None
    closures = read(target.lock_path).closures
    return next((closure for closure in closures if closure.machine == (machine or platform.machine())), None)


def _unpacked(target: FlashInferTarget, wheels: Sequence[LockedWheel]) -> Path:
    return target.options.workspace.cache / "toolchains" / _unpacked_name(wheels)


def _unpack(target: FlashInferTarget, wheels: Sequence[LockedWheel], machine: str = "") -> Path:
    """The directory with the files of wheels, created once."""
    workspace, directory = target.options.workspace, _unpacked(target, wheels)
    with workspace.exclusive(f"toolchain-{directory.name}"):
        if not directory.is_dir():
            closure = _closure(target, machine)
            assert closure is not None
            stated = sources.sizes(wheels, workspace, target.options.origin)
            absent = sum(size for wheel, size in stated.items() if not (workspace.downloads / wheel.sha256).is_dir())
            needed = absent + sources.UNPACKED_RATIO * sum(stated.values())
            require_disk(directory, needed, f"fetching and unpacking {len(wheels)} wheels of the toolchain")
            files = sources.wheelhouse(wheels, workspace, target.options.origin)
            sources.unpack_wheels(files, directory, closure.python, machine)
        mark_used(directory)
    return directory


def toolchain_differences(lock: Lock, tools: Toolchain) -> tuple[str, ...]:
    """The compiler, if its version is not the locked one. A build with it works, but its result has another digest."""
    pins = dict(line.split("==") for line in (lock.recipe.get("environment") or {}).get("requires", ()))
    locked = pins.get(NVCC, tools.nvcc_version)
    return () if locked == tools.nvcc_version else (f"{NVCC} {tools.nvcc_version}, the lockfile has {locked}",)


def require_locked(target: FlashInferTarget) -> None:
    """Require the compiler that the lockfile of a FlashInfer recipe pins: an engine's closure has libraries that fit it."""
    differences = toolchain_differences(target.lock, compilers(target))
    if differences:
        raise RequirementMissing(
            "\n  ".join([f"this compiler is not the one that the lockfile of {target.recipe.name} pins:", *differences]),
            "unset CUDA_HOME: the locked compilers are used instead",
        )
