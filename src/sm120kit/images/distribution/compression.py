"""Layers as registries store them: compressed once, with a record of both digests beside the layout.

A layer of a layout is not compressed, so its digest is its diff id. The bytes of the compressed layer follow from the layer and
the version of zlib or zstd; the identity of an image does not depend on them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from sm120kit.core.archives import ChunkReader
from sm120kit.core.digests import file_sha256
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import Mismatch, NotTrusted, RegistryFailed
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import owned_directory
from sm120kit.images.image_records import Compression
from sm120kit.images.oci import LAYER, Descriptor, Layout

_CHUNK = 2**20
_MAX_WINDOW_BYTES = 2**27
"""Limit for the memory of zstd, that of the program zstd without ``--long``."""


LEVELS = {Compression.GZIP: 1, Compression.ZSTD: 3}
"""Shared libraries are 9 % smaller with gzip 6, but gzip 1 takes a third of its time; zstd 3 is smaller and faster."""

_FORMATS = {
    LAYER: None,
    f"{LAYER}+gzip": Compression.GZIP,
    f"{LAYER}+zstd": Compression.ZSTD,
    "application/vnd.docker.image.rootfs.diff.tar": None,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": Compression.GZIP,
    "application/vnd.docker.image.rootfs.diff.tar.zstd": Compression.ZSTD,
}
"""Media types of layers (OCI image-spec, media-types.md; Docker image manifest version 2, schema 2)."""


@dataclass(frozen=True)
class CompressedLayer:
    """The compressed form of a layer, and the repositories (``registry/name``) that have it."""

    blob: Descriptor
    repositories: tuple[str, ...] = ()


class CompressedLayers:
    """The compressed layers of a layout, in its directory ``compressed``: files and records, named by diff id."""

    def __init__(self, layout: Layout, compression: Compression) -> None:
        self._layout = layout
        self._directory = layout.directory / "compressed"
        self._compression = compression

    def path(self, diff_id: str) -> Path:
        """The path of a compressed layer, which need not exist."""
        return self._directory / f"{diff_id.removeprefix('sha256:')}.{self._compression}"

    def recorded(self, diff_id: str) -> CompressedLayer | None:
        """The record of a layer that was compressed before; its file may have been removed since."""
        path = self._record(diff_id)
        return read_record(CompressedLayer, path) if path.is_file() else None

    def compress(self, diff_id: str, advance: Callable[[int], None]) -> CompressedLayer:
        """Compress a layer, unless its file exists. ``advance`` is called with numbers of bytes of the uncompressed layer.

        Raises:
            Mismatch: the file differs from its record.
            ResourceUnavailable, SystemRefused: it cannot be stored.
        """
        known, path = self.recorded(diff_id), self.path(diff_id)
        if known and path.is_file():
            if f"sha256:{file_sha256(path)}" != known.blob.digest:
                raise Mismatch(f"{path} differs from its record", f"rm {path}; it is compressed again")
            return known
        with disk_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
            (self._layout.directory / "partial").mkdir(exist_ok=True)
            with owned_directory(self._layout.directory / "partial", "") as directory:
                partial = directory / "layer"
                blob = self._write(diff_id, partial, advance)
                layer = CompressedLayer(blob, known.repositories if known and known.blob == blob else ())
                partial.replace(path)
                write_record(self._record(diff_id), layer)
        return layer

    def _write(self, diff_id: str, partial: Path, advance: Callable[[int], None]) -> Descriptor:
        source = self._layout.path(diff_id)
        level, digest, size = LEVELS[self._compression], hashlib.sha256(), 0
        compressor: Any
        if self._compression is Compression.GZIP:
            compressor = zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # a header without name and time
        else:
            compressor = zstandard.ZstdCompressor(level=level, write_checksum=True).compressobj(size=source.stat().st_size)
        with source.open("rb") as file, partial.open("wb") as out:

            def write(data: bytes) -> int:
                digest.update(data)
                return out.write(data)

            while chunk := file.read(_CHUNK):
                size += write(compressor.compress(chunk))
                advance(len(chunk))
            size += write(compressor.flush())
            out.flush()
            os.fsync(out.fileno())
        return Descriptor(f"{LAYER}+{self._compression}", f"sha256:{digest.hexdigest()}", size)

    def add(self, diff_id: str, blob: Descriptor, repository: str) -> None:
        """Record that a repository has a compressed form of a layer. Another form that is recorded is kept."""
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        known = self.recorded(diff_id) or CompressedLayer(blob)
        if known.blob == blob and repository not in known.repositories:
            # Of two processes, the record of one may be lost: then a layer is uploaded that could have been mounted.
            repositories = tuple(sorted({*known.repositories, repository}))
            write_record(self._record(diff_id), CompressedLayer(blob, repositories))

    def _record(self, diff_id: str) -> Path:
        return self.path(diff_id).with_name(f"{self.path(diff_id).name}.json")


def is_recorded(layout: Layout, diff_id: str, blob: Descriptor) -> bool:
    """Whether a blob is a compressed form of a layer that was compressed or verified before."""
    records = (CompressedLayers(layout, compression).recorded(diff_id) for compression in Compression)
    return any(known and known.blob.digest == blob.digest for known in records)


def note_pulled(layout: Layout, diff_id: str, blob: Descriptor, repository: str) -> None:
    """Record a layer of a pulled image, so that it is not compressed and uploaded again where the registry has it."""
    compression = _FORMATS[blob.media_type]
    if compression:
        layers = CompressedLayers(layout, compression)
        layers.add(diff_id, Descriptor(f"{LAYER}+{compression}", blob.digest, blob.size), repository)


def decompressed(blob: Descriptor, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The uncompressed layer in ``chunks``, in pieces of at most 1 MiB.

    Raises:
        RegistryFailed: the media type is not that of a layer.
        NotTrusted: the chunks are damaged.
    """
    if blob.media_type not in _FORMATS:
        raise RegistryFailed(
            f"layer {blob.digest} has the media type {blob.media_type[:100]}", "is it the image of a container?"
        )
    compression = _FORMATS[blob.media_type]
    if compression is None:
        yield from chunks
        return
    reader = io.BufferedReader(ChunkReader(chunks), _CHUNK)
    stream: Any
    if compression is Compression.GZIP:
        stream = gzip.GzipFile(fileobj=reader)
    else:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        stream = decompressor.stream_reader(reader, read_size=_CHUNK, read_across_frames=True)
    try:
        with stream:
            while piece := stream.read(_CHUNK):
                yield piece
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise NotTrusted(f"layer {blob.digest} is damaged: {error}", "the registry's copy was damaged or changed") from error
