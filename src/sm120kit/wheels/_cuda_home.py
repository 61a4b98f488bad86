"""Create a CUDA home in a work directory, so that builds in every directory give the same bytes and need no driver."""

import re
from collections.abc import Iterable
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.records import Toolchain
from sm120kit.core.toolchain import host_compiler
from sm120kit.kernels.driver_stub import link_stub

FRONT_END = """#!/bin/sh
# Names of internal symbols contain a hash of the absolute path of the source, which nvcc passes to this program only, and for
# a source without external functions also of its time, the working directory and the process id. This script removes the
# build directory from the paths, and the library gives constants for the rest: the names are the same in every build.
here=$(pwd -P)/
for argument do
  shift
  set -- "$@" "${argument#"$here"}"
done
LD_PRELOAD="${here}cuda/bin/steady.so" exec '%s' "$@"
"""
HOST_COMPILER = "host-c++"
"""The host compiler's name in ``bin``: a path that is the same in every build."""

STEADY = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
pid_t getpid(void) { return 1; }
char *getcwd(char *buffer, size_t size) { (void)size; return buffer ? strcpy(buffer, "/") : strdup("/"); }
static int timeless(const char *path, struct stat *status) {
  int failed = fstatat(AT_FDCWD, path, status, 0);
  status->st_mtime = 0;
  return failed;
}
int __xstat(int version, const char *path, struct stat *status) { (void)version; return timeless(path, status); }
int stat(const char *path, struct stat *status) { return timeless(path, status); }
"""


def link_toolchain(cuda: Path, toolchain: Toolchain) -> Path:
    """Make ``cuda`` a CUDA home: links to the real one, the library names that linkers search, a stub of the driver.

    Libraries and stub are for the toolchain's machine, programs for this one. Its ``cudafe++`` is a script, see
    :data:`FRONT_END`.
    """
    home = toolchain.cuda_home
    for name in ("nvvm", "include"):
        relink(cuda / name, home / name)
    relink_programs(cuda / "bin", home / "bin")
    _front_end(cuda / "bin" / "cudafe++", home / "bin" / "cudafe++", host_compiler()[0])
    relink(cuda / "bin" / HOST_COMPILER, Path(toolchain.host_compiler))
    libraries = cuda / "lib64"
    relink_libraries(libraries, (toolchain.libraries,) if toolchain.libraries else (home / "lib64", home / "lib"))
    stub = libraries / "stubs" / "libcuda.so"
    if not stub.is_file():
        write_atomic(stub, link_stub((home / "include" / "cuda.h").read_text(), toolchain.machine))
    return cuda


def stand_in(cuda: Path, toolchain: Toolchain) -> Path:
    """Make ``cuda`` a CUDA home with a program only that prints nvcc's version, which is all that a plan queries of it.

    :func:`link_toolchain` replaces it.
    """
    script = cuda / "bin" / "nvcc"
    release = ".".join(toolchain.nvcc_version.split(".")[:2])
    write_atomic(script, f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{toolchain.nvcc_version}'\n".encode())
    script.chmod(0o755)
    return cuda


def relink_programs(directory: Path, programs: Path) -> None:
    """Link everything in ``programs`` but cudafe++ into ``directory``."""
    if directory.is_symlink():  # as in old state directories: links in it would replace the toolkit's own files
        directory.unlink()
    for program in programs.iterdir():
        if program.name != "cudafe++":
            relink(directory / program.name, program)


def relink_libraries(directory: Path, sources: Iterable[Path]) -> None:
    """Link the libraries of ``sources``, of equal names the first, into ``directory``, and without versions too.

    A link to a toolkit that was moved or removed since is replaced.
    """
    wanted: dict[str, Path] = {}
    for source in sources:
        for file in sorted(source.glob("lib*")):
            for name in (file.name, re.sub(r"\.so\..*$", ".so", file.name)):
                wanted.setdefault(name, file)
    for name, file in wanted.items():
        relink(directory / name, file)


def _front_end(script: Path, real: Path, compiler: str) -> None:
    steady = script.with_name("steady.so")
    if not steady.is_file():
        _library(STEADY, steady, compiler)
    text = FRONT_END % real
    if not script.is_file() or script.read_text() != text:
        write_atomic(script, text.encode())
        script.chmod(0o755)


def _library(source: str, path: Path, compiler: str) -> None:
    """Compile C to a shared library, which appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".new")
    process.run([compiler, "-x", "c", "-", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", unfinished], stdin=source.encode())
    unfinished.rename(path)


def relink(link: Path, target: Path) -> None:
    """Make ``link`` a symbolic link to ``target``; one that exists stays as it is."""
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
