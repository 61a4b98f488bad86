"""Check compiled modules: the archs of their device code, the kernels that the recipe expects, and whether they load."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.errors import CheckFailed
from sm120kit.core.records import Toolchain
from sm120kit.kernels.cubin import matching, read
from sm120kit.kernels.cubin.cubin_records import Cubin
from sm120kit.wheels.build_records import BuildPlan, Module

SM12X = re.compile(r"(sm|compute)_12[01][af]?$")
"""Archs of device code, PTX included, that SM12x runs."""

LOADER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **arguments) {
  char name[65536];
  for (int i = 3; i < count; i++)
    if (access(arguments[i], F_OK) == 0 && !dlopen(arguments[i], RTLD_NOW | RTLD_GLOBAL)) return puts(dlerror()), 1;
  void *library = dlopen(arguments[2], strcmp(arguments[1], "lazy") ? RTLD_NOW : RTLD_LAZY);
  if (!library) return puts(dlerror()), 1;
  while (scanf("%65535s", name) == 1)
    if (!dlsym(library, name) && !dlsym(RTLD_DEFAULT, name)) return printf("undefined symbol: %s\n", name), 1;
  return 0;
}
"""
"""Load a library after others: ``now``, or ``lazy``: only the symbols on standard input have to resolve."""


def check_modules(
    plan: BuildPlan, work: Path, load_problems: Callable[[Module], tuple[str, ...]]
) -> dict[str, tuple[Cubin, ...]]:
    """Check every module of a plan and return its cubins by module name.

    ``load_problems`` returns why a linked module cannot be used, see :func:`tvm_ffi_loader`.

    Raises:
        CheckFailed: device code that SM12x cannot run, an expected kernel that is missing, or a library that does not
            load, such as one with undefined symbols.
    """
    cubins: dict[str, tuple[Cubin, ...]] = {}
    problems = []
    for module in plan.modules:
        cubins[module.name] = read(work / module.library)
        problems += [f"{module.name}: {problem}" for problem in _device_code_problems(module, cubins[module.name])]
        problems += [f"{module.name}: {problem}" for problem in load_problems(module)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckFailed(
            f"{plan.recipe} was built but is not what its recipe expects\n{listed}",
            f"look with `cuobjdump -res-usage` at the objects in {work}",
        )
    return cubins


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


def tvm_ffi_loader(library: Path, work: Path, tools: Toolchain) -> Callable[[Module], tuple[str, ...]]:
    """A function that returns why a module does not load beside tvm-ffi's ``library``, when every symbol has to resolve.

    Symbols that the module's ``undefined`` patterns match are exempt. The driver is the stub in the CUDA home of ``work``. A
    module for another machine is loaded by the emulator of the toolchain.
    """
    names = ("stubs/libcuda.so", "libcudart.so", "libnvrtc.so", "libcublasLt.so", "libcublas.so")
    libraries = [work / "cuda" / "lib64" / name for name in names]
    loader = work / "cuda" / "load"
    loader.parent.mkdir(exist_ok=True)
    process.run([tools.host_compiler, "-x", "c", "-", "-w", "-o", loader, "-ldl"], stdin=LOADER.encode())

    def problems(module: Module) -> tuple[str, ...]:
        path = work / module.library
        # With undefined functions a module cannot be loaded at once: each symbol that it needs is looked up instead.
        symbols = _undefined_symbols(path, module.undefined) if module.undefined else ()
        names, mode = "\n".join(symbols).encode(), "lazy" if module.undefined else "now"
        done = process.run([*tools.emulator, loader, mode, path, library, *libraries], stdin=names, check=False)
        if done.returncode == 0:
            return ()
        output = (done.stdout + done.stderr).strip().splitlines()
        return (f"does not load: {(output or [f'exit code {done.returncode}'])[-1]}",)

    return problems


def _undefined_symbols(library: Path, exempt: Sequence[str]) -> tuple[str, ...]:
    """The symbols that a library needs from others, without weak ones and those that match an ``exempt`` pattern."""
    output = process.run(["readelf", "--dyn-syms", "--wide", library]).stdout
    names = re.findall(r"\bGLOBAL\s+\w+\s+UND\s+([^\s@]+)", output)
    return tuple(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in exempt))
