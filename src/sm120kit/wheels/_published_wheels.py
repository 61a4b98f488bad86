"""Finished builds: read one back, and record what went into a wheel."""

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from sm120kit.core import reporting
from sm120kit.core.digests import file_sha256
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import BadRecord, Mismatch, ResourceUnavailable, SystemRefused
from sm120kit.core.outside import open_found
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import mark_used
from sm120kit.kernels.cubin.cubin_records import Cubin
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.run_options import Options
from sm120kit.wheels.build_records import Artifact, Artifacts, BuildPlan, RepackedWheel, WheelBuild

_LOCAL, _LOCAL_BUILDS = "local", 3
"""The file that marks a build with local patches, and how many of a package are kept."""

Built = TypeVar("Built", WheelBuild, RepackedWheel)


def published(plan: BuildPlan, directory: Path) -> Artifacts | None:
    """The artifacts that an earlier build of a plan published in ``directory``; None if there are none. The wheel is hashed.

    Raises:
        Mismatch: the wheel or the record is missing, or the wheel is not the one that was published.
    """
    if not directory.is_dir():
        return None
    if not (directory / "artifacts.json").is_file():
        raise Mismatch(f"{directory} has no artifacts.json: it was damaged", f"to build it again, remove it: rm -r {directory}")
    artifacts = _artifacts(plan, directory)
    mark_used(directory)
    return artifacts


def build_once(planned: Built, name: str, options: Options, make: Callable[[Path], Artifacts]) -> Built:
    """A planned build with its artifacts: those of an earlier build, of the shared cache, or what ``make`` publishes.

    ``make`` gets the directory to publish in; ``name`` is that of its work directory, which one process uses at a time.

    Raises:
        Mismatch: see :func:`published`; and what ``make`` raises.
    """
    plan = planned.plan
    assert plan is not None
    directory = options.workspace.build(plan.engine, plan.digest)
    entry = options.cache / f"{plan.engine}-{plan.digest}" if options.cache else None
    ran, artifacts = False, published(plan, directory)
    if artifacts is None:
        with options.workspace.exclusive(name):
            if entry:
                fetch(plan, entry, directory)
            artifacts = published(plan, directory)  # or of a process that this one waited for
            if ran := artifacts is None:
                artifacts = make(directory)
    if entry and options.cache_push:
        push(directory, entry)
    return replace(planned, artifacts=artifacts, directory=directory, ran=ran)


_held: list[int] = []
"""The locks of :func:`hold`."""


def hold(directory: Path) -> None:
    """Keep a build with local patches, if it is there, until this process ends: :func:`keep_newest` of others leaves it."""
    with suppress(OSError):  # it is not there, or its file system has no locks
        _held.append(os.open(directory / _LOCAL, os.O_RDWR | os.O_CREAT, 0o644))
        fcntl.flock(_held[-1], fcntl.LOCK_SH)


def keep_newest(directory: Path) -> None:
    """Mark a build with local patches as the newest of its package, and remove all but the newest ones: each is 0.3 GB.

    Those that a process holds stay until a later build. Builds that compile (FlashInfer, ``--from-source``) are not marked:
    minutes of packing are repeated for the space, hours are not.
    """
    (directory / _LOCAL).touch()
    marked = sorted(directory.parent.glob(f"*/{_LOCAL}"), key=lambda path: -path.stat().st_mtime_ns)
    for outdated in (path.parent for path in marked[_LOCAL_BUILDS:]):
        hidden = outdated.with_name(f".{outdated.name}.{os.getpid()}")  # a build never exists in part
        with suppress(OSError), open_found(outdated / _LOCAL) as lock:  # another command removes it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            outdated.rename(hidden)
            shutil.rmtree(hidden)


def fetch(plan: BuildPlan, entry: Path, directory: Path) -> None:
    """Copy a build of another machine from its entry of a shared cache, if it is there and complete. Requires a lock."""
    if not entry.is_dir() or directory.is_dir():
        return
    try:
        artifacts = _artifacts(plan, entry)
        require_disk(directory, artifacts.wheel.bytes, f"the build in {entry}")
        with publish_directory(directory) as staging:
            shutil.copytree(entry, staging, dirs_exist_ok=True)
    except (Mismatch, BadRecord, OSError, shutil.Error) as error:
        reporting.warn(f"the cache is not used: {error}; to have it stored again: rm -r {entry}")
    else:
        reporting.info(f"found {artifacts.wheel.path} in the cache {entry.parent}")


def push(directory: Path, entry: Path) -> None:
    """Store a finished build as the entry of a shared cache, unless there is one."""
    if entry.is_dir():
        return
    try:
        with publish_directory(entry) as staging:
            shutil.copytree(directory, staging, dirs_exist_ok=True)
    except (ResourceUnavailable, SystemRefused, OSError, shutil.Error) as error:
        if not entry.is_dir():  # stored by another machine meanwhile
            reporting.warn(f"nothing is stored in the cache: {error}")
    else:
        reporting.info(f"stored in the cache {entry.parent}")


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


def _artifacts(plan: BuildPlan, directory: Path) -> Artifacts:
    """The record of a build in a directory with its files."""
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
