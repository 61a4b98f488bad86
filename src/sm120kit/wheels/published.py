"""Finished builds: read one back, and record what went into a wheel."""

from __future__ import annotations

from pathlib import Path

from sm120kit.core.errors import ArtifactChanged
from sm120kit.core.state import file_sha256, mark_used, read_record
from sm120kit.patches.records import PatchedTree
from sm120kit.wheels.records import Artifact, Artifacts, BuildPlan


def published(plan: BuildPlan, directory: Path) -> Artifacts | None:
    """The artifacts that an earlier build of a plan published in ``directory``; None if there are none. The wheel is hashed.

    Raises:
        ArtifactChanged: the wheel is missing or is not the one that was published.
    """
    if not (directory / "artifacts.json").is_file():
        return None
    artifacts = read_record(Artifacts, directory / "artifacts.json")
    wheel = directory / artifacts.wheel.path
    if artifacts.plan != plan.digest or wheel.parent != directory:
        problem = f"{directory / 'artifacts.json'} is not the record of {plan.digest}"
    elif not wheel.is_file():
        problem = f"{wheel} does not exist"
    elif (sha256 := file_sha256(wheel)) != artifacts.wheel.sha256:
        problem = f"{wheel} has sha256 {sha256}; when it was built it had {artifacts.wheel.sha256}"
    else:
        mark_used(directory)
        return artifacts
    raise ArtifactChanged(
        f"{problem}: it was damaged or replaced", f"find the cause; to build it again, remove it: rm -r {directory}"
    )


def wheel_record(plan: BuildPlan, tree: PatchedTree) -> dict[str, object]:
    """Contents of ``sm120kit.json`` in a wheel: every input, but no costs and directories, which differ between machines."""
    return {
        "recipe": plan.recipe,
        "archs": plan.archs,
        "kernel_groups": plan.groups,
        "plan": plan.digest,
        "pin": tree.checkout.pin,
        "inside": tree.inside,
        "base": tree.checkout.commit,
        "commit": tree.commit,
        "tree": tree.tree,
        "patches": tree.patches,
        "modules": [module.name for module in plan.modules if module.packed],
        "left_out": plan.left_out,
        "toolchain": {"nvcc": plan.toolchain.nvcc_version, "host": plan.toolchain.host_version},
    }


def artifact_of(path: Path, root: Path) -> Artifact:
    """The record of a file below ``root``."""
    return Artifact(str(path.relative_to(root)), file_sha256(path), path.stat().st_size)
