"""What a statement about an image claims; :mod:`._provenance` writes it."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.core.errors import NotAttested
from sm120kit.core.outside import parse_json

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
SBOM, RECORD = "SBOM", "record of the checks"
"""Names of byproducts."""


@dataclass(frozen=True)
class Claims:
    """Contents of a statement: digests of images, sha256 of the SBOM and of the record of the checks, time of publishing."""

    subjects: tuple[str, ...]
    sbom: str
    record: str
    published: str


def claims(payload: bytes, name: str) -> Claims:
    """Read the contents of a statement about ``name``. Its signature must have been verified.

    Raises:
        NotAttested: it is not a statement of sm120kit.
    """
    try:
        content = parse_json(payload)
        if (content["_type"], content["predicateType"]) != (STATEMENT, PREDICATE):
            raise ValueError(f"{content['_type']} with {content['predicateType']}")
        predicate = content["predicate"]
        byproducts = {file["name"]: file["digest"]["sha256"] for file in predicate["runDetails"]["byproducts"]}
        subjects = tuple(f"sha256:{subject['digest']['sha256']}" for subject in content["subject"])
        published = predicate["buildDefinition"]["internalParameters"].get("published", "")
        return Claims(subjects, byproducts[SBOM], byproducts[RECORD], published)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAttested(
            f"the signed content about {name} is not a provenance statement of sm120kit: {error}", "it may be the wrong file"
        ) from error
