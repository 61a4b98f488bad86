"""``sm120kit image``, ``publish`` and ``pull``: push, pull, list, load, export and remove images; reports of their checks."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Index, Json, Overwrite, PublishedImages, Sources, argument, given, option
from sm120kit.core import console
from sm120kit.core.disk import require_new, size
from sm120kit.core.workspace import Workspace
from sm120kit.images import inventory, loading, publication, published_images, state_entries
from sm120kit.images.checks import CheckReport
from sm120kit.images.checks.quick import left_out
from sm120kit.images.docker import Daemon
from sm120kit.images.dockerfile import export_dockerfile
from sm120kit.images.image_index import own_platform, read_index
from sm120kit.images.image_records import SERVED_PROMPT, Check, CheckResult
from sm120kit.images.inventory import LocalImage
from sm120kit.images.oci import Layout


def show_report(report: CheckReport, *, json: bool, whole: bool = True) -> None:
    """Print the results of an image's checks, without ``whole`` only those that did not pass. Exit code 1 if one failed."""
    if json:
        console.json_data(asdict(report))
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
    if not any(check.name == SERVED_PROMPT and check.verdict is CheckResult.PASSED for check in report.checks):
        console.info("unverified on SM120: no kernel was run")
    if not json:
        console.data(report.verified.reference)


def _show_checks(checks: Sequence[Check]) -> None:
    if checks:
        rows = ((f"{check.suite}/{check.name}", check.verdict, f"{check.seconds:.1f}", check.detail) for check in checks)
        console.table(("check", "verdict", "seconds", "detail"), rows)


def publish(
    reference: Annotated[str, argument("IMAGE", "An image that passed its checks.")],
    repository: Annotated[str, argument("REPOSITORY", "registry/name, without a tag.")],
    index: Index = Path("images.json"),
    *,
    allow_local: Annotated[bool, option("--allow-local", "Publish an image with local patches, too.")] = False,
    key: Annotated[Path | None, option("--key FILE", "Sign with this private key, PEM.")] = None,
    sources: Sources,
    json: Json = False,
) -> None:
    """Push a checked image and list it in the index.

    It is listed by digest, with SBOM and provenance. A tag that exists is not moved. No container daemon is needed. Images of
    an engine for x86-64 and arm64 get a common name, of which docker pulls the image for its machine.
    """
    workspace = sources.workspace()
    entry = publication.publish(reference, repository, index, workspace, key, allow_local=allow_local)
    multiarch = publication.publish_for_all_machines(entry, index)
    assert entry.attested is not None
    if not entry.attested.signed:
        console.warn(f"{entry.repository}@{entry.digest} is not signed, so that {index} can be forged: --key signs it")
    if json:
        fields = {"repository": entry.repository, "tag": entry.tag, "digest": entry.digest, "attested": entry.attested}
        console.json_data({**fields, "multiarch": multiarch})
        return
    console.info(f"listed in {index}; beside it {entry.attested.sbom.path} and {entry.attested.statement.path}")
    if multiarch:
        console.info(f"for x86-64 and arm64: {multiarch}")
    console.data(f"{entry.repository}@{entry.digest}")


def pull(
    name: Annotated[str, argument("RECIPE|TAG|BUILD", "Recipe, tag or build id of an image in the index.")],
    *,
    images: PublishedImages,
    platform: Annotated[str, option("--platform OS/MACHINE", "As linux/arm64; default: this machine's.")] = "",
    load: Annotated[
        bool | None,
        option("--load/--no-load", "Load the image into the container daemon; default: if one responds.", show_default=False),
    ] = None,
    sources: Sources,
    json: Json = False,
) -> None:
    """Pull a checked image by its digest in the index.

    The image is kept only if it is the one that passed its checks: in the state directory, and in the container daemon if there
    is one.
    """
    workspace, index = sources.workspace(), images.source()
    entry = published_images.select(name, index, platform or own_platform(), workspace)
    pulled = published_images.pull_and_load(entry, index, workspace, load=load)
    if json:
        console.json_data(pulled)
        return
    console.data(pulled.reference)


def list_(
    ctx: typer.Context,
    remote: Annotated[bool, option("--remote", "List the images in the index, for `sm120kit pull`.")] = False,
    index: Index = Path("images.json"),
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """List images with their size, digest and checks.

    Without --remote, list the images in the state directory. Unchecked images have no tag.
    """
    if not remote and given(ctx, "index"):
        raise typer.BadParameter("an index lists images in registries: add --remote", param_hint="--index")
    if remote:
        _show_remote(index, json=json)
    else:
        _show_local(sources, json=json)


def _show_local(sources: Sources, *, json: bool) -> None:
    images = inventory.local_images(sources.workspace())
    if json:
        console.json_data(images)
        return
    console.table(
        ("image", "id", "recipe", "local patches", "platform", "size", "checks"),
        (
            (
                "\n".join(local.tags) or "(no tag)",
                _short(local.image.id),
                local.image.labels.get("sm120kit.recipe"),
                local.image.labels.get("sm120kit.local", "").replace(",", "\n"),
                local.image.platform,
                size(local.image.bytes),
                _checks(local),
            )
            for local in images
        ),
    )


def _checks(local: LocalImage) -> str:
    summary = f": {inventory.check_summary(local.checks)}" if local.checks else ""
    return local.standing + summary


def _show_remote(index: Path, *, json: bool) -> None:
    entries = read_index(index).images
    if json:
        console.json_data(entries)
        return
    console.table(
        ("image", "digest", "recipe", "platform", "size", "published", "checks", "signed"),
        (
            (
                f"{entry.repository}:{entry.tag}",
                _short(entry.digest),
                entry.recipe,
                entry.verified.image.platform,
                size(entry.verified.image.bytes),
                entry.published,
                inventory.check_summary(entry.verified.checks),
                "yes" if entry.attested and entry.attested.signed else "no",
            )
            for entry in entries
        ),
    )


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def load(
    reference: Annotated[str, argument("IMAGE", "An image in the state directory, by id, tag or digest.")],
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Load an image into the container daemon.

    It gets the tag of a checked image; a tag of another image is not moved.
    """
    layout = Layout(sources.workspace().root / "oci")
    manifest = layout.require(reference).digest
    image = loading.load(layout, manifest, Daemon())
    if json:
        console.json_data(image)
        return
    console.data(image.id)


def export(
    reference: Annotated[str, argument("IMAGE", "An image in the state directory, by id, tag or digest.")],
    path: Annotated[
        Path, argument("PATH", "A file that ends in .tar, - for standard output, or with --dockerfile a directory.")
    ],
    dockerfile: Annotated[
        bool, option("--dockerfile", "Write a directory for `docker build`: a Dockerfile that adds the layers.")
    ] = False,
    overwrite: Overwrite = False,
    *,
    sources: Sources,
) -> None:
    """Write an image as an OCI archive.

    `docker load --input FILE`, podman, skopeo and containerd read it. With `-`, it is written to standard output, as for
    `| ssh HOST docker load`.
    With `--dockerfile`, `docker build DIRECTORY` gives an image with the same files and settings. The files of the directory
    are hard links to those in the state directory where possible: do not change them.
    """
    to_stdout = str(path) == "-"
    if to_stdout and sys.stdout.isatty():
        raise typer.BadParameter("an archive is not text for a terminal: redirect standard output, or name a file")
    if path.suffix == ".tar":
        require_new(path, "PATH", overwrite)
    if dockerfile and (to_stdout or path.suffix == ".tar"):
        raise typer.BadParameter("--dockerfile writes a directory: name one that does not exist yet", param_hint="PATH")
    if not dockerfile and not to_stdout and path.suffix != ".tar":
        raise typer.BadParameter(f"{str(path)!r} does not end in .tar, and is not - for standard output", param_hint="PATH")
    layout = Layout(sources.workspace().root / "oci")
    manifest = layout.require(reference).digest
    if to_stdout:
        loading.stream(layout, manifest, sys.stdout.buffer)
        return
    (export_dockerfile if dockerfile else loading.export)(layout, manifest, path)
    console.data(str(path))


def rm(
    references: Annotated[list[str], argument("IMAGE", "Images in the state directory, by id, tag or digest.")],
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Remove images from the state directory.

    An image goes with its last tag; by id or digest with all its tags. Layers that other images have are kept. Waits until no
    other command uses the state directory. Images in the container daemon stay, and so does a running server's.
    """
    workspace = Workspace.at(sources.state)
    with workspace.maintenance():
        removed = state_entries.remove_images(workspace.root, references)
    if json:
        console.json_data(asdict(removed))
        return
    for reference in removed.untagged:
        console.data(f"untagged {reference}")
    for digest in removed.removed:
        console.data(f"removed {digest}")
    console.data(f"freed {size(removed.bytes)}")
