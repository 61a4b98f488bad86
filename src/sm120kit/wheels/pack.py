"""Pack a patched FlashInfer wheel with compiled modules in the directory that FlashInfer searches first.

FlashInfer's own backend decides which files of a tree are in its wheel, and where. It copies every file several times, so its
wheel is kept: that of a tree with other contents of C++ and CUDA files has these contents in the same places.
"""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import io
import re
import shutil
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from sm120kit.core import archives, process
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import BadInput, CheckFailed, CommandFailed
from sm120kit.core.record_files import record_json
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
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
_NOT_RUN_BY_BACKEND = {".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"}
"""Suffixes of files that the backend only copies."""


def local_version(version: str, plan: str) -> str:
    """``0.6.6+sm120kit.<first 12 digits of a plan's digest>``; a requirement ``==0.6.6`` accepts it (PEP 440).

    Decimal digits with a leading zero follow a ``p``: installers compare a segment of decimal digits as a number, and would
    look for a ``.dist-info`` without the zero.
    """
    digits = plan[:12]
    return f"{version}+sm120kit.{'p' if digits.isdecimal() and digits.startswith('0') else ''}{digits}"


def pack_wheel(
    plan: BuildPlan, tree: PatchedTree, libraries: Mapping[str, Path], out: Path, work: Path, record: Mapping[str, object]
) -> Path:
    """Write the wheel of ``tree``, whose files are in ``work/tree``, with our version, ``libraries`` and ``record``.

    ``libraries`` are by module name; ``record`` is written to ``sm120kit.json``, with the key ``changed``: the members that
    patches, overrides, the version and modules change or add. Returns the wheel in ``out``.

    Raises:
        CheckFailed: the version of the package cannot be set.
        CommandFailed: the backend failed.
    """
    plain, changed = _kept_wheel(tree, work / "plain") or (_run_backend(tree, work), {})
    version = local_version(plan.version, plan.digest)
    with archives.open_wheel(plain) as source:
        (old,) = {name.partition("/")[0] for name in source.namelist() if re.fullmatch(r"[^/]+\.dist-info/WHEEL", name)}
        distribution = old.partition("-")[0]
        edited = dict(changed)
        edited[_META] = _substitute(source, _META, r"^__version__ = .*$", f'__version__ = "{version}"', plan.recipe)
        edited[f"{old}/METADATA"] = _substitute(source, f"{old}/METADATA", r"^Version: .*$", f"Version: {version}", plan.recipe)
        machine = "any"
        if libraries:  # otherwise it stays a wheel for any machine
            machine = f"linux_{plan.toolchain.machine}"
            header = _substitute(source, f"{old}/WHEEL", r"^Tag: .*$", f"Tag: py3-none-{machine}", plan.recipe)
            edited[f"{old}/WHEEL"] = header.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
        packed = out / f"{distribution}-{version}-py3-none-{machine}.whl"
        members = sorted({_META, *map(_module, libraries), *_patched_members(tree, work / "tree", source, changed)})
        added: dict[str, Path | bytes] = {**libraries, "sm120kit.json": record_json({**record, "changed": members}).encode()}
        _write_wheel(source, packed, edited, added, (old, f"{distribution}-{version}.dist-info"))
    return packed


def _patched_members(tree: PatchedTree, files: Path, wheel: zipfile.ZipFile, changed: Mapping[str, bytes]) -> set[str]:
    """The members with the name and content of a file in which ``tree`` differs from the release.

    ``wheel`` is that of the tree, except for the members in ``changed``.
    """
    paths = Repository(tree.checkout.repository).changed(tree.checkout.commit, tree.commit)
    contents = {(path.name, _record_hash(path.read_bytes())) for name in paths if (path := files / name).is_file()}
    rows = {member: record_hash for member, record_hash, _ in _read_record(wheel)}
    rows |= {member: _record_hash(content) for member, content in changed.items()}
    return {member for member, record_hash in rows.items() if (PurePosixPath(member).name, record_hash) in contents}


def _module(name: str) -> str:
    """Where FlashInfer looks for a module compiled ahead of time, as a member of its wheel."""
    return f"flashinfer/data/aot/{name}/{name}.so"


def _run_backend(tree: PatchedTree, work: Path) -> Path:
    """The wheel that FlashInfer's backend builds from a copy of ``work/tree``, kept for :func:`_kept_wheel`."""
    scratch, kept = work / "pack", work / "plain"
    for directory in (scratch, kept):
        shutil.rmtree(directory, ignore_errors=True)
    source, generated = scratch / "source", str(work / "tree" / "flashinfer")
    shutil.copytree(
        work / "tree",
        source,
        symlinks=True,
        ignore=lambda folder, names: {"data", "__pycache__"} & {*names} if folder == generated else (),
    )
    process.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", scratch, source],
        env=_ENVIRONMENT,
        logfile=scratch / "pack.log",
        tied=True,
    )
    (built,) = scratch.glob("*.whl")
    kept.mkdir()
    wheel = built.replace(kept / f"{tree.tree}-{_backend_tools()}-{file_sha256(built)}.whl")
    shutil.rmtree(scratch)
    return wheel


def _backend_tools() -> str:
    """Digest of what determines the backend's wheel of a tree."""
    return digest_of([sys.version, _ENVIRONMENT, *(metadata.version(name) for name in ("setuptools", "wheel"))])[:12]


def _kept_wheel(tree: PatchedTree, kept: Path) -> tuple[Path, dict[str, bytes]] | None:
    """The wheel that the backend built of an earlier tree, and the members that differ in that of ``tree``.

    None without one, or if only the backend can determine which members differ.
    """
    repository = Repository(tree.checkout.repository)
    for wheel in kept.glob(f"*-{_backend_tools()}-*.whl"):
        before, _, sha256 = wheel.stem.split("-")
        try:
            if file_sha256(wheel) == sha256:
                changed = _changed_members(repository, before, tree.tree, wheel)
                return None if changed is None else (wheel, changed)
        except (OSError, CommandFailed, BadInput):  # the repository was fetched again, or the file removed meanwhile
            return None
    return None


def _changed_members(repository: Repository, before: str, after: str, wheel: Path) -> dict[str, bytes] | None:
    """The members of the wheel of a tree whose contents differ in that of another tree; None if that is not certain.

    It is if only contents of files differ that the backend does not run, and each is the source of all members with its name
    and content.
    """
    fields = repository.git("diff-tree", "-r", "-z", "--no-renames", before, after).stdout.split("\0")[:-1]
    differences = dict(zip(fields[1::2], fields[::2], strict=True))
    if any(
        status != "M" or mode != f":{new_mode}" or PurePosixPath(path).suffix not in _NOT_RUN_BY_BACKEND
        for path, text in differences.items()
        for mode, new_mode, _, _, status in [text.split()]
    ):
        return None
    listed = repository.git("ls-tree", "-r", "-z", before).stdout.split("\0")[:-1]
    sources: dict[tuple[str, str], int] = defaultdict(int)
    for line in listed:
        header, _, path = line.partition("\t")
        sources[PurePosixPath(path).name, header.split()[2]] += 1
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    with archives.open_wheel(wheel) as archive:
        for member, record_hash, _ in _read_record(archive):
            members[PurePosixPath(member).name, record_hash].append(member)
    changed: dict[str, bytes] = {}
    for path, text in differences.items():
        name = PurePosixPath(path).name
        of_path = members[name, _record_hash(repository.read(before, path))]
        if not of_path or sources[name, text.split()[2]] != 1:
            return None
        changed |= dict.fromkeys(of_path, repository.read(after, path))
    return changed


def _substitute(wheel: zipfile.ZipFile, member: str, pattern: str, line: str, recipe: str) -> bytes:
    """A text of a wheel with its single line that matches ``pattern`` replaced."""
    text, count = re.subn(pattern, line, archives.read_member(wheel, member).decode(), flags=re.MULTILINE)
    if count != 1:
        raise CheckFailed(
            f"{member} of the wheel of {recipe} has {count} lines that match {pattern}, not 1",
            "this release needs another way to set its version",
        )
    return text.encode()


def _write_wheel(
    source: zipfile.ZipFile,
    path: Path,
    edited: Mapping[str, bytes],
    added: Mapping[str, Path | bytes],
    renamed: tuple[str, str],
) -> None:
    """Write a wheel with the members of ``source``, of which those in ``edited`` have other contents.

    ``renamed`` are the names of its ``.dist-info`` in both. ``added`` are libraries by module name, and files of the
    ``.dist-info``. Members that do not change are copied without being compressed again.
    """
    old, new = renamed
    rows = []
    unchanged = {name: (name, record_hash, size) for name, record_hash, size in _read_record(source)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        # The .dist-info last, as the format of wheels recommends.
        for info in sorted(source.infolist(), key=lambda info: info.filename.startswith(f"{old}/")):
            if info.filename == f"{old}/RECORD":
                continue
            target = copy.copy(info)
            target.filename = re.sub(rf"^{re.escape(old)}/", f"{new}/", info.filename)
            content = edited.get(info.filename)
            if content is None:
                _copy_member(source, info, wheel, target)
                rows.append((target.filename, *unchanged[info.filename][1:]))
            else:
                wheel.writestr(target, content)
                rows.append((target.filename, _record_hash(content), str(len(content))))
        for name, addition in added.items():
            library = isinstance(addition, Path)
            content = addition.read_bytes() if isinstance(addition, Path) else addition
            member = _module(name) if library else f"{new}/{name}"
            wheel.writestr(_member(member, 0o755 if library else 0o644), content)
            rows.append((member, _record_hash(content), str(len(content))))
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{new}/RECORD", "", "")])
        wheel.writestr(_member(f"{new}/RECORD", 0o644), record.getvalue())


def _copy_member(source: zipfile.ZipFile, info: zipfile.ZipInfo, wheel: zipfile.ZipFile, target: zipfile.ZipInfo) -> None:
    """Copy a member as it is compressed. ``zipfile`` has no method for it (APPNOTE.TXT 4.3.7: header, name, extra, data)."""
    assert source.fp is not None and wheel.fp is not None
    source.fp.seek(info.header_offset + 26)
    name_size, extra_size = (int.from_bytes(source.fp.read(2), "little") for _ in range(2))
    source.fp.seek(name_size + extra_size, io.SEEK_CUR)
    target.flag_bits &= ~0x08  # sizes and CRC are in the header, not behind the data
    target.header_offset = wheel.fp.tell()
    wheel.fp.write(target.FileHeader())
    wheel.fp.write(source.fp.read(info.compress_size))
    wheel.filelist.append(target)
    wheel.NameToInfo[target.filename] = target
    wheel.start_dir = wheel.fp.tell()


def _member(name: str, mode: int) -> zipfile.ZipInfo:
    """A new member with the mode of a file, and the time of all members."""
    info = zipfile.ZipInfo(name, time.gmtime(archives.SOURCE_DATE_EPOCH)[:6])
    info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, (0o100000 | mode) << 16
    return info


def _read_record(wheel: zipfile.ZipFile) -> list[list[str]]:
    """The rows of a wheel's RECORD: path, hash, size."""
    (record,) = (name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
    return list(csv.reader(archives.read_member(wheel, record).decode().splitlines()))


def _record_hash(content: bytes) -> str:
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()}"
