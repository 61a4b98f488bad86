"""Bytecode of an image's Python files, compiled by the image's own Python.

The same files as ``compileall --invalidation-mode unchecked-hash`` writes: with the hash of the source instead of a time, so
that a layer has the same bytes whenever it is written, and never compared with the source at run time. Two processes compile
for a whole image; they get sources and send bytecode through pipes. Results are kept in the state directory.
"""

from __future__ import annotations

import hashlib
import os
import queue
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sm120kit.core import process
from sm120kit.core.errors import CommandFailed

if TYPE_CHECKING:
    import sqlite3

FORMAT = 1
"""Version of the cached files and of the program that compiles them."""

# As py_compile.compile and importlib._bootstrap_external._code_to_hash_pyc of CPython 3.11 do it. What the compiler shares
# between functions depends on the strings in memory: therefore the modules of compileall, and no code of the source before.
_WORKER = """
import sys
sys.path[:] = [path for path in sys.path if path]
import compileall, concurrent.futures.process, importlib.machinery, importlib.util, marshal, struct
read, write = sys.stdin.buffer.read, sys.stdout.buffer.write
sys.dont_write_bytecode = True

def send(content):
    write(struct.pack("<I", len(content)) + content)
    sys.stdout.buffer.flush()

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
_PENDING = 64
"""Limit for sources that wait for a compiler, which bounds memory."""
_BATCH_BYTES = 8 * 2**20


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
    """Processes that compile sources; see :func:`compiler`."""

    def __init__(self, argv: Sequence[str | Path], cache: Path, workers: int) -> None:
        self._jobs: queue.Queue[tuple[str, bytes, Future[bytes]] | None] = queue.Queue(_PENDING)
        self._cache = BytecodeCache(cache)
        self._children: list[process.RunningProgram] = []
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(workers):
                self._children.append(process.start([*argv, "-S", "-s", "-W", "ignore", "-c", _WORKER], env=_environment()))
            self.python, *_ = [_greeting(child, argv) for child in self._children]
        except BaseException:
            self._end()
            raise
        for child in self._children:
            self._threads.append(threading.Thread(target=self._serve, args=(child,), daemon=True))
            self._threads[-1].start()

    def compile(self, path: str, source: bytes) -> Future[bytes]:
        """Bytecode of a source whose absolute path in the image is ``path``; empty for a source that Python cannot compile.

        Waits while many sources are pending. The result raises CommandFailed if a compiler ended.
        """
        result: Future[bytes] = Future()
        self._jobs.put((path, source, result))
        return result

    def close(self) -> None:
        """End the processes, and store what they compiled."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._end()
        self._cache.close()

    def _end(self) -> None:
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            child.wait()

    def _serve(self, child: process.RunningProgram) -> None:
        """Compile jobs with one process until the end of the queue."""
        assert child.stdin is not None and child.stdout is not None
        while (job := self._jobs.get()) is not None:
            path, source, result = job
            try:
                result.set_result(self._compiled(path, source, child.stdin, child.stdout))
            except BaseException as error:
                result.set_exception(error)

    def _compiled(self, path: str, source: bytes, stdin: IO[bytes], stdout: IO[bytes]) -> bytes:
        name = path.encode("utf-8", "surrogateescape")
        python = f"{FORMAT} {self.python.tag} {self.python.version} {self.python.magic}".encode()
        key = hashlib.sha256(b"\0".join((python, name, source))).digest()
        bytecode = self._cache.get(key)
        if bytecode is None:
            try:
                stdin.write(struct.pack("<II", len(name), len(source)) + name + source)
                stdin.flush()
                bytecode = _receive(stdout)
            except (OSError, ValueError, EOFError) as error:
                raise CommandFailed(
                    f"the Python of the image ended while it compiled {path}", "run the command again"
                ) from error
            self._cache.put(key, bytecode)
        return bytecode


class BytecodeCache:
    """Bytecode by a hash of all that it follows from, in an SQLite file. Without a usable file, nothing is kept."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._new: dict[bytes, bytes] = {}
        self._new_bytes = 0
        self._database: sqlite3.Connection | None = None
        with suppress(ImportError):
            self._database = _open(path)

    def get(self, key: bytes) -> bytes | None:
        """The bytecode with a key; None if it is not kept, or damaged."""
        if self._database is None:
            return None
        import sqlite3

        with self._lock:
            try:
                row = self._database.execute("SELECT sha256, bytecode FROM bytecode WHERE key = ?", (key,)).fetchone()
            except sqlite3.Error:
                return None
        return row[1] if row and hashlib.sha256(row[1]).digest() == row[0] else None

    def put(self, key: bytes, bytecode: bytes) -> None:
        """Keep bytecode."""
        with self._lock:
            self._new[key] = bytecode
            self._new_bytes += len(bytecode)
            if self._new_bytes > _BATCH_BYTES:
                self._store()

    def close(self) -> None:
        """Store what is new."""
        with self._lock:
            self._store()
            if self._database is not None:
                self._database.close()

    def _store(self) -> None:
        if self._database is not None:
            import sqlite3

            rows = [(key, hashlib.sha256(bytecode).digest(), bytecode) for key, bytecode in self._new.items()]
            with suppress(sqlite3.Error), self._database:  # a full disk, or a file of another program
                self._database.executemany("INSERT OR REPLACE INTO bytecode VALUES (?, ?, ?)", rows)
        self._new.clear()
        self._new_bytes = 0


def _open(path: Path) -> sqlite3.Connection | None:
    import sqlite3

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, timeout=10, check_same_thread=False)
        database.execute("PRAGMA synchronous = OFF")  # contents have a sha256
        database.execute("CREATE TABLE IF NOT EXISTS bytecode (key BLOB PRIMARY KEY, sha256 BLOB, bytecode BLOB) WITHOUT ROWID")
    except (OSError, sqlite3.Error):
        return None
    return database


@contextmanager
def compiler(argv: Sequence[str | Path], cache: Path, workers: int = 2) -> Iterator[BytecodeCompiler]:
    """Compile with the Python that ``argv`` starts, that of an image, while the block runs. ``cache`` is a file.

    Raises:
        RequirementMissing: there is no such program.
        CommandFailed: it is not a Python that works.
    """
    compiler = BytecodeCompiler(argv, cache, workers)
    try:
        yield compiler
    finally:
        compiler.close()


def _environment() -> dict[str, str | None]:
    """Nothing that the user sets for other Pythons; hashes, and with them the order of sets, are the same in every process."""
    return {name: None for name in os.environ if name.startswith("PYTHON")} | {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def _greeting(child: process.RunningProgram, argv: Sequence[str | Path]) -> ImagePython:
    assert child.stdout is not None
    try:
        return ImagePython(*_receive(child.stdout).decode().split())
    except (EOFError, OSError, ValueError, TypeError) as error:
        raise CommandFailed(f"{' '.join(map(str, argv))} is not a Python that works", "check the base of the image") from error


def _receive(stream: IO[bytes]) -> bytes:
    header = stream.read(4)
    if len(header) < 4:
        raise EOFError
    (size,) = struct.unpack("<I", header)
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content
