"""Prove a patch: determine the trees without and with it, run its probes on both, and compare the results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm12x_lab import proofs
from sm12x_lab.proofs.proof_records import PatchProof, ProofRequest, SourceChange
from sm12x_lab.proofs.side import Side, has_cutlass
from sm120kit import patches, recipes
from sm120kit.core import sandbox
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.data_roots import data_root, top_root, writable_data_root
from sm120kit.core.errors import BadInput, CheckFailed, CommandFailed, CompileFailed, NotFound, PatchConflict
from sm120kit.patches.checkout import OVERRIDES, PATCHES, series_of
from sm120kit.patches.evidence import gaps
from sm120kit.patches.patch_records import PatchState, Probe
from sm120kit.patches.series import require_own
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import Target, require_source, resolve_each
from sm120kit.sources.git import Repository
from sm120kit.sources.run_options import Options

__all__ = ["find_patch", "prove_patch", "require_storable", "source_change", "store"]

_OTHER_RECIPE = "choose another recipe with --recipe"
_REFUSED = {PatchState.CONFLICTS: PatchConflict, PatchState.ALREADY_UPSTREAM: PatchConflict}


@dataclass(frozen=True)
class PatchTrees:
    """A patch and its recipe, with the git tree ids of the recipe's source without (``below``) and with (``above``) it.

    ``offsets`` describes hunks that apply at other lines than the patch gives.
    """

    patch: patches.Patch
    target: Target
    below: str
    above: str
    offsets: str


def find_patch(name: str) -> tuple[patches.Patch, bool]:
    """Find a patch by ``project/slug``, by a unique slug, or by path; also returns whether a series contains it.

    Raises:
        NotFound: no series has the patch, or several projects have a patch of that name.
        BadInput: the file is not a patch.
    """
    root = top_root() / PATCHES
    if name.endswith((".patch", ".diff")) or Path(name).is_file():
        path = Path(os.path.realpath(name))
        is_of_series = path.parent.parent in (root, data_root() / PATCHES) and path.parent.name in patches.projects(root)
        if not is_of_series:
            return patches.read_foreign(Path(name)), False
        name = f"{path.parent.name}/{path.stem}"
    return patches.find(root, name), True


def _trees(patch: patches.Patch, in_series: bool, target: Target) -> PatchTrees:
    """The trees without and with a patch, which is for the versions of ``target``.

    A patch of a series is applied on top of those before it; any other patch alone, to the unpatched source.

    Raises:
        PatchConflict: the patch does not apply.
    """
    recipe, source = target.recipe, require_source(target, patch.project)
    checkout, inside = source.checkout, source.inside
    overrides = data_root() / OVERRIDES
    if in_series:
        series = series_of(source.pin, inside)
        series = series[: series.index(patch) + 1] if patch in series else [*series, patch]
        tree, steps = patches.compose(checkout, inside, series, overrides)
    else:
        for project in [patch.project] if patch.project else [part.project for part in source.projects]:
            tree, steps = patches.compose(checkout, inside, [replace(patch, project=project)], None)
            if steps[-1].status.state is PatchState.APPLIES:
                break
    last = steps[-1]
    failed = next((step for step in steps if step.status.state in _REFUSED), None)
    if failed:
        raise _REFUSED[failed.status.state](
            f"{failed.patch.name} does not apply to {recipe.name}: {failed.status.state}\n{failed.status.detail}".rstrip(),
            f"{_OTHER_RECIPE}; `sm120kit patch status` lists the status of each patch by recipe",
        )
    return PatchTrees(last.patch, target, steps[-2].tree if len(steps) > 1 else tree, last.tree, last.status.detail)


def _target_for(patch: patches.Patch, options: Options, target: Target | None) -> Target:
    """``target``, or the first recipe that a patch is for. Nothing is fetched.

    Raises:
        BadInput: the patch states no version, so that it is for no recipe in particular.
        NotFound: the recipe of ``target`` has no source.
        PatchConflict: the patch is for the version of no recipe that has a source, or not for that of ``target``.
    """
    if target is None:
        return _first_for(patch, options)
    require_source(target)
    versions = {part.project: part.version for source in target.sources for part in source.projects}
    if patch.project and patch.project not in versions:
        problem = f"{patch.name} is for {patch.project}; {target.recipe.name} has {', '.join(versions)}"
        raise PatchConflict(problem, _OTHER_RECIPE)
    if patch.project and not patch.is_for(versions[patch.project]):
        problem = f"{patch.name} is for {patch.trailer('Applies-To')}; {target.recipe.name} has {versions[patch.project]}"
        raise PatchConflict(problem, _OTHER_RECIPE)
    return target


def _first_for(patch: patches.Patch, options: Options) -> Target:
    targets = [target for target in resolve_each(recipes.names(), options) if target.sources]
    names = ", ".join(target.recipe.name for target in targets)
    if not patch.project:
        raise BadInput(f"{patch.slug} has no Applies-To: its version is unknown", f"name its recipe with --recipe: {names}")
    fitting = (target for target in targets if any(source.has_version_of(patch) for source in target.sources))
    if found := next(fitting, None):
        return found
    raise PatchConflict(
        f"{patch.name} is for {patch.trailer('Applies-To')}, which no recipe with a source has",
        f"recipes with a source: {names}",
    )


def source_change(name: str, options: Options, target: Target | None = None) -> SourceChange | None:
    """The change of a patch of which no probe is compiled; None for a patch with probes.

    None is compiled if the source contains no CUTLASS, or if a patch of a series, but not of CUTLASS's, names none. A patch of
    a series is applied on top of those before it; any other patch alone, to the unpatched source.
    """
    patch, in_series = find_patch(name)
    target = _target_for(patch, options, target)
    contains_cutlass = has_cutlass(target)
    if contains_cutlass and (patch.probes or not in_series or patch.project == "cutlass"):
        return None
    trees = _trees(patch, in_series, target)
    repository = Repository(require_source(target, patch.project).checkout.repository)
    return SourceChange(
        patch=trees.patch.name,
        hunks_sha256=patch.hunks_sha256,
        recipe=target.recipe.name,
        tree_below=trees.below,
        tree_above=trees.above,
        files=tuple(repository.changed(trees.below, trees.above)),
        offsets=trees.offsets,
        why="the patch names none" if contains_cutlass else "the source contains no CUTLASS",
        evidence=_evidence(patch),
    )


def prove_patch(name: str, options: Options, request: ProofRequest, target: Target | None = None) -> PatchProof:
    """The effects of a patch on each of its probes, of ``target`` or of the first recipe that the patch is for.

    The code of a patch that is in no series runs in a sandbox.

    Raises:
        NotFound: the patch does not exist, or has no probe of that dtype, or is for a source without CUTLASS.
        PatchConflict: the patch does not apply.
        RequirementMissing: the patch is in no series, and this system offers no sandbox.
        PatchConflict: its code fails in the sandbox.
    """
    patch, in_series = find_patch(name)
    target = _target_for(patch, options, target)
    title = patch.name if patch.project else patch.slug
    if target.engine or not has_cutlass(target):
        raise NotFound(
            f"no probe of {title} can be compiled: the source of {target.recipe.name} contains no CUTLASS",
            f"leave out --write and the options of probes to list what it changes; its evidence: {_evidence(patch)}",
        )
    target, arch, dtype = target.flashinfer, request.arch, request.dtype
    recipe = target.recipe
    archs = ([arch] if arch else list(recipe.archs)) if request.code else []
    candidates = list(request.probes or patch.probes)
    if not candidates:
        raise NotFound(f"{title} names no probe", "pass one: --probe 'collective grouped nvfp4 128x128x64'")
    selected = [probe for probe in candidates if dtype in (None, probe.dtype)]
    if not selected:
        dtypes = ", ".join(sorted({probe.dtype for probe in candidates} - {""})) or "no dtype in particular"
        raise NotFound(f"{title} has no probe for {dtype}", f"its probes are for {dtypes}")
    confined = None if in_series or request.trusted else sandbox.find()
    trees = _trees(patch, in_series, target)
    tools = compilers(target, [arch] if arch else [])
    with options.workspace.scratch() as scratch:
        without = Side(target, trees.below, tools, scratch)
        boundary = confined.containing(tools) if confined else None
        patched = Side(target, trees.above, tools, scratch, boundary)
        with _failures_of(trees.patch, boundary):
            expanded = [_expand(probe, (without, patched)) for probe in selected]
        concrete = list(dict.fromkeys(probe for group in expanded for probe in group))
        below = without.inspect(concrete, archs)
        with _failures_of(trees.patch, boundary):
            above = patched.inspect(concrete, archs)
    return PatchProof(
        patch=trees.patch.name,
        hunks_sha256=patch.hunks_sha256,
        recipe=recipe.name,
        tree_below=trees.below,
        tree_above=trees.above,
        host_compiler=tools.host_version,
        nvcc=tools.nvcc_version,
        results=tuple(proofs.compare(probe, below[probe], above[probe]) for probe in concrete),
    )


def _evidence(patch: patches.Patch) -> str:
    return patch.trailer("Evidence") or "none is named"


@contextmanager
def _failures_of(patch: patches.Patch, confined: sandbox.Sandbox | None) -> Iterator[None]:
    """Report what fails in a sandbox as an error of the patch."""
    try:
        yield
    except (CommandFailed, CompileFailed, CheckFailed) as error:
        if confined is None:
            raise
        # The first line of a failed command names the program that made the sandbox.
        reason = error.message.partition("\n")[2] or error.message
        raise PatchConflict(
            f"the code of {patch.name} fails in the sandbox:\n{reason}",
            "the sandbox has no network, home directory or variables of the user, and only /tmp can be written; "
            "if you trust the patch, run its code with your rights: --trust-patch",
        ) from error


def require_storable(name: str) -> None:
    """Require that a proof of a patch may be written where its patch is.

    Raises:
        SystemRefused: that is an installation, or the patch is built in and the working directory is a user's repository.
    """
    patch, in_series = find_patch(name)
    if in_series:
        require_own(writable_data_root() / PATCHES, patch)


def store(name: str, proof: PatchProof) -> tuple[PatchProof, Path]:
    """Write a proof beside those on other recipes, or beside a patch file of no series; stored machine code is retained.

    Raises:
        BadInput: it shows no effect, or lacks what a probe requests to compare.
    """
    _, in_series = find_patch(name)
    path = proofs.path_of(top_root() / PATCHES, proof.patch) if in_series else Path(name).with_suffix(".json")
    stored = proofs.read(path)
    complete = proofs.with_stored_code(proof, proofs.on(stored, proof.recipe))
    if open_ := [*gaps(json.loads(proofs.text(complete)))]:
        listed = "\n".join(f"  it {gap}" for gap in open_)
        raise BadInput(f"no proof of {proof.patch} is written:\n{listed}", "compile the probes with --code, or change them")
    others = [other for other in stored if other.recipe != proof.recipe]
    write_atomic(path, proofs.file_text([*others, complete]).encode())
    return complete, path


def _expand(probe: Probe, sides: Iterable[Side]) -> list[Probe]:
    """The probe itself, or for ``generated`` a probe for each shape that the engine generates on either tree."""
    if probe.kind == "flags" or probe.m:
        return [probe]
    shapes = {
        (call.tile.m, call.tile.n, call.tile.k)
        for side in sides
        for call in side.instantiations
        if call.generated and (call.tile.family, call.tile.dtype) == (probe.family, probe.dtype)
    }
    return [
        replace(probe, m=m, n=n, k=k, text=probe.text.replace(" generated", f" {m}x{n}x{k}", 1)) for m, n, k in sorted(shapes)
    ]
