"""Compare every replaced instruction with the scalar model on a Hopper GPU, bit for bit, and seed faults in the rewriter."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sm12x_lab.gpu import CudaDevice
from sm12x_lab.ptx import driver, forms, library
from sm12x_lab.ptx.forms import InstructionForm
from sm12x_lab.ptx.rewrite import BYTE_TYPES, Mutation, rewrite
from sm12x_lab.ptx.syntax import PtxInstruction, elements
from sm120kit.core import reporting
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.records import Toolchain

FORMAT = 1

FORMS_OF_A_FAULT = 8
"""Forms that run with each seeded fault; all of them must differ from the model."""

CANNOT_SHOW = (
    "the instructions in silicon: they are software functions here, after the text of the PTX ISA",
    "the order in which the tensor cores of SM120 add products that fp32 cannot hold: the ISA leaves it open",
    "cp.async.bulk.tensor, tensormap.replace and prefetch.tensormap, of which the list has no form",
    "clusterlaunchcontrol.query_cancel.get_first_ctaid, which is assembled but never executed",
    "the machine code that ptxas generates for sm_120",
    "speed, occupancy, clocks",
)


@dataclass(frozen=True)
class FormResult:
    """The comparison of one instruction form: ``differ`` of ``values`` results; ``first`` describes the first difference."""

    instruction: str
    values: int
    differ: int
    first: str = ""

    @property
    def verdict(self) -> str:
        """PASS or WRONG."""
        return "WRONG" if self.differ else "PASS"


@dataclass(frozen=True)
class RewriterFault:
    """A fault seeded in the rewriter: ``mutate`` changes the instructions that it concerns and returns others as they are."""

    name: str
    what: str
    mutate: Mutation


@dataclass(frozen=True)
class RewriterFaultResult:
    """The forms that ran with a fault, and those whose results did not differ."""

    name: str
    what: str
    forms: int
    missed: tuple[str, ...]


@dataclass
class InstructionReport:
    """The results of a self-test."""

    rows: list[FormResult] = field(default_factory=list)
    faults: list[RewriterFaultResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every form is right."""
        return bool(self.rows) and not any(row.differ for row in self.rows)

    @property
    def missed(self) -> list[str]:
        """Faults that were not detected, each with the forms that missed it."""
        return [
            f"{fault.name} ({', '.join(fault.missed) or 'no form'})" for fault in self.faults if fault.missed or not fault.forms
        ]


def run(toolchain: Toolchain, seed: int = 1) -> InstructionReport:
    """Run every form, then every fault with some of the forms that it changes.

    Raises:
        RequirementMissing: numpy is not installed.
    """
    _require_numpy()
    started = time.monotonic()
    functions = library.compile_functions(toolchain)
    every = forms.all_forms()
    report = InstructionReport(run_forms(every, functions, toolchain, seed))
    reporting.info(f"{sum(not row.differ for row in report.rows)} of {len(every)} instruction forms pass")
    for fault in FAULTS:
        changed = changed_forms(fault, every)
        chosen = changed[:: max(1, -(-len(changed) // FORMS_OF_A_FAULT))]
        rows = run_forms(chosen, functions, toolchain, seed, fault.mutate)
        missed = tuple(row.instruction for row in rows if not row.differ)
        report.faults.append(RewriterFaultResult(fault.name, fault.what, len(chosen), missed))
        reporting.info(f"seeded fault {fault.name}: {'NOT DETECTED' if missed or not chosen else 'detected'}")
    report.seconds = round(time.monotonic() - started, 1)
    return report


def run_forms(
    chosen: Sequence[InstructionForm],
    functions: library.SoftwareFunctions,
    toolchain: Toolchain,
    seed: int,
    mutate: Mutation | None = None,
) -> list[FormResult]:
    """Rewrite, assemble and launch forms, and compare each result word with the model."""
    if not chosen:
        return []
    module = rewrite(forms.module(list(chosen)), lambda: functions, mutate)
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "forms.cubin"
        library.assemble(module.text, cubin, toolchain)
        content = cubin.read_bytes()
    results = []
    with driver.loaded(content) as launcher:
        for number, form in enumerate(chosen):
            inputs = form.inputs(seed)
            outputs = launcher.run(f"form_{number}", inputs, form.results)
            results.append(compare(form, inputs, outputs))
    return results


def compare(form: InstructionForm, inputs: Any, outputs: Any) -> FormResult:
    """Compare results with the model, bit for bit."""
    expected = form.expected(inputs)
    different = outputs != expected
    count, first = int(different.sum()), ""
    if count:
        case, lane, word = (int(index[0]) for index in different.nonzero())
        first = (
            f"case {case}, lane {lane}, word {word}: {outputs[case, lane, word]:#010x}, not {expected[case, lane, word]:#010x}"
        )
    return FormResult(form.name, int(outputs.size), count, first)


def record(report: InstructionReport, gpu: CudaDevice, toolchain: Toolchain) -> dict[str, Any]:
    """A report as JSON-serialisable data, with GPU, driver, toolchain and the digest of the rewriter."""
    return {
        "format": FORMAT,
        "kind": "ptx-instructions",
        "rewriter": library.rewriter_digest(),
        "arch": "sm_90a",
        "gpu": {**asdict(gpu), "capability": ".".join(map(str, gpu.capability))},
        "toolchain": {"nvcc": toolchain.nvcc_version},
        "cases": forms.CASES,
        "passed": report.passed,
        "verified_on_sm120": False,
        "cannot_show": list(CANNOT_SHOW),
        "instructions": [{"verdict": row.verdict, **asdict(row)} for row in report.rows],
        "planted": [asdict(fault) for fault in report.faults],
        "seconds": report.seconds,
    }


def changed_forms(fault: RewriterFault, every: Sequence[InstructionForm]) -> list[InstructionForm]:
    """The forms whose instruction a fault changes."""
    from sm12x_lab.ptx.syntax import instructions

    def changes(form: InstructionForm) -> bool:
        return any(
            fault.mutate(instruction) != instruction
            for instruction in instructions(form.code)
            if form.name.startswith(instruction.opcode)
        )

    return [form for form in every if changes(form)]


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise RequirementMissing("the self-test of instructions requires numpy", "pip install numpy") from error


# ---- seeded faults


def _swapped(instruction: PtxInstruction, *pairs: tuple[int, int]) -> PtxInstruction:
    operands = list(instruction.operands)
    for one, other in pairs:
        operands[one], operands[other] = operands[other], operands[one]
    return replace(instruction, operands=tuple(operands))


def _vector(instruction: PtxInstruction, index: int, change: Callable[[list[str]], list[str]]) -> PtxInstruction:
    return instruction.with_operand(index, "{" + ", ".join(change(elements(instruction.operands[index]))) + "}")


def _scaled(instruction: PtxInstruction) -> bool:
    return "block_scale" in instruction.modifiers


def _is_mma(instruction: PtxInstruction) -> bool:
    return instruction.modifiers[0] == "mma"


def _is_wide(instruction: PtxInstruction) -> bool:
    return instruction.modifiers[0] in ("ld", "st") and bool({"v4", "v8"} & {*instruction.modifiers})


def _reversed(instruction: PtxInstruction) -> PtxInstruction:
    """The registers of the vector, in reverse order."""
    index = next(at for at, operand in enumerate(instruction.operands) if operand.startswith("{"))
    return _vector(instruction, index, lambda registers: registers[::-1])


def _types_swapped(instruction: PtxInstruction) -> PtxInstruction:
    parts = list(instruction.modifiers)
    one, other = (index for index, part in enumerate(parts) if part in BYTE_TYPES)
    parts[one], parts[other] = parts[other], parts[one]
    return replace(instruction, opcode=".".join(parts))


def _renamed(instruction: PtxInstruction, pattern: str, text: str) -> PtxInstruction:
    return replace(instruction, opcode=re.sub(pattern, text, instruction.opcode))


FAULTS = (
    RewriterFault("scales-swapped", "the scales of A and B change places", lambda i: _swapped(i, (4, 6)) if _scaled(i) else i),
    RewriterFault(
        "byte-selector-a", "the byte selector of A is 0", lambda i: _vector(i, 5, lambda s: ["0", s[1]]) if _scaled(i) else i
    ),
    RewriterFault(
        "byte-selector-b", "the byte selector of B is 0", lambda i: _vector(i, 7, lambda s: ["0", s[1]]) if _scaled(i) else i
    ),
    RewriterFault(
        "thread-selector-a",
        "the thread selector of A is 0",
        lambda i: _vector(i, 5, lambda s: [s[0], "0"]) if _scaled(i) else i,
    ),
    RewriterFault(
        "thread-selector-b",
        "the thread selector of B is 0",
        lambda i: _vector(i, 7, lambda s: [s[0], "0"]) if _scaled(i) else i,
    ),
    RewriterFault(
        "registers-of-a",
        "rows 8 to 15 of A change places with the second half of k",
        lambda i: _vector(i, 1, lambda a: [a[0], a[2], a[1], a[3]]) if _is_mma(i) else i,
    ),
    RewriterFault(
        "registers-of-b", "the halves of B change places", lambda i: _vector(i, 2, lambda b: b[::-1]) if _is_mma(i) else i
    ),
    RewriterFault(
        "registers-of-d", "the rows of D change places", lambda i: _vector(i, 0, lambda d: d[::-1]) if _is_mma(i) else i
    ),
    RewriterFault(
        "accumulator",
        "C is one register repeated",
        lambda i: _vector(i, 3, lambda c: [c[0]] * len(c)) if _is_mma(i) else i,
    ),
    RewriterFault("types-swapped", "the types of A and B change places", lambda i: _types_swapped(i) if _is_mma(i) else i),
    RewriterFault("scale-type", "ue4m3 scales are read as ue8m0", lambda i: _renamed(i, r"\.ue4m3$", ".ue8m0")),
    RewriterFault("predicate", "the predicate is ignored", lambda i: replace(i, predicate="")),
    RewriterFault(
        "halves-swapped",
        "a conversion's upper and lower value change places",
        lambda i: _swapped(i, (1, 2)) if i.modifiers[0] == "cvt" and len(i.operands) == 3 else i,
    ),
    RewriterFault("relu", ".relu is ignored", lambda i: i.without("relu")),
    RewriterFault("narrow-type", "e2m3 is taken for e3m2", lambda i: _renamed(i, r"\be2m3x2", "e3m2x2")),
    RewriterFault("exponent-rounding", "ue8m0 is rounded down", lambda i: _renamed(i, r"^cvt\.rp\.", "cvt.rz.")),
    RewriterFault(
        "exponent-saturation",
        "ue8m0 is not saturated",
        lambda i: i.without("satfinite") if "ue8m0x2" in i.modifiers else i,
    ),
    RewriterFault(
        "pair-rounding",
        "f32x2 is rounded to nearest",
        lambda i: _renamed(i, r"\.r[zmp]\.", ".rn.") if "f32x2" in i.modifiers else i,
    ),
    RewriterFault("pair-flush", ".ftz of f32x2 is ignored", lambda i: i.without("ftz") if "f32x2" in i.modifiers else i),
    RewriterFault(
        "pair-operands",
        "f32x2 subtracts the wrong way round",
        lambda i: _swapped(i, (1, 2)) if i.modifiers[0] == "sub" and "f32x2" in i.modifiers else i,
    ),
    RewriterFault("packing", "rows of 6-bit elements are read as 4-bit", lambda i: _renamed(i, r"b6x16_p32$", "b4x16_p64")),
    RewriterFault(
        "matrices",
        "registers of ldmatrix.m16n16 and stmatrix change places",
        lambda i: _reversed(i) if "trans" in i.modifiers else i,
    ),
    RewriterFault("half-type", "bf16 is taken for f16", lambda i: _renamed(i, r"\.f32\.bf16$", ".f32.f16")),
    RewriterFault(
        "half-rounding",
        "fp32 arithmetic with f16 or bf16 is rounded to nearest",
        lambda i: _renamed(i, r"\.r[zmp]\.f32\.", ".rn.f32."),
    ),
    RewriterFault("saturation", ".sat is ignored", lambda i: i.without("sat")),
    RewriterFault("wide-order", "the elements of 256 bits are in reverse order", lambda i: _reversed(i) if _is_wide(i) else i),
)
"""Faults of each class: operands, selectors, modifiers, types, predicates."""
