"""What a published image is made of, in words that others read, and who says so: through a real registry and daemon."""

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
from small_image import CLOSURE, Place

pytestmark = [
    pytest.mark.containers,
    pytest.mark.compiler,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

NOT_ATTESTED, BAD_KEY = 79, 47


@pytest.fixture(scope="module")
def here(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The publisher, with an index of its own and two pairs of keys."""
    folder = tmp_path_factory.mktemp("index")
    for name, key in (("key", ed25519.Ed25519PrivateKey.generate()), ("other", ec.generate_private_key(ec.SECP256R1()))):
        private, public = serialization.PrivateFormat.PKCS8, serialization.PublicFormat.SubjectPublicKeyInfo
        pem = serialization.Encoding.PEM
        (folder / f"{name}.pem").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
        (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(pem, public))
    return dataclasses.replace(place, folder=folder)


@pytest.fixture(scope="module")
def repository(registry: tuple[str, Path]) -> str:
    return f"{registry[0]}/sm120kit/signed"


@pytest.fixture(scope="module")
def signed(here: Place, verified: str, repository: str) -> dict[str, Any]:
    """The entry of the index. It is published without a signature first, and then with one, which pushes nothing again."""
    assert "not signed" in here.run("publish", verified, repository).stderr
    (bare,) = json.loads((here.folder / "images.json").read_text())["images"]
    (here.folder / "bare.json").write_text((here.folder / "images.json").read_text())
    assert "signed" in here.run("publish", verified, repository, "--key", "key.pem").stderr
    (entry,) = json.loads((here.folder / "images.json").read_text())["images"]
    assert bare["attested"]["signed"] is False and entry["attested"]["signed"] is True
    assert bare | {"attested": None} == entry | {"attested": None}
    return dict(entry)


@pytest.fixture(scope="module")
def puller(here: Place, signed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Somebody else with the index and the files beside it, who has pulled nothing yet."""
    return dataclasses.replace(here, state=tmp_path_factory.mktemp("state"))


def document(here: Place, entry: dict[str, Any], which: str) -> dict[str, Any]:
    return dict(json.loads((here.folder / entry["attested"][which]["path"]).read_text()))


def statement(here: Place, entry: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(base64.b64decode(document(here, entry, "statement")["payload"])))


def test_a_key_that_cannot_sign_stops_before_anything_is_pushed(here: Place, verified: str, repository: str) -> None:
    for key in ("absent.pem", "key.pub"):
        words = ("publish", verified, f"{repository}-never", "--index", "never.json", "--key", key)
        assert key in here.run(*words, code=BAD_KEY).stderr
    assert not (here.folder / "never.json").exists()
    assert f"{repository}-never" not in json.dumps(catalogue(repository))


def catalogue(repository: str) -> list[str]:
    with urllib.request.urlopen(f"http://{repository.partition('/')[0]}/v2/_catalog") as answer:
        return [f"{repository.partition('/')[0]}/{name}" for name in json.load(answer)["repositories"]]


def test_the_subject_is_the_manifest_that_the_registry_has(
    here: Place, signed: dict[str, Any], image: str, repository: str
) -> None:
    host, _, path = repository.partition("/")
    asked = urllib.request.Request(
        f"http://{host}/v2/{path}/manifests/{signed['tag']}",
        headers={"Accept": "application/vnd.docker.distribution.manifest.v2+json"},
    )
    with urllib.request.urlopen(asked) as answer:
        manifest = answer.read()
    (subject,) = statement(here, signed)["subject"]
    assert subject == {"name": repository, "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}
    assert json.loads(manifest)["config"]["digest"] == image


def test_the_sbom_lists_what_the_container_has(here: Place, signed: dict[str, Any], image: str) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill = document(here, signed, "sbom")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    asks = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions(path=[p])]))"
    asks = f"import sysconfig; p = sysconfig.get_path('purelib'); {asks}"
    said = here.client.containers.run(image, ["python3", "-c", asks], network_mode="none", remove=True)
    found = {(name.lower().replace("_", "-").replace(".", "-"), version) for name, version in json.loads(said)}
    wheels = {(one["name"], one["version"]): one for one in bill["components"] if one["type"] == "library"}
    assert found == set(wheels)
    locked = {wheel["name"]: wheel["sha256"] for wheel in json.loads(CLOSURE.read_text())["wheels"]}
    hashes = {name: one["hashes"][0]["content"] for (name, _), one in wheels.items()}
    assert locked == {name: sha256 for name, sha256 in hashes.items() if name != "flashinfer-python"}


def test_pedigree_and_provenance_name_the_patches_of_the_image(here: Place, signed: dict[str, Any]) -> None:
    labels = signed["verified"]["image"]["labels"]
    (ours,) = (one for one in document(here, signed, "sbom")["components"] if one["name"] == "flashinfer-python")
    (cutlass,) = ours["components"]
    applied = {f"patches/{one.partition('@')[0]}.patch" for one in labels["sm120kit.patches"].split(",")}
    patches = [*ours["pedigree"]["patches"], *cutlass["pedigree"]["patches"]]
    assert {patch["diff"]["url"] for patch in patches} == applied
    said = statement(here, signed)["predicate"]["buildDefinition"]
    inputs = {one["name"]: one["digest"]["sha256"] for one in said["resolvedDependencies"] if "sha256" in one["digest"]}
    for patch in patches:
        text = base64.b64decode(patch["diff"]["text"]["content"])
        assert text == (here.data / patch["diff"]["url"]).read_bytes()
        assert inputs[patch["diff"]["url"]] == hashlib.sha256(text).hexdigest()
    assert said["externalParameters"]["buildId"] == labels["sm120kit.build-id"]
    assert said["externalParameters"]["kernels"][0]["groups"] == ["tiny"]


def test_what_is_signed_is_pulled_and_verified(here: Place, puller: Place, signed: dict[str, Any], verified: str) -> None:
    first = puller.run("pull", "flashinfer-0.6.6", "--trust", "key.pub")
    assert first.stdout.strip() == verified and "since the last pull" not in first.stderr
    again = puller.run("pull", "flashinfer-0.6.6")
    assert "unchanged since the last pull" in again.stderr and "was believed: --trust" in again.stderr
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
    assert "signed" in puller.run("verify", "image", verified, "--trust", "key.pub").stderr


def test_who_did_not_make_it_cannot_say_what_it_is_made_of(puller: Place, verified: str, repository: str) -> None:
    words = ("publish", verified, f"{repository}-again", "--index", "again.json", "--key", "key.pem")
    assert "is not recorded here" in puller.run(*words, code=NOT_ATTESTED).stderr
    assert not (puller.folder / "again.json").exists()


Change = Callable[[dict[str, Any], Path], None]


def edited(key: str, value: Any) -> Change:
    def change(entry: dict[str, Any], folder: Path) -> None:
        entry[key] = value

    return change


def statement_changed(entry: dict[str, Any], folder: Path) -> None:
    """Somebody adds a digest to the signed statement, and corrects the index."""
    path = folder / entry["attested"]["statement"]["path"]
    envelope = json.loads(path.read_text())
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["subject"].append({"name": "evil", "digest": {"sha256": "0" * 64}})
    changed = json.dumps(envelope | {"payload": base64.b64encode(json.dumps(payload).encode()).decode()}).encode()
    path.write_bytes(changed)
    entry["attested"]["statement"]["sha256"] = hashlib.sha256(changed).hexdigest()


def signature_missing(entry: dict[str, Any], folder: Path) -> None:
    (folder / entry["attested"]["statement"]["path"]).unlink()


def record_changed(entry: dict[str, Any], folder: Path) -> None:
    entry["verified"]["checks"] = entry["verified"]["checks"][:1]


REFUSALS = {
    "wrong key": ("other.pub", lambda entry, folder: None, "is not signed with"),
    "never signed": ("key.pub", edited("attested", None), "nobody signed"),
    "statement changed": ("key.pub", statement_changed, "or was changed afterwards"),
    "signature missing": ("key.pub", signature_missing, "belongs beside the index"),
    "another image": ("key.pub", edited("digest", f"sha256:{'0' * 64}"), "is about sha256:"),
    "record changed": ("key.pub", record_changed, "is not the one that was signed"),
    "another recipe": ("key.pub", edited("recipe", "vllm-0.19.1"), "with recipe 'vllm-0.19.1'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_signed_so_is_refused(
    puller: Place, signed: dict[str, Any], verified: str, tmp_path: Path, name: str
) -> None:
    """Nothing is asked of the registry, and what the daemon has stays as it was."""
    key, change, words = REFUSALS[name]
    for which in ("sbom", "statement"):
        path = signed["attested"][which]["path"]
        (tmp_path / path).write_bytes((puller.folder / path).read_bytes())
    entry = json.loads(json.dumps(signed))
    change(entry, tmp_path)
    (tmp_path / "images.json").write_text(json.dumps({"format": 1, "images": [entry]}))
    before = puller.names()
    asked = ("--index", tmp_path / "images.json", "--trust", puller.folder / key)
    said = puller.run("pull", entry["recipe"], *asked, code=NOT_ATTESTED).stderr
    assert words in said and "hint:" in said
    assert words in puller.run("verify", "image", verified, *asked, code=NOT_ATTESTED).stderr
    assert puller.names() == before


def test_an_unsigned_index_is_refused_when_a_signature_is_asked_for(puller: Place, signed: dict[str, Any], image: str) -> None:
    said = puller.run("pull", "flashinfer-0.6.6", "--index", "bare.json", "--trust", "key.pub", code=NOT_ATTESTED).stderr
    assert "nobody signed" in said and "--key" in said
    (puller.folder / "empty.json").write_text('{"format": 1, "images": []}')
    words = ("verify", "image", image, "--index", "empty.json", "--trust", "key.pub")
    assert "lists no image with the content" in puller.run(*words, code=NOT_ATTESTED).stderr
