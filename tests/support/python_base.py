"""A base of this machine's Python, small enough to be packed by tests."""

from __future__ import annotations

import _ctypes
import sys
import sysconfig
import tarfile
from pathlib import Path

import layers

from sm120kit.images._assembly import ImageBase
from sm120kit.images.oci import Layout

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = Path(sys.base_prefix, "bin", f"python{VERSION}")
PARTS = (
    "collections",
    "concurrent",
    "ctypes",
    "encodings",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "re",
    "tomllib",
    "urllib",
    "venv",
)
ACCOUNTS: list[layers.Member] = [
    ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", {}),
    ("etc/group", b"root:x:0:\n", {}),
]
COMPILER: list[layers.Member] = [
    ("usr/bin/c++", b"#!/bin/sh\n", {"mode": 0o755}),
    (f"{sysconfig.get_path('include').lstrip('/')}/Python.h", b"", {}),
]
SETTINGS = {"Env": ["PATH=/usr/bin:/bin", "PYTHONPATH=/nonexistent", "PYTHONHASHSEED=7"]}


def python_members() -> list[layers.Member]:
    """This machine's Python, with the part of its library that compiles files and makes environments."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [path for part in PARTS for path in (library / part).rglob("*") if "__pycache__" not in path.parts]
    paths = [*library.glob("*.py"), *(path for path in found if path.is_file()), *(library / "lib-dynload").glob("*.so")]
    members = layers.programs("sh", "true")
    programs = [
        member for member in layers.programs(str(PYTHON), _ctypes.__file__) if not member[0].startswith("bin/") and member[1]
    ]
    members += [member for member in programs if member[0] not in {name for name, *_ in members}]
    members += [(f"usr/bin/python{VERSION}", PYTHON.read_bytes(), {"mode": 0o755})]
    members += [("usr/bin/python3", b"", {"type": tarfile.SYMTYPE, "linkname": f"python{VERSION}"})]
    members += [(f"usr/lib/python{VERSION}/{path.relative_to(library)}", path.read_bytes(), {}) for path in sorted(paths)]
    return members


def python_base(layout: Layout) -> ImageBase:
    """The image as the base of another, with a compiler in name only; stored in ``layout``."""
    image = layers.add_image(layout, [layers.packed(*python_members()), layers.packed(*ACCOUNTS, *COMPILER)], SETTINGS)
    accounts = {Path(name).name: (content or b"").decode() for name, content, _ in ACCOUNTS}
    return ImageBase(layout.layers(image.digest), layout.config(image.digest), accounts, (sys.executable,))
