"""Find out whether a server on loopback runs on this machine: its port may be that of a tunnel to another one."""

from __future__ import annotations

import re
from pathlib import Path

_ENGINE = re.compile(r"vllm|sglang|llama-server|lmdeploy|trtllm|ktransformers", re.IGNORECASE)
"""In the name of an engine's program, script or module, and in the process titles that they set."""
_CONTAINER = ("docker-proxy", "rootlessport", "slirp4netns", "pasta")
"""Programs that forward a port of this machine to a container on it."""


def is_engine(port: int) -> bool:
    """Whether every process of this machine that listens on a TCP port is an engine, or forwards it to a container here.

    The process of a socket of another user is unknown; an engine of any user whose arguments name the port counts instead.
    """
    import psutil

    try:
        sockets = psutil.net_connections("tcp")
    except psutil.Error:
        return False
    owners = {each.pid for each in sockets if each.status == psutil.CONN_LISTEN and getattr(each.laddr, "port", 0) == port}
    processes = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    known = [is_program(processes.get(owner, [])) for owner in owners if owner is not None]
    if None in owners:
        known.append(any(is_program(argv) and names_port(argv, port) for argv in processes.values()))
    return bool(known) and all(known)


def names_port(argv: list[str], port: int) -> bool:
    """Whether an argument is the port."""
    return any(argument.rpartition("=")[2] == str(port) for argument in argv[1:])


def is_program(argv: list[str]) -> bool:
    """Whether a command line is that of an engine or a container's port: an argument of ssh may name an engine, too."""
    if not argv:
        return False
    name = Path(argv[0]).name
    if name.startswith("python"):
        name = next((Path(argument).name for argument in argv[1:] if argument == "-c" or not argument.startswith("-")), "")
    return name in _CONTAINER or bool(_ENGINE.match(name))
