"""Divergences of small distributions computed by hand, windows of a text, and summaries."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sm120kit import kld
from sm120kit.core.errors import BadRecord, ServerFailed
from sm120kit.kld.divergence import REST_FLOOR, TopLogProbabilities, WindowDivergences, divergences
from sm120kit.kld.reference_model import ReferenceText, SavedReference, writer

if TYPE_CHECKING:
    from sm120kit.kld.divergence import Rows as LogProbabilities

HALVES, SKEWED = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
BY_HAND = 0.25 * math.log(2)  # 0.5 ln 2 - 0.25 ln 2


def logs(*rows: Sequence[float]) -> LogProbabilities:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float64))


def listed(*rows: dict[int, float]) -> TopLogProbabilities:
    return TopLogProbabilities([{token: math.log(share) for token, share in row.items()} for row in rows])


def test_divergence_computed_by_hand() -> None:
    result = divergences(logs(HALVES, HALVES), logs(SKEWED, HALVES))
    assert result.nats == pytest.approx((BY_HAND, 0.0), abs=1e-15)
    assert result.top1_differs == 1


def test_padded_vocabulary_is_cut_and_normalized() -> None:
    padded = logs([0.25, 0.125, 0.125, 0.5])
    assert divergences(padded, logs(SKEWED)).nats == pytest.approx((BY_HAND,), abs=1e-15)
    assert divergences(logs(HALVES), logs([0.125, 0.25, 0.125, 0.5])).nats == pytest.approx((BY_HAND,), abs=1e-15)


def test_positions_with_nan_are_counted_per_model() -> None:
    reference, test = logs(HALVES, HALVES, HALVES), logs(SKEWED, SKEWED, SKEWED)
    reference[0, 2] = test[1, 0] = np.nan
    assert divergences(reference, test) == WindowDivergences(pytest.approx((BY_HAND,)), 1.0, 1, 1, 0, 1)


def test_probability_zero_in_reference_or_test() -> None:
    assert divergences(logs([0.5, 0.5, 0.0]), logs([0.5, 0.5, 0.0])).nats == (0.0,)
    assert divergences(logs([0.5, 0.5, 0.0]), logs([0.25, 0.25, 0.5])).nats == pytest.approx((math.log(2),))
    result = divergences(logs(HALVES), logs([0.5, 0.5, 0.0]))
    assert (result.nats, result.unbounded) == ((), 1)
    zero = TopLogProbabilities([{0: math.log(0.5), 1: math.log(0.5), 2: -math.inf}])
    assert divergences(listed({0: 0.5, 1: 0.25, 2: 0.25}), zero).unbounded == 1


def test_more_positions_than_one_step() -> None:
    rows = [HALVES] * 64 + [SKEWED] * 3
    assert divergences(logs(*rows), logs(*[HALVES] * 67)).nats == pytest.approx([0.0] * 64 + [BY_HAND] * 3, abs=1e-15)


def test_unlisted_tokens_count_as_single_token() -> None:
    result = divergences(listed({0: 0.5, 1: 0.25}), listed({1: 0.5, 0: 0.25}))
    assert result.nats == pytest.approx((BY_HAND,), abs=1e-12)
    assert result.top1_differs == 1
    # Only token 0 is in both lists: {0.5, rest 0.5} against {0.25, rest 0.75}.
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    result = divergences(listed({0: 0.5, 1: 0.25}), listed({2: 0.5, 0: 0.25}))
    assert (result.nats, result.covered) == (pytest.approx((expected,), abs=1e-12), pytest.approx(0.5))


def test_unlisted_probability_below_rounding() -> None:
    complete, partial = listed({0: 0.5, 1: 0.5}), listed({0: 0.5, 1: 0.5 - 1e-9})
    assert abs(divergences(complete, partial).nats[0]) < 10 * REST_FLOOR


def test_top_tokens_against_full_distributions() -> None:
    assert divergences(logs(HALVES, HALVES), listed({0: 0.25, 1: 0.5})).nats == pytest.approx((BY_HAND,), abs=1e-12)
    assert divergences(listed({0: 0.5, 1: 0.25}), logs(SKEWED)).nats == pytest.approx((BY_HAND,), abs=1e-12)


weights = st.lists(st.floats(0.01, 1), min_size=8, max_size=8)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(weights, weights, st.integers(1, 7))
def test_top_tokens_give_lower_bound(p: list[float], q: list[float], top: int) -> None:
    shares = [[weight / sum(side) for weight in side] for side in (p, q)]
    (exact,) = divergences(logs(shares[0]), logs(shares[1])).nats
    lists = [listed(dict(sorted(enumerate(side), key=lambda item: -item[1])[:top])) for side in shares]
    (bound,) = divergences(*lists).nats
    assert -1e-9 <= bound <= exact + 1e-9
    assert exact >= -1e-12


def test_split_windows() -> None:
    assert [list(window) for window in kld.split_windows(range(10), kld.Windowing(3, 4, 3))] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]
    with pytest.raises(ServerFailed, match="require 10 tokens; the text has 9") as failed:
        kld.split_windows(range(9), kld.Windowing(3, 4, 3))
    assert "--windows 2" in failed.value.hint
    with pytest.raises(ServerFailed) as failed:
        kld.split_windows(range(3), kld.Windowing(3, 4, 3))
    assert "--window" in failed.value.hint


class ConstantModel:
    """A model with the same distribution at every position, which records the sizes of its batches."""

    def __init__(self, name: str, share: Sequence[float]) -> None:
        self.name, self.share, self.batches = name, share, list[int]()

    def windows(self, tokens: Sequence[Sequence[int]]) -> list[LogProbabilities]:
        self.batches.append(len(tokens))
        return [logs(*[self.share] * len(window)) for window in tokens]


def test_comparison_with_control_pair_and_progress() -> None:
    reference, test = ConstantModel("reference", HALVES), ConstantModel("test", SKEWED)
    partial: list[kld.KldComparison] = []
    comparison = kld.compare(reference, test, None, range(10), kld.Windowing(3, 4, 3), on_progress=partial.append)
    assert [(comparison.complete, comparison.windowing.windows) for comparison in partial] == [(False, 2), (True, 3)]
    assert comparison == partial[-1]
    assert (comparison.result.positions, comparison.result.top1_differs) == (12, 12)
    assert comparison.result.mean == comparison.result.median == comparison.result.p99 == pytest.approx(BY_HAND)
    assert comparison.result.window_means == pytest.approx([BY_HAND] * 3)
    assert comparison.noise.max == 0 and comparison.exact
    assert reference.batches == [2, 1, 1, 1, 1], "the reference again, in other batches"
    again = kld.compare(reference, test, comparison.result, range(10), kld.Windowing(1, 4, 3))
    assert again.noise == comparison.result and len(reference.batches) == 6


def test_percentiles() -> None:
    class VaryingModel(ConstantModel):
        def windows(self, tokens: Sequence[Sequence[int]]) -> list[LogProbabilities]:
            return [logs(*[[0.5 - 0.004 * n, 0.5 + 0.004 * n] for n in range(len(window))]) for window in tokens]

    comparison = kld.compare(
        ConstantModel("even", [0.5, 0.5]), VaryingModel("varying", []), None, range(101), kld.Windowing(1, 101, 1)
    )
    nats = [0.5 * math.log(0.25 / ((0.5 - 0.004 * n) * (0.5 + 0.004 * n))) for n in range(101)]
    assert (comparison.result.median, comparison.result.p95, comparison.result.p99, comparison.result.max) == pytest.approx(
        (nats[50], nats[95], nats[99], nats[100])
    )


def test_nan_at_every_position_is_refused() -> None:
    with pytest.raises(ServerFailed, match=r"8 with NaN in the reference, 0 in the test"):
        kld.compare(ConstantModel("r", [math.nan] * 3), ConstantModel("t", HALVES), None, range(8), kld.Windowing(2, 4, 4))


@pytest.mark.parametrize("shape", [(10**7, 10**6), (1, 2, 2), (4,)])
def test_a_reference_with_arrays_of_another_form_is_damaged(shape: tuple[int, ...], tmp_path: Path) -> None:
    text = ReferenceText("m", kld.TokenizedText((1, 2)), kld.Windowing(1, 2, 2), 2)
    with writer(tmp_path / "x", 2) as saved:
        saved.finish(text, kld.DivergenceSummary(1, 1.0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (0.0,)))
    with zipfile.ZipFile(tmp_path / "x", "a") as archive:
        for name, kind in (("ids", "<u4"), ("values", "<f4")):
            array = io.BytesIO()
            np.lib.format.write_array_header_1_0(array, {"descr": kind, "fortran_order": False, "shape": shape})
            archive.writestr(f"0.{name}.npy", array.getvalue() + bytes(16))
    reference = SavedReference(tmp_path / "x")
    with pytest.raises(BadRecord, match="is damaged at window 0"):
        reference.windows([[1, 2]])
