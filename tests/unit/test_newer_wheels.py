"""Newer releases of the wheels that recipes pin."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit.core.workspace import Workspace
from sm120kit.sources.run_options import Options
from sm120kit.wheels.newer_wheels import newer_wheels


def test_newer_releases_of_pinned_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a recipe names, and those of its closure that decide what runs; pre-releases do not count."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for name in ("b12x-99.0", "b12x-98.0", "b12x-100.0rc1", "torch-0.1", "nvidia_nccl_cu13-99.1", "nvidia_cutlass_dsl-4.6.0"):
        (shelf / f"{name}-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    found = newer_wheels(Options(Workspace.open(tmp_path / "state")))
    assert {(each.distribution, each.newest, each.days) for each in found} == {
        ("b12x", "99.0", None),
        ("nvidia-nccl-cu13", "99.1", None),
        ("nvidia-cutlass-dsl", "4.6.0", None),
        ("cutlass", "4.6.0", None),
    }
    assert any((each.distribution, each.pinned) == ("cutlass", "4.5.0") for each in found)
    assert any(each.pinned == "0.8.3" and "sglang-0.5.11-b12x" in each.recipes for each in found)
