"""Determine which CTA tiles an engine instantiates and which fit SM12x, with the engine's own templates in the host compiler.

The engine's generators list the launcher calls. Each call is compiled in the engine's own launcher (no nvcc, no GPU) up to the
kernel type, which reports its pipeline stages and shared memory. No formula of CUTLASS is repeated in this package.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Toolchain
from sm120kit.kernels.kernel_records import TileFacts
from sm120kit.kernels.tiles import introspect, listing


def table(tree_dir: Path, tree_id: str, engine_version: str, toolchain: Toolchain, cache: Path) -> tuple[TileFacts, ...]:
    """The facts of every tile that the FlashInfer tree ``tree_dir`` generates for SM120, and of the K=64 candidates.

    ``tree_id`` is the git tree id of its content. A cached table is read from ``cache``; otherwise only those tiles are
    compiled whose headers, flags or compiler have changed.

    Raises:
        CheckFailed: the tree's generators are not those of a supported FlashInfer version.
        CompileFailed: the headers themselves do not compile, or the compiler crashed.
        ResourceUnavailable: the compiler ran out of memory.
    """
    if cached := cached_table(tree_id, engine_version, toolchain, cache):
        return cached
    calls = listing.instantiations(tree_dir)
    with reporting.task(f"tiles of {engine_version}", len(calls)) as advance:
        measured = introspect.measure(calls, tree_dir, toolchain, cache / "tiles", advance)
    facts = tuple(replace(fact, generated=call.generated) for call in calls for fact in measured[call])
    write_record(_record(tree_id, engine_version, toolchain, cache), introspect.TileFactsRecord(facts))
    return facts


def cached_table(tree_id: str, engine_version: str, toolchain: Toolchain, cache: Path) -> tuple[TileFacts, ...] | None:
    """The cached result of :func:`table`, or None. Needs no files of the tree."""
    record = _record(tree_id, engine_version, toolchain, cache)
    return read_record(introspect.TileFactsRecord, record).facts if record.is_file() else None


def _record(tree_id: str, engine_version: str, toolchain: Toolchain, cache: Path) -> Path:
    key = digest_of([tree_id, engine_version, introspect.toolchain_key(toolchain), introspect.own_sources()])
    return cache / "tiles" / "tables" / f"{key}.json"
