"""Forged indexes and old images, with a real registry and daemon; the images contain a single file and sm120kit's labels."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import containers
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from sm120kit.core.errors import AlreadyExists, NotAttested, NotTrusted, NotVerified
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.docker import Daemon
from sm120kit.images.image_records import Check, CheckResult, ImageContext, VerifiedImage, image_name
from sm120kit.images.image_verification import CLAIMS

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

RECIPE, VERSION = "vllm-0.19.1", "0.19.1"
OLD, NEW, OTHER = ("4" * 64, "6" * 64, "8" * 64)
"""Digests of build contexts."""


@dataclass
class Site:
    """A daemon, a state directory, and a directory with indexes and keys."""

    client: Any
    directory: Path
    state: Path

    def run(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "sm120kit", *map(str, arguments), "--state", str(self.state)]
        done = subprocess.run(argv, cwd=self.directory, capture_output=True, text=True, env=os.environ)
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        return done

    def import_image(self, content: str, **labels: str) -> str:
        """Import an image with a single file and return its id."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo("content")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
        path = self.directory / "image.tar"
        path.write_bytes(packed.getvalue())
        changes = [f"LABEL {name}={value or '-'}" for name, value in labels.items()]
        output = self.client.api.import_image_from_file(str(path), changes=changes)
        return str(json.loads(output.strip().splitlines()[-1])["status"])

    def tags(self) -> dict[str, str]:
        return {tag: image.id for image in self.client.images.list() for tag in image.tags}


def labels(context: str, name: str = "") -> dict[str, str]:
    claims = dict.fromkeys(CLAIMS, "") | {"kind": "vllm", "recipe": RECIPE, "context": context, "build-id": "b" * 64}
    claims["reference"] = name or image_name("vllm", VERSION, context)
    return {"org.opencontainers.image.version": VERSION} | {f"sm120kit.{key}": value for key, value in claims.items()}


def publish(site: Site, context: str, repository: str, index: str) -> str:
    """Publish and sign an image with records as if it had been built and verified; returns its name."""
    image = site.client.images.get(site.import_image(context, **labels(context)))
    name = image_name("vllm", VERSION, context)
    local, workspace = Daemon().find(image.id), Workspace.open(site.state)
    image.tag(*name.rsplit(":", 1))
    build = ImageContext(
        digest=context,
        kind="vllm",
        base=f"debian@sha256:{'5' * 64}",
        reference=name,
        epoch=315532800,
        labels=local.labels,
        locked=(),
        ours=(),
    )
    results = (Check("base", "user", CheckResult.PASSED),)
    write_record(workspace.root / "images" / context / "context.json", build)
    write_record(checks.record_path(workspace, local), VerifiedImage(local, name, checks.suite_digest("vllm"), results, {}))
    site.run("publish", name, repository, "--index", index, "--key", "key.pem")
    return name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The daemon of a publisher, and two keys."""
    import docker

    pem = serialization.Encoding.PEM
    for name in ("key", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (tmp_path / f"{name}.pem").write_bytes(private)
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    with containers.dockerd(Path(f"/tmp/sm120kit-published-{os.getpid()}")) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        yield Site(docker.DockerClient(base_url=daemon.socket), tmp_path, tmp_path / "state")


def test_pull_with_signatures_ages_and_foreign_names(site: Site, tmp_path: Path) -> None:
    with containers.registry(tmp_path / "registry") as address:
        repository = f"{address}/sm120kit/vllm"
        old = publish(site, OLD, repository, "old.json")
        time.sleep(1.1)  # the time of publishing has whole seconds
        new = publish(site, NEW, repository, "new.json")
        user = Site(site.client, site.directory, tmp_path / "user")
        for name in (old, new):
            site.client.images.remove(name, force=True)

        # Without a key each use warns; with a key, that key must have signed.
        assert "signature not verified; pass `--trust KEY`" in user.run("pull", RECIPE, "--index", "old.json").stderr
        quiet = user.run("pull", RECIPE, "--index", "old.json", "--trust", "key.pub")
        assert quiet.stdout.strip() == old and "warning" not in quiet.stderr
        user.run("pull", RECIPE, "--index", "old.json", "--trust", "other.pub", code=NotAttested.exit_code)

        # After a newer image was pulled, the older image is refused although it is signed.
        assert user.run("pull", RECIPE, "--index", "new.json", "--trust", "key.pub").stdout.strip() == new
        site.client.images.remove(old, force=True)
        refused = user.run("pull", RECIPE, "--index", "old.json", "--trust", "key.pub", code=NotTrusted.exit_code).stderr
        assert "older than" in refused and "--allow-older" in refused and old not in site.tags()
        allowed = user.run("pull", RECIPE, "--index", "old.json", "--trust", "key.pub", "--allow-older")
        assert allowed.stdout.strip() == old and old in site.tags()
        user.run("pull", RECIPE, "--index", "old.json", "--trust", "key.pub", code=NotTrusted.exit_code)
        minimum = ("--trust", "key.pub", "--min", "2999-01-01")
        user.run("pull", RECIPE, "--index", "new.json", *minimum, code=NotTrusted.exit_code)

        assert_foreign_names_are_refused(site, user, new)


def assert_foreign_names_are_refused(site: Site, user: Site, new: str) -> None:
    """Neither an index nor a label of an image moves a tag in the daemon."""
    victim = site.import_image("victim")
    site.client.images.get(victim).tag("python", "3.12")
    (entry,) = json.loads((site.directory / "new.json").read_text())["images"]
    record = entry["verified"]
    claims = record | {"reference": "python:3.12"}
    relabelled = claims | {"image": record["image"] | {"labels": labels(NEW, "python:3.12")}}
    for verified in (claims, relabelled):
        (site.directory / "forged.json").write_text(json.dumps({"format": 1, "images": [entry | {"verified": verified}]}))
        refused = user.run("pull", RECIPE, "--index", "forged.json", code=NotVerified.exit_code).stderr
        assert "lists an image as 'python:3.12'" in refused
    forged = site.import_image("forged", **labels(OTHER, "python:3.12"))
    assert "has the label python:3.12" in user.run("verify", "image", forged, code=NotVerified.exit_code).stderr
    assert site.tags()["python:3.12"] == victim

    # A name of sm120kit that another local image has.
    site.client.images.remove(new, force=True)
    site.client.images.get(victim).tag(*new.rsplit(":", 1))
    refused = user.run("pull", RECIPE, "--index", "new.json", code=AlreadyExists.exit_code).stderr
    assert "is another local image" in refused and "docker rmi" in refused
    assert site.tags()[new] == victim
