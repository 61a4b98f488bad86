"""Collect what a figure depends on: from launch's record, from the server, from this machine."""

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from sm120kit import __version__
from sm120kit.bench.result_file import Machine, Served
from sm120kit.core import reporting
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, DaemonUnreachable, InvalidOption, RequirementMissing, did_you_mean
from sm120kit.core.outside import read_found
from sm120kit.core.record_files import read_record
from sm120kit.core.urls import is_loopback
from sm120kit.hosts.facts import Host, probe
from sm120kit.serving import Run, server_containers

GIVEN = {
    "configuration": "that the server was started as",
    "gpu": "kind and number of the GPUs, such as '2x RTX PRO 6000'",
    "power_limit": "of each GPU, such as '300 W'",
    "engine": "the recipe of the engine, such as vllm-0.19.1",
    "revision": "the commit of the model's repository",
    "quantization": "of the model's weights",
    "machine": "'this' if the server runs on this machine, and its process cannot be recognised",
}
"""Environment that a user can state when they cannot be detected."""

COMMIT = re.compile(r"[0-9a-f]{40}")


def client() -> dict[str, str]:
    """Versions of the measuring program."""
    return {"sm120kit": __version__, "httpx2": version("httpx2"), "python": platform.python_version()}


def served_by_record(path: Path, url: str) -> Served:
    """How the server at ``url`` was started, by the record of ``sm120kit serve`` at ``path``.

    Raises:
        BadInput: there is no such record, or it is of another server, or of one that has ended.
    """
    hint = "launch writes its records to runs/ in the state directory"
    try:
        run = read_record(Run, path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", hint) from error
    except ValueError as error:
        raise BadInput(f"{path} is not a record of launch: {error}", hint) from error
    if run.url != url:
        raise BadInput(f"{path} is of a server at {run.url}; the measured server is {url}", hint)
    if ended := _ended(path, run):
        raise BadInput(
            f"{path} is of a server that does not run: {ended}", "sm120kit ps --json lists servers and their records"
        )
    return served_from(run)


def _ended(path: Path, run: Run) -> str:
    """How the server of a record has ended, "" if it runs. Without a daemon that can tell, the record decides."""
    try:
        state = server_containers.state(path)
    except (DaemonUnreachable, RequirementMissing) as error:
        reporting.warn(f"whether the server of {path} runs is unknown: {error.message}")
        return run.ending
    return "" if state == "running" else run.ending or state or "its container is gone"


def served_from(run: Run) -> Served:
    """How a server was started. The container's name and labels are left out: they differ at each start."""
    folder = Path(run.model)
    tokenizer = folder / "tokenizer.json"
    return Served(
        configuration=run.configuration,
        engine=run.engine,
        image=run.image,
        image_name=run.image_name,
        lock=run.build_id or None,
        local=run.local or None,
        revision=revision(folder),
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer.is_file() else None,
        argv=_same_at_each_start(run),
        variables=run.environment,
    )


def _same_at_each_start(run: Run) -> tuple[str, ...]:
    """The command line without ``--name NAME`` and ``--label NAME=VALUE`` of docker; what follows the image is the server's."""
    image = run.argv.index(run.image_name) if run.image_name in run.argv else 0
    words = iter(run.argv[:image])
    kept = []
    for word in words:
        if word in ("--name", "--label"):
            next(words, None)
        else:
            kept.append(word)
    return (*kept, *run.argv[image:])


def with_values(served: Served, values: dict[str, str]) -> Served:
    """Add the values of variables that are not secret: those in a configuration that comes with sm120kit."""
    names = served.variables or ()
    return replace(served, variables=tuple(f"{name}={values[name]}" if name in values else name for name in names))


def revision(folder: Path) -> str | None:
    """The commit of a downloaded model: its folder's name in a download cache, else the metadata of a plain download."""
    if COMMIT.fullmatch(folder.name):
        return folder.name
    try:
        metadata = read_found(folder / ".cache/huggingface/download/config.json.metadata")
        commit = metadata.partition(b"\n")[0].strip().decode()
    except (OSError, UnicodeDecodeError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def machine(url: str, served: Served | None = None, given: Mapping[str, str] = MappingProxyType({})) -> Machine:
    """This machine if the server at ``url`` runs on it, else unknown.

    A server on loopback does if launch started it, if the user states it, or if the process that listens is an engine: the
    port of a tunnel is on loopback, too.
    """
    if not is_loopback(urlsplit(url).hostname or "") or not (Path("/proc").is_dir() and Path("/sys").is_dir()):
        return Machine()
    stated = given.get("machine")
    launched = served is not None and served.configuration is not None
    here = stated == "this" or (stated is None and (launched or is_engine(_port(url))))
    return machine_of(probe()) if here else Machine()


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def machine_of(host: Host) -> Machine:
    """The facts of a host that rates depend on."""
    order = {gpu.bus: number for number, gpu in enumerate(host.gpus)}
    return Machine(
        kernel=host.kernel,
        cpu=host.cpu.model,
        governor=_joined(host.cpu.governors),
        driver=host.driver.version,
        cuda=host.driver.cuda,
        gpus=tuple(gpu.name or "unnamed GPU" for gpu in host.gpus),
        power_limits_watts=tuple(gpu.power_limit for gpu in host.gpus),
        topology=tuple(f"{order[p.first]}-{order[p.second]} {p.kind or p.smi or 'unknown'}" for p in host.pairs),
    )


def _joined(names: Iterable[str] | None) -> str | None:
    return ", ".join(sorted(set(names))) or None if names is not None else None


def given_values(texts: list[str]) -> dict[str, str]:
    """The values of ``--given NAME=VALUE`` by name.

    Raises:
        InvalidOption: not NAME=VALUE, or a name that results do not record.
    """
    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value:
            raise InvalidOption("--given", f"{text!r} is not NAME=VALUE")
        if name not in GIVEN:
            known = "; ".join(f"{key}: {meaning}" for key, meaning in GIVEN.items())
            raise InvalidOption("--given", f"unknown name {name!r}{did_you_mean(name, GIVEN)}. {known}")
        values[name] = value
    return values


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
