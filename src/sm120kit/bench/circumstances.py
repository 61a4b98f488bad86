"""What a figure depends on, asked of those who know: launch's record, the server, this machine."""

from __future__ import annotations

import ipaddress
import platform
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from sm120kit import __version__
from sm120kit.bench.receipt import Machine, Served
from sm120kit.errors import BadReceipt
from sm120kit.host import Host, probe
from sm120kit.records import Run
from sm120kit.workspace import file_sha256, read_record

COMMIT = re.compile(r"[0-9a-f]{40}")
MOUNTED = "/model"
"""Where launch mounts what holds a model's files."""


def client() -> dict[str, str]:
    """What measures."""
    return {"sm120kit": __version__, "httpx2": version("httpx2"), "python": platform.python_version()}


def recorded(path: Path, url: str) -> Served:
    """How the server at ``url`` was started, from the record that ``sm120kit launch`` keeps of it.

    Raises:
        BadReceipt: there is no such record, or it is of another server, or of one that does not run.
    """
    hint = "launch keeps it in runs/ of its state directory"
    try:
        run = read_record(Run, path)
    except OSError as error:
        raise BadReceipt(f"{path}: {error.strerror}", hint) from error
    except ValueError as error:
        raise BadReceipt(f"{path} is not the record of a server: {error}", hint) from error
    if run.url != url or run.ending != "running":
        raise BadReceipt(f"{path} is of a server at {run.url}, {run.ending}; measured is {url}", hint)
    return served(run)


def served(run: Run) -> Served:
    """How a server was started. The container's name is left out: it is another one each time."""
    folder = _folder(run)
    named = run.argv.index("--name") if "--name" in run.argv else len(run.argv)
    tokenizer = folder / "tokenizer.json"
    return Served(
        configuration=run.configuration,
        engine=run.engine,
        image=run.image,
        image_name=run.image_name,
        lock=run.build_id or None,
        revision=revision(folder),
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer.is_file() else None,
        argv=(*run.argv[:named], *run.argv[named + 2 :]),
        environment=run.environment,
    )


def with_values(known: Served, values: dict[str, str]) -> Served:
    """With the values of variables that are no secret: those that a configuration of ours sets."""
    names = known.environment or ()
    return replace(known, environment=tuple(f"{name}={values[name]}" if name in values else name for name in names))


def _folder(run: Run) -> Path:
    """The model's folder here, of which the server's command line says where it is in the container."""
    mount = Path(run.model)
    for word in run.argv:
        if word.startswith(f"{MOUNTED}/"):
            return mount / word.removeprefix(f"{MOUNTED}/")
    return mount


def revision(folder: Path) -> str | None:
    """The commit of a downloaded model: its folder's name in a download cache, else what a plain download keeps of it."""
    if COMMIT.fullmatch(folder.name):
        return folder.name
    try:
        beside = (folder / ".cache/huggingface/download/config.json.metadata").read_text().split("\n", 1)[0].strip()
    except OSError:
        return None
    return beside if COMMIT.fullmatch(beside) else None


def machine(url: str) -> Machine:
    """The server's machine: this one, when the server is on loopback; of another one nothing is known."""
    readable = Path("/proc").is_dir() and Path("/sys").is_dir()
    return described(probe()) if is_local(url) and readable else Machine()


def is_local(url: str) -> bool:
    """Whether a URL is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def described(host: Host) -> Machine:
    """What of a host a rate depends on."""
    order = {gpu.bus: number for number, gpu in enumerate(host.gpus)}
    return Machine(
        kernel=host.kernel,
        cpu=host.cpu.model,
        governor=_joined(host.cpu.governors),
        driver=host.driver.version,
        cuda=host.driver.cuda,
        gpus=tuple(gpu.name or "unnamed GPU" for gpu in host.gpus),
        power_limits_watts=tuple(gpu.power_limit for gpu in host.gpus),
        topology=tuple(f"{order[p.first]}-{order[p.second]} {p.kind or p.said or 'unknown'}" for p in host.pairs),
    )


def _joined(words: Iterable[str] | None) -> str | None:
    return ", ".join(sorted(set(words))) or None if words is not None else None
