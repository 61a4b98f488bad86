"""Load of a real HTTP server with a schedule: options that replace a workload's values, and rates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from schedule_server import schedule_server
from typer.testing import CliRunner
from typer.testing import Result as CliResult

from sm120kit.bench import result_file
from sm120kit.cli import app


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with schedule_server() as running:
        yield running


def bench_run(url: str, output: Path, *options: object) -> CliResult:
    return CliRunner().invoke(app, ["bench", "run", url, "-w", "quick", "-o", str(output), *map(str, options)])


def measured(url: str, output: Path, *options: object, **schedule: object) -> CliResult:
    body = json.dumps({"schedule": schedule}) if schedule else "{}"
    result = bench_run(url, output, *options, "--extra-body", body)
    assert result.exit_code == 0, result.output
    return result_file.read(output)


def test_values_of_a_workload_are_replaced(url: str, tmp_path: Path) -> None:
    run = measured(url, tmp_path / "r.json", "--concurrency", "1,3", "--output-tokens", "20,30", "--requests", 2)
    assert sorted(case.key[:2] for case in run.cases) == [(1, 20), (1, 30), (3, 20), (3, 30)]
    assert {len(case.samples) // case.concurrency for case in run.cases} == {2}
    assert {sample.completion_tokens for case in run.cases for sample in case.samples if case.output_tokens == 30} == {30}
    unchanged = tmp_path / "unchanged.json"
    assert bench_run(url, unchanged).exit_code == 0
    assert result_file.read(unchanged).environment.workload_sha256 != run.environment.workload_sha256


def test_rate_does_not_wait_for_answers(url: str, tmp_path: Path) -> None:
    options = ("--concurrency", 10, "--requests", 1, "--rate", 50)
    run = measured(url, tmp_path / "r.json", *options, tokens=2, together=10)  # none is answered before all are sent
    started = sorted(sample.started for sample in run.cases[0].samples)
    assert len(started) == 10 and started[-1] - started[0] > 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1,x"], "is not a list of numbers"),
        (["--concurrency", "2,2"], "has a number twice"),
        (["--concurrency", "0"], "concurrency"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--extra-body", "@absent.json"], "No such file"),
    ],
)
def test_bad_options_are_refused(url: str, tmp_path: Path, options: list[str], message: str) -> None:
    result = bench_run(url, tmp_path / "r.json", *options)
    assert result.exit_code != 0 and not (tmp_path / "r.json").exists()
    assert message in " ".join((result.output + str(result.exception)).replace("│", " ").split())
