"""Builds that share a cache in a real registry: one compiles, the others fetch the wheel, unless the entry is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import containers
import pytest
import tiny_flashinfer
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from sm120kit.core import process
from sm120kit.core.digests import file_sha256

pytestmark = pytest.mark.skipif(not shutil.which("docker-registry"), reason="not installed: docker-registry")


class Team:
    """A FlashInfer of one kernel, a registry, and a pair of keys."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.repository = f"{address}/team/cache"
        self.data, self.mirror = tiny_flashinfer.write(directory)
        key, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (directory / "key.pem").write_bytes(private)
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (directory / "key.pub").write_bytes(public)

    def build(self, state: str, *options: str) -> tuple[str, bool, str]:
        """The sha256 of a wheel that is built in a state directory, whether anything was compiled, and what was printed."""
        out = self.directory / f"{state}.out"
        argv = ["sm120kit", "build", "flashinfer@1.0", "--mirror", self.mirror, "-o", out, "--cache", self.repository, *options]
        env = {"SM120KIT_STATE": str(self.directory / state), "SM120KIT_DATA": str(self.data)}
        done = process.run(argv, cwd=self.directory, env=env)
        (wheel,) = out.iterdir()
        return file_sha256(wheel), "compiling" in done.stderr, done.stderr


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with containers.registry(tmp_path / "registry") as address:
        yield Team(tmp_path, address)


def test_only_the_first_machine_compiles(team: Team) -> None:
    first, compiled, printed = team.build("first", "--cache-push", "--key", "key.pem", "--trust", "key.pub")
    assert compiled and "pushed flashinfer-" in printed
    second, compiled, printed = team.build("second", "--trust", "key.pub")
    assert (second, compiled) == (first, False) and "warning" not in printed
    third, compiled, printed = team.build("third")
    assert (third, compiled) == (first, False) and "signature not verified; pass `--trust KEY`" in printed
    again, compiled, printed = team.build("third", "--trust", "key.pub")
    assert (again, compiled) == (first, False) and "not signed as --trust requires" in printed


def test_entries_that_cannot_be_used_are_compiled(team: Team) -> None:
    first, *_ = team.build("first", "--cache-push")
    unsigned, compiled, printed = team.build("unsigned", "--trust", "key.pub")
    assert (unsigned, compiled) == (first, True) and "is not signed" in printed
    blob = team.directory / f"registry/store/docker/registry/v2/blobs/sha256/{first[:2]}/{first}/data"
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    damaged, compiled, printed = team.build("damaged")
    assert (damaged, compiled) == (first, True) and "warning" in printed
    blob.unlink()
    half, compiled, printed = team.build("half")
    assert (half, compiled) == (first, True) and "warning" in printed


def test_registry_that_does_not_respond(team: Team) -> None:
    team.repository = "127.0.0.1:9/team/cache"
    _, compiled, printed = team.build("alone", "--cache-push")
    assert compiled and printed.count("is not used") == 1
