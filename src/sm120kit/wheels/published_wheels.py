"""Finished builds: read one back, and record what went into a wheel."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sm120kit.core import reporting
from sm120kit.core.digests import file_sha256
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadRecord, Mismatch
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import owned_directory, publish_directory
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.kernels.cubin.cubin_records import Cubin
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.run_options import Options, RemoteCache
from sm120kit.wheels.build_records import Artifact, Artifacts, BuildPlan, RepackedWheel, WheelBuild

_ORIGIN = "cache.json"

Built = TypeVar("Built", WheelBuild, RepackedWheel)


@dataclass(frozen=True)
class CacheOrigin:
    """The cache that a build is from, and the digest of the key or identity that signed it; empty if that was not verified."""

    repository: str
    publisher: str


def published(plan: BuildPlan, directory: Path, remote: RemoteCache | None = None) -> Artifacts | None:
    """The artifacts that an earlier build of a plan published in ``directory``; None if there are none. The wheel is hashed.

    Raises:
        Mismatch: the wheel is missing or is not the one that was published.
    """
    if not (directory / "artifacts.json").is_file():
        return None
    artifacts, origin = _artifacts(plan, directory), _origin(directory)
    if origin and remote and remote.publisher not in ("", origin.publisher):
        return None
    if origin and not origin.publisher:
        reporting.warn(
            f"{directory} is from the cache {origin.repository}, and its signature was not verified: to build it again, "
            f"remove it (rm -r {directory}), or pass --cache and --trust"
        )
    mark_used(directory)
    return artifacts


def unverified_cache(sha256: str, workspace: Workspace) -> str:
    """The cache that a wheel is from, if its signature was not verified; else empty.

    The wheel is found by its hash: what it states of itself is from the cache, too.
    """
    for path in sorted((workspace.root / "build").glob(f"*/*/{_ORIGIN}")):
        try:
            same = read_record(Artifacts, path.with_name("artifacts.json")).wheel.sha256 == sha256
        except (OSError, BadRecord):  # a damaged build, which is not used
            continue
        if same and not (origin := read_record(CacheOrigin, path)).publisher:
            return origin.repository
    return ""


def build_once(planned: Built, name: str, options: Options, make: Callable[[Path], Artifacts]) -> Built:
    """A planned build with its artifacts: those of an earlier build, of the remote cache, or what ``make`` publishes.

    ``make`` gets the directory to publish in; ``name`` is that of its work directory, which one process uses at a time. What
    was made here is stored in the remote cache.

    Raises:
        Mismatch: see :func:`published`; and what ``make`` raises.
    """
    plan = planned.plan
    assert plan is not None
    directory, remote = options.workspace.build(plan.engine, plan.digest), options.remote
    ran, artifacts = False, published(plan, directory, remote)
    if artifacts is None:
        with options.workspace.exclusive(name):
            artifacts = shared(plan, directory, remote)  # or of a process that this one waited for
            if ran := artifacts is None:
                artifacts = make(directory)
    push(plan, directory, remote)
    return replace(planned, artifacts=artifacts, directory=directory, ran=ran)


def publish(
    plan: BuildPlan,
    directory: Path,
    pack: Callable[[Path], Path],
    libraries: Mapping[str, Path],
    cubins: Mapping[str, Sequence[Cubin]],
    logs: Sequence[Path] = (),
) -> Artifacts:
    """Publish a wheel with its records in ``directory``, completely or not at all.

    ``pack`` writes the wheel into a directory and returns it; ``libraries`` are those in it, by member, ``cubins`` their device
    code by module. ``logs`` that exist are kept.
    """
    with publish_directory(directory) as staging:
        write_record(staging / "plan.json", plan)
        wheel = pack(staging)
        (staging / "logs").mkdir()
        for log in filter(Path.is_file, logs):
            shutil.copyfile(log, staging / "logs" / log.name)
        artifacts = Artifacts(
            plan=plan.digest,
            wheel=artifact_of(wheel, staging),
            modules=tuple(replace(artifact_of(file, file.parent), path=member) for member, file in sorted(libraries.items())),
            kernels=sum(len(cubin.kernels) for module in cubins.values() for cubin in module),
            left_out=plan.left_out,
        )
        write_record(staging / "kernels.json", {name: [*files] for name, files in sorted(cubins.items())})
        write_record(staging / "artifacts.json", artifacts)
    return artifacts


def _origin(directory: Path) -> CacheOrigin | None:
    """Where a build is from that was not made here."""
    path = directory / _ORIGIN
    return read_record(CacheOrigin, path) if path.is_file() else None


def shared(plan: BuildPlan, directory: Path, remote: RemoteCache | None) -> Artifacts | None:
    """As :func:`published`, and if there are none, those in a remote cache, of which a copy is kept. Requires a lock.

    A copy of an entry that the publisher of ``remote`` did not sign is removed.

    Raises:
        Mismatch: see :func:`published`.
        ResourceUnavailable, SystemRefused: the copy cannot be stored.
    """
    artifacts = published(plan, directory, remote)
    if artifacts or remote is None:
        return artifacts
    with disk_errors(directory):
        if (directory / _ORIGIN).is_file():
            reporting.info(f"removing {directory}: it is from a cache, and not signed as --trust requires")
            shutil.rmtree(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with owned_directory(directory.parent, f".{directory.name}.") as staging:
            if not remote.fetch(remote_key(plan), staging):
                return None
            try:
                artifacts = _artifacts(plan, staging)
            except (Mismatch, BadRecord, OSError) as error:
                reporting.warn(f"the entry of the cache is not a build of {plan.recipe}, and not used: {error}")
                return None
            write_record(staging / _ORIGIN, CacheOrigin(remote.repository, remote.publisher))
            staging.chmod(0o755)
            staging.rename(directory)
    return artifacts


def push(plan: BuildPlan, directory: Path, remote: RemoteCache | None) -> bool:
    """Store a finished build in a remote cache, if this command may; false for a copy whose signature was not verified."""
    origin = _origin(directory)
    if remote is None or (origin and not origin.publisher):
        return False
    remote.push(remote_key(plan), directory)
    return True


def remote_key(plan: BuildPlan) -> str:
    """The key of a plan's result in a remote cache."""
    return f"{plan.engine}-{plan.digest}"


def _artifacts(plan: BuildPlan, directory: Path) -> Artifacts:
    """The record of a build in a directory with its files.

    Raises:
        Mismatch: the wheel is missing, or the record is of another plan or another wheel.
    """
    artifacts = read_record(Artifacts, directory / "artifacts.json")
    wheel = directory / artifacts.wheel.path
    if artifacts.plan != plan.digest or wheel.parent != directory:
        problem = f"{directory / 'artifacts.json'} is not the record of {plan.digest}"
    elif not wheel.is_file():
        problem = f"{wheel} does not exist"
    elif (sha256 := file_sha256(wheel)) != artifacts.wheel.sha256:
        problem = f"{wheel} has sha256 {sha256}; when it was built it had {artifacts.wheel.sha256}"
    else:
        return artifacts
    raise Mismatch(f"{problem}: it was damaged or replaced", f"find the cause; to build it again, remove it: rm -r {directory}")


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
        **({"local": tree.local} if tree.local else {}),
        "modules": [module.name for module in plan.modules],
        "left_out": plan.left_out,
        "toolchain": {"nvcc": plan.toolchain.nvcc_version, "host": plan.toolchain.host_version},
    }


def artifact_of(path: Path, root: Path) -> Artifact:
    """The record of a file below ``root``."""
    return Artifact(str(path.relative_to(root)), file_sha256(path), path.stat().st_size)
