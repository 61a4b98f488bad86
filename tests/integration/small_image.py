"""A small real image, built and verified once for all tests: patched FlashInfer with one compiled module, a CPU build of torch,
Debian; 1.2 GB. Its daemon, registry and base are made here. The fixtures are known everywhere through ``conftest.py``.
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


@dataclass
class Place:
    """Where the tool keeps its state and which daemon it speaks to."""

    state: Path
    data: Path
    socket: str
    folder: Path

    def argv(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "sm120kit", *map(str, words)]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SM120KIT_STATE": str(self.state),
            "SM120KIT_DATA": str(self.data),
            "DOCKER_HOST": self.socket,
        }

    def run(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.argv(*words), env=self.environment, cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        return done

    def image(self, base: str, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        asked = ["image", "flashinfer@0.6.6", "--kernels", "tiny", "--base", base, "--closure", CLOSURE]
        return self.run(*asked, *words, code=code)

    @property
    def client(self) -> Any:
        import docker

        return docker.DockerClient(base_url=self.socket, timeout=300)

    def names(self) -> set[str]:
        return {tag for image in self.client.images.list() for tag in image.tags}


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[containers.Dockerd]:
    with containers.dockerd(tmp_path_factory.mktemp("d") / "d") as running:
        yield running


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A registry's address, and the directory in which it stores."""
    root = tmp_path_factory.mktemp("registry")
    with containers.registry(root) as address:
        yield address, root / "store"


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return containers.debian(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def place(daemon: containers.Dockerd, built: tuple[Path, Path], data: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The finished build of the tiny wheel, and a daemon."""
    ours = tmp_path_factory.mktemp("data")
    shutil.copytree(data, ours, dirs_exist_ok=True)
    shutil.copytree(ROOT / "dockerfiles", ours / "dockerfiles")
    shutil.copytree(ROOT / "tests" / "image", ours / "tests" / "image")
    return Place(built[0], ours, daemon.socket, tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="session")
def base(place: Place, debian: Path) -> str:
    return imported(place, debian)


def imported(place: Place, packed: Path) -> str:
    """A base image's id."""
    answer = place.client.api.import_image_from_file(str(packed), repository="base", tag="test")
    return str(json.loads(answer.strip().splitlines()[-1])["status"])


def tampered(place: Place, image: str, command: str) -> str:
    """An image like ``image``, with its labels and settings, after root ran ``command`` in it."""
    container = place.client.containers.create(image, ["sh", "-c", command], user="0", network_mode="none")
    container.start()
    assert container.wait()["StatusCode"] == 0, container.logs()
    config = place.client.api.inspect_image(image)["Config"]
    changed = container.commit(conf=config)
    container.remove()
    return str(changed.id)


@pytest.fixture(scope="session")
def image(place: Place, base: str) -> str:
    """The image's id; it has no name yet."""
    return place.image(base).stdout.strip()


@pytest.fixture(scope="session")
def verified(place: Place, image: str) -> str:
    """The name that it got."""
    return place.run("verify", "image", image).stdout.strip().splitlines()[-1]
