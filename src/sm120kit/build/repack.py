"""A wheel with some of its files replaced, under a version that says so."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sm120kit.errors import BadArtifact

_CHUNK = 2**20


def repack(official: Path, version: str, replaced: Mapping[str, Path], added: Mapping[str, bytes], out: Path) -> Path:
    """Pack ``official`` again into directory ``out``: as ``version``, with other content for the members ``replaced``.

    ``added`` are new files of its ``.dist-info``. Every other member stays what it is, but for the version in METADATA, and
    RECORD, which lists the hashes of all. The file name has the tags that the wheel states itself.

    Raises:
        BadArtifact: it is not a wheel of one distribution, or has no such member.
    """
    with zipfile.ZipFile(official) as wheel:
        info = _dist_info(official, wheel)
        absent = sorted({*replaced} - {*wheel.namelist()})
        if absent:
            raise BadArtifact(
                f"{official.name} has no {', '.join(absent)}", "the recipe's from_source.targets name what is replaced"
            )
        name, _, official_version = info.removesuffix(".dist-info").partition("-")
        renamed = f"{name}-{version}.dist-info"
        target = out / f"{name}-{version}-{_tags(wheel.read(f'{info}/WHEEL').decode())}.whl"
        rows: list[tuple[str, str, str]] = []
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
            for member in wheel.infolist():
                if member.is_dir() or member.filename == f"{info}/RECORD":
                    continue
                place = re.sub(rf"^{re.escape(info)}/", f"{renamed}/", member.filename)
                if member.filename in replaced:
                    content: Iterator[bytes] = _pieces(replaced[member.filename])
                elif member.filename == f"{info}/METADATA":
                    content = iter([_with_version(wheel.read(member), official_version, version, official.name)])
                else:
                    content = _member_pieces(wheel, member)
                rows.append(_add(made, place, content, member.external_attr, member.compress_type))
            for file, data in sorted(added.items()):
                rows.append(_add(made, f"{renamed}/{file}", iter([data]), 0o100644 << 16, zipfile.ZIP_DEFLATED))
            table = io.StringIO()
            csv.writer(table, lineterminator="\n").writerows([*rows, (f"{renamed}/RECORD", "", "")])
            _add(made, f"{renamed}/RECORD", iter([table.getvalue().encode()]), 0o100644 << 16, zipfile.ZIP_DEFLATED)
    return target


def _dist_info(path: Path, wheel: zipfile.ZipFile) -> str:
    found = {name.split("/")[0] for name in wheel.namelist() if re.match(r"[^/]+\.dist-info/", name)}
    if len(found) != 1:
        raise BadArtifact(f"{path.name} has {len(found)} .dist-info directories, not 1", "is it a wheel?")
    return found.pop()


def _tags(header: str) -> str:
    """The compressed tag set of a WHEEL file: ``cp38-abi3-linux_x86_64``."""
    tags = [line.removeprefix("Tag:").strip().split("-") for line in header.splitlines() if line.startswith("Tag:")]
    return "-".join(".".join(dict.fromkeys(column)) for column in zip(*tags, strict=True))


def _with_version(metadata: bytes, before: str, after: str, wheel: str) -> bytes:
    text, count = re.subn(
        rf"^Version: {re.escape(before)}$".encode(), f"Version: {after}".encode(), metadata, flags=re.MULTILINE
    )
    if count != 1:
        raise BadArtifact(f"METADATA of {wheel} has {count} lines 'Version: {before}', not 1", "is it a wheel?")
    return text


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece


def _member_pieces(wheel: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with wheel.open(member) as file:
        while piece := file.read(_CHUNK):
            yield piece


def _add(made: zipfile.ZipFile, place: str, content: Iterator[bytes], mode: int, compression: int) -> tuple[str, str, str]:
    """Write a member and return its row of RECORD."""
    info = zipfile.ZipInfo(place)  # of 1980: wheels must not depend on when they are packed
    info.external_attr, info.compress_type = mode, compression
    digest, size = hashlib.sha256(), 0
    with made.open(info, "w") as file:
        for piece in content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    return place, "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode(), str(size)
