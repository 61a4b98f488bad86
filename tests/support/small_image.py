"""Fixtures for a small real image, built and verified once for all tests: patched FlashInfer with one compiled module, a CPU
build of torch, Debian; 1.2 GB. Also its daemon, registry and base. ``conftest.py`` makes the fixtures available to all tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import containers
import pytest

ROOT = Path(__file__).parents[2]
CLOSURE = Path(__file__).with_name("image_closure.json")
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
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return containers.debian(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def image_host(
    daemon: containers.Dockerd, built: tuple[Path, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> ImageHost:
    """The finished build of the tiny wheel, and a daemon."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(data, root, dirs_exist_ok=True)
    shutil.copytree(ROOT / "image_programs", root / "image_programs")
    return ImageHost(built[0], root, daemon.socket, tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="session")
def base(image_host: ImageHost, debian: Path) -> str:
    return import_base(image_host, debian)


def import_base(image_host: ImageHost, packed: Path) -> str:
    """Import a base image and return its id."""
    output = image_host.client.api.import_image_from_file(str(packed), repository="base", tag="test")
    return str(json.loads(output.strip().splitlines()[-1])["status"])


def tampered(image_host: ImageHost, image: str, command: str) -> str:
    """Run ``command`` as root in ``image`` and commit the result with the same labels and settings; returns its id."""
    container = image_host.client.containers.create(image, ["sh", "-c", command], user="0", network_mode="none")
    container.start()
    assert container.wait()["StatusCode"] == 0, container.logs()
    config = image_host.client.api.inspect_image(image)["Config"]
    changed = container.commit(conf=config)
    container.remove()
    return str(changed.id)


@pytest.fixture(scope="session")
def image(image_host: ImageHost, base: str) -> str:
    """The id of the image, which is not verified yet. The daemon has it, too."""
    built = image_host.image(base).stdout.strip()
    assert "nothing to do" in image_host.image(base).stderr
    return image_host.run("image", "load", built).stdout.strip()


@pytest.fixture(scope="session")
def verified(image_host: ImageHost, image: str) -> str:
    """The tag of the image after its verification."""
    return image_host.run("verify", "image", image).stdout.strip().splitlines()[-1]
