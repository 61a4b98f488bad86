"""Classify the differences between the results of a probe without and with a patch."""

from __future__ import annotations

from collections.abc import Sequence

from sm12x_lab.proofs.proof_records import Effect, KernelCode, ProbeComparison, ProbeResult
from sm120kit.kernels.kernel_records import NumericStatus
from sm120kit.patches.patch_records import Probe


def compare(probe: Probe, below: ProbeResult, above: ProbeResult) -> ProbeComparison:
    """The results of a probe on both trees, with their differences."""
    return ProbeComparison(probe, below, above, effects(probe, below, above))


def effects(probe: Probe, below: ProbeResult, above: ProbeResult) -> tuple[Effect, ...]:
    """The effects of a patch on a probe; a changed type counts only without any other effect.

    :attr:`Effect.NONE` requires that the code of every kernel was compared, or that the probe has no code.
    """
    if below.error or above.error:
        if below.error and above.error:
            same = below.error == above.error
            return (Effect.NONE,) if same else (Effect.OTHER_ERROR,)
        fixed = Effect.FIXES_COMPILE_ERROR if below.error else Effect.REFUSES
        wrong = above.numbers is NumericStatus.WRONG
        return (fixed, Effect.BREAKS_NUMBERS) if wrong else (fixed,)
    changes = []
    if (below.numbers, above.numbers) == (NumericStatus.WRONG, NumericStatus.PROVEN):
        changes.append(Effect.FIXES_NUMBERS)
    if (below.numbers, above.numbers) == (NumericStatus.PROVEN, NumericStatus.WRONG):
        changes.append(Effect.BREAKS_NUMBERS)
    if below.facts != above.facts:
        changes.append(Effect.CHANGES_FACTS)
    archs = below.code.keys() & above.code.keys()
    if any(not same_code(below.code[arch], above.code[arch]) for arch in archs):
        changes.append(Effect.CHANGES_CODE)
    if changes:
        return tuple(changes)
    if below.types != above.types:
        return (Effect.CHANGES_TYPE,)
    return (Effect.NONE,) if archs or probe.kind == "flags" else (Effect.NOT_COMPARED,)


def same_code(below: Sequence[KernelCode], above: Sequence[KernelCode]) -> bool:
    """Whether two lists of kernels have the same code, regardless of the kernels' names."""
    return sorted(_code(kernel) for kernel in below) == sorted(_code(kernel) for kernel in above)


def _code(kernel: KernelCode) -> tuple[object, ...]:
    return (kernel.text_sha256, kernel.registers, kernel.shared_bytes, kernel.stack_bytes)
