"""Rewrite a file or the units of a build, and run the self-test: what ``sm120kit verify ptx`` does."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm12x_lab import gpu
from sm12x_lab.ptx import library, selftest
from sm12x_lab.ptx.library import AssembledKernel, NativeModule
from sm12x_lab.ptx.rewrite import RewrittenPtx, rewrite, source_target
from sm120kit.core import reporting, toolchain
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import BadInput, CompileFailed
from sm120kit.core.outside import file_problem
from sm120kit.core.records import Toolchain

LARGEST_BYTES = 256 * 2**20
"""Modules of engines have a few MiB."""


@dataclass(frozen=True)
class PtxReport:
    """A file's rewritten module and the kernels that ptxas made of it; ``native`` are those of the original for SM12x."""

    module: RewrittenPtx
    kernels: tuple[AssembledKernel, ...]
    native: NativeModule


def rewrite_file(path: Path, cache: Path, ptx: Path | None = None, cubin: Path | None = None) -> PtxReport:
    """Assemble a PTX file for its own target, rewrite it and assemble it for sm_90a; write PTX and cubin if paths are given.

    ``cache`` is that of the state directory.

    Raises:
        BadInput: not PTX for SM12x, or an instruction that has no replacement.
        CompileFailed: ptxas rejects it for its own target.
        RequirementMissing: no CUDA compiler.
    """
    if why := file_problem(path):
        raise BadInput(f"{path} {why}", "name a file that `nvcc -ptx` writes")
    if path.stat().st_size > LARGEST_BYTES:
        raise BadInput(f"{path} has {path.stat().st_size:,} B", f"PTX modules have at most {LARGEST_BYTES:,} B")
    try:
        text = path.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not text: byte {error.start} is {error.object[error.start]:#04x}", "cubins have no PTX"
        ) from error
    report, content = _rewrite(str(path), text, Assembler(cache))
    for target, data in ((ptx, report.module.text.encode()), (cubin, content)):
        if target:
            write_atomic(target, data)
    return report


class Assembler:
    """The CUDA compiler and the software functions, found and compiled when the first module needs them."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    @functools.cached_property
    def tools(self) -> Toolchain:
        return toolchain.find()

    @functools.cached_property
    def functions(self) -> library.SoftwareFunctions:
        return library.compile_functions(self.tools)

    def native(self, text: str) -> NativeModule:
        """A module as ptxas assembles it for its own target."""
        return library.assemble_natively(text, source_target(text), self.tools, self.cache / library.NATIVE)


def _rewrite(name: str, text: str, assembler: Assembler) -> tuple[PtxReport, bytes]:
    try:
        native = assembler.native(text)
        module = rewrite(text, lambda: assembler.functions)
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "module.cubin"
            kernels = library.assemble(module.text, output, assembler.tools)
            return PtxReport(module, tuple(kernels), native), output.read_bytes()
    except (BadInput, CompileFailed) as error:
        raise type(error)(f"{name}: {error.message}", error.hint) from error


@dataclass(frozen=True)
class UnitReport:
    """A unit of a build: the digest of its PTX, and its rewritten module, or why it was refused."""

    name: str
    ptx: str
    report: PtxReport | None
    refused: str = ""


def rewrite_units(units: Mapping[str, str], cache: Path, capture: Path | None = None) -> list[UnitReport]:
    """Rewrite and assemble the PTX of a build's units, by name; write it unchanged to ``capture``, a directory.

    Raises:
        RequirementMissing: no CUDA compiler.
    """
    assembler, reports = Assembler(cache), []
    for name, text in units.items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        if capture:
            capture.mkdir(parents=True, exist_ok=True)
            write_atomic(capture / f"{name.replace('/', '.').removesuffix('.cu')}.ptx", text.encode())
        try:
            reports.append(UnitReport(name, digest, _rewrite(name, text, assembler)[0]))
        except (BadInput, CompileFailed) as error:
            reports.append(UnitReport(name, digest, None, error.message))
        reporting.info(f"{name}: {'refused' if reports[-1].refused else 'rewritten and assembled for sm_90a'}")
    return reports


def units_data(reports: Sequence[UnitReport]) -> list[dict[str, Any]]:
    """Reports of units as JSON-serialisable data."""
    return [
        {"unit": row.name, "ptx": row.ptx, "refused": row.refused, "module": data(row.report) if row.report else None}
        for row in reports
    ]


def data(report: PtxReport) -> dict[str, Any]:
    """A report as JSON-serialisable data."""
    module = report.module
    return {
        "source_target": module.source_target,
        "target": "sm_90a",
        "rewriter": library.rewriter_digest(),
        "instructions": module.instruction_count,
        "counts": module.counts,
        "replacements": [asdict(replacement) for replacement in module.replacements],
        "kernels": [asdict(kernel) for kernel in report.kernels],
        "sm120": asdict(report.native),
    }


def verify_instructions() -> tuple[list[str], dict[str, Any]]:
    """Run the self-test on the first GPU; returns the faults that were missed, and the record.

    Raises:
        ResourceUnavailable: see :func:`sm12x_lab.gpu.require`.
    """
    device = gpu.require(gpu.probe(), gpu.Backend.EMULATE, "verify ptx --instructions", "without a GPU, name a PTX file only")
    tools = toolchain.find()
    report = selftest.run(tools)
    return report.missed, selftest.record(report, device, tools)
