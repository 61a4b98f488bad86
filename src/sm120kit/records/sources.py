"""Pinned sources, the git trees that they become, and how patches stand to them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True)
class SdistPin:
    """A source distribution on a Python index, by hash."""

    project: str
    distribution: str
    version: str
    sha256: str


@dataclass(frozen=True)
class GitPin:
    """A commit of a git repository; submodules by the commits it records."""

    project: str
    url: str
    commit: str
    version: str


Pin = SdistPin | GitPin


@dataclass(frozen=True)
class Inside:
    """A project that another one carries, with a series of its own: CUTLASS below ``path`` of FlashInfer."""

    project: str
    path: str
    version: str


@dataclass(frozen=True)
class Checkout:
    """A pinned source as a git repository with one deterministic base commit."""

    pin: Pin
    repository: Path
    commit: str
    tree: str


@dataclass(frozen=True)
class AppliedPatch:
    """One patch of a series as it was applied."""

    project: str
    slug: str
    sha256: str
    commit: str


@dataclass(frozen=True)
class PatchedTree:
    """A checkout with the overrides and every applicable patch on top, as a commit in the same repository."""

    checkout: Checkout
    inside: tuple[Inside, ...]
    commit: str
    tree: str
    patches: tuple[AppliedPatch, ...]


class PatchState(StrEnum):
    """How a patch stands to one pinned version."""

    APPLIES = "applies"
    ALREADY_UPSTREAM = "already upstream"
    NOT_FOR_THIS_VERSION = "not for this version"
    CONFLICTS = "conflicts"


@dataclass(frozen=True)
class PatchStatus:
    """A patch's state on one pin; ``detail`` names the hunk, file and line of a conflict."""

    project: str
    slug: str
    version: str
    state: PatchState
    detail: str = ""
