"""Launch a configuration, measure its server and stop it; again for each restart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sm120kit import bench, serving
from sm120kit.bench import MeasuredServer, Measurement, bench_environment
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
    """A configuration whose servers ``start`` starts, and how they are measured into one result."""

    start: Start
    configuration: Configuration
    measurement: Measurement

    def measure(self, number: int, before: Result | None, *, last_start: bool) -> Result:
        """Start a server and measure it, after the starts that the result ``before`` has."""
        results = []

        def work(run: Run) -> None:
            endpoint = Endpoint.parse(run.url, serving.api_key(self.configuration))
            model = bench.choose_model(endpoint, None, self.configuration.model.repository)
            values = _public_environment(self.configuration)
            served = bench_environment.with_values(bench_environment.served_from(run), values)
            server = MeasuredServer(endpoint, model, served)
            results.append(bench.run(server, self.measurement, before, start=number, last_start=last_start))

        self.start(work)
        return results[0]


def of_launch(prepared: PreparedLaunch, options: LaunchOptions, measurement: Measurement) -> LaunchedConfiguration:
    """A prepared launch; its servers run in containers, see :func:`launch.run`."""
    return LaunchedConfiguration(partial(launch.run, prepared, options), prepared.configuration, measurement)


def measure(launches: Sequence[LaunchedConfiguration], restarts: int = 0) -> list[Result]:
    """Start the server of each configuration ``restarts`` + 1 times, and measure it. One result for each.

    Several configurations take turns, every second time in reverse order, so that a machine that becomes slower or faster
    favours none.
    """
    results: list[Result | None] = [None] * len(launches)
    for number in range(restarts + 1):
        turn = list(enumerate(launches))
        for index, launched in reversed(turn) if number % 2 else turn:
            results[index] = launched.measure(number, results[index], last_start=number == restarts)
    return [result for result in results if result]


def _public_environment(configuration: Configuration) -> dict[str, str]:
    """The variables of a configuration that comes with sm120kit. Values of any other may be secret."""
    name = configuration.name
    return configuration.environment if name in configurations.names() and configuration == configurations.load(name) else {}
