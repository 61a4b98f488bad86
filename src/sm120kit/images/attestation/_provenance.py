"""Provenance of an image: an in-toto statement with SLSA provenance (docs/publish.md describes the build type).

https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1 define the formats.
"""

from collections.abc import Iterator
from typing import Any

from sm120kit import __version__
from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.digests import digest_of
from sm120kit.core.record_files import record_json
from sm120kit.images.attestation._attest import PREDICATE, RECORD, SBOM, STATEMENT
from sm120kit.images.attestation._sbom import base_purl, official_wheel, source_purl, wheel_purl
from sm120kit.images.image_records import ImageContext, PublishedImage

BUILD_TYPE = "sm120kit:build/image/v1"
BUILDER = "sm120kit:builder/local"
"""A run of sm120kit on any machine. No build platform confirms it; only the signature can be trusted."""


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
                        "arguments": {"SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH)},
                        "wheels": origins,
                        **({"published": entry.published} if entry.published else {}),
                    },
                    "resolvedDependencies": list(_dependencies(context)),
                },
                "runDetails": {
                    "builder": {"id": BUILDER, "version": {"sm120kit": __version__}},
                    "byproducts": [
                        _resource(SBOM, sbom_sha256, mediaType="application/vnd.cyclonedx+json"),
                        _resource(RECORD, digest_of(entry.verified), mediaType="application/json"),
                        *(_resource(built.wheel.filename, built.wheel.sha256) for built in context.ours),
                    ],
                },
            },
        }
    ).encode()


def _dependencies(context: ImageContext) -> Iterator[dict[str, Any]]:
    """All inputs by digest: base, sources, patches in their order, wheels."""
    yield _resource("base image", context.base.partition("sha256:")[2], base_purl(context.base))
    for built in context.ours:
        pin = built.origin["pin"]
        kind, digest = ("gitCommit", pin["commit"]) if "commit" in pin else ("sha256", pin["sha256"])
        yield _resource(f"source of {pin['project']}", digest, source_purl(pin), kind=kind)
        for patch in built.origin["patches"]:
            yield _resource(f"patches/{patch['project']}/{patch['slug']}.patch", patch["sha256"])
        for patch in built.origin.get("local", ()):
            yield _resource(f"local patch {patch['project']}/{patch['slug']}", patch["sha256"])
    official = (wheel for built in context.ours for wheel in official_wheel(built))
    for wheel in (*context.locked, *official):
        yield _resource(wheel.filename, wheel.sha256, wheel_purl(wheel))


def _resource(name: str, digest: str, uri: object = None, *, kind: str = "sha256", **more: str) -> dict[str, Any]:
    return {"name": name, "digest": {kind: digest}, **({"uri": str(uri)} if uri else {}), **more}
