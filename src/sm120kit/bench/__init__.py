"""Measure a server over HTTP and write a result: every sample with the environment it was taken in.

:mod:`.workload` has what is requested, :mod:`.client` streams the answers, :mod:`.result_file` stores and summarises them;
:mod:`.compare_results`, :mod:`.result_export` and :mod:`.figures` read results; :mod:`.launched` measures servers that
sm120kit starts; :mod:`.published` compares with published figures.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.bench import _metrics, bench_environment, client, result_file, workload
from sm120kit.bench.result_file import Environment, MeasuredCase, Result, Served
from sm120kit.bench.sample import parse_sample
from sm120kit.bench.workload import Case, NamedWorkload
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import ServerFailed
from sm120kit.core.urls import Endpoint
from sm120kit.engines import find

RequestEnded = Callable[[], None]
"""Called after each request."""


@dataclass(frozen=True)
class MeasuredServer:
    """A server to measure: its root, the model to request from it, and how it was started, as far as that is known."""

    endpoint: Endpoint
    model: str
    served: Served = field(default_factory=Served)


@dataclass(frozen=True)
class Measurement:
    """How servers are measured into one result. ``given`` is what the user states.
    A request without data for ``stall_seconds`` has failed.

    ``probe`` is called on each start of a server before its first case; it returns verdicts, and may refuse to go on.
    ``save`` gets the partial result after each case, and when a case is interrupted. ``case_begins`` gets a case and its
    number of requests, 0 if the workload runs for a time, and returns a function that is called after each request.
    """

    workload: NamedWorkload
    save: Callable[[Result], None]
    given: Mapping[str, str] = field(default_factory=dict)
    stall_seconds: float = client.STALL_SECONDS
    case_begins: Callable[[Case, int], RequestEnded] = lambda case, requests: lambda: None
    probe: Callable[[MeasuredServer], Mapping[str, str]] = lambda server: {}


def choose_model(server: Endpoint, requested: str | None, preferred: str = "") -> str:
    """The model to measure: the requested one, else ``preferred`` if the server offers it, else the only one it offers.

    Raises:
        ServerFailed: the server does not list its models, lacks the requested one, or offers several.
    """
    offered = client.models(server)
    if requested is None and preferred in offered:
        return preferred
    if requested is None and len(offered) == 1:
        return offered[0]
    if requested is None or requested not in offered:
        problem = f"does not offer {requested!r}" if requested else f"offers {len(offered)} models"
        named = ", ".join(offered[:20]) + ", ..." * (len(offered) > 20)
        raise ServerFailed(f"{server.url} {problem}", f"--served-model-name names one: {named}")
    return requested


def run(
    server: MeasuredServer, measurement: Measurement, earlier: Result | None = None, *, start: int = 0, last_start: bool = True
) -> Result:
    """Measure every case of a workload on a running server.

    A server that is restarted is measured once after each ``start``, with the result of the starts before as ``earlier``; each
    start has another order of cases. The result is complete after the last case of the ``last_start``.

    Raises:
        ServerFailed: the server went away; the result was saved.
    """
    began = datetime.now(UTC)
    endpoint, named = server.endpoint, measurement.workload
    result = earlier or Result(
        result_file.FORMAT, began.isoformat(timespec="seconds"), False, _environment(server, measurement), ()
    )
    order = workload.cases(named.workload, start)
    result = replace(result, probes={**result.probes, **measurement.probe(server)})
    for number, case in enumerate(order):

        def save_interrupted(part: MeasuredCase, before: Result = result) -> None:
            measurement.save(replace(before, cases=(*before.cases, replace(part, restart=start))))

        salt = f"{began.isoformat()}/{number}"
        measured = replace(_measure(server, measurement, case, result.environment, salt, save_interrupted), restart=start)
        lost = any(sample.error for sample in measured.samples) and _is_gone(endpoint)
        cases = (*result.cases, measured)
        result = replace(result, cases=cases, complete=last_start and number == len(order) - 1 and not lost)
        measurement.save(result)
        if lost:
            raise ServerFailed(
                f"{endpoint.url} no longer answers; it went away in case {number + 1} of {len(order)}",
                "the result has the results so far, marked partial; the server's log may show why: sm120kit explain LOG",
            )
    return result


def _environment(server: MeasuredServer, measurement: Measurement) -> Environment:
    named = measurement.workload
    return Environment(
        url=server.endpoint.url,
        model=server.model,
        workload=named.name,
        workload_sha256=named.sha256,
        thinking=named.workload.thinking,
        temperature=named.workload.temperature,
        client=bench_environment.client(),
        given=dict(measurement.given),
        prompts_sha256=digest_of(named.workload.prompts),
        reported=client.server_info(server.endpoint, server.model),
        served=server.served,
        machine=bench_environment.machine(server.endpoint.url, server.served, measurement.given),
    )


def _measure(
    server: MeasuredServer,
    measurement: Measurement,
    case: Case,
    about: Environment,
    salt: str,
    save_interrupted: Callable[[MeasuredCase], None],
) -> MeasuredCase:
    """Measure a case. If it is interrupted, ``save_interrupted`` gets it with the requests that had ended."""
    work, endpoint = measurement.workload.workload, server.endpoint
    requests = workload.request_count(work, case)
    request_ended = measurement.case_begins(case, requests)
    ended: list[client.EndedRequest] = []

    def on_end(request: client.EndedRequest) -> None:
        ended.append(request)
        request_ended()

    def counted(streams: Iterable[Iterable[client.StreamRequest]]) -> list[Iterable[client.StreamRequest]]:
        engine = find(about.reported.get("owned_by", ""))  # others may refuse options that they do not know
        return [map(client.counted, stream) for stream in streams] if engine and engine.counts_tokens else list(streams)

    warmups = workload.requests(work, case, server.model, work.warmup_requests, f"{salt}/warm")
    warm = client.stream_all(
        endpoint, counted(warmups), stall_seconds=measurement.stall_seconds, on_end=lambda request: request_ended()
    )
    result = MeasuredCase(case.concurrency, case.output_tokens, case.context_tokens, warm.samples, (), None, None)
    try:
        with _metrics.measured(endpoint) as reported:
            concurrency = workload.all_requests(work, case, server.model, salt)
            streamed = client.stream_all(endpoint, counted(concurrency), stall_seconds=measurement.stall_seconds, on_end=on_end)
    except BaseException:
        if ended:
            save_interrupted(replace(result, samples=tuple(parse_sample(*request) for request in ended), complete=False))
        raise
    return replace(
        result,
        samples=streamed.samples,
        lag_seconds=streamed.lag_seconds,
        acceptance=reported().acceptance,
        prefix_cache=reported().prefix_cache,
    )


def require_answers(result: Result, path: Path) -> None:
    """Require that a request of a result, which is at ``path``, succeeded.

    Raises:
        ServerFailed: all failed.
    """
    errors = [sample.error for case in result.cases for sample in case.samples]
    if all(errors):
        raise ServerFailed(f"every request failed; the first: {errors[0]}", f"{client.hint(errors[0])}; all errors: {path}")


def _is_gone(server: Endpoint) -> bool:
    """Whether the server no longer lists its models: not one failed request, but no server."""
    try:
        client.models(server)
    except ServerFailed:
        return True
    return False
