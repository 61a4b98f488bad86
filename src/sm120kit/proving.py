"""Where the stages meet to say what a patch does: the trees without and with it, and what its probes are on each.

Everything is kept in the workspace by the content that it depends on, so that neighbours in a series share a side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import build as builder
from sm120kit import console, emulate, patches, pipeline, prove, recipe, sources, toolchain
from sm120kit.errors import CompileFailed, PatchAlreadyUpstream, PatchConflict, UnknownName
from sm120kit.gitrepo import Repository
from sm120kit.records import (
    Arch,
    Checkout,
    Emulation,
    PatchProof,
    PatchState,
    Probe,
    Proof,
    Seen,
    Tile,
    Toolchain,
)
from sm120kit.tiles import diagnostics, introspect, listing
from sm120kit.workspace import data_root, digest_of, file_sha256, publish_directory, read_record, write_atomic, write_record

_UNFIT = {PatchState.CONFLICTS: PatchConflict, PatchState.ALREADY_UPSTREAM: PatchAlreadyUpstream}

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A patch with the recipe to whose pin it is applied and the trees below and above it, as git tree ids."""

    patch: patches.Patch
    item: recipe.Recipe
    checkout: Checkout
    below: str
    above: str


def find_patch(name: str) -> tuple[patches.Patch, bool]:
    """A patch by ``project/slug``, by slug alone where only one project has it, or by path; and whether it is of a series.

    Raises:
        UnknownName: no series has it, or several.
        BadPatch: a file that is no patch.
    """
    root = data_root() / "patches"
    if name.endswith((".patch", ".diff")) or Path(name).is_file():
        path = Path(name).resolve()
        inside = path.is_relative_to(root) and path.parent.parent == root and path.parent.name in patches.projects(root)
        if not inside:
            return patches.foreign(Path(name)), False
        name = f"{path.parent.name}/{path.stem}"
    every = [patch for project in patches.projects(root) for patch in patches.load(root, project)]
    found = [patch for patch in every if name in (patch.name, patch.slug)]
    if len(found) > 1:
        raise UnknownName(f"{len(found)} projects have a patch {name}", f"name one: {', '.join(p.name for p in found)}")
    if not found:
        raise UnknownName(f"no series has a patch {name!r}", f"patches: {', '.join(patch.name for patch in every)}; or a file")
    return found[0], True


def subject(name: str, options: pipeline.Options, recipe_name: str | None = None) -> Subject:
    """A patch on top of the series below it, or a foreign one alone on the stock tree, of a recipe: the first that it is for.

    Raises:
        PatchConflict: it does not apply there, or is for no recipe's version.
    """
    patch, ours = find_patch(name)
    item = recipe.load(recipe_name) if recipe_name else _first_for(patch)
    checkout = sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
    root, overrides = data_root() / "patches", data_root() / "cutlass_overrides"
    if ours:
        chosen = patches.in_order(item.pin, item.inside, root)
        chosen = chosen[: chosen.index(patch) + 1] if patch in chosen else [*chosen, patch]
        tree, steps = patches.compose(checkout, item.inside, chosen, overrides)
    else:
        named = [patch.project] if patch.project else [part.project for part in patches.parts_of(item.pin, item.inside)]
        for project in named:
            tree, steps = patches.compose(checkout, item.inside, [replace(patch, project=project)], None)
            if steps[-1].status.state is PatchState.APPLIES:
                break
    last = steps[-1]
    unfit = next((step for step in steps if step.status.state in _UNFIT), last)
    if unfit.status.state is not PatchState.APPLIES:
        raise _UNFIT.get(unfit.status.state, PatchConflict)(
            f"{unfit.patch.name} does not apply to {item.name}: {unfit.status.state}\n{unfit.status.detail}".rstrip(),
            "name another recipe with --recipe; `sm120kit patch status` shows how patches stand to each",
        )
    return Subject(last.patch, item, checkout, steps[-2].tree if len(steps) > 1 else tree, last.tree)


def _first_for(patch: patches.Patch) -> recipe.Recipe:
    names = recipe.names(recipe.Recipe)
    for name in names:
        item = recipe.load(name)
        parts = patches.parts_of(item.pin, item.inside)
        if not patch.project or any(part.project == patch.project and patch.is_for(part.version) for part in parts):
            return item
    raise PatchConflict(
        f"{patch.name} is for {patch.trailer('Applies-To')}, which no recipe has", f"recipes: {', '.join(names)}"
    )


def prove_patch(
    name: str,
    options: pipeline.Options,
    *,
    recipe_name: str | None = None,
    dtype: str | None = None,
    arch: Arch | None = None,
    code: bool = False,
    probes: Sequence[Probe] = (),
    tell: Tell = lambda message: None,
) -> PatchProof:
    """What a patch does to each of its probes, or to ``probes``; with ``code``, nvcc compiles those that ask for it.

    Raises:
        UnknownName: the patch, or probes of that dtype, do not exist.
        PatchConflict: the patch does not apply.
    """
    about = subject(name, options, recipe_name)
    tools = toolchain.find([arch] if arch else [], about.item.headers)
    archs = ([arch] if arch else list(about.item.archs)) if code else []
    asked = list(probes) or list(about.patch.probes)
    if not asked:
        raise UnknownName(f"{about.patch.name} names no probe", "name one: --probe 'collective grouped nvfp4 128x128x64'")
    sides = [Side(about.item, about.checkout, tree, tools, options, tell) for tree in (about.below, about.above)]
    concrete = list(dict.fromkeys(one for probe in asked for one in _expand(probe, sides)))
    chosen = [probe for probe in concrete if dtype in (None, probe.dtype)]
    if not chosen:
        there = ", ".join(sorted({probe.dtype for probe in concrete} - {""})) or "none that has a dtype"
        raise UnknownName(f"{about.patch.name} has no probe for {dtype}", f"its probes are for {there}")
    below, above = (side.look(chosen, archs) for side in sides)
    return PatchProof(
        patch=about.patch.name,
        hunks_sha256=about.patch.hunks_sha256,
        recipe=about.item.name,
        tree_below=about.below,
        tree_above=about.above,
        host_compiler=tools.host_version,
        nvcc=tools.nvcc_version,
        results=tuple(prove.compare(probe, below[probe], above[probe]) for probe in chosen),
    )


def keep(name: str, proof: PatchProof) -> tuple[PatchProof, Path]:
    """Write a proof to ``patches/evidence``, or beside a file that is in no series; code that was compared before stays."""
    _, ours = find_patch(name)
    path = prove.path_of(data_root() / "patches", proof.patch) if ours else Path(name).with_suffix(".json")
    whole = prove.with_code(proof, prove.read(path))
    write_atomic(path, prove.text(whole).encode())
    return whole, path


def _expand(probe: Probe, sides: Iterable[Side]) -> list[Probe]:
    """The probes that one stands for: itself, or one for each shape that the engine generates on either side."""
    if probe.kind == "module" or probe.m:
        return [probe]
    shapes = {
        (one.tile.m, one.tile.n, one.tile.k)
        for side in sides
        for one in side.instantiations()
        if one.generated and (one.tile.family, one.tile.dtype) == (probe.family, probe.dtype)
    }
    return [
        replace(probe, m=m, n=n, k=k, text=probe.text.replace(" generated", f" {m}x{n}x{k}", 1)) for m, n, k in sorted(shapes)
    ]


class Side:
    """One tree, and what probes are on it."""

    def __init__(
        self, item: recipe.Recipe, checkout: Checkout, tree: str, tools: Toolchain, options: pipeline.Options, tell: Tell
    ) -> None:
        self.item, self.tree, self.tools, self.options, self.tell = item, tree, tools, options, tell
        self.repository = Repository(checkout.repository)
        (self.cutlass,) = (inside for inside in item.inside if inside.project == "cutlass")
        self.cache = options.workspace.cache / "prove"
        self.place = options.workspace.cache / "trees" / tree
        with options.workspace.locked(f"tree-{tree}"):
            if not self.place.is_dir():
                with publish_directory(self.place) as beside:
                    self.repository.export(tree, beside)
        self.headers = self.repository.subtree(tree, f"{self.cutlass.path}/include")

    def instantiations(self) -> list[listing.Instantiation]:
        """The launcher calls of the engine."""
        return listing.instantiations(self.place)

    def look(self, probes: Sequence[Probe], archs: Sequence[Arch]) -> dict[Probe, Seen]:
        """What each probe is on this tree."""
        self.tell(f"tree {self.tree[:12]}: types, sizes and flags")
        of_kind = {kind: [one for one in probes if one.kind == kind] for kind in ("collective", "launcher", "module")}
        seen = self.collectives(of_kind["collective"]) | self.launchers(of_kind["launcher"]) | self.modules(of_kind["module"])
        self._emulate(seen)
        for arch in archs:
            for probe in (one for one in probes if one.code and not seen[one].error):
                self.tell(f"tree {self.tree[:12]}: code for {arch} of {probe.text}")
                kernels = prove.compile_unit(self._unit(probe), arch, self.tools, self.options.workspace.cache)
                seen[probe] = replace(seen[probe], code={**seen[probe].code, str(arch): kernels})
        return seen

    def collectives(self, probes: Sequence[Probe]) -> dict[Probe, Seen]:
        """What CUTLASS's builder makes of each, by the host compiler; those that are not known share a translation unit."""
        own = [file_sha256(path) for path in sorted(prove.HEADERS.glob("*"))] + introspect.own_sources()
        base = [self.headers, own, introspect.toolchain_key(self.tools)]

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
        with tempfile.TemporaryDirectory(prefix="sm120kit-prove-") as directory:
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
        measured = introspect.measure(asked, self.place, self.tools, cache, lambda done: None) if asked else {}
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
            for one in self.instantiations()
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

    def modules(self, probes: Sequence[Probe]) -> dict[Probe, Seen]:
        """Flags and units that the engine's own generator writes for each module."""
        if not probes:
            return {}
        orders: dict[str, object] = {}
        for probe in probes:
            if probe.module not in self.item.modules:
                raise UnknownName(f"{self.item.name} has no module {probe.module}", f"modules: {', '.join(self.item.modules)}")
            generator = self.item.modules[probe.module].generator
            orders[probe.module] = {"generator": generator, "leave_out": [], "only": None}
        key = digest_of([self.tree, orders, self.item.archs, self.tools.nvcc_version])
        record = self.cache / "modules" / f"{key}.json"
        if not record.is_file():
            with tempfile.TemporaryDirectory(prefix="sm120kit-prove-") as directory:
                work = Path(directory)
                self.repository.export(self.tree, work / "tree")
                made, _ = builder.generate(work / "tree", work, orders, self.item.archs, self.tools)
            write_record(record, _Modules({one.name: _flags(one.ninja, one.units) for one in made}))
        known = read_record(_Modules, record).facts
        return {probe: Seen(facts=known[probe.module]) for probe in probes}

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
        self.tell(f"tree {self.tree[:12]}: {len(set(mainloops.values()))} mainloops on the CPU")
        emulator = emulate.Emulator(self.place / self.cutlass.path / "include", self.tools, self.options.workspace.cache)
        with console.progress() as progress:
            task = progress.add_task("emulating", total=len(set(mainloops.values())))
            found = emulator.run_all(list(mainloops.values()), lambda: progress.advance(task))
        for probe, mainloop in mainloops.items():
            proof, why = _judged(found[mainloop])
            seen[probe] = replace(seen[probe], numbers=proof, why=why)

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
        includes = [*(path for path in includes if path.is_dir()), introspect.PROBE / "absent"]
        return prove.Unit(f"{call.head}\n{call.call}\n{call.tail}", call.definitions, tuple(includes), self.tree)


@dataclass(frozen=True)
class _Modules:
    facts: dict[str, dict[str, str | int]]


def _flags(ninja: str, units: Sequence[tuple[str, str]]) -> dict[str, str | int]:
    """Definitions that a module's ninja file gives to nvcc, and its units by name."""
    line = next((line for line in ninja.splitlines() if line.startswith("cuda_cflags")), "")
    words = " ".join(sorted({word for word in line.split() if word.startswith("-D")}))
    names = " ".join(sorted(Path(source).name for source, _ in units))
    return {"definitions": words, "units": names}


def _judged(result: Emulation | CompileFailed) -> tuple[Proof, str]:
    if isinstance(result, CompileFailed):
        return Proof.NOT_CHECKED, result.message
    if result.passed:
        return Proof.PROVEN, ""
    kinds = ", ".join(sorted(finding.kind for finding in result.findings))
    return Proof.WRONG, result.signature or kinds or "outputs differ"
