"""Local images that sm120kit built or pulled, each with the status of its checks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.image_inputs import LABEL
from sm120kit.images.image_records import Check, Image, VerifiedImage
from sm120kit.images.local_images import LocalImages


class CheckStatus(StrEnum):
    """Whether a local image is verified."""

    VERIFIED = "verified"
    OUTDATED = "verified by older checks"
    UNVERIFIED = "not verified"


@dataclass(frozen=True)
class LocalImage:
    """An image with its tags. ``checks`` are the results on record, by the current suite or an older one."""

    image: Image
    tags: tuple[str, ...]
    standing: CheckStatus
    checks: tuple[Check, ...] = ()


def local_images(workspace: Workspace) -> tuple[LocalImage, ...]:
    """List all images of the state directory that carry sm120kit's labels, sorted by recipe; also those without a record."""
    listed = LocalImages(workspace).images(f"{LABEL}context")
    images = [_local_image(image, tags, workspace) for image, tags in listed]
    return tuple(sorted(images, key=lambda local: (local.image.labels.get(f"{LABEL}recipe", ""), local.tags, local.image.id)))


def _local_image(image: Image, tags: tuple[str, ...], workspace: Workspace) -> LocalImage:
    record = checks.record_path(workspace, image)
    if not record.is_file():
        return LocalImage(image, tags, CheckStatus.UNVERIFIED)
    verified = read_record(VerifiedImage, record)
    current = verified.suite == checks.suite_digest(image.labels.get(f"{LABEL}kind", ""))
    return LocalImage(image, tags, CheckStatus.VERIFIED if current else CheckStatus.OUTDATED, verified.checks)


def check_summary(results: Sequence[Check]) -> str:
    """Count checks by result: ``19 passed, 2 not run``."""
    return ", ".join(f"{count} {result}" for result, count in Counter(check.verdict for check in results).items())
