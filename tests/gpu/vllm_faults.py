"""Faults of a running vLLM (0.33.0): a plugin seeds in each of its processes the one that the file ``SEEDED_FAULT`` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def seed() -> None:
    """Let each fault be where the file asks for it; without the variable, change nothing."""
    if os.environ.get("SEEDED_FAULT"):
        for plant in FAULTS.values():
            plant()


def seeded(fault: str) -> bool:
    """Whether the file names a fault now; that it took effect is kept in a file beside it."""
    file = Path(os.environ["SEEDED_FAULT"])
    found = file.exists() and file.read_text() == fault
    if found:
        took_effect(file, fault).touch()
    return found


def took_effect(file: Path, fault: str) -> Path:
    """A file that is there once a process has met the fault."""
    return file.with_name(f"{file.name}.{fault}")


def _all_reduce(fault: str, change: Any) -> None:
    from vllm.distributed import parallel_state

    group = parallel_state.GroupCoordinator
    original = group._all_reduce_out_place

    def changed(self: Any, tensor: Any) -> Any:
        total = original(self, tensor)
        if not seeded(fault):
            return total
        self.calls = getattr(self, "calls", 0) + 1
        return change(self, tensor, total)

    group._all_reduce_out_place = changed


def stale_all_reduce() -> None:
    """Each 97th sum of two or more rows is that of the call before with this shape."""

    def change(group: Any, tensor: Any, total: Any) -> Any:
        kept = group.__dict__.setdefault("kept", {})
        before, kept[total.shape] = kept.get(total.shape, total), total
        return before if group.calls % 97 == 0 else total

    _all_reduce("stale-all-reduce", change)


def left_out_all_reduce() -> None:
    """The sum of every fourth call is this GPU's part alone, as often as there are GPUs."""
    _all_reduce("left-out-all-reduce", lambda group, tensor, total: total if group.calls % 4 else group.world_size * tensor)


def exchanged_rows() -> None:
    """The logits of the rows of a batch, of requests and of drafts, are exchanged."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor.forward

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        logits = original(self, *args, **named)
        return logits.roll(1, 0) if logits is not None and len(logits) > 1 and seeded("exchanged-rows") else logits

    LogitsProcessor.forward = forward


def blocks_by_length() -> None:
    """Cached blocks are looked up by their position alone."""
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.hash_block_tokens
    kv_cache_utils.hash_block_tokens = lambda function, parent, tokens, extra=None: original(
        function, parent, (0,) * len(tokens) if seeded("blocks-by-length") else tokens, extra
    )


def neighbour_blocks() -> None:
    """A decoding step of two or more requests reads the first one's cache in the blocks of the second."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    original = BlockTables.gather_block_tables

    def changed(self: Any, idx_mapping: Any, *args: Any, **named: Any) -> Any:
        tables = original(self, idx_mapping, *args, **named)
        if len(idx_mapping) > 1 and seeded("neighbour-blocks"):
            for table in tables:
                table[0, 0] = table[1, 0]
        return tables

    BlockTables.gather_block_tables = changed


def half_scale_layer() -> None:
    """The attention of the second layer has half of its scale."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    original = RowParallelLinear.forward

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        output = original(self, *args, **named)
        if "layers.1.self_attn" not in self.prefix or not seeded("half-scale-layer"):
            return output
        return (output[0] / 2, output[1]) if isinstance(output, tuple) else output / 2

    RowParallelLinear.forward = forward


def drafts_all() -> None:
    """Every draft is accepted."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    original = rejection_sampler.rejection_sample

    def accept(logits: Any, draft_logits: Any, drafts: Any, cumulated: Any, *args: Any, **named: Any) -> Any:
        if not seeded("drafts-all"):
            return original(logits, draft_logits, drafts, cumulated, *args, **named)
        last = cumulated[1:] - 1
        follows = drafts.roll(-1).clamp(min=0).long()
        bonus = logits[last]
        logits = logits.scatter(1, follows.unsqueeze(1), 1e4)
        logits[last] = bonus
        return original(logits, draft_logits, drafts, cumulated, *args, **named)

    rejection_sampler.rejection_sample = accept


FAULTS = {
    "stale-all-reduce": stale_all_reduce,
    "left-out-all-reduce": left_out_all_reduce,
    "exchanged-rows": exchanged_rows,
    "blocks-by-length": blocks_by_length,
    "neighbour-blocks": neighbour_blocks,
    "half-scale-layer": half_scale_layer,
    "drafts-all": drafts_all,
}
