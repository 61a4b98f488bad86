"""Pack a wheel again with some of its members replaced, under a local version."""

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sm120kit.core import archives
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels._published_wheels import wheel_record
from sm120kit.wheels.build_records import BuildPlan


def repacked_record(
    plan: BuildPlan, tree: PatchedTree, official: tuple[LockedWheel, Path], replaced: Mapping[str, Path | None]
) -> dict[str, object]:
    """Contents of ``sm120kit.json`` in a repacked wheel: also the upstream wheel, and both hashes of each replaced member.

    ``official`` is that wheel and its file, ``replaced`` the new files by member. A hash is empty where there is no file.
    """
    locked, path = official
    with archives.open_wheel(path) as wheel:
        members = {*wheel.namelist()}
        hashes = {
            member: {
                "official": hashlib.sha256(archives.read_member(wheel, member)).hexdigest() if member in members else "",
                "here": file_sha256(file) if file else "",
            }
            for member, file in replaced.items()
        }
    return {
        **wheel_record(plan, tree),
        "official": {"wheel": locked.filename, "sha256": locked.sha256},
        "replaced": hashes,
    }


def repack(
    official: Path, version: str, replaced: Mapping[str, Path | None], added: Mapping[str, bytes], out: Path, *, tag: str = ""
) -> Path:
    """Pack the wheel ``official`` again into directory ``out``, as ``version``, with its tags or with ``tag`` for one machine.

    ``replaced`` are files by member: they replace that of the wheel or are new, and None removes it. ``added`` is the content
    of new files in its ``.dist-info``. All other members keep their bytes, except METADATA, which has the version, and RECORD,
    which lists the hashes of all. The file name has the tags of the wheel's WHEEL file.

    Raises:
        BadInput: it is not a wheel of one distribution.
    """
    with archives.open_wheel(official) as wheel:
        info = _dist_info(official, wheel)
        name, _, official_version = info.removesuffix(".dist-info").partition("-")
        renamed = f"{name}-{version}.dist-info"
        header = archives.read_member(wheel, f"{info}/WHEEL").decode()
        tags = tag or _tags(header)
        if not 0 < len(tags) <= 150:
            raise BadInput(f"WHEEL of {official.name} states the tags {tags[:150]!r}", "is it a wheel?")
        target, recorded = out / f"{name}-{version}-{tags}.whl", _recorded(wheel, f"{info}/RECORD")
        rows: list[tuple[str, str, str]] = []
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
            for member in wheel.infolist():
                if member.is_dir() or member.filename == f"{info}/RECORD":
                    continue
                name_in_target = re.sub(rf"^{re.escape(info)}/", f"{renamed}/", member.filename)
                if member.filename in replaced:
                    if (file := replaced[member.filename]) is None:
                        continue
                    content: Iterator[bytes] = archives.file_chunks(file)
                elif member.filename == f"{info}/METADATA":
                    content = iter(
                        [_with_version(archives.read_member(wheel, member), official_version, version, official.name)]
                    )
                elif tag and member.filename == f"{info}/WHEEL":
                    content = iter([_for_one_machine(header, tag)])
                elif (row := recorded.get(member.filename)) and row[2] == str(member.file_size):
                    archives.copy_member(wheel, member, packed, _new_member(name_in_target, member.external_attr))
                    rows.append((name_in_target, row[1], row[2]))
                    continue
                else:
                    content = archives.read_chunks(wheel, member)
                rows.append(_add(packed, name_in_target, content, member.external_attr, member.compress_type))
            for new in sorted({*replaced} - {*wheel.namelist()}):
                if (file := replaced[new]) is not None:
                    mode = 0o100755 if new.endswith(".so") else 0o100644
                    rows.append(_add(packed, new, archives.file_chunks(file), mode << 16, zipfile.ZIP_DEFLATED))
            for name_of_file, data in sorted(added.items()):
                rows.append(_add(packed, f"{renamed}/{name_of_file}", iter([data]), 0o100644 << 16, zipfile.ZIP_DEFLATED))
            table = io.StringIO()
            csv.writer(table, lineterminator="\n").writerows([*rows, (f"{renamed}/RECORD", "", "")])
            _add(packed, f"{renamed}/RECORD", iter([table.getvalue().encode()]), 0o100644 << 16, zipfile.ZIP_DEFLATED)
    return target


def _dist_info(path: Path, wheel: zipfile.ZipFile) -> str:
    directories = {name.split("/")[0] for name in wheel.namelist() if re.match(r"[^/]+\.dist-info/", name)}
    if len(directories) != 1:
        raise BadInput(f"{path.name} has {len(directories)} .dist-info directories, not 1", "is it a wheel?")
    return directories.pop()


def _recorded(wheel: zipfile.ZipFile, record: str) -> dict[str, tuple[str, str, str]]:
    """The rows of RECORD with a sha256, by member; that of the wheel covers RECORD."""
    if record not in wheel.namelist():
        return {}
    rows = csv.reader(archives.read_member(wheel, record).decode().splitlines())
    return {row[0]: (row[0], row[1], row[2]) for row in rows if len(row) > 2 and row[1].startswith("sha256=")}


def _tags(header: str) -> str:
    """The compressed tag set of a WHEEL file: ``cp38-abi3-linux_x86_64``."""
    tags = re.findall(r"^Tag:\s*([\w.]+)-([\w.]+)-([\w.]+)\s*$", header, re.MULTILINE)
    return "-".join(".".join(dict.fromkeys(column)) for column in zip(*tags, strict=True))


def _for_one_machine(header: str, tag: str) -> bytes:
    """A WHEEL file that states libraries and one tag."""
    kept = re.sub(r"^Tag:.*\n?", "", header, flags=re.MULTILINE).strip("\n")
    return f"{kept}\nTag: {tag}\n".replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()


def _with_version(metadata: bytes, before: str, after: str, wheel: str) -> bytes:
    text, count = re.subn(
        rf"^Version: {re.escape(before)}$".encode(), f"Version: {after}".encode(), metadata, flags=re.MULTILINE
    )
    if count != 1:
        raise BadInput(f"METADATA of {wheel} has {count} lines 'Version: {before}', not 1", "is it a wheel?")
    return text


def _new_member(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # dated 1980: wheels must not depend on the time of packing
    info.external_attr = mode
    return info


def _add(archive: zipfile.ZipFile, name: str, content: Iterator[bytes], mode: int, compression: int) -> tuple[str, str, str]:
    """Write a member and return its row of RECORD."""
    info = _new_member(name, mode)
    info.compress_type = compression
    digest, size = hashlib.sha256(), 0
    with archive.open(info, "w") as file:
        for chunk in content:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return name, "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode(), str(size)
