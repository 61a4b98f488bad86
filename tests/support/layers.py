"""Small images in an OCI image layout, of programs of this machine with their libraries."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm120kit.images.oci import LAYER, Descriptor, Layout

Member = tuple[str, bytes | None, dict[str, Any]]
"""A path, the content of a file or None for a directory, and other attributes of the header."""

ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"


def packed(*members: Member) -> bytes:
    """A tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content, attributes in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.mode = 0o755 if content is None else 0o644
            member.size, member.mtime = len(content or b""), 1_700_000_000
            for key, value in attributes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content or b""))
    return file.getvalue()


def add_image(
    layout: Layout,
    layers: Sequence[bytes],
    settings: Mapping[str, Any],
    history: Sequence[str] = (),
) -> Descriptor:
    """Store an image of tar files."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(settings),
        "history": [{"created_by": step} for step in history],
    }
    return layout.add_image([layout.add_blob(layer, LAYER) for layer in layers], config)


def programs(*names: str) -> list[Member]:
    """Programs of this machine below ``bin``, with the libraries that they load."""
    paths = {Path(shutil.which(name) or name).resolve(): f"bin/{name}" for name in names}
    libraries: dict[str, Path] = {}
    for path in paths:
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            libraries[library.lstrip("/")] = Path(library).resolve()
    members: list[Member] = [("bin", None, {}), ("home", None, {}), ("etc", None, {}), ("tmp", None, {"mode": 0o1777})]
    members += [(target, path.read_bytes(), {"mode": 0o755}) for path, target in paths.items()]
    members += [(target, path.read_bytes(), {"mode": 0o755}) for target, path in sorted(libraries.items())]
    return members


def small_image(layout: Layout, *more: Sequence[Member], **settings: Any) -> Descriptor:
    """An image with a shell, coreutils and a user whose home directory is writable; ``more`` are further layers."""
    base = programs("sh", "cat", "id", "ls", "env", "touch", "stat", "grep", "sleep", "kill", "ln")
    user: list[Member] = [
        ("etc/passwd", ACCOUNTS.encode(), {}),
        ("etc/group", b"root:x:0:\nuser:x:1000:\n", {}),
        ("etc/shadow", b"secret\n", {"mode": 0o640, "gid": 42}),
        ("home/user", None, {"uid": 1000, "gid": 1000}),
        ("home/user/greeting", b"hello\n", {"uid": 1000, "gid": 1000}),
    ]
    config = {"User": "1000:1000", "WorkingDir": "/home/user", "Env": ["PATH=/bin", "A=b=c"], **settings}
    return add_image(layout, [packed(*base), packed(*user), *(packed(*layer) for layer in more)], config)


def manifest_of(layout: Layout, image: Descriptor) -> dict[str, Any]:
    """The manifest of an image."""
    return dict(json.loads(layout.read(image.digest)))
