"""SBOM, provenance and signature of a published image, as far as no registry is needed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from sm120kit import attest, registry
from sm120kit.attest import signature
from sm120kit.errors import BadKey, NotAttested
from sm120kit.records import (
    BuiltWheel,
    Check,
    Image,
    ImageContext,
    LockedWheel,
    PublishedImage,
    Verdict,
    VerifiedImage,
)
from sm120kit.workspace import file_sha256

ROOT = Path(__file__).parents[2]
CUTLASS_PATCH = ROOT / "patches" / "cutlass" / "single-k-block-mainloop.patch"
ENGINE_PATCH = ROOT / "patches" / "flashinfer" / "gdc-flags.patch"
TORCH = LockedWheel("torch", "2.13.0", "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl", "1" * 64)
SDIST = "730" * 21 + "0"
ORIGIN: dict[str, Any] = {
    "recipe": "flashinfer-0.6.6",
    "archs": ["sm_120f"],
    "kernel_groups": ["quick"],
    "plan": "b" * 64,
    "pin": {"project": "flashinfer", "distribution": "flashinfer-python", "version": "0.6.6", "sha256": SDIST},
    "inside": [{"project": "cutlass", "path": "3rdparty/cutlass", "version": "4.2.1"}],
    "base": "a" * 40,
    "commit": "c" * 40,
    "tree": "d" * 40,
    "patches": [
        {"project": "cutlass", "slug": CUTLASS_PATCH.stem, "sha256": file_sha256(CUTLASS_PATCH), "commit": "e" * 40},
        {"project": "flashinfer", "slug": ENGINE_PATCH.stem, "sha256": file_sha256(ENGINE_PATCH), "commit": "f" * 40},
        {"project": "flashinfer", "slug": "no-longer-here", "sha256": "9" * 64, "commit": "0" * 40},
    ],
    "modules": ["fp4_quantization_120f"],
    "left_out": [],
    "toolchain": {"nvcc": "13.0.88", "host": "12.2.0"},
}
OURS = BuiltWheel(
    LockedWheel("flashinfer-python", f"0.6.6+sm120kit.{'b' * 12}", "flashinfer_python-ours.whl", "2" * 64), ORIGIN
)
LABELS = {
    "org.opencontainers.image.version": OURS.wheel.version,
    "org.opencontainers.image.base.digest": f"sha256:{'5' * 64}",
    "sm120kit.recipe": "flashinfer-0.6.6",
    "sm120kit.build-id": "7" * 64,
    "sm120kit.reference": "sm120kit/flashinfer:tag",
    "sm120kit.plan": "b" * 64,
    "sm120kit.wheels": "numpy==2.0,torch==2.13.0",
    "sm120kit.patches": "cutlass/one@111111111111,flashinfer/two@222222222222",
    "sm120kit.modules": "fp4_quantization_120f",
}
MADE = ImageContext(
    directory=Path("/nowhere/context"),
    digest="4" * 64,
    kind="flashinfer",
    base=f"docker.io/library/debian@sha256:{'5' * 64}",
    reference="sm120kit/flashinfer:tag",
    arguments={"SOURCE_DATE_EPOCH": "315532800"},
    labels=LABELS,
    installer=LockedWheel("pip", "26.3", "pip-26.3-py3-none-any.whl", "3" * 64),
    locked=(TORCH,),
    ours=(OURS,),
)
IMAGE = Image("sha256:1", "8" * 64, "linux/amd64", (), LABELS, "1000", 1)
VERIFIED = VerifiedImage(IMAGE, "sm120kit/flashinfer:tag", "suite", (Check("base", "user", Verdict.PASSED),), {})
ENTRY = PublishedImage("host/flashinfer", "tag", f"sha256:{'6' * 64}", "flashinfer-0.6.6", "7" * 64, VERIFIED)

Keys = Callable[..., tuple[Path, Path]]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Makes a private and a public key file."""

    def make(name: str = "key", key: Any = None) -> tuple[Path, Path]:
        key = key or ed25519.Ed25519PrivateKey.generate()
        private, public = tmp_path / name, tmp_path / f"{name}.pub"
        private.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        public.write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return private, public

    return make


def written(folder: Path, key: Path | None = None, **changed: Any) -> PublishedImage:
    """An entry with the files beside it."""
    folder.mkdir(exist_ok=True)
    made = dataclasses.replace(MADE, **changed)
    return dataclasses.replace(ENTRY, attested=attest.write(ENTRY, made, folder, attest.signer(key) if key else None))


def sbom(folder: Path, **changed: Any) -> dict[str, Any]:
    entry = written(folder, **changed)
    assert entry.attested
    return dict(json.loads((folder / entry.attested.sbom.path).read_text()))


def statement(folder: Path) -> dict[str, Any]:
    entry = written(folder)
    assert entry.attested
    return dict(json.loads((folder / entry.attested.statement.path).read_text()))


def component(bill: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in bill["components"] if one["name"] == name)
    return dict(found)


def test_the_sbom_is_what_the_schema_of_cyclonedx_asks_for(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for number, changed in enumerate(({}, {"base": f"sha256:{'5' * 64}"}, {"locked": ()})):
        bill = sbom(tmp_path / str(number), **changed)
        problem = validator.validate_str(json.dumps(bill))
        assert problem is None, problem
        bill["components"][0]["type"] = "spaceship"
        assert validator.validate_str(json.dumps(bill)) is not None


def test_a_wheel_is_named_as_scanners_do(tmp_path: Path) -> None:
    torch = component(sbom(tmp_path), "torch")
    assert torch["purl"] == f"pkg:pypi/torch@2.13.0?file_name={TORCH.filename}"
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}] and "pedigree" not in torch


def test_a_wheel_of_ours_tells_what_it_was_and_what_was_changed(tmp_path: Path) -> None:
    ours = component(sbom(tmp_path), "flashinfer-python")
    assert ours["version"].startswith("0.6.6+sm120kit.") and "%2Bsm120kit" in ours["purl"]
    (ancestor,) = ours["pedigree"]["ancestors"]
    assert ancestor["purl"] == "pkg:pypi/flashinfer-python@0.6.6"
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": SDIST}]
    patches = {patch["diff"]["url"]: patch for patch in ours["pedigree"]["patches"]}
    assert sorted(patches) == ["patches/flashinfer/gdc-flags.patch", "patches/flashinfer/no-longer-here.patch"]
    assert {patch["type"] for patch in patches.values()} == {"unofficial"}
    text = patches["patches/flashinfer/gdc-flags.patch"]["diff"]["text"]
    assert base64.b64decode(text["content"]) == ENGINE_PATCH.read_bytes() and text["encoding"] == "base64"
    assert "text" not in patches["patches/flashinfer/no-longer-here.patch"]["diff"], "another text than the applied one"
    assert {"name": "sm120kit:sha256:patches/flashinfer/no-longer-here.patch", "value": "9" * 64} in ours["properties"]


def test_what_a_source_carries_inside_has_its_own_pedigree(tmp_path: Path) -> None:
    (cutlass,) = component(sbom(tmp_path), "flashinfer-python")["components"]
    assert (cutlass["name"], cutlass["version"]) == ("cutlass", "4.2.1")
    assert cutlass["pedigree"]["ancestors"][0]["purl"] == "pkg:generic/cutlass@4.2.1"
    (patch,) = cutlass["pedigree"]["patches"]
    assert base64.b64decode(patch["diff"]["text"]["content"]) == CUTLASS_PATCH.read_bytes()


def test_the_image_and_its_base_go_by_digest(tmp_path: Path) -> None:
    bill = sbom(tmp_path / "a")
    assert bill["metadata"]["component"]["purl"] == f"pkg:oci/flashinfer@{ENTRY.digest}"
    base = component(bill, "docker.io/library/debian")
    assert base["version"] == f"sha256:{'5' * 64}" and "repository_url=docker.io/library/debian" in base["purl"]
    local = component(sbom(tmp_path / "b", base=f"sha256:{'5' * 64}"), "a local image")
    assert local["version"] == f"sha256:{'5' * 64}" and "purl" not in local
    (root,) = (one for one in bill["dependencies"] if one["ref"] == bill["metadata"]["component"]["bom-ref"])
    assert len(root["dependsOn"]) == 3


def test_the_same_records_give_the_same_bytes(tmp_path: Path, keys: Keys) -> None:
    private, _ = keys()
    first, second = written(tmp_path / "a", private), written(tmp_path / "b", private, directory=Path("/elsewhere"))
    assert first == second, "an ed25519 signature has nothing random in it"
    other = written(tmp_path / "c", private, locked=(dataclasses.replace(TORCH, sha256="0" * 64),))
    assert first.attested and other.attested and other.attested.sbom.sha256 != first.attested.sbom.sha256
    bills = [json.loads((tmp_path / where / first.attested.sbom.path).read_text()) for where in "abc"]
    assert bills[0]["serialNumber"] == bills[1]["serialNumber"] != bills[2]["serialNumber"]
    assert "timestamp" not in bills[0]["metadata"]


def test_the_statement_says_what_the_records_say(tmp_path: Path) -> None:
    said = statement(tmp_path)
    assert (said["_type"], said["predicateType"]) == ("https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1")
    assert said["subject"] == [{"name": "host/flashinfer", "digest": {"sha256": "6" * 64}}]
    build, run = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    assert build["externalParameters"] == {
        "recipe": "flashinfer-0.6.6",
        "buildId": "7" * 64,
        "base": MADE.base,
        "kernels": [{"recipe": "flashinfer-0.6.6", "archs": ["sm_120f"], "groups": ["quick"]}],
    }
    inputs = {one["name"]: one["digest"] for one in build["resolvedDependencies"]}
    assert inputs == {
        "base image": {"sha256": "5" * 64},
        "source of flashinfer": {"sha256": SDIST},
        **{f"patches/{one['project']}/{one['slug']}.patch": {"sha256": one["sha256"]} for one in ORIGIN["patches"]},
        TORCH.filename: {"sha256": "1" * 64},
        MADE.installer.filename: {"sha256": "3" * 64},
    }
    assert "metadata" not in run, "no record has times"
    bill = next(one for one in run["byproducts"] if one["name"] == "SBOM")["digest"]["sha256"]
    assert bill == file_sha256(tmp_path / f"sha256-{'6' * 64}.cdx.json")


def test_a_source_from_git_goes_by_its_commit(tmp_path: Path) -> None:
    pin = {"project": "flashinfer", "url": "https://host/x.git", "commit": "a" * 40, "version": "0.6.6"}
    ours = dataclasses.replace(OURS, origin=ORIGIN | {"pin": pin})
    entry = written(tmp_path, ours=(ours,))
    assert entry.attested
    said = json.loads((tmp_path / entry.attested.statement.path).read_text())
    (source,) = (
        one for one in said["predicate"]["buildDefinition"]["resolvedDependencies"] if one["name"] == "source of flashinfer"
    )
    assert source["digest"] == {"gitCommit": "a" * 40} and "git%2Bhttps" in source["uri"] and "a" * 40 in source["uri"]


def test_an_official_wheel_that_was_packed_again_is_an_ancestor_too(tmp_path: Path) -> None:
    wheel = LockedWheel("vllm", "0.20.0+sm120kit.1", "vllm-ours.whl", "2" * 64)
    official = {"wheel": "vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl", "sha256": "a" * 64}
    pin = {"project": "vllm", "distribution": "vllm", "version": "0.20.0", "sha256": "b" * 64}
    nothing_compiled: dict[str, Any] = {key: [] for key in ("inside", "patches", "archs", "modules", "kernel_groups")}
    origin = ORIGIN | {"pin": pin, "official": official} | nothing_compiled
    entry = written(tmp_path, ours=(OURS, BuiltWheel(wheel, origin)))
    assert entry.attested
    ancestors = component(json.loads((tmp_path / entry.attested.sbom.path).read_text()), "vllm")["pedigree"]["ancestors"]
    assert [one["version"] for one in ancestors] == ["0.20.0", "0.20.0"]
    assert sorted(one["hashes"][0]["content"] for one in ancestors) == ["a" * 64, "b" * 64]
    said = (tmp_path / entry.attested.statement.path).read_text()
    assert official["wheel"] in said and "a" * 64 in said


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_another_reader_of_envelopes_accepts_the_signature(tmp_path: Path, keys: Keys, kind: str) -> None:
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    private, public = keys(key=ec.generate_private_key(ec.SECP256R1()) if kind == "ecdsa" else None)
    entry = written(tmp_path / "index", private)
    assert entry.attested and entry.attested.statement.path.endswith(".dsse.json")
    attest.check(entry, tmp_path / "index", public)
    text = (tmp_path / "index" / entry.attested.statement.path).read_text()

    def read(path: Path) -> None:
        key = SSlibKey.from_crypto(serialization.load_pem_public_key(path.read_bytes()))
        key.keyid = ""  # this reader looks a signature up by it, where others try every key
        Envelope.from_dict(json.loads(text)).verify([key], 1)

    read(public)
    with pytest.raises(VerificationError):
        read(keys("other", ec.generate_private_key(ec.SECP256R1()) if kind == "ecdsa" else None)[1])


def resealed(folder: Path, entry: PublishedImage, key: Path, change: Callable[[dict[str, Any]], None]) -> PublishedImage:
    """The entry with another statement, signed again."""
    assert entry.attested
    path = folder / entry.attested.statement.path
    said = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    change(said)
    path.write_bytes(attest.signer(key)(json.dumps(said).encode()))
    return listed(folder, entry)


def listed(folder: Path, entry: PublishedImage) -> PublishedImage:
    """The entry as somebody would list it who changed the files."""
    assert entry.attested
    files = {
        name: dataclasses.replace(one, sha256=file_sha256(folder / one.path))
        for name, one in (("sbom", entry.attested.sbom), ("statement", entry.attested.statement))
    }
    return dataclasses.replace(entry, attested=dataclasses.replace(entry.attested, **files))


def test_who_is_not_trusted_is_refused(tmp_path: Path, keys: Keys) -> None:
    (private, public), (_, other) = keys(), keys("other")
    folder = tmp_path / "index"
    entry = written(folder, private)
    with pytest.raises(NotAttested, match="not signed with"):
        attest.check(entry, folder, other)
    for unsigned in (dataclasses.replace(entry, attested=None), written(folder)):
        with pytest.raises(NotAttested, match="nobody signed"):
            attest.check(unsigned, folder, public)


def test_a_bare_statement_listed_as_signed_is_refused(tmp_path: Path, keys: Keys) -> None:
    _, public = keys()
    entry = written(tmp_path)
    assert entry.attested
    lied = dataclasses.replace(entry, attested=dataclasses.replace(entry.attested, signed=True))
    with pytest.raises(NotAttested, match="not a signed envelope"):
        attest.check(lied, tmp_path, public)
    envelope = {"payloadType": "application/vnd.in-toto+json", "payload": "e30=", "signatures": []}
    (tmp_path / entry.attested.statement.path).write_text(json.dumps(envelope))
    with pytest.raises(NotAttested, match="not signed with"):
        attest.check(listed(tmp_path, lied), tmp_path, public)


def test_a_changed_statement_is_refused(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    entry = written(tmp_path, private)
    assert entry.attested
    path = tmp_path / entry.attested.statement.path
    envelope = json.loads(path.read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b"sm_120f", b"sm_121a")
    path.write_text(json.dumps(envelope | {"payload": base64.b64encode(payload).decode()}))
    with pytest.raises(NotAttested, match="was changed: its sha256"):
        attest.check(entry, tmp_path, public)
    with pytest.raises(NotAttested, match="or was changed afterwards"):
        attest.check(listed(tmp_path, entry), tmp_path, public)
    path.unlink()
    with pytest.raises(NotAttested, match="cannot read"):
        attest.check(entry, tmp_path, public)


def test_another_kind_of_signed_text_is_refused(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same key may have signed other things; the type is part of what is signed."""
    private, public = keys()
    with monkeypatch.context() as other:
        other.setattr(signature, "PAYLOAD_TYPE", "application/vnd.other+json")
        foreign = written(tmp_path, private)
    with pytest.raises(NotAttested, match="not signed with"):
        attest.check(foreign, tmp_path, public)
    entry = written(tmp_path, private)
    assert entry.attested
    path = tmp_path / entry.attested.statement.path
    path.write_text(path.read_text().replace("vnd.in-toto+json", "vnd.other+json"))
    with pytest.raises(NotAttested, match="not signed with"):
        attest.check(listed(tmp_path, entry), tmp_path, public)
    with pytest.raises(NotAttested, match="not a provenance statement"):
        attest.check(resealed_as(tmp_path, entry, private, {"predicateType": "https://x/y"}), tmp_path, public)


def resealed_as(folder: Path, entry: PublishedImage, key: Path, changed: dict[str, Any]) -> PublishedImage:
    written(folder, key)
    return resealed(folder, entry, key, lambda said: said.update(changed))


def test_a_statement_about_another_image_is_refused(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    entry = written(tmp_path, private)
    with pytest.raises(NotAttested, match="is about sha256:6666"):
        attest.check(dataclasses.replace(entry, digest=f"sha256:{'0' * 64}"), tmp_path, public)
    subject = [{"name": "host/flashinfer", "digest": {"sha256": "0" * 64}}]
    with pytest.raises(NotAttested, match="is about sha256:0000"):
        attest.check(resealed_as(tmp_path, entry, private, {"subject": subject}), tmp_path, public)


def test_an_edited_index_is_refused(tmp_path: Path, keys: Keys) -> None:
    """One signature covers the whole entry: SBOM, record, and the names under which it is found."""
    private, public = keys()
    entry = written(tmp_path, private)
    attest.check(entry, tmp_path, public)
    unchecked = dataclasses.replace(VERIFIED, image=dataclasses.replace(IMAGE, content="0" * 64))
    for changed, words in (
        ({"verified": unchecked}, "record of .* is not the one that was signed"),
        ({"recipe": "vllm-0.19.1"}, "with recipe 'vllm-0.19.1'; signed is 'flashinfer-0.6.6'"),
        ({"build_id": "0" * 64}, "with build id"),
        ({"tag": "newer"}, "with tag 'newer'"),
    ):
        with pytest.raises(NotAttested, match=words):
            attest.check(dataclasses.replace(entry, **changed), tmp_path, public)
    assert entry.attested
    (tmp_path / entry.attested.sbom.path).write_text("{}")
    with pytest.raises(NotAttested, match="was changed"):
        attest.check(entry, tmp_path, public)
    with pytest.raises(NotAttested, match=r"SBOM of .* is not the one"):
        attest.check(listed(tmp_path, entry), tmp_path, public)


def test_an_index_reads_nothing_but_what_lies_beside_it(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    entry = written(tmp_path / "index", private)
    assert entry.attested
    (tmp_path / "outside.json").write_text("secret")
    away = dataclasses.replace(entry.attested.statement, path="../outside.json")
    with pytest.raises(NotAttested, match=r"cannot read .*index/outside.json"):
        attest.check(
            dataclasses.replace(entry, attested=dataclasses.replace(entry.attested, statement=away)),
            tmp_path / "index",
            public,
        )


def test_keys_that_cannot_sign_or_be_trusted(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    (tmp_path / "text").write_text("not a key")
    big, _ = keys("rsa", rsa.generate_private_key(65537, 2048))
    curve, _ = keys("p384", ec.generate_private_key(ec.SECP384R1()))
    sealed = tmp_path / "sealed"
    sealed.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    for path, words in (
        (tmp_path / "absent", "cannot read"),
        (tmp_path / "text", "not a private key"),
        (public, "not a private key"),
        (sealed, "without a passphrase"),
        (big, "neither an ed25519 nor"),
        (curve, "neither an ed25519 nor"),
    ):
        with pytest.raises(BadKey, match=words):
            attest.signer(path)
    entry = written(tmp_path / "index", private)
    with pytest.raises(BadKey, match="not a public key"):
        attest.check(entry, tmp_path / "index", private)


def other_image(content: str = "0" * 64, **labels: str) -> Image:
    return dataclasses.replace(
        IMAGE, content=content, labels=LABELS | {f"sm120kit.{key}": text for key, text in labels.items()}
    )


def test_what_changed_between_two_images() -> None:
    assert registry.changes(IMAGE, IMAGE) == ()
    assert registry.changes(IMAGE, other_image()) == ("its content, for no reason that its labels name",)
    assert registry.changes(IMAGE, other_image(wheels="numpy==2.1,idna==3.1", reference="x:y", context="9" * 64)) == (
        "wheel idna 3.1 added",
        "wheel numpy 2.0 -> 2.1",
        "wheel torch 2.13.0 removed",
    )
    patched = other_image(
        patches="cutlass/one@333333333333,flashinfer/three@444444444444", modules="", plan="a" * 64, **{"build-id": "c" * 64}
    )
    assert registry.changes(IMAGE, patched) == (
        f"build-id {'7' * 12} -> {'c' * 12}",
        "module fp4_quantization_120f removed",
        "patch cutlass/one 111111111111 -> 333333333333",
        "patch flashinfer/three 444444444444 added",
        "patch flashinfer/two 222222222222 removed",
        f"plan {'b' * 12} -> {'a' * 12}",
    )
    moved = dataclasses.replace(
        IMAGE, content="0" * 64, labels=LABELS | {"org.opencontainers.image.base.digest": f"sha256:{'a' * 64}"}
    )
    assert registry.changes(IMAGE, moved) == (f"base sha256:{'5' * 12} -> sha256:{'a' * 12}",)


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    entry = written(tmp_path)
    assert entry.attested
    for one in (entry.attested.sbom, entry.attested.statement):
        content = (tmp_path / one.path).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (one.sha256, one.bytes)
        assert one.path.startswith(f"sha256-{'6' * 64}.")
