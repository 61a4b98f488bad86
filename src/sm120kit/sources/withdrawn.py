"""Locked files that the package index has withdrawn: yanked (PEP 592), replaced by other content, or no longer listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sm120kit.core import reporting
from sm120kit.core.errors import FetchFailed
from sm120kit.sources.index import ListedFile
from sm120kit.sources.releases import Releases
from sm120kit.sources.source_records import LockedWheel


@dataclass
class Withdrawals:
    """Compares locked wheels with what is listed; the list of a distribution is read once.

    A distribution that is not listed at all is unknown, not withdrawn: it may be at an index that is not configured. When a
    source cannot be read, that is reported, and nothing more is compared.
    """

    releases: Releases
    _listed: dict[str, list[ListedFile]] = field(default_factory=dict)
    _unreadable: bool = False

    def of(self, wheels: Iterable[LockedWheel]) -> Iterator[str]:
        """A line for each wheel that was withdrawn."""
        for wheel in sorted({*wheels}, key=lambda wheel: wheel.filename):
            if reason := _reason(wheel, self._files(wheel.name)):
                yield f"{wheel.filename}: {reason}"

    def _files(self, distribution: str) -> list[ListedFile]:
        if distribution not in self._listed:
            self._listed[distribution] = [] if self._unreadable else self._read(distribution)
        return self._listed[distribution]

    def _read(self, distribution: str) -> list[ListedFile]:
        try:
            return self.releases.every_wheel(distribution)
        except FetchFailed as error:
            reporting.warn(f"locked files are not compared with the package index: {error.message}")
            self._unreadable = True
            return []


def _reason(wheel: LockedWheel, listed: list[ListedFile]) -> str:
    """Why a locked wheel is withdrawn; empty if it is not. Several sources may list files of one name."""
    same = [file for file in listed if file.filename == wheel.filename]
    if not same:
        return "no longer listed" if listed else ""
    hashes = {file.location.sha256 for file in same}
    if not hashes & {wheel.sha256, ""}:
        return f"listed with another sha256 than the locked {wheel.sha256}: {', '.join(sorted(hashes))}"
    own = [file for file in same if file.location.sha256 in (wheel.sha256, "")]
    return "yanked" if all(file.yanked for file in own) else ""
