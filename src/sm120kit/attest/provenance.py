"""How an image came about, as an in-toto statement with SLSA provenance (docs/images.md describes the build type).

https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1 define the forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm120kit import __version__
from sm120kit.attest import names
from sm120kit.errors import NotAttested
from sm120kit.records import ImageContext, PublishedImage
from sm120kit.workspace import digest_of, record_json

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "sm120kit:build/image/v1"
BUILDER = "sm120kit:builder/local"
"""Whoever ran sm120kit: it knows of no platform that vouches for it, so the key is all there is to trust."""

_SBOM, _RECORD = "SBOM", "record of the checks"


@dataclass(frozen=True)
class Claims:
    """What a statement says: digests of images, and the sha256 of the SBOM and of the record of the checks."""

    subjects: tuple[str, ...]
    sbom: str
    record: str


def statement(made: ImageContext, entry: PublishedImage, sbom_sha256: str) -> bytes:
    """The statement about an entry of the index. Its subject is the manifest, by the digest that the registry gave it."""
    origins = {built.wheel.filename: built.origin for built in made.ours}
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
                        "base": made.base,
                        "kernels": [
                            {"recipe": origin["recipe"], "archs": origin["archs"], "groups": origin["kernel_groups"]}
                            for origin in origins.values()
                        ],
                    },
                    "internalParameters": {
                        "kind": made.kind,
                        "context": made.digest,
                        "arguments": made.arguments,
                        "wheels": origins,
                    },
                    "resolvedDependencies": list(_dependencies(made)),
                },
                "runDetails": {
                    "builder": {"id": BUILDER, "version": {"sm120kit": __version__}},
                    "byproducts": [
                        _resource(_SBOM, sbom_sha256, mediaType="application/vnd.cyclonedx+json"),
                        _resource(_RECORD, digest_of(entry.verified), mediaType="application/json"),
                        *(_resource(built.wheel.filename, built.wheel.sha256) for built in made.ours),
                    ],
                },
            },
        }
    ).encode()


def claims(payload: bytes, name: str) -> Claims:
    """What a statement, whose signature was checked, says of ``name``.

    Raises:
        NotAttested: it is not a statement of ours.
    """
    try:
        said = json.loads(payload)
        if (said["_type"], said["predicateType"]) != (STATEMENT, PREDICATE):
            raise ValueError(f"{said['_type']} with {said['predicateType']}")
        found = {one["name"]: one["digest"]["sha256"] for one in said["predicate"]["runDetails"]["byproducts"]}
        subjects = tuple(f"sha256:{one['digest']['sha256']}" for one in said["subject"])
        return Claims(subjects, found[_SBOM], found[_RECORD])
    except (ValueError, KeyError, TypeError) as error:
        raise NotAttested(
            f"what was signed about {name} is not a provenance statement of sm120kit: {error}", "was the file mixed up?"
        ) from error


def _dependencies(made: ImageContext) -> Iterator[dict[str, Any]]:
    """Everything that went in, by digest: base, sources, patches in their order, wheels, and what installs them."""
    yield _resource("base image", made.base.rpartition("sha256:")[2], names.of_base(made.base))
    for built in made.ours:
        pin = built.origin["pin"]
        kind, digest = ("gitCommit", pin["commit"]) if "commit" in pin else ("sha256", pin["sha256"])
        yield _resource(f"source of {pin['project']}", digest, names.of_source(pin), kind=kind)
        for patch in built.origin["patches"]:
            yield _resource(f"patches/{patch['project']}/{patch['slug']}.patch", patch["sha256"])
    official = (wheel for built in made.ours for wheel in names.packed_again(built))
    for wheel in (*made.locked, *official, made.installer):
        yield _resource(wheel.filename, wheel.sha256, names.of_wheel(wheel))


def _resource(name: str, digest: str, uri: object = None, *, kind: str = "sha256", **more: str) -> dict[str, Any]:
    return {"name": name, "digest": {kind: digest}, **({"uri": str(uri)} if uri else {}), **more}
