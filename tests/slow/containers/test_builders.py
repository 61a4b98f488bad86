"""The image of a FlashInfer wheel, written in layers without a daemon and by the Dockerfile, has the same files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

import containers
import pytest
from small_image import ImageHost

from sm120kit.core.errors import DaemonUnreachable

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


@pytest.fixture(scope="module")
def host(image_host: ImageHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageHost]:
    """A daemon and a state directory of these tests' own, with the finished wheel."""
    state = tmp_path_factory.mktemp("own") / "state"
    shutil.copytree(image_host.state, state, symlinks=True)
    with containers.dockerd(tmp_path_factory.mktemp("d") / "d") as running:
        yield replace(image_host, state=state, socket=running.socket)


@pytest.fixture(scope="module")
def without_daemon(host: ImageHost) -> ImageHost:
    """The same state directory and data, without a daemon."""
    return replace(host, socket=f"unix://{host.directory}/absent")


@pytest.fixture(scope="module")
def layers(without_daemon: ImageHost) -> str:
    """The id of the image in the state directory."""
    return without_daemon.image("debian-12-python").stdout.strip()


def test_image_of_layers_passes_its_checks_and_is_not_written_twice(without_daemon: ImageHost, layers: str) -> None:
    tag = without_daemon.run("verify", "image", layers).stdout.strip().splitlines()[-1]
    assert tag.startswith("sm120kit/flashinfer:0.6.6-sm120kit.")
    blobs = sorted((without_daemon.state / "oci" / "blobs" / "sha256").iterdir())
    again = without_daemon.image("debian-12-python")
    assert again.stdout.strip() == layers and "nothing to do" in again.stderr
    assert sorted((without_daemon.state / "oci" / "blobs" / "sha256").iterdir()) == blobs


def test_builder_docker_on_the_same_base_gives_the_same_files(host: ImageHost, without_daemon: ImageHost, layers: str) -> None:
    without_daemon.image("debian-12-python", "--builder", "docker", code=DaemonUnreachable.exit_code)
    docker = host.image("debian-12-python", "--builder", "docker").stdout.strip()
    assert docker != layers
    assert host.run("verify", "image", docker).stdout.strip().splitlines()[-1].startswith("sm120kit/flashinfer:")
