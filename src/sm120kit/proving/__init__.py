"""Where the stages meet to say what a patch does: the trees without and with it, and what its probes are on each.

Beside the because nothing is built here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import patches, prove, recipe, sources, toolchain
from sm120kit.errors import PatchAlreadyUpstream, PatchConflict, UnknownName
from sm120kit.proving.ablation import ablate
from sm120kit.proving.side import Side
from sm120kit.records import Arch, Checkout, PatchProof, PatchState, Probe
from sm120kit.trees import Options
from sm120kit.workspace import data_root, write_atomic

__all__ = ["ablate", "find_patch", "keep", "prove_patch", "subject"]

_UNFIT = {PatchState.CONFLICTS: PatchConflict, PatchState.ALREADY_UPSTREAM: PatchAlreadyUpstream}


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


def subject(name: str, options: Options, recipe_name: str | None = None) -> Subject:
    """A patch on top of the series below it, or a foreign one alone on the stock tree, of a recipe: the first that it is for.

    Raises:
        PatchConflict: it does not apply there, or is for no recipe's version.
    """
    patch, ours = find_patch(name)
    item = recipe.load(recipe_name) if recipe_name else _first_for(patch)
    there = {part.project: part.version for part in patches.parts_of(item.pin, item.inside)}
    if patch.project and patch.project not in there:
        raise PatchConflict(f"{patch.name} is of {patch.project}; {item.name} has {', '.join(there)}", "name another --recipe")
    if patch.project and not patch.is_for(there[patch.project]):
        wanted = patch.trailer("Applies-To")
        raise PatchConflict(f"{patch.name} is for {wanted}; {item.name} has {there[patch.project]}", "name another --recipe")
    checkout = sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
    root, overrides = data_root() / "patches", data_root() / "cutlass_overrides"
    if ours:
        chosen = patches.in_order(item.pin, item.inside, root)
        chosen = chosen[: chosen.index(patch) + 1] if patch in chosen else [*chosen, patch]
        tree, steps = patches.compose(checkout, item.inside, chosen, overrides)
    else:
        for project in [patch.project] if patch.project else there:
            tree, steps = patches.compose(checkout, item.inside, [replace(patch, project=project)], None)
            if steps[-1].status.state is PatchState.APPLIES:
                break
    last = steps[-1]
    unfit = next((step for step in steps if step.status.state in _UNFIT), None)
    if unfit:
        raise _UNFIT[unfit.status.state](
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
    options: Options,
    *,
    recipe_name: str | None = None,
    dtype: str | None = None,
    arch: Arch | None = None,
    code: bool = False,
    probes: Sequence[Probe] = (),
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
    chosen = [probe for probe in asked if dtype in (None, probe.dtype)]
    if not chosen:
        there = ", ".join(sorted({probe.dtype for probe in asked} - {""})) or "no dtype in particular"
        raise UnknownName(f"{about.patch.name} has no probe for {dtype}", f"its probes are for {there}")
    with tempfile.TemporaryDirectory(prefix="sm120kit-prove-") as scratch:
        trees = (about.below, about.above)
        sides = [Side(about.item, about.checkout, tree, tools, options, Path(scratch)) for tree in trees]
        concrete = list(dict.fromkeys(one for probe in chosen for one in _expand(probe, sides)))
        below, above = (side.look(concrete, archs) for side in sides)
    return PatchProof(
        patch=about.patch.name,
        hunks_sha256=about.patch.hunks_sha256,
        recipe=about.item.name,
        tree_below=about.below,
        tree_above=about.above,
        host_compiler=tools.host_version,
        nvcc=tools.nvcc_version,
        results=tuple(prove.compare(probe, below[probe], above[probe]) for probe in concrete),
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
    if probe.kind == "flags" or probe.m:
        return [probe]
    shapes = {
        (one.tile.m, one.tile.n, one.tile.k)
        for side in sides
        for one in side.instantiations
        if one.generated and (one.tile.family, one.tile.dtype) == (probe.family, probe.dtype)
    }
    return [
        replace(probe, m=m, n=n, k=k, text=probe.text.replace(" generated", f" {m}x{n}x{k}", 1)) for m, n, k in sorted(shapes)
    ]
