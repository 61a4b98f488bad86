"""Servers that span several machines: what each of them runs. Pure; nothing is started."""

import re
import shlex
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from sm120kit.core.errors import BadInput, InvalidOption
from sm120kit.engines import Node, parser
from sm120kit.engines.engine import MASTER_PORT
from sm120kit.recipes import EngineRecipe, bases
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving._container import Service
from sm120kit.serving._render import compose, docker_run

RDMA_PACKAGE = "libibverbs1"
"""Debian package of libibverbs.so.1, which NCCL loads if it exists."""


def require_span(configuration: Configuration, engine: EngineRecipe, node: Node | None) -> None:
    """Require that a configuration is for as many machines as a server is to span; without a ``node`` for this one only.

    Raises:
        BadInput: it is for another number, the engine lacks options for that, or its image libraries for RDMA.
    """
    needed, count = configuration.hardware.nodes, len(node.addresses) if node else 1
    if needed != count:
        span = "one machine" if needed == 1 else f"{needed} machines"
        hint = (
            f"pass {needed} addresses with --nodes, this machine's first"
            if needed > 1
            else "copy it to a file and set hardware.nodes there; sm120kit config list has others"
        )
        raise BadInput(f"{configuration.name} is for {span}, not for {count}", hint)
    if node is None:
        return
    known = parser.load(engine.name)
    if known is None:
        raise BadInput(f"the options of {engine.name} were not recorded", f"record them: nox -s arguments -- {engine.name}")
    if reason := parser.rejection(known, engine.served_by.node_arguments(node)):
        raise BadInput(
            f"{engine.name} cannot span several machines: its argument parser rejects: {reason}",
            "use a configuration with a newer engine",
        )
    if node.rdma and engine.base and RDMA_PACKAGE not in bases.load(engine.base).packages:
        raise BadInput(
            f"the images of {engine.name} are based on {engine.base}, without {RDMA_PACKAGE}: NCCL would use TCP",
            "omit --rdma, or use a configuration for an engine whose base has it, such as debian-12-rdma",
        )


def preparation(service: Service, config: str) -> tuple[str, ...]:
    """What a machine needs before its container starts, as command lines: doctor's checks, and the caches' directories.

    ``config`` is the name or file of the configuration, "" for one that no file has. The container's user differs from the one
    that starts it, so that everybody may write in the directories; the one above them is closed to everybody else.
    """
    return (shlex.join(("sm120kit", "doctor", *[config] * bool(config))), *cache_directories(service))


def cache_directories(service: Service) -> tuple[str, ...]:
    """Command lines that make the directories of a container's caches."""
    caches = [mount.source for mount in service.mounts if not mount.read_only]
    modes = {"700": [caches[0].parents[1]], "777": caches} if caches else {}
    return tuple(shlex.join(("install", "-d", "-m", mode, *map(str, paths))) for mode, paths in modes.items())


def script(service: Service, config: str) -> str:
    """The command lines of a machine, in their order."""
    return "\n".join((_title(service), *preparation(service, config), shlex.join(docker_run(service))))


def compose_file(service: Service, config: str) -> str:
    """The compose file of a machine, with what it needs before as comments."""
    before = (f"# before: {line}" for line in preparation(service, config))
    return "\n".join((_title(service), *before, compose(service)))


def _title(service: Service) -> str:
    node = service.node
    assert node is not None
    serves = f"serves {service.url}" if node.rank == 0 else f"works for {node.addresses[0]}"
    return f"# node {node.rank} of {len(node.addresses)}: {node.address}, {serves}"


def spanned(addresses: str, interface: str, rdma: str, port: int) -> tuple[Node, ...]:
    """The machines that a server at ``port`` spans, of lists separated by commas: addresses, interfaces and RDMA devices.

    Raises:
        InvalidOption: an address is none that other machines can reach, or occurs twice; there is not one interface for all or
            for each; a name is none of an RDMA device; or they meet on the server's ``port``.
    """
    machines = tuple(map(_node_address, addresses.split(",")))
    if len(machines) == 1:
        raise InvalidOption("--nodes", "name all machines, this one too")
    if duplicates := sorted({machine for machine in machines if machines.count(machine) > 1}):
        raise InvalidOption("--nodes", f"{', '.join(duplicates)} occurs twice")
    names, devices = interface.split(","), tuple(rdma.split(",")) if rdma else ()
    _require_names(names, r"[A-Za-z0-9_.@-]{1,15}", "--interface", "a network interface; `ip -brief address` lists them")
    if len(names) not in (1, len(machines)):
        raise InvalidOption("--interface", f"{len(names)} interfaces for {len(machines)} machines")
    _require_names(devices, r"[A-Za-z0-9_.-]+(:[0-9]+)?", "--rdma", "an RDMA device, such as rocep1s0f1; see `rdma link`")
    if port == MASTER_PORT:
        raise InvalidOption("--port", f"the machines meet on port {port}; choose another for the server")
    names *= len(machines) // len(names)
    return tuple(Node(rank, machines, name, devices) for rank, name in enumerate(names))


def _require_names(names: Sequence[str], pattern: str, option: str, what: str) -> None:
    for name in names:
        if not re.fullmatch(pattern, name):
            raise InvalidOption(option, f"{name!r} is not {what}")


def address(text: str, option: str) -> IPv4Address | IPv6Address:
    """The IP address that an option has.

    Raises:
        InvalidOption: it is not one, or has a zone (``%eth0``), which Docker's ``--publish`` and the engines do not take.
    """
    try:
        found = ip_address(text)
    except ValueError as error:
        raise InvalidOption(option, f"{text!r} is not an IP address") from error
    if "%" in text:
        raise InvalidOption(option, f"{text!r} has a zone; name an address without one")
    return found


def _node_address(text: str) -> str:
    """An IP address as other machines reach it."""
    reached = address(text.strip(), "--nodes")
    within_link = reached.version == 6 and reached.is_link_local  # useless without a zone
    if reached.is_loopback or reached.is_unspecified or reached.is_multicast or reached.is_reserved or within_link:
        raise InvalidOption("--nodes", f"other machines cannot reach {reached}")
    return str(reached)
