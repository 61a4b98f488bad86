"""Install wheels into layers: the files that ``pip install`` and ``compileall`` leave in a venv, straight into a tar file.

The ``installer`` library reads the format of wheels. What pip adds has the form of pip 26.3, with which
the tests compare: RECORD, INSTALLER, REQUESTED and the scripts of entry points.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import posixpath
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import InvalidRecordEntry, RecordEntry
from installer.sources import WheelFile
from installer.utils import SCHEME_NAMES

from sm120kit.core import archives
from sm120kit.core.errors import BadInput, NotTrusted, Sm120kitError
from sm120kit.sources.source_records import LockedWheel

if TYPE_CHECKING:
    from sm120kit.images._bytecode import BytecodeWriter, ImagePython
    from sm120kit.images._layers import LayerWriter

VENV = "opt/venv"
"""The environment of images, as a path in layers."""

_SCRIPT = """\
#!/{venv}/bin/python
import sys
from {module} import {name}
if __name__ == '__main__':
    sys.argv[0] = sys.argv[0].removesuffix('.exe')
    sys.exit({call}())
"""
"""``PipScriptMaker.script_template`` of pip 26.3."""
_WRITTEN_BY_PIP = ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json")
_RESERVED = re.compile(rf"{VENV}/(bin/(python[0-9.]*|activate.*|Activate.*)|pyvenv\.cfg|lib64(/.*)?)")
_CHUNK = 2**20

LINKED_BYTES = 2**16
"""Size from which equal files of a wheel are hard links."""
MAX_COMPILED_BYTES = 8 * 2**20
"""Larger Python files have no bytecode: the compiler needs 350 times their size. Of 1,075 wheels the largest has 3.9 MB."""
_DAMAGE = (OSError, LookupError, ValueError, AssertionError, InstallerError, InvalidRecordEntry, configparser.Error)
"""What installer raises for damaged wheels."""
_HINT = "the wheel is damaged or hostile: report it to its project, and lock another version"
_RECORD_HINT = (
    "report it to its project, and lock another version; or, if the wheel has the sha256 of its lock and was published so, list"
    " the file in the recipe's [[wrong_record]]"
)


@dataclass(frozen=True)
class WheelContents:
    """What a wheel installs: sha256 of each file by its path in the image (empty if its RECORD has none), total size in bytes.

    ``requires`` are the names of distributions that it requires without an extra; ``executable`` the paths with that mode.
    """

    files: dict[str, str]
    size: int
    requires: tuple[str, ...]
    executable: tuple[str, ...] = ()


def read_contents(wheel: LockedWheel, path: Path, python: ImagePython) -> WheelContents:
    """List the files of a wheel without unpacking them.

    Raises:
        BadInput: it is damaged, or its layout is not that of a wheel.
        NotTrusted: a path leads out of the environment.
    """
    with _open(wheel, path) as source:
        listing = _Listing(wheel, python)
        listing.install(source)
        requires = re.findall(r"^Requires-Dist:\s*([\w.-]+)(?!.*extra ==)", source.read_dist_info("METADATA"), re.MULTILINE)
        size = sum(member.file_size for member in source.members())
    names = sorted({re.sub(r"[-_.]+", "-", name).lower() for name in requires})
    return WheelContents(listing.files, size, tuple(names), tuple(sorted(listing.executable)))


def install(
    wheel: LockedWheel,
    path: Path,
    layer: LayerWriter,
    bytecode: BytecodeWriter,
    without: frozenset[str] = frozenset(),
    wrong_record: Sequence[str] = (),
) -> None:
    """Write the files of a wheel into a layer, except the paths ``without``, and give its Python files to ``bytecode``.

    Contents are compared with the wheel's RECORD, except files that match a pattern in ``wrong_record``.

    Raises:
        BadInput: it is damaged, its layout is not that of a wheel, or a file does not have the sha256 of its RECORD.
        NotTrusted: a path leads out of the environment, or exists in the layer.
    """
    with _open(wheel, path, wrong_record) as source:
        _LayerDestination(wheel, layer, bytecode, without).install(source)


def read_file(wheel: LockedWheel, path: Path, member: str) -> bytes:
    """A file of a wheel by its name in the wheel."""
    with _open(wheel, path) as source:
        return source.read_member(member)


@contextmanager
def _open(wheel: LockedWheel, path: Path, wrong_record: Sequence[str] = ()) -> Iterator[_Wheel]:
    """Open a wheel. Errors name it."""
    try:
        with archives.open_wheel(path) as archive:
            yield _Wheel(archive, wrong_record)
    except Sm120kitError:
        raise
    except _DAMAGE as error:
        problem = error.args[-1] if isinstance(error, InstallerError) and error.args else error
        problem = str(problem) or "an entry of its entry_points.txt names no callable"  # of an assertion
        raise BadInput(f"{path} cannot be installed: {problem}", _HINT) from error


class _Member(io.RawIOBase):
    """A file of a wheel, opened when it is first read, and if ``compared``, compared with RECORD at its end."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, record: tuple[str, str, str], compared: bool) -> None:
        self._archive, self.info, self.compared = archive, info, compared
        self.path, self.recorded = record[0], record[1]

    def chunks(self) -> Iterator[bytes]:
        """The contents."""
        algorithm, _, expected = self.recorded.partition("=")
        digest = hashlib.new(algorithm) if expected and self.compared else None
        if digest is not None and not digest.digest_size:
            raise ValueError(f"its RECORD has a hash of any length: {algorithm}")
        with self._archive.open(self.info) as file:
            while chunk := file.read(_CHUNK):
                if digest is not None:
                    digest.update(chunk)
                yield chunk
        if digest is not None and base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() != expected:
            raise BadInput(f"{self._archive.filename}: {self.path} does not have the {algorithm} of its RECORD", _RECORD_HINT)

    def content(self) -> bytes:
        """All contents; see :meth:`chunks`."""
        return b"".join(self.chunks())


class _Wheel(WheelFile):
    """A wheel whose files are read when they are written. Files that pip writes itself are skipped, as pip does."""

    def __init__(self, archive: zipfile.ZipFile, wrong_record: Sequence[str]) -> None:
        super().__init__(archive)
        self._wrong_record = wrong_record

    def members(self) -> list[zipfile.ZipInfo]:
        """All files."""
        return [member for member in self._zipfile.infolist() if not member.is_dir()]

    def read_member(self, name: str) -> bytes:
        """The contents of a file."""
        return archives.read_member(self._zipfile, name)

    def rows(self) -> list[list[str]]:
        """The rows of RECORD."""
        return [row for row in csv.reader(self.read_dist_info("RECORD").splitlines()) if row]

    def get_contents(self) -> Iterator[tuple[tuple[str, str, str], Any, bool]]:
        records = {row[0]: (row[0], row[1] if len(row) > 1 else "", row[2] if len(row) > 2 else "") for row in self.rows()}
        written = {f"{self.dist_info_dir}/{name}" for name in _WRITTEN_BY_PIP}
        wrappers = {f"{self.data_dir}/scripts/{name}" for name in self._entry_points()}
        for member in self.members():
            mode = member.external_attr >> 16
            executable = bool(stat.S_ISREG(mode) and mode & 0o111)
            if member.filename in (self.data_dir, *(f"{self.data_dir}/{scheme}" for scheme in SCHEME_NAMES)):
                raise ValueError(f"{member.filename} is a file, not a directory")  # installer does not end at it
            if member.filename not in written | wrappers:
                record = records.get(member.filename, (member.filename, "", ""))
                compared = not any(fnmatchcase(member.filename, pattern) for pattern in self._wrong_record)
                yield record, _Member(self._zipfile, member, record, compared), executable

    def _entry_points(self) -> list[str]:
        if "entry_points.txt" not in self.dist_info_filenames:
            return []
        text = self.read_dist_info("entry_points.txt")
        return [name for name, *_ in installer.utils.parse_entrypoints(text)]


class _Environment(WheelDestination):
    """The venv of an image: where the files of a wheel lie, and what pip adds to them."""

    def __init__(self, wheel: LockedWheel, python: ImagePython) -> None:
        library = f"python{python.short_version}"
        self.site = f"{VENV}/lib/{library}/site-packages"
        # As pip's locations/_sysconfig.py has it for a venv.
        self._schemes = {
            "purelib": self.site,
            "platlib": self.site,
            "scripts": f"{VENV}/bin",
            "data": VENV,
            "headers": f"{VENV}/include/site/{library}/{wheel.name}",
        }
        self._installed: dict[str, tuple[str, str, str]] = {}
        self._generated: list[tuple[str, str, str]] = []
        self._rows: list[list[str]] = []

    def install(self, source: _Wheel) -> None:
        """Install a wheel."""
        import warnings

        self._rows = source.rows()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # bytecode in a wheel is not installed
            installer.install(source, self, {"INSTALLER": b"pip\n", "REQUESTED": b""})

    def write_script(self, name: str, module: str, attr: str, section: str) -> RecordEntry:
        content = _SCRIPT.format(venv=VENV, module=module, name=attr.partition(".")[0], call=attr).encode()
        return self._generate(f"{VENV}/bin/{name}", content, 0o755)

    def write_file(self, scheme: str, path: Any, stream: Any, is_executable: bool) -> RecordEntry:
        target = f"{self._schemes[scheme]}/{path}"
        if not isinstance(stream, _Member):
            return self._generate(target, stream.read(), 0o644)
        digest, size = stream.recorded, ""
        if scheme == "scripts":
            content = stream.content()
            if content.startswith(b"#!python"):
                content = f"#!/{VENV}/bin/python\n".encode() + content.partition(b"\n")[2]
                digest, size = _recorded(content), str(len(content))
            self.write(target, [content], len(content), 0o755 if is_executable else 0o644, digest)
        else:
            stated = digest if stream.compared else ""
            self.write(target, stream.chunks(), stream.info.file_size, 0o755 if is_executable else 0o644, stated)
        self._installed[stream.path] = (self._relative(target), digest, size)
        return RecordEntry(stream.path, None, None)

    def finalize_installation(self, scheme: str, record_file_path: str, records: Iterable[tuple[Any, RecordEntry]]) -> None:
        rows = []
        for row in self._rows:
            path, digest, size = self._installed.pop(row[0], (row[0], "", ""))
            unchanged = not size
            rows.append(
                (
                    path,
                    (row[1] if len(row) > 1 else "") if unchanged else digest,
                    (row[2] if len(row) > 2 else "") if unchanged else size,
                )
            )
        rows += self._generated + [(path, "", "") for path, *_ in self._installed.values()]
        text = io.StringIO(newline="")
        csv.writer(text).writerows(sorted(rows))
        content = text.getvalue().encode()
        self.write(f"{self._schemes[scheme]}/{record_file_path}", [content], len(content), 0o644, "")

    def write(self, path: str, chunks: Iterable[bytes], size: int, mode: int, digest: str) -> None:
        """Write a file of ``size`` bytes; ``digest`` in the form of RECORD."""
        raise NotImplementedError

    def _generate(self, path: str, content: bytes, mode: int) -> RecordEntry:
        digest = _recorded(content)
        self.write(path, [content], len(content), mode, digest)
        self._generated.append((self._relative(path), digest, str(len(content))))
        return RecordEntry(path, None, None)

    def _relative(self, path: str) -> str:
        below = path.removeprefix(f"{self.site}/")
        return below if below != path else posixpath.relpath(f"/{path}", f"/{self.site}")


class _Listing(_Environment):
    """Lists files without reading them."""

    def __init__(self, wheel: LockedWheel, python: ImagePython) -> None:
        super().__init__(wheel, python)
        self.files: dict[str, str] = {}
        self.executable: set[str] = set()

    def write(self, path: str, chunks: Iterable[bytes], size: int, mode: int, digest: str) -> None:
        self.files[path] = digest
        if mode & 0o111:
            self.executable.add(path)


class _LayerDestination(_Environment):
    """Writes files into a layer, and gives Python files in ``lib`` to the writer of bytecode.

    A large file that the wheel has under several names, as libraries by their versions, is written once, with hard links.
    """

    def __init__(self, wheel: LockedWheel, layer: LayerWriter, bytecode: BytecodeWriter, without: frozenset[str]) -> None:
        super().__init__(wheel, bytecode.python)
        self._wheel = wheel
        self._layer, self._bytecode, self._without = layer, bytecode, without
        self._large: dict[tuple[str, int], str] = {}

    def write(self, path: str, chunks: Iterable[bytes], size: int, mode: int, digest: str) -> None:
        if _RESERVED.fullmatch(path):
            raise NotTrusted(f"{self._wheel.filename} replaces /{path}, a part of the environment itself", _HINT)
        if path in self._without:
            return
        compiled = path.endswith(".py") and path.startswith(f"{VENV}/lib/") and size <= MAX_COMPILED_BYTES
        if compiled:
            chunks = [b"".join(chunks)]
        self._write_once(path, chunks, size, mode, digest)
        if compiled:
            (source,) = chunks
            self._bytecode.add(path, source)

    def _write_once(self, path: str, chunks: Iterable[bytes], size: int, mode: int, digest: str) -> None:
        if digest and size >= LINKED_BYTES and path != (first := self._large.setdefault((digest, mode), path)):
            for _ in chunks:  # compared with RECORD
                pass
            self._layer.hardlink(path, first, mode=mode)
            return
        self._layer.file(path, chunks, size, mode=mode)


def _recorded(content: bytes) -> str:
    """The sha256 of a file in the form of RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def winners(stages: Sequence[Sequence[LockedWheel]], contents: Mapping[LockedWheel, WheelContents]) -> dict[str, LockedWheel]:
    """The wheel whose file an image has, for each path that several wheels install with different contents.

    Wheels of a later stage replace files of earlier ones. Within a stage pip, without dependencies, installs in reverse order
    of names, and then again those that replace files of a wheel that they require.
    """
    owners: dict[str, list[LockedWheel]] = {}
    for stage in stages:
        for wheel in _in_order(stage, contents):
            for path in contents[wheel].files:
                owners.setdefault(path, []).append(wheel)
    several = {path: found for path, found in owners.items() if len(found) > 1}
    return {path: found[-1] for path, found in several.items() if len({contents[wheel].files[path] for wheel in found}) > 1}


def _in_order(stage: Sequence[LockedWheel], contents: Mapping[LockedWheel, WheelContents]) -> list[LockedWheel]:
    by_name = {wheel.name: wheel for wheel in stage}
    once = sorted(stage, key=lambda wheel: wheel.name, reverse=True)
    again = []
    for wheel in once:
        files = contents[wheel].files
        required = [
            contents[by_name[name]].files for name in contents[wheel].requires if name in by_name and by_name[name] != wheel
        ]
        if any(files[path] != other[path] for other in required for path in files.keys() & other.keys()):
            again.append(wheel)
    return [wheel for wheel in once if wheel not in again] + again
