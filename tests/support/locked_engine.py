"""A locked engine ``vllm-7.0`` in a data directory of its own, with everything that its build fetches in a mirror."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patch_series import BASE, KERNEL, PatchDirectory, patch_text
from small_engine import ENGINE, KERNELS, make_sdist, make_wheel

from sm120kit import recipes
from sm120kit.core.digests import file_sha256
from sm120kit.core.workspace import Workspace
from sm120kit.patches.local import read_local
from sm120kit.patches.mails import ForeignPatch
from sm120kit.recipes import lockfile
from sm120kit.recipes.lockfile import current_lock
from sm120kit.recipes.target import EngineTarget, resolve, with_local
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel

CUTLASS = '[sources.cutlass]\ninside = "flashinfer"\npath = "3rdparty/cutlass"\nversion = "4.2.1"\n'
LAYERS, MOE, HEADER = "vllm/layers.py", "b12x/moe.py", "include/cutlass/builder.inl"
FILES = {LAYERS: KERNEL, "vllm/other.py": KERNEL, "vllm/_C.abi3.so": "\x7fELF", "vllm/srt/deep.py": KERNEL}


class Site:
    """A locked engine ``vllm-7.0`` of an upstream wheel, with b12x and a FlashInfer that contains CUTLASS."""

    def __init__(self, root: Path) -> None:
        self.root, self.data, self.mirror = root, root / "data", root / "mirror"
        self.recipes = self.data / "recipes" / "engines"
        self.patches = PatchDirectory(self.data)
        self.mirror.mkdir()
        self.recipes.mkdir(parents=True)
        sha256 = make_sdist(self.mirror / "flashinfer_python-1.0.tar.gz", BASE)
        (self.recipes / "flashinfer-1.0.toml").write_text(KERNELS.format(sha256=sha256) + CUTLASS)
        (self.recipes / "vllm-7.0.toml").write_text(ENGINE.replace("9.0", "7.0"))
        encoded = {name: text.encode() for name, text in FILES.items()}
        make_wheel(self.mirror, "vllm", "7.0", "cp38-abi3-linux_x86_64", files=encoded)
        make_wheel(self.mirror, "b12x", "1.0", files={MOE: KERNEL.encode()})
        series = self.put("b12x", "old", patch_text(self.patches.edit(MOE, 3, "x\n", {MOE: KERNEL}, ""), "b12x", "==0.5"))
        assert series.is_file(), "without a series, b12x is no source"
        self.lock()

    def put(self, project: str, slug: str, content: bytes) -> Path:
        return self.patches.put(slug, content, project)

    def lock(self) -> None:
        """Write both lockfiles for the present series."""
        lockfile.create(resolve("flashinfer-1.0", self.options))
        paths = sorted(self.mirror.glob("*.whl"))
        wheels = tuple(LockedWheel(*path.name.split("-")[:2], path.name, file_sha256(path)) for path in paths)
        closure = lockfile.make_closure("manylinux_2_35_x86_64", "3.12", wheels, replaced=False)
        target = resolve("vllm-7.0", self.options)
        recipes.lock_path(target.path).write_text(lockfile.text(lockfile.stored(current_lock(target, [closure]), target.path)))

    @property
    def options(self) -> Options:
        return Options(Workspace.open(self.root / "state"), Origin(str(self.mirror), offline=True))

    def diff(self, name: str, path: str, line: int, files: dict[str, str] | None = None, text: str = "") -> Path:
        """A plain diff of a line of a file."""
        given = files or {path: KERNEL}
        file = self.root / name
        file.write_bytes(self.patches.edit(path, line, text or f"{name}\n", given, ""))
        return file

    def add_to_wheels(self, name: str) -> None:
        """Add a file to the packages of both wheels, and lock them again."""
        encoded = {path: text.encode() for path, text in FILES.items()}
        added = {project: {f"{project}/{name}": KERNEL.encode()} for project in ("vllm", "b12x")}
        make_wheel(self.mirror, "b12x", "1.0", files={MOE: KERNEL.encode()} | added["b12x"])
        make_wheel(self.mirror, "vllm", "7.0", "cp38-abi3-linux_x86_64", files=encoded | added["vllm"])
        self.lock()

    def target(self, *paths: Path) -> EngineTarget:
        return self.target_of(read_local(paths, self.options.origin))

    def target_of(self, patches: Sequence[ForeignPatch]) -> EngineTarget:
        target = with_local(resolve("vllm-7.0", self.options), patches).engine
        assert target is not None
        return target

    def contents(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for name in ("recipes", "patches") for path in (self.data / name).rglob("*.*")}
