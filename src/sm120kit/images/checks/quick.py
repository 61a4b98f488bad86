"""Quick checks of an image that differs from a checked one in Python files only, as by a patch.

They are the checks that run no code of the image, and the import of each changed module. The others are recorded as not run,
until ``sm120kit verify image`` runs them.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from sm120kit.core.errors import BadRecord
from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import _rootfs
from sm120kit.images.image_records import Check, CheckResult, Image, VerifiedImage
from sm120kit.images.local_images import LocalImages

_LEFT = "`sm120kit verify image` runs it; it passed in "
_PYTHON = re.compile(r"/.*/site-packages/(.*\.pyi?|.*/__pycache__/[^/]+\.pyc)")


@dataclass(frozen=True)
class Baseline:
    """An image that passed all checks, and the files in which another one differs.

    ``changed`` are absolute paths of files in either image, with the metadata of distributions.
    """

    verified: VerifiedImage
    changed: frozenset[str]

    @property
    def note(self) -> str:
        """Why a check is not run."""
        files = sum(path.endswith(".py") for path in self.changed)
        return f"{_LEFT}{self.verified.image.id}, from which this image differs in {files} Python files"

    @property
    def modules(self) -> tuple[str, ...]:
        """The Python modules that are changed or added, by name."""
        sources = sorted(path.partition("/site-packages/")[2] for path in self.changed if path.endswith(".py"))
        names = [path.removesuffix(".py").removesuffix("/__init__").split("/") for path in sources]
        usable = (name for name in names if all(map(str.isidentifier, name)) and name[-1] != "__main__")
        return tuple(map(".".join, usable))

    def left(self, *names: str) -> Iterator[Check]:
        """Checks that are not run, by ``suite/name``, of those that the checked image has."""
        for check in self.verified.checks:
            if f"{check.suite}/{check.name}" in names:
                yield Check(check.suite, check.name, CheckResult.NOT_RUN, self.note)


def left_out(checks: Iterable[Check]) -> list[str]:
    """The checks, as ``suite/name``, that quick checks of an image left out."""
    return [f"{check.suite}/{check.name}" for check in checks if check.detail.startswith(_LEFT)]


def find_baseline(image: Image, suite: str, workspace: Workspace) -> Baseline | None:
    """The image of the same recipe that passed all checks and differs least, if it differs in Python files only."""
    found = (_compared(verified, image, workspace) for verified in _candidates(image, suite, workspace))
    return min(filter(None, found), key=lambda base: len(base.changed), default=None)


def _candidates(image: Image, suite: str, workspace: Workspace) -> Iterator[VerifiedImage]:
    for path in sorted((workspace.root / "images" / "verified").glob("*.json")):
        with suppress(OSError, BadRecord):
            verified = read_record(VerifiedImage, path)
            same = verified.image.labels.get("sm120kit.recipe") == image.labels.get("sm120kit.recipe")
            if same and verified.suite == suite and verified.image.content != image.content and not left_out(verified.checks):
                yield verified


def _compared(verified: VerifiedImage, image: Image, workspace: Workspace) -> Baseline | None:
    if LocalImages(workspace).inspect(verified.image.id) is None or verified.image.platform != image.platform:
        return None
    before, after = (_files(each, other, workspace) for each, other in ((verified.image, image), (image, verified.image)))
    if before is None or after is None:
        return None
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    if not all(".dist-info/" in path or _PYTHON.fullmatch(path) for path in changed):
        return None
    return Baseline(verified, frozenset(changed))


def _files(image: Image, other: Image, workspace: Workspace) -> dict[str, str] | None:
    """The digests of the files in the layers that only one of two images has; None if one is not unpacked."""
    layers = [layer for layer in image.layers if layer not in other.layers]
    if not all(_rootfs.is_unpacked(layer, workspace) for layer in layers):
        return None
    found = _rootfs.digests(_rootfs.unpacked(layers, workspace))
    return None if layers and not found else found
