"""Publish, pull and export images of a layout with real programs: docker-registry and skopeo."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import layers
import pytest
from layout_images import RECIPE, Host, add_image

from sm120kit.core.errors import AlreadyExists, Mismatch, NotFound, SystemRefused
from sm120kit.core.workspace import MARKER
from sm120kit.images.distribution import RegistryClient
from sm120kit.recipes import bases

pytestmark = pytest.mark.skipif(not shutil.which("docker-registry"), reason="not installed: docker-registry")
with_skopeo = pytest.mark.skipif(not shutil.which("skopeo"), reason="not installed: skopeo")


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

    # Published again, nothing is sent; with another last layer, only that one and the config.
    assert publisher.run("publish", name, repository).stdout.strip() == shown
    assert requests_of(tmp_path, "PUT", "blobs/uploads") == uploads
    _, patched = add_image(publisher.workspace, (1, 2, 4), "6" * 64)
    publisher.run("publish", patched, repository, "--index", "patched.json")
    assert requests_of(tmp_path, "PUT", "blobs/uploads") == uploads + 2
    user.run("pull", RECIPE, "--index", "patched.json")
    assert requests_of(tmp_path, "GET", "blobs/sha256") == 4 + 1 + 2, "the image, the config to compare, what changed"


def test_tag_with_another_image_is_not_moved(publisher: Host, address: str, tmp_path: Path) -> None:
    _, name = add_image(publisher.workspace, (1, 2))
    repository = f"{address}/sm120kit/vllm"
    publisher.run("publish", name, repository)
    (tmp_path / "images.json").unlink()
    again = publisher.run("publish", name, repository).stdout.strip()
    assert again.startswith(f"{repository}@sha256:"), "the same image, which the index did not list"
    shutil.rmtree(publisher.state)
    publisher.state.mkdir()
    (publisher.state / MARKER).touch()
    add_image(publisher.workspace, (1, 5))
    refused = publisher.run("publish", name, repository, "--index", "new.json", code=AlreadyExists.exit_code).stderr
    assert "exists in the registry with another image" in refused
    with RegistryClient(repository) as client:
        assert again.endswith(client.in_registry(name.rpartition(":")[2]) or "absent")


def test_changed_layer_is_not_published(publisher: Host, address: str, tmp_path: Path) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2))
    path = publisher.layout.path(publisher.layout.layers(manifest)[0].digest)
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    assert str(path) in publisher.run("publish", name, f"{address}/x", code=Mismatch.exit_code).stderr
    assert requests_of(tmp_path, "POST", "") == requests_of(tmp_path, "PUT", "") == 0
    assert not (tmp_path / "images.json").exists()
    assert str(path) in publisher.run("image", "export", name, "image.tar", code=Mismatch.exit_code).stderr
    assert not (tmp_path / "image.tar").exists()


def test_export_refuses_absent_images_and_existing_directories(publisher: Host, tmp_path: Path) -> None:
    _, name = add_image(publisher.workspace, (1,))
    (tmp_path / "directory").mkdir()
    publisher.run("image", "export", name, "directory", code=2)
    assert "no image absent" in publisher.run("image", "export", "absent", "x.tar", code=NotFound.exit_code).stderr
    publisher.run("image", "load", "absent", code=NotFound.exit_code)
    publisher.run("image", "load", name, code=60)
    assert {path.name for path in tmp_path.iterdir()} == {"state", "directory"} and not any((tmp_path / "directory").iterdir())


@with_skopeo
def test_skopeo_reads_exported_images(publisher: Host, address: str, tmp_path: Path) -> None:
    manifest, name = add_image(publisher.workspace, (1, 2))
    image = publisher.layout.image(manifest)
    publisher.run("image", "export", name, "image.tar")
    publisher.run("image", "export", name, "image.tar", code=SystemRefused.exit_code)
    publisher.run("image", "export", name, "image.tar", "--overwrite")
    assert (tmp_path / "image.tar").stat().st_mode & 0o044 == 0o044, "read by other users"
    for source in ("oci-archive:image.tar", f"oci:{publisher.layout.directory}"):
        shown = json.loads(skopeo(tmp_path, "inspect", source))
        assert shown["Digest"] == manifest and tuple(shown["Layers"]) == image.layers and shown["Labels"] == image.labels
    publisher.run("publish", name, f"{address}/sm120kit/vllm")
    (entry,) = json.loads((tmp_path / "images.json").read_text())["images"]
    source = f"docker://{entry['repository']}@{entry['digest']}"
    skopeo(tmp_path, "copy", "--src-tls-verify=false", source, "oci:from-registry")


def skopeo(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["skopeo", *arguments], cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("architecture", "machine"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_sbom_lists_the_packages_of_the_base(
    architecture: str, machine: str, publisher: Host, address: str, tmp_path: Path
) -> None:
    (locked, *_) = bases.read_lock("debian-12", machine)
    status = (
        f"Package: {locked.name}\nStatus: install ok installed\nVersion: {locked.version}\n"
        f"Architecture: {locked.architecture}\nDescription: a\n continued: line\n\n"
        "Package: other\nStatus: install ok installed\nArchitecture: all\nVersion: 1:2+b~c\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n"
    )
    system = b'NAME="Debian"\nID=debian\nVERSION_ID="12"\n'
    members = [("var/lib/dpkg/status", status.encode(), {}), ("usr/lib/os-release", system, {})]
    base = layers.add_image(publisher.layout, [layers.packed(*members)], {})
    name = {"org.opencontainers.image.base.name": "debian-12", "org.opencontainers.image.base.digest": base.digest}
    _, reference = add_image(publisher.workspace, (1,), more=name, machine=architecture)
    publisher.run("publish", reference, f"{address}/sm120kit/vllm")
    (written,) = tmp_path.glob("*.cdx.json")
    (listed,) = (part for part in json.loads(written.read_text())["components"] if part["bom-ref"] == "base")
    purl = f"pkg:deb/debian/{locked.name}@{quote(locked.version, safe='~.+-').replace('+', '%2B')}"
    assert [package["purl"] for package in listed["components"]] == sorted(
        [f"{purl}?arch={locked.architecture}&distro=debian-12", "pkg:deb/debian/other@1:2%2Bb~c?arch=all&distro=debian-12"]
    )
    hashes = {package["name"]: package.get("hashes") for package in listed["components"]}
    assert hashes == {locked.name: [{"alg": "SHA-256", "content": locked.sha256}], "other": None}
