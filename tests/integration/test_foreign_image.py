"""An image for another machine on a system where no emulator can be registered, as on Linux before 6.7."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm120kit.core.errors import RequirementMissing
from sm120kit.images import local_images
from sm120kit.recipes.cross_tools import CrossTools


def test_refusal_names_kernel_and_emulator(tmp_path: Path) -> None:
    """The kernel opens the emulator when it registers it; without one, it refuses at the same place as an old kernel."""
    layers = []
    for name in ("root", "points"):
        (tmp_path / name / "tmp").mkdir(parents=True)
        layers.append(tmp_path / name)
    absent = CrossTools("aarch64", tmp_path / "absent")
    container = local_images._Container(tuple(layers), tmp_path / "work", {}, os.getuid(), os.getgid(), {}, "/", absent)
    with pytest.raises(RequirementMissing, match="it registers no emulator for programs of another machine") as caught:
        local_images._isolated(container, ["true"])
    assert "Linux 6.7 or newer" in caught.value.hint
    assert "unshare: " in caught.value.message
