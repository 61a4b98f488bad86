"""Files of an engine's own package that its series changes, put over those of its official wheel."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sm120kit.build.finishing import artifact, repacked
from sm120kit.build.pack import local_version
from sm120kit.build.repack import repack
from sm120kit.errors import PatchConflict
from sm120kit.gitrepo import Repository
from sm120kit.records import AppliedPatch, Artifacts, BuildPlan, LockedWheel, PatchedTree
from sm120kit.workspace import publish_directory, record_json, write_atomic, write_record


def overlaid(engine: str, tree: PatchedTree) -> dict[str, tuple[AppliedPatch, ...]]:
    """The files of an engine's package that its series changes, and the patches that do: build files are not among them.

    The package has the engine's name, in the source and in the wheel.
    """
    repository = Repository(tree.checkout.repository)
    found: dict[str, tuple[AppliedPatch, ...]] = {}
    for patch in tree.patches:
        for path in repository.changed(f"{patch.commit}^", patch.commit):
            if path.startswith(f"{engine}/"):
                found[path] = (*found.get(path, ()), patch)
    return dict(sorted(found.items()))


def lay(engine: str, tree: PatchedTree, official: Path, out: Path) -> dict[str, Path]:
    """Write the patched files below ``out``: the new content of members of the wheel ``official``.

    Raises:
        PatchConflict: a patch was not made for this wheel: it lacks a file, or its file is not the one below the patches.
    """
    repository = Repository(tree.checkout.repository)
    contents: dict[str, bytes] = {}
    problems = []
    with zipfile.ZipFile(official) as wheel:
        members = {*wheel.namelist()}
        for path, patches in overlaid(engine, tree).items():
            before, after = (_content(repository, commit, path) for commit in (tree.checkout.commit, tree.commit))
            theirs = wheel.read(path) if path in members else None
            if before is not None and after is not None and theirs == before:
                contents[path] = after
                continue
            named = ", ".join(f"{patch.project}/{patch.slug}" for patch in patches)
            have = f"the wheel has {_short(theirs)}, the source {_short(before)}, after the patches {_short(after)}"
            problems.append(f"{path}, changed by {named}: {have}")
    if problems:
        raise PatchConflict(
            "\n  ".join([f"patches of {engine} do not fit {official.name}: only what it has can be replaced", *problems]),
            "a patch may change files that source and wheel have alike; is the source pinned by the recipe that of the wheel?",
        )
    for path, content in contents.items():
        write_atomic(out / path, content)
    return {path: out / path for path in contents}


def _content(repository: Repository, commit: str, path: str) -> bytes | None:
    try:
        return repository.read(commit, path)
    except FileNotFoundError:
        return None


def _short(content: bytes | None) -> str:
    return "no such file" if content is None else f"sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def finish_overlay(
    plan: BuildPlan, tree: PatchedTree, official: tuple[LockedWheel, Path], places: Mapping[str, Path], target: Path
) -> Artifacts:
    """Pack the official wheel again with the files that :func:`lay` wrote, and publish it in ``target``: whole or not at all.

    The wheel names the patches that change its files, and no others of the series.
    """
    used = {patch for patches in overlaid(plan.engine, tree).values() for patch in patches}
    applied = replace(tree, patches=tuple(patch for patch in tree.patches if patch in used))
    record = record_json(repacked(plan, applied, official, places)).encode()
    with publish_directory(target) as beside:
        write_record(beside / "plan.json", plan)
        packed = repack(official[1], local_version(plan), places, {"sm120kit.json": record}, beside)
        artifacts = Artifacts(plan.digest, artifact(packed, beside), modules=(), kernels=0, left_out=plan.left_out)
        write_record(beside / "artifacts.json", artifacts)
    return artifacts
