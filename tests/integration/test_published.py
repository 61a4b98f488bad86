"""``bench run`` as published figures were measured, and ``bench show``, with a server whose tokens follow a schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schedule_server import schedule_server
from typer.testing import CliRunner

from sm120kit.bench import result_file
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root

A, B = "qwen3.5-122b-nvfp4-2x-rtx-pro-6000", "qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5"
PRO = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with schedule_server(0.0005) as running:
        yield running


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(url: str, configuration: str) -> None:
    words = ["bench", "run", url, "--quick", "--given", f"configuration={configuration}", "--given", "machine=this"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def shown(path: str) -> Any:
    done = CliRunner().invoke(app, ["bench", "show", path, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_other_server_is_measured_as_published_and_not_comparable(url: str, directory: Path) -> None:
    measured(url, A)
    result = result_file.read(directory / "result.json")
    assert (result.environment.workload, [case.concurrency for case in result.cases]) == ("sustained-decode", [1])
    report = shown("result.json")
    figures = [(each["reference"]["value"], each["reached"]) for each in report["published"]]
    assert figures == [(198, None), (194, None)]
    differences = {each["field"]: (each["published"], each["here"]) for each in report["published"][0]["differences"]}
    # Whether the rate exceeds the roofline depends on this machine.
    assert set(differences) - {"gpus", "roofline"} == {"model", "engine", "samples"}
    assert differences["samples"] == ("at least 3 successful requests", "1"), "--quick sends one request"
    assert differences["model"] == ("txn545/Qwen3.5-122B-A10B-NVFP4", "schedule")
    assert report["published"][0]["measured"]["tok_s"] == pytest.approx(report["cases"][0]["decode_tok_s"])
    assert "model: published txn545/Qwen3.5-122B-A10B-NVFP4, here schedule" in report["comparisons"]


def edited(path: Path, tok_s: float, **changes: Any) -> None:
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
    path.write_text(json.dumps(content))


def test_verdicts_on_a_result(url: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(url, B)
    # Four of these GPUs cannot read the weights fast enough for 2000 tok/s.
    edited(directory / "result.json", 2000)
    assert any(line.startswith("roofline: published at most ") for line in shown("result.json")["comparisons"])
    # A model without a known architecture has no roofline; only the figure counts.
    text = (data_root() / "recipes" / "configurations" / f"{B}.toml").read_text()
    text = text.replace("Sehyo/Qwen3.5-397B-A17B-NVFP4", "some/model").replace(f'"{B}"', '"mine"')
    (directory / "sm120kit.toml").write_text("edition = 1\n")
    (directory / "configurations").mkdir()
    content = json.loads((directory / "result.json").read_text())
    content["environment"]["model"] = "some/model"
    content["environment"]["served"]["configuration"] = "mine"
    (directory / "result.json").write_text(json.dumps(content))
    for value, verdict in ((1980, "REACHED in 3 starts"), (2100, "BELOW by 4.8%")):
        changed = re.sub(r"value = 278.0\nhighest = 283.0", f"value = {value:.1f}", text)
        (directory / "configurations" / "mine.toml").write_text(changed)
        (figure, *_) = shown("result.json")["published"]
        assert (figure["text"], figure["measured"]["tok_s"]) == (verdict, pytest.approx(2000))


def test_values_of_a_workload_are_not_the_published_ones(url: str, directory: Path) -> None:
    words = [
        "bench",
        "run",
        url,
        "--given",
        f"configuration={A}",
        "--concurrency",
        "1",
        "--output-tokens",
        "8",
        "--requests",
        "1",
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert result_file.read(directory / "result.json").environment.workload == "quick"
    (first, *_) = shown("result.json")["published"]
    assert first["reached"] is None and "workload" in first["text"]


def test_unknown_configuration_is_refused(url: str, directory: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "run", url, "--given", f"configuration={A}x"])
    assert "did you mean" in str(done.exception) and not any(directory.iterdir())
