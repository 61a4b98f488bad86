"""What differs between a probe without a patch and with it, in one of few words."""

from __future__ import annotations

from collections.abc import Sequence

from sm120kit.records import Effect, KernelCode, Probe, Proof, Proven, Seen


def compare(probe: Probe, below: Seen, above: Seen) -> Proven:
    """Two sides of a probe with what they differ in."""
    return Proven(probe, below, above, effects(probe, below, above))


def effects(probe: Probe, below: Seen, above: Seen) -> tuple[Effect, ...]:
    """Everything that differs; types count only where nothing else does.

    "No effect" is said only when the code of every kernel was compared, or when there is no code to compare.
    """
    if below.error or above.error:
        if below.error and above.error:
            same = below.error == above.error
            return (Effect.NONE,) if same else (Effect.OTHER_ERROR,)
        fixed = Effect.FIXES_COMPILE_ERROR if below.error else Effect.REFUSES
        wrong = above.numbers is Proof.WRONG
        return (fixed, Effect.BREAKS_NUMBERS) if wrong else (fixed,)
    found = []
    if (below.numbers, above.numbers) == (Proof.WRONG, Proof.PROVEN):
        found.append(Effect.FIXES_NUMBERS)
    if (below.numbers, above.numbers) == (Proof.PROVEN, Proof.WRONG):
        found.append(Effect.BREAKS_NUMBERS)
    if below.facts != above.facts:
        found.append(Effect.CHANGES_FACTS)
    archs = below.code.keys() & above.code.keys()
    if any(not same_code(below.code[arch], above.code[arch]) for arch in archs):
        found.append(Effect.CHANGES_CODE)
    if found:
        return tuple(found)
    if below.types != above.types:
        return (Effect.CHANGES_TYPE,)
    return (Effect.NONE,) if archs or probe.kind == "flags" else (Effect.NOT_COMPARED,)


def same_code(below: Sequence[KernelCode], above: Sequence[KernelCode]) -> bool:
    """Whether two lists of kernels have the same code, whatever the kernels are called."""
    return sorted(_code(one) for one in below) == sorted(_code(one) for one in above)


def _code(kernel: KernelCode) -> tuple[object, ...]:
    return (kernel.text_sha256, kernel.registers, kernel.shared_bytes, kernel.stack_bytes)
