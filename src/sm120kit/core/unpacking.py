"""Write members of archives below a directory, which no path or link may leave."""

import base64
import hashlib
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from sm120kit.core.errors import NotTrusted

WHITEOUT = ".wh."
"""The prefix of names by which layers of other programs remove files of lower ones."""

_HINT = "it is damaged, or of another program: fetch, build or pull it again"

FileDigest = tuple[str, int, int]
"""The sha256 of a file in the form of RECORD, its size, and its modification time in seconds."""


class Unpacking:
    """The files of an archive below ``tree``, an empty directory, as they are added. ``origin`` is named in errors.

    A member's parents must be directories of this archive, or are created: no path leads through a link. Modes of files and
    directories include permission for their owner to read and change them, and no set-user-id and set-group-id bits: on this
    machine they would be programs of whoever unpacked them.
    """

    def __init__(self, tree: Path, origin: Path) -> None:
        self._tree = tree
        self._origin = origin
        self._directories: dict[str, float | None] = {"": None}
        self._files: dict[str, FileDigest] = {}
        self._links: set[str] = set()

    def add(self, member: tarfile.TarInfo, chunks: Iterable[bytes]) -> None:
        """Write a member; ``chunks`` are the contents of a file.

        Raises:
            NotTrusted: a path or hard link leads out of the directory, or removes a file of a lower layer.
        """
        path = self._path(member.name)
        target = self._tree / path
        if path:
            self._make_parents(path)
        if member.isdir():
            self._replace(path, target, keep_directory=True)
            if path not in self._directories:
                target.mkdir()
            self._directories[path] = member.mtime
            target.chmod((member.mode | 0o700) & 0o1777)
            return
        if not path:
            raise NotTrusted(f"{self._origin}: the root of the layer is not a directory", _HINT)
        self._replace(path, target)
        if member.issym():
            target.symlink_to(member.linkname)
            self._links.add(path)
            os.utime(target, (member.mtime, member.mtime), follow_symlinks=False)
        elif member.islnk():
            source = self._path(member.linkname)
            if source not in self._files:
                raise NotTrusted(f"{self._origin}: {member.name!r} is a hard link to {member.linkname!r}, no file of it", _HINT)
            os.link(self._tree / source, target, follow_symlinks=False)
            self._files[path] = self._files[source]
        elif member.isreg():
            digest = hashlib.sha256()
            with target.open("xb") as file:
                for piece in chunks:
                    digest.update(piece)
                    file.write(piece)
            target.chmod((member.mode | 0o600) & 0o777)
            os.utime(target, (member.mtime, member.mtime))
            sha256 = f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}"
            self._files[path] = (sha256, member.size, int(member.mtime))

    def finish(self) -> dict[str, FileDigest | None]:
        """Set the times of directories, deepest first, and return the digest of each file by path, of links None."""
        for path in sorted(self._directories, reverse=True):
            mtime = self._directories[path]
            if mtime is not None:
                os.utime(self._tree / path, (mtime, mtime))
        return {**self._files, **dict.fromkeys(self._links)}

    def _path(self, name: str) -> str:
        """A member's path relative to the root; it cannot lead out of it."""
        path = PurePosixPath(name)
        parts = [part for part in path.parts if part != "/"]
        if ".." in parts or "\0" in name:
            raise NotTrusted(f"{self._origin}: the path of member {name!r} leads out of its directory", _HINT)
        if parts and parts[-1].startswith(WHITEOUT):
            raise NotTrusted(f"{self._origin}: member {name!r} removes a file of a lower layer", _HINT)
        return "/".join(parts)

    def _make_parents(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent in self._directories:
            return
        self._make_parents(parent)
        if os.path.lexists(self._tree / parent):
            raise NotTrusted(f"{self._origin}: {parent!r} is not a directory, and {path!r} is below it", _HINT)
        (self._tree / parent).mkdir(mode=0o755)
        self._directories[parent] = None

    def _replace(self, path: str, target: Path, *, keep_directory: bool = False) -> None:
        """Remove what an earlier member wrote at the path: the last member counts."""
        if path in self._directories:
            if keep_directory:
                return
            raise NotTrusted(f"{self._origin}: {path!r} is a directory and a file", _HINT)
        if os.path.lexists(target):
            target.unlink()
            self._files.pop(path, None)
            self._links.discard(path)
