"""``sm120kit reproduce``: compare a configuration's published figures with this machine, or with results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from sm120kit import bench
from sm120kit.bench import MeasuredServer, reproduce, result_file, roofline
from sm120kit.bench import launched as launched_servers
from sm120kit.bench.reproduce import Bound, Judgement, Rate, ReproductionReport, ReproductionVerdict
from sm120kit.bench.result_file import Result
from sm120kit.cli.bench_workload import Given, case_progress
from sm120kit.cli.options import ConfigName, Json, ServerAccess, Sources, Timeout, given_values, option
from sm120kit.cli.serve import LaunchedServer
from sm120kit.core import console
from sm120kit.core.errors import CheckFailed, NotComparable
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration


@dataclass(frozen=True)
class ServerAtUrl(ServerAccess):
    """A server that is running already."""

    url: Annotated[str, option("--url URL", "Measure this server, which was started as CONFIG describes.")] = ""
    record: Annotated[Path | None, option("--run FILE", "With --url: the record that serve wrote for this server.")] = None
    timeout: Timeout = 120.0

    def measured(self, configuration: Configuration) -> MeasuredServer:
        """The server with the configuration's model if it offers it, else its only model.

        Raises:
            Sm120kitError: the server does not answer or offers several other models, or the record is of another server.
        """
        return bench.running_server(self.endpoint(self.url), self.record, preferred=configuration.model.repository)


@dataclass(frozen=True)
class Method:
    """How the figures are measured and judged."""

    directory: Annotated[Path, option("--results DIR", "Where results are written; partial ones are resumed.")] = Path()
    overwrite: Annotated[bool, option("--overwrite", "Replace existing results.")] = False
    quick: Annotated[bool, option("--quick", "Only the lowest concurrency, one request for each in parallel.")] = False
    given: Given = None


def reproduce_(
    config: ConfigName,
    *,
    running: ServerAtUrl,
    launched: LaunchedServer,
    results: Annotated[list[Path] | None, option("--result FILE", "Measure nothing; judge this result; repeatable.")] = None,
    method: Method,
    sources: Sources,
    json: Json = False,
) -> None:
    """Compare a configuration's published figures with this machine.

    Measures by the published methods and with real prompts. Without --url, --model or --result it measures nothing and
    prints what the figures require. After an interruption the same command measures what is missing. Exit code 0: every
    comparable figure was reached, or is within the variation between restarts; 95: a figure is below; 96: none is comparable.
    """
    _require_consistent(results, running, launched, method)
    stated = given_values(method.given or [])
    configuration = configurations.load(config)
    if running.url or launched.model:
        measured = _measure(configuration, running, launched, sources, method, stated)
        findings = reproduce.findings(configuration, measured)
    else:
        measured = tuple(result_file.read(path) for path in results or ())
        findings = ()
    model = roofline.model_in(launched.model) if launched.model else None
    report = reproduce.judge(configuration, measured, findings, model)
    if json:
        judgements = [
            {
                **asdict(judgement),
                "reference": judgement.reference.model_dump(),
                "words": judgement.text,
                "expectation": judgement.expectation,
            }
            for judgement in report.judgements
        ]
        console.json_data({"verdict": report.verdict, **asdict(report), "judgements": judgements})
    else:
        _show(report)
    if report.verdict is ReproductionVerdict.BELOW:
        raise CheckFailed(f"{configuration.name}: a published figure was not reached", "the output above has the known reasons")
    if measured and report.verdict is ReproductionVerdict.NOT_COMPARABLE:
        raise NotComparable(
            f"{configuration.name}: no published figure is comparable with the measurement",
            "the output above has the fields that differ; supply unknown ones with --run RECORD or --given gpu='2x ...'",
        )


def _require_consistent(results: list[Path] | None, running: ServerAtUrl, launched: LaunchedServer, method: Method) -> None:
    """Refuse options that contradict each other."""
    if sum((bool(running.url), launched.model is not None, bool(results))) > 1:
        raise typer.BadParameter("use only one of --url, --model and --result")
    if running.record and not running.url:
        raise typer.BadParameter("applies only to a running server: add --url", param_hint="--run")
    running.require_used(bool(running.url), "add --url")
    if launched.image and not launched.model:
        raise typer.BadParameter("applies only to a server to launch: add --model", param_hint="--image")
    if launched.restarts and not launched.model:
        raise typer.BadParameter("only a launched server can be restarted: add --model", param_hint="--restarts")
    if method.given and results:
        raise typer.BadParameter("a result already has the environment stated for it", param_hint="--given")


def _measure(
    configuration: Configuration,
    running: ServerAtUrl,
    launched: LaunchedServer,
    sources: Sources,
    method: Method,
    stated: dict[str, str],
) -> tuple[Result, ...]:
    """Measure a running server, or one that is launched for it; one result per workload."""
    workloads = reproduce.plan(configuration, quick=method.quick)
    directory = method.directory
    earlier = {} if method.overwrite else reproduce.earlier(configuration, workloads, directory, launched.restarts)
    for name, partial in earlier.items():
        console.info(f"{name}: {len(partial.cases)} cases are measured already")
    cases = reproduce.case_count(workloads) * (launched.restarts + 1) - sum(len(kept.cases) for kept in earlier.values())
    with case_progress(cases, announce=True) as case_begins:
        measurements = tuple(
            replace(measurement, stall_seconds=running.timeout)
            for measurement in reproduce.measurements(configuration, workloads, directory, stated, case_begins, earlier)
        )
        if launched.model:
            prepared, options = launched.prepare(configuration, sources.workspace())
            (measured,) = launched_servers.measure(
                [launched_servers.of_launch(prepared, options, measurements)], launched.restarts
            )
        else:
            server = running.measured(configuration)
            measured = tuple(bench.run(server, measurement) for measurement in measurements)
    for named in workloads:
        console.info(f"result: {reproduce.result_path(directory, configuration, named)}")
    return measured


def _show(report: ReproductionReport) -> None:
    console.table(
        ("published", "concurrency", "class", "verdict", "measured", "real prompts", "expected", "roofline"),
        (
            (
                f"{judgement.reference.value:g} tok/s",
                judgement.reference.concurrency,
                judgement.reference.reproducibility,
                judgement.text,
                _rate(judgement.measured),
                _rate(judgement.honest),
                _expected(judgement.bound),
                _roofline(judgement.bound),
            )
            for judgement in report.judgements
        ),
    )
    differences = [_differences(judgement) for judgement in report.judgements]
    common = [line for line in differences[0] if len(differences) > 1 and all(line in lines for lines in differences)]
    sections = [("every published figure", common)]
    for judgement, lines in zip(report.judgements, differences, strict=True):
        own = [line for line in lines if line not in common]
        expectation = [judgement.expectation] if judgement.expectation else []
        sections.append((_name(judgement), [*own, *judgement.reasons, *expectation]))
    for name, lines in sections:
        if lines:
            console.data(f"{name}:")
        for line in lines:
            console.data(f"  {line}")
    for name, remarks in (("doctor", report.host), ("caveat", report.caveats)):
        for remark in remarks:
            console.data(f"{name}: {remark}")


def _name(judgement: Judgement) -> str:
    reference = judgement.reference
    return f"{reference.value:g} tok/s, concurrency {reference.concurrency}; {reference.conditions}"


def _differences(judgement: Judgement) -> list[str]:
    return [f"{difference.field}: {difference.published} / {difference.here}" for difference in judgement.differences]


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return ""
    spread = f" ({rate.lowest:.1f}-{rate.highest:.1f})" if rate.highest > rate.lowest else ""
    return f"{rate.tok_s:.1f}{spread}"


def _roofline(bound: Bound | None) -> str:
    if bound is None:
        return "unknown"
    drafts = bound.expected.at_most > 1 and bound.acceptance is None
    return f"{bound.roofline:.0f}" + " if every draft is accepted" * drafts


def _expected(bound: Bound | None) -> str:
    rate = bound.expected.tok_s if bound else None
    return f"{rate:.0f}" if rate else "unknown"
