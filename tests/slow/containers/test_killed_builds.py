"""Builds of a small image that are killed with SIGKILL at random times: the same command completes them, with the same digests.

A build pulls its base, fetches wheels, writes layers, runs checks, tags and pushes; another user pulls the image.
``SM120KIT_KILL_SEED`` repeats a run and ``SM120KIT_KILLS`` is the number of kills, by default 50.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import containers
import pytest
from python_base import add_python_image
from small_assembly import SmallImage

from sm120kit import sources
from sm120kit.core.digests import file_sha256
from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import assembly, checks, existing_base, image_inputs, registry
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.image_index import read_index
from sm120kit.images.image_records import VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.images.transports import LayoutTransport
from sm120kit.sources.source_records import LockedWheel

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(not shutil.which("docker-registry"), reason="not installed: docker-registry"),
]

KILLS = int(os.environ.get("SM120KIT_KILLS", "50"))
SEED = int(os.environ.get("SM120KIT_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
RUN = """
import json
import engine, other
for name in ("imports", "files"):
    print(json.dumps({"suite": "vllm", "name": name, "verdict": "passed", "detail": "", "facts": {"engine": engine.__file__}}))
"""


@dataclass
class Inputs:
    """The inputs of all builds."""

    directory: Path
    wheels: dict[LockedWheel, Path]
    ours: Path
    base: str
    repository: str


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inputs]:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    suites = tmp_path / "suites"
    (suites / "vllm").mkdir(parents=True)
    for name, text in (("run.py", RUN), ("driver_stub.py", ""), ("vllm/checks.py", "")):
        (suites / name).write_text(text)
    monkeypatch.setattr(checks, "_root", lambda: suites)
    monkeypatch.setattr(checks, "COMMON", ())
    layout, small = Layout(tmp_path / "base"), SmallImage(tmp_path)
    small.files["large"] = {f"large/{number}.py": b"value = 1\n" * 2000 for number in range(200)}
    small.files["large"]["large/data"] = random.Random(1).randbytes(4 * 2**20)
    with containers.registry(tmp_path / "registry") as address:
        with RegistryClient(f"{address}/python") as client:
            digest = client.push(layout, add_python_image(layout).digest, "1")
        yield Inputs(tmp_path, small.wheels(), small.ours(), f"{address}/python@{digest}", f"{address}/built")


def build(inputs: Inputs, state: Path, repository: str) -> None:
    """All stages of a build; each stage's name is written to a file beside ``state`` when it starts."""
    workspace = Workspace.open(state)
    store, phase = LocalImages(workspace), state.with_suffix(".phase")
    setup = image_inputs.ImageSetup("vllm", "vllm-1.0", {"sm120kit.build-id": "f" * 64}, {}, "1.0", ("vllm", "serve"))
    phase.write_text("base")
    manifest = existing_base.fetch(inputs.base, store.layout)
    phase.write_text("fetch")
    origin = sources.Origin(str(inputs.directory / "wheels"), offline=True)
    sources.wheelhouse([*inputs.wheels], workspace, origin)
    phase.write_text("layers")
    with existing_base.image_base(manifest, store) as base:
        described, text, scripts = image_inputs.describe(
            setup, inputs.base, {inputs.ours: file_sha256(inputs.ours)}, [*inputs.wheels], workspace
        )
        ours = {described.ours[0].wheel: inputs.ours}
        files = assembly.wheel_files(ours, [*inputs.wheels], lambda wheels: sources.wheelhouse(wheels, workspace, origin))
        image, _ = assembly.assemble(described, (text, scripts), base, files, store.layout, workspace)
    phase.write_text("checks")
    expected = checks.ExpectedImage("vllm", "", "", "", "", "", (), (), (), {})
    report = checks.verify(image, image.canonical_name, expected, store, workspace)
    assert report.verified, report
    phase.write_text("push")
    index = state.with_suffix(".json")
    registry.publish(report.verified, repository, index, LayoutTransport(store.layout), lambda entry: entry.attested)
    phase.write_text("pull")
    registry.pull(read_index(index).images[0], LayoutTransport(LocalImages(Workspace.open(user_of(state))).layout))


def user_of(state: Path) -> Path:
    """The state directory of the user who pulls."""
    return state.with_suffix(".user")


def start(inputs: Inputs, state: Path, repository: str) -> int:
    """A build in a process group of its own; returns its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        build(inputs, state, repository)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def require_nothing_half_done(state: Path, repository: str, digest: str, image: str) -> None:
    """Every tag in the state directories and the registry is that of a complete image with the right digest."""
    pulled, layout = Layout(user_of(state) / "oci"), Layout(state / "oci")
    for manifest, tags in pulled.images():
        if tags:
            pulled.verify(manifest.digest)
            assert pulled.image(manifest.digest).id == image
    for manifest, tags in layout.images():
        if tags:
            layout.verify(manifest.digest)
        if any(tag.startswith("sm120kit/") for tag in tags):
            assert layout.image(manifest.digest).id == image
    for record in (state / "images" / "verified").glob("*.json"):
        assert read_record(VerifiedImage, record).image.id == image
    with RegistryClient(repository) as client:
        for tag in {tag.rpartition(":")[2] for _, tags in layout.images() for tag in tags if tag.startswith("sm120kit/")}:
            assert client.in_registry(tag) in (None, digest)


def outcome(state: Path, repository: str) -> tuple[str, str, tuple[str, ...]]:
    """The digest in the registry, and id and layers of the image."""
    layout = Layout(state / "oci")
    ((manifest, (tag,)),) = (
        (manifest, tags) for manifest, tags in layout.images() if any(name.startswith("sm120kit/") for name in tags)
    )
    with RegistryClient(repository) as client:
        digest = client.in_registry(tag.rpartition(":")[2])
        assert digest
        remote = client.image(digest, "linux/amd64")
        client.verify(remote, Layout(state / "none"))
    layout.verify(manifest.digest)
    image = layout.image(manifest.digest)
    assert remote.content == image.content
    pulled = Layout(user_of(state) / "oci")
    ((manifest, (pulled_tag,)),) = pulled.images()
    pulled.verify(manifest.digest)
    assert (pulled_tag, pulled.image(manifest.digest)) == (tag, image)
    return digest, image.id, image.layers


def test_killed_builds_complete_with_the_same_digests(inputs: Inputs) -> None:
    print(f"SM120KIT_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    started = time.monotonic()
    assert os.waitpid(start(inputs, inputs.directory / "first", f"{inputs.repository}/first"), 0)[1] == 0
    seconds = time.monotonic() - started
    expected = outcome(inputs.directory / "first", f"{inputs.repository}/first")
    print(f"a whole build takes {seconds:.1f} s")
    kills: Counter[str] = Counter()
    number = 0
    while kills.total() < KILLS:
        number += 1
        state, repository = inputs.directory / f"state{number}", f"{inputs.repository}/{number}"
        while True:
            child = start(inputs, state, repository)
            time.sleep(seconds * chance.random() ** 2)  # later stages are reached by repeated builds
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                os.killpg(child, signal.SIGKILL) if os.getpgid(child) == child else os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
            if status == 0:
                break
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"seed {SEED}: the build fails after a kill"
            phase = state.with_suffix(".phase")
            kills[phase.read_text() if phase.is_file() else "start"] += 1
            require_nothing_half_done(state, repository, expected[0], expected[1])
        assert outcome(state, repository) == expected, f"seed {SEED}"
        shutil.rmtree(state)
        shutil.rmtree(user_of(state))
    print(f"{kills.total()} kills in {number} builds: {dict(kills)}")
    assert {*kills} >= {"base", "layers", "checks", "push", "pull"} or KILLS < 50
