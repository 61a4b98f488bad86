"""Attest published images (``(PublishedImage, ImageContext) -> Attestation``): SBOM, provenance and signature.

Two files beside the index: an SBOM (CycloneDX 1.6) and an in-toto statement with SLSA provenance, in a DSSE envelope if it is
signed. Both contain only what records of the build and the base contain.
The statement identifies the image by the digest of its manifest, and the SBOM and the record of the checks by hash, so that a
single signature covers the entire entry of the index.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import NotAttested, RequirementMissing
from sm120kit.core.outside import parse_json, read_input
from sm120kit.images.attestation import _signature
from sm120kit.images.attestation._origins import BasePackage, PackageOrigin
from sm120kit.images.image_records import Attestation, ImageContext, PublishedImage
from sm120kit.wheels.build_records import Artifact

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
SBOM, RECORD = "SBOM", "record of the checks"
"""Names of byproducts in a statement."""

_REPORT = "do not use it; report it to the publisher of the index"


def write(
    entry: PublishedImage,
    context: ImageContext,
    directory: Path,
    key: Path | None,
    packages: Sequence[BasePackage] = (),
    wheels: Mapping[str, PackageOrigin] = MappingProxyType({}),
) -> Attestation:
    """Write SBOM and statement of ``entry`` into ``directory``, named by its digest, and return their record for the index.

    ``packages`` are those of the base, ``wheels`` what the wheels state by the names of their files.

    Raises:
        RequirementMissing: the SBOM library is not installed.
        ResourceUnavailable, SystemRefused: the files cannot be written.
    """
    try:
        from sm120kit.images.attestation import _provenance, _sbom
    except ModuleNotFoundError as error:
        raise RequirementMissing("cyclonedx-python-lib is not installed", "pip install 'sm120kit[docker]'") from error
    name = entry.digest.replace(":", "-")
    bill = _sbom.document(context, entry.verified.image, entry.digest, packages, wheels)
    record = _artifact(f"{name}.cdx.json", bill)
    statement = _provenance.statement(context, entry, record.sha256)
    if key:
        statement = _signature.signed(statement, key)
    file = _artifact(f"{name}.{'dsse' if key else 'intoto'}.json", statement)
    write_atomic(directory / record.path, bill)
    write_atomic(directory / file.path, statement)
    return Attestation(record, file, signed=key is not None)


def verify(entry: PublishedImage, directory: Path, trusted: Path) -> None:
    """Verify that an entry of the index agrees with its statement, and that the statement is signed by ``trusted``.

    ``trusted`` is a public key in PEM.

    Raises:
        NotAttested: the statement is missing, unsigned, signed with another key, changed, or about another image.
        BadInput: ``trusted`` is no such key.
    """
    name = f"{entry.repository}@{entry.digest}"
    if entry.attested is None or not entry.attested.signed:
        raise NotAttested(
            f"the statement about {name} is not signed",
            "`sm120kit publish --key FILE` signs it; without --trust, signatures are not verified",
        )
    content = _read(directory, entry.attested.statement)
    signed = _signed(_signature.verified_payload(content, trusted, name), name)
    labels = entry.verified.image.labels
    for field, listed, claimed in (
        ("digest", entry.digest, signed["digest"]),
        (SBOM, hashlib.sha256(_read(directory, entry.attested.sbom)).hexdigest(), signed[SBOM]),
        (RECORD, digest_of(entry.verified), signed[RECORD]),
        ("recipe", entry.recipe, labels.get("sm120kit.recipe", "")),
        ("build id", entry.build_id, labels.get("sm120kit.build-id", "")),
        ("tag", entry.tag, entry.verified.reference.rpartition(":")[2]),
        ("time of publishing", entry.published, signed["published"]),
    ):
        if listed != claimed:
            raise NotAttested(f"the index lists {name} with {field} {listed!r}; signed is {claimed!r}", _REPORT)


def _signed(payload: bytes, name: str) -> dict[str, str]:
    """What a statement about ``name`` claims: digest of the image, sha256 of SBOM and record, time of publishing."""
    try:
        content = parse_json(payload)
        if (content["_type"], content["predicateType"]) != (STATEMENT, PREDICATE):
            raise ValueError(f"{content['_type']} with {content['predicateType']}")
        predicate, (subject,) = content["predicate"], content["subject"]
        byproducts = {file["name"]: file["digest"]["sha256"] for file in predicate["runDetails"]["byproducts"]}
        published = predicate["buildDefinition"]["internalParameters"].get("published", "")
        digest = f"sha256:{subject['digest']['sha256']}"
        return {"digest": digest, SBOM: byproducts[SBOM], RECORD: byproducts[RECORD], "published": published}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAttested(
            f"the signed content about {name} is not a provenance statement of sm120kit: {error}", "it may be the wrong file"
        ) from error


def _artifact(name: str, content: bytes) -> Artifact:
    return Artifact(name, hashlib.sha256(content).hexdigest(), len(content))


def _read(directory: Path, listed: Artifact) -> bytes:
    """Read a file beside the index, by its name without directories, and verify its sha256."""
    path = directory / Path(listed.path).name
    try:
        content = read_input(path)
    except OSError as error:
        raise NotAttested(f"cannot read {path}: {error.strerror}", "it belongs beside the index; fetch both") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != listed.sha256:
        raise NotAttested(f"{path} was changed: its sha256 is {sha256}, the index has {listed.sha256}", _REPORT)
    return content
