"""Run kernels for SM120 on a Hopper GPU by rewriting their PTX.

``rewrite`` replaces each instruction that Hopper lacks by a call of a software function (``functions.cu``), which computes what
the PTX ISA defines; ``assemble`` makes machine code for sm_90a. ``selftest`` compares every replaced instruction with a scalar
model (``model``) on the GPU, bit for bit, and seeds faults in the rewriter, each of which must be detected.
"""

from sm12x_lab.ptx.library import (
    AssembledKernel,
    SoftwareFunctions,
    assemble,
    compile_functions,
    rewriter_digest,
)
from sm12x_lab.ptx.rewrite import PtxReplacement, RewrittenPtx, rewrite

__all__ = [
    "AssembledKernel",
    "PtxReplacement",
    "RewrittenPtx",
    "SoftwareFunctions",
    "assemble",
    "compile_functions",
    "rewrite",
    "rewriter_digest",
]
