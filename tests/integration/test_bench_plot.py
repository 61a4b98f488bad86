"""Plot files: positions of markers, and reproducible bytes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sweep import SWEEP, cell, receipt_of, sample

from sm120kit.bench import plot
from sm120kit.core.errors import StateUnwritable

pytest.importorskip("matplotlib", reason="the extra plot is not installed")
RATES = ((1, 10.0), (2, 9.0), (4, 4.6))
"""Users, and tokens per second of each: 10, 18, 18.4 together."""
SVG = "{http://www.w3.org/2000/svg}"


def marker_positions(root: ElementTree.Element, group: str) -> list[tuple[float, float]]:
    """Positions of the markers of a group, in units of the image."""
    element = next(g for g in root.iter(f"{SVG}g") if g.get("id") == group)
    return [(float(use.get("x", "")), float(use.get("y", ""))) for use in element.iter(f"{SVG}use")]


def scale(root: ElementTree.Element, panel: int, axis: str) -> tuple[float, float]:
    """(value at 0, value per unit) of an axis, by its ticks."""
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


def test_markers_are_at_the_measured_rates(tmp_path: Path) -> None:
    plot.write(tmp_path / "a.svg", [("a", SWEEP)])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    for panel, group, series in ((1, "0-0-0", 0), (2, "0-1-0", 4), (3, "1-0-0", 2)):
        x0, per_x = scale(root, panel, "x")
        y0, per_y = scale(root, panel, "y")
        drawn = [(x0 + per_x * x, y0 + per_y * y) for x, y in marker_positions(root, group)]
        points = plot.series([("a", SWEEP)])[series].points
        expected = [(point.x, pytest.approx(point.rates[0], rel=0.001)) for point in points if point.rates]
        assert [(round(x), y) for x, y in drawn] == expected, group
    # Failures are marked and counted in text.
    assert len(marker_positions(root, "0-0-0-failed")) == 2
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "1 of 4 failed" in texts and "8 of 8 failed, rate unknown" in texts and "tok/s together" in texts
    assert "tiny, w, thinking off" in texts


def test_knee_is_marked_on_its_point(tmp_path: Path) -> None:
    saturated = receipt_of(*(cell(users, 0, *[sample(user, rate) for user in range(users)]) for users, rate in RATES))
    plot.write(tmp_path / "a.svg", [("a", saturated)])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    for panel in ("0-0", "1-0"):
        (ring,) = marker_positions(root, f"{panel}-0-knee")
        assert ring == pytest.approx(marker_positions(root, f"{panel}-0")[1], abs=0.01), "the second of three points"
    assert sum(line.endswith("  knee") for line in plot.text([("a", saturated)])) == 2


def test_same_receipts_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        plot.write(tmp_path / name, [("mine", SWEEP), ("other", replace(SWEEP, complete=False))])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ", partial" in (tmp_path / "a.svg").read_text()


def test_unwritable_plot_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(StateUnwritable, match="none"):
        plot.require(tmp_path / "none" / "a.svg")
    with pytest.raises(StateUnwritable, match="is a directory"):
        plot.require(tmp_path)
