"""``sm120kit reproduce`` from end to end, with a real server on loopback whose tokens follow a schedule."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from schedule_server import schedule_server
from typer.testing import CliRunner

from sm120kit import serving
from sm120kit.bench import launched, reproduce, result_file
from sm120kit.bench.figures import summary as figures_of
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import Sm120kitError
from sm120kit.recipes import configurations
from sm120kit.serving import Run

SERVER = Path(__file__).parents[1] / "support" / "schedule_server.py"
INTERVAL = 0.0005
A, B = "qwen3.5-122b-nvfp4-2x-rtx-pro-6000", "qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5"
PRO = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with schedule_server(INTERVAL) as running:
        yield running


def reproduce_command(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, output and error of the command, run in this process."""
    done = CliRunner().invoke(app, ["reproduce", *map(str, arguments)])
    if isinstance(done.exception, Sm120kitError):
        return done.exception.exit_code, done.stdout, f"{done.exception.message} {done.exception.hint}"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, re.sub(r"[\s│]+", " ", done.stderr)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a width in which tables are not wrapped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_other_server_is_not_comparable_and_its_rates_are_reported(url: str, directory: Path) -> None:
    options = ("--url", url, "--quick", "--given", "power_limit=300 W", "--given", "machine=this", "--json")
    argv = [sys.executable, "-m", "sm120kit", "reproduce", A, *options]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 80, ran.stderr
    report = json.loads(ran.stdout)
    assert report["verdict"] == "NOT COMPARABLE"
    first = next(judgement for judgement in report["judgements"] if judgement["reference"]["value"] == 194)
    differences = {difference["field"]: (difference["published"], difference["here"]) for difference in first["differences"]}
    # Whether the rate exceeds the roofline depends on this machine.
    assert set(differences) - {"gpus", "roofline"} == {"model", "engine", "power limit", "samples"}
    assert differences["samples"] == ("at least 3 successful requests", "1"), "--quick sends one request"
    assert differences["model"] == ("txn545/Qwen3.5-122B-A10B-NVFP4", "schedule")
    assert differences["engine"] == ("sglang-0.5.11-b12x", "unknown")
    assert differences["power limit"] == ("600 W", "300 W")
    assert differences["gpus"][0] == "2 x RTX PRO 6000 Blackwell"
    paths = sorted(directory.glob("*.json"))
    assert [path.name for path in paths] == [f"{A}.{name}.json" for name in ("real-prompts-thinking-off", "sustained-decode")]
    # Both rates are reported although they are not comparable.
    real_prompts, published = (figures_of(result_file.read(path).cases[0]) for path in paths)
    assert first["measured"]["tok_s"] == pytest.approx(published.decode_tok_s)
    assert first["honest"]["tok_s"] == pytest.approx(real_prompts.decode_tok_s)
    many = next(judgement for judgement in report["judgements"] if judgement["reference"]["concurrency"] == 32)
    assert many["differences"][-1]["field"] == "concurrency", "--quick measures the fewest users only"
    assert any(line.startswith("config-gpus: ") for line in report["host"])
    # The results give the same verdict.
    code, output, _ = reproduce_command(A, "--result", paths[0], "--result", paths[1])
    assert code == 80
    assert "model: txn545/Qwen3.5-122B-A10B-NVFP4 / schedule" in output
    assert "doctor:" not in output


def edited(path: Path, tok_s: float, **changes: Any) -> Path:
    """A result of three starts of a machine as the configuration describes it, each with three steady streams of ``tok_s``."""
    content = json.loads(path.read_text())
    about = content["environment"]
    about["machine"] |= {"gpus": [PRO] * 4, "power_limits_watts": [300.0] * 4}
    about["served"] |= {"configuration": B, "engine": "vllm-0.19.1"}
    about |= {"model": "Sehyo/Qwen3.5-397B-A17B-NVFP4"} | changes
    for case in content["cases"]:
        (sample,) = case["samples"]
        tokens = sample["completion_tokens"]
        case["samples"] = []
        for turn in range(3):
            started = turn * tokens / tok_s
            times = [started + (number + 1) / tok_s for number in range(tokens)]
            moved = {"started": started, "ended": times[-1], "chunk_seconds": times, "answer_chunks": tokens}
            case["samples"].append(sample | moved | {"first_token": times[0], "first_answer": times[0]})
    content["cases"] = [case | {"restart": start} for start in range(3) for case in content["cases"]]
    path.with_suffix(".edited").write_text(json.dumps(content))
    return path.with_suffix(".edited")


def test_verdicts_on_a_result(url: str, directory: Path) -> None:
    code, _, error = reproduce_command(B, "--url", url, "--quick")
    assert code == 80, error
    path = directory / f"{B}.seed-short-thinking-on.json"
    # Four of these GPUs cannot read the weights fast enough for 2000 tok/s.
    code, output, _ = reproduce_command(B, "--result", edited(path, 2000))
    assert (code, "above what the memory bandwidth allows" in output) == (80, True)
    # A model without a known architecture has no roofline; only the figure counts.
    text = (data_root() / "recipes" / "configurations" / f"{B}.toml").read_text()
    text = text.replace("Sehyo/Qwen3.5-397B-A17B-NVFP4", "some/model")
    changed = edited(path, 2000, model="some/model")
    (directory / f"{B}.toml").write_text(text)
    _, output, _ = reproduce_command(f"{B}.toml", "--result", changed, "--json")
    measured = json.loads(output)["judgements"][0]["measured"]["tok_s"]
    assert measured == pytest.approx(2000)
    for share, expected, message in ((0.99, 0, "REPRODUCED"), (1.05, 0, "WITHIN 4.8%"), (1.5, 51, "BELOW by 33.3%")):
        value = f"value = {share * measured:.3f}"
        (directory / f"{B}.toml").write_text(re.sub(r"value = 278.0\nhighest = 283.0", value, text))
        code, output, error = reproduce_command(f"{B}.toml", "--result", changed)
        assert (code, message in output) == (expected, True), output + error
    assert "the output above has the known reasons" in error


def test_published_figures_without_a_measurement(directory: Path) -> None:
    code, output, error = reproduce_command(A)
    assert code == 0, error
    assert "not measured" in output and "198 tok/s take 3.2 of at most 6 tokens" in output
    assert not any(directory.iterdir())


def test_launched_server_is_measured_after_each_start(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    root = f"http://127.0.0.1:{port}"
    configuration = configurations.load(B)
    argv = (sys.executable, str(SERVER), str(port), "0.0001")
    run = Run(B, configuration.engine, "image", "name", str(tmp_path), argv, (), root, "", "")

    def start(work: Callable[[Run], None]) -> None:
        server = serving.ServerProcess(argv, root, tmp_path / "log", wait_seconds=20, patience_seconds=5)
        serving.serve(server, work=lambda: work(run))

    published = [named for named in reproduce.plan(configuration, quick=True) if named.name != reproduce.REAL_PROMPTS]
    measurements = reproduce.measurements(configuration, published, tmp_path, given={})
    ((result,),) = launched.measure([launched.LaunchedConfiguration(start, configuration, measurements)], restarts=1)
    assert (result.complete, result.environment.served.engine) == (True, configuration.engine)
    assert [case.restart for case in result.cases] == [0, 1]
    assert result_file.read(reproduce.result_path(tmp_path, configuration, published[0])) == result
    first, _ = reproduce.judge(configuration, [result]).judgements
    assert first.measured and first.measured.starts == 2
    assert serving.port_is_free(port)


KILLED = """
import os, signal, sys
from sm120kit.bench import result_file
from sm120kit.cli import app
write = result_file.write
def write_and_die(path, result):
    write(path, result)
    if result.complete:
        os.kill(os.getpid(), signal.SIGKILL)
result_file.write = write_and_die
app(sys.argv[1:])
"""


def test_killed_run_goes_on_and_no_result_is_replaced(url: str, directory: Path) -> None:
    options = [A, "--url", url, "--quick"]
    killed = subprocess.run([sys.executable, "-c", KILLED, "reproduce", *options], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    (first,) = directory.iterdir()
    measured = first.read_bytes()
    code, _, error = reproduce_command(*options)
    assert code == 80, error
    assert first.read_bytes() == measured
    (second,) = set(directory.iterdir()) - {first}
    both = {path: path.read_bytes() for path in (first, second)}
    for arguments, expected, message in (
        (options, 42, f"--result {first.name} --result {second.name}"),
        (options[:3], 42, "a complete result"),
    ):
        code, _, error = reproduce_command(*arguments)
        assert (code, message in error) == (expected, True), error
    second.unlink()
    code, _, error = reproduce_command(*options[:3])
    assert (code, "other options" in error, "--quick" in error) == (80, True, True), error
    second.write_text("[]")
    code, _, error = reproduce_command(*options)
    assert (code, "is not a result" in error) == (42, True), error
    assert first.read_bytes() == both[first]
    code, _, error = reproduce_command(*options, "--overwrite")
    assert code == 80 and first.read_bytes() != both[first], error


def test_bad_input(url: str, directory: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
    (directory / "old.json").write_text('{"format": "sm120kit.result/99"}')
    (directory / "other.json").write_text("[]")
    for arguments, expected, message in (
        ((f"{A}x",), 10, "did you mean"),
        ((A, "--url", unreachable), 70, "does not answer"),
        ((A, "--url", url, "--results", "none"), 42, "--results"),
        ((A, "--url", url, "--run", "none.json"), 11, "none.json"),
        ((A, "--run", "none.json"), 2, "add --url"),
        ((A, "--url", url, "--restarts", "2"), 2, "only a launched server can be restarted"),
        ((A, "--url", url, "--result", "old.json"), 2, "only one of"),
        ((A, "--result", "old.json", "--given", "gpu=x"), 2, "a result already has"),
        ((A, "--result", "old.json"), 11, "sm120kit.result/99"),
        ((A, "--result", "other.json"), 11, "is not a result: it has no format"),
        ((A, "--result", "none.json"), 11, "No such file"),
        ((A, "--url", url, "--given", "gpu"), 2, "is not NAME=VALUE"),
    ):
        code, _, error = reproduce_command(*arguments)
        assert (code, message in error) == (expected, True), error
    assert sorted(path.name for path in directory.iterdir()) == ["old.json", "other.json"]
