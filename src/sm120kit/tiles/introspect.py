"""Compile launcher calls with the host compiler, as far as the kernel type, and keep what the probe reports.

All calls of one dtype share a translation unit, because they share most of their templates: 32 calls take twice the time of
one. A unit that does not compile is split, by shape and then into single calls, so that no call answers for another.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CompileFailed, NotEnoughMemory
from sm120kit.memory import at_once
from sm120kit.records import TileFacts, Toolchain
from sm120kit.tiles import diagnostics
from sm120kit.tiles.listing import Instantiation
from sm120kit.toolchain import ABSENT
from sm120kit.workspace import digest_of, file_sha256, read_record, write_record

PROBE = Path(__file__).with_name("probe")
UNIT_BYTES = 2_000_000_000
"""Memory to have free per compile; the largest seen is 1.8 GB, for the 64 NVFP4 calls of 0.7.2.post1 in one unit."""

INCLUDES = (
    "csrc/nv_internal",
    "csrc/nv_internal/include",
    "csrc/nv_internal/tensorrt_llm/cutlass_extensions/include",
    "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/include",
    "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels",
    "csrc",
    "include",
    "3rdparty/cutlass/include",
    "3rdparty/cutlass/tools/util/include",
    "3rdparty/spdlog/include",
    "3rdparty/cccl/cub",
    "3rdparty/cccl/libcudacxx/include",
    "3rdparty/cccl/thrust",
)
"""FlashInfer's include directories below its source tree (flashinfer/jit/env.py, flashinfer/jit/fused_moe.py)."""

FLAGS = ("-std=c++17", "-fpermissive", "-DNDEBUG", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16")
LANGUAGE = {"LC_ALL": "C"}  # the messages are read


@dataclass(frozen=True)
class Kept:
    """Facts as they lie in the cache."""

    facts: tuple[TileFacts, ...]


@dataclass(frozen=True)
class Compiler:
    """The host compiler with the probe's and one module's flags."""

    program: str
    flags: tuple[str, ...]
    tree: Path

    @classmethod
    def of(cls, toolchain: Toolchain, tree: Path, definitions: Sequence[str]) -> Compiler:
        """For one module of ``tree``. The probe's stand-ins come first, its fallbacks for absent headers last."""
        major, minor = toolchain.nvcc_version.split(".")[:2]
        cuda = toolchain.cuda_home / "include"
        system = [path for path in (*(tree / name for name in INCLUDES), cuda, cuda / "cccl") if path.is_dir()]
        return cls(
            toolchain.host_compiler,
            (
                *FLAGS,
                *definitions,
                f"-D__CUDACC_VER_MAJOR__={major}",
                f"-D__CUDACC_VER_MINOR__={minor}",
                f"-I{PROBE}",
                *(f"-isystem{path}" for path in system),
                f"-idirafter{ABSENT}",
            ),
            tree,
        )

    def run(self, *arguments: str | Path) -> process.Completed:
        """Compile; the caller judges the outcome, except when there is none because the compiler itself broke."""
        done = process.run([self.program, *self.flags, *arguments], env=LANGUAGE, check=False)
        broken = f"signal {-done.returncode}" if done.returncode < 0 else diagnostics.breakdown(done.stderr)
        if done.returncode and broken:
            kind = CompileFailed if "internal compiler error" in broken else NotEnoughMemory
            raise kind(f"the host compiler broke: {broken}", f"command: {process.paste_line(done.argv, LANGUAGE)}")
        return done

    def prefix(self, head: str, directory: Path) -> Path:
        """A header with the probe and what a module includes, as text; :meth:`precompile` makes it quick to read."""
        directory.mkdir()
        path = directory / "prefix.hpp"
        path.write_text('#include "sm120kit_probe.hpp"\n' + "\n".join(re.findall(r"^#include .*$", head, re.MULTILINE)) + "\n")
        return path

    def headers(self, prefix: Path) -> str:
        """sha256 of the content of every header that ``prefix`` reaches."""
        listed = self._must(prefix, "-x", "c++", "-M", prefix).stdout
        words = re.split(r"(?<!\\)\s+", listed.replace("\\\n", " ").split(": ", 1)[1].strip())
        paths = {Path(word.replace("\\ ", " ")) for word in words} - {prefix}
        return digest_of(sorted([self._name(path), file_sha256(path)] for path in paths))

    def precompile(self, prefix: Path) -> None:
        """Read ``prefix`` once for all translation units that include it."""
        self._must(prefix, "-x", "c++-header", prefix, "-o", prefix.with_name(prefix.name + ".gch"))

    def messages(self, calls: Sequence[Instantiation], prefix: Path, unit: Path) -> str:
        """What the compiler says to a translation unit with these calls, numbered from 0."""
        unit.write_text(translation_unit(calls))
        return self.run("-fsyntax-only", "-include", prefix, "-x", "c++", unit).stderr

    def _must(self, prefix: Path, *arguments: str | Path) -> process.Completed:
        done = self.run(*arguments)
        if done.returncode:
            reason = diagnostics.first_reason(done.stderr, self.tree)
            said = f"{reason.text} ({reason.where})" if reason else done.stderr.strip()[-500:]
            raise CompileFailed(
                f"the engine's launcher headers do not compile with {self.program}: {said}",
                f"command: {process.paste_line(done.argv, LANGUAGE)}; the header: {prefix.read_text().split()}",
            )
        return done

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.tree)) if path.is_relative_to(self.tree) else path.name


def translation_unit(calls: Sequence[Instantiation]) -> str:
    """C++ text in which call number i names its kernel as line i of the probe's report."""
    lines = [calls[0].head]
    for number, one in enumerate(calls):
        lines += [
            f"#define GemmUniversalAdapter Line{number}",
            one.call,
            "#undef GemmUniversalAdapter",
        ]
    aliases = "".join(f"template <class K> using Line{i} = sm120kit_probe::Adapter<K, {i}>;\n" for i in range(len(calls)))
    return "\n".join(["namespace cutlass::gemm::device {", aliases + "}", *lines, calls[0].tail])


class Module:
    """The calls that share includes and flags: one precompiled header, then one translation unit per group of calls."""

    def __init__(self, calls: Sequence[Instantiation], compiler: Compiler, directory: Path, cache: Path, toolchain: Toolchain):
        self.calls, self.compiler, self.cache = calls, compiler, cache
        self.prefix = compiler.prefix(calls[0].head, directory)
        self.base = [own_sources(), toolchain_key(toolchain), calls[0].definitions]
        self.known: dict[Instantiation, tuple[TileFacts, ...]] = {}

    def look_up(self) -> None:
        """Take from the cache what was measured with these headers, flags and compiler."""
        self.base.append(self.compiler.headers(self.prefix))
        for one in self.calls:
            if self.record(one).is_file():
                self.known[one] = read_record(Kept, self.record(one)).facts

    def record(self, one: Instantiation) -> Path:
        """Where a call's facts are kept."""
        return self.cache / f"{digest_of([self.base, one.tile, one.head, one.call, one.tail])}.json"

    def groups(self) -> list[list[Instantiation]]:
        """The calls that are not known yet: those of a dtype together; candidates, which may not compile, by shape."""
        unknown = [one for one in self.calls if one not in self.known]
        return _split(unknown, lambda one: f"{one.tile.dtype} {'' if one.generated else one.tile.shape}")

    def precompile(self) -> None:
        """Worth its while from two translation units on."""
        if len(self.groups()) > 1:
            self.compiler.precompile(self.prefix)

    def compile(self, calls: Sequence[Instantiation]) -> None:
        """Measure a group of calls and keep what is found."""
        unit = self.prefix.with_name(f"{digest_of([one.call for one in calls])[:16]}.cpp")
        messages = self.compiler.messages(calls, self.prefix, unit)
        reason = diagnostics.first_reason(messages, self.compiler.tree)
        if reason and len(calls) > 1:
            shapes = _split(calls, lambda one: one.tile.shape)
            for part in shapes if len(shapes) > 1 else [[one] for one in calls]:
                self.compile(part)
            return
        reports = diagnostics.reports(messages)
        for number, one in enumerate(calls):
            if reason and reason.about_tile and "sm120kit_probe::Adapter" not in reason.text:
                why = diagnostics.plain(reason.text, one.tile)
                facts = [TileFacts(one.tile, one.generated, False, why, reason.text, reason.where)]
            elif reason:
                facts = []
            else:
                facts = [
                    TileFacts(
                        one.tile,
                        one.generated,
                        True,
                        schedule=report.schedule,
                        scheduler=report.scheduler,
                        stages=report.stages,
                        smem_bytes=report.smem_bytes,
                        k_blocks=report.k_blocks,
                    )
                    for report in reports
                    if report.line == number
                ]
            if not facts:
                said = f"{reason.text} ({reason.where})" if reason else "no report"
                raise CompileFailed(
                    f"the compiler made no kernel of {one.call}: {said}",
                    "the launcher of this engine version is not known to sm120kit tiles",
                )
            self.known[one] = tuple(facts)
            write_record(self.record(one), Kept(tuple(facts)))


def measure(
    asked: Sequence[Instantiation], tree: Path, toolchain: Toolchain, cache: Path, advance: Callable[[int], None]
) -> dict[Instantiation, tuple[TileFacts, ...]]:
    """The facts of every call, one per kernel it makes; from ``cache`` where its headers, flags and compiler are the same."""
    tree = tree.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".work-", dir=cache))
    pool = ThreadPoolExecutor(at_once(UNIT_BYTES))
    try:
        modules = [
            Module(
                calls,
                Compiler.of(toolchain, tree, calls[0].definitions),
                directory / calls[0].module,
                cache / "units",
                toolchain,
            )
            for calls in _split(asked, lambda one: one.module)
        ]
        list(pool.map(Module.look_up, modules))
        advance(sum(len(module.known) for module in modules))
        list(pool.map(Module.precompile, modules))
        waiting = {pool.submit(module.compile, group): len(group) for module in modules for group in module.groups()}
        for done in as_completed(waiting):
            done.result()
            advance(waiting[done])
        return {one: facts for module in modules for one, facts in module.known.items()}
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(directory, ignore_errors=True)


def _split(calls: Sequence[Instantiation], key: Callable[[Instantiation], str]) -> list[list[Instantiation]]:
    parts: dict[str, list[Instantiation]] = {}
    for one in calls:
        parts.setdefault(key(one), []).append(one)
    return list(parts.values())


def toolchain_key(toolchain: Toolchain) -> list[str]:
    """What of a toolchain can change a kernel type: the host compiler and the CUDA headers, wherever they lie."""
    version = toolchain.cuda_home / "include" / "cuda_runtime_api.h"
    return [toolchain.host_version, toolchain.nvcc_version, file_sha256(version) if version.is_file() else "absent"]


def own_sources() -> list[str]:
    """The sha256 of everything in this package, the probe and how its answers are read, and of the stand-ins for headers."""
    files = [path for base in (Path(__file__).parent, ABSENT) for path in sorted(base.rglob("*"))]
    return [file_sha256(path) for path in files if path.suffix in (".py", ".h", ".hpp")]
