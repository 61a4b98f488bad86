"""Mutated inputs: bytes, JSON documents, TOML files, tar and zip archives, each changed at a few places by a seed."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import tarfile
import zipfile
from typing import Any

TOKENS = [
    *(
        b"\0",
        b"\r",
        b"\n",
        b"\t",
        b"\xff",
        b"\xc3\xa9",
        b"\xe2\x80\xa8",
        b"\xed\xa0\x80",
        b"%s",
        b'"',
        b"'",
        b"\\",
        b" ",
        b"\x1b[",
    ),
    *(b"[", b"]", b"{", b"}", b"[" * 3000, b'{"a":' * 3000, b":", b",", b"=", b"null", b"true", b"NaN", b"Infinity", b"1e999"),
    *(
        b"0",
        b"-1",
        b"1",
        b"9" * 20,
        b"9" * 5000,
        b"0x7fffffff",
        b"1.5",
        b"\\ud800",
        b"../",
        b"/etc/passwd",
        b"a/b",
        b"==",
        b"://",
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30), 0.5, float("nan"), float("inf"), -1e308),
    *("", "a", "\0", "\ud800", "../../etc/passwd", "/etc/passwd", "sha256:" + "0" * 64, "1e999", "é" * 300, "a\nb", " ", "-1"),
    *(
        [],
        {},
        [[]],
        [None],
        [1, "a", None],
        {"a": None},
        {"": {}},
        [{}],
        "x" * 70000,
        "2026-13-45T99:99:99Z",
        "::",
        "[::1",
        "%",
    ),
]
NUMBER = re.compile(rb"\d+")
TOML_VALUES = [
    *(
        "0",
        "-1",
        "1.5",
        "nan",
        "inf",
        "true",
        '""',
        '"a"',
        '"../../etc"',
        "[]",
        "{}",
        "[[]]",
        '["a"]',
        "[1]",
        "{a = 1}",
        "9" * 30,
    ),
    *(
        '"\\u0000"',
        "1979-05-27",
        "1979-05-27T07:32:00Z",
        "07:32:00",
        "''",
        '"""a"""',
        "[" * 200 + "]" * 200,
        '"' + "x" * 5000 + '"',
    ),
]


def of_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes, lines, numbers and ranges that are changed, repeated, moved or removed."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        kind, at = chance.randrange(7), chance.randrange(len(content) + 1)
        if kind == 0:
            content = content[:at] + bytes([chance.randrange(256)]) + content[at + chance.randrange(2) :]
        elif kind == 1:
            content = content[:at] + chance.choice(TOKENS) + content[at + chance.choice((0, 0, 1, 4)) :]
        elif kind == 2:
            found = NUMBER.search(content, at) or NUMBER.search(content)
            if found:
                number = chance.choice((b"0", b"9" * 20, b"%d" % (int(found[0][:9]) + chance.choice((-1, 1)))))
                content = content[: found.start()] + number + content[found.end() :]
        elif kind == 3:
            content = content[:at]
        elif kind == 4:
            end = min(len(content), at + chance.choice((1, 8, 64, 1024)))
            content = content[:at] + content[end:] if chance.randrange(2) else content[:end] + content[at:]
        elif kind == 5:
            length = chance.choice((1, 2, 4, 8))
            value = chance.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, chance.randrange(2**16)))
            content = content[:at] + (value % 256**length).to_bytes(length, "little") + content[at + length :]
        else:
            lines = content.splitlines(keepends=True) or [b""]
            line = lines.pop(chance.randrange(len(lines)))
            for _ in range(chance.randrange(3)):
                lines.insert(chance.randrange(len(lines) + 1), line)
            content = b"".join(lines)
    return content


def of_json(content: bytes, chance: random.Random) -> bytes:
    """A JSON document with other values, keys or lengths at some places; one in four is mutated as bytes."""
    if chance.randrange(4) == 0:
        return of_bytes(content, chance)
    document = json.loads(content)
    for _ in range(chance.choice((1, 1, 2, 4))):
        document = _changed(document, chance)
    text = json.dumps(document, ensure_ascii=chance.randrange(2) == 0, indent=chance.choice((None, 2)))
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, chance: random.Random) -> Any:
    """The value with one change at a random depth."""
    if not isinstance(value, dict | list) or not value or chance.randrange(5) == 0:
        return copy.deepcopy(chance.choice(VALUES))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = chance.choice(keys)
    kind = chance.randrange(8)
    if kind == 0:
        del value[key]
    elif kind == 1:
        added = copy.deepcopy(value[key])
        if isinstance(value, list):
            value.insert(key, added)
        else:
            value[chance.choice(("", "a", f"{key}x", "\0", str(chance.choice(keys))))] = added
    else:
        value[key] = _changed(value[key], chance)
    return value


def of_toml(content: bytes, chance: random.Random) -> bytes:
    """A TOML file with other values or keys in some lines; one in three is mutated as bytes."""
    if chance.randrange(3) == 0:
        return of_bytes(content, chance)
    lines = content.split(b"\n")
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        key, equals, value = lines[at].partition(b" = ")
        kind = chance.randrange(5)
        if kind == 0:
            del lines[at : at + chance.choice((1, 1, 3))]
            lines = lines or [b""]
        elif kind == 1:
            lines.insert(chance.randrange(len(lines) + 1), lines[at])
        elif equals and kind < 4:
            lines[at] = key + equals + chance.choice(TOML_VALUES).encode()
        else:
            lines[at] = chance.choice((b"[a]", b"[[a]]", b"a = 1", b"a.b = {}", key + b"x" + equals + value, b"[" + key + b"]"))
    return b"\n".join(lines)


NAMES = [
    *(
        "a",
        "./a",
        "a/b",
        "../a",
        "/a",
        "/etc/x",
        "a/../../b",
        "usr/bin/x",
        "usr",
        "bin/sh",
        "",
        ".",
        "..",
        "a//b",
        "a\\b",
        "a" * 300,
    ),
    *(
        "\udcff",
        ".wh.a",
        ".wh..wh..opq",
        "a/.wh.b",
        "x/" * 80 + "y",
        ".git/config",
        "a\nb",
        "pkg-1.0/a",
        "pkg-1.0/b/c",
        "control",
    ),
]
TYPES = [
    *[tarfile.REGTYPE] * 6,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
    b"x",
    b"S",
    b"Z",
]


def of_tar(content: bytes, chance: random.Random) -> bytes:
    """A tar archive with members changed and added; one in three is mutated as bytes, half of these with valid checksums."""
    if chance.randrange(3) == 0:
        return with_checksums(of_bytes(content, chance)) if chance.randrange(2) else of_bytes(content, chance)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [(member, archive.extractfile(member) if member.isreg() else None) for member in archive]
        files = [(member, stream.read() if stream else b"") for member, stream in members]
    for _ in range(chance.choice((1, 2, 4))):
        at = chance.randrange(len(files)) if files else 0
        if not files or chance.randrange(3) == 0:
            files.insert(at, (tarfile.TarInfo(chance.choice(NAMES)), b""))
        member, data = copy.copy(files[at][0]), files[at][1]
        for field in chance.sample(("name", "type", "linkname", "mode", "uid", "size", "mtime", "drop"), 2):
            if field in ("name", "linkname"):
                setattr(member, field, chance.choice((*NAMES, member.name)))
            elif field == "type":
                member.type = chance.choice(TYPES)
            elif field == "size":
                data = data[: chance.randrange(len(data) + 1)] if chance.randrange(2) else data * 2
            elif field in ("mode", "uid", "mtime"):
                setattr(member, field, chance.choice((0, 0o7777, 2**18, 1)))
            elif len(files) > 1 and chance.randrange(4) == 0:
                del files[at]
                break
        else:
            files[at] = member, data
    packed = io.BytesIO()
    form = chance.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=packed, mode="w", format=form, errors="surrogateescape") as archive:
        for member, data in files:
            member.size = len(data) if member.type == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def with_checksums(content: bytes) -> bytes:
    """The archive with the checksum of each block that looks like a header."""
    blocks = bytearray(content)
    for start in range(0, len(blocks) - 511, 512):
        header = blocks[start : start + 512]
        if header[257:262] == b"ustar":
            total = sum(header[:148]) + 8 * 32 + sum(header[156:])
            blocks[start + 148 : start + 156] = b"%06o\0 " % (total % 8**6)
    return bytes(blocks)


def of_zip(content: bytes, chance: random.Random) -> bytes:
    """A zip archive with members changed, renamed and repeated; one in three is mutated as bytes."""
    if chance.randrange(3) == 0:
        return of_bytes(content, chance)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = [(info.filename, archive.read(info)) for info in archive.infolist()]
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(files))
        name, data = files[at]
        kind = chance.randrange(5)
        if kind == 0 and len(files) > 1:
            del files[at]
        elif kind == 1:
            files.insert(at, (chance.choice([*NAMES, name]).encode("utf-8", "replace").decode(), data))
        elif kind == 2:
            files[at] = f"{name.rpartition('/')[0]}/{chance.choice(NAMES)}".encode("utf-8", "replace").decode(), data
        else:
            files[at] = name, of_bytes(data, chance)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in files:
            header = zipfile.ZipInfo(name or "a")
            header.external_attr = chance.choice((0o100644, 0o100755, 0o100644, 0o120777, 0)) << 16
            archive.writestr(header, data)
    return packed.getvalue()
