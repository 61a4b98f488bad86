"""Run a program in a root file system and namespaces of its own: ``python -I -S namespaces.py REQUEST [ARGUMENT...]``.

It needs nothing but Python's standard library, because it runs before and after the change of the root. REQUEST is
a JSON object with the keys

``layers``, ``directory``   unpacked layers, highest first, as paths relative to ``directory``: the kernel limits their sum to a
                            page. They are combined by overlayfs, which gets no upper directory, so that nothing can be written
``system``                  instead of both: paths of this system and links, as lists ``[kind, path]`` with the kinds ``read``
                            and ``write``, and ``["link", path, target]``; with a ``/tmp`` of its own, and without ``/sys``
``root``                    an empty directory, the mount point
``writable``                directories to mount writable, by their absolute paths in the root file system
``emulator``                a statically linked program of this system that runs those for another ``machine``
``uid``, ``gid``            ids of the program: those that this user and its files have in a user namespace
``argv``, ``env``, ``cwd``  the program, to which the ARGUMENTs are appended; without both, everything is set up, and nothing
                            is run. Without ``env`` and ``cwd``, those of this process. Where there is no ``cwd``: ``/tmp``

The exit code is that of the program, 128 + N for a signal; ``SETUP_FAILED`` if the setup fails, with the reason on stderr.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

SETUP_FAILED = 125
"""As of ``docker run`` and ``chroot``."""

# linux/sched.h, linux/mount.h, linux/prctl.h, linux/capability.h, linux/fcntl.h
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_RELATIME, _DETACH = 1 << 21, 2
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL = 1, 24, 38, 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}

DEVICES = ("full", "null", "random", "tty", "urandom", "zero")

_libc = ctypes.CDLL(None, use_errno=True)


def main(request: dict[str, Any]) -> int:
    """Set up the namespaces, run the program as a child, and return its exit code."""
    _call("prctl", _libc.prctl, _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if request.get("emulator"):
        _register(request["emulator"], request["machine"], request["root"])
    _unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS, request["uid"], request["gid"])
    with contextlib.suppress(OSError):  # a kernel without namespaces of control groups
        _call("unshare", _libc.unshare, _NEWCGROUP)
    # The child is process 1 of the namespace, and runs the program as its own child: process 1 ignores signals.
    return _exit_code(_fork(lambda: _init(request)))


def _unshare(namespaces: int, uid: int, gid: int) -> None:
    """Move into new namespaces, in which this user has the given ids."""
    own_uid, own_gid = os.geteuid(), os.getegid()
    _call("unshare", _libc.unshare, namespaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {own_uid} 1"), ("gid_map", f"{gid} {own_gid} 1")):
        Path("/proc/self", name).write_text(text)


def _init(request: dict[str, Any]) -> int:
    """As process 1: mount, change the root, run the program, and wait for everything that it leaves behind."""
    socket.sethostname("sm120kit")
    _enable_loopback()
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount_root(request)
    _mount_devices(request["root"])
    if "system" in request:
        _restrict(f"{request['root']}/proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        _restrict(request["root"], _RDONLY | _NOSUID | _NODEV)
    else:
        _mount_system_files(request["root"])
    os.chdir(request["root"])
    _call("pivot_root", _libc.syscall, _PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount", _libc.umount2, b".", _DETACH)
    os.chdir("/")
    if not request["argv"]:
        return 0
    return _exit_code(_fork(lambda: _execute(request)))


def _mount_root(request: dict[str, Any]) -> None:
    root = request["root"]
    if "system" in request:
        _mount_paths(root, request["system"])
    else:
        os.chdir(request["directory"])
        _mount("overlay", root, "overlay", _RDONLY | _NOSUID | _NODEV, f"lowerdir={':'.join(request['layers'])}")
    for path, source in request.get("writable", {}).items():
        _mount(source, root + path, None, _BIND)
        _restrict(root + path, _NOSUID | _NODEV)


def _mount_paths(root: str, paths: list[list[str]]) -> None:
    """Mount paths of this system at their places below ``root``, outermost first, with all that is mounted below them."""
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "mode=755")
    for name in ("dev", "proc", "tmp"):
        Path(root, name).mkdir()
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, "mode=1777")
    for kind, path, *target in paths:
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            place.symlink_to(target[0])
            continue
        place.mkdir(parents=True, exist_ok=True) if Path(path).is_dir() else place.touch()
        _mount(path, str(place), None, _BIND | _REC)
        if kind == "read":
            _make_read_only(str(place))


def _make_read_only(path: str) -> None:
    """Make a mount and those below it read-only."""
    try:
        attributes = struct.pack("<QQQQ", _ATTR_RDONLY, 0, 0, 0)
        arguments = (_AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, len(attributes))
        _call("mount_setattr", _libc.syscall, _MOUNT_SETATTR, *arguments)
    except OSError:  # a kernel before 5.12
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
            if point == path or point.startswith(f"{path}/"):
                _restrict(point, _RDONLY)


def _mount_devices(root: str) -> None:
    _mount("tmpfs", f"{root}/dev", "tmpfs", _NOSUID | _NOEXEC, "mode=755")
    for name in DEVICES:
        Path(root, "dev", name).touch()
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        Path(root, "dev", name).symlink_to(f"/proc/self/fd/{number}")
    Path(root, "dev", "fd").symlink_to("/proc/self/fd")
    Path(root, "dev", "shm").mkdir()
    _mount("tmpfs", f"{root}/dev/shm", "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=1777")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def _mount_system_files(root: str) -> None:
    """Mount ``/sys``, of which control groups could be this user's and writable."""
    _mount("/sys", f"{root}/sys", None, _BIND | _REC)
    _make_read_only(f"{root}/sys")


def _register(emulator: str, machine: str, point: str) -> None:
    """Let the kernel start programs of a machine by an emulator, in a new user namespace and those in it: Linux 6.7 and newer.

    Only root of a namespace may register one. The kernel opens the emulator now (F): it need not exist below another root.
    """
    _unshare(_NEWUSER | _NEWNS, 0, 0)
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("binfmt_misc", point, "binfmt_misc", _NOSUID | _NODEV | _NOEXEC)
    header = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HH", 2, _ELF_MACHINES[machine])
    mask = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff\xff\xff"  # any ABI; programs and position-independent ones
    magic, bits = ("".join(f"\\x{byte:02x}" for byte in text) for text in (header, mask))
    separator = "\x1e"  # a path may contain any other
    Path(point, "register").write_text(separator.join(["", machine, "M", "", magic, bits, emulator, "F"]))


def _restrict(path: str, flags: int) -> None:
    """Add flags to a mount. Those that it has are repeated: in a user namespace they cannot be removed."""
    status = os.statvfs(path).f_flag
    kept = status & (_NOSUID | _NODEV | _NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)  # the same bits in mount(2)
    kept |= _RELATIME if status & os.ST_RELATIME else 0
    _mount("none", path, None, _REMOUNT | _BIND | flags | kept)


def _execute(request: dict[str, Any]) -> int:
    """As the program's process: drop all rights, then become the program."""
    os.setsid()
    _drop_bounding_set()
    _call("prctl", _libc.prctl, _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _libc.prctl, _CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header, none = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _call("capset", _libc.capset, header, none)
    os.umask(0o022)
    for kind in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(kind) is signal.SIG_IGN:  # by Python, or by the shell of a background job
            signal.signal(kind, signal.SIG_DFL)
    try:
        os.chdir(request["cwd"])
    except OSError:
        os.chdir("/tmp")
    try:
        os.execvpe(request["argv"][0], request["argv"], request.get("env", os.environ))
    except OSError as error:
        print(f"{request['argv'][0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _drop_bounding_set() -> None:
    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        _call("prctl", _libc.prctl, _CAPBSET_DROP, capability, 0, 0, 0)


def _enable_loopback() -> None:
    with socket.socket() as probe:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, name))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = (os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    _call(f"mount {kind or source} on {target}", _libc.mount, *texts, ctypes.c_ulong(flags), os.fsencode(options) or None)


def _call(activity: str, function: Any, *arguments: Any) -> None:
    """Call a function of libc or the kernel that returns 0."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        reason = (
            "the limit of namespaces is reached" if number == errno.ENOSPC and activity == "unshare" else os.strerror(number)
        )
        raise OSError(number, f"{activity}: {reason}")


def _fork(work: Any) -> int:
    """Run ``work`` in a child, which ends with this process and exits with what it returns. Returns the child's id."""
    child = os.fork()
    if child:
        return child
    code = SETUP_FAILED
    try:
        _call("prctl", _libc.prctl, _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        code = work()
    except OSError as error:
        print(f"{error.strerror}", file=sys.stderr)
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _exit_code(child: int) -> int:
    """Wait for a child, and for others that became this process's children before it ended."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        REQUEST = json.loads(sys.argv[1])
        CODE = main({"cwd": str(Path.cwd())} | REQUEST | {"argv": [*REQUEST["argv"], *sys.argv[2:]]})
    except OSError as failed:
        print(failed.strerror, file=sys.stderr)
        CODE = SETUP_FAILED
    sys.exit(CODE)
