"""Lockfiles: every input of a build by hash, in ``<recipe>.lock.json`` beside its recipe.

``recipe lock`` creates a lockfile, every build verifies it, and its sha256 is the build id. It names no host: each file is
known by its hash and can come from any index or directory.
"""

from sm120kit.recipes.lockfile._contents import (
    BASE_IMAGE_OPEN,
    FLASHINFER,
    FORMAT,
    assemble,
    constraints,
    make_closure,
    reusable_closure,
    root_requirements,
)
from sm120kit.recipes.lockfile._create import create
from sm120kit.recipes.lockfile._read import build_id, read, read_with_build_id, text
from sm120kit.recipes.lockfile._series_changes import series_changes
from sm120kit.recipes.lockfile._verify import differences, verify

__all__ = [
    "BASE_IMAGE_OPEN",
    "FLASHINFER",
    "FORMAT",
    "assemble",
    "build_id",
    "constraints",
    "create",
    "differences",
    "make_closure",
    "read",
    "read_with_build_id",
    "reusable_closure",
    "root_requirements",
    "series_changes",
    "text",
    "verify",
]
