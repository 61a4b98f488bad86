"""Replace members of an upstream wheel, an engine's or another's, by the files of its package that its patch series changes."""

import functools
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from sm120kit.core import archives, reporting
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import BadInput, PatchConflict
from sm120kit.core.record_files import record_json
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources import wheelhouse
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import LockedWheel
from sm120kit.sources.wheel_commits import BESIDE
from sm120kit.wheels._plan import plan_overlay
from sm120kit.wheels._published_wheels import build_once, hold, keep_newest, publish
from sm120kit.wheels._repack import repack, repacked_record
from sm120kit.wheels.build_records import Artifacts, BuildPlan, RepackedWheel
from sm120kit.wheels.pack import local_version


@functools.lru_cache(8)
def patched_members(package: str, tree: PatchedTree) -> Mapping[str, tuple[AppliedPatch, ...]]:
    """The files of a Python package that differ from the released ones, each with the patches that change it; no build files.

    A pinned commit changes files without a patch. The package has the name of its distribution, in the source and in the wheel.
    """
    repository = Repository(tree.checkout.repository)
    checkout, members = tree.checkout, dict[str, tuple[AppliedPatch, ...]]()
    if checkout.released != checkout.commit:
        changed = repository.changed(checkout.released, checkout.commit)
        members = {path: () for path in changed if path.startswith(f"{package}/")}
    for patch in (*tree.patches, *tree.local):
        for path in repository.changed(f"{patch.commit}^", patch.commit):
            if path.startswith(f"{package}/"):
                members[path] = (*members.get(path, ()), patch)
    return dict(sorted(members.items()))


def require_effect(tree: PatchedTree) -> None:
    """Require that every file that local patches change is in the wheel that is packed from a tree, or beside the package.

    Raises:
        BadInput: a file is not; the message lists all.
    """
    package, changed = tree.checkout.pin.project, Repository(tree.checkout.repository).changed
    files = sorted({path for patch in tree.local for path in changed(f"{patch.commit}^", patch.commit)})
    native = [path for path in files if not path.startswith(f"{package}/") and not BESIDE & {*PurePosixPath(path).parts[:-1]}]
    if native or not any(path.startswith(f"{package}/") for path in files or ("",)):
        raise BadInput(
            "\n  ".join([f"local patches of {package} change files that are not in its Python package:", *(native or files)]),
            "--from-source compiles what a recipe can build from source; split off the Python files",
        )


def write_patched_members(package: str, tree: PatchedTree, official: Path, out: Path) -> dict[str, Path | None]:
    """Write the patched files below ``out`` and return them by member of the wheel ``official``.

    A file that the series removes is removed below ``out``, and None.

    Raises:
        PatchConflict: a patch is not for this wheel: its file differs from the unpatched source.
    """
    repository = Repository(tree.checkout.repository)
    contents: dict[str, bytes | None] = {}
    problems = []
    with archives.open_wheel(official) as wheel:
        members = {*wheel.namelist()}
        for path, patches in patched_members(package, tree).items():
            before, after = (_content(repository, commit, path) for commit in (tree.checkout.released, tree.commit))
            packed = archives.read_member(wheel, path) if path in members else None
            if packed == before:
                contents[path] = after
                continue
            names = ", ".join(f"{patch.project}/{patch.slug}" for patch in patches) or "the pinned commit"
            hashes = f"the wheel has {_short(packed)}, the source {_short(before)}, after the patches {_short(after)}"
            problems.append(f"{path}, changed by {names}: {hashes}")
    if problems:
        raise PatchConflict(
            "\n  ".join([f"patches of {package} do not fit {official.name}: only its own files can be replaced", *problems]),
            "a patch may change files that are equal in source and wheel; does the recipe pin the source of this wheel?",
        )
    for path, content in contents.items():
        if content is None:
            (out / path).unlink(missing_ok=True)
        else:
            write_atomic(out / path, content)
    return {path: None if content is None else out / path for path, content in contents.items()}


def _content(repository: Repository, commit: str, path: str) -> bytes | None:
    try:
        return repository.read(commit, path)
    except FileNotFoundError:
        return None


def _short(content: bytes | None) -> str:
    return "no such file" if content is None else f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def pack_overlay(
    plan: BuildPlan, tree: PatchedTree, official: tuple[LockedWheel, Path], replaced: Mapping[str, Path | None], directory: Path
) -> Artifacts:
    """Pack the upstream wheel again, and publish it in ``directory``, completely or not at all.

    ``replaced`` is from :func:`write_patched_members`. The record in the wheel lists the patches that change its files, and no
    others of the series.
    """
    used = {patch for patches in patched_members(plan.engine, tree).values() for patch in patches}
    applied = replace(
        tree,
        patches=tuple(patch for patch in tree.patches if patch in used),
        local=tuple(patch for patch in tree.local if patch in used),
    )
    added = {"sm120kit.json": record_json(repacked_record(plan, applied, official, replaced)).encode()}
    version = local_version(plan.version, plan.digest)
    return publish(plan, directory, lambda out: repack(official[1], version, replaced, added, out), {}, {})


def locked_wheels(target: EngineTarget) -> dict[str, LockedWheel]:
    """The locked wheels for the first platform of an engine's recipe, by name."""
    return {wheel.name: wheel for wheel in target.closure.wheels}


def build_overlay(target: EngineTarget, tree: PatchedTree | None, *, pack: bool = True) -> RepackedWheel | None:
    """An upstream wheel with the patched files of ``tree`` in its own package; None if the series changes none of them.

    Without ``pack``, it is only planned, and no wheel is fetched.

    Raises:
        PatchConflict: a patch is not for this wheel.
        FetchFailed, NotTrusted, OfflineMiss: the upstream wheel could not be fetched.
    """
    recipe, workspace = target.recipe, target.options.workspace
    project = tree.checkout.pin.project if tree else ""
    members = patched_members(project, tree) if tree else {}
    if tree is None or not members:
        return None
    official = locked_wheels(target)[project]
    planned = RepackedWheel(plan_overlay(recipe, tree, official, members), members)
    if not pack:
        return planned
    plan = planned.plan
    name = f"{recipe.name}-overlay-{plan.digest[:12]}"

    def make(directory: Path) -> Artifacts:
        (wheel,) = wheelhouse((official,), workspace, target.options.origin)
        reporting.info(f"packing {wheel.name} again, with {', '.join(members)} patched")
        work = workspace.work(name)
        files = write_patched_members(project, tree, wheel, work)
        artifacts = pack_overlay(plan, tree, (official, wheel), files, directory)
        shutil.rmtree(work)
        return artifacts

    directory = workspace.build(plan.engine, plan.digest)
    if tree.local:
        hold(directory)
    built = build_once(planned, name, target.options, make)
    if tree.local:
        hold(directory)
        keep_newest(directory)
    return built
