"""Fixtures for a small real image, built and verified once for all tests: patched FlashInfer with one compiled module, a CPU
build of torch, Debian; 1.2 GB. Also its daemon and registry. ``conftest.py`` makes the fixtures available to all tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import containers
import pytest

from sm120kit.images.oci import CONFIG, LAYER, Layout, manifest_of

ROOT = Path(__file__).parents[2]
CLOSURE = Path(__file__).with_name("image_closure.json")
BASE = "debian-12-python"
WITHOUT_CHECKS = Path(__file__).with_name("image_without_checks.py")


@dataclass
class ImageHost:
    """A host that runs sm120kit: state directory, data, socket of the daemon, working directory."""

    state: Path
    data: Path
    socket: str
    directory: Path

    def argv(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "sm120kit", *map(str, arguments)]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SM120KIT_STATE": str(self.state),
            "SM120KIT_DATA": str(self.data),
            "DOCKER_HOST": self.socket,
        }

    def run(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run_program(self.argv(*arguments), code)

    def run_program(self, argv: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(argv, env=self.environment, cwd=self.directory, capture_output=True, text=True)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        return done

    def image(self, base: str, *options: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        arguments = ["flashinfer@0.6.6", "--kernels", "tiny", "--base", base, "--closure", CLOSURE, *options]
        return self.without_checks(*arguments, code=code)

    def without_checks(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Build an image that is not checked and not tagged."""
        return self.run_program([sys.executable, *map(str, (WITHOUT_CHECKS, *arguments))], code)

    @property
    def client(self) -> Any:
        import docker

        return docker.DockerClient(base_url=self.socket, timeout=300)

    def tags(self) -> set[str]:
        """Tags of the daemon."""
        return {tag for image in self.client.images.list() for tag in image.tags}

    def names(self) -> set[str]:
        """Names of sm120kit's images in the state directory."""
        listed = json.loads(self.run("image", "list", "--json").stdout)
        return {tag for entry in listed for tag in entry["tags"]}


@pytest.fixture(scope="session")
def daemon() -> Iterator[containers.Dockerd]:
    with containers.dockerd() as running:
        yield running


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a registry, and its storage directory."""
    root = tmp_path_factory.mktemp("registry")
    with containers.registry(root) as address:
        yield address, root / "store"


@pytest.fixture(scope="session")
def image_host(
    daemon: containers.Dockerd, built: tuple[Path, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> ImageHost:
    """The finished build of the tiny wheel, and a daemon."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(data, root, dirs_exist_ok=True)
    shutil.copytree(ROOT / "image_programs", root / "image_programs")
    return ImageHost(built[0], root, daemon.socket, tmp_path_factory.mktemp("folder"))


def tampered(image_host: ImageHost, image: str, command: str) -> tuple[str, str]:
    """Run ``command`` as root in ``image`` and commit the result with the same labels and settings.

    Returns its id, of the daemon and of the state directory.
    """
    client, layout = image_host.client, Layout(image_host.state / "oci")
    container = client.containers.create(image, ["sh", "-c", command], user="0", network_mode="none")
    container.start()
    assert container.wait()["StatusCode"] == 0, container.logs()
    changed = container.commit(conf=client.api.inspect_image(image)["Config"])
    container.remove()
    with tempfile.TemporaryFile() as file:
        file.writelines(changed.save())
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:

            def read(name: str) -> bytes:
                content = archive.extractfile(name)
                assert content is not None
                return content.read()

            (saved,) = json.loads(read("manifest.json"))
            layers = [layout.add_blob(read(name), LAYER) for name in saved["Layers"]]
            config = layout.add_blob(read(saved["Config"]), CONFIG)
    return str(changed.id), layout.image(layout.add_manifest(manifest_of(config, layers)).digest).id


@pytest.fixture(scope="session")
def image(image_host: ImageHost) -> str:
    """The id of the image, which is not verified yet. The daemon has it, too."""
    built = image_host.image(BASE).stdout.strip()
    assert "nothing to do" in image_host.image(BASE).stderr
    return image_host.run("image", "load", built).stdout.strip()


@pytest.fixture(scope="session")
def verified(image_host: ImageHost, image: str) -> str:
    """The tag of the image after its verification."""
    return image_host.run("verify", "image", image).stdout.strip().splitlines()[-1]
