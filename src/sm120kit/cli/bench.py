"""``sm120kit bench run``: measure a server."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from sm120kit import bench
from sm120kit.bench import (
    MeasuredServer,
    RequestEnded,
    ablation,
    bench_environment,
    client,
    figures,
    published,
    result_file,
    workload,
)
from sm120kit.bench import launched as launched_servers
from sm120kit.bench.result_file import Result, Served
from sm120kit.bench.workload import Case, NamedWorkload
from sm120kit.cli.bench_results import render, render_effects
from sm120kit.cli.options import Json, ServerAccess, Sources, Timeout, argument, configuration_names, option
from sm120kit.cli.serve import LaunchedServer
from sm120kit.cli.verify_server import brief_probe
from sm120kit.core import console
from sm120kit.core.disk import require_new, require_writable
from sm120kit.core.outside import integer, parse_json, read_input
from sm120kit.core.urls import is_url
from sm120kit.recipes import configurations

Given = Annotated[
    list[str] | None, option("--given NAME=VALUE", "A fact that cannot be detected, such as gpu='2x ...'; repeatable.")
]


@contextmanager
def case_progress(cases: int) -> Iterator[Callable[[Case, int], RequestEnded]]:
    """A live display of a run on a terminal: of all ``cases`` to measure, and of the requests of the running one.

    The function is that of :class:`sm120kit.bench.Measurement`.
    """
    begun = 0
    with console.progress(remaining=True) as display:
        run = display.add_task("cases", total=cases)

        def case_begins(case: Case, requests: int) -> RequestEnded:
            nonlocal begun
            display.update(run, completed=begun)
            begun += 1
            for task in display.tasks[1:]:  # a case that runs for a time has no total; it is over when the next one begins
                display.update(task.id, total=task.completed, visible=False)
            name = f"concurrency {case.concurrency}, {case.output_tokens} tokens"
            key = display.add_task(name, total=requests or None)
            return lambda: display.update(key, advance=1)

        yield case_begins


@dataclass(frozen=True)
class WorkloadChoice:
    """A workload, and values that replace its own."""

    workload: Annotated[
        str, option("--workload -w WORKLOAD", "A workload by name, or a .toml file; default: published or quick.")
    ] = ""
    quick: Annotated[
        bool, option("--quick", "A smoke run: the workload's smallest case, one request for each in parallel.")
    ] = False
    concurrency: Annotated[str, option("--concurrency N,N", "Numbers of requests in parallel.")] = ""
    output_tokens: Annotated[str, option("--output-tokens N,N", "Max output tokens.")] = ""
    context_tokens: Annotated[str, option("--context-tokens N,N", "Context depth: random tokens before each prompt.")] = ""
    requests: Annotated[int, option("--requests N", "Requests one after another, for each of those in parallel.", min=0)] = 0
    rate: Annotated[float, option("--rate PER_SECOND", "Open loop: send requests at this rate.", min=0)] = 0.0
    extra_body: Annotated[str, option("--extra-body JSON|@FILE", "Further keys of each request's body.")] = ""

    def load(self, published: Sequence[NamedWorkload] = ()) -> list[NamedWorkload]:
        """The workload with its values replaced, or those that are ``published`` if none and no value is named.

        With ``--quick`` reduced to their smallest case.

        Raises:
            typer.BadParameter: a list of numbers or a JSON object is none.
            Sm120kitError: see :func:`sm120kit.bench.workload.load`.
        """
        changes = dict(self._changes())
        if changes or self.workload or not published:
            published = [workload.changed(workload.load(self.workload or "quick"), **changes)]
        return [workload.quick(named) if self.quick else named for named in published]

    def _changes(self) -> Iterator[tuple[str, Any]]:
        for name, text in (
            ("concurrency", self.concurrency),
            ("output_tokens", self.output_tokens),
            ("context_tokens", self.context_tokens),
        ):
            if text:
                yield name, _numbers(text, f"--{name.replace('_', '-')}")
        if self.requests:
            yield "requests_per_stream", self.requests
            yield "seconds", 0.0
        if self.rate:
            yield "rate", self.rate
        if self.extra_body:
            yield "extra_body", _json_object(self.extra_body)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(integer(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers: 1,2,4", param_hint=option) from error
    if len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"{text!r} has a number twice", param_hint=option)
    return numbers


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(read_input(Path(text[1:])) if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{text}: {error}", param_hint="--extra-body") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--extra-body")
    return value


RESTARTS = 2
"""Restarts for ``--ablate``: three starts are the fewest whose interval is of use."""


@dataclass(frozen=True)
class RunningServer(ServerAccess):
    """A server that is running already."""

    served_model_name: Annotated[
        str, option("--served-model-name NAME", "With URL: the model; default: the server's only model.")
    ] = ""
    record: Annotated[Path | None, option("--run FILE", "With URL: the record that serve wrote for this server.")] = None
    timeout: Timeout = 120.0

    def served(self, url: str) -> Served:
        """How the server at ``url`` was started, as far as that is known.

        Raises:
            BadInput: the record is of another server.
        """
        endpoint = self.endpoint(url)
        return bench_environment.served_by_record(self.record, endpoint.url) if self.record else Served()

    def measured(self, url: str, served: Served) -> MeasuredServer:
        """The server at ``url`` with its model.

        Raises:
            ServerFailed: the server does not answer or offer the model.
        """
        endpoint = self.endpoint(url)
        return MeasuredServer(endpoint, bench.choose_model(endpoint, self.served_model_name or None), served)


@dataclass(frozen=True)
class AblatedServer(LaunchedServer):
    """A server that is launched, also with other options."""

    ablate: Annotated[
        str,
        option(
            "--ablate NAME,...",
            "Also with each of these options, which `config show` lists: restarts with and without them in turn.",
        ),
    ] = ""


@dataclass(frozen=True)
class Results:
    """Where the results go."""

    output: Annotated[Path, option("--output -o FILE", "The result, written after each case.")] = Path("result.json")
    overwrite: Annotated[bool, option("--overwrite", "Replace an existing result.")] = False
    force: Annotated[bool, option("--force", "Measure a server although a probe fails.")] = False
    json: Json = False


def run_(
    target: Annotated[
        str,
        argument(
            "CONFIG|URL",
            "A configuration to launch, or the root of an OpenAI-compatible server.",
            autocompletion=configuration_names,
        ),
    ],
    *,
    choice: WorkloadChoice,
    running: RunningServer,
    launched: AblatedServer,
    given: Given = None,
    results: Results,
    sources: Sources,
) -> None:
    """Measure a server over HTTP and write a result.

    Short probes come first; a server that answers wrongly is measured with --force only, and the result has the verdict.
    Without a workload or values of one, a configuration with published figures is measured as these were: `bench show` judges
    them. Every case is measured; the result has every sample. Exit code 1 if a request failed.

    With --ablate, three starts each unless --restarts states another number; the result with an option is FILE.OPTION.json.
    """
    configuration = None if is_url(target) else configurations.load(target)
    if configuration:
        _require_options_of_config(target, running, launched)
    else:
        _require_options_of_url(launched)
    named_options = [name.strip() for name in launched.ablate.split(",")]
    options = ablation.options(configuration, named_options) if configuration and launched.ablate else ()
    restarts = launched.restarts or (RESTARTS if options else 0)
    stated = bench_environment.given_values(given or [])
    served = Served() if configuration else running.served(target)
    named_by_user = configurations.load(stated["configuration"]) if "configuration" in stated else None
    published_for = configuration or named_by_user or published.configuration_named(served.configuration)
    named, *others = choice.load(published.workloads(published_for) if published_for else ())
    for other in others:
        concurrency = ",".join(map(str, other.workload.concurrency))
        console.info(f"figures were also published by another method: -w {other.name} --concurrency {concurrency}")
    paths = [results.output, *(results.output.with_suffix(f".{each.name}.json") for each in options)]
    for path in paths:
        require_writable(path)
        require_new(path, "--output", results.overwrite)
    total = len(workload.cases(named.workload, 0)) * (restarts + 1) * len(paths)
    numbers = count(1)

    def saver(path: Path, option: str) -> Callable[[Result], None]:
        shown = 0
        until_complete = path.with_suffix(".partial.json") if path.is_file() else path
        if until_complete != path:
            console.info(f"{path} is replaced when its cases are complete; until then they are in {until_complete}")

        def save(partial: Result) -> None:
            nonlocal shown
            result_file.write(until_complete, partial)
            if partial.complete:
                until_complete.replace(path)
            for case in partial.cases[shown:]:
                shown += 1
                console.info(f"[{next(numbers)}/{total}] {option}{figures.line(case)}")

        return save

    with case_progress(total) as case_begins:
        names = ["", *(f"{each.name}, " for each in options)]
        measurements = [
            bench.Measurement(named, saver(path, name), stated, running.timeout, case_begins, brief_probe(results.force))
            for path, name in zip(paths, names, strict=True)
        ]
        if configuration:
            workspace = sources.workspace()
            variants = [configuration, *(ablation.configured(configuration, option) for option in options)]
            method = ablation.all_reduce(configuration, options)
            launches = [
                launched_servers.of_launch(*launched.prepare(one, workspace, method), measurement)
                for one, measurement in zip(variants, measurements, strict=True)
            ]
            measured = launched_servers.measure(launches, restarts)
        else:
            measured = [bench.run(running.measured(target, served), measurements[0])]
    for path, result in zip(paths, measured, strict=True):
        bench.require_answers(result, path)
    if options:
        effects = [ablation.effect(option, measured[0], having) for option, having in zip(options, measured[1:], strict=True)]
        render_effects(effects, as_json=results.json)
    else:
        render([(results.output.stem, measured[0])], as_json=results.json)
    console.info(f"result: {', '.join(map(str, paths))}")
    if failed := [sample for result in measured for case in result.cases for sample in case.samples if sample.error]:
        console.warn(f"{len(failed)} requests failed; {client.hint(failed[0].error)}")
        raise typer.Exit(1)


def _require_options_of_config(target: str, running: RunningServer, launched: LaunchedServer) -> None:
    if launched.model is None:
        raise typer.BadParameter(
            f"{target!r} is neither a URL (http://...) nor HOST:PORT, and a configuration needs its model folder",
            param_hint="--model",
        )
    if running.served_model_name or running.record:
        option = "--served-model-name" if running.served_model_name else "--run"
        raise typer.BadParameter("applies only to a running server: give a URL", param_hint=option)
    running.require_used(False, "give a URL")


def _require_options_of_url(launched: AblatedServer) -> None:
    if launched.model or launched.image:
        option = "--model" if launched.model else "--image"
        raise typer.BadParameter("applies only to a server to launch: give a CONFIG", param_hint=option)
    if launched.restarts or launched.ablate:
        option = "--ablate" if launched.ablate else "--restarts"
        raise typer.BadParameter("only a launched server can be restarted: give a CONFIG", param_hint=option)
