"""``sm120kit reproduce`` from end to end: a real server on loopback with a known schedule, which no published figure is of."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit import launch, reproducing
from sm120kit.bench import workload
from sm120kit.bench.receipt import Receipt, Served
from sm120kit.cli import app
from sm120kit.errors import Sm120kitError
from sm120kit.recipe import configuration
from sm120kit.records import Run
from sm120kit.workspace import data_root

SERVER = Path(__file__).with_name("schedule_server.py")
INTERVAL = 0.0005
A, B = "qwen3.5-122b-nvfp4-2x-rtx-pro-6000", "qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5"
PRO = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen([sys.executable, SERVER, "0", str(INTERVAL)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def in_process(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, output and error of the command, without a process of its own for it."""
    done = CliRunner().invoke(app, ["reproduce", *map(str, arguments)])
    if isinstance(done.exception, Sm120kitError):
        return done.exception.exit_code, done.stdout, f"{done.exception.message} {done.exception.hint}"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, re.sub(r"[\s│]+", " ", done.stderr)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of a command, whose tables are wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_a_server_that_is_not_what_was_published(url: str, place: Path) -> None:
    words = ("reproduce", A, "--url", url, "--quick", "--given", "power_limit=300 W", "--json")
    ran = subprocess.run([sys.executable, "-m", "sm120kit", *words], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 96, ran.stderr
    assert "no published figure can be compared" in ran.stderr
    said = json.loads(ran.stdout)
    assert said["verdict"] == "NOT COMPARABLE"
    first = next(one for one in said["judgements"] if one["reference"]["value"] == 194)
    differing = {found["field"]: (found["published"], found["here"]) for found in first["differences"]}
    assert set(differing) - {"gpus"} == {"model", "engine", "power limit", "roofline"}
    assert differing["model"] == ("txn545/Qwen3.5-122B-A10B-NVFP4", "schedule")
    assert differing["engine"] == ("sglang-0.5.11", "unknown")
    assert differing["power limit"] == ("600 W", "300 W")
    assert differing["gpus"][0] == "2 x RTX PRO 6000 Blackwell"
    # The rate and the honest one are told all the same.
    assert first["measured"]["tok_s"] == pytest.approx(1 / INTERVAL, rel=0.15)
    assert first["honest"]["tok_s"] == pytest.approx(1 / INTERVAL, rel=0.3)  # half a second only
    many = next(one for one in said["judgements"] if one["reference"]["users"] == 32)
    assert [found["field"] for found in many["differences"]][-1] == "users"  # --quick measures one only
    assert any(line.startswith("config-gpus: ") for line in said["host"])
    # Anybody can judge the receipts.
    kept = sorted(place.glob("*.json"))
    assert [path.name for path in kept] == [f"{A}.{name}.json" for name in ("real-prompts-thinking-off", "sustained-decode")]
    code, output, _ = in_process(A, "--receipt", kept[0], "--receipt", kept[1])
    assert code == 96
    assert "model: txn545/Qwen3.5-122B-A10B-NVFP4 / schedule" in output
    assert "doctor:" not in output


def edited(path: Path, **changed: Any) -> Path:
    """The receipt of a machine as the configuration describes it, with the rate that was measured here."""
    said = json.loads(path.read_text())
    about = said["circumstances"]
    about["machine"] |= {"gpus": [PRO] * 4, "power_limits_watts": [300.0] * 4}
    about["served"] |= {"configuration": B, "engine": "vllm-0.19.1"}
    about |= {"model": "Sehyo/Qwen3.5-397B-A17B-NVFP4"} | changed
    path.with_suffix(".edited").write_text(json.dumps(said))
    return path.with_suffix(".edited")


def test_verdicts_on_a_receipt(url: str, place: Path) -> None:
    code, _, error = in_process(B, "--url", url, "--quick")
    assert code == 96, error
    made = place / f"{B}.seed-short-thinking-on.json"
    # 2000 tok/s are more than four of these GPUs can read the weights for.
    code, output, _ = in_process(B, "--receipt", edited(made))
    assert (code, "above what the memory bandwidth allows" in output) == (96, True)
    # A model of which no architecture is known has no roofline; then the figure alone counts.
    text = (data_root() / "recipes" / "configurations" / f"{B}.toml").read_text()
    text = text.replace("Sehyo/Qwen3.5-397B-A17B-NVFP4", "some/model")
    receipt = edited(made, model="some/model")
    (place / f"{B}.toml").write_text(text)
    _, output, _ = in_process(f"{B}.toml", "--receipt", receipt, "--json")
    measured = json.loads(output)["judgements"][0]["measured"]["tok_s"]
    assert 0.5 / INTERVAL < measured < 1.05 / INTERVAL
    for share, verdict, told in ((0.99, 0, "REPRODUCED"), (1.05, 0, "WITHIN 4.8%"), (1.5, 95, "BELOW by 33.3%")):
        value = f"value = {share * measured:.3f}"
        (place / f"{B}.toml").write_text(re.sub(r"value = 278.0\nhighest = 283.0", value, text))
        code, output, error = in_process(f"{B}.toml", "--receipt", receipt)
        assert (code, told in output) == (verdict, True), output + error
    assert "the reasons that are known stand above" in error


def test_what_is_published_without_a_measurement(place: Path) -> None:
    code, output, error = in_process(A)
    assert code == 0, error
    assert "not measured" in output and "takes 1.8 of at most 6 tokens in each step" in output
    assert not any(place.iterdir())


def test_a_server_that_is_started_for_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    root = f"http://127.0.0.1:{port}"
    wanted = configuration.load(B)
    argv = (sys.executable, str(SERVER), str(port), "0.0001")
    run = Run(B, wanted.engine, "image", "name", str(tmp_path), argv, (), root, "", "")

    def start(do: Any) -> None:
        launch.serve(argv, root, tmp_path / "log", wait_seconds=20, patience_seconds=5, work=lambda: do(run))

    asked = [one for one in reproducing.plan(wanted, quick=True) if one.name != workload.load(reproducing.HONEST).name]

    def work(url: str, served: Served, earlier: Sequence[Receipt]) -> tuple[Receipt, ...]:
        return reproducing.measure(url, wanted, asked, tmp_path, given={}, served=served, earlier=earlier, restarts=1)

    (made,) = reproducing.with_server(start, work, restarts=1)
    assert (made.complete, made.circumstances.served.engine) == (True, wanted.engine)
    assert [cell.restart for cell in made.cells] == [0, 1]
    (one, _) = reproducing.judge(wanted, [made]).judgements
    assert one.measured and one.measured.starts == 2
    assert launch.port_is_free(port)


def test_bad_input(url: str, place: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    (place / "old.json").write_text('{"format": "sm120kit.receipt/99"}')
    (place / "other.json").write_text("[]")
    for arguments, code, words in (
        ((f"{A}x",), 10, "did you mean"),
        ((A, "--url", nobody), 90, "does not answer"),
        ((A, "--url", url, "--receipts", "none"), 44, "--receipts"),
        ((A, "--url", url, "--run", "none.json"), 92, "none.json"),
        ((A, "--run", "none.json"), 2, "name its --url"),
        ((A, "--url", url, "--restarts", "2"), 2, "only a server that is launched here"),
        ((A, "--url", url, "--receipt", "old.json"), 2, "only one of"),
        ((A, "--receipt", "old.json", "--given", "gpu=x"), 2, "a receipt says itself"),
        ((A, "--receipt", "old.json"), 92, "sm120kit.receipt/99"),
        ((A, "--receipt", "other.json"), 92, "format None"),
        ((A, "--receipt", "none.json"), 92, "No such file"),
        ((A, "--url", url, "--given", "gpu"), 2, "is not NAME=VALUE"),
    ):
        got, _, error = in_process(*arguments)
        assert (got, words in error) == (code, True), error
    assert sorted(path.name for path in place.iterdir()) == ["old.json", "other.json"]
