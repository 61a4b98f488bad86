"""A C++ compiler for another machine than this one, and an emulator of it, from locked Debian packages.

They are unpacked into ``<state>/cache/toolchains``: no root is needed, and nothing of this machine changes. This machine's C
library runs them, so it must not be older than that of the packages' Debian.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.temporary import publish_directory
from sm120kit.core.unpacking import Unpacking
from sm120kit.core.workspace import mark_used
from sm120kit.recipes import bases
from sm120kit.sources import debian, debian_files
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import DebianPackage

BASES = {("x86_64", "aarch64"): ("cross-aarch64", "emulator-aarch64")}
"""The bases with a compiler and an emulator, by this machine and the other one."""

_BYTES_PER_PACKED = 8
_C_LIBRARY = "libc6"
_COMPILER = """#!/bin/sh
# The absolute paths in the compiler's own linker scripts are below its root.
root=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$root/usr/lib/{host}-linux-gnu" exec "$root"/usr/bin/{machine}-linux-gnu-g++-[0-9]* \\
  --sysroot="$root" -ffile-prefix-map="$root"= "$@"
"""


@dataclass(frozen=True)
class CrossTools:
    """Programs for ``machine`` (``aarch64``), below ``root``."""

    machine: str
    root: Path

    @property
    def compiler(self) -> Path:
        """The C++ compiler, a script."""
        return self.root / "c++"

    @property
    def emulator(self) -> Path:
        """The program that runs those of the machine, statically linked."""
        return self.root / "usr" / "bin" / f"qemu-{self.machine}"

    @property
    def emulation(self) -> tuple[str, ...]:
        """The command that runs a program of the machine with the C library of the compiler."""
        return (str(self.emulator), "-L", str(self.root / "usr" / f"{self.machine}-linux-gnu"))

    def compiler_version(self) -> str:
        """The first line of its version.

        Raises:
            RequirementMissing: this machine does not run it.
        """
        done = process.run([self.compiler, "--version"], check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RequirementMissing(
                f"the compiler for {self.machine} does not run on this machine: {reason}",
                "build on Debian 12, Ubuntu 24.04 or newer, or on a machine of that architecture",
            )
        return done.stdout.splitlines()[0]


def is_supported(machine: str) -> bool:
    """Whether programs for a machine can be compiled and run here, though it is another one."""
    return (platform.machine(), machine) in BASES


def cross_tools(machine: str, options: Options) -> CrossTools:
    """The tools for another machine, fetched and unpacked once.

    Raises:
        RequirementMissing: none are locked for this machine and the other one.
        NotFound, FetchFailed and others: see :func:`sm120kit.sources.debian.fetch`.
        NotTrusted: a package is damaged.
        ResourceUnavailable, SystemRefused: they cannot be stored.
    """
    own = platform.machine()
    if not is_supported(machine):
        raise RequirementMissing(f"nothing is compiled for {machine} on {own}", f"build on a machine that is {machine}")
    tools, workspace = _locked(own, machine), options.workspace
    directory = workspace.cache / "toolchains" / _directory_name(tools)
    with workspace.exclusive(f"toolchain-{directory.name}"):
        if not directory.is_dir():
            packed = sum(package.size for packages in tools.values() for package in packages)
            require_disk(workspace.root, _BYTES_PER_PACKED * packed, f"the tools for {machine}")
            with publish_directory(directory) as root:
                unpacking = Unpacking(root, root)
                for base, packages in tools.items():
                    for package, deb in zip(packages, debian.fetch(packages, workspace, options.origin), strict=True):
                        if package.name != _C_LIBRARY:
                            debian_files.read(deb, unpacking.add, bases.load(base).left_out)
                script = root / "c++"
                script.write_text(_COMPILER.format(host=own, machine=machine))
                script.chmod(0o755)
        mark_used(directory)
    return CrossTools(machine, directory)


def _locked(own: str, machine: str) -> dict[str, tuple[DebianPackage, ...]]:
    """The locked packages by base."""
    return {base: bases.read_lock(base, own) for base in BASES[own, machine]}


def _directory_name(tools: dict[str, tuple[DebianPackage, ...]]) -> str:
    return digest_of([_COMPILER, [bases.load(base).inputs() for base in tools], [*tools.values()]])
