"""Units as FlashInfer generates them and regrouped by mainloop: CPU seconds, peak memory, and whether the kernels are the same.

    sm120kit build flashinfer@0.6.6 --kernels fused-moe --dry-run
    python tests/bench/regrouped_units.py WORK MODULE BEFORE... -- AFTER...

``WORK`` is the work directory of that build, below the state directory; ``BEFORE`` and ``AFTER`` are names of generated sources
in it, without ``.cu``. They are compiled one after the other with the flags of the module. Kernels are compared by ``.text``,
registers, stack and static shared memory, functions by the names that the objects define.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from sm120kit.kernels.cubin import read


def compiler(work: Path, module: str) -> list[str]:
    """The compiler and flags of a module, from the ninja file that FlashInfer wrote."""
    (file,) = work.glob(f"jit/**/cached_ops/{module}/build.ninja")
    commands = subprocess.run(["ninja", "-f", file, "-t", "commands"], stdout=subprocess.PIPE, text=True, check=True).stdout
    argv = next(shlex.split(line) for line in commands.splitlines() if "/nvcc " in line)
    flags = argv[1 : argv.index("-c")]  # the first word is the memory gate
    at = flags.index("--dependency-output")
    return [flag for flag in flags[:at] + flags[at + 2 :] if flag != "--generate-dependencies-with-compile"]


def compiled(argv: list[str], work: Path, name: str, out: Path) -> Path:
    """Compile a source, print what that took, and return the object."""
    (source,) = work.glob(f"jit/**/{name}.cu")
    target = out / f"{name}.o"
    child = subprocess.Popen([*argv, "-c", source, "-o", target], cwd=work)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{name} does not compile")
    print(f"{name}: {usage.ru_utime + usage.ru_stime:.1f} CPU-s, {usage.ru_maxrss / 2**20:.2f} GiB", flush=True)
    return target


def contents(objects: list[Path]) -> tuple[dict[str, tuple[object, ...]], set[str]]:
    """The kernels of objects by name, and the functions that they define, without those of the C++ library."""
    kernels = {
        kernel.name: (kernel.text_sha256, kernel.registers, kernel.stack_bytes, kernel.shared_bytes)
        for file in objects
        for cubin in read(file)
        for kernel in cubin.kernels
    }
    lines = subprocess.run(["nm", "-g", "--defined-only", *objects], stdout=subprocess.PIPE, text=True, check=True).stdout
    names = {line.split()[-1] for line in lines.splitlines() if len(line.split()) == 3}
    return kernels, {name for name in names if "_GLOBAL__N_" not in name and not name.startswith(("_ZNSt", "_ZSt", "_ZNKSt"))}


def main() -> None:
    work, module, *names = sys.argv[1:]
    directory, split = Path(work).resolve(), names.index("--")
    argv = compiler(directory, module)
    with tempfile.TemporaryDirectory() as scratch:
        before, after = (
            contents([compiled(argv, directory, name, Path(scratch)) for name in part])
            for part in (names[:split], names[split + 1 :])
        )
    for what, first, second in zip(("kernels", "functions"), map(set, before), map(set, after), strict=True):
        print(f"{what}: {len(first)} and {len(second)}, {len(first & second)} in both")
    shared = before[0].keys() & after[0].keys()
    print(f"kernels with the same code: {sum(before[0][name] == after[0][name] for name in shared)} of {len(shared)}")


if __name__ == "__main__":
    main()
