"""Distributions of a reference model in a file, so that reference and test need not be loaded at the same time.

An archive of numpy's (``.npz``) with a member ``header.json``, and for each window the ids of the most likely tokens of its
positions, and their float32 log-probabilities.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120kit.core.atomic_writes import replacing
from sm120kit.core.errors import BadRecord, RequirementMissing
from sm120kit.core.outside import open_found, parse_json
from sm120kit.core.records import json_text
from sm120kit.kld._kld_records import DivergenceSummary, Windowing
from sm120kit.kld._tokens import TokenizedText
from sm120kit.kld.divergence import FullDistributions, TopLogProbabilities, blocks, normalized

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "sm120kit.kld-reference/2"
_HEADER = "header.json"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What damaged archives make zipfile and numpy raise."""
_NO_TOKEN = 2**32 - 1
"""Id of an unused entry in a list of tokens."""


@dataclass(frozen=True)
class ReferenceText:
    """What a reference was computed on: its model, the text, its division, and how many tokens are stored of each
    position; -1 is all that a server lists."""

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
        import numpy as np

        listed = _listed(window.positions) if isinstance(window, TopLogProbabilities) else _most_likely(window, self._top)
        for name, array in zip(("ids", "values"), listed, strict=True):
            with self._archive.open(f"{self._windows}.{name}.npy", "w") as member:
                np.save(member, array)
        self._windows += 1

    def finish(self, computed: ReferenceText, noise: DivergenceSummary) -> None:
        """Write the header, with the difference of the reference from itself in other batches."""
        header = {"format": FORMAT, **asdict(computed), "noise": asdict(noise)}
        self._archive.writestr(_HEADER, json_text(header))


@contextmanager
def writer(path: Path, top: int) -> Iterator[ReferenceWriter]:
    """Write a reference to ``path``, which appears when the block has ended without an error.

    Raises:
        RequirementMissing: numpy is not installed.
    """
    _require_numpy()
    with (
        replacing(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, allowZip64=True, compresslevel=1) as archive,
    ):
        yield ReferenceWriter(archive, top)


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
        import numpy as np

        try:
            self._arrays: Any = np.load(open_found(path), allow_pickle=False)
            header = parse_json(self._arrays.zip.read(_HEADER))
            if header.get("format") != FORMAT:
                raise ValueError(f"format {header.get('format')!r}; this sm120kit reads {FORMAT}")
            self.noise = TypeAdapter(DivergenceSummary).validate_python(header.pop("noise"))
            del header["format"]
            computed = TypeAdapter(ReferenceText).validate_python(header)
        except (*_DAMAGE, AttributeError) as error:
            raise BadRecord(f"{path} is not a reference: {error}", "write one with sm120kit kld REFERENCE --save") from error
        self.name, self.text, self.windowing, self._path = computed.model, computed.text, computed.windowing, path
        starts = range(0, self.windowing.windows * self.windowing.stride_tokens, self.windowing.stride_tokens)
        self._numbers = {
            self.text.tokens[start : start + self.windowing.window_tokens]: number for number, start in enumerate(starts)
        }

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[TopLogProbabilities]:
        """The stored distributions of windows of its own text.

        Raises:
            BadRecord: the file is damaged.
        """
        return [self._window(self._numbers[tuple(window)]) for window in tokens]

    def _window(self, number: int) -> TopLogProbabilities:
        try:
            return TopLogProbabilities(_positions(self._arrays[f"{number}.ids"], self._arrays[f"{number}.values"]))
        except (*_DAMAGE, TypeError, MemoryError) as error:
            message = f"{self._path} is damaged at window {number}: {error}"
            raise BadRecord(message, "compute the reference again") from error


def _most_likely(window: FullDistributions, top: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and log-probabilities of the ``top`` most likely tokens of each position."""
    import numpy as np

    parts = []
    for rows in blocks(*window.shape):
        values = normalized(window[rows])
        count = min(top, values.shape[1])
        ids = np.argpartition(-values, count - 1, axis=1)[:, :count]
        parts.append((ids.astype(np.uint32), np.take_along_axis(values, ids, axis=1).astype(np.float32)))
    ids, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, values


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
