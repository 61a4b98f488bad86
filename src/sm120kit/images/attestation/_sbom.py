"""SBOM of an image in CycloneDX 1.6, and its package URLs. It has no date, so that the same records give the same bytes.

The library is of the extra ``docker``: :mod:`._attest` imports this module where it is used.
"""

import base64
import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cyclonedx.model import AttachedText, Encoding, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_expression, is_supported_id
from packageurl import PackageURL

from sm120kit import __version__
from sm120kit.core.data_roots import data_root, top_root
from sm120kit.core.digests import digest_of
from sm120kit.core.record_files import record_json
from sm120kit.images.attestation._origins import UNKNOWN, BasePackage, PackageOrigin
from sm120kit.images.image_records import BuiltWheel, Image, ImageContext
from sm120kit.sources.source_records import LockedWheel

_NAMESPACE = uuid.UUID("6f1c2a0e-3b5d-5c1e-9a57-5d1b8c0f1204")
"""Namespace of serial numbers that follow from the content (RFC 9562, version 5)."""


def document(
    context: ImageContext,
    image: Image,
    digest: str,
    packages: Sequence[BasePackage] = (),
    wheels: Mapping[str, PackageOrigin] = MappingProxyType({}),
) -> bytes:
    """The SBOM of the image with manifest ``digest``, as JSON.

    It lists each installed wheel with its sha256; each patched wheel with the pinned source as ancestor and the patches on it,
    and the projects inside that source with their patches; and the base by digest, with its Debian packages. Each
    has the licences and the supplier that it states; ``wheels`` are those of wheels, by the names of their files.
    """
    purl = image_purl(context.reference.partition(":")[0].rpartition("/")[2], digest)

    tool = Component(type=ComponentType.APPLICATION, name="sm120kit", version=__version__)
    root = Component(
        type=ComponentType.CONTAINER,
        name=context.reference,
        version=context.labels["org.opencontainers.image.version"],
        bom_ref=str(purl),
        purl=purl,
        properties=_properties({"content": image.content, "platform": image.platform, "context": context.digest}),
    )
    parts = [_base(context, packages), *map(_wheel, context.locked), *map(_ours, context.ours)]
    installed = (*context.locked, *(built.wheel for built in context.ours))
    for part, wheel in zip(parts[1:], installed, strict=True):
        _state_origin(part, wheels.get(wheel.filename, UNKNOWN))
    bom = Bom(components=parts, metadata=BomMetaData(component=root, tools=ToolRepository(components=[tool])))
    bom.register_dependency(root, parts)
    written: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del written["metadata"]["timestamp"], written["serialNumber"]
    written["serialNumber"] = uuid.uuid5(_NAMESPACE, digest_of(written)).urn
    return record_json(written).encode()


def _base(context: ImageContext, packages: Sequence[BasePackage]) -> Component:
    name, _, digest = context.base.partition("@")
    return Component(
        type=ComponentType.CONTAINER,
        name=name,
        version=digest,
        bom_ref="base",
        purl=base_purl(context.base),
        description="the base image",
        components=map(_package, packages),
    )


def _package(package: BasePackage) -> Component:
    part = _library(package.name, package.version, package_purl(package), package.sha256)
    _state_origin(part, package.origin)
    return part


def _state_origin(part: Component, origin: PackageOrigin) -> None:
    """Give a component its licences and its supplier."""
    if origin.expression and is_expression(origin.expression):
        part.licenses.add(LicenseExpression(origin.expression))
    else:
        names = filter(None, (origin.expression, *origin.licenses))
        part.licenses.update(
            DisjunctiveLicense(id=name) if is_supported_id(name) else DisjunctiveLicense(name=name) for name in names
        )
    if origin.supplier:
        part.supplier = OrganizationalEntity(name=origin.supplier)


def _wheel(wheel: LockedWheel) -> Component:
    return _library(wheel.name, wheel.version, wheel_purl(wheel), wheel.sha256)


def _library(name: str, version: str, purl: PackageURL, sha256: str) -> Component:
    """A component by its purl; ``sha256`` may be empty."""
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=str(purl),
        purl=purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else (),
    )


def _ours(built: BuiltWheel) -> Component:
    """A wheel that sm120kit built, with its pedigree, and the projects inside its source with theirs."""
    part, origin, pin = _wheel(built.wheel), built.origin, built.origin["pin"]
    ours = _patches_of(pin["project"], built)
    ancestors = [_source(pin), *map(_wheel, official_wheel(built))]
    part.pedigree = _pedigree(ancestors, ours, f"git tree {origin['tree']} is the patched source, with headers of our own")
    part.properties = _properties(
        {key: _text(origin[key]) for key in ("recipe", "plan", "commit", "tree", "archs", "modules")} | _hashes(ours)
    )
    part.components = [_inside(project, built) for project in origin["inside"]]
    return part


def _patches_of(project: str, built: BuiltWheel) -> list[Mapping[str, str]]:
    """The patches of a project in a wheel: those of its series, then local ones, whose project is ``local/<project>``."""
    local = [{**patch, "project": f"local/{patch['project']}"} for patch in built.origin.get("local", ())]
    return [patch for patch in (*built.origin["patches"], *local) if patch["project"].removeprefix("local/") == project]


def _inside(project: Mapping[str, str], built: BuiltWheel) -> Component:
    named = purl("generic", project["project"], project["version"])
    patches = _patches_of(project["project"], built)
    ancestor = Component(type=ComponentType.LIBRARY, name=project["project"], version=project["version"], purl=named)
    return Component(
        type=ComponentType.LIBRARY,
        name=project["project"],
        version=project["version"],
        bom_ref=f"{project['path']} of {built.wheel.filename}",
        purl=named,
        description=f"carried by the source at {project['path']}",
        pedigree=_pedigree([ancestor], patches, "as it lies in the pinned source, with these patches"),
        properties=_properties(_hashes(patches)),
    )


def _source(pin: dict[str, str]) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=pin.get("distribution", pin["project"]),
        version=pin["version"],
        purl=source_purl(pin),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=pin["sha256"])] if "sha256" in pin else (),
    )


def _pedigree(ancestors: Sequence[Component], patches: Sequence[Mapping[str, str]], notes: str) -> Pedigree:
    return Pedigree(ancestors=ancestors, patches=map(_patch, patches), notes=notes)


def _patch(patch: Mapping[str, str]) -> Patch:
    """A patch with its text in base64 if the installed file is the one that was applied; otherwise by name only."""
    paths = (root / _path(patch) for root in (top_root(), data_root()))
    content = next((path.read_bytes() for path in paths if path.is_file()), b"")
    text = None
    if hashlib.sha256(content).hexdigest() == patch["sha256"]:
        encoded = base64.b64encode(content).decode()
        text = AttachedText(content=encoded, content_type="text/x-patch", encoding=Encoding.BASE_64)
    return Patch(type=PatchClassification.UNOFFICIAL, diff=Diff(text=text, url=XsUri(_path(patch))))


def _path(patch: Mapping[str, str]) -> str:
    directory = "" if patch["project"].startswith("local/") else "patches/"
    return f"{directory}{patch['project']}/{patch['slug']}.patch"


def _hashes(patches: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Properties with the sha256 of patches: CycloneDX has no field for it."""
    return {f"sha256:{_path(patch)}": patch["sha256"] for patch in patches}


def _properties(values: Mapping[str, str]) -> Any:
    return [Property(name=f"sm120kit:{name}", value=value) for name, value in values.items()]


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def purl(kind: str, name: str, version: str, namespace: str | None = None, /, **qualifiers: str) -> PackageURL:
    """A package URL."""
    return PackageURL(type=kind, namespace=namespace, name=name, version=version, qualifiers=qualifiers or None)


def wheel_purl(wheel: LockedWheel) -> PackageURL:
    """The purl of a wheel. The version of a patched wheel has a local part, so that it matches no wheel on an index."""
    return purl("pypi", wheel.name, wheel.version, file_name=wheel.filename)


def official_wheel(built: BuiltWheel) -> tuple[LockedWheel, ...]:
    """The upstream wheel in which a patched wheel replaces some files; empty if it was built from source entirely."""
    official = built.origin.get("official")
    if official is None:
        return ()
    version = built.wheel.version.partition("+")[0]
    return (LockedWheel(built.wheel.name, version, official["wheel"], official["sha256"]),)


def image_purl(name: str, digest: str) -> PackageURL:
    """The purl of an image by the digest of its manifest."""
    return purl("oci", name, digest)


def base_purl(base: str) -> PackageURL:
    """The purl of a base, ``name@sha256:...``."""
    name, _, digest = base.partition("@")
    return image_purl(name, digest)


def package_purl(package: BasePackage) -> PackageURL:
    """The purl of a Debian package (purl-spec, types/deb): its namespace is the distribution, as ``debian``."""
    namespace = package.system.partition("-")[0] or "debian"
    qualifiers = {"arch": package.architecture} | ({"distro": package.system} if package.system else {})
    return purl("deb", package.name, package.version, namespace, **qualifiers)


def source_purl(pin: dict[str, str]) -> PackageURL:
    """The purl of a pinned source: an sdist or wheel, or a git commit."""
    if "commit" in pin:
        return purl("generic", pin["project"], pin["version"], vcs_url=f"git+{pin['url']}@{pin['commit']}")
    return purl("pypi", pin["distribution"], pin["version"])
