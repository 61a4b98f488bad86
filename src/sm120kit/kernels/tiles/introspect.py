"""Compile launcher calls with the host compiler, up to the kernel type, and cache the probe's reports.

Calls share a translation unit, because they share most of their templates: 32 calls take twice the time of one. Each error in a
unit belongs to one of its calls; the others are compiled again without those that have errors.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import CompileFailed, ResourceUnavailable
from sm120kit.core.memory import max_parallel, ran_out_of_memory
from sm120kit.core.parallel import in_parallel
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Toolchain
from sm120kit.core.sandbox import Sandbox, wrap
from sm120kit.core.temporary import owned_directory
from sm120kit.core.toolchain import PLACEHOLDERS
from sm120kit.kernels.kernel_records import Tile, TileFacts
from sm120kit.kernels.tiles import diagnostics
from sm120kit.kernels.tiles.listing import PLAIN, Instantiation

PROBE = Path(__file__).with_name("probe")
UNIT_BYTES = 2_600_000_000
"""Memory in bytes per compile; the largest measured is 2.5 GB, for the calls of 0.7.2.post1's fused MoE in one unit."""

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
LANGUAGE = {"LC_ALL": "C"}  # the messages are parsed


@dataclass(frozen=True)
class TileFactsRecord:
    """The facts of one call or of a table, as a file in the cache."""

    facts: tuple[TileFacts, ...]


@dataclass(frozen=True)
class HostCompiler:
    """The host compiler with the probe's and one module's flags. ``stop`` ends it from another thread.

    In a sandbox it reads the tree and the directories of its arguments.
    """

    program: str
    flags: tuple[str, ...]
    tree: Path
    stop: threading.Event | None = None
    sandbox: Sandbox | None = None

    @classmethod
    def of(
        cls,
        toolchain: Toolchain,
        tree: Path,
        definitions: Sequence[str],
        stop: threading.Event | None = None,
        sandbox: Sandbox | None = None,
    ) -> HostCompiler:
        """For a module of ``tree``. The probe's replacement headers are searched first, the placeholders last."""
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
                f"-idirafter{PLACEHOLDERS}",
            ),
            tree,
            stop,
            sandbox,
        )

    def run(self, *arguments: str | Path) -> process.Completed:
        """Run the compiler, which writes nothing; the caller checks the exit code.

        Raises:
            ResourceUnavailable: the compiler ran out of memory.
            CompileFailed: the compiler crashed.
        """
        read = [self.tree, *(argument.parent for argument in arguments if isinstance(argument, Path))]
        argv, env = wrap([self.program, *self.flags, *arguments], self.sandbox, read=read, env=LANGUAGE)
        done = process.run_within(argv, None, self.stop, env=env)
        if not done.returncode:
            return done
        command = f"command: {process.shell_line(done.argv, LANGUAGE)}"
        if ran_out_of_memory(done.returncode, done.stderr):
            needed = f"a group of tiles needs up to {UNIT_BYTES / 1e9:.1f} GB to compile"
            raise ResourceUnavailable(f"the host compiler ran out of memory: {needed}", command)
        broken = f"signal {-done.returncode}" if done.returncode < 0 else diagnostics.breakdown(done.stderr)
        if broken:
            raise CompileFailed(f"the host compiler crashed: {broken}", command)
        return done

    def prefix(self, head: str, directory: Path) -> Path:
        """Write a header with the probe and the includes of a module."""
        path = directory / "prefix" / "prefix.hpp"
        path.parent.mkdir(parents=True)
        path.write_text('#include "sm120kit_probe.hpp"\n' + "\n".join(re.findall(r"^#include .*$", head, re.MULTILINE)) + "\n")
        return path

    def headers(self, prefix: Path) -> str:
        """sha256 of the content of every header that ``prefix`` reaches."""
        done = self.run("-x", "c++", "-M", prefix)
        if done.returncode:
            reason = diagnostics.first_reason(done.stderr, self.tree)
            message = f"{reason.text} ({reason.where})" if reason else done.stderr.strip()[-500:]
            raise CompileFailed(
                f"the engine's launcher headers do not compile with {self.program}: {message}",
                f"command: {process.shell_line(done.argv, LANGUAGE)}; the header: {prefix.read_text().split()}",
            )
        names = re.split(r"(?<!\\)\s+", done.stdout.replace("\\\n", " ").split(": ", 1)[1].strip())
        paths = {Path(name.replace("\\ ", " ")) for name in names} - {prefix}
        return digest_of(sorted([self._name(path), file_sha256(path)] for path in paths))

    def messages(self, calls: Sequence[Instantiation], prefix: Path, unit: Path) -> str:
        """The compiler's messages for a translation unit with these calls, numbered from 0."""
        unit.write_text(translation_unit(calls))
        return self.run("-fsyntax-only", "-include", prefix, "-x", "c++", unit).stderr

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.tree)) if path.is_relative_to(self.tree) else path.name


def translation_unit(calls: Sequence[Instantiation]) -> str:
    """C++ text in which call number i reports its kernel as line i of the probe."""
    lines = [calls[0].head]
    for number, call in enumerate(calls):
        lines.append(f"#define GemmUniversalAdapter Line{number}")
        if len(calls) > 1:
            lines.append(f'#line {number} "{diagnostics.CALL}"')  # the number of the next line
        lines += [call.call, "#undef GemmUniversalAdapter"]
    aliases = "".join(f"template <class K> using Line{i} = sm120kit_probe::Adapter<K, {i}>;\n" for i in range(len(calls)))
    return "\n".join(["namespace cutlass::gemm::device {", aliases + "}", *lines, calls[0].tail])


class LauncherModule:
    """The calls that share includes and flags, and are compiled in one or two translation units."""

    def __init__(
        self, calls: Sequence[Instantiation], compiler: HostCompiler, directory: Path, cache: Path, toolchain: Toolchain
    ):
        self.calls, self.compiler, self.cache = calls, compiler, cache
        self.prefix = compiler.prefix(calls[0].head, directory)
        self.base = [own_sources(), toolchain_key(toolchain), calls[0].definitions]
        self.measured: dict[Instantiation, tuple[TileFacts, ...]] = {}

    def look_up(self) -> None:
        """Read the cached facts of calls that were measured with these headers, flags and compiler."""
        self.base.append(self.compiler.headers(self.prefix))
        for call in self.calls:
            if self.record(call).is_file():
                self.measured[call] = read_record(TileFactsRecord, self.record(call)).facts

    def record(self, call: Instantiation) -> Path:
        """The cache file of a call's facts."""
        return self.cache / f"{digest_of([self.base, call.tile, call.head, call.call, call.tail])}.json"

    def groups(self) -> list[list[Instantiation]]:
        """The calls that are not measured yet; candidates of other dtypes than NVFP4 may not compile and are apart."""
        missing = [call for call in self.calls if call not in self.measured]
        return _split(missing, lambda call: str(call.generated or call.tile.dtype == PLAIN.dtype))

    def compile(self, calls: Sequence[Instantiation]) -> None:
        """Measure a group of calls and cache the facts of each."""
        unit = self.prefix.parent.with_name(f"{digest_of([call.call for call in calls])[:16]}.cpp")
        messages = self.compiler.messages(calls, self.prefix, unit)
        reason = diagnostics.first_reason(messages, self.compiler.tree)
        if reason and len(calls) > 1:
            reasons = diagnostics.first_reasons(messages, self.compiler.tree)
            failed = {calls[number]: why for number, why in reasons.items() if _about_tile(calls[number], why)}
            for call, why in failed.items():
                self._record(call, [_failure(call, why)])
            others = [call for call in calls if call not in failed]
            for part in [others] if failed else [[call] for call in calls]:
                if part:
                    self.compile(part)
            return
        reports = diagnostics.reports(messages)
        for number, call in enumerate(calls):
            if reason:
                facts = [_failure(call, reason)] if _about_tile(call, reason) else []
            else:
                facts = [
                    TileFacts(
                        _tile(call, report),
                        call.generated,
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
                cause = f"{reason.text} ({reason.where})" if reason else "the probe reported nothing"
                raise CompileFailed(
                    f"the compiler made no kernel of {call.name}: {cause}",
                    "sm120kit tiles does not support the launcher of this engine version",
                )
            self._record(call, facts)

    def _record(self, call: Instantiation, facts: Sequence[TileFacts]) -> None:
        self.measured[call] = tuple(facts)
        write_record(self.record(call), TileFactsRecord(tuple(facts)))


def _about_tile(call: Instantiation, reason: diagnostics.Reason) -> bool:
    """Whether an error shows that the tile of a call cannot exist."""
    return reason.about_tile and "sm120kit_probe::Adapter" not in reason.text and not call.whole_files


def _failure(call: Instantiation, reason: diagnostics.Reason) -> TileFacts:
    """The facts of a tile that does not compile."""
    return TileFacts(call.tile, call.generated, False, diagnostics.plain(reason.text, call.tile), reason.text, reason.where)


def _tile(call: Instantiation, report: diagnostics.ProbeReport) -> Tile:
    """The tile of a kernel: what the call names, or what the probe reports of whole files, in the family of these."""
    if not call.whole_files:
        return call.tile
    family = "-".join(dict.fromkeys(part for part in (call.tile.family, report.tile.family) if part and part != "dense"))
    return replace(report.tile, family=family or "dense")


def measure(
    calls: Sequence[Instantiation],
    tree: Path,
    toolchain: Toolchain,
    cache: Path,
    advance: Callable[[int], None],
    sandbox: Sandbox | None = None,
) -> dict[Instantiation, tuple[TileFacts, ...]]:
    """The facts of each call's kernels, from ``cache`` if headers, flags and compiler are unchanged."""
    tree, stop = tree.resolve(), threading.Event()
    cache.mkdir(parents=True, exist_ok=True)
    threads = max_parallel(UNIT_BYTES)
    with owned_directory(cache, ".work-") as directory:
        modules = [
            LauncherModule(
                group,
                HostCompiler.of(toolchain, tree, group[0].definitions, stop, sandbox),
                directory / group[0].module,
                cache / "units",
                toolchain,
            )
            for group in _split(calls, lambda call: call.module)
        ]
        in_parallel([module.look_up for module in modules], threads, stop.set)
        advance(sum(len(module.measured) for module in modules))

        def compile_group(module: LauncherModule, group: list[Instantiation]) -> None:
            module.compile(group)
            advance(len(group))

        jobs = [partial(compile_group, module, group) for module in modules for group in module.groups()]
        in_parallel(jobs, threads, stop.set)
    return {call: facts for module in modules for call, facts in module.measured.items()}


def _split(calls: Sequence[Instantiation], key: Callable[[Instantiation], str]) -> list[list[Instantiation]]:
    parts: dict[str, list[Instantiation]] = {}
    for call in calls:
        parts.setdefault(key(call), []).append(call)
    return list(parts.values())


def toolchain_key(toolchain: Toolchain) -> list[str]:
    """The parts of a toolchain that a kernel type depends on: host compiler and CUDA headers, independent of their paths."""
    version = toolchain.cuda_home / "include" / "cuda_runtime_api.h"
    return [toolchain.host_version, toolchain.nvcc_version, file_sha256(version) if version.is_file() else "absent"]


def own_sources() -> list[str]:
    """The sha256 of every file that a measurement depends on: this package with its probe, and the placeholder headers."""
    files = [path for base in (Path(__file__).parent, PLACEHOLDERS) for path in sorted(base.rglob("*"))]
    return [file_sha256(path) for path in files if path.suffix in (".py", ".h", ".hpp")]
