"""What programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm120kit import console
from sm120kit.records import AppliedPatch, Tile


def test_records_are_objects_not_their_repr(capsys: pytest.CaptureFixture[str]) -> None:
    patch = AppliedPatch("cutlass", "slug", "0" * 64, "1" * 40)
    console.json_data({"patches": [patch], "at": Path("x/y"), "tile": Tile("dense", "nvfp4", 1, 2, 3, "none", False, "bf16")})
    said = json.loads(capsys.readouterr().out)
    assert said["patches"] == [{"project": "cutlass", "slug": "slug", "sha256": "0" * 64, "commit": "1" * 40}]
    assert said["at"] == "x/y"
    assert said["tile"]["k"] == 3
