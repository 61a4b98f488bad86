"""Divergences of distributions that can be computed by hand, and the cutting of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120kit import kld
from sm120kit.errors import NothingMeasured
from sm120kit.kld.divergence import REST_FLOOR, Divergences, Listed, divergences

if TYPE_CHECKING:
    from sm120kit.kld.divergence import Whole

HALVES, SKEWED = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
BY_HAND = 0.25 * math.log(2)  # 0.5 ln 2 - 0.25 ln 2


def logs(*rows: Sequence[float]) -> Whole:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, dtype=np.float64))


def listed(*rows: dict[int, float]) -> Listed:
    return Listed([{token: math.log(share) for token, share in row.items()} for row in rows])


def test_by_hand() -> None:
    found = divergences(logs(HALVES, HALVES), logs(SKEWED, HALVES))
    assert found.nats == pytest.approx((BY_HAND, 0.0), abs=1e-15)
    assert found.top1_differs == 1


def test_padding_of_a_vocabulary_is_cut_and_what_is_left_normalised() -> None:
    padded = logs([0.25, 0.125, 0.125, 0.5])
    assert divergences(padded, logs(SKEWED)).nats == pytest.approx((BY_HAND,), abs=1e-15)
    assert divergences(logs(HALVES), logs([0.125, 0.25, 0.125, 0.5])).nats == pytest.approx((BY_HAND,), abs=1e-15)


def test_a_position_with_nan_is_counted_by_side_and_has_no_value() -> None:
    reference, test = logs(HALVES, HALVES, HALVES), logs(SKEWED, SKEWED, SKEWED)
    reference[0, 2] = test[1, 0] = np.nan
    assert divergences(reference, test) == Divergences(pytest.approx((BY_HAND,)), 1.0, 1, 1, 0, 1)


def test_probability_zero_is_nothing_in_the_reference_and_unbounded_in_the_test() -> None:
    assert divergences(logs([0.5, 0.5, 0.0]), logs([0.5, 0.5, 0.0])).nats == (0.0,)
    assert divergences(logs([0.5, 0.5, 0.0]), logs([0.25, 0.25, 0.5])).nats == pytest.approx((math.log(2),))
    found = divergences(logs(HALVES), logs([0.5, 0.5, 0.0]))
    assert (found.nats, found.unbounded) == ((), 1)
    zero = Listed([{0: math.log(0.5), 1: math.log(0.5), 2: -math.inf}])
    assert divergences(listed({0: 0.5, 1: 0.25, 2: 0.25}), zero).unbounded == 1


def test_more_rows_than_are_taken_at_once() -> None:
    rows = [HALVES] * 64 + [SKEWED] * 3
    assert divergences(logs(*rows), logs(*[HALVES] * 67)).nats == pytest.approx([0.0] * 64 + [BY_HAND] * 3, abs=1e-15)


def test_listed_tokens_and_one_for_the_rest() -> None:
    found = divergences(listed({0: 0.5, 1: 0.25}), listed({1: 0.5, 0: 0.25}))
    assert found.nats == pytest.approx((BY_HAND,), abs=1e-12)
    assert found.top1_differs == 1
    # Only token 0 is in both lists: {0.5, rest 0.5} against {0.25, rest 0.75}.
    known = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    found = divergences(listed({0: 0.5, 1: 0.25}), listed({2: 0.5, 0: 0.25}))
    assert (found.nats, found.covered) == (pytest.approx((known,), abs=1e-12), pytest.approx(0.5))


def test_a_rest_below_rounding_says_nothing() -> None:
    whole, most = listed({0: 0.5, 1: 0.5}), listed({0: 0.5, 1: 0.5 - 1e-9})
    assert abs(divergences(whole, most).nats[0]) < 10 * REST_FLOOR


def test_a_server_beside_a_checkpoint() -> None:
    assert divergences(logs(HALVES, HALVES), listed({0: 0.25, 1: 0.5})).nats == pytest.approx((BY_HAND,), abs=1e-12)
    assert divergences(listed({0: 0.5, 1: 0.25}), logs(SKEWED)).nats == pytest.approx((BY_HAND,), abs=1e-12)


weights = st.lists(st.floats(0.01, 1), min_size=8, max_size=8)


@given(weights, weights, st.integers(1, 7))
def test_lists_never_say_more_than_whole_distributions(p: list[float], q: list[float], top: int) -> None:
    shares = [[weight / sum(side) for weight in side] for side in (p, q)]
    (exact,) = divergences(logs(shares[0]), logs(shares[1])).nats
    lists = [listed(dict(sorted(enumerate(side), key=lambda one: -one[1])[:top])) for side in shares]
    (bound,) = divergences(*lists).nats
    assert -1e-9 <= bound <= exact + 1e-9
    assert exact >= -1e-12


def test_windows_of_a_text() -> None:
    assert [list(one) for one in kld.windows(range(10), kld.Asked(3, 4, 3))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(NothingMeasured, match="need 10 tokens; the text has 9") as failed:
        kld.windows(range(9), kld.Asked(3, 4, 3))
    assert "--windows 2" in failed.value.hint
    with pytest.raises(NothingMeasured) as failed:
        kld.windows(range(3), kld.Asked(3, 4, 3))
    assert "--window" in failed.value.hint


class Fixed:
    """A side that gives the same distribution everywhere, and notes the batches it was asked for."""

    def __init__(self, name: str, share: Sequence[float]) -> None:
        self.name, self.share, self.batches = name, share, list[int]()

    def windows(self, tokens: Sequence[Sequence[int]]) -> list[Whole]:
        self.batches.append(len(tokens))
        return [logs(*[self.share] * len(window)) for window in tokens]


def test_a_comparison_has_its_control_and_keeps_what_it_has() -> None:
    reference, test = Fixed("reference", HALVES), Fixed("test", SKEWED)
    kept: list[kld.Comparison] = []
    made = kld.compare(reference, test, None, range(10), kld.Asked(3, 4, 3), keep=kept.append)
    assert [(one.complete, one.asked.windows) for one in kept] == [(False, 2), (True, 3)]
    assert made == kept[-1]
    assert (made.result.positions, made.result.top1_differs) == (12, 12)
    assert made.result.mean == made.result.median == made.result.p99 == pytest.approx(BY_HAND)
    assert made.result.window_means == pytest.approx([BY_HAND] * 3)
    assert made.noise.max == 0 and made.exact
    assert reference.batches == [2, 1, 1, 1, 1], "asked again in other batches"
    another = Fixed("another", SKEWED)
    made = kld.compare(reference, test, another, range(10), kld.Asked(1, 4, 3))
    assert (made.control, made.noise.mean) == ("another", pytest.approx(BY_HAND))


def test_percentiles() -> None:
    class Growing(Fixed):
        def windows(self, tokens: Sequence[Sequence[int]]) -> list[Whole]:
            return [logs(*[[0.5 - 0.004 * n, 0.5 + 0.004 * n] for n in range(len(window))]) for window in tokens]

    made = kld.compare(Fixed("even", [0.5, 0.5]), Growing("growing", []), None, range(101), kld.Asked(1, 101, 1))
    nats = [0.5 * math.log(0.25 / ((0.5 - 0.004 * n) * (0.5 + 0.004 * n))) for n in range(101)]
    assert (made.result.median, made.result.p95, made.result.p99, made.result.max) == pytest.approx(
        (nats[50], nats[95], nats[99], nats[100])
    )


def test_nan_everywhere_is_no_result() -> None:
    with pytest.raises(NothingMeasured, match=r"8 with NaN in the reference, 0 in the test"):
        kld.compare(Fixed("r", [math.nan] * 3), Fixed("t", HALVES), None, range(8), kld.Asked(2, 4, 4))
