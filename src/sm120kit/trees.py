"""Where everything begins: a recipe's source fetched and its series applied, both only when nobody did before."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit import patches, recipe, sources
from sm120kit.records import Inside, PatchedTree, Pin
from sm120kit.workspace import Workspace, data_root, digest_of, file_sha256, read_record, write_record


@dataclass(frozen=True)
class Options:
    """How, not what: none of these changes the result."""

    workspace: Workspace
    mirror: str | None = None
    offline: bool = False
    jobs: int | None = None
    memory_bytes: int | None = None


def patched_tree(item: recipe.Recipe, options: Options) -> PatchedTree:
    """Fetch a recipe's source and apply its series."""
    return patched(item.pin, item.inside, options)


def patched(pin: Pin, inside: tuple[Inside, ...], options: Options) -> PatchedTree:
    """Fetch a source and apply the series of it and of the projects inside."""
    root, overrides = data_root() / "patches", data_root() / "cutlass_overrides"
    inputs = [path for base in (root, overrides) for path in sorted(base.rglob("*")) if path.is_file()]
    key = digest_of([pin, inside, [[str(path.relative_to(data_root())), file_sha256(path)] for path in inputs]])
    record = options.workspace.cache / "trees" / f"{key}.json"
    if record.is_file():
        tree = read_record(PatchedTree, record)
        if tree.checkout.repository.is_dir():
            return tree
    checkout = sources.fetch(pin, options.workspace, mirror=options.mirror, offline=options.offline)
    tree = patches.apply(checkout, inside, root, overrides)
    write_record(record, tree)
    return tree
