"""Ask the finished thing to do its job: the kernels of a patched tree on a GPU, bit for bit against integers.

``verify`` compiles the SM120 collectives unchanged, for an SM12x GPU, or for a Hopper GPU with what it lacks in
software, and runs every tile with hostile data, shapes and timing. It plants faults, which have to be found.
"""

from sm120kit.verify.controls import Control, mutants, stock_control
from sm120kit.verify.gpu import Device, Gpu, arch, probe, require
from sm120kit.verify.kernels import Report, compile_only, verify
from sm120kit.verify.matrix import Matrix, matrix_of
from sm120kit.verify.programs import HEADERS, Compiler, Tree, sources_digest
from sm120kit.verify.receipt import receipt_name, record, stale
from sm120kit.verify.running import Verdict

__all__ = [
    "HEADERS",
    "Compiler",
    "Control",
    "Device",
    "Gpu",
    "Matrix",
    "Report",
    "Tree",
    "Verdict",
    "arch",
    "compile_only",
    "matrix_of",
    "mutants",
    "probe",
    "receipt_name",
    "record",
    "require",
    "sources_digest",
    "stale",
    "stock_control",
    "verify",
]
