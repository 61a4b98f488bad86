"""Checks of images: what an image must be, the programs that run in it, and the record that it passed them."""

from sm120kit.images.checks._expected_image import ExpectedImage
from sm120kit.images.checks._image_checks import CheckReport, record_path, require_verified, verify
from sm120kit.images.checks._outside import signature, unsigned_checks
from sm120kit.images.checks._suite_programs import required_suites, suite_digest

__all__ = [
    "CheckReport",
    "ExpectedImage",
    "record_path",
    "require_verified",
    "required_suites",
    "signature",
    "suite_digest",
    "unsigned_checks",
    "verify",
]
