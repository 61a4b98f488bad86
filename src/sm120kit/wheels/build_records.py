"""Records of a build: the request, the plan, and the artifacts."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sm120kit.core.records import Arch, LeftOut, Stage, Toolchain
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree
from sm120kit.recipes.schema import FlashInferRecipe

NO_TOOLCHAIN = Toolchain(Path(), "none", "none", "none")
"""Toolchain of a plan that compiles nothing."""


@dataclass(frozen=True)
class BuildRequest:
    """What to build of a recipe, and up to which stage.

    ``archs`` are the CUDA targets, by default those of the recipe. ``group`` is a kernel group of the recipe, by default its
    default group; of the kernel wheel, a prefix of kernel names. ``from_source`` also builds an engine's extension modules.
    ``machine`` is that of the result, by default this one.
    """

    archs: tuple[Arch, ...] = ()
    group: str | None = None
    from_source: bool = False
    stage: Stage = Stage.PACK
    machine: str = field(default_factory=platform.machine)


@dataclass(frozen=True)
class Unit:
    """One translation unit: ``source`` and ``output`` are relative to the work directory."""

    module: str
    source: str
    output: str
    estimate_bytes: int
    estimate_seconds: float

    @property
    def name(self) -> str:
        """Module and file: ``fp4_gemm_cutlass_sm120/fp4_gemm_cutlass_128x128x128.cu``."""
        return f"{self.module}/{PurePosixPath(self.source).name}"


@dataclass(frozen=True)
class Module:
    """One shared object of the engine, ``library`` relative to the work directory.

    Symbols that match one of the shell-style patterns ``undefined`` need not resolve.
    """

    name: str
    library: str
    units: tuple[Unit, ...]
    expect_kernels: tuple[tuple[str, int], ...]
    undefined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generated:
    """Output of an engine's generator for one module: all its sources, the units that are compiled, its ninja file.

    Paths are relative to the work directory, so that the same inputs give the same text in every directory.
    """

    name: str
    library: str
    sources: tuple[str, ...]
    units: tuple[tuple[str, str], ...]
    ninja: str


@dataclass(frozen=True)
class BuildPlan:
    """What will be compiled, what is left out, and the digest of all inputs, which names the result."""

    recipe: str
    engine: str
    version: str
    tree: str
    commit: str
    archs: tuple[Arch, ...] = ()
    groups: tuple[str, ...] = ()
    modules: tuple[Module, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    toolchain: Toolchain = NO_TOOLCHAIN
    digest: str = ""


@dataclass(frozen=True)
class Artifact:
    """A file that a build produced. ``path`` is relative to the directory of the record."""

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Artifacts:
    """The files that a build produced, and the number of kernels in their device code."""

    plan: str
    wheel: Artifact
    modules: tuple[Artifact, ...]
    kernels: int
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True)
class _Build:
    """A build, with its artifacts once the wheel exists. ``ran`` is false if they are those of an earlier build."""

    artifacts: Artifacts | None = None
    directory: Path | None = None
    ran: bool = False

    @property
    def wheel(self) -> Path:
        """The finished wheel; only after the last stage."""
        assert self.artifacts is not None and self.directory is not None
        return self.directory / self.artifacts.wheel.path


@dataclass(frozen=True)
class WheelBuild(_Build):
    """The records of the stages that the build of a FlashInfer wheel or of the kernel wheel reached."""

    recipe: FlashInferRecipe
    tree: PatchedTree | None = None
    plan: BuildPlan | None = None

    @property
    def name(self) -> str:
        """The name in the plan, or that of the recipe if there is no plan yet."""
        return self.plan.recipe if self.plan else self.recipe.name

    @property
    def wheels(self) -> dict[Path, str]:
        """The finished wheels with their sha256, as an engine's build has several."""
        assert self.artifacts is not None
        return {self.wheel: self.artifacts.wheel.sha256}


@dataclass(frozen=True)
class RepackedWheel(_Build):
    """An engine's upstream wheel with replaced members.

    ``patched_members`` are the files of the engine's own package that are replaced, each with the patches that change it.
    """

    plan: BuildPlan
    patched_members: Mapping[str, tuple[AppliedPatch, ...]]
