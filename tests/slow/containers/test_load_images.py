"""Load images of a layout into a daemon, and kill commands that transfer images."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import containers
import pytest
from layout_images import RECIPE, Host, add_image, killed
from small_assembly import SmallImage

from sm120kit.core.errors import AlreadyExists, SystemRefused
from sm120kit.images.docker import Daemon
from sm120kit.images.image_records import start_settings

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The client of a daemon, which ``DOCKER_HOST`` names."""
    import docker

    with containers.dockerd() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        yield docker.DockerClient(base_url=daemon.socket)


def saved(image: Any, directory: Path) -> Path:
    """The archive of an image of the daemon."""
    with (directory / "saved.tar").open("wb") as file:
        file.writelines(image.save(chunk_size=2**20))
    return directory / "saved.tar"


def listed(layer: Path) -> dict[str, tuple[object, ...]]:
    """The entries of a layer: type, mode, owner, group, time, target and sha256; a hard link as the file that it is."""
    entries = {}
    with tarfile.open(layer) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() or member.islnk() else None
            digest = hashlib.sha256(content.read()).hexdigest() if content else member.linkname
            kind = tarfile.REGTYPE if member.islnk() else member.type
            entries[member.name.rstrip("/")] = (kind, member.mode & 0o7777, member.uid, member.gid, member.mtime, digest)
    return entries


def test_killed_publish_and_pull_are_completed_by_the_same_command(
    publisher: Host, user: Host, address: str, tmp_path: Path
) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2, 3, 4), size=6 * 2**20)
    repository = f"{address}/sm120kit/vllm"
    started = time.monotonic()
    publisher.run("publish", name, f"{address}/other", "--index", "other.json")
    seconds = time.monotonic() - started
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


def test_dockerfile_gives_the_same_files_and_settings(client: Any, tmp_path: Path) -> None:
    small = SmallImage(tmp_path)
    image, _ = small.assemble()
    host, context = Host(tmp_path, tmp_path / "state"), tmp_path / "context"
    host.run("image", "export", image.id, context, "--dockerfile")
    host.run("image", "export", image.id, context, "--dockerfile", code=SystemRefused.exit_code)  # it exists
    built, _ = client.images.build(path=str(context), network_mode="none", rm=True)
    manifest = small.layout.find(image.id)
    assert manifest is not None
    settings = start_settings(small.layout.config(manifest.digest)["config"])
    assert start_settings(client.api.inspect_image(built.id)["Config"]) == settings
    with tarfile.open(saved(built, tmp_path)) as archive:
        (document,) = json.load(archive.extractfile("manifest.json") or io.BytesIO())
        archive.extractall(tmp_path / "built")
    theirs = {name: entry for layer in document["Layers"] for name, entry in listed(tmp_path / "built" / layer).items()}
    ours = {name: entry for layer in image.layers for name, entry in listed(small.layout.path(layer)).items()}
    assert {*ours} == {*theirs}
    assert {name: (entry, theirs[name]) for name, entry in ours.items() if theirs[name] != entry} == {}


def test_load_and_publish_and_pull(client: Any, publisher: Host, user: Host, address: str, tmp_path: Path) -> None:
    environment = {"DOCKER_HOST": os.environ["DOCKER_HOST"]}
    publisher.env = user.env = environment
    manifest, name = add_image(publisher.workspace, (1, 2, 3))
    expected = publisher.layout.image(manifest)
    assert publisher.run("image", "load", name).stdout.strip() == expected.id
    loaded = Daemon().find(name)
    assert loaded.content == expected.content and loaded.layers == expected.layers and loaded.id == expected.id

    # An image with another last layer.
    patched, patched_name = add_image(publisher.workspace, (1, 2, 4), "6" * 64)
    image = publisher.layout.image(patched)
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
    assert "tags are never moved" in publisher.run("image", "load", patched_name, code=AlreadyExists.exit_code).stderr
    client.images.remove(patched_name)

    # `docker load` reads an exported archive.
    publisher.run("image", "export", patched_name, "image.tar")
    for reference in (name, image.id):
        client.images.remove(reference, force=True)
    (by_docker,) = client.images.load((tmp_path / "image.tar").read_bytes())
    assert by_docker.tags == [patched_name] and Daemon().find(patched_name).content == image.content

    # A pull loads the image. Docker before 23, as here, cannot pull zstd itself.
    publisher.run("publish", name, f"{address}/sm120kit/vllm")
    client.images.remove(image.id, force=True)
    assert user.run("pull", RECIPE, "--no-load").stdout.strip() == name and Daemon().inspect(name) is None
    assert user.run("pull", RECIPE).stdout.strip() == name and Daemon().find(name).content == expected.content


def test_killed_load_is_completed_by_the_same_command(client: Any, publisher: Host) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2), size=24 * 2**20)
    _, other = add_image(publisher.workspace, (1, 3), "6" * 64, size=24 * 2**20)
    publisher.env = {"DOCKER_HOST": os.environ["DOCKER_HOST"]}
    started = time.monotonic()
    publisher.run("image", "load", other)
    seconds = time.monotonic() - started
    client.images.remove(other, force=True)
    assert killed(publisher, [seconds * part / 6 for part in range(2, 6)], "image", "load", name)
    assert Daemon().find(name).content == publisher.layout.image(manifest).content
    assert [image.tags for image in client.images.list()] == [[name]]


def test_load_of_changed_layer_is_refused(client: Any, publisher: Host) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2))
    path = publisher.layout.path(publisher.layout.layers(manifest)[1].digest)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    publisher.env = {"DOCKER_HOST": os.environ["DOCKER_HOST"]}
    assert "diffID" in publisher.run("image", "load", name, code=60).stderr
    assert not client.images.list()
