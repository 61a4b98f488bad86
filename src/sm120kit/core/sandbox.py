"""Run programs with foreign code in a sandbox: bubblewrap, or :mod:`sm120kit.core._namespaces` where bubblewrap is missing.

A program in a sandbox has no network, no capabilities and no variables but those that are passed. It is alone in a process
namespace, which ends with it and with this process. It reads system directories, the files of Python, compiler and sm120kit,
and the paths that a call names; it writes to an empty ``/tmp`` of its own and to the directories that a call names. What it
writes there is foreign data: nothing else is written to these directories, and links in them are not followed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sm120kit.core import _namespaces, process
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.process import Environment
from sm120kit.core.records import Toolchain

SYSTEM = ("/bin", "/etc/alternatives", "/etc/ld.so.cache", "/lib", "/lib32", "/lib64", "/sbin", "/usr")
"""The paths of the system that every program reads: programs, libraries, headers; no settings."""

INSTALLED = ("bin", "include", "lib", "lib64", "libexec", "nvvm", "targets", "pyvenv.cfg")
"""The parts of an installed program's prefix, which may be a home directory. Cross compilers also have one named by target."""

PASSED = ("LANG", "PATH")
"""The variables of this process that a program in a sandbox has."""

BUBBLEWRAP = ("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL")
"""Bubblewrap without mounts: no network, no capabilities, and namespaces that end with this process."""


@dataclass(frozen=True)
class Sandbox:
    """A program that isolates others, ``bwrap`` or ``unshare``, and the paths that all of them read besides the system's."""

    program: str
    readable: tuple[Path, ...] = ()

    def containing(self, toolchain: Toolchain) -> Sandbox:
        """This sandbox with Python, the programs of sm120kit, and a toolchain."""
        return replace(self, readable=tuple(_installed(toolchain)))


def wrap(
    argv: Sequence[str | Path],
    sandbox: Sandbox | None,
    *,
    read: Sequence[Path] = (),
    write: Sequence[Path] = (),
    env: Environment | None = None,
) -> tuple[Sequence[str | Path], Environment | None]:
    """The command and environment that run ``argv`` in a sandbox; unchanged if it is None.

    ``read`` and ``write`` are existing absolute paths, ``write`` directories. A working directory that the sandbox does not
    contain is replaced by ``/tmp``.
    """
    if sandbox is None:
        return argv, env
    mounts = [("read", path) for path in {*sandbox.readable, *read} if not path.is_relative_to("/usr")]
    mounts += [("write", path) for path in write]
    mounts.sort(key=lambda mount: mount[1].parts)
    system = [Path(path) for path in SYSTEM if os.path.lexists(path)]
    # The sandbox program itself has this environment too: a program in it reads that of process 1 (bubblewrap issue 725).
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    environment = {**dict.fromkeys(os.environ), **passed, "HOME": "/tmp", "TMPDIR": "/tmp", **(env or {})}
    if sandbox.program == "bwrap":
        options: list[str | Path] = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for path in system:
            options += ["--symlink", path.readlink(), path] if path.is_symlink() else ["--ro-bind", path, path]
        for kind, path in mounts:
            options += ["--ro-bind" if kind == "read" else "--bind", path, path]
        return [*BUBBLEWRAP, *options, "--remount-ro", "/proc", "--remount-ro", "/", "--", *argv], environment
    paths = [["link", str(path), str(path.readlink())] if path.is_symlink() else ["read", str(path)] for path in system]
    paths += [[kind, str(path)] for kind, path in mounts]
    return [*unshared({"system": paths, "root": "/sys"}, os.geteuid(), os.getegid()), *argv], environment


def unshared(request: Mapping[str, object], uid: int, gid: int) -> list[str | Path]:
    """The command of :mod:`sm120kit.core._namespaces`, to which the program is appended, which runs as ``uid`` and ``gid``."""
    text = json.dumps({"argv": [], "uid": uid, "gid": gid, **request})
    return [sys.executable, "-I", "-S", _namespaces.__file__, text]


def find() -> Sandbox:
    """The first sandbox that works on this system, determined by running a program in it.

    Raises:
        RequirementMissing: none works; the message has the reason for each.
    """
    sandboxes = {program: Sandbox(program) for program in ("bwrap", "unshare")}
    trials = {program: partial(wrap, ["true"], sandbox) for program, sandbox in sandboxes.items()}
    problem = "this system offers no sandbox for the code of a patch that is in no series"
    return sandboxes[
        first_working(trials, problem, f"{remedy()}; or review the patch, and run its code with your rights: --trust-patch")
    ]


def first_working(
    trials: Mapping[str, Callable[[], tuple[Sequence[str | Path], Environment | None]]], problem: str, hint: str
) -> str:
    """The first name whose command succeeds in its environment.

    Raises:
        RequirementMissing: none does; the message has the ``problem`` and the reason of each.
    """
    reasons = []
    for name, trial in trials.items():
        try:
            argv, env = trial()
            done = process.run(argv, env=env, check=False, tied=True)
        except RequirementMissing as error:
            reasons.append(f"  {name}: {error.message}")
            continue
        if done.returncode == 0:
            return name
        reasons.append(f"  {name}: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}")
    raise RequirementMissing("\n".join([problem, *reasons]), hint)


def _installed(toolchain: Toolchain) -> Iterator[Path]:
    """The existing paths that Python, the compilers and sm120kit's own programs consist of."""
    yield Path(__file__).parents[1]
    prefixes = [*_prefixes(Path(sys.executable)), Path(sys.base_prefix)]
    prefixes += [*_prefixes(Path(toolchain.host_compiler)), toolchain.cuda_home]
    for prefix in prefixes:
        for path in (*(prefix / name for name in INSTALLED), *prefix.glob("*-linux-gnu*")):
            if path.exists():
                yield path


def _prefixes(program: Path) -> Iterator[Path]:
    """The directory above ``bin`` of a program, and of each that it is a link to."""
    yield program.parent.parent
    while program.is_symlink():
        program = Path(os.path.normpath(program.parent / program.readlink()))
        yield program.parent.parent


def remedy() -> str:
    """The changes of the system that permit a sandbox."""
    remedies = []
    for setting, off, remedy in (
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "load AppArmor's profile bwrap-userns-restrict (Ubuntu: package apparmor-profiles), or "
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        file = Path("/proc/sys", setting)
        if file.is_file() and file.read_text().strip() == off:
            remedies.append(f"permit user namespaces: {remedy}")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        options = (f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
        remedies.append(f"start the container with {' '.join(options)}")
    return (
        "; ".join([*([] if process.find_program(BUBBLEWRAP[0]) else ["install bubblewrap"]), *remedies])
        or "permit user namespaces"
    )
