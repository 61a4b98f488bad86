"""One tree, and what probes are on it. Answers are kept by the content that they depend on, so that neighbours share them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sm120kit import build as builder
from sm120kit import console, emulate, prove, recipe
from sm120kit.errors import CompileFailed, ExpectationFailed, UnknownName
from sm120kit.gitrepo import Repository
from sm120kit.records import Arch, Checkout, Emulation, Probe, Proof, Seen, Tile, TileFacts, Toolchain
from sm120kit.tiles import diagnostics, introspect, listing
from sm120kit.toolchain import ABSENT
from sm120kit.trees import Options
from sm120kit.workspace import digest_of, file_sha256, read_record, write_record


class Side:
    """One tree, and what probes are on it."""

    def __init__(
        self, item: recipe.Recipe, checkout: Checkout, tree: str, tools: Toolchain, options: Options, scratch: Path
    ) -> None:
        self.item, self.tree, self.tools, self.options, self.scratch = item, tree, tools, options, scratch
        self.repository = Repository(checkout.repository)
        (self.cutlass,) = (inside for inside in item.inside if inside.project == "cutlass")
        self.cache = options.workspace.cache / "prove"
        self.headers = self.repository.subtree(tree, f"{self.cutlass.path}/include")

    @cached_property
    def place(self) -> Path:
        """The tree's files, for reading only."""
        place = self.scratch / self.tree
        self.repository.export(self.tree, place)
        return place

    @cached_property
    def instantiations(self) -> list[listing.Instantiation]:
        """The launcher calls of the engine."""
        return listing.instantiations(self.place)

    def look(self, probes: Sequence[Probe], archs: Sequence[Arch]) -> dict[Probe, Seen]:
        """What each probe is on this tree."""
        console.say(f"tree {self.tree[:12]}: types, sizes and flags")
        of_kind = {kind: [one for one in probes if one.kind == kind] for kind in ("collective", "launcher", "flags")}
        seen = self.collectives(of_kind["collective"]) | self.launchers(of_kind["launcher"]) | self.flags(of_kind["flags"])
        self._emulate(seen)
        for arch in archs:
            for probe in (one for one in probes if one.code and not seen[one].error):
                console.say(f"tree {self.tree[:12]}: code for {arch} of {probe.text}")
                kernels = prove.compile_unit(self._unit(probe), arch, self.tools, self.options.workspace.cache)
                seen[probe] = replace(seen[probe], code={**seen[probe].code, str(arch): kernels})
        return seen

    def collectives(self, probes: Sequence[Probe]) -> dict[Probe, Seen]:
        """What CUTLASS's builder makes of each, by the host compiler; those that are not known share a translation unit."""
        base = [self.headers, prove.own_sources(), introspect.own_sources(), introspect.toolchain_key(self.tools)]

        def record(probe: Probe) -> Path:
            told = [base, probe.family, probe.dtype, probe.shape, probe.definitions]
            return self.cache / "collectives" / f"{digest_of(told)}.json"

        for definitions in {probe.definitions for probe in probes}:
            unknown = [one for one in probes if one.definitions == definitions and not record(one).is_file()]
            compiler = introspect.Compiler.of(self.tools, self.place.resolve(), definitions)
            for probe, seen in (self._compile(unknown, compiler) if unknown else {}).items():
                write_record(record(probe), seen)
        return {probe: read_record(Seen, record(probe)) for probe in probes}

    def _compile(self, probes: Sequence[Probe], compiler: introspect.Compiler) -> dict[Probe, Seen]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            unit = Path(directory, "unit.cpp")
            unit.write_text(prove.translation_unit(probes, host=True))
            probe = introspect.PROBE / "sm120kit_probe.hpp"
            messages = compiler.run("-fsyntax-only", f"-I{prove.HEADERS}", "-include", probe, "-x", "c++", unit).stderr
        reason = diagnostics.first_reason(messages, compiler.tree)
        if reason and not reason.about_tile:
            raise CompileFailed(f"a probe does not compile: {reason.text} ({reason.where})")
        if reason and len(probes) > 1:
            return {probe: seen for one in probes for probe, seen in self._compile([one], compiler).items()}
        if reason:
            return {probes[0]: Seen(reason.text, reason.where)}
        reports = {report.line: report for report in diagnostics.reports(messages)}
        return {
            probe: Seen(
                facts={
                    "k_blocks": reports[line].k_blocks,
                    "smem_bytes": reports[line].smem_bytes,
                    "stages": reports[line].stages,
                },
                types=prove.facts_of(messages, line),
            )
            for line, probe in enumerate(probes)
        }

    def launchers(self, probes: Sequence[Probe]) -> dict[Probe, Seen]:
        """What the engine's launcher makes of each; a tile that is not among its own is asked for in the call of another."""
        calls = {probe: self._call(probe) for probe in probes}
        asked = list(dict.fromkeys(calls.values()))
        cache = self.options.workspace.cache / "tiles"
        try:
            measured = introspect.measure(asked, self.place, self.tools, cache, lambda done: None) if asked else {}
        except CompileFailed as failure:  # the headers that all of them share
            return dict.fromkeys(probes, Seen(failure.message))
        found = {}
        for probe, call in calls.items():
            kernels = measured[call]
            facts: dict[str, str | int] = {
                "definitions": " ".join(call.definitions),
                "generated": "yes" if call.generated else "no",
            }
            for one in kernels:
                which = f"{one.scheduler} " if len(kernels) > 1 else ""
                if one.compiles:
                    facts |= {
                        f"{which}fits": "yes" if one.fits else "no",
                        f"{which}k_blocks": one.k_blocks,
                        f"{which}smem_bytes": one.smem_bytes,
                        f"{which}stages": one.stages,
                    }
            found[probe] = Seen(kernels[0].error, kernels[0].where, facts)
        return found

    def _call(self, probe: Probe) -> listing.Instantiation:
        wanted = (probe.family, probe.dtype, probe.epilogue, probe.swap, "bf16")
        alike = [
            one
            for one in self.instantiations
            if (one.tile.family, one.tile.dtype, one.tile.epilogue, one.tile.swap, one.tile.output) == wanted
        ]
        if not alike:
            raise UnknownName(f"{self.item.name} has no launcher call like {probe.text!r}", "use a collective probe")
        for one in alike:
            if one.tile.shape == probe.shape:
                return one
        one = alike[0]
        call = one.call.replace(f"{one.tile.m}, {one.tile.n}, {one.tile.k}", f"{probe.m}, {probe.n}, {probe.k}", 1)
        return replace(one, tile=replace(one.tile, m=probe.m, n=probe.n, k=probe.k), call=call, generated=False)

    def tiles(self, dtype: str | None) -> tuple[TileFacts, ...]:
        """The facts of every tile that the engine generates, or those of one dtype, and of the K=64 candidates."""
        asked = [one for one in self.instantiations if dtype in (None, one.tile.dtype)]
        measured = introspect.measure(asked, self.place, self.tools, self.options.workspace.cache / "tiles", lambda done: None)
        return tuple(replace(fact, generated=one.generated) for one in asked for fact in measured[one])

    def flags(self, probes: Sequence[Probe]) -> dict[Probe, Seen]:
        """The definitions that the engine's own generator hands to nvcc for each module."""
        if not probes:
            return {}
        orders: dict[str, object] = {}
        for probe in probes:
            if probe.module not in self.item.modules:
                raise UnknownName(f"{self.item.name} has no module {probe.module}", f"modules: {', '.join(self.item.modules)}")
            generator = self.item.modules[probe.module].generator
            orders[probe.module] = {"generator": generator, "leave_out": [], "only": None}
        key = digest_of([self.tree, orders, self.item.archs, self.tools.nvcc_version])
        record = self.cache / "flags" / f"{key}.json"
        if not record.is_file():
            with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
                work = Path(directory)
                self.repository.export(self.tree, work / "tree")
                made, _ = builder.generate(work / "tree", work, orders, self.item.archs, self.tools)
            write_record(record, _Flags({one.name: _definitions(one.ninja) for one in made}))
        known = read_record(_Flags, record).definitions
        return {probe: Seen(facts={"definitions": known[probe.module]}) for probe in probes}

    def _emulate(self, seen: dict[Probe, Seen]) -> None:
        mainloops = {
            probe: emulate.Mainloop.of(
                Tile(probe.family, probe.dtype, probe.m, probe.n, probe.k, "none", False, "bf16"),
                stages=int(seen[probe].facts["stages"]),
            )
            for probe in seen
            if probe.numbers and not seen[probe].error
        }
        if not mainloops:
            return
        console.say(f"tree {self.tree[:12]}: {len(set(mainloops.values()))} mainloops on the CPU")
        emulator = emulate.Emulator(self.place / self.cutlass.path / "include", self.tools, self.options.workspace.cache)
        with console.progress() as progress:
            task = progress.add_task("emulating", total=len(set(mainloops.values())))
            found = emulator.run_all(list(mainloops.values()), lambda: progress.advance(task))
        for probe, mainloop in mainloops.items():
            proof, why = _judged(found[mainloop])
            seen[probe] = replace(seen[probe], numbers=proof, why=why.replace(f"{self.place}/", ""))

    def _unit(self, probe: Probe) -> prove.Unit:
        includes = [self.place / name for name in introspect.INCLUDES]
        if probe.kind == "collective":
            below = self.place / self.cutlass.path
            includes = [prove.HEADERS, below / "include", below / "tools/util/include"]
            own = [file_sha256(path) for path in sorted(prove.HEADERS.glob("*"))]
            return prove.Unit(
                prove.translation_unit([probe], host=False),
                probe.definitions,
                tuple(includes),
                digest_of([self.headers, own]),
            )
        call = self._call(probe)
        # The headers that the toolchain's wheels may lack have stand-ins; no kernel uses them.
        includes = [*(path for path in includes if path.is_dir()), ABSENT]
        return prove.Unit(f"{call.head}\n{call.call}\n{call.tail}", call.definitions, tuple(includes), self.tree)


@dataclass(frozen=True)
class _Flags:
    definitions: dict[str, str]


def _definitions(ninja: str) -> str:
    """The -D flags in a ninja file's ``cuda_cflags``."""
    assigned = re.search(r"^cuda_cflags = (.*)$", ninja.replace("$\n", " "), re.MULTILINE)
    if not assigned:
        raise ExpectationFailed("a generated ninja file has no cuda_cflags", "this engine version is not known to sm120kit")
    return " ".join(sorted({word for word in assigned[1].split() if word.startswith("-D")}))


def _judged(result: Emulation | CompileFailed) -> tuple[Proof, str]:
    if isinstance(result, CompileFailed):
        return Proof.NOT_CHECKED, result.message
    if result.passed:
        return Proof.PROVEN, ""
    kinds = ", ".join(sorted(finding.kind for finding in result.findings))
    return Proof.WRONG, result.signature or kinds or "outputs differ"
