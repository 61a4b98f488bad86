"""Forged indexes and old images, with a real registry; the images contain a few files and sm120kit's labels."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from layout_images import RECIPE, VERSION, Host, add_image, labels

from sm120kit.core.errors import AlreadyExists, BadInput, NotAttested, NotFound, NotTrusted, NotVerified
from sm120kit.images.oci import MANIFEST

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not shutil.which("docker-registry"), reason="not installed: docker-registry")


def new_key(directory: Path, name: str) -> Path:
    """Write a new key to ``NAME.pem`` and its public part to ``NAME.pub``; returns the first."""
    pem, made = serialization.Encoding.PEM, ed25519.Ed25519PrivateKey.generate()
    private = made.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = made.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (directory / f"{name}.pem").write_bytes(private)
    (directory / f"{name}.pub").write_bytes(public)
    return directory / f"{name}.pem"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return new_key(tmp_path, "key")


@pytest.fixture
def names(publisher: Host, address: str, key: Path, tmp_path: Path) -> tuple[str, str]:
    """The names of two images that were published and signed, in old.json and new.json."""
    new_key(tmp_path, "other")
    published = []
    for seed, index in enumerate(("old", "new")):
        _, name = add_image(publisher.workspace, (seed,), f"{4 + seed}" * 64)
        publisher.run("publish", name, f"{address}/sm120kit/vllm", "--index", f"{index}.json", "--key", key)
        published.append(name)
        time.sleep(1.1)  # the time of publishing has whole seconds
    return published[0], published[1]


def test_pull_with_signatures_and_ages(user: Host, names: tuple[str, str]) -> None:
    old, new = names
    trusting = ("--trust", "key.pub")

    # Without a key each use warns; with a key, that key must have signed.
    assert "signature not verified; pass `--trust KEY`" in user.run("pull", RECIPE, "--index", "old.json").stderr
    quiet = user.run("pull", RECIPE, "--index", "old.json", *trusting)
    assert quiet.stdout.strip() == old and "warning" not in quiet.stderr
    user.run("pull", RECIPE, "--index", "old.json", "--trust", "other.pub", code=NotAttested.exit_code)

    # After a newer image was pulled, the older image is refused although it is signed.
    assert user.run("pull", RECIPE, "--index", "new.json", *trusting).stdout.strip() == new
    user.run("image", "rm", old)
    refused = user.run("pull", RECIPE, "--index", "old.json", *trusting, code=NotTrusted.exit_code).stderr
    assert "older than" in refused and "--allow-older" in refused and user.layout.find(old) is None
    allowed = user.run("pull", RECIPE, "--index", "old.json", *trusting, "--allow-older")
    assert allowed.stdout.strip() == old and user.layout.find(old)
    user.run("pull", RECIPE, "--index", "old.json", *trusting, code=NotTrusted.exit_code)


def test_neither_an_index_nor_a_label_moves_a_tag(user: Host, names: tuple[str, str], tmp_path: Path) -> None:
    _, new = names
    victim, _ = add_image(user.workspace, (7,), "7" * 64)
    user.layout.tag(victim, "python:3.12")
    (entry,) = json.loads((tmp_path / "new.json").read_text())["images"]
    record = entry["verified"]
    claims = record | {"reference": "python:3.12"}
    relabelled = labels("5" * 64) | {"sm120kit.reference": "python:3.12"}
    for verified in (claims, claims | {"image": record["image"] | {"labels": relabelled}}):
        (tmp_path / "forged.json").write_text(json.dumps({"format": 1, "images": [entry | {"verified": verified}]}))
        refused = user.run("pull", RECIPE, "--index", "forged.json", code=NotVerified.exit_code).stderr
        assert "lists an image as 'python:3.12'" in refused
    forged, _ = add_image(user.workspace, (8,), "8" * 64, more={"sm120kit.reference": "python:3.12"})
    assert "has the label python:3.12" in user.run("verify", "image", forged, code=NotVerified.exit_code).stderr

    user.layout.tag(victim, new)
    refused = user.run("pull", RECIPE, "--index", "new.json", code=AlreadyExists.exit_code).stderr
    assert "is another local image" in refused and "sm120kit image rm" in refused
    found = [user.layout.find(name) for name in ("python:3.12", new)]
    assert [listed and listed.digest for listed in found] == [victim, victim]


@pytest.mark.skipif(not shutil.which("skopeo"), reason="not installed: skopeo")
def test_one_name_for_two_machines(publisher: Host, user: Host, address: str, key: Path, tmp_path: Path) -> None:
    """Docker and skopeo select by machine in the OCI index, pull by platform; each image has SBOM, statement and export."""
    images = {"amd64": RECIPE, "arm64": f"{RECIPE}-spark"}
    names, repository, published = {}, f"{address}/sm120kit/vllm", {}
    for seed, (machine, recipe) in enumerate(images.items()):
        _, names[machine] = add_image(
            publisher.workspace, (seed,), f"{4 + seed}" * 64, more={"sm120kit.recipe": recipe}, machine=machine
        )
        done = publisher.run("publish", names[machine], repository, "--key", key, "--json")
        published[machine] = json.loads(done.stdout)
    assert published["amd64"]["multiarch"] == "", "one machine needs no index"
    name = published["arm64"]["multiarch"]
    tag, _, digest = name.partition("@")
    assert tag.startswith(f"{repository}:{VERSION}-multiarch.") and digest.startswith("sha256:")
    for machine in images:
        raw = subprocess.run(
            ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{tag}"], capture_output=True, check=True
        ).stdout
        listed = {each["platform"]["architecture"]: each["digest"] for each in json.loads(raw)["manifests"]}
        assert listed == {each: entry["digest"] for each, entry in published.items()}
        shown = subprocess.run(
            ["skopeo", f"--override-arch={machine}", "inspect", "--tls-verify=false", f"docker://{tag}"],
            capture_output=True,
            check=True,
        )
        assert json.loads(shown.stdout)["Architecture"] == machine
        attested = published[machine]["attested"]
        stated = json.loads((tmp_path / attested["sbom"]["path"]).read_text())["metadata"]["component"]
        platform = {"name": "sm120kit:platform", "value": f"linux/{machine}"}
        assert attested["signed"] and platform in stated["properties"] and listed[machine].partition(":")[2] in stated["purl"]
        pulled = user.run("pull", RECIPE, "--platform", f"linux/{machine}", "--trust", key.with_suffix(".pub"))
        assert pulled.stdout.strip() == names[machine]
        user.run("image", "export", names[machine], f"{machine}.tar")
        config = subprocess.run(
            ["skopeo", f"--override-arch={machine}", "inspect", f"oci-archive:{machine}.tar"],
            cwd=user.directory,
            capture_output=True,
            check=True,
        )
        assert json.loads(config.stdout)["Architecture"] == machine
    again = publisher.run("publish", names["amd64"], repository, "--json")
    assert json.loads(again.stdout)["multiarch"] == name, "it follows from the images"
    assert "has no image" in user.run("pull", f"{RECIPE}-spark", "--platform", "linux/amd64", code=NotFound.exit_code).stderr


def test_signed_statement_is_about_the_manifest_in_the_registry(names: tuple[str, str], address: str, tmp_path: Path) -> None:
    (entry,) = json.loads((tmp_path / "new.json").read_text())["images"]
    envelope = json.loads((tmp_path / entry["attested"]["statement"]["path"]).read_text())
    (subject,) = json.loads(base64.b64decode(envelope["payload"]))["subject"]
    answer = httpx2.get(f"http://{address}/v2/sm120kit/vllm/manifests/{entry['tag']}", headers={"Accept": MANIFEST})
    digest = hashlib.sha256(answer.content).hexdigest()
    assert subject == {"name": entry["repository"], "digest": {"sha256": digest}} and entry["digest"] == f"sha256:{digest}"


@pytest.mark.parametrize("unusable", ["absent.pem", "key.pub"])
def test_unusable_key_is_refused_before_a_push(publisher: Host, names: tuple[str, str], address: str, unusable: str) -> None:
    command = ("publish", names[0], f"{address}/never", "--index", "never.json", "--key", unusable)
    assert unusable in publisher.run(*command, code=BadInput.exit_code).stderr
    assert httpx2.get(f"http://{address}/v2/_catalog").json() == {"repositories": ["sm120kit/vllm"]}


def test_image_without_a_signature_is_named(publisher: Host, address: str) -> None:
    _, name = add_image(publisher.workspace, (1,))
    published = publisher.run("publish", name, f"{address}/unsigned", "--quiet")
    assert "warning: " in published.stderr and "is not signed" in published.stderr


def test_script_of_ci_publishes_a_checked_image_signed_only(publisher: Host, address: str, key: Path, tmp_path: Path) -> None:
    _, name = add_image(publisher.workspace, (1,))
    program = tmp_path / "bin" / "sm120kit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sm120kit "$@" --state {publisher.state}\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "DOCKER_HOST": "unix:///nonexistent"}

    def publish(image: str, index: str, signing_key: str) -> int:
        argv = [ROOT / "ci" / "publish.sh", image, f"{address}/ci/vllm", index]
        return subprocess.run(argv, env=env | {"SIGNING_KEY": signing_key}, cwd=tmp_path).returncode

    assert publish(name, "index/images.json", key.read_text()) == 0
    (entry,) = json.loads((tmp_path / "index" / "images.json").read_text())["images"]
    assert entry["tag"] == name.rpartition(":")[2] and entry["attested"]["signed"]
    assert publish("sm120kit/vllm:unchecked", "other/images.json", key.read_text()) != 0
    assert publish(name, "other/images.json", "") != 0
    assert not (tmp_path / "other").exists()
