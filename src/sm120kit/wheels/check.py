"""Check compiled modules: the archs of their device code, the kernels that the recipe expects, and whether they load."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.errors import BadArtifact, ExpectationFailed
from sm120kit.kernels.cubin import matching, read
from sm120kit.kernels.cubin.records import Cubin
from sm120kit.wheels.records import BuildPlan, Module

SM12X = re.compile(r"(sm|compute)_12[01][af]?$")
"""Archs of device code, PTX included, that SM12x runs."""


def check_modules(
    plan: BuildPlan, work: Path, load_problems: Callable[[Module], tuple[str, ...]]
) -> dict[str, tuple[Cubin, ...]]:
    """Check every module of a plan and return its cubins by module name.

    ``load_problems`` returns why a linked module cannot be used, see :func:`tvm_ffi_loader`.

    Raises:
        ExpectationFailed: device code that SM12x cannot run, an expected kernel that is missing, or a library that does not
            load, such as one with undefined symbols.
    """
    cubins: dict[str, tuple[Cubin, ...]] = {}
    problems = []
    for module in plan.modules:
        cubins[module.name] = _cubins(module, work)
        problems += [f"{module.name}: {problem}" for problem in _device_code_problems(module, cubins[module.name])]
        if module.packed:
            problems += [f"{module.name}: {problem}" for problem in load_problems(module)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ExpectationFailed(
            f"{plan.recipe} was built but is not what its recipe expects\n{listed}",
            f"look with `sm120kit inspect` at {work}",
        )
    return cubins


def count_kernels(cubins: Mapping[str, Iterable[Cubin]]) -> int:
    """The number of kernels in the device code of all modules."""
    return sum(len(cubin.kernels) for module in cubins.values() for cubin in module)


def _cubins(module: Module, work: Path) -> tuple[Cubin, ...]:
    files = [work / module.library] if module.packed else [work / unit.output for unit in module.units]
    cubins: list[Cubin] = []
    for file in files:
        try:
            cubins += read(file)
        except BadArtifact:  # an object file may have no device code
            if module.packed:
                raise
    return tuple(cubins)


def _device_code_problems(module: Module, cubins: tuple[Cubin, ...]) -> list[str]:
    problems = []
    foreign = sorted({cubin.arch for cubin in cubins if not SM12X.match(cubin.arch)})
    if foreign:
        problems.append(f"device code for {', '.join(foreign)}")
    for pattern, minimum in module.expect_kernels:
        count = len(matching(pattern, cubins))
        if count < minimum:
            problems.append(f"{count} kernels like {pattern}, at least {minimum} are expected")
    return problems


def tvm_ffi_loader(library: Path, work: Path) -> Callable[[Module], tuple[str, ...]]:
    """A function that returns why a module does not load beside tvm-ffi's ``library``, when every symbol has to resolve.

    The driver is the stub in the CUDA home of ``work``.
    """
    program = (
        "import ctypes, os, sys\n"
        "for path in filter(os.path.exists, sys.argv[2:]):\n"
        "    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)\n"
        "ctypes.CDLL(sys.argv[1], os.RTLD_NOW)\n"
    )
    libraries = [work / "cuda" / "lib64" / name for name in ("stubs/libcuda.so", "libcudart.so", "libnvrtc.so")]

    def problems(module: Module) -> tuple[str, ...]:
        done = process.run([sys.executable, "-c", program, work / module.library, library, *libraries], check=False)
        if done.returncode == 0:
            return ()
        return (f"does not load: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}",)

    return problems
