"""What a patch does: each probe that it names, compiled on the tree below it and on the tree with it.

Facts are gathered for one tree at a time, here of CUTLASS's builder and of nvcc's code, and then compared. No GPU is involved:
what a patch does to speed is unverified on SM120.
"""

from __future__ import annotations

from sm120kit.prove.code import Unit, compile_unit
from sm120kit.prove.collective import HEADERS, facts_of, own_sources, translation_unit
from sm120kit.prove.effects import compare, effects
from sm120kit.prove.evidence import differences, path_of, read, text, with_code

__all__ = [
    "HEADERS",
    "Unit",
    "compare",
    "compile_unit",
    "differences",
    "effects",
    "facts_of",
    "own_sources",
    "path_of",
    "read",
    "text",
    "translation_unit",
    "with_code",
]
