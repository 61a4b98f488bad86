"""Pictures of receipts: markers stand where the samples say, and the same receipts give the same bytes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sweep import SWEEP

from sm120kit.bench import plot
from sm120kit.errors import StateUnwritable

pytest.importorskip("matplotlib", reason="the extra plot is not installed")
SVG = "{http://www.w3.org/2000/svg}"


def places(root: ElementTree.Element, group: str) -> list[tuple[float, float]]:
    """Where the markers of a group are, in the picture's own units."""
    found = next(g for g in root.iter(f"{SVG}g") if g.get("id") == group)
    return [(float(use.get("x", "")), float(use.get("y", ""))) for use in found.iter(f"{SVG}use")]


def scale(root: ElementTree.Element, panel: int, axis: str) -> tuple[float, float]:
    """(value at 0, value per unit) of an axis, by its own ticks."""
    axes = next(g for g in root.iter(f"{SVG}g") if g.get("id") == f"axes_{panel}")
    number = 1 if axis == "x" else 2
    group = next(
        g for g in axes.iter(f"{SVG}g") if re.fullmatch(rf"matplotlib\.axis_{2 * (panel - 1) + number}", g.get("id", ""))
    )
    ticks = []
    for tick in group.iter(f"{SVG}g"):
        if (tick.get("id") or "").startswith(f"{axis}tick_"):
            use = next(iter(tick.iter(f"{SVG}use")))
            label = "".join(next(iter(tick.iter(f"{SVG}text"))).itertext())
            ticks.append((float(use.get(axis, "")), float(label)))
    (p0, v0), (p1, v1) = ticks[0], ticks[-1]
    per = (v1 - v0) / (p1 - p0)
    return v0 - p0 * per, per


def test_the_markers_of_a_picture_stand_where_the_samples_say(tmp_path: Path) -> None:
    plot.write(tmp_path / "a.svg", [("a", SWEEP)])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    for panel, group, series in ((1, "0-0-0", 0), (2, "0-1-0", 4), (3, "1-0-0", 2)):
        at, per_x = scale(root, panel, "x")
        up, per_y = scale(root, panel, "y")
        drawn = [(at + per_x * x, up + per_y * y) for x, y in places(root, group)]
        points = plot.series([("a", SWEEP)])[series].points
        expected = [(point.x, pytest.approx(point.rates[0], rel=0.001)) for point in points if point.rates]
        assert [(round(x), y) for x, y in drawn] == expected, group
    # Failures are marked and counted, in words that stay text.
    assert len(places(root, "0-0-0-failed")) == 2
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "1 of 4 failed" in words and "8 of 8 failed, rate unknown" in words and "tok/s together" in words
    assert "tiny, w, thinking off" in words


def test_the_same_receipts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        plot.write(tmp_path / name, [("mine", SWEEP), ("other", replace(SWEEP, complete=False))])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ", partial" in (tmp_path / "a.svg").read_text()


def test_what_cannot_be_drawn_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(StateUnwritable, match="none"):
        plot.require(tmp_path / "none" / "a.svg")
    with pytest.raises(StateUnwritable, match="is a directory"):
        plot.require(tmp_path)
