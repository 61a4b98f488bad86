"""Lines and bars of plots; image files are checked in tests/integration."""

from __future__ import annotations

import pytest
from sweep import SWEEP, cell, receipt_of, sample

from sm120kit.bench import plot


def test_points_are_the_figures_of_the_cells() -> None:
    lines = {(line.what, line.by, line.label): line.points for line in plot.series([("a", SWEEP)])}
    assert set(lines) == {
        (what, by, label)
        for what in (plot.PER_USER, plot.TOGETHER)
        for by, label in (
            (plot.USERS, "100 tokens"),
            (plot.USERS, "100 tokens after 32,000"),
            (plot.CONTEXT, "100 tokens, 1 user"),
            (plot.CONTEXT, "100 tokens, 4 users"),
            (plot.CONTEXT, "100 tokens, 8 users"),
        )
    }
    single, four, eight = lines[plot.PER_USER, plot.USERS, "100 tokens"]
    assert (single.x, single.rates) == (1, pytest.approx((55, 50, 60)))
    assert (four.rates, four.failed, four.requests) == (pytest.approx((40, 40, 40)), 1, 4)
    assert (eight.x, eight.rates, eight.failed, eight.requests) == (8, None, 8, 8)
    assert [
        (point.x, point.rates and point.rates[0]) for point in lines[plot.PER_USER, plot.CONTEXT, "100 tokens, 1 user"]
    ] == [
        (0, pytest.approx(55)),
        (32000, pytest.approx(30)),  # 64,000 was interrupted
    ]


def test_spread_of_several_starts_is_between_them() -> None:
    restarted = receipt_of(
        *(cell(1, 0, sample(0, rate - 5), sample(0, rate + 5), restart=n) for n, rate in enumerate((50, 60, 40)))
    )
    (point,) = plot.series([("a", restarted)])[0].points
    assert point.rates == pytest.approx((50, 40, 60))


def test_text_bars_are_proportional() -> None:
    lines = list(plot.text([("a", SWEEP)]))
    assert lines[0] == "tok/s per user by users"
    assert lines[2] == f"          1 {'█' * 42}{'░' * 8} 55.0 (50.0-60.0)"
    assert lines[3] == f"          4 {'█' * 33} 40.0  1 of 4 requests failed"
    assert lines[4] == "          8 unknown  8 of 8 requests failed"
    assert "tok/s together by tokens of context" in lines
    assert any("b: 100 tokens" in line for line in plot.text([("a", SWEEP), ("b", SWEEP)]))
