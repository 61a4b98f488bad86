"""Unpack archives from the container daemon. ``TarFile.extractall`` has no filters before Python 3.11.4."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from sm120kit.core.errors import NotTrusted


def unpack(packed: IO[bytes], into: Path, image: str) -> None:
    """Write the regular files and directories of a tar file below ``into``.

    Links and special files are refused: without links, a path that contains no ``..`` stays below ``into``. Modes, owners and
    times are not restored. ``image`` is named in errors.

    Raises:
        NotTrusted: the archive is damaged, a member is neither file nor directory, or its path leads out of ``into``.
    """
    hint = "sm120kit builds no such image: build it again, or use another image"
    try:
        with tarfile.open(fileobj=packed) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or "\0" in member.name:
                    raise NotTrusted(f"{image}: the path of member {member.name!r} leads out of its directory", hint)
                if not member.isdir() and not member.isreg():
                    kind = "link" if member.issym() or member.islnk() else "special file"
                    raise NotTrusted(f"{image}: member {member.name!r} is a {kind}", hint)
                target = into / path
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise NotTrusted(f"{image}: the archive is damaged: {error}", hint) from error
