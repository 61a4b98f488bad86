"""Checks of images: what an image must be, the programs that run in it, and the record that it passed them."""

from sm120kit.images.checks._expected_image import CLAIMS, ExpectedImage, expected_image
from sm120kit.images.checks._image_checks import CheckReport, record_path, require_verified, run_checks, verify, verify_once
from sm120kit.images.checks._suite_programs import suite_digest

__all__ = [
    "CLAIMS",
    "CheckReport",
    "ExpectedImage",
    "expected_image",
    "record_path",
    "require_verified",
    "run_checks",
    "suite_digest",
    "verify",
    "verify_once",
]
