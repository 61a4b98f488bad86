"""What a build compiles and what it makes: plans, artifacts, and the kernels in cubins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Arch(StrEnum):
    """CUDA targets that SM12x can run."""

    SM_120A = "sm_120a"
    SM_120F = "sm_120f"
    SM_121A = "sm_121a"

    @property
    def number(self) -> str:
        """As FlashInfer and torch write it: ``12.0f``."""
        return f"{self[3:5]}.{self[5:]}"


@dataclass(frozen=True)
class LeftOut:
    """Something that is not in a plan, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Toolchain:
    """The compilers of a build. ``cuda_home`` holds ``bin/nvcc`` and ``include``."""

    cuda_home: Path
    nvcc_version: str
    host_compiler: str
    host_version: str


@dataclass(frozen=True)
class Unit:
    """One translation unit: ``source`` and ``output`` are relative to the work directory."""

    module: str
    source: str
    output: str
    estimate_bytes: int
    estimate_seconds: float


@dataclass(frozen=True)
class Module:
    """One shared object of the engine, ``library`` relative to the work directory.

    ``packed`` is false when only some of its units are asked for: they are compiled and checked, not linked.
    """

    name: str
    library: str
    units: tuple[Unit, ...]
    packed: bool
    expect_kernels: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Generated:
    """What an engine's own generators made of one module: all its sources, the units that are kept, its ninja file.

    Paths are relative to the work directory, so that the same inputs give the same text in every directory.
    """

    name: str
    library: str
    sources: tuple[str, ...]
    units: tuple[tuple[str, str], ...]
    ninja: str


@dataclass(frozen=True)
class BuildPlan:
    """What will be compiled, what is left out, and the digest that names the result."""

    recipe: str
    engine: str
    version: str
    archs: tuple[Arch, ...]
    groups: tuple[str, ...]
    tree: str
    commit: str
    modules: tuple[Module, ...]
    left_out: tuple[LeftOut, ...]
    toolchain: Toolchain
    digest: str


@dataclass(frozen=True)
class Artifact:
    """A file that a build made. ``path`` is relative to the record's directory."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Artifacts:
    """What a build made."""

    plan: str
    wheel: Artifact
    modules: tuple[Artifact, ...]
    kernels: int
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel in a cubin, as the cubin itself states it.

    ``stack_bytes`` is the local-memory frame a thread needs, where spills live; ``shared_bytes`` is static shared memory only:
    dynamic shared memory is chosen at launch and is not in a cubin.
    """

    name: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    text_bytes: int
    text_sha256: str


@dataclass(frozen=True)
class Cubin:
    """One device image found in a file. ``where`` names the file or wheel member and the index in it."""

    where: str
    arch: str
    bytes: int
    kernels: tuple[Kernel, ...]
