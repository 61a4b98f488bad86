"""Images of a layout with real programs: docker-registry, dockerd and skopeo."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import containers
import pytest

from sm120kit.core.errors import ArtifactChanged, NoSuchImage, StateUnwritable, TagTaken
from sm120kit.core.state import Workspace, write_record
from sm120kit.images import checks, loading
from sm120kit.images.delivery import CLAIMS
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.docker import Daemon
from sm120kit.images.oci import LAYER, Descriptor, Layout
from sm120kit.images.records import Check, CheckResult, Image, ImageContext, VerifiedImage, image_name
from sm120kit.sources.records import LockedWheel

pytestmark = pytest.mark.skipif(not shutil.which("docker-registry"), reason="not installed: docker-registry")
with_daemon = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]
with_skopeo = pytest.mark.skipif(not shutil.which("skopeo"), reason="not installed: skopeo")

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


def add_image(workspace: Workspace, seeds: tuple[int, ...], context: str = "4" * 64, size: int = 2**20) -> tuple[str, str]:
    """A verified image in the layout, with the record of its build; returns manifest and name."""
    layout = Layout(workspace.root / "oci")
    layers = [add_layer(layout, f"file-{number}", seed, size) for number, seed in enumerate(seeds)]
    settings = {"Labels": labels(context), "Env": ["PATH=/bin"], "User": "1000", "Entrypoint": ["/file-0"]}
    history = [{"created_by": f"layer {seed}"} for seed in seeds]
    config = {"os": "linux", "architecture": "amd64", "config": settings, "history": history}
    manifest = layout.add_image(layers, [layer.digest for layer in layers], config).digest
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
        directory=workspace.root,
        digest=context,
        kind="vllm",
        base=f"debian@sha256:{'5' * 64}",
        reference=image_name("vllm", VERSION, context),
        arguments={},
        labels=image.labels,
        installer=LockedWheel("pip", "26.3", "pip.whl", "3" * 64),
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


@pytest.fixture
def publisher(tmp_path: Path) -> Host:
    (tmp_path / "state").mkdir()
    return Host(tmp_path, tmp_path / "state")


@pytest.fixture
def user(tmp_path: Path) -> Host:
    (tmp_path / "user").mkdir()
    return Host(tmp_path, tmp_path / "user")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with containers.registry(tmp_path / "registry") as running:
        yield running


def requests_of(tmp_path: Path, method: str, pattern: str) -> int:
    """How many requests of a kind the registry has answered."""
    log = (tmp_path / "registry" / "log").read_text()
    return len(re.findall(rf'"{method} /v2/[^"]*{pattern}[^"]* HTTP/1.1" 20', log))


def test_publish_and_pull_without_a_daemon(publisher: Host, user: Host, address: str, tmp_path: Path) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2, 3))
    repository = f"{address}/sm120kit/vllm"
    shown = publisher.run("publish", name, repository).stdout.strip()
    uploads = requests_of(tmp_path, "PUT", "blobs/uploads")
    assert uploads == 4, "three layers and the config"
    assert user.run("pull", RECIPE).stdout.strip() == name
    assert user.layout.find(name) == publisher.layout.find(name)
    user.layout.verify(manifest)
    assert user.run("pull", "--check").returncode == 0

    # Published again, nothing is sent; with another last layer, only that one and the config.
    assert publisher.run("publish", name, repository).stdout.strip() == shown
    assert requests_of(tmp_path, "PUT", "blobs/uploads") == uploads
    _, patched = add_image(publisher.workspace, (1, 2, 4), "6" * 64)
    publisher.run("publish", patched, repository, "--index", "patched.json")
    assert requests_of(tmp_path, "PUT", "blobs/uploads") == uploads + 2
    user.run("pull", RECIPE, "--index", "patched.json")
    assert requests_of(tmp_path, "GET", "blobs/sha256") == 3 + 1 + 1 + 1, "layers and config, then what changed"

    # Another repository of the registry gets the layers from this one.
    publisher.run("publish", name, f"{address}/sm120kit/other", "--index", "other.json")
    assert requests_of(tmp_path, "PUT", "blobs/uploads") == uploads + 3, "the config"
    assert requests_of(tmp_path, "POST", "mount=") == 3


def test_tag_with_another_image_is_not_moved(publisher: Host, address: str, tmp_path: Path) -> None:
    _, name = add_image(publisher.workspace, (1, 2))
    repository = f"{address}/sm120kit/vllm"
    publisher.run("publish", name, repository)
    (tmp_path / "images.json").unlink()
    again = publisher.run("publish", name, repository).stdout.strip()
    assert again.startswith(f"{repository}@sha256:"), "the same image, which the index did not list"
    shutil.rmtree(publisher.state)
    publisher.state.mkdir()
    add_image(publisher.workspace, (1, 5))
    refused = publisher.run("publish", name, repository, "--index", "new.json", code=TagTaken.exit_code).stderr
    assert "exists in the registry with another image" in refused
    with RegistryClient(repository) as client:
        assert again.endswith(client.in_registry(name.rpartition(":")[2]) or "absent")


def test_changed_layer_is_not_published(publisher: Host, address: str, tmp_path: Path) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2))
    path = publisher.layout.path(publisher.layout.layers(manifest)[0].digest)
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    assert str(path) in publisher.run("publish", name, f"{address}/x", code=ArtifactChanged.exit_code).stderr
    assert requests_of(tmp_path, "POST", "") == requests_of(tmp_path, "PUT", "") == 0
    assert not (tmp_path / "images.json").exists()
    for target in ("image.tar", "directory"):
        assert str(path) in publisher.run("image", "export", name, target, code=ArtifactChanged.exit_code).stderr
        assert not (tmp_path / target).exists()


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


def test_killed_publish_and_pull_are_completed_by_the_same_command(
    publisher: Host, user: Host, address: str, tmp_path: Path
) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2, 3, 4), size=6 * 2**20)
    repository = f"{address}/sm120kit/vllm"
    started = time.monotonic()
    publisher.run("publish", name, f"{address}/other", "--index", "other.json")
    seconds = time.monotonic() - started
    shutil.rmtree(publisher.layout.directory / "compressed")
    delays = [seconds * part / 8 for part in range(1, 8)]
    assert killed(publisher, delays, "publish", name, repository)
    (entry,) = json.loads((tmp_path / "images.json").read_text())["images"]
    (other,) = json.loads((tmp_path / "other.json").read_text())["images"]
    assert entry["digest"] == other["digest"]
    assert killed(user, delays, "pull", RECIPE)
    user.layout.verify(manifest)
    assert user.layout.images() == [(publisher.layout.images()[0][0], (name,))]
    user.run("pull", RECIPE)
    assert not any((user.layout.directory / "partial").iterdir())


def test_export_refuses_absent_images_and_existing_directories(publisher: Host, tmp_path: Path) -> None:
    _, name = add_image(publisher.workspace, (1,))
    (tmp_path / "directory").mkdir()
    publisher.run("image", "export", name, "directory", code=StateUnwritable.exit_code)
    assert "no image absent" in publisher.run("image", "export", "absent", "x.tar", code=NoSuchImage.exit_code).stderr
    publisher.run("image", "load", "absent", code=NoSuchImage.exit_code)
    publisher.run("image", "load", name, code=60)
    assert {path.name for path in tmp_path.iterdir()} == {"state", "directory"} and not any((tmp_path / "directory").iterdir())


@with_skopeo
def test_skopeo_reads_exported_images(publisher: Host, address: str, tmp_path: Path) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2))
    image = publisher.layout.image(manifest)
    publisher.run("image", "export", name, "directory")
    publisher.run("image", "export", name, "image.tar")
    publisher.run("image", "export", name, "image.tar")  # replaced
    for source in ("oci:directory", "oci-archive:image.tar", f"oci:{publisher.layout.directory}"):
        shown = json.loads(skopeo(tmp_path, "inspect", source))
        assert shown["Digest"] == manifest and tuple(shown["Layers"]) == image.layers and shown["Labels"] == image.labels
    first = next((tmp_path / "directory" / "blobs" / "sha256").iterdir())
    assert first.stat().st_nlink == 2, "a hard link"
    skopeo(tmp_path, "copy", "--dest-tls-verify=false", "oci:directory", f"docker://{address}/copied:tag")
    pulled = Layout(tmp_path / "pulled")
    with RegistryClient(f"{address}/copied") as client:
        remote = client.image(client.in_registry("tag") or "", PLATFORM)
        assert pulled.image(client.pull(pulled, remote).digest).content == image.content
    publisher.run("publish", name, f"{address}/sm120kit/vllm", "--compression", "zstd")
    (entry,) = json.loads((tmp_path / "images.json").read_text())["images"]
    source = f"docker://{entry['repository']}@{entry['digest']}"
    skopeo(tmp_path, "copy", "--src-tls-verify=false", source, "oci:from-registry")


def skopeo(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["skopeo", *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The client of a daemon, which ``DOCKER_HOST`` names."""
    import docker

    with containers.dockerd(Path(f"/tmp/sm120kit-loading-{os.getpid()}")) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        yield docker.DockerClient(base_url=daemon.socket)


class TestDaemon:
    """Images in a container daemon."""

    pytestmark = with_daemon

    def test_load_and_publish_and_pull(self, client: Any, publisher: Host, user: Host, address: str, tmp_path: Path) -> None:
        environment = {"DOCKER_HOST": os.environ["DOCKER_HOST"]}
        publisher.env = user.env = environment
        manifest, name = add_image(publisher.workspace, (1, 2, 3))
        expected = publisher.layout.image(manifest)
        assert publisher.run("image", "load", name).stdout.strip() == expected.id
        loaded = Daemon().find(name)
        assert loaded.content == expected.content and loaded.layers == expected.layers and loaded.id == expected.id

        # An image with another last layer: the daemon has the others, and they are not sent.
        patched, patched_name = add_image(publisher.workspace, (1, 2, 4), "6" * 64)
        image = publisher.layout.image(patched)
        sent = loading.archive(publisher.layout, patched, (), loading._common_layers(image, Daemon()))
        assert sum(map(len, sent)) < 1.2 * 2**20
        client.images.remove(name, force=True)
        publisher.run("image", "load", name)
        publisher.run("image", "load", patched_name)
        assert Daemon().find(patched_name).content == image.content
        packed = b"".join(client.images.get(patched_name).save())
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            sizes = [member.size for member in archive.getmembers() if member.size > 2**20]
        assert len(sizes) == 3, "complete in the daemon"

        # A tag of another image is not moved.
        client.images.get(name).tag(*patched_name.rsplit(":", 1))
        assert "tags are never moved" in publisher.run("image", "load", patched_name, code=TagTaken.exit_code).stderr
        client.images.remove(patched_name)

        # `docker load` reads an exported archive.
        publisher.run("image", "export", patched_name, "image.tar")
        for reference in (name, image.id):
            client.images.remove(reference, force=True)
        (by_docker,) = client.images.load((tmp_path / "image.tar").read_bytes())
        assert by_docker.tags == [patched_name] and Daemon().find(patched_name).content == image.content

        # Docker pulls what was published here, and a pull loads the image; the daemon publishes what only it has.
        publisher.run("publish", name, f"{address}/sm120kit/vllm")
        (entry,) = json.loads((tmp_path / "images.json").read_text())["images"]
        pulled = client.images.pull(f"{entry['repository']}@{entry['digest']}")
        assert pulled.id == expected.id
        client.images.remove(pulled.id, force=True)
        assert user.run("pull", RECIPE, "--no-load").stdout.strip() == name and Daemon().inspect(name) is None
        assert user.run("pull", RECIPE).stdout.strip() == name and Daemon().find(name).content == expected.content
        shutil.rmtree(publisher.layout.directory)
        publisher.run("publish", name, f"{address}/sm120kit/daemon", "--index", "daemon.json")
        (entry,) = json.loads((tmp_path / "daemon.json").read_text())["images"]
        shutil.rmtree(user.layout.directory)
        user.run("pull", RECIPE, "--index", "daemon.json", "--no-load")
        assert user.layout.image((user.layout.find(name) or expected).digest).content == expected.content
        user.run("image", "load", name)

    def test_layers_that_the_daemon_lost_are_sent(self, client: Any, publisher: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        manifest, _ = add_image(publisher.workspace, (1, 2))
        layers = publisher.layout.image(manifest).layers
        monkeypatch.setattr(Daemon, "layers", lambda self: [layers])
        assert loading.load(publisher.layout, manifest, Daemon()).content == publisher.layout.image(manifest).content

    def test_load_of_changed_layer_is_refused(self, client: Any, publisher: Host) -> None:
        manifest, name = add_image(publisher.workspace, (1, 2))
        path = publisher.layout.path(publisher.layout.layers(manifest)[1].digest)
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
        publisher.env = {"DOCKER_HOST": os.environ["DOCKER_HOST"]}
        assert "diffID" in publisher.run("image", "load", name, code=60).stderr
        assert not client.images.list()
