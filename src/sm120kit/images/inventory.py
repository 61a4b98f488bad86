"""Local images that sm120kit built or pulled, each with the status of its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm120kit.core.state import Workspace, read_record
from sm120kit.images import checks
from sm120kit.images.context import LABEL
from sm120kit.images.docker import Daemon
from sm120kit.images.records import Check, Image, VerifiedImage


class CheckStatus(StrEnum):
    """Whether a local image is verified."""

    VERIFIED = "verified"
    OUTDATED = "verified by older checks"
    UNVERIFIED = "not verified"


@dataclass(frozen=True)
class LocalImage:
    """An image in the daemon with its tags. ``checks`` are the results on record, by the current suite or an older one."""

    image: Image
    tags: tuple[str, ...]
    standing: CheckStatus
    checks: tuple[Check, ...] = ()


def local_images(daemon: Daemon, workspace: Workspace) -> tuple[LocalImage, ...]:
    """List all images in the daemon that carry sm120kit's labels, sorted by recipe; also those without a record here.

    Raises:
        DaemonUnreachable: the daemon does not answer.
    """
    images = []
    for image, tags in daemon.images(f"{LABEL}context"):
        record = checks.record_path(workspace, image)
        if not record.is_file():
            images.append(LocalImage(image, tags, CheckStatus.UNVERIFIED))
            continue
        verified = read_record(VerifiedImage, record)
        current = verified.suite == checks.suite_digest(image.labels.get(f"{LABEL}kind", ""))
        images.append(LocalImage(image, tags, CheckStatus.VERIFIED if current else CheckStatus.OUTDATED, verified.checks))
    return tuple(sorted(images, key=lambda local: (local.image.labels.get(f"{LABEL}recipe", ""), local.tags, local.image.id)))


def check_summary(results: Sequence[Check]) -> str:
    """Count checks by result: ``19 passed, 2 not run``."""
    return ", ".join(f"{count} {result}" for result, count in Counter(check.verdict for check in results).items())
