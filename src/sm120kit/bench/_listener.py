"""Find out whether a server on loopback runs on this machine: its port may be that of a tunnel to another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ENGINE = re.compile(r"vllm|sglang|llama-server|lmdeploy|trtllm|ktransformers", re.IGNORECASE)
"""In the name of an engine's program, script or module, and in the process titles that they set."""
_CONTAINER = ("docker-proxy", "rootlessport", "slirp4netns", "pasta")
"""Programs that forward a port of this machine to a container on it."""
_LISTENING = "0A"
"""The state in /proc/net/tcp (include/net/tcp_states.h)."""


def is_engine(port: int, proc: Path = Path("/proc")) -> bool:
    """Whether every process of this machine that listens on a TCP port is an engine, or forwards it to a container here.

    An engine is recognised by its program, or by a GPU that it or a process that it started has open. The process of a socket
    of another user is not readable; a process of any user whose arguments name the port counts instead.
    """
    sockets = set(_listening(port, proc))
    processes = {path.name: _arguments(path) for path in proc.glob("[0-9]*")}
    owners = {pid: open_files & sockets for pid in processes if (open_files := set(_open_files(proc / pid))) & sockets}
    if sockets - set().union(*owners.values()):
        others = {pid: set[str]() for pid, argv in processes.items() if _names_port(argv, port) and _is_program(argv)}
        owners = owners | others if others else {}
    return bool(owners) and all(_is_program(processes[pid]) or _has_gpu(pid, proc) for pid in owners)


def _listening(port: int, proc: Path) -> Iterator[str]:
    """The names of the sockets that listen on a port, as links in ``/proc/PID/fd`` have them."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{fields[9]}]"


def _arguments(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:  # it has ended
        return []


def _open_files(process: Path) -> Iterator[str]:
    with suppress(OSError):  # of another user, or ended
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(link.readlink())


def _names_port(argv: list[str], port: int) -> bool:
    return any(argument.rpartition("=")[2] == str(port) for argument in argv[1:])


def _is_program(argv: list[str]) -> bool:
    """Whether a command line is that of an engine or a container's port: an argument of ssh may name an engine, too."""
    if not argv:
        return False
    name = Path(argv[0]).name
    if name.startswith("python"):
        name = next((Path(argument).name for argument in argv[1:] if argument == "-c" or not argument.startswith("-")), "")
    return name in _CONTAINER or bool(_ENGINE.match(name))


def _has_gpu(pid: str, proc: Path) -> bool:
    """Whether a process or one that it started has an NVIDIA GPU open."""
    if any(re.match(r"/dev/nvidia\d", name) for name in _open_files(proc / pid)):
        return True
    children: set[str] = set()
    for task in (proc / pid / "task").glob("*/children"):
        with suppress(OSError):
            children |= set(task.read_text().split())
    return any(_has_gpu(child, proc) for child in children)
