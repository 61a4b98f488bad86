"""Local images that sm120kit built or pulled, each with the status of its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.image_inputs import LABEL
from sm120kit.images.image_records import Check, Image, ImageStore, VerifiedImage


class CheckStatus(StrEnum):
    """Whether a local image is verified."""

    VERIFIED = "verified"
    OUTDATED = "verified by older checks"
    UNVERIFIED = "not verified"


@dataclass(frozen=True)
class LocalImage:
    """An image with its tags in a store. ``checks`` are the results on record, by the current suite or an older one."""

    image: Image
    tags: tuple[str, ...]
    standing: CheckStatus
    checks: tuple[Check, ...] = ()
    store: str = "docker"


def local_images(stores: Mapping[str, ImageStore], workspace: Workspace) -> tuple[LocalImage, ...]:
    """List all images that carry sm120kit's labels, sorted by recipe; also those without a record here.

    Raises:
        DaemonUnreachable: the daemon stopped responding.
    """
    images = [
        _local_image(image, tags, name, workspace)
        for name, store in stores.items()
        for image, tags in store.images(f"{LABEL}context")
    ]
    return tuple(sorted(images, key=lambda local: (local.image.labels.get(f"{LABEL}recipe", ""), local.tags, local.image.id)))


def _local_image(image: Image, tags: tuple[str, ...], store: str, workspace: Workspace) -> LocalImage:
    record = checks.record_path(workspace, image)
    if not record.is_file():
        return LocalImage(image, tags, CheckStatus.UNVERIFIED, store=store)
    verified = read_record(VerifiedImage, record)
    current = verified.suite == checks.suite_digest(image.labels.get(f"{LABEL}kind", ""))
    return LocalImage(image, tags, CheckStatus.VERIFIED if current else CheckStatus.OUTDATED, verified.checks, store)


def check_summary(results: Sequence[Check]) -> str:
    """Count checks by result: ``19 passed, 2 not run``."""
    return ", ".join(f"{count} {result}" for result, count in Counter(check.verdict for check in results).items())
