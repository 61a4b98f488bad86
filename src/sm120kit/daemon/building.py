"""Building an image: with BuildKit where there is a program that drives it, else with the daemon's classic builder."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sm120kit import process
from sm120kit.daemon.asking import full_disk, told
from sm120kit.errors import CommandFailed, DaemonUnreachable, ImageBuildFailed


def build(
    client: Any,
    context: Path,
    arguments: Mapping[str, str],
    labels: Mapping[str, str],
    network: str,
    tell: Callable[[str], None],
) -> str:
    """See :meth:`sm120kit.daemon.Daemon.build`."""
    if not arguments["BASE"].startswith("sha256:") and _has_buildx():
        return _with_buildx(client, context, arguments, labels, network, tell)
    return _classic(client, context, arguments, labels, network, tell)


def _classic(
    client: Any,
    context: Path,
    arguments: Mapping[str, str],
    labels: Mapping[str, str],
    network: str,
    tell: Callable[[str], None],
) -> str:
    image = ""
    with told("building"):
        answers = client.api.build(
            fileobj=_packed(context),
            custom_context=True,
            buildargs=dict(arguments),
            labels=dict(labels),
            network_mode=network,
            rm=True,
            forcerm=True,
            decode=True,
        )
        said: list[str] = []
        for answer in answers:
            for line in str(answer.get("stream", "")).splitlines():
                if line.strip():
                    said.append(line)
                    tell(line)
            if "error" in answer:
                full_disk(answer["error"])
                raise ImageBuildFailed(
                    "\n".join([*said[-8:], str(answer["error"])]),
                    "correct what it says; the same command goes on after the last step that worked",
                )
            image = answer.get("aux", {}).get("ID", image)
    if not image:
        raise DaemonUnreachable("the daemon ended the build without a word", "look at its log; the same command goes on")
    return image


def _packed(context: Path) -> Iterator[bytes]:
    """A context as a tar stream: gigabytes that need not be written to disk here. Owners, modes and times are fixed."""
    for path in sorted(context.rglob("*")):
        member = tarfile.TarInfo(str(path.relative_to(context)))
        if path.is_dir():
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            yield member.tobuf()
            continue
        member.size = path.stat().st_size
        yield member.tobuf()
        with path.open("rb") as file:
            while piece := file.read(2**20):
                yield piece
        yield bytes(-member.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _with_buildx(
    client: Any,
    context: Path,
    arguments: Mapping[str, str],
    labels: Mapping[str, str],
    network: str,
    tell: Callable[[str], None],
) -> str:
    with told("inspecting the daemon"):
        drivers = dict(client.info().get("DriverStatus") or ())
    attests = "containerd" in str(drivers.get("driver-type", ""))
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as scratch:
        said = Path(scratch, "id")
        argv: list[str | Path] = ["docker", "buildx", "build", "--load", "--progress", "plain", "--iidfile", said]
        argv += ["--network", network]
        argv += ["--provenance=mode=max", "--sbom=true"] if attests else ["--provenance=false"]
        for flag, values in (("--build-arg", arguments), ("--label", labels)):
            for name, value in values.items():
                argv += [flag, f"{name}={value}"]
        try:
            process.run([*argv, context], on_line=tell)
        except CommandFailed as failed:
            full_disk(failed.message)
            raise ImageBuildFailed(failed.message, failed.hint) from failed
        return said.read_text().strip()


def _has_buildx() -> bool:
    return shutil.which("docker") is not None and process.run(["docker", "buildx", "version"], check=False).returncode == 0
