"""Run probes on one tree. Results are cached by the content that they depend on, so that similar trees share them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sm12x_lab import emulation, proofs
from sm12x_lab.emulation.emulation_records import Emulation
from sm12x_lab.proofs.proof_records import ProbeResult
from sm120kit.core import reporting
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import CheckFailed, CompileFailed, NotFound
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Arch, Toolchain
from sm120kit.core.sandbox import Sandbox
from sm120kit.core.toolchain import PLACEHOLDERS
from sm120kit.kernels.kernel_records import NumericStatus, Tile, TileFacts
from sm120kit.kernels.tiles import diagnostics, introspect, listing
from sm120kit.patches.patch_records import Probe
from sm120kit.recipes.locked_toolchain import tvm_ffi
from sm120kit.recipes.target import FlashInferTarget, Target
from sm120kit.sources.git import Repository
from sm120kit.wheels.generators import run_generators


def has_cutlass(target: Target) -> bool:
    """Whether the source of a target contains CUTLASS, whose kernels probes compile."""
    return any(project.project == "cutlass" for project in target.recipe.inside)


class Side:
    """One tree of a recipe, on which probes are run. ``scratch`` receives the files of the tree.

    The code of the tree runs in ``sandbox``, unless it is None.
    """

    def __init__(
        self,
        target: FlashInferTarget,
        tree: str,
        tools: Toolchain,
        scratch: Path,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.target, self.recipe, self.options = target, target.recipe, target.options
        self.tree, self.tools, self.scratch, self.sandbox = tree, tools, scratch, sandbox
        self.repository = Repository(target.checkout.repository)
        (self.cutlass,) = (inside for inside in self.recipe.inside if inside.project == "cutlass")
        self.cache = self.options.workspace.cache / "prove"
        self.headers = self.repository.subtree(tree, f"{self.cutlass.path}/include")

    @cached_property
    def directory(self) -> Path:
        """The tree's files, for reading only."""
        directory = self.scratch / self.tree
        self.repository.export(self.tree, directory)
        return directory

    @cached_property
    def instantiations(self) -> list[listing.Instantiation]:
        """The engine's launcher calls."""
        return listing.instantiations(self.directory, self.sandbox)

    def inspect(self, probes: Sequence[Probe], archs: Sequence[Arch]) -> dict[Probe, ProbeResult]:
        """The results of probes on this tree; machine code only for ``archs``."""
        reporting.info(f"tree {self.tree[:12]}: types, sizes and flags")
        by_kind = {kind: [probe for probe in probes if probe.kind == kind] for kind in ("collective", "launcher", "flags")}
        results = self.collectives(by_kind["collective"]) | self.launchers(by_kind["launcher"]) | self.flags(by_kind["flags"])
        self._emulate(results)
        for arch in archs:
            for probe in (probe for probe in probes if probe.code and not results[probe].error):
                reporting.info(f"tree {self.tree[:12]}: code for {arch} of {probe.text}")
                kernels = proofs.compile_unit(self._unit(probe), arch, self.tools, self.options.workspace.cache, self.sandbox)
                results[probe] = replace(results[probe], code={**results[probe].code, str(arch): kernels})
        return results

    def collectives(self, probes: Sequence[Probe]) -> dict[Probe, ProbeResult]:
        """The results of CUTLASS's builder in the host compiler; probes that are not cached share a translation unit."""
        # Other directories of the tree are searched before CUTLASS's: headers there must not affect results of other trees.
        headers = self.tree if self.sandbox else self.headers
        base = [headers, proofs.own_sources(), introspect.own_sources(), introspect.toolchain_key(self.tools)]

        def record(probe: Probe) -> Path:
            key = [base, probe.family, probe.dtype, probe.shape, probe.definitions]
            return self.cache / "collectives" / f"{digest_of(key)}.json"

        for definitions in {probe.definitions for probe in probes}:
            missing = [probe for probe in probes if probe.definitions == definitions and not record(probe).is_file()]
            compiler = introspect.HostCompiler.of(self.tools, self.directory.resolve(), definitions, sandbox=self.sandbox)
            for probe, result in (self._compile(missing, compiler) if missing else {}).items():
                write_record(record(probe), result)
        return {probe: read_record(ProbeResult, record(probe)) for probe in probes}

    def _compile(self, probes: Sequence[Probe], compiler: introspect.HostCompiler) -> dict[Probe, ProbeResult]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            unit = Path(directory, "unit.cpp")
            unit.write_text(proofs.translation_unit(probes, host=True))
            probe = introspect.PROBE / "sm120kit_probe.hpp"
            messages = compiler.run("-fsyntax-only", f"-I{proofs.HEADERS}", "-include", probe, "-x", "c++", unit).stderr
        reason = diagnostics.first_reason(messages, compiler.tree)
        if reason and not reason.about_tile:
            raise CompileFailed(f"a probe does not compile: {reason.text} ({reason.where})")
        if reason and len(probes) > 1:
            return {probe: self._compile([probe], compiler)[probe] for probe in probes}
        if reason:
            return {probes[0]: ProbeResult(reason.text, reason.where)}
        reports = {report.line: report for report in diagnostics.reports(messages)}
        return {
            probe: ProbeResult(
                facts={
                    "k_blocks": reports[line].k_blocks,
                    "smem_bytes": reports[line].smem_bytes,
                    "stages": reports[line].stages,
                },
                types=proofs.reported_types(messages, line),
            )
            for line, probe in enumerate(probes)
        }

    def launchers(self, probes: Sequence[Probe]) -> dict[Probe, ProbeResult]:
        """The results of the engine's launcher; for a tile that is not generated, the call of another tile is edited."""
        calls = {probe: self._call(probe) for probe in probes}
        distinct = list(dict.fromkeys(calls.values()))
        try:
            measured = self._measure(distinct) if distinct else {}
        except CompileFailed as failure:  # the headers that all calls include
            return dict.fromkeys(probes, ProbeResult(failure.message))
        results = {}
        for probe, call in calls.items():
            kernels = measured[call]
            facts: dict[str, str | int] = {
                "definitions": " ".join(call.definitions),
                "generated": "yes" if call.generated else "no",
            }
            for kernel in kernels:
                prefix = f"{kernel.scheduler} " if len(kernels) > 1 else ""
                if kernel.compiles:
                    facts |= {
                        f"{prefix}fits": "yes" if kernel.fits else "no",
                        f"{prefix}k_blocks": kernel.k_blocks,
                        f"{prefix}smem_bytes": kernel.smem_bytes,
                        f"{prefix}stages": kernel.stages,
                    }
            results[probe] = ProbeResult(kernels[0].error, kernels[0].where, facts)
        return results

    def _call(self, probe: Probe) -> listing.Instantiation:
        expected = (probe.family, probe.dtype, probe.epilogue, probe.swap, "bf16")
        similar = [
            call
            for call in self.instantiations
            if (call.tile.family, call.tile.dtype, call.tile.epilogue, call.tile.swap, call.tile.output) == expected
        ]
        if not similar:
            raise NotFound(f"{self.recipe.name} has no launcher call like {probe.text!r}", "use a collective probe")
        for call in similar:
            if call.tile.shape == probe.shape:
                return call
        other = similar[0]
        shape = f"{other.tile.m}, {other.tile.n}, {other.tile.k}"
        text = other.call.replace(shape, f"{probe.m}, {probe.n}, {probe.k}", 1)
        return replace(other, tile=replace(other.tile, m=probe.m, n=probe.n, k=probe.k), call=text, generated=False)

    def _measure(self, calls: Sequence[listing.Instantiation]) -> dict[listing.Instantiation, tuple[TileFacts, ...]]:
        cache = self.options.workspace.cache / "tiles"
        return introspect.measure(calls, self.directory, self.tools, cache, lambda done: None, self.sandbox)

    def flags(self, probes: Sequence[Probe]) -> dict[Probe, ProbeResult]:
        """The ``-D`` flags that the engine's generator passes to nvcc for each module."""
        if not probes:
            return {}
        orders: dict[str, object] = {}
        for probe in probes:
            if probe.module not in self.recipe.modules:
                raise NotFound(f"{self.recipe.name} has no module {probe.module}", f"modules: {', '.join(self.recipe.modules)}")
            orders[probe.module] = {**self.recipe.modules[probe.module].call, "leave_out": [], "only": None}
        key = digest_of([self.tree, orders, self.recipe.archs, self.tools.nvcc_version])
        record = self.cache / "flags" / f"{key}.json"
        if not record.is_file():
            with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
                work = Path(directory)
                self.repository.export(self.tree, work / "tree")
                ffi = tvm_ffi(self.target)
                output = run_generators(work / "tree", work, orders, self.recipe.archs, self.tools, ffi, self.sandbox)
            write_record(record, _Flags({name: _definitions(module.ninja) for name, module in output.modules.items()}))
        definitions = read_record(_Flags, record).definitions
        return {probe: ProbeResult(facts={"definitions": definitions[probe.module]}) for probe in probes}

    def _emulate(self, results: dict[Probe, ProbeResult]) -> None:
        """Add the numbers of the probes that request them to ``results``."""
        mainloops = {
            probe: emulation.Mainloop.of(
                Tile(probe.family, probe.dtype, probe.m, probe.n, probe.k, "none", False, "bf16"),
                stages=int(results[probe].facts["stages"]),
            )
            for probe in results
            if probe.numbers and not results[probe].error
        }
        if not mainloops:
            return
        reporting.info(f"tree {self.tree[:12]}: {len(set(mainloops.values()))} mainloops on the CPU")
        headers = self.directory / self.cutlass.path / "include"
        emulator = emulation.Emulator(headers, self.tools, self.options.workspace.cache, self.sandbox)
        with reporting.task("emulating", len(set(mainloops.values()))) as advance:
            emulated = emulator.run_all(list(mainloops.values()), advance)
        for probe, mainloop in mainloops.items():
            status, why = _status(emulated[mainloop])
            results[probe] = replace(results[probe], numbers=status, why=why.replace(f"{self.directory}/", ""))

    def _unit(self, probe: Probe) -> proofs.TranslationUnit:
        includes = [self.directory / name for name in introspect.INCLUDES]
        if probe.kind == "collective":
            cutlass = self.directory / self.cutlass.path
            includes = [proofs.HEADERS, cutlass / "include", cutlass / "tools/util/include"]
            own = [file_sha256(path) for path in sorted(proofs.HEADERS.glob("*"))]
            return proofs.TranslationUnit(
                proofs.translation_unit([probe], host=False),
                probe.definitions,
                tuple(includes),
                digest_of([self.headers, own]),
            )
        call = self._call(probe)
        # Placeholders for headers that the toolchain's wheels may lack; no kernel uses them.
        includes = [*(path for path in includes if path.is_dir()), PLACEHOLDERS]
        return proofs.TranslationUnit(f"{call.head}\n{call.call}\n{call.tail}", call.definitions, tuple(includes), self.tree)


@dataclass(frozen=True)
class _Flags:
    definitions: dict[str, str]


def _definitions(ninja: str) -> str:
    """The -D flags in a ninja file's ``cuda_cflags``."""
    assigned = re.search(r"^cuda_cflags = (.*)$", ninja.replace("$\n", " "), re.MULTILINE)
    if not assigned:
        raise CheckFailed("a generated ninja file has no cuda_cflags", "sm120kit does not support this engine version")
    return " ".join(sorted({flag for flag in assigned[1].split() if flag.startswith("-D")}))


def _status(result: Emulation | CompileFailed) -> tuple[NumericStatus, str]:
    if isinstance(result, CompileFailed):
        return NumericStatus.NOT_CHECKED, result.message
    if result.passed:
        return NumericStatus.PROVEN, ""
    kinds = ", ".join(sorted(finding.kind for finding in result.findings))
    return NumericStatus.WRONG, result.signature or kinds or "outputs differ"
