"""Run the kernels of a patched tree on a GPU and compare them with integers, bit for bit.

``verify`` compiles the SM120 collectives unchanged: for an SM12x GPU, or for a Hopper GPU with the instructions that it lacks
in software, by a header or by rewritten PTX. Every tile runs with adversarial data, shapes and timing. Faults are seeded, and
each must be detected.
"""

from sm12x_lab.gpu import Backend, CudaDevice, arch, probe, require
from sm12x_lab.gpu_tests.compiled import CompiledPrograms, CompiledVerification, load, save
from sm12x_lab.gpu_tests.faults import SeededFault, mutants, stock_fault
from sm12x_lab.gpu_tests.programs import HEADERS, Compiler, EngineTree, Programs, sources_digest
from sm12x_lab.gpu_tests.receipt import receipt_name, record
from sm12x_lab.gpu_tests.running import RunOutcome
from sm12x_lab.gpu_tests.verification import Launcher, VerificationReport, compile_only, verify
from sm12x_lab.gpu_tests.verified_kernels import Matrix, VerificationScope, matrix_of

__all__ = [
    "HEADERS",
    "Backend",
    "CompiledPrograms",
    "CompiledVerification",
    "Compiler",
    "CudaDevice",
    "EngineTree",
    "Launcher",
    "Matrix",
    "Programs",
    "RunOutcome",
    "SeededFault",
    "VerificationReport",
    "VerificationScope",
    "arch",
    "compile_only",
    "load",
    "matrix_of",
    "mutants",
    "probe",
    "receipt_name",
    "record",
    "require",
    "save",
    "sources_digest",
    "stock_fault",
    "verify",
]
