"""A small FlashInfer and a small vLLM that rests on it: their recipes, sdists and wheels, made here."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

KERNELS = """\
edition = 1
name = "flashinfer-1.0"
engine = "flashinfer"
version = "1.0"
summary = "a small one"
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
ENGINE = """\
edition = 1
name = "vllm-9.0"
engine = "vllm"
version = "9.0"
summary = "a small one"
state = "resolved"
archs = ["sm_120f"]
flashinfer = "flashinfer-1.0"
kernels = "quick"
serve = ["vllm", "serve"]
built = []
official = []
[environment]
python = "3.12"
platforms = ["manylinux_2_35_x86_64"]
requires = ["vllm==9.0"]
"""


def make_sdist(path: Path, files: Mapping[str, str]) -> str:
    """An sdist; its sha256."""
    with gzip.GzipFile(path, "w", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(
    place: Path,
    name: str,
    version: str,
    tag: str = "py3-none-any",
    *,
    requires: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> None:
    """A wheel below ``place``, with one module where no ``files`` are given; the same bytes each time."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    pure = "true" if tag.endswith("-any") else "false"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    members = {
        **(files or {f"{name.replace('-', '_')}.py": f"version = {version!r}\n".encode()}),
        f"{info}/METADATA": "".join(f"{line}\n" for line in metadata).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode(),
    }
    rows = [(member, row_hash(data), str(len(data))) for member, data in members.items()]
    members[f"{info}/RECORD"] = "".join(f"{','.join(row)}\n" for row in [*rows, (f"{info}/RECORD", "", "")]).encode()
    with zipfile.ZipFile(place / f"{stem}-{tag}.whl", "w") as archive:
        for member, data in members.items():
            header = zipfile.ZipInfo(member)
            header.external_attr = (0o100755 if "/bin/" in member else 0o100644) << 16
            archive.writestr(header, data)


def row_hash(data: bytes) -> str:
    """As a wheel's RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
