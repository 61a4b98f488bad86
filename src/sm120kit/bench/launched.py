"""Launch a configuration, measure its server and stop it; again for each restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def run(
    prepared: PreparedLaunch, options: LaunchOptions, measurements: Sequence[Measurement], restarts: int = 0
) -> tuple[Result, ...]:
    """Launch a configuration and measure it; again after each of ``restarts`` restarts. One result per measurement.

    Raises:
        Sm120kitError: see :func:`launch.run` and :func:`bench.run`; results of what was measured before were saved.
    """

    def start(work: Callable[[Run], None]) -> None:
        launch.run(prepared, options, work)

    return measure(start, prepared.configuration, measurements, restarts)


def measure(
    start: Start, configuration: Configuration, measurements: Sequence[Measurement], restarts: int = 0
) -> tuple[Result, ...]:
    """Measure the servers that ``start`` starts, ``restarts`` + 1 in all. One result per measurement.

    Of an interrupted run, a server is started only if cases of its start are missing.

    Raises:
        NotComparable: an interrupted run differs from its measurement; if it needs no server to determine, none is started.
    """
    for measurement in measurements:
        bench.require_resumable(measurement)
    results: list[Result | None] = [None] * len(measurements)

    def work(run: Run, number: int) -> None:
        endpoint = Endpoint.parse(run.url, serving.api_key(configuration))
        model = bench.choose_model(endpoint, None, configuration.model.repository)
        served = bench_environment.with_values(bench_environment.served_from(run), _public_environment(configuration))
        server = MeasuredServer(endpoint, model, served)
        for index, measurement in enumerate(measurements):
            results[index] = bench.run(server, measurement, results[index], start=number, last_start=number == restarts)

    for number in range(restarts + 1):
        if any(_lacks(measurement, number) for measurement in measurements):
            start(partial(work, number=number))
    return tuple(result for result in results if result)


def _lacks(measurement: Measurement, number: int) -> bool:
    """Whether the interrupted run lacks cases of a start, or there was none."""
    resumed = measurement.resumed
    return resumed is None or (
        not resumed.complete and bool(resume.missing(measurement.workload.workload, resumed.cases, number, measurement.seed))
    )


def _public_environment(configuration: Configuration) -> dict[str, str]:
    """The variables of a configuration that comes with sm120kit. Values of any other may be secret."""
    name = configuration.name
    return configuration.environment if name in configurations.names() and configuration == configurations.load(name) else {}
