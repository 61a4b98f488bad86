"""What a build prints: the time left, which goes down while a long unit compiles, units that failed, sizes of wheels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sm120kit.cli.build import watcher
from sm120kit.cli.build_output import with_size
from sm120kit.core.memory import FinishedUnit
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels.compile import Progress


def _progress(estimates: dict[str, float], finished: dict[str, float], running: int) -> Progress:
    return Progress(
        units=[SimpleNamespace(output=output, estimate_seconds=seconds) for output, seconds in estimates.items()],  # type: ignore[arg-type]
        finished=[SimpleNamespace(output=output, seconds=seconds) for output, seconds in finished.items()],  # type: ignore[arg-type]
        running=(None,) * running,  # type: ignore[arg-type]
    )


def _minutes(progress: Progress, running: dict[str, float]) -> float:
    return round(progress.seconds_left(running) / 60, 1)


def test_a_running_unit_counts_less_each_minute() -> None:
    progress = _progress({"a": 600, "b": 60}, {}, 1)
    assert [_minutes(progress, {"a": seconds}) for seconds in (0, 60, 300, 600)] == [11, 10, 6, 1]


def test_the_pace_is_that_of_the_finished_units() -> None:
    progress = _progress({"a": 60, "b": 600}, {"a": 120}, 1)
    assert _minutes(progress, {}) == 20


def test_a_unit_that_takes_longer_than_its_estimate_slows_the_pace() -> None:
    progress = _progress({"a": 60, "b": 600}, {}, 1)
    assert [_minutes(progress, {"a": seconds}) for seconds in (60, 120, 300)] == [10, 20, 50]
    progress = _progress({"a": 60, "b": 60, "c": 600}, {"a": 60}, 1)
    assert _minutes(progress, {"b": 180}) == 20, "beside a unit that took its estimate"


def test_units_that_compile_at_once_share_the_time() -> None:
    assert _minutes(_progress({"a": 600, "b": 600}, {}, 2), {}) == 10


def test_a_compiler_that_was_killed_is_not_counted_as_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    units = [SimpleNamespace(output=f"{name}.o", estimate_seconds=60) for name in "abc"]
    with watcher() as watch:
        for codes in ((-9,), (-9, 0)):
            ended = [FinishedUnit(f"{name}.o", 9.0, 9.0, 2**30, code) for name, code in zip("ab", codes, strict=False)]
            tested = FinishedUnit("CMakeFiles/tested.o", 1.0, 1.0, 0, 1)  # a test of a compiler, which may fail
            watch(Progress((tested, *ended), (), tuple(units)))  # type: ignore[arg-type]
    failed, compiled = capsys.readouterr().err.splitlines()
    assert "a.o" in failed and "exit code -9" in failed and "compiled" not in failed and "min left" not in failed
    assert compiled.startswith("compiled 1 of 3, b.o")


def test_sizes_of_wheels_that_no_index_stated_are_unknown_not_zero() -> None:
    first, second = (LockedWheel(name, "1", f"{name}-1-py3-none-any.whl", name) for name in ("a", "b"))
    assert with_size((first, second), {}) == "2 wheels, 2 of unknown size"
    assert with_size((first, second), {first: 10**9}) == "2 wheels, 1.00 GB, 1 of unknown size"
    assert with_size((), {}) == "0 wheels, 0.00 GB"
