"""The frozen records that rooms hand to each other. Standard library only; each is also a small JSON file on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

SMEM_CAPACITY_BYTES = 101_376
"""Dynamic shared memory one CTA can have on SM120 and SM121 (99 KiB; CUDA C++ Programming Guide, compute capability 12.x)."""


def plain(value: object) -> Any:
    """A record, or what else JSON does not know, as it is written: for ``default`` of ``json.dumps``."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


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
class SdistPin:
    """A source distribution on a Python index, by hash."""

    project: str
    distribution: str
    version: str
    sha256: str


@dataclass(frozen=True)
class GitPin:
    """A commit of a git repository; submodules by the commits it records."""

    project: str
    url: str
    commit: str
    version: str


Pin = SdistPin | GitPin


@dataclass(frozen=True)
class Inside:
    """A project that another one carries, with a series of its own: CUTLASS below ``path`` of FlashInfer."""

    project: str
    path: str
    version: str


@dataclass(frozen=True)
class Checkout:
    """A pinned source as a git repository with one deterministic base commit."""

    pin: Pin
    repository: Path
    commit: str
    tree: str


@dataclass(frozen=True)
class AppliedPatch:
    """One patch of a series as it was applied."""

    project: str
    slug: str
    sha256: str
    commit: str


@dataclass(frozen=True)
class PatchedTree:
    """A checkout with the overrides and every applicable patch on top, as a commit in the same repository."""

    checkout: Checkout
    inside: tuple[Inside, ...]
    commit: str
    tree: str
    patches: tuple[AppliedPatch, ...]


class PatchState(StrEnum):
    """How a patch stands to one pinned version."""

    APPLIES = "applies"
    ALREADY_UPSTREAM = "already upstream"
    NOT_FOR_THIS_VERSION = "not for this version"
    CONFLICTS = "conflicts"


@dataclass(frozen=True)
class PatchStatus:
    """A patch's state on one pin; ``detail`` names the hunk, file and line of a conflict."""

    project: str
    slug: str
    version: str
    state: PatchState
    detail: str = ""


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


@dataclass(frozen=True)
class Tile:
    """A CTA tile that an engine instantiates for SM120: ``m`` x ``n`` x ``k`` in elements.

    ``family`` is grouped (fused MoE) or dense; ``dtype`` nvfp4, mxfp4, mxfp8 or fp8xmxfp4 (activations x weights); ``epilogue``
    none or finalize; ``swap`` whether A and B change places; ``output`` bf16 or f16.
    """

    family: str
    dtype: str
    m: int
    n: int
    k: int
    epilogue: str
    swap: bool
    output: str

    @property
    def shape(self) -> str:
        """As people write it."""
        return f"{self.m}x{self.n}x{self.k}"


class Proof(StrEnum):
    """What is known of the numbers that a tile computes."""

    PROVEN = "proven"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Numbers:
    """Whether a tile computes right numbers, as far as the emulation on the CPU shows it; ``why`` when it is not proven.

    ``outputs`` were compared bit for bit with integers, ``mismatches`` of them differ.
    """

    proof: Proof = Proof.NOT_CHECKED
    why: str = ""
    outputs: int = 0
    mismatches: int = 0


@dataclass(frozen=True)
class TileFacts:
    """What the engine's templates make of a tile, and with ``numbers`` what its emulation showed.

    ``generated`` is false for a tile that the engine could but does not instantiate. A tile that does not compile has the
    reason in plain words, the compiler's own words, and where in the tree they stand (file:line). One that does has the
    schedule (cooperative or pingpong), the tile scheduler (persistent or stream-k), pipeline ``stages``, dynamic shared memory
    per CTA, and ``k_blocks``, the MMA steps along K in one tile.
    """

    tile: Tile
    generated: bool
    compiles: bool
    why_not: str = ""
    error: str = ""
    where: str = ""
    schedule: str = ""
    scheduler: str = ""
    stages: int = 0
    smem_bytes: int = 0
    k_blocks: int = 0
    numbers: Numbers = Numbers()

    @property
    def fits(self) -> bool:
        """Whether SM120 and SM121 can launch it."""
        return self.compiles and self.smem_bytes <= SMEM_CAPACITY_BYTES

    @property
    def margin_bytes(self) -> int | None:
        """Shared memory left over; negative when it is too big, None when it does not compile."""
        return SMEM_CAPACITY_BYTES - self.smem_bytes if self.compiles else None


@dataclass(frozen=True)
class EmulationFinding:
    """One kind of thing that is wrong, such as a rejected tensor map: how often, and the first few in words."""

    kind: str
    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class Emulation:
    """What running a tile's mainloop and epilogue on the CPU showed.

    ``passed`` means every accumulator (``outputs``) and every bf16 value that the epilogue ``stored`` has the bits of the
    integer reference, and there is no finding. ``max_error`` is None when an accumulator was NaN or nothing came out.
    ``signature`` names a known way to be wrong that explains every mismatch.
    ``expected_bytes`` and ``delivered_bytes`` are those of one pipeline stage; -1 when no stage was ever completed.
    """

    tile: Tile
    fault: str
    passed: bool
    outputs: int = 0
    mismatches: int = 0
    max_error: float | None = None
    signature: str = ""
    stored: int = 0
    stored_mismatches: int = 0
    stages: int = 0
    tensor_bytes: int = 0
    mma_count: int = 0
    expected_bytes: int = -1
    delivered_bytes: int = -1
    findings: tuple[EmulationFinding, ...] = ()


@dataclass(frozen=True)
class LockedWheel:
    """The one file that is installed of a distribution on a platform."""

    name: str
    version: str
    filename: str
    sha256: str

    @property
    def distribution(self) -> str:
        """The name again, as pins of sources call it."""
        return self.name


@dataclass(frozen=True)
class Closure:
    """Every wheel of an environment on one platform, and the digest of them, by which a later edit is noticed.

    ``platform`` is a wheel tag such as ``manylinux_2_35_x86_64``; its glibc is the least that the base image must have.
    """

    platform: str
    python: str
    wheels: tuple[LockedWheel, ...]
    sha256: str


@dataclass(frozen=True)
class LockedSource:
    """A source and the git ids of its tree before and after its series; a fetched one has commits as well.

    ``pinned`` is ``sha256 <digest>`` of an sdist, ``commit <id>`` of a git source, or ``<project>:<path>`` of one that lies in
    another.
    """

    project: str
    version: str
    pinned: str
    tree: str
    patched_tree: str
    commit: str = ""
    patched_commit: str = ""


@dataclass(frozen=True)
class LockedFile:
    """A file of ours that goes into a build."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Replaced:
    """A distribution of which no official wheel is installed, because a recipe builds it: the same version, patched."""

    name: str
    version: str
    recipe: str


@dataclass(frozen=True)
class Lock:
    """Everything that a build is made of. The sha256 of its JSON is the build id.

    ``recipe`` is the recipe without its prose. ``rests_on`` names the lock of the kernels in an engine's image, ``<recipe>
    <build id>``; kernels rest on nothing. ``base_image`` is ``name@sha256:<digest>``, or says that it is not locked.
    """

    format: int
    recipe: dict[str, Any]
    sources: tuple[LockedSource, ...]
    patches: tuple[LockedFile, ...]
    overrides: tuple[LockedFile, ...]
    closures: tuple[Closure, ...]
    rests_on: str = ""
    replaced: tuple[Replaced, ...] = ()
    base_image: str = ""


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel that was built here. ``origin`` is what it says of itself: its ``sm120kit.json``."""

    wheel: LockedWheel
    origin: dict[str, Any]


@dataclass(frozen=True)
class ImageContext:
    """A ready build context. ``digest`` names everything that goes in, files, arguments and labels, and with it the image.

    ``kind`` is the Dockerfile's name and that of the image's checks; ``reference`` the name and tag that a verified image gets.
    ``locked`` and ``ours`` are installed, by ``installer``, which is not.
    """

    directory: Path
    digest: str
    kind: str
    base: str
    reference: str
    arguments: dict[str, str]
    labels: dict[str, str]
    installer: LockedWheel
    locked: tuple[LockedWheel, ...]
    ours: tuple[BuiltWheel, ...]


@dataclass(frozen=True)
class Image:
    """An image as a daemon has it.

    ``id`` is the daemon's own and differs between kinds of daemons; ``content`` is the sha256 of the layers, unpacked, and of
    the settings with which a container starts, and is the same in every daemon and registry and with either builder: layers
    without files do not count. ``bytes`` is unpacked.
    """

    id: str
    content: str
    platform: str
    layers: tuple[str, ...]
    labels: dict[str, str]
    user: str
    bytes: int


class Verdict(StrEnum):
    """What a check of an image came to."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Check:
    """One check of an image: ``suite`` and ``name``, and why it failed or was not run."""

    suite: str
    name: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class VerifiedImage:
    """An image that passed its checks, and what its container said. Only ``verify`` makes one.

    ``suite`` is the sha256 of the checks themselves.
    """

    image: Image
    reference: str
    suite: str
    checks: tuple[Check, ...]
    said: dict[str, str]


@dataclass(frozen=True)
class Attested:
    """What a published image is made of and how, in files beside the index: a CycloneDX SBOM and an in-toto statement.

    ``statement`` is a DSSE envelope when it is ``signed``, else the bare statement.
    """

    sbom: Artifact
    statement: Artifact
    signed: bool


@dataclass(frozen=True)
class PublishedImage:
    """Where a verified image can be had: ``repository@digest``. An entry of ``images.json``."""

    repository: str
    tag: str
    digest: str
    recipe: str
    build_id: str
    verified: VerifiedImage
    attested: Attested | None = None


@dataclass(frozen=True)
class Run:
    """A server that was launched. ``image`` is the content of a verified image and ``image_name`` what was started.

    ``build_id`` is the sha256 of the lock that the image was made from, as its label says, "" when there is none.
    ``environment`` are names of variables; their values are not kept. ``started`` is UTC, durations are in seconds, None before
    there is one. ``ending`` is "running", "stopped", "died" or "not healthy in time".
    """

    configuration: str
    engine: str
    image: str
    image_name: str
    model: str
    argv: tuple[str, ...]
    environment: tuple[str, ...]
    url: str
    log: str
    started: str
    healthy_seconds: float | None = None
    seconds: float | None = None
    ending: str = "running"
    exit_code: int | None = None
    build_id: str = ""


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
