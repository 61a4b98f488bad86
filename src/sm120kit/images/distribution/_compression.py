"""Layers as registries store them: compressed by zstd.

A layer of a layout is not compressed, so its digest is its diff id. The bytes of the compressed layer follow from the layer and
the version of zstd; the identity of an image does not depend on them.
"""

import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from sm120kit.core.archives import ChunkReader
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import NotTrusted, RegistryFailed
from sm120kit.core.outside import open_found
from sm120kit.images.oci import LAYER, Descriptor

LEVEL = 3
"""Smaller and faster than gzip 1."""

_CHUNK = 2**20
_MAX_WINDOW_BYTES = 2**27
"""Limit for the memory of zstd, that of the program zstd without ``--long``."""

COMPRESSED = f"{LAYER}+zstd"
"""The media type of layers (OCI image-spec, media-types.md)."""


def compress(source: Path, target: Path, tick: Callable[[], None]) -> Descriptor:
    """Compress a layer into a file; ``tick`` is called for each MiB, and may raise.

    Raises:
        ResourceUnavailable, SystemRefused: it cannot be stored.
    """
    digest, size = hashlib.sha256(), 0
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with disk_errors(target), open_found(source) as file, target.open("wb") as out:
        for piece in compressor.read_to_iter(file, size=source.stat().st_size, read_size=_CHUNK, write_size=_CHUNK):
            tick()
            digest.update(piece)
            size += out.write(piece)
    return Descriptor(COMPRESSED, f"sha256:{digest.hexdigest()}", size)


def decompressed(blob: Descriptor, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The uncompressed layer in ``chunks``, in pieces of at most 1 MiB.

    Raises:
        RegistryFailed: the media type is not that of a layer that sm120kit pushed.
        NotTrusted: the chunks are damaged.
    """
    if blob.media_type != COMPRESSED:
        problem = f"layer {blob.digest} has the media type {blob.media_type[:100]}"
        raise RegistryFailed(problem, "sm120kit publishes no such image")
    reader = io.BufferedReader(ChunkReader(chunks), _CHUNK)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(reader, read_size=_CHUNK, read_across_frames=True) as stream:
            while piece := stream.read(_CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise NotTrusted(f"layer {blob.digest} is damaged: {error}", "the registry's copy was damaged or changed") from error
