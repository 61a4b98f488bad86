"""A module's name states its reason: none occurs twice in sm120kit and the laboratory."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src"
SUITES = ROOT / "sm120kit" / "images" / "checks" / "suites"
"""Copied into containers: one folder a kind of image, with files of the same names, which the runner finds by them."""

EXCEPTED = ("__init__.py", "__main__.py", "commands.py")
"""The last is the table of commands of a distribution, which its entry point names."""


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for package in ("sm120kit", "sm12x_lab"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in EXCEPTED and not path.is_relative_to(SUITES):
                places[path.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200 and {name: paths for name, paths in places.items() if len(paths) > 1} == {}
