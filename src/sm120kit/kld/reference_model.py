"""Distributions of a reference model in a file, so that reference and test need not be loaded at the same time.

A zip archive: ``header.json``, and for each window and block of its positions a member ``WINDOW/FIRST`` with a numpy array,
compressed by zstandard with the bytes of each position in its values grouped. Full distributions are float32 logits; those of a
BF16 model have 16 zero bits, which compress away. Otherwise the ``top`` most likely tokens are stored, as ids and float32
log-probabilities.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

from sm120kit.core.errors import BadRecord, RequirementMissing
from sm120kit.core.outside import parse_json
from sm120kit.core.records import json_text
from sm120kit.kld._kld_records import DivergenceSummary, Windowing
from sm120kit.kld._tokens import TokenizedText
from sm120kit.kld.divergence import FullDistributions, TopLogProbabilities, blocks, normalized

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "sm120kit.kld-reference/1"
_HEADER = "header.json"
_NO_TOKEN = 2**32 - 1
"""Id of an unused entry in a list of tokens."""


@dataclass(frozen=True)
class ReferenceText:
    """What a reference was computed on: its model, the text, its division, and how many tokens are stored; -1 is all."""

    model: str
    text: TokenizedText
    windowing: Windowing
    top: int


class ReferenceWriter:
    """Adds windows to a reference that is being written."""

    def __init__(self, archive: zipfile.ZipFile, top: int) -> None:
        """Begin with no windows."""
        self._archive, self._top, self._windows = archive, top, 0

    def add(self, window: FullDistributions | TopLogProbabilities) -> None:
        """Append a window's distributions."""
        number = self._windows
        if isinstance(window, TopLogProbabilities):
            self._write(f"{number}/0", _listed(window.positions))
        else:
            for rows in blocks(*window.shape):
                self._write(f"{number}/{rows.start}", self._block(window[rows]))
        self._windows += 1

    def _block(self, logits: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        import numpy as np

        if self._top == -1:
            return (np.asarray(logits, dtype=np.float32),)
        values = normalized(logits)
        count = min(self._top, values.shape[1])
        ids = np.argpartition(-values, count - 1, axis=1)[:, :count].astype(np.uint32)
        return ids, np.take_along_axis(values, ids.astype(np.int64), axis=1).astype(np.float32)

    def _write(self, name: str, arrays: tuple[NDArray[Any], ...]) -> None:
        packed = io.BytesIO()
        for array in arrays:
            packed.write(f"{array.dtype.str} {len(array)} {array.shape[1]}\n".encode())
            packed.write(array.view("u1").reshape(-1, array.itemsize).T.tobytes())
        self._archive.writestr(name, zstandard.ZstdCompressor(level=1).compress(packed.getvalue()))

    def finish(self, computed: ReferenceText, noise: DivergenceSummary) -> None:
        """Write the header, with the difference of the reference from itself in other batches."""
        header = {"format": FORMAT, **asdict(computed), "noise": asdict(noise)}
        self._archive.writestr(_HEADER, json_text(header), zipfile.ZIP_DEFLATED)


@contextmanager
def writer(path: Path, top: int) -> Iterator[ReferenceWriter]:
    """Write a reference to ``path``, which appears when the block has ended without an error.

    Raises:
        RequirementMissing: numpy is not installed.
    """
    _require_numpy()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:50]}.", delete=False) as new:
        partial = Path(new.name)
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            yield ReferenceWriter(archive, top)
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class SavedReference:
    """A reference in a file. It is a model to compare, of the windows in the file only."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            BadRecord: the file is not a reference, or is damaged.
            RequirementMissing: numpy is not installed.
        """
        from pydantic import TypeAdapter

        _require_numpy()
        try:
            self._archive = zipfile.ZipFile(path)
            header = parse_json(self._archive.read(_HEADER))
            if header.get("format") != FORMAT:
                raise ValueError(f"format {header.get('format')!r}; this sm120kit reads {FORMAT}")
            computed = TypeAdapter(ReferenceText).validate_python(
                {name: header[name] for name in ("model", "text", "windowing", "top")}
            )
            self.noise = TypeAdapter(DivergenceSummary).validate_python(header["noise"])
        except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
            raise BadRecord(f"{path} is not a reference: {error}", "write one with sm120kit kld REFERENCE --save") from error
        self.name, self.text, self.windowing, self.top = computed.model, computed.text, computed.windowing, computed.top
        self._path = path
        self._members: dict[int, list[tuple[int, str]]] = {}
        for name in self._archive.namelist():
            window, _, first = name.partition("/")
            if first:
                self._members.setdefault(int(window), []).append((int(first), name))
        starts = range(0, self.windowing.windows * self.windowing.stride_tokens, self.windowing.stride_tokens)
        self._numbers = {
            self.text.tokens[start : start + self.windowing.window_tokens]: number for number, start in enumerate(starts)
        }

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[FullDistributions | TopLogProbabilities]:
        """The stored distributions of windows of its own text."""
        return [self._window(sorted(self._members[self._numbers[tuple(window)]])) for window in tokens]

    def _window(self, members: Sequence[tuple[int, str]]) -> FullDistributions | TopLogProbabilities:
        if self.top == -1:
            return _StoredRows(self, members)
        return TopLogProbabilities([position for _, name in members for position in _positions(*self.arrays(name))])

    def arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        """The arrays of a member.

        Raises:
            BadRecord: the file is damaged.
        """
        import numpy as np

        try:
            packed = io.BytesIO(zstandard.ZstdDecompressor().decompress(self._archive.read(name)))
            arrays = []
            while header := packed.readline():
                kind, rows, columns = header.split()
                dtype, count = np.dtype(kind.decode()), int(rows) * int(columns)
                grouped = np.frombuffer(packed.read(count * dtype.itemsize), dtype=np.uint8).reshape(dtype.itemsize, count)
                arrays.append(np.ascontiguousarray(grouped.T).view(dtype).reshape(int(rows), int(columns)))
        except (OSError, ValueError, TypeError, zipfile.BadZipFile, zstandard.ZstdError) as error:
            raise BadRecord(f"{self._path} is damaged at {name}: {error}", "compute the reference again") from error
        return tuple(arrays)


class _StoredRows:
    """Full distributions of a window in a file. The last block that was read is kept."""

    def __init__(self, saved: SavedReference, members: Sequence[tuple[int, str]]) -> None:
        self._saved, self._members = saved, members
        self._read: tuple[str, NDArray[Any]] = members[-1][1], saved.arrays(members[-1][1])[0]
        self.shape: tuple[int, ...] = (members[-1][0] + len(self._read[1]), self._read[1].shape[1])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        import numpy as np

        parts = []
        ends = [*(first for first, _ in self._members[1:]), self.shape[0]]
        for (first, name), end in zip(self._members, ends, strict=True):
            if first < rows.stop and end > rows.start:
                if self._read[0] != name:
                    self._read = name, self._saved.arrays(name)[0]
                parts.append(self._read[1][max(rows.start - first, 0) : rows.stop - first])
        return np.concatenate(parts)


def _listed(positions: Sequence[Mapping[int, float]]) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np

    longest = max(map(len, positions))
    ids = np.full((len(positions), longest), _NO_TOKEN, dtype=np.uint32)
    values = np.full((len(positions), longest), -np.inf, dtype=np.float32)
    for number, position in enumerate(positions):
        ids[number, : len(position)], values[number, : len(position)] = list(position), list(position.values())
    return ids, values


def _positions(ids: NDArray[Any], values: NDArray[Any]) -> list[Mapping[int, float]]:
    return [
        {token: value for token, value in zip(*pair, strict=True) if token != _NO_TOKEN}
        for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise RequirementMissing("numpy is not installed", "pip install 'sm120kit[kld]'") from error
