"""SBOM, provenance and signature of a published image; no registry is needed."""

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

from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, NotAttested
from sm120kit.images import attestation
from sm120kit.images.attestation import _signature
from sm120kit.images.attestation._origins import UNKNOWN, BasePackage, PackageOrigin, of_debian_package, of_wheel
from sm120kit.images.image_records import BuiltWheel, Check, CheckResult, Image, ImageContext, PublishedImage, VerifiedImage
from sm120kit.sources.source_records import LockedWheel

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
CONTEXT = ImageContext(
    digest="4" * 64,
    kind="flashinfer",
    base=f"docker.io/library/debian@sha256:{'5' * 64}",
    reference="sm120kit/flashinfer:tag",
    labels=LABELS,
    locked=(TORCH,),
    ours=(OURS,),
)
IMAGE = Image("sha256:1", "8" * 64, "linux/amd64", (), LABELS, "1000", 1)
VERIFIED = VerifiedImage(IMAGE, "sm120kit/flashinfer:tag", "suite", (Check("base", "user", CheckResult.PASSED),), {})
ENTRY = PublishedImage("host/flashinfer", "tag", f"sha256:{'6' * 64}", "flashinfer-0.6.6", "7" * 64, VERIFIED)

Keys = Callable[..., tuple[Path, Path]]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Create a private and a public key file."""

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


def attested(index: Path, key: Path | None = None, **changed: Any) -> PublishedImage:
    """Write SBOM and statement into ``index`` and return their entry."""
    index.mkdir(exist_ok=True)
    context = dataclasses.replace(CONTEXT, **changed)
    return dataclasses.replace(ENTRY, attested=attestation.write(ENTRY, context, index, key))


def sbom(directory: Path, **changed: Any) -> dict[str, Any]:
    entry = attested(directory, **changed)
    assert entry.attested
    return dict(json.loads((directory / entry.attested.sbom.path).read_text()))


def statement(directory: Path) -> dict[str, Any]:
    entry = attested(directory)
    assert entry.attested
    return dict(json.loads((directory / entry.attested.statement.path).read_text()))


def component(bill: dict[str, Any], name: str) -> dict[str, Any]:
    (match,) = (part for part in bill["components"] if part["name"] == name)
    return dict(match)


def test_sbom_is_valid_by_the_schema_of_cyclonedx(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    for number, changed in enumerate(({}, {"base": f"sha256:{'5' * 64}"}, {"locked": ()})):
        bill = sbom(tmp_path / str(number), **changed)
        problem = validator.validate_str(json.dumps(bill))
        assert problem is None, problem
        bill["components"][0]["type"] = "invalid"
        assert validator.validate_str(json.dumps(bill)) is not None


def test_sbom_wheel_has_a_purl_with_file_name(tmp_path: Path) -> None:
    torch = component(sbom(tmp_path), "torch")
    assert torch["purl"] == f"pkg:pypi/torch@2.13.0?file_name={TORCH.filename}"
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}] and "pedigree" not in torch


METADATA = "Metadata-Version: 2.4\nName: x\nVersion: 1\n"


@pytest.mark.parametrize(
    ("fields", "origin"),
    [
        ("License-Expression: MIT OR Apache-2.0\nAuthor: A", PackageOrigin("MIT OR Apache-2.0", (), "A")),
        ("License: Apache 2.0\nAuthor-email: Team X <x@example.org>", PackageOrigin("", ("Apache 2.0",), "Team X")),
        (f"License: {'long ' * 30}\nMaintainer: M\nAuthor: A", PackageOrigin("", (), "M")),
        (
            "License: BSD\nClassifier: License :: OSI Approved :: BSD License\nClassifier: License :: OSI Approved",
            PackageOrigin("", ("BSD License",), ""),
        ),
        ("License: UNKNOWN\nAuthor: UNKNOWN\nAuthor-email: x@example.org", PackageOrigin("", (), "x@example.org")),
        ("Summary: s", UNKNOWN),
    ],
)
def test_origin_of_a_wheel_is_what_its_metadata_states(fields: str, origin: PackageOrigin) -> None:
    assert of_wheel(f"{METADATA}{fields}\n\nLicense: in the description") == origin


def test_origin_of_a_debian_package_is_in_its_copyright_file() -> None:
    readable = "Format: https://x\n\nFiles: *\nLicense: GPL-2+\n text\n\nFiles: a\nLicense: MIT\n\nLicense: MIT\n text\n"
    assert of_debian_package("D", readable) == PackageOrigin("", ("GPL-2+", "MIT"), "D")
    prose = "It is under the GPL, see `/usr/share/common-licenses/GPL-3', and /usr/share/common-licenses/LGPL-2.1."
    assert of_debian_package("", prose) == PackageOrigin("", ("GPL-3", "LGPL-2.1"), "")
    assert of_debian_package("", "") == UNKNOWN


def test_sbom_has_licences_and_suppliers(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    wheels = [*CONTEXT.locked, *(built.wheel for built in CONTEXT.ours)]
    package = BasePackage("dash", "1", "amd64", "debian-12", "3" * 64, PackageOrigin("", ("GPL-2+", "MIT"), "Debian"))
    stated = {
        wheels[0].filename: PackageOrigin("MIT OR Apache-2.0", (), "A"),
        wheels[-1].filename: PackageOrigin("no SPDX", (), ""),
    }
    attestation.write(ENTRY, CONTEXT, tmp_path, None, [package], stated)
    (path,) = tmp_path.glob("*.cdx.json")
    bill = json.loads(path.read_text())
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text()) is None
    first = component(bill, wheels[0].name)
    assert first["licenses"] == [{"expression": "MIT OR Apache-2.0"}] and first["supplier"] == {"name": "A"}
    assert component(bill, wheels[-1].name)["licenses"] == [{"license": {"name": "no SPDX"}}]
    (dash,) = next(part for part in bill["components"] if part["bom-ref"] == "base")["components"]
    assert sorted(str(each["license"]) for each in dash["licenses"]) == ["{'id': 'MIT'}", "{'name': 'GPL-2+'}"]
    assert dash["purl"] == "pkg:deb/debian/dash@1?arch=amd64&distro=debian-12"
    assert dash["hashes"] == [{"alg": "SHA-256", "content": "3" * 64}]


def test_sbom_wheel_of_ours_has_pedigree_with_source_and_patches(tmp_path: Path) -> None:
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
    assert "text" not in patches["patches/flashinfer/no-longer-here.patch"]["diff"], "the file is missing"
    assert {"name": "sm120kit:sha256:patches/flashinfer/no-longer-here.patch", "value": "9" * 64} in ours["properties"]


def test_sbom_project_inside_a_source_has_its_own_pedigree(tmp_path: Path) -> None:
    (cutlass,) = component(sbom(tmp_path), "flashinfer-python")["components"]
    assert (cutlass["name"], cutlass["version"]) == ("cutlass", "4.2.1")
    assert cutlass["pedigree"]["ancestors"][0]["purl"] == "pkg:generic/cutlass@4.2.1"
    (patch,) = cutlass["pedigree"]["patches"]
    assert base64.b64decode(patch["diff"]["text"]["content"]) == CUTLASS_PATCH.read_bytes()


def test_sbom_image_and_base_have_digests(tmp_path: Path) -> None:
    bill = sbom(tmp_path / "a")
    assert bill["metadata"]["component"]["purl"] == f"pkg:oci/flashinfer@{ENTRY.digest}"
    base = component(sbom(tmp_path / "b", base=f"debian-12@sha256:{'5' * 64}"), "debian-12")
    assert base["version"] == f"sha256:{'5' * 64}" and base["purl"] == f"pkg:oci/debian-12@sha256:{'5' * 64}"
    (root,) = (node for node in bill["dependencies"] if node["ref"] == bill["metadata"]["component"]["bom-ref"])
    assert len(root["dependsOn"]) == 3


def test_same_records_give_the_same_bytes(tmp_path: Path, keys: Keys) -> None:
    private, _ = keys()
    first, second = attested(tmp_path / "a", private), attested(tmp_path / "b", private)
    assert first == second, "ed25519 signatures are deterministic"
    other = attested(tmp_path / "c", private, locked=(dataclasses.replace(TORCH, sha256="0" * 64),))
    assert first.attested and other.attested and other.attested.sbom.sha256 != first.attested.sbom.sha256
    bills = [json.loads((tmp_path / directory / first.attested.sbom.path).read_text()) for directory in "abc"]
    assert bills[0]["serialNumber"] == bills[1]["serialNumber"] != bills[2]["serialNumber"]
    assert "timestamp" not in bills[0]["metadata"]


def test_statement_contains_the_records(tmp_path: Path) -> None:
    content = statement(tmp_path)
    assert (content["_type"], content["predicateType"]) == ("https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1")
    assert content["subject"] == [{"name": "host/flashinfer", "digest": {"sha256": "6" * 64}}]
    build, run = content["predicate"]["buildDefinition"], content["predicate"]["runDetails"]
    assert build["externalParameters"] == {
        "recipe": "flashinfer-0.6.6",
        "buildId": "7" * 64,
        "base": CONTEXT.base,
        "kernels": [{"recipe": "flashinfer-0.6.6", "archs": ["sm_120f"], "groups": ["quick"]}],
    }
    inputs = {entry["name"]: entry["digest"] for entry in build["resolvedDependencies"]}
    assert inputs == {
        "base image": {"sha256": "5" * 64},
        "source of flashinfer": {"sha256": SDIST},
        **{f"patches/{patch['project']}/{patch['slug']}.patch": {"sha256": patch["sha256"]} for patch in ORIGIN["patches"]},
        TORCH.filename: {"sha256": "1" * 64},
    }
    assert "metadata" not in run, "records have no times"
    bill = next(file for file in run["byproducts"] if file["name"] == "SBOM")["digest"]["sha256"]
    assert bill == file_sha256(tmp_path / f"sha256-{'6' * 64}.cdx.json")


def test_statement_names_a_git_source_by_its_commit(tmp_path: Path) -> None:
    pin = {"project": "flashinfer", "url": "https://host/x.git", "commit": "a" * 40, "version": "0.6.6"}
    ours = dataclasses.replace(OURS, origin=ORIGIN | {"pin": pin})
    entry = attested(tmp_path, ours=(ours,))
    assert entry.attested
    content = json.loads((tmp_path / entry.attested.statement.path).read_text())
    dependencies = content["predicate"]["buildDefinition"]["resolvedDependencies"]
    (source,) = (dependency for dependency in dependencies if dependency["name"] == "source of flashinfer")
    assert source["digest"] == {"gitCommit": "a" * 40} and "git%2Bhttps" in source["uri"] and "a" * 40 in source["uri"]


def test_sbom_official_wheel_with_replaced_files_is_an_ancestor(tmp_path: Path) -> None:
    wheel = LockedWheel("vllm", "0.20.0+sm120kit.1", "vllm-ours.whl", "2" * 64)
    official = {"wheel": "vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl", "sha256": "a" * 64}
    pin = {"project": "vllm", "distribution": "vllm", "version": "0.20.0", "sha256": "b" * 64}
    empty: dict[str, Any] = {key: [] for key in ("inside", "patches", "archs", "modules", "kernel_groups")}
    origin = ORIGIN | {"pin": pin, "official": official} | empty
    entry = attested(tmp_path, ours=(OURS, BuiltWheel(wheel, origin)))
    assert entry.attested
    ancestors = component(json.loads((tmp_path / entry.attested.sbom.path).read_text()), "vllm")["pedigree"]["ancestors"]
    assert [ancestor["version"] for ancestor in ancestors] == ["0.20.0", "0.20.0"]
    assert sorted(ancestor["hashes"][0]["content"] for ancestor in ancestors) == ["a" * 64, "b" * 64]
    text = (tmp_path / entry.attested.statement.path).read_text()
    assert official["wheel"] in text and "a" * 64 in text


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_securesystemslib_accepts_the_signature(tmp_path: Path, keys: Keys, kind: str) -> None:
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    private, public = keys(key=ec.generate_private_key(ec.SECP256R1()) if kind == "ecdsa" else None)
    entry = attested(tmp_path / "index", private)
    assert entry.attested and entry.attested.statement.path.endswith(".dsse.json")
    attestation.verify(entry, tmp_path / "index", public)
    text = (tmp_path / "index" / entry.attested.statement.path).read_text()

    def read(path: Path) -> None:
        key = SSlibKey.from_crypto(serialization.load_pem_public_key(path.read_bytes()))
        key.keyid = ""  # securesystemslib looks up signatures by key id
        Envelope.from_dict(json.loads(text)).verify([key], 1)

    read(public)
    with pytest.raises(VerificationError):
        read(keys("other", ec.generate_private_key(ec.SECP256R1()) if kind == "ecdsa" else None)[1])


def edited_and_signed(
    directory: Path, entry: PublishedImage, key: Path, change: Callable[[dict[str, Any]], None]
) -> PublishedImage:
    """The entry with an edited statement that is signed again."""
    assert entry.attested
    path = directory / entry.attested.statement.path
    content = json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))
    change(content)
    path.write_bytes(_signature.signed(json.dumps(content).encode(), key))
    return with_current_hashes(directory, entry)


def with_current_hashes(directory: Path, entry: PublishedImage) -> PublishedImage:
    """The entry with the hashes of the files as they are, like an index edited by an attacker."""
    assert entry.attested
    files = {
        name: dataclasses.replace(file, sha256=file_sha256(directory / file.path))
        for name, file in (("sbom", entry.attested.sbom), ("statement", entry.attested.statement))
    }
    return dataclasses.replace(entry, attested=dataclasses.replace(entry.attested, **files))


def test_verify_refuses_another_key_and_no_signature(tmp_path: Path, keys: Keys) -> None:
    (private, public), (_, other) = keys(), keys("other")
    directory = tmp_path / "index"
    entry = attested(directory, private)
    with pytest.raises(NotAttested, match="not signed with"):
        attestation.verify(entry, directory, other)
    for unsigned in (dataclasses.replace(entry, attested=None), attested(directory)):
        with pytest.raises(NotAttested, match=r"is not signed$"):
            attestation.verify(unsigned, directory, public)


def test_verify_refuses_a_bare_statement_listed_as_signed(tmp_path: Path, keys: Keys) -> None:
    _, public = keys()
    entry = attested(tmp_path)
    assert entry.attested
    claimed = dataclasses.replace(entry, attested=dataclasses.replace(entry.attested, signed=True))
    with pytest.raises(NotAttested, match="not a signed envelope"):
        attestation.verify(claimed, tmp_path, public)
    envelope = {"payloadType": "application/vnd.in-toto+json", "payload": "e30=", "signatures": []}
    (tmp_path / entry.attested.statement.path).write_text(json.dumps(envelope))
    with pytest.raises(NotAttested, match="not signed with"):
        attestation.verify(with_current_hashes(tmp_path, claimed), tmp_path, public)


def test_verify_refuses_a_changed_statement(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    entry = attested(tmp_path, private)
    assert entry.attested
    path = tmp_path / entry.attested.statement.path
    envelope = json.loads(path.read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b"sm_120f", b"sm_121a")
    path.write_text(json.dumps(envelope | {"payload": base64.b64encode(payload).decode()}))
    with pytest.raises(NotAttested, match="was changed: its sha256"):
        attestation.verify(entry, tmp_path, public)
    with pytest.raises(NotAttested, match="or was changed afterwards"):
        attestation.verify(with_current_hashes(tmp_path, entry), tmp_path, public)
    path.unlink()
    with pytest.raises(NotAttested, match="cannot read"):
        attestation.verify(entry, tmp_path, public)


def test_verify_refuses_another_type_of_payload(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same key may have signed other content; the type is part of the signed bytes."""
    private, public = keys()
    with monkeypatch.context() as other:
        other.setattr(_signature, "PAYLOAD_TYPE", "application/vnd.other+json")
        foreign = attested(tmp_path, private)
    with pytest.raises(NotAttested, match="not signed with"):
        attestation.verify(foreign, tmp_path, public)
    entry = attested(tmp_path, private)
    assert entry.attested
    path = tmp_path / entry.attested.statement.path
    path.write_text(path.read_text().replace("vnd.in-toto+json", "vnd.other+json"))
    with pytest.raises(NotAttested, match="not signed with"):
        attestation.verify(with_current_hashes(tmp_path, entry), tmp_path, public)
    with pytest.raises(NotAttested, match="not a provenance statement"):
        attestation.verify(signed_with(tmp_path, entry, private, {"predicateType": "https://x/y"}), tmp_path, public)


def signed_with(directory: Path, entry: PublishedImage, key: Path, changed: dict[str, Any]) -> PublishedImage:
    attested(directory, key)
    return edited_and_signed(directory, entry, key, lambda content: content.update(changed))


def test_verify_refuses_a_statement_about_another_image(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    entry = attested(tmp_path, private)
    with pytest.raises(NotAttested, match="signed is 'sha256:6666"):
        attestation.verify(dataclasses.replace(entry, digest=f"sha256:{'0' * 64}"), tmp_path, public)
    subject = [{"name": "host/flashinfer", "digest": {"sha256": "0" * 64}}]
    with pytest.raises(NotAttested, match="signed is 'sha256:0000"):
        attestation.verify(signed_with(tmp_path, entry, private, {"subject": subject}), tmp_path, public)


def test_verify_refuses_an_edited_entry(tmp_path: Path, keys: Keys) -> None:
    """A single signature covers the entire entry: SBOM, record, and the names by which it is selected."""
    private, public = keys()
    entry = attested(tmp_path, private)
    attestation.verify(entry, tmp_path, public)
    unchecked = dataclasses.replace(VERIFIED, image=dataclasses.replace(IMAGE, content="0" * 64))
    for changed, message in (
        ({"verified": unchecked}, "with record of the checks"),
        ({"recipe": "vllm-0.19.1"}, "with recipe 'vllm-0.19.1'; signed is 'flashinfer-0.6.6'"),
        ({"build_id": "0" * 64}, "with build id"),
        ({"tag": "newer"}, "with tag 'newer'"),
    ):
        with pytest.raises(NotAttested, match=message):
            attestation.verify(dataclasses.replace(entry, **changed), tmp_path, public)
    assert entry.attested
    (tmp_path / entry.attested.sbom.path).write_text("{}")
    with pytest.raises(NotAttested, match="was changed"):
        attestation.verify(entry, tmp_path, public)
    with pytest.raises(NotAttested, match="with SBOM"):
        attestation.verify(with_current_hashes(tmp_path, entry), tmp_path, public)


def test_verify_reads_only_files_beside_the_index(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    entry = attested(tmp_path / "index", private)
    assert entry.attested
    (tmp_path / "outside.json").write_text("secret")
    outside = dataclasses.replace(entry.attested.statement, path="../outside.json")
    with pytest.raises(NotAttested, match=r"cannot read .*index/outside.json"):
        attestation.verify(
            dataclasses.replace(entry, attested=dataclasses.replace(entry.attested, statement=outside)),
            tmp_path / "index",
            public,
        )


def test_signer_and_verify_refuse_unsuitable_keys(tmp_path: Path, keys: Keys) -> None:
    private, public = keys()
    (tmp_path / "text").write_text("not a key")
    big, _ = keys("rsa", rsa.generate_private_key(65537, 2048))
    curve, _ = keys("p384", ec.generate_private_key(ec.SECP384R1()))
    encrypted = tmp_path / "encrypted"
    encrypted.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    for path, message in (
        (tmp_path / "absent", "cannot read"),
        (tmp_path / "text", "not a private key"),
        (public, "not a private key"),
        (encrypted, "without a passphrase"),
        (big, "neither an ed25519 nor"),
        (curve, "neither an ed25519 nor"),
    ):
        with pytest.raises(BadInput, match=message):
            attestation.require_private_key(path)
    entry = attested(tmp_path / "index", private)
    with pytest.raises(BadInput, match="not a public key"):
        attestation.verify(entry, tmp_path / "index", private)


def other_image(content: str = "0" * 64, **labels: str) -> Image:
    return dataclasses.replace(
        IMAGE, content=content, labels=LABELS | {f"sm120kit.{key}": text for key, text in labels.items()}
    )


def test_entry_has_the_hashes_of_its_files(tmp_path: Path) -> None:
    entry = attested(tmp_path)
    assert entry.attested
    for file in (entry.attested.sbom, entry.attested.statement):
        content = (tmp_path / file.path).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (file.sha256, file.bytes)
        assert file.path.startswith(f"sha256-{'6' * 64}.")
