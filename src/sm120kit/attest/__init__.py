"""``(PublishedImage, ImageContext) -> Attested``: what a published image is made of, signed, for any tool to read.

Two files beside the index: an SBOM (CycloneDX 1.6) and an in-toto statement with SLSA provenance, in a DSSE envelope when there
is a key. Both are made from records alone: what no record says is not in them. The statement names the image by the digest of
its manifest, and by hash the SBOM and the record of its checks, so that one signature covers the whole entry of the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from sm120kit.attest import provenance, sbom
from sm120kit.attest.signature import opened, signer
from sm120kit.errors import NotAttested
from sm120kit.records import Artifact, Attested, ImageContext, PublishedImage
from sm120kit.workspace import digest_of, write_atomic

__all__ = ["check", "signer", "write"]

_ASK = "do not use it; ask whoever publishes the index"


def write(entry: PublishedImage, made: ImageContext, folder: Path, sign: Callable[[bytes], bytes] | None) -> Attested:
    """Write SBOM and statement of ``entry`` into ``folder``, named by its digest, and return what the index says of them.

    Raises:
        ToolchainMissing: the SBOM library is not installed.
        NotEnoughDisk, StateUnwritable: they cannot be written.
    """
    name = entry.digest.replace(":", "-")
    bill = sbom.document(made, entry.verified.image, entry.digest)
    record = _artifact(f"{name}.cdx.json", bill)
    statement = provenance.statement(made, entry, record.sha256)
    if sign:
        statement = sign(statement)
    kept = _artifact(f"{name}.{'dsse' if sign else 'intoto'}.json", statement)
    write_atomic(folder / record.path, bill)
    write_atomic(folder / kept.path, statement)
    return Attested(record, kept, signed=sign is not None)


def check(entry: PublishedImage, folder: Path, trusted: Path) -> None:
    """Make sure that the holder of the public key ``trusted`` says of this very image what the index says.

    Raises:
        NotAttested: there is no statement, or it is not signed, not by that key, changed, or about another image.
        BadKey: ``trusted`` is not a public key.
    """
    name = f"{entry.repository}@{entry.digest}"
    if entry.attested is None or not entry.attested.signed:
        raise NotAttested(
            f"nobody signed what {name} is", "`sm120kit publish --key FILE` signs; without --trust the index is believed"
        )
    said = provenance.claims(opened(_read(folder, entry.attested.statement), trusted, name), name)
    if entry.digest not in said.subjects:
        raise NotAttested(f"the signed statement is about {', '.join(said.subjects) or 'nothing'}, not about {name}", _ASK)
    if said.sbom != hashlib.sha256(_read(folder, entry.attested.sbom)).hexdigest():
        raise NotAttested(f"the SBOM of {name} is not the one that the signed statement names", _ASK)
    if said.record != digest_of(entry.verified):
        raise NotAttested(f"the record of {name} is not the one that was signed: somebody edited the index", _ASK)
    labels = entry.verified.image.labels
    for what, listed, signed in (
        ("recipe", entry.recipe, labels.get("sm120kit.recipe", "")),
        ("build id", entry.build_id, labels.get("sm120kit.build-id", "")),
        ("tag", entry.tag, entry.verified.reference.rpartition(":")[2]),
    ):
        if listed != signed:
            raise NotAttested(f"the index lists {name} with {what} {listed!r}; signed is {signed!r}", _ASK)


def _artifact(name: str, content: bytes) -> Artifact:
    return Artifact(name, hashlib.sha256(content).hexdigest(), len(content))


def _read(folder: Path, listed: Artifact) -> bytes:
    """A file beside the index, by its name alone, when it is the one that is listed."""
    path = folder / Path(listed.path).name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotAttested(f"cannot read {path}: {error.strerror}", "it belongs beside the index; fetch both") from error
    found = hashlib.sha256(content).hexdigest()
    if found != listed.sha256:
        raise NotAttested(f"{path} was changed: its sha256 is {found}, the index has {listed.sha256}", _ASK)
    return content
