"""Bytecode of an image's Python files, compiled by the image's own Python.

The same files as ``compileall --invalidation-mode unchecked-hash`` writes: with the hash of the source instead of a time, so
that a layer has the same bytes whenever it is written, and never compared with the source at run time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit.core import process
from sm120kit.core.errors import CommandFailed

if TYPE_CHECKING:
    from sm120kit.images._layers import LayerWriter

# As py_compile.compile and importlib._bootstrap_external._code_to_hash_pyc of CPython 3.11 do it. What the compiler shares
# between functions depends on the strings in memory: therefore the modules of compileall, and no code of the source before.
_PROGRAM = """
import sys
sys.path[:] = [path for path in sys.path if path]
import compileall, concurrent.futures.process, importlib.machinery, importlib.util, marshal, struct
read, write = sys.stdin.buffer.read, sys.stdout.buffer.write
sys.dont_write_bytecode = True

def send(content):
    write(struct.pack("<I", len(content)) + content)

send(f"{sys.implementation.cache_tag} {'.'.join(map(str, sys.version_info))} {importlib.util.MAGIC_NUMBER.hex()}".encode())
loader = importlib.machinery.SourceFileLoader("<py_compile>", "")
while header := read(8):
    name_size, source_size = struct.unpack("<II", header)
    path, source = read(name_size).decode("utf-8", "surrogateescape"), read(source_size)
    try:
        code = loader.source_to_code(source, path, _optimize=-1)
        content = marshal.dumps(code)  # of an object with a name, because marshal writes how often an object is referred to
    except Exception:
        send(b"")
    else:
        code = None
        send(importlib.util.MAGIC_NUMBER + struct.pack("<I", 1) + importlib.util.source_hash(source) + content)
"""
_BATCH_BYTES = 16 * 2**20
"""Size of sources from which a process is started for them, which bounds memory."""


@dataclass(frozen=True)
class ImagePython:
    """The Python of an image: the tag of its bytecode (``cpython-311``), its version, and the magic number of its bytecode."""

    tag: str
    version: str
    magic: str

    @property
    def short_version(self) -> str:
        """Major and minor version, as in ``lib/python3.11``."""
        return ".".join(self.version.split(".")[:2])

    def cached_path(self, path: str) -> str:
        """Where the bytecode of a source file lies."""
        directory, _, name = path.rpartition("/")
        return f"{directory}/__pycache__/{name.removesuffix('.py')}.{self.tag}.pyc"


class BytecodeCompiler:
    """The Python that ``argv`` starts, that of an image, as a compiler."""

    def __init__(self, argv: Sequence[str | Path]) -> None:
        """Start it once.

        Raises:
            RequirementMissing: there is no such program.
            CommandFailed: it is not a Python that works.
        """
        self._argv = [*argv, "-S", "-s", "-W", "ignore", "-c", _PROGRAM]
        try:
            self.python = ImagePython(*next(self._run(b"")).decode().split())
        except (CommandFailed, StopIteration, struct.error, ValueError, TypeError) as error:
            shown = " ".join(map(str, argv))
            raise CommandFailed(f"{shown} is not a Python that works", "check the base of the image") from error

    def compile(self, sources: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """Bytecode of each source with its absolute path in the image; empty for a source that Python cannot compile.

        Raises:
            CommandFailed: the compiler ended.
        """
        names = [(path.encode("utf-8", "surrogateescape"), source) for path, source in sources]
        packed = b"".join(struct.pack("<II", len(name), len(source)) + name + source for name, source in names)
        _, *compiled = self._run(packed)
        if len(compiled) != len(sources):
            raise CommandFailed("the Python of the image ended while it compiled", "run the command again")
        return compiled

    def _run(self, stdin: bytes) -> Iterator[bytes]:
        """The pieces that the program prints."""
        # Nothing that the user sets for other Pythons; hashes, and with them the order of sets, are always the same.
        env = {name: None for name in os.environ if name.startswith("PYTHON")} | {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        output, offset = process.run(self._argv, env=env, stdin=stdin).raw, 0
        while offset < len(output):
            (size,) = struct.unpack_from("<I", output, offset)
            yield output[offset + 4 : offset + 4 + size]
            offset += 4 + size


class BytecodeWriter:
    """Writes the bytecode of files into a layer: after each 16 MiB of sources, and the rest by :meth:`finish`."""

    def __init__(self, compiler: BytecodeCompiler, layer: LayerWriter) -> None:
        self.python = compiler.python
        self._compiler, self._layer = compiler, layer
        self._pending: list[tuple[str, bytes]] = []
        self._bytes = 0

    def add(self, path: str, source: bytes) -> None:
        """Add a source by its path in the layer."""
        self._pending.append((path, source))
        self._bytes += len(source)
        if self._bytes >= _BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Write the bytecode of all pending sources; those that this Python cannot compile have none."""
        if self._pending:
            compiled = self._compiler.compile([(f"/{path}", source) for path, source in self._pending])
            for (path, _), content in zip(self._pending, compiled, strict=True):
                if content:
                    self._layer.file(self.python.cached_path(path), [content], len(content))
        self._pending, self._bytes = [], 0
