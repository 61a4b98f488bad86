"""``sm120kit image list``: local images, and those in an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Index, Json, Sources, given
from sm120kit.core import console
from sm120kit.images import inventory
from sm120kit.images.checks import unsigned_checks
from sm120kit.images.image_index import read_index
from sm120kit.images.inventory import LocalImage


def list_(
    ctx: typer.Context,
    remote: Annotated[bool, typer.Option("--remote", help="List the images in the index, for `sm120kit pull`.")] = False,
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
                _size(local.image.bytes),
                _checks(local),
            )
            for local in images
        ),
    )


def _checks(local: LocalImage) -> str:
    summary = f": {inventory.check_summary(local.checks)}" if local.checks else ""
    return "; ".join([local.standing + summary, *(check.detail for check in unsigned_checks(local.checks))])


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
                _size(entry.verified.image.bytes),
                entry.published,
                inventory.check_summary(entry.verified.checks),
                "yes" if entry.attested and entry.attested.signed else "no",
            )
            for entry in entries
        ),
    )


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
