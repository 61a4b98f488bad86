"""Builds of the same context give the same image with each builder, also after failures on the way.

The image is the small image with four third-party wheels and without torch: it cannot pass its checks, and builds in seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import containers
import pytest
from small_image import CLOSURE, ImageHost

from sm120kit.core.digests import digest_of
from sm120kit.images.docker import Daemon

SITE = "opt/venv/lib/python3.11/site-packages"
BUILDKIT = Path("/usr/bin/docker")

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


def closure(directory: Path, *names: str) -> Path:
    """Write a closure with some of the small image's wheels."""
    complete = json.loads(CLOSURE.read_text())
    wheels = [wheel for wheel in complete["wheels"] if wheel["name"] in names]
    path = directory / f"{'-'.join(names)}.json"
    path.write_text(json.dumps(complete | {"wheels": wheels, "sha256": digest_of(wheels)}))
    return path


def program(directory: Path, name: str, text: str = "") -> dict[str, str]:
    """An environment in which ``docker`` is the program that supports BuildKit, or with ``text`` another program."""
    programs = directory / name
    programs.mkdir()
    if text:
        (programs / "docker").write_text(text)
        (programs / "docker").chmod(0o755)
    else:
        (programs / "docker").symlink_to(BUILDKIT)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


@dataclass
class BuildHost(ImageHost):
    """A host with a state directory of its own, environment variables, and a base."""

    base: str = ""
    closure: Path = CLOSURE
    variables: dict[str, str] | None = None
    prefix: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **(self.variables or {})}

    def argv(self, *arguments: object) -> list[str]:
        return [*self.prefix, *super().argv(*arguments)]

    @property
    def command(self) -> list[object]:
        arguments = ("--kernels", "tiny", "--base", self.base, "--builder", "docker", "--closure", self.closure)
        return ["image", "flashinfer@0.6.6", *arguments]

    def build(self, *options: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(*self.command, *options, code=code)

    def context(self) -> dict[str, Any]:
        """The record of the only build context in the state directory."""
        (record,) = self.state.glob("images/*/context.json")
        return dict(json.loads(record.read_text()))

    def own_state(self, directory: Path) -> BuildHost:
        """The same host with another state directory, which has the finished wheel and no image."""
        shutil.copytree(self.state, directory, ignore=shutil.ignore_patterns("images", "locks", "work", "checkouts"))
        return replace(self, state=directory)


@pytest.fixture(scope="module")
def pinned(image_host: ImageHost, base: str, registry: tuple[str, Path]) -> str:
    """The base by name and digest, as BuildKit requires."""
    name = f"{registry[0]}/base"
    image_host.client.api.tag(base, name, "pinned")
    events = [json.loads(line) for line in image_host.client.api.push(name, tag="pinned").splitlines()]
    (digest,) = (event["aux"]["Digest"] for event in events if "aux" in event)
    return f"{name}@{digest}"


@pytest.fixture(scope="module")
def builder(image_host: ImageHost, pinned: str, tmp_path_factory: pytest.TempPathFactory) -> BuildHost:
    directory = tmp_path_factory.mktemp("faults")
    four = closure(directory, "idna", "packaging", "tabulate", "tqdm")
    plain = BuildHost(image_host.state, image_host.data, image_host.socket, directory, pinned, four)
    return replace(plain.own_state(directory / "state"), variables=program(directory, "classic", "#!/bin/sh\nexit 1\n"))


@pytest.fixture(scope="module")
def classic(builder: BuildHost) -> str:
    """The image by the classic builder, built without a network after all downloads."""
    assert "without --context-only" in builder.build("--context-only").stderr
    isolated = replace(builder, prefix=("unshare", "--net"))
    assert "built" in isolated.build("--offline").stderr
    return builder.build().stdout.strip()


def test_offline_build_without_downloads_fails(builder: BuildHost, tmp_path: Path) -> None:
    host = builder.own_state(tmp_path / "state")
    shutil.rmtree(host.state / "downloads")
    assert "--offline" in replace(host, prefix=("unshare", "--net")).build("--offline", code=20).stderr
    assert not (host.state / "images").exists()


def test_offline_build_uses_downloads(builder: BuildHost, classic: str) -> None:
    assert classic.startswith("sha256:") and "nothing to do" in builder.build("--offline").stderr


@pytest.fixture(scope="module")
def buildkit(builder: BuildHost, daemon: containers.Dockerd) -> BuildHost:
    """A host with BuildKit and a state directory of its own. The daemon was killed during its first build."""
    if not BUILDKIT.exists():
        pytest.skip(f"no {BUILDKIT} (Debian: docker.io)")
    host = replace(builder.own_state(builder.directory / "other"), variables=program(builder.directory, "buildkit"))
    child = subprocess.Popen(host.argv(*host.command), env=host.environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if re.match(r"#\d+ \[.*\] RUN ", line):
            break
    daemon.kill()
    rest = child.stderr.read()
    assert child.wait() == 60, rest
    daemon.stop()
    daemon.start()
    assert not list(host.state.glob("images/*/image.json"))
    return host


def test_buildkit_resumes_and_builds_the_same_image(builder: BuildHost, classic: str, buildkit: BuildHost) -> None:
    done = buildkit.build()
    other = done.stdout.strip()
    assert re.search(r"^#\d+ writing image", done.stderr, re.M), "BuildKit did not build it"
    first, second = builder.context(), buildkit.context()
    assert first["digest"] == second["digest"] and first["directory"] != second["directory"]
    assert first["labels"]["sm120kit.tree"] == second["labels"]["sm120kit.tree"]
    assert first["locked"] == second["locked"] and first["ours"] == second["ours"]
    assert {other, classic} <= {image["image"]["id"] for image in json.loads(builder.run("image", "list", "--json").stdout)}


def test_base_of_an_image_is_looked_up_by_name_and_digest(
    builder: BuildHost, classic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", builder.socket)
    daemon = Daemon()
    image = daemon.inspect(classic)
    assert image is not None
    base = daemon.base_of(image)
    assert base is not None and image.layers[: len(base.layers)] == base.layers != ()


def test_build_after_a_failing_registry_and_a_full_disk_gives_the_same_image(
    builder: BuildHost, classic: str, registry: tuple[str, Path], tmp_path: Path
) -> None:
    """On another host without a cache, the layers have the same digests."""
    root = tmp_path / "d"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=350m", "tmpfs", root], check=True)
    stored, hidden = registry[1] / "docker", registry[1] / "hidden"
    try:
        with containers.dockerd(root) as running:
            other = replace(builder.own_state(tmp_path / "state"), socket=running.socket)
            stored.rename(hidden)
            stored.write_text("not a directory")
            other.build(code=20)
            restore = threading.Timer(2, lambda: (stored.unlink(), hidden.rename(stored)))
            restore.start()
            assert "full" in other.build(code=41).stderr
            restore.join()
            assert not list(other.state.glob("images/*/image.json")) and other.tags() == set()
            subprocess.run(["mount", "-o", "remount,size=2g", root], check=True)
            image = other.client.images.get(other.build().stdout.strip())
            assert image.attrs["RootFS"] == builder.client.images.get(classic).attrs["RootFS"]
    finally:
        if hidden.exists():
            stored.unlink(missing_ok=True)
            hidden.rename(stored)
        subprocess.run(["umount", "-l", root], check=False)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda wheel: wheel.pop("sha256"), "wheels.0.sha256"),
        (lambda wheel: wheel.update(sha256="0" * 64), "were edited"),
        (lambda wheel: wheel.update(version="9"), "were edited"),
    ],
)
def test_closure_with_an_edited_wheel_is_refused(builder: BuildHost, tmp_path: Path, edit: Any, message: str) -> None:
    lock = json.loads(builder.closure.read_text())
    edit(lock["wheels"][0])
    path = tmp_path / "closure.json"
    path.write_text(json.dumps(lock))
    assert message in replace(builder, closure=path).build(code=11).stderr


def test_closure_with_a_hash_that_the_index_does_not_have_is_refused(builder: BuildHost, tmp_path: Path) -> None:
    lock = json.loads(builder.closure.read_text())
    lock["wheels"][0]["sha256"] = "0" * 64
    path = tmp_path / "closure.json"
    path.write_text(json.dumps(lock | {"sha256": digest_of(lock["wheels"])}))
    host = replace(builder.own_state(tmp_path / "state"), closure=path)
    assert "0" * 64 in host.build(code=21).stderr
    assert not (host.state / "images").exists()
