"""Prove the effects of a patch: compile its probes on the tree without it and on the tree with it, and compare the results.

The results of a probe on one tree are the types and properties that the host compiler reports, the numbers of the emulation,
and the machine code of nvcc. No GPU is used: the effect of a patch on speed is unverified on SM120.
"""

from __future__ import annotations

from sm12x_lab.proofs.code import TranslationUnit, compile_unit
from sm12x_lab.proofs.collective import HEADERS, own_sources, reported_types, translation_unit
from sm12x_lab.proofs.effects import compare, effects
from sm12x_lab.proofs.proof_files import differences, file_text, on, read, text, with_stored_code
from sm120kit.patches.evidence import path_of

__all__ = [
    "HEADERS",
    "TranslationUnit",
    "compare",
    "compile_unit",
    "differences",
    "effects",
    "file_text",
    "on",
    "own_sources",
    "path_of",
    "read",
    "reported_types",
    "text",
    "translation_unit",
    "with_stored_code",
]
