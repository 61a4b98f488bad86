"""A small FlashInfer and a small vLLM that uses it: recipes, sdists and wheels."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

KERNELS = """\
edition = 1
name = "flashinfer-1.0"
engine = "flashinfer"
version = "1.0"
summary = "a small recipe"
archs = ["sm_120f"]
default_group = "quick"
[sources.flashinfer]
sdist = "flashinfer-python"
version = "1.0"
sha256 = "{sha256}"
[modules.m]
generator = "flashinfer.jit.m:gen"
[groups.quick]
summary = "all"
modules = ["m"]
"""
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: sm120kit <sm120kit@localhost>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: jit: shout

So that there is something to apply.

Applies-To: flashinfer >=0.1
Upstream-Status: Inappropriate [a test]
Origin: a test
Evidence: a test
Matters-For: a test
No-Effect-For: all else
Drop-When: never

diff --git a/include/x.h b/include/x.h
index 4cb29ea38f70d7c61b2a3a25b02e3bdf44905402..ddc897f039f57aa91e16efa6dfde386c4255206f 100644
--- a/include/x.h
+++ b/include/x.h
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""
"""The patch of the small FlashInfer's sdist."""
ENGINE = """\
edition = 1
name = "vllm-9.0"
engine = "vllm"
version = "9.0"
summary = "a small recipe"
state = "resolved"
archs = ["sm_120f"]
flashinfer = "flashinfer-1.0"
kernels = "quick"
serve = ["vllm", "serve"]
built = []
upstream = []
[environment]
python = "3.12"
platforms = ["manylinux_2_35_x86_64"]
requires = ["vllm==9.0"]
"""


def make_sdist(path: Path, files: Mapping[str, str]) -> str:
    """Write the sdist of the project and version in the file name; returns its sha256."""
    stem = path.name.removesuffix(".tar.gz")
    name, _, version = stem.partition("-")
    metadata = {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"}
    with gzip.GzipFile(path, "w", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in {**metadata, **files}.items():
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(
    directory: Path,
    name: str,
    version: str,
    tag: str = "py3-none-any",
    *,
    requires: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a wheel to ``directory`` with ``files``, by default one module. Its bytes are reproducible."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    pure = "true" if tag.endswith("-any") else "false"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {name}" for name in requires),
        *(f"Provides-Extra: {match[1]}" for name in requires if (match := re.search(r'extra == "(.*)"', name))),
    ]
    members = {
        **(files or {f"{name.replace('-', '_')}.py": f"version = {version!r}\n".encode()}),
        f"{info}/METADATA": "".join(f"{line}\n" for line in metadata).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode(),
    }
    rows = [(member, row_hash(data), str(len(data))) for member, data in members.items()]
    members[f"{info}/RECORD"] = "".join(f"{','.join(row)}\n" for row in [*rows, (f"{info}/RECORD", "", "")]).encode()
    with zipfile.ZipFile(directory / f"{stem}-{tag}.whl", "w") as archive:
        for member, data in members.items():
            header = zipfile.ZipInfo(member)
            header.external_attr = (0o100755 if "/bin/" in member else 0o100644) << 16
            archive.writestr(header, data)


def row_hash(data: bytes) -> str:
    """The sha256 of a file in the form of a wheel's RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
