"""Which CTA tiles an engine asks for, and which fit SM12x: asked of the engine's own templates with the host compiler.

The engine's generators list the launcher calls; each is compiled in the engine's own launcher (no nvcc, no GPU) up to the
kernel type, which reports its pipeline stages and shared memory. No formula of CUTLASS is repeated here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sm120kit import console
from sm120kit.records import TileFacts, Toolchain
from sm120kit.tiles import introspect, listing
from sm120kit.workspace import digest_of, read_record, write_record


def table(tree_dir: Path, tree_id: str, engine_version: str, toolchain: Toolchain, cache: Path) -> tuple[TileFacts, ...]:
    """The facts of every tile that the FlashInfer tree ``tree_dir`` generates for SM120, and of the K=64 candidates.

    ``tree_id`` is the git tree id of its content. A table that was made before is read from ``cache``; else only those tiles
    are compiled whose headers, flags or compiler are new.

    Raises:
        ExpectationFailed: the tree's generators are not those of a FlashInfer we know.
        CompileFailed: the headers themselves do not compile, or the compiler broke.
        NotEnoughMemory: the system ended the compiler.
    """
    key = digest_of([tree_id, engine_version, introspect.toolchain_key(toolchain), introspect.own_sources()])
    record = cache / "tiles" / "tables" / f"{key}.json"
    if record.is_file():
        return read_record(introspect.Kept, record).facts
    asked = listing.instantiations(tree_dir)
    with console.progress() as progress:
        task = progress.add_task(f"tiles of {engine_version}", total=len(asked))
        measured = introspect.measure(asked, tree_dir, toolchain, cache / "tiles", lambda done: progress.advance(task, done))
    facts = tuple(replace(fact, generated=one.generated) for one in asked for fact in measured[one])
    write_record(record, introspect.Kept(facts))
    return facts
