"""The expected rate: steps computed by hand, and the committed fit against the published rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import published_rates
import pytest
from published_rates import PAGE, PublishedTable, by_machine, by_table, error_left_out, fit, generated, left_out, tables

from sm120kit.bench import roofline
from sm120kit.bench.roofline import CALIBRATION, GPUS, MEAN_ERROR, Calibration, RooflineModel, Work, calibrated, expected_step

PRO, GB10 = GPUS[1], GPUS[3]
IDEAL = roofline.DecodeStep(weights=3e-3, cache=1e-3, states=0.5e-3, drafting=0.5e-3, arithmetic=2e-3, all_reduces=1e-3)
COSTS = Calibration(layer_seconds=100e-6, wait_seconds=20e-6, gb10_share=0.5)


@pytest.fixture
def model() -> RooflineModel:
    """A model of 48 layers, and one that drafts."""
    found = roofline.model_of("Intel/Qwen3.5-122B-A10B-int4-AutoRound")
    assert found and (found.layers, found.draft_layers) == (48, 1)
    return found


def test_expected_step_adds_a_floor_for_each_layer(model: RooflineModel) -> None:
    step = calibrated(IDEAL, model, PRO, Work(1, 0, 0, 1), COSTS)
    assert step.terms == pytest.approx(
        {
            "weights": 3e-3,
            "KV cache": 1e-3,
            "states of linear attention": 0.5e-3,
            "drafting": 0.5e-3,
            "all-reduces": 1e-3,
            "layer floor": 4.8e-3,
        }
    )
    assert step.seconds == pytest.approx(10.8e-3)
    assert step.dominant == ("layer floor", pytest.approx(4.8 / 10.8))


@pytest.mark.parametrize(("gpus", "waits"), [(1, 0), (2, 0.96e-3), (4, 1.92e-3), (8, 2.88e-3)])
def test_waits_grow_with_each_doubling_of_the_gpus(model: RooflineModel, gpus: int, waits: float) -> None:
    step = calibrated(IDEAL, model, PRO, Work(1, 0, 0, gpus), COSTS)
    assert step.terms["all-reduces"] == pytest.approx(1e-3 + waits)


def test_gb10_reads_at_its_share_of_the_bandwidth(model: RooflineModel) -> None:
    step = calibrated(IDEAL, model, GB10, Work(1, 0, 0, 1), COSTS)
    assert step.terms["weights"] == pytest.approx(6e-3)
    assert step.seconds == pytest.approx(10e-3 + 1e-3 + 4.8e-3)
    assert step.dominant == ("weights", pytest.approx(6 / 15.8))


def test_arithmetic_counts_where_it_takes_longer_than_reading(model: RooflineModel) -> None:
    step = calibrated(replace(IDEAL, arithmetic=8e-3), model, PRO, Work(1, 0, 0, 1), COSTS)
    assert step.terms == pytest.approx({"arithmetic": 8e-3, "all-reduces": 1e-3, "layer floor": 4.8e-3})


def test_drafting_passes_the_layers_of_the_mtp_head(model: RooflineModel) -> None:
    work = Work(1, 300, 2, 1)
    assert calibrated(IDEAL, model, PRO, work, COSTS).terms["layer floor"] == pytest.approx(5e-3)


# ---- the fit


@pytest.mark.parametrize("table", tables(), ids=lambda table: str(table.name))
def test_published_rates_are_below_the_ceiling(table: PublishedTable) -> None:
    for case in table.cases:
        assert case.rate < roofline.ceiling(table.model, table.gpu, case.work)


def test_committed_costs_are_the_fit() -> None:
    fitted = [table for table in tables() if table.fitted]
    assert len(fitted) >= 23 and {table.gpu.name for table in fitted} >= {PRO.name, GB10.name, GPUS[2].name}
    assert fit([table.name for table in fitted]) == CALIBRATION
    assert error_left_out(by_table) == pytest.approx(MEAN_ERROR, abs=0.005)


def test_page_has_the_errors() -> None:
    assert generated(PAGE.read_text()) == PAGE.read_text()  # python tests/bench/expected_rates.py


@pytest.fixture
def wrong_rates(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The published rates of one machine multiplied by 3; the machine."""
    machine = "Stravica, Spark"

    def wrong(table: PublishedTable) -> PublishedTable:
        cases = tuple(replace(case, rate=3 * case.rate) for case in table.cases)
        return replace(table, cases=cases) if table.machine == machine else table

    changed = tuple(map(wrong, tables()))
    monkeypatch.setattr(published_rates, "tables", lambda: changed)
    published_rates._errors.cache_clear()
    yield machine
    published_rates._errors.cache_clear()


def test_table_is_not_judged_by_costs_fitted_to_it(wrong_rates: str) -> None:
    names = [table.name for table in tables() if table.machine == wrong_rates]
    assert len(names) == 3
    wrong = left_out(by_machine)
    published_rates._errors.cache_clear()
    with pytest.MonkeyPatch.context() as restored:
        restored.setattr(published_rates, "tables", tables)
        right = left_out(by_machine)
    assert [wrong[name] for name in names] == [right[name] for name in names]
    assert wrong != right


def test_example_of_the_documentation() -> None:
    model, work = roofline.model_of("Sehyo/Qwen3.5-397B-A17B-NVFP4"), Work(1, published_rates.CONTEXT, 0, 4)
    assert model
    step = expected_step(model, PRO, work)
    rates = (roofline.ceiling(model, PRO, work), roofline.roofline(model, PRO, work, 0), 1 / step.seconds)
    shares = {name: seconds / step.seconds for name, seconds in step.terms.items()}
    page = (PAGE.parents[1] / "bench.md").read_text().replace("\n", " ")
    assert "ceiling {:.0f} tok/s, roofline {:.0f}, expected {:.0f}, published 75.5".format(*rates) in page
    assert f"expected step of {step.seconds * 1e3:.1f} ms, {shares['layer floor']:.0%}".replace("%", " %") in page
    assert f"{shares['all-reduces']:.0%} all-reduces, and {shares['weights']:.0%} weights".replace("%", " %") in page
