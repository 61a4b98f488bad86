"""Build an image with BuildKit if a client program is installed, else with the daemon's classic builder."""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sm120kit.core import process
from sm120kit.core.errors import CommandFailed, DaemonUnreachable
from sm120kit.images.docker.calls import daemon_call, require_disk_space
from sm120kit.images.records import ImageContext

_RESUME = "correct the cause; the same command resumes after the last successful step"
_BUILDX_ALONE = 23
"""First version of the ``docker`` program that supports BuildKit only through buildx."""


def build(client: Any, context: ImageContext, network: str, report: Callable[[str], None]) -> str:
    """See :meth:`sm120kit.images.docker.Daemon.build`."""
    program = None if context.base.startswith("sha256:") else _buildkit()
    if program is None:
        return _classic(client, context, network, report)
    return _with_buildkit(program, client, context, network, report)


def _classic(client: Any, context: ImageContext, network: str, report: Callable[[str], None]) -> str:
    image = ""
    with daemon_call("building"):
        stream = client.api.build(
            fileobj=packed(context.directory),
            custom_context=True,
            buildargs=context.arguments,
            labels=context.labels,
            network_mode=network,
            rm=True,
            forcerm=True,
            decode=True,
        )
        output: list[str] = []
        for event in stream:
            for line in str(event.get("stream", "")).splitlines():
                if line.strip():
                    output.append(line)
                    report(line)
            if "error" in event:
                require_disk_space(event["error"])
                raise CommandFailed("\n".join([*output[-8:], str(event["error"])]), _RESUME)
            image = event.get("aux", {}).get("ID", image)
    if not image:
        raise DaemonUnreachable(
            "the daemon ended the build without an image or an error", "look at its log, then run the same command again"
        )
    return image


def packed(directory: Path) -> Iterator[bytes]:
    """A build context as a tar stream, which saves gigabytes on the disk. Owners, modes and times are fixed."""
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


def _with_buildkit(program: list[str], client: Any, context: ImageContext, network: str, report: Callable[[str], None]) -> str:
    with daemon_call("inspecting the daemon"):
        drivers = dict(client.info().get("DriverStatus") or ())
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as scratch:
        id_file = Path(scratch, "id")
        argv: list[str | Path] = [*program, "--progress", "plain", "--iidfile", id_file, "--network", network]
        if "buildx" in program:
            attests = "containerd" in str(drivers.get("driver-type", ""))
            argv += ["--load", *(["--provenance=mode=max", "--sbom=true"] if attests else ["--provenance=false"])]
        for flag, values in (("--build-arg", context.arguments), ("--label", context.labels)):
            for name, value in values.items():
                argv += [flag, f"{name}={value}"]
        try:
            process.run_lines([*argv, context.directory], report, env={"DOCKER_BUILDKIT": "1"})
        except CommandFailed as failed:
            require_disk_space(failed.message)
            with daemon_call("building"):
                client.ping()
            raise CommandFailed(failed.message, _RESUME) from failed
        return id_file.read_text().strip()


def _buildkit() -> list[str] | None:
    """The command of a build with BuildKit: ``docker buildx build``, or ``docker build`` of a version before 23."""
    if process.find_program("docker") is None:
        return None
    if process.run(["docker", "buildx", "version"], check=False).returncode == 0:
        return ["docker", "buildx", "build"]
    version = re.search(r"version (\d+)\.", process.run(["docker", "--version"], check=False).stdout)
    return ["docker", "build"] if version and int(version[1]) < _BUILDX_ALONE else None
