"""SBOM, provenance and signatures of published images, with a real registry and daemon."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import containers
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from small_image import CLOSURE, ImageHost

from sm120kit.core.errors import BadInput, NotAttested
from sm120kit.images.oci import MANIFEST

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

NOT_ATTESTED, BAD_KEY = NotAttested.exit_code, BadInput.exit_code


@pytest.fixture(scope="module")
def publisher(image_host: ImageHost, tmp_path_factory: pytest.TempPathFactory) -> ImageHost:
    """The host of the publisher, with an index and two pairs of keys."""
    directory = tmp_path_factory.mktemp("index")
    for name, key in (("key", ed25519.Ed25519PrivateKey.generate()), ("other", ec.generate_private_key(ec.SECP256R1()))):
        private, public = serialization.PrivateFormat.PKCS8, serialization.PublicFormat.SubjectPublicKeyInfo
        pem = serialization.Encoding.PEM
        (directory / f"{name}.pem").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
        (directory / f"{name}.pub").write_bytes(key.public_key().public_bytes(pem, public))
    return dataclasses.replace(image_host, directory=directory)


@pytest.fixture(scope="module")
def repository(registry: tuple[str, Path]) -> str:
    return f"{registry[0]}/sm120kit/signed"


@pytest.fixture(scope="module")
def signed(publisher: ImageHost, verified: str, repository: str) -> dict[str, Any]:
    """The entry in the index. Published first without a signature, then with a signature, which pushes nothing again."""
    assert "not signed" in publisher.run("publish", verified, repository).stderr
    (bare,) = json.loads((publisher.directory / "images.json").read_text())["images"]
    (publisher.directory / "bare.json").write_text((publisher.directory / "images.json").read_text())
    assert "signed" in publisher.run("publish", verified, repository, "--key", "key.pem").stderr
    (entry,) = json.loads((publisher.directory / "images.json").read_text())["images"]
    assert bare["attested"]["signed"] is False and entry["attested"]["signed"] is True
    assert bare | {"attested": None} == entry | {"attested": None}
    return dict(entry)


@pytest.fixture(scope="module")
def puller(publisher: ImageHost, signed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ImageHost:
    """The host of a user with the index and the files beside it, who has pulled nothing yet."""
    return dataclasses.replace(publisher, state=tmp_path_factory.mktemp("state"))


def document(publisher: ImageHost, entry: dict[str, Any], key: str) -> dict[str, Any]:
    return dict(json.loads((publisher.directory / entry["attested"][key]["path"]).read_text()))


def statement(publisher: ImageHost, entry: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(base64.b64decode(document(publisher, entry, "statement")["payload"])))


def test_unsuitable_key_is_refused_before_a_push(publisher: ImageHost, verified: str, repository: str) -> None:
    for key in ("absent.pem", "key.pub"):
        command = ("publish", verified, f"{repository}-never", "--index", "never.json", "--key", key)
        assert key in publisher.run(*command, code=BAD_KEY).stderr
    assert not (publisher.directory / "never.json").exists()
    assert f"{repository}-never" not in json.dumps(catalogue(repository))


def catalogue(repository: str) -> list[str]:
    with urllib.request.urlopen(f"http://{repository.partition('/')[0]}/v2/_catalog") as response:
        return [f"{repository.partition('/')[0]}/{name}" for name in json.load(response)["repositories"]]


def test_subject_is_the_manifest_in_the_registry(
    publisher: ImageHost, signed: dict[str, Any], image: str, repository: str
) -> None:
    host, _, path = repository.partition("/")
    request = urllib.request.Request(
        f"http://{host}/v2/{path}/manifests/{signed['tag']}",
        headers={"Accept": MANIFEST},
    )
    with urllib.request.urlopen(request) as response:
        manifest = response.read()
    (subject,) = statement(publisher, signed)["subject"]
    assert subject == {"name": repository, "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}
    assert json.loads(manifest)["config"]["digest"] == image


def test_sbom_lists_the_distributions_of_the_container(publisher: ImageHost, signed: dict[str, Any], image: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill = document(publisher, signed, "sbom")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    code = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions(path=[p])]))"
    code = f"import sysconfig; p = sysconfig.get_path('purelib'); {code}"
    output = publisher.client.containers.run(image, ["python3", "-c", code], network_mode="none", remove=True)
    installed = {(name.lower().replace("_", "-").replace(".", "-"), version) for name, version in json.loads(output)}
    wheels = {(part["name"], part["version"]): part for part in bill["components"] if part["type"] == "library"}
    assert installed == set(wheels)
    locked = {wheel["name"]: wheel["sha256"] for wheel in json.loads(CLOSURE.read_text())["wheels"]}
    hashes = {name: part["hashes"][0]["content"] for (name, _), part in wheels.items()}
    assert locked == {name: sha256 for name, sha256 in hashes.items() if name != "flashinfer-python"}


def test_pedigree_and_provenance_contain_the_patches(publisher: ImageHost, signed: dict[str, Any]) -> None:
    labels = signed["verified"]["image"]["labels"]
    (ours,) = (part for part in document(publisher, signed, "sbom")["components"] if part["name"] == "flashinfer-python")
    (cutlass,) = ours["components"]
    applied = {f"patches/{patch.partition('@')[0]}.patch" for patch in labels["sm120kit.patches"].split(",")}
    patches = [*ours["pedigree"]["patches"], *cutlass["pedigree"]["patches"]]
    assert {patch["diff"]["url"] for patch in patches} == applied
    definition = statement(publisher, signed)["predicate"]["buildDefinition"]
    dependencies = definition["resolvedDependencies"]
    inputs = {entry["name"]: entry["digest"]["sha256"] for entry in dependencies if "sha256" in entry["digest"]}
    for patch in patches:
        text = base64.b64decode(patch["diff"]["text"]["content"])
        assert text == (publisher.data / patch["diff"]["url"]).read_bytes()
        assert inputs[patch["diff"]["url"]] == hashlib.sha256(text).hexdigest()
    assert definition["externalParameters"]["buildId"] == labels["sm120kit.build-id"]
    assert definition["externalParameters"]["kernels"][0]["groups"] == ["tiny"]


def test_pull_verifies_the_signature_and_prints_changes(
    publisher: ImageHost, puller: ImageHost, signed: dict[str, Any], verified: str
) -> None:
    first = puller.run("pull", "flashinfer-0.6.6", "--trust", "key.pub")
    assert first.stdout.strip() == verified and "since the last pull" not in first.stderr
    again = puller.run("pull", "flashinfer-0.6.6")
    assert "unchanged since the last pull" in again.stderr and "signature not verified; pass `--trust KEY`" in again.stderr
    (last,) = (puller.state / "images" / "pulled").iterdir()
    record = json.loads(last.read_text())
    labels = record["image"]["labels"]
    labels["sm120kit.wheels"] = labels["sm120kit.wheels"].replace("idna==", "idna==0.")
    labels["sm120kit.patches"] = labels["sm120kit.patches"].partition(",")[2]
    last.write_text(json.dumps(record))
    newer = puller.run("pull", "flashinfer-0.6.6", "--trust", "key.pub").stderr.splitlines()
    listed = [line.split()[:2] for line in newer if line.startswith("  ")]
    assert sorted(listed) == [
        ["patch", signed["verified"]["image"]["labels"]["sm120kit.patches"].partition("@")[0]],
        ["wheel", "idna"],
    ]
    assert "signature verified" in puller.run("verify", "image", verified, "--trust", "key.pub").stderr


def test_publish_without_the_record_of_the_build_is_refused(puller: ImageHost, verified: str, repository: str) -> None:
    command = ("publish", verified, f"{repository}-again", "--index", "again.json", "--key", "key.pem")
    assert "no record of the build" in puller.run(*command, code=NOT_ATTESTED).stderr
    assert not (puller.directory / "again.json").exists()


Change = Callable[[dict[str, Any], Path], None]


def statement_changed(entry: dict[str, Any], directory: Path) -> None:
    """An attacker adds a digest to the signed statement, and edits the index accordingly."""
    path = directory / entry["attested"]["statement"]["path"]
    envelope = json.loads(path.read_text())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["subject"].append({"name": "forged", "digest": {"sha256": "0" * 64}})
    changed = json.dumps(envelope | {"payload": base64.b64encode(json.dumps(payload).encode()).decode()}).encode()
    path.write_bytes(changed)
    entry["attested"]["statement"]["sha256"] = hashlib.sha256(changed).hexdigest()


def record_changed(entry: dict[str, Any], directory: Path) -> None:
    entry["verified"]["checks"] = entry["verified"]["checks"][:1]


REFUSALS: dict[str, tuple[str, Change, str]] = {
    "wrong key": ("other.pub", lambda entry, directory: None, "is not signed with"),
    "statement changed": ("key.pub", statement_changed, "or was changed afterwards"),
    "record changed": ("key.pub", record_changed, "is not the record that was signed"),
}
"""Some of those in ``tests/unit/test_attest.py``."""


@pytest.mark.parametrize("name", REFUSALS)
def test_entry_that_differs_from_its_signed_statement_is_refused(
    puller: ImageHost, signed: dict[str, Any], verified: str, tmp_path: Path, name: str
) -> None:
    """The registry is not contacted, and the images in the daemon do not change."""
    key, change, message = REFUSALS[name]
    for kind in ("sbom", "statement"):
        path = signed["attested"][kind]["path"]
        (tmp_path / path).write_bytes((puller.directory / path).read_bytes())
    entry = json.loads(json.dumps(signed))
    change(entry, tmp_path)
    (tmp_path / "images.json").write_text(json.dumps({"format": 1, "images": [entry]}))
    before = puller.tags()
    options = ("--index", tmp_path / "images.json", "--trust", puller.directory / key)
    error = puller.run("pull", entry["recipe"], *options, code=NOT_ATTESTED).stderr
    assert message in error and "hint:" in error
    assert message in puller.run("verify", "image", verified, *options, code=NOT_ATTESTED).stderr
    assert puller.tags() == before


def test_unsigned_entry_is_refused_with_trust(puller: ImageHost, signed: dict[str, Any], image: str) -> None:
    error = puller.run("pull", "flashinfer-0.6.6", "--index", "bare.json", "--trust", "key.pub", code=NOT_ATTESTED).stderr
    assert "is not signed" in error and "--key" in error
    (puller.directory / "empty.json").write_text('{"format": 1, "images": []}')
    command = ("verify", "image", image, "--index", "empty.json", "--trust", "key.pub")
    assert "lists no image with the content" in puller.run(*command, code=NOT_ATTESTED).stderr
