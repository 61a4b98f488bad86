"""Provenance of an image: an in-toto statement with SLSA provenance (docs/publish.md describes the build type).

https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1 define the formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm120kit import __version__
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import NotAttested
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import record_json
from sm120kit.images.attestation import _purls
from sm120kit.images.image_records import ImageContext, PublishedImage

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "sm120kit:build/image/v1"
BUILDER = "sm120kit:builder/local"
"""A run of sm120kit on any machine. No build platform confirms it; only the signature can be trusted."""

_SBOM, _RECORD = "SBOM", "record of the checks"


@dataclass(frozen=True)
class Claims:
    """Contents of a statement: digests of images, sha256 of the SBOM and of the record of the checks, time of publishing."""

    subjects: tuple[str, ...]
    sbom: str
    record: str
    published: str


def statement(context: ImageContext, entry: PublishedImage, sbom_sha256: str) -> bytes:
    """The statement about an entry of the index, as JSON. Its subject is the manifest, by its digest in the registry."""
    origins = {built.wheel.filename: built.origin for built in context.ours}
    return record_json(
        {
            "_type": STATEMENT,
            "subject": [{"name": entry.repository, "digest": {"sha256": entry.digest.removeprefix("sha256:")}}],
            "predicateType": PREDICATE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": {
                        "recipe": entry.recipe,
                        "buildId": entry.build_id,
                        "base": context.base,
                        "kernels": [
                            {"recipe": origin["recipe"], "archs": origin["archs"], "groups": origin["kernel_groups"]}
                            for origin in origins.values()
                        ],
                    },
                    "internalParameters": {
                        "kind": context.kind,
                        "context": context.digest,
                        "arguments": {"SOURCE_DATE_EPOCH": str(context.epoch)},
                        "wheels": origins,
                        **({"published": entry.published} if entry.published else {}),
                    },
                    "resolvedDependencies": list(_dependencies(context)),
                },
                "runDetails": {
                    "builder": {"id": BUILDER, "version": {"sm120kit": __version__}},
                    "byproducts": [
                        _resource(_SBOM, sbom_sha256, mediaType="application/vnd.cyclonedx+json"),
                        _resource(_RECORD, digest_of(entry.verified), mediaType="application/json"),
                        *(_resource(built.wheel.filename, built.wheel.sha256) for built in context.ours),
                    ],
                },
            },
        }
    ).encode()


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
        return Claims(subjects, byproducts[_SBOM], byproducts[_RECORD], published)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAttested(
            f"the signed content about {name} is not a provenance statement of sm120kit: {error}", "it may be the wrong file"
        ) from error


def _dependencies(context: ImageContext) -> Iterator[dict[str, Any]]:
    """All inputs by digest: base, sources, patches in their order, wheels."""
    yield _resource("base image", context.base.partition("sha256:")[2], _purls.base_purl(context.base))
    for built in context.ours:
        pin = built.origin["pin"]
        kind, digest = ("gitCommit", pin["commit"]) if "commit" in pin else ("sha256", pin["sha256"])
        yield _resource(f"source of {pin['project']}", digest, _purls.source_purl(pin), kind=kind)
        for patch in built.origin["patches"]:
            yield _resource(f"patches/{patch['project']}/{patch['slug']}.patch", patch["sha256"])
        for patch in built.origin.get("local", ()):
            yield _resource(f"local patch {patch['project']}/{patch['slug']}", patch["sha256"])
    official = (wheel for built in context.ours for wheel in _purls.official_wheel(built))
    for wheel in (*context.locked, *official):
        yield _resource(wheel.filename, wheel.sha256, _purls.wheel_purl(wheel))


def _resource(name: str, digest: str, uri: object = None, *, kind: str = "sha256", **more: str) -> dict[str, Any]:
    return {"name": name, "digest": {kind: digest}, **({"uri": str(uri)} if uri else {}), **more}
