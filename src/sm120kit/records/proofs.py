"""What patches do: the probes by which each is proven, and a series without each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sm120kit.records.tiles import Proof, Tile, TileFacts


@dataclass(frozen=True)
class Probe:
    """A small instantiation by which a patch is proven, as its ``Probe`` trailer says (patches/README.md).

    ``kind`` is ``collective`` (CUTLASS's own builder), ``launcher`` (the engine's launcher) or ``flags`` (what the engine's
    generator tells nvcc for ``module``). A shape of 0x0x0 stands for every tile that the engine generates. ``numbers`` asks for
    the mainloop to be run on the CPU, ``code`` for nvcc. ``text`` is the probe as it is written.
    """

    text: str
    kind: str
    family: str = ""
    dtype: str = ""
    m: int = 0
    n: int = 0
    k: int = 0
    epilogue: str = "none"
    swap: bool = False
    module: str = ""
    numbers: bool = False
    code: bool = False
    definitions: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """The tile as people write it."""
        return f"{self.m}x{self.n}x{self.k}" if self.m else ""


@dataclass(frozen=True)
class KernelCode:
    """A kernel's code for one arch. ``name_sha256`` is of its name without hashes of files, ``grid_waits`` and
    ``grid_launches`` count its griddepcontrol instructions in PTX; the rest as in :class:`Kernel`.
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
class Seen:
    """What a probe is on one tree.

    ``error`` and ``where`` are the compiler's first error, empty when it compiles. ``facts`` hold what the host compiler or the
    generator says, such as stages; ``types`` C++ types as text. ``numbers`` is what the emulation of the mainloop showed, and
    ``why`` when they are wrong. ``code`` has only those archs for which it was compiled.
    """

    error: str = ""
    where: str = ""
    facts: dict[str, str | int] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    numbers: Proof = Proof.NOT_CHECKED
    why: str = ""
    code: dict[str, tuple[KernelCode, ...]] = field(default_factory=dict)


class Effect(StrEnum):
    """What a patch does to a probe."""

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
class Proven:
    """A probe without and with a patch."""

    probe: Probe
    below: Seen
    above: Seen
    effects: tuple[Effect, ...]


@dataclass(frozen=True)
class PatchProof:
    """What a patch does to each of its probes.

    ``tree_below`` is the git tree id of the recipe's tree with the series below the patch, ``tree_above`` with the patch too;
    ``hunks_sha256`` is of its diff.
    """

    patch: str
    hunks_sha256: str
    recipe: str
    tree_below: str
    tree_above: str
    host_compiler: str
    nvcc: str
    results: tuple[Proven, ...]


@dataclass(frozen=True)
class TileChange:
    """A tile of which a series without one patch makes something else; None where that side does not list it.

    ``tile.output`` names all outputs for which both sides are the same.
    """

    tile: Tile
    without: TileFacts | None
    full: TileFacts | None


@dataclass(frozen=True)
class Ablated:
    """A series without one patch, against the whole.

    ``dependents`` are patches that do not apply without it and are left out, too. ``flags`` are compiler flags of launcher
    modules that only the whole series has. ``failure`` says why nothing could be compared.
    """

    patch: str
    tree: str
    dependents: tuple[str, ...]
    flags: tuple[str, ...]
    changes: tuple[TileChange, ...]
    failure: str = ""


@dataclass(frozen=True)
class Ablation:
    """What each patch of a recipe's series is for, as far as the host compiler sees it; ``tree`` is that of the whole."""

    recipe: str
    tree: str
    tiles: int
    without: tuple[Ablated, ...]
