"""Records of proofs: the results of a patch's probes without and with it, and a series without each of its patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sm120kit.core.records import Arch
from sm120kit.kernels.kernel_records import NumericStatus
from sm120kit.patches.patch_records import Probe


@dataclass(frozen=True)
class ProofRequest:
    """What a proof covers: the probes of the patch, or ``probes``; only those of ``dtype`` unless it is None.

    With ``code``, nvcc compiles the probes that request it, for ``arch`` or the archs of the recipe. ``trusted`` runs the code
    of a patch that is in no series without a sandbox.
    """

    dtype: str | None = None
    arch: Arch | None = None
    code: bool = False
    probes: tuple[Probe, ...] = ()
    trusted: bool = False


@dataclass(frozen=True)
class KernelCode:
    """The machine code of a kernel for one arch.

    ``name_sha256`` is of its name without hashes of files; ``grid_waits`` and ``grid_launches`` count its griddepcontrol
    instructions in PTX. The other fields are those of :class:`sm120kit.kernels.cubin.cubin_records.Kernel`.
    """

    name_sha256: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    text_bytes: int
    text_sha256: str
    grid_waits: int
    grid_launches: int


@dataclass(frozen=True)
class ProbeResult:
    """The results of a probe on one tree.

    ``error`` and ``where`` are the compiler's first error, empty if the probe compiles. ``facts`` are properties that the host
    compiler or the generator reports, such as stages; ``types`` are C++ types as text. ``numbers`` is the result of emulating
    the mainloop, ``why`` the reason if they are wrong. ``code`` has the archs for which the probe was compiled.
    """

    error: str = ""
    where: str = ""
    facts: dict[str, str | int] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    numbers: NumericStatus = NumericStatus.NOT_CHECKED
    why: str = ""
    code: dict[str, tuple[KernelCode, ...]] = field(default_factory=dict)


class Effect(StrEnum):
    """The effect of a patch on a probe."""

    FIXES_COMPILE_ERROR = "fixes a compile error"
    REFUSES = "makes it a compile error"
    OTHER_ERROR = "changes a compile error"
    FIXES_NUMBERS = "fixes numbers"
    BREAKS_NUMBERS = "breaks numbers"
    CHANGES_FACTS = "changes facts"
    CHANGES_CODE = "changes code"
    CHANGES_TYPE = "changes a layout type only"
    NOT_COMPARED = "no effect seen, code not compared"
    NONE = "no effect"


@dataclass(frozen=True)
class ProbeComparison:
    """The results of a probe without (``below``) and with (``above``) a patch."""

    probe: Probe
    below: ProbeResult
    above: ProbeResult
    effects: tuple[Effect, ...]


@dataclass(frozen=True)
class PatchProof:
    """The effects of a patch on each of its probes.

    ``tree_below`` is the git tree id of the recipe's tree with the patches before this one in the series, ``tree_above`` the id
    with the patch as well; ``hunks_sha256`` is of the patch's diff.
    """

    patch: str
    hunks_sha256: str
    recipe: str
    tree_below: str
    tree_above: str
    host_compiler: str
    nvcc: str
    results: tuple[ProbeComparison, ...]


@dataclass(frozen=True)
class PatchProofs:
    """The proofs of a patch, one for each recipe on which it was proved."""

    proofs: tuple[PatchProof, ...]


@dataclass(frozen=True)
class SourceChange:
    """A patch that applies, and of which no probe is compiled.

    ``recipe`` and trees are as in a :class:`PatchProof`. ``offsets`` describes hunks that apply at other lines than the patch
    gives. ``why`` is the reason that no probe is compiled, ``evidence`` the value of the patch's trailer.
    """

    patch: str
    hunks_sha256: str
    recipe: str
    tree_below: str
    tree_above: str
    files: tuple[str, ...]
    offsets: str
    why: str
    evidence: str
