"""Small checked images in the layouts of hosts, and commands on these hosts."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import containers
import pytest

from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.checks import CLAIMS
from sm120kit.images.image_records import Check, CheckResult, Image, ImageContext, VerifiedImage, image_name
from sm120kit.images.oci import LAYER, Descriptor, Layout

RECIPE, VERSION, PLATFORM = "vllm-0.19.1", "0.19.1", "linux/amd64"


def labels(context: str) -> dict[str, str]:
    claims = dict.fromkeys(CLAIMS, "") | {"kind": "vllm", "recipe": RECIPE, "context": context, "build-id": "b" * 64}
    claims["reference"] = image_name("vllm", VERSION, context)
    return {"org.opencontainers.image.version": VERSION} | {f"sm120kit.{key}": value for key, value in claims.items()}


def add_layer(layout: Layout, name: str, seed: int, size: int) -> Descriptor:
    """A layer with one file, half of which cannot be compressed."""
    member = tarfile.TarInfo(name)
    member.size = size
    content = random.Random(seed).randbytes(size // 2) + bytes(size - size // 2)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    with layout.writer() as blob:
        blob.write(packed.getvalue())
        return blob.commit(LAYER)


def add_image(
    workspace: Workspace,
    seeds: tuple[int, ...],
    context: str = "4" * 64,
    size: int = 2**20,
    more: Mapping[str, str] = {},
    machine: str = "amd64",
) -> tuple[str, str]:
    """A checked image in the layout, with ``more`` labels and the record of its build; returns manifest and name."""
    layout = Layout(workspace.root / "oci")
    layers = [add_layer(layout, f"file-{number}", seed, size) for number, seed in enumerate(seeds)]
    settings = {"Labels": labels(context) | dict(more), "Env": ["PATH=/bin"], "User": "1000", "Entrypoint": ["/file-0"]}
    history = [{"created_by": f"layer {seed}"} for seed in seeds]
    config = {"os": "linux", "architecture": machine, "config": settings, "history": history}
    manifest = layout.add_image(layers, config).digest
    name = image_name("vllm", VERSION, context)
    image = layout.image(manifest)
    write_record(workspace.root / "images" / context / "context.json", build_context(workspace, context, image))
    results = (Check("base", "user", CheckResult.PASSED),)
    record = VerifiedImage(image, name, checks.suite_digest("vllm"), results, {})
    write_record(checks.record_path(workspace, image), record)
    layout.tag(manifest, name)
    return manifest, name


def build_context(workspace: Workspace, context: str, image: Image) -> ImageContext:
    return ImageContext(
        digest=context,
        kind="vllm",
        base=f"debian@sha256:{'5' * 64}",
        reference=image_name("vllm", VERSION, context),
        labels=image.labels,
        locked=(),
        ours=(),
    )


@dataclasses.dataclass
class Host:
    """A host with a state directory, and an index shared with other hosts."""

    directory: Path
    state: Path
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    def argv(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "sm120kit", *map(str, arguments), "--state", str(self.state)]

    def run(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"DOCKER_HOST": "unix:///nonexistent"} | self.env
        done = subprocess.run(self.argv(*arguments), cwd=self.directory, capture_output=True, text=True, env=env)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        return done

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.state)

    @property
    def layout(self) -> Layout:
        return Layout(self.state / "oci")


def killed(host: Host, delays: list[float], *arguments: object) -> int:
    """Run a command and kill it after each of several times, then to its end; returns how often it was killed."""
    count = 0
    env = os.environ | {"DOCKER_HOST": "unix:///nonexistent"} | host.env
    for delay in delays:
        child = subprocess.Popen(host.argv(*arguments), cwd=host.directory, env=env, stdout=subprocess.DEVNULL)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        count += child.wait() != 0
    host.run(*arguments)
    return count


@pytest.fixture
def publisher(tmp_path: Path) -> Host:
    return Host(tmp_path, Workspace.open(tmp_path / "state").root)


@pytest.fixture
def user(tmp_path: Path) -> Host:
    return Host(tmp_path, Workspace.open(tmp_path / "user").root)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a registry of the test's own."""
    with containers.registry(tmp_path / "registry") as running:
        yield running
