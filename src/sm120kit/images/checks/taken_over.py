"""Take over results of checks from the record of another image of the same recipe, whose inputs they have in common.

Each check records which files of the Python environment it and its programs read, and which directories they listed, see
``suites/recorder.py``. A result holds for another image if settings and requirements are equal and none of these files differs.
That is decided only if the images differ in Python files and their metadata: what is compiled may be read in other ways.

The distribution metadata of a wheel that is packed again differs in its local version, in hashes of RECORD and in
``sm120kit.json``. The checks in :data:`WHOLE`, which compare these and every installed file, always run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadRecord
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import rootfs
from sm120kit.images.image_records import Check, Image, VerifiedImage
from sm120kit.images.local_images import LocalImages

if TYPE_CHECKING:
    from sm120kit.images.checks import ExpectedImage

WHOLE = ("owners", "versions", "files", "bytecode", "duplicates", "requirements")
"""Checks of the suite ``base`` whose input is every installed file, or the versions of all distributions."""

UNKNOWN = "*"
"""Begins the name of a program that a check started and that could not be followed."""

_NOTE = "taken over from "
_PYTHON = re.compile(r"/.*/site-packages/(.*\.pyi?|.*/__pycache__/[^/]+\.pyc)")


@dataclass(frozen=True)
class CheckRun:
    """A check that was run, as ``suite/name``: its process, seconds, what it read and listed, and the modules it imported.

    What a check in :data:`WHOLE` read is not kept.
    """

    check: str
    process: str
    seconds: float
    reads: tuple[str, ...]
    imports: tuple[str, ...]


@dataclass
class Recorded:
    """What the checks that run at present have recorded so far, see :class:`CheckRuns`."""

    runs: list[CheckRun] = field(default_factory=list)
    driver_stub: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckRuns:
    """All checks that ran in an image, in their order. ``inputs`` is from :func:`common_inputs`.

    ``driver_stub`` are the names in the stub of the driver, which follow from all libraries of the image.
    """

    inputs: str
    runs: tuple[CheckRun, ...]
    driver_stub: tuple[str, ...] = ()

    def reads(self) -> dict[str, frozenset[str]]:
        """What each check read, and the modules that earlier checks of its process imported."""
        imported: dict[str, frozenset[str]] = {}
        found = {}
        for run in self.runs:
            before = imported.get(run.process, frozenset())
            found[run.check] = before | {*run.reads, *run.imports}
            imported[run.process] = before | {*run.imports}
        return found


@dataclass(frozen=True)
class Baseline:
    """An image all of whose checks ran, and the files in which another one differs.

    ``changed`` are absolute paths of files in either image, without the metadata of distributions, which ``metadata`` has.
    ``added`` are the directories with more or fewer files.
    """

    verified: VerifiedImage
    runs: CheckRuns
    changed: frozenset[str]
    metadata: frozenset[str]
    added: frozenset[str]

    def taken_over(self) -> dict[str, Check]:
        """The results that hold for the other image, by ``suite/name``."""
        reads = self.runs.reads()
        differ = self.changed | self.added
        unknown = {name for name, paths in reads.items() if any(path.startswith(UNKNOWN) for path in paths)}
        results = {f"{check.suite}/{check.name}": check for check in self.verified.checks}
        whole = {f"base/{name}" for name in WHOLE}
        equal = (
            name for name, paths in reads.items() if name in results and name not in whole | unknown and not paths & differ
        )
        return {name: self._noted(results[name]) for name in equal}

    def results(self, *names: str) -> Iterator[tuple[Check, Mapping[str, str]]]:
        """The results of checks, by ``suite/name``, that hold for the other image."""
        for check in self.verified.checks:
            if f"{check.suite}/{check.name}" in names:
                yield self._noted(check), {}

    def of_device_code(self) -> Iterator[tuple[Check, Mapping[str, str]]]:
        """The results of the checks of compiled files, in which the images do not differ."""
        return self.results("flashinfer/device_code", "engine/b12x_code")

    def _noted(self, check: Check) -> Check:
        return replace(check, detail=f"{check.detail}; {self.note}".removeprefix("; "))

    @property
    def note(self) -> str:
        """The statement in a result that is taken over."""
        return f"{_NOTE}{self.verified.image.id}, inputs equal"

    @property
    def modules(self) -> tuple[str, ...]:
        """The Python modules that are changed or added, by name."""
        sources = sorted(path.partition("/site-packages/")[2] for path in self.changed if path.endswith(".py"))
        names = [path.removesuffix(".py").removesuffix("/__init__").split("/") for path in sources]
        usable = (name for name in names if all(map(str.isidentifier, name)) and name[-1] != "__main__")
        return tuple(map(".".join, usable))


def ran(checks: Iterable[Check]) -> list[str]:
    """The checks, as ``suite/name``, that were run, and whose results are not taken over."""
    return [f"{check.suite}/{check.name}" for check in checks if check.verdict != "not run" and _NOTE not in check.detail]


def common_inputs(image: Image, settings: Mapping[str, object], expected: ExpectedImage) -> str:
    """The digest of everything that checks compare an image with, but files, labels and local versions."""
    required = {
        key: value
        for key, value in asdict(expected).items()
        if key not in ("distributions", "read_all", "digests", "taken_over", "changed", "changed_modules")
    }
    versions = {name: version.partition("+")[0] for name, version in expected.distributions.items()}
    started = {key: value for key, value in settings.items() if key != "Labels"}
    return digest_of([image.platform, started, required, versions])


def write_runs(image: Image, runs: CheckRuns, workspace: Workspace) -> None:
    """Record what the checks of an image read, once all of them ran."""
    write_record(_path(image.content, workspace), runs)


def find_baseline(image: Image, inputs: str, suite: str, workspace: Workspace) -> Baseline | None:
    """The checked image of the same recipe and inputs that differs least, if it differs in Python files only."""
    found = [each for each in _candidates(image, suite, workspace) if each[1].inputs == inputs]
    baselines = [base for verified, runs in found if (base := _compared(verified, runs, image, workspace))]
    return min(baselines, key=lambda base: len(base.changed), default=None)


def _candidates(image: Image, suite: str, workspace: Workspace) -> Iterable[tuple[VerifiedImage, CheckRuns]]:
    """The checked images with a record of what their checks read."""
    for path in sorted((workspace.root / "images" / "verified").glob("*.reads.json")):
        with suppress(OSError, BadRecord):
            content = path.name.removesuffix(".reads.json")
            verified = read_record(VerifiedImage, path.with_name(f"{content}.json"))
            same = verified.image.labels.get("sm120kit.recipe") == image.labels.get("sm120kit.recipe")
            if verified.suite == suite and verified.image.content != image.content and same:
                yield verified, read_record(CheckRuns, path)


def _path(content: str, workspace: Workspace) -> Path:
    return workspace.root / "images" / "verified" / f"{content}.reads.json"


def _compared(verified: VerifiedImage, runs: CheckRuns, image: Image, workspace: Workspace) -> Baseline | None:
    store = LocalImages(workspace)
    if store.inspect(verified.image.id) is None:
        return None
    before, after = (_files(each, other, workspace) for each, other in ((verified.image, image), (image, verified.image)))
    if before is None or after is None:
        return None
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    metadata = {path for path in changed if ".dist-info/" in path}
    changed -= metadata
    if not all(map(_PYTHON.fullmatch, changed)):
        return None
    added = {path.rpartition("/")[0] for path in {*before} ^ {*after} if path in changed}
    return Baseline(verified, runs, frozenset(changed), frozenset(metadata), frozenset(added))


def _files(image: Image, other: Image, workspace: Workspace) -> dict[str, str] | None:
    """The digests of the files in the layers that only one of two images has; None if one is not unpacked."""
    layers = [layer for layer in image.layers if layer not in other.layers]
    if not all(rootfs.is_unpacked(layer, workspace) for layer in layers):
        return None
    found = rootfs.digests(rootfs.unpacked(layers, workspace))
    return None if layers and not found else found
