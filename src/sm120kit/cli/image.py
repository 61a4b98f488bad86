"""``sm120kit image``, ``verify image``, ``publish`` and ``pull``: build, check, push and pull images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import (
    ImageIndex,
    Index,
    Json,
    PublishedImages,
    SigningOptions,
    Sources,
    Trust,
)
from sm120kit.core import console
from sm120kit.core.errors import BadInput
from sm120kit.images import image_verification, publication, published_images
from sm120kit.images.checks import CheckReport
from sm120kit.images.checks.quick import left_out
from sm120kit.images.image_index import own_platform
from sm120kit.images.image_records import Check, CheckResult


def verify_image(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image by id, tag or digest.")],
    trust: Trust = None,
    index: Index = Path("images.json"),
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Run the checks of an image in the state directory and tag it if all pass. Exit code 1 if a check fails."""
    workspace = sources.workspace()
    if trust:
        published_images.require_signed(reference, ImageIndex(index, trust).source(), workspace)
        console.info(f"signature verified: the image is listed in {index}")
    report = image_verification.verify(reference, workspace)
    show_report(report, json=json)


def show_report(report: CheckReport, *, json: bool, whole: bool = True) -> None:
    """Print the results of an image's checks, without ``whole`` only those that did not pass. Exit code 1 if one failed."""
    if json:
        console.json_data(dataclasses.asdict(report))
    else:
        shown = [check for check in report.checks if check.verdict is not CheckResult.PASSED and not left_out([check])]
        _show_checks(report.checks if whole else shown)
        if whole:
            console.table(("fact", "value"), report.facts.items())
    passed = sum(check.verdict is CheckResult.PASSED for check in report.checks)
    failed = [check for check in report.checks if check.verdict is CheckResult.FAILED]
    slowest = max(report.checks, key=lambda check: check.seconds)
    time = f"{slowest.suite}/{slowest.name} took longest, {slowest.seconds:.0f} s"
    console.info(f"{passed} of {len(report.checks)} checks passed; {time}; `sm120kit verify image` prints each")
    if left := left_out(report.checks):
        console.info(f"{len(left)} checks are left to `sm120kit verify image`: only Python files differ from a checked image")
    if failed or report.verified is None:
        count = f"{len(failed)} of {len(report.checks)} checks failed"
        console.error(f"{count}; the image is not tagged", "correct it and build again")
        raise typer.Exit(1)
    console.info("unverified on SM120: no kernel was run")
    if not json:
        console.data(report.verified.reference)


def _show_checks(checks: Sequence[Check]) -> None:
    if checks:
        rows = ((f"{check.suite}/{check.name}", check.verdict, f"{check.seconds:.1f}", check.detail) for check in checks)
        console.table(("check", "verdict", "seconds", "detail"), rows)


def publish(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image that passed its checks.")],
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="registry/name, without a tag.")],
    index: Index = Path("images.json"),
    *,
    allow_local: Annotated[bool, typer.Option("--allow-local", help="Publish an image with local patches, too.")] = False,
    signing: SigningOptions,
    sources: Sources,
    json: Json = False,
) -> None:
    """Push a checked image and list it in the index.

    It is listed by digest, with SBOM and provenance. A tag that exists is not moved. No container daemon is needed. Images of
    an engine for x86-64 and arm64 get a common name, of which docker pulls the image for its machine.
    """
    workspace = sources.workspace()
    entry = publication.publish(reference, repository, index, workspace, signing.signer(), allow_local=allow_local)
    multiarch = publication.publish_for_all_machines(entry, index)
    assert entry.attested is not None
    if json:
        fields = {"repository": entry.repository, "tag": entry.tag, "digest": entry.digest, "attested": entry.attested}
        console.json_data({**fields, "multiarch": multiarch})
        return
    console.info(f"listed in {index}")
    statements = f"{entry.attested.sbom.path} and {entry.attested.statement.path}"
    signed = "signed" if entry.attested.signed else "not signed: --key and --keyless sign"
    console.info(f"beside it {statements}, {signed}")
    if multiarch:
        console.info(f"for x86-64 and arm64: {multiarch}")
    console.data(f"{entry.repository}@{entry.digest}")


def pull(
    name: Annotated[
        str, typer.Argument(metavar="RECIPE|TAG|BUILD", help="Recipe, tag or build id of an image in the index.")
    ] = "",
    *,
    images: PublishedImages,
    platform: Annotated[
        str, typer.Option("--platform", metavar="OS/MACHINE", help="As linux/arm64; default: this machine's.")
    ] = "",
    load: Annotated[
        bool | None,
        typer.Option(
            "--load/--no-load", help="Load the image into the container daemon; default: if one responds.", show_default=False
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check that everything in the index still exists.")] = False,
    sources: Sources,
    json: Json = False,
) -> None:
    """Pull a checked image by its digest in the index.

    The image is kept only if it is the one that passed its checks: in the state directory, and in the container daemon if there
    is one.
    """
    if check:
        _check_index(images.index, json=json)
        return
    if not name:
        raise BadInput("no image is named", "name a recipe, tag or build id, or use --check")
    workspace, index = sources.workspace(), images.source()
    entry = published_images.select(name, index, platform or own_platform(), workspace)
    pulled = published_images.pull_and_load(entry, index, workspace, load=load)
    if json:
        console.json_data(pulled)
        return
    console.data(pulled.reference)


def _check_index(index: Path, *, json: bool) -> None:
    """Print for each image of an index whether it still exists. Exit code 1 if one does not."""
    entries, missing = published_images.unresolved(index)
    rows = [(f"{entry.repository}:{entry.tag}", entry.digest, entry not in missing) for entry in entries]
    if json:
        console.json_data([{"image": image, "digest": digest, "exists": exists} for image, digest, exists in rows])
    else:
        console.table(
            ("image", "digest", "exists"), ((image, digest, "yes" if exists else "no") for image, digest, exists in rows)
        )
    if missing:
        console.error(f"{len(missing)} of {len(entries)} images do not exist any more", "publish them again")
        raise typer.Exit(1)
