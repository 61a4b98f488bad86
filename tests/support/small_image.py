"""A host with a daemon and the finished wheel of a FlashInfer with one compiled module. ``conftest.py`` has its fixtures."""

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


@pytest.fixture(scope="session")
def daemon() -> Iterator[containers.Dockerd]:
    with containers.dockerd() as running:
        yield running


@pytest.fixture(scope="session")
def image_host(
    daemon: containers.Dockerd, built: tuple[Path, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> ImageHost:
    """The finished build of the tiny wheel, and a daemon."""
    root = tmp_path_factory.mktemp("data")
    shutil.copytree(data, root, dirs_exist_ok=True)
    shutil.copytree(ROOT / "image_programs", root / "image_programs")
    return ImageHost(built[0], root, daemon.socket, tmp_path_factory.mktemp("folder"))


def added_to_layout(changed: Any, layout: Layout) -> str:
    """Add an image of the daemon to the state directory, and return its id there."""
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
    return layout.image(layout.add_manifest(manifest_of(config, layers)).digest).id
