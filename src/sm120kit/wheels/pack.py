"""Pack a patched FlashInfer wheel with compiled modules in the directory that FlashInfer searches first.

FlashInfer's own backend decides which files of a tree are in its wheel, and where.
"""

import hashlib
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from sm120kit.core import archives, process
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import CheckFailed
from sm120kit.core.record_files import record_json
from sm120kit.core.temporary import publish_directory
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.wheels._repack import repack
from sm120kit.wheels.build_records import BuildPlan

_ENVIRONMENT = {
    "SOURCE_DATE_EPOCH": str(archives.SOURCE_DATE_EPOCH),
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Otherwise build_backend.py of FlashInfer 0.7.2 installs packages into this environment, and compiles NIXL if meson exists.
    "FLASHINFER_BUILD_NO_PIP": "1",
    "BUILD_NVEP": "0",
}
_META = "flashinfer/_build_meta.py"


def local_version(version: str, plan: str) -> str:
    """``0.6.6+sm120kit.<first 12 digits of a plan's digest>``; a requirement ``==0.6.6`` accepts it (PEP 440).

    Decimal digits with a leading zero follow a ``p``: installers compare a segment of decimal digits as a number, and would
    look for a ``.dist-info`` without the zero.
    """
    digits = plan[:12]
    return f"{version}+sm120kit.{'p' if digits.isdecimal() and digits.startswith('0') else ''}{digits}"


def member_of(module: str) -> str:
    """Where FlashInfer looks for a module that was compiled ahead, as a member of its wheel."""
    return f"flashinfer/data/aot/{module}/{module}.so"


def pack_wheel(
    plan: BuildPlan, tree: PatchedTree, libraries: Mapping[str, Path], out: Path, work: Path, record: Mapping[str, object]
) -> Path:
    """Write the wheel of ``tree``, whose files are in ``work/tree``, with our version, ``libraries`` and ``record``.

    ``libraries`` are by member, see :func:`member_of`. ``record`` is written to ``sm120kit.json`` with the key ``changed``: the
    members that patches, overrides, the version and modules change or add. Returns the wheel in ``out``.

    Raises:
        CheckFailed: the version of the package cannot be set.
        CommandFailed: the backend failed.
    """
    plain, version = _plain_wheel(tree, work), local_version(plan.version, plan.digest)
    with archives.open_wheel(plain) as wheel:
        meta = _with_own_version(archives.read_member(wheel, _META).decode(), version, plan.recipe)
        changed = sorted({_META, *libraries, *_patched_members(tree, work / "tree", wheel)})
    own = work / "build_meta.py"
    write_atomic(own, meta)
    added = {"sm120kit.json": record_json({**record, "changed": changed}).encode()}
    tag = f"py3-none-linux_{plan.toolchain.machine}" if libraries else ""  # otherwise it stays a wheel for any machine
    return repack(plain, version, {**libraries, _META: own}, added, out, tag=tag)


def _patched_members(tree: PatchedTree, files: Path, wheel: zipfile.ZipFile) -> set[str]:
    """The members of the wheel of ``tree`` with the name and content of a file in which it differs from the release."""
    paths = Repository(tree.checkout.repository).changed(tree.checkout.commit, tree.commit)
    contents = {(path.name, file_sha256(path)) for name in paths if (path := files / name).is_file()}
    names = {name for name, _ in contents}
    alike = (member for member in wheel.namelist() if PurePosixPath(member).name in names)
    return {
        member
        for member in alike
        if (PurePosixPath(member).name, hashlib.sha256(archives.read_member(wheel, member)).hexdigest()) in contents
    }


def _plain_wheel(tree: PatchedTree, work: Path) -> Path:
    """The wheel that FlashInfer's backend builds from a copy of ``work/tree``; it stays for other modules of the same tree."""
    tools = [sys.version, _ENVIRONMENT, *(metadata.version(name) for name in ("setuptools", "wheel"))]
    kept = work / "plain" / digest_of([tree.tree, tools])[:12]
    for wheel in kept.glob("*.whl"):
        return wheel
    shutil.rmtree(kept.parent, ignore_errors=True)
    generated = str(work / "tree" / "flashinfer")
    with publish_directory(kept) as staging, tempfile.TemporaryDirectory(dir=work, prefix="pack-") as scratch:
        source = Path(scratch, "source")
        shutil.copytree(
            work / "tree",
            source,
            symlinks=True,
            ignore=lambda folder, names: {"data", "__pycache__"} & {*names} if folder == generated else (),
        )
        process.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-x", "--outdir", staging, source],
            env=_ENVIRONMENT,
            logfile=work / "pack.log",
            tied=True,
        )
    (wheel,) = kept.glob("*.whl")
    return wheel


def _with_own_version(text: str, version: str, recipe: str) -> bytes:
    """The text of a module with its single line that sets the version replaced."""
    edited, count = re.subn(r"^__version__ = .*$", f'__version__ = "{version}"', text, flags=re.MULTILINE)
    if count != 1:
        raise CheckFailed(
            f"{_META} of the wheel of {recipe} sets __version__ in {count} lines, not 1",
            "this release needs another way to set its version",
        )
    return edited.encode()
