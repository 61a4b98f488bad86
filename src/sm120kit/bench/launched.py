"""Launch a configuration, measure its server and stop it; again for each restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sm120kit import bench, serving
from sm120kit.bench import MeasuredServer, Measurement, bench_environment, resume
from sm120kit.bench.result_file import Result
from sm120kit.core.urls import Endpoint
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import Run, launch
from sm120kit.serving.launch import LaunchOptions, PreparedLaunch

Start = Callable[[Callable[[Run], None]], object]
"""Starts a server, calls its argument with the record of the healthy server, and stops the server."""


@dataclass(frozen=True)
class LaunchedConfiguration:
    """A configuration whose servers ``start`` starts, and what is measured of each: one result per measurement."""

    start: Start
    configuration: Configuration
    measurements: Sequence[Measurement]


def of_launch(prepared: PreparedLaunch, options: LaunchOptions, measurements: Sequence[Measurement]) -> LaunchedConfiguration:
    """A prepared launch; its servers run in containers, see :func:`launch.run`."""

    def start(work: Callable[[Run], None]) -> None:
        launch.run(prepared, options, work)

    return LaunchedConfiguration(start, prepared.configuration, measurements)


def measure(launches: Sequence[LaunchedConfiguration], restarts: int = 0) -> list[tuple[Result, ...]]:
    """Start the server of each configuration ``restarts`` + 1 times, and measure it. One result per measurement.

    Several configurations take turns, every second time in reverse order, so that a machine that becomes slower or faster
    favours none. Of an interrupted run, a server is started only if cases of its start are missing.

    Raises:
        NotComparable: an interrupted run differs from its measurement; if it needs no server to determine, none is started.
        Sm120kitError: see :func:`launch.run` and :func:`bench.run`; results of what was measured before were saved.
    """
    for measurement in (each for launched in launches for each in launched.measurements):
        bench.require_resumable(measurement)
    results: list[list[Result | None]] = [[None] * len(launched.measurements) for launched in launches]
    for number in range(restarts + 1):
        turn = list(zip(launches, results, strict=True))
        for launched, measured in reversed(turn) if number % 2 else turn:
            if any(_lacks(measurement, number) for measurement in launched.measurements):
                launched.start(partial(_measure, launched, measured, number=number, last_start=number == restarts))
    return [
        tuple(result for each, own in zip(launched.measurements, measured, strict=True) if (result := own or each.resumed))
        for launched, measured in zip(launches, results, strict=True)
    ]


def _measure(launched: LaunchedConfiguration, results: list[Result | None], run: Run, *, number: int, last_start: bool) -> None:
    """Measure a server that runs, and put the results so far in place of those of the starts before."""
    configuration = launched.configuration
    endpoint = Endpoint.parse(run.url, serving.api_key(configuration))
    model = bench.choose_model(endpoint, None, configuration.model.repository)
    served = bench_environment.with_values(bench_environment.served_from(run), _public_environment(configuration))
    server = MeasuredServer(endpoint, model, served)
    for index, measurement in enumerate(launched.measurements):
        results[index] = bench.run(server, measurement, results[index], start=number, last_start=last_start)


def _lacks(measurement: Measurement, number: int) -> bool:
    """Whether the interrupted run lacks cases of a start, or there was none."""
    resumed = measurement.resumed
    return resumed is None or (
        not resumed.complete and bool(resume.missing(measurement.workload.workload, resumed.cases, number))
    )


def _public_environment(configuration: Configuration) -> dict[str, str]:
    """The variables of a configuration that comes with sm120kit. Values of any other may be secret."""
    name = configuration.name
    return configuration.environment if name in configurations.names() and configuration == configurations.load(name) else {}
