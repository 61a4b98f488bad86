"""Layers of images: tar files whose bytes follow from their entries."""

import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.errors import NotTrusted
from sm120kit.images.oci import LAYER, BlobWriter, Descriptor

AddEntry = Callable[[tarfile.TarInfo, Iterable[bytes]], None]
"""Gets each entry of a layer with the contents of a file, which it must read to their end."""


def _read(entry: tarfile.TarInfo, chunks: Iterable[bytes]) -> None:
    for _ in chunks:
        pass


class LayerWriter:
    """Write a layer: entries in the caller's order, all with one time, each path once.

    Paths are relative and have no ``.`` or ``..``. Directories above an entry that the layer lacks are added, with mode 755 and
    owner root. Long names and large files have PAX headers.
    """

    def __init__(self, blob: BlobWriter, observe: Callable[[int], None] = lambda size: None, add: AddEntry = _read) -> None:
        """Write into ``blob``, from :meth:`sm120kit.images.oci.Layout.writer`.

        ``observe`` is called with the number of bytes before each write, and may raise to end the layer. ``add`` also gets
        each entry.
        """
        self._blob = blob
        self._add = add
        self._observe = observe
        self._types: dict[str, bytes] = {"": tarfile.DIRTYPE}

    def __contains__(self, path: str) -> bool:
        """Whether the layer has an entry of that path."""
        return path in self._types

    @property
    def files(self) -> list[str]:
        """The paths of files, in the order in which they were added; of several names of a file the first."""
        return [path for path, type_ in self._types.items() if type_ == tarfile.REGTYPE]

    def directory(self, path: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        """Add a directory.

        Raises:
            NotTrusted: the path is not a path in a layer, exists already, or leads through an entry that is no directory.
        """
        self._add(self._header(path, tarfile.DIRTYPE, mode=mode, uid=uid, gid=gid), ())

    def file(self, path: str, chunks: Iterable[bytes], size: int, *, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
        """Add a file of ``size`` bytes. See :meth:`directory`.

        Raises:
            NotTrusted: also if ``chunks`` have another size.
        """
        entry = self._header(path, tarfile.REGTYPE, mode=mode, uid=uid, gid=gid, size=size)
        start = self._blob.size
        self._add(entry, self._written(chunks))
        written = self._blob.size - start
        if written != size:
            raise NotTrusted(f"{path} has {written} bytes, not {size}", "fetch its archive again")
        self._write(bytes(-size % tarfile.BLOCKSIZE))

    def _written(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._write(chunk)
            yield chunk

    def symlink(self, path: str, target: str, *, uid: int = 0, gid: int = 0) -> None:
        """Add a symbolic link. See :meth:`directory`."""
        self._add(self._header(path, tarfile.SYMTYPE, mode=0o777, uid=uid, gid=gid, linkname=target), ())

    def hardlink(self, path: str, target: str, *, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
        """Add another name of the file ``target``, an entry before this one. See :meth:`directory`."""
        if self._types.get(target) != tarfile.REGTYPE:
            raise NotTrusted(f"{path} is a link to {target}, which is no file before it", "fetch its archive again")
        self._add(self._header(path, tarfile.LNKTYPE, mode=mode, uid=uid, gid=gid, linkname=target), ())

    def finish(self) -> Descriptor:
        """End the layer and commit the blob. Its digest is the diff id."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        return self._blob.commit(LAYER)

    def _write(self, data: bytes) -> int:
        self._observe(len(data))
        return self._blob.write(data)

    def _header(self, path: str, type_: bytes, **fields: Any) -> tarfile.TarInfo:
        parts = path.split("/")
        if "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
            raise NotTrusted(f"{path!r} is not a path in a layer", "fetch its archive again")
        if path in self._types:
            raise NotTrusted(f"{path} is in a layer twice", "fetch its archive again")
        parent = path.rpartition("/")[0]
        if parent not in self._types:
            self.directory(parent)
        elif self._types[parent] != tarfile.DIRTYPE:
            raise NotTrusted(f"{path} is below {parent}, which is no directory", "fetch its archive again")
        self._types[path] = type_
        entry = tarfile.TarInfo(path)
        entry.type, entry.mtime = type_, SOURCE_DATE_EPOCH
        for name, value in fields.items():
            setattr(entry, name, value)
        self._write(entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        return entry
