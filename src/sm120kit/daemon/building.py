"""Building an image: with BuildKit where there is a program that drives it, else with the daemon's classic builder."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sm120kit import process
from sm120kit.daemon.asking import full_disk, told
from sm120kit.errors import CommandFailed, DaemonUnreachable, ImageBuildFailed
from sm120kit.records import ImageContext

_BUILDX_ALONE = 23
"""The first version of the ``docker`` program that drives BuildKit through buildx only."""


def build(client: Any, context: ImageContext, network: str, tell: Callable[[str], None]) -> str:
    """See :meth:`sm120kit.daemon.Daemon.build`."""
    program = None if context.base.startswith("sha256:") else _buildkit()
    if program is None:
        return _classic(client, context, network, tell)
    return _with_buildkit(program, client, context, network, tell)


def _classic(client: Any, context: ImageContext, network: str, tell: Callable[[str], None]) -> str:
    image = ""
    with told("building"):
        answers = client.api.build(
            fileobj=packed(context.directory),
            custom_context=True,
            buildargs=context.arguments,
            labels=context.labels,
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


def packed(directory: Path) -> Iterator[bytes]:
    """A context as a tar stream: gigabytes that need not be written to disk here. Owners, modes and times are fixed."""
    for path in sorted(directory.rglob("*")):
        member = tarfile.TarInfo(str(path.relative_to(directory)))
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


def _with_buildkit(program: list[str], client: Any, context: ImageContext, network: str, tell: Callable[[str], None]) -> str:
    with told("inspecting the daemon"):
        drivers = dict(client.info().get("DriverStatus") or ())
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as scratch:
        said = Path(scratch, "id")
        argv: list[str | Path] = [*program, "--progress", "plain", "--iidfile", said, "--network", network]
        if "buildx" in program:
            attests = "containerd" in str(drivers.get("driver-type", ""))
            argv += ["--load", *(["--provenance=mode=max", "--sbom=true"] if attests else ["--provenance=false"])]
        for flag, values in (("--build-arg", context.arguments), ("--label", context.labels)):
            for name, value in values.items():
                argv += [flag, f"{name}={value}"]
        try:
            process.run([*argv, context.directory], env={"DOCKER_BUILDKIT": "1"}, on_line=tell)
        except CommandFailed as failed:
            full_disk(failed.message)
            with told("building"):
                client.ping()
            raise ImageBuildFailed(
                failed.message, "correct what it says; the same command goes on after the last step that worked"
            ) from failed
        return said.read_text().strip()


def _buildkit() -> list[str] | None:
    """The words that start a build with BuildKit: with buildx, or with a program that has the client of BuildKit inside."""
    if shutil.which("docker") is None:
        return None
    if process.run(["docker", "buildx", "version"], check=False).returncode == 0:
        return ["docker", "buildx", "build"]
    version = re.search(r"version (\d+)\.", process.run(["docker", "--version"], check=False).stdout)
    return ["docker", "build"] if version and int(version[1]) < _BUILDX_ALONE else None
