"""Rows of vLLM's KV cache specifications, as ``tests/arguments/kv_specs_probe.py`` prints them."""

from __future__ import annotations

from collections.abc import Iterable

TOLERANCE = 0.02
"""Relative error of sizes."""


def theirs(rows: Iterable[tuple[str, float, int | None, int]]) -> tuple[float, float, float]:
    """Bytes per token, bytes of all windows, and bytes of all states, of vLLM's specifications in BF16."""
    tokens = windows = states = 0.0
    for kind, size, window, layers in rows:
        if kind == "MambaSpec":
            states += size * layers
        elif window and kind != "FullAttentionSpec":
            windows += size * layers * window
        else:
            tokens += size * layers
    return tokens, windows, states
