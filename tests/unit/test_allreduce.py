"""The comparison of all-reduces: a rank that stalls or dies is named, wrong sums are refused, serve uses what was measured."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, NotFound, RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.recipes import configurations
from sm120kit.serving import Service, allreduce

sys.path.insert(0, str(Path(__file__).parents[2] / "image_programs"))
import allreduce as program  # type: ignore[import-not-found]  # in the image

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from allreduce_ranks import dies, healthy, idle, stalls  # type: ignore[import-not-found]  # also of the processes that are started

ONE = "qwen3.6-35b-a3b-nvfp4-1x-rtx-pro-6000"
TWO = "minimax-m2.7-nvfp4-2x-rtx-pro-6000"
NCCL = ("nccl", "nccl-loc", "nccl-sys")
REQUEST = {"method": "nccl", "world": 2, "hidden": 64, "rows": [1, 8], "dtype": "bfloat16"}
REQUEST |= {"setup_seconds": 300, "step_seconds": 300}


def _run(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **limits: int
) -> allreduce.MeasuredAllReduce:
    monkeypatch.setattr(program, "measure", measure)
    monkeypatch.setattr(program, "use_gpu", idle)
    program.main(json.dumps(REQUEST | limits))
    return allreduce.judged("nccl", capsys.readouterr().out)


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured = _run(healthy, monkeypatch, capsys)
    assert measured.timings == (allreduce.Timing(1, 0, 11.0), allreduce.Timing(8, 0, 11.0)) and not measured.problem


def test_a_rank_that_is_behind_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problem = _run(stalls, monkeypatch, capsys, step_seconds=1).problem
    assert "rank 1" in problem and "sums of 8 rows" in problem


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problem = _run(dies, monkeypatch, capsys).problem
    assert "rank 1" in problem and "graph of 1 rows" in problem and "7" in problem


@pytest.mark.parametrize(
    "line",
    [
        {"rows": 8, "wrong": 3, "graph_wrong": 0, "microseconds": 1.0},
        {"rows": 8, "wrong": 0, "graph_wrong": 2, "microseconds": 1.0},
        {"sequence": 300, "wrong": 1},
        {"end": "died", "rank": 0, "step": "set up", "exit": 1},
        None,
    ],
)
def test_a_problem_is_never_best(line: dict[str, Any] | None) -> None:
    good = {"rows": 8, "wrong": 0, "graph_wrong": 0, "microseconds": 9.0}
    slow = allreduce.judged("nccl", "\n".join(map(json.dumps, (good, {"end": "finished"}))))
    lines = [
        good | {"microseconds": 1.0},
        *([line] if line else []),
        *([{"end": "finished"}] if line and "end" not in line else []),
    ]
    fast = allreduce.judged("pcie-ipc", "\n".join(map(json.dumps, lines)))
    assert fast.problem and allreduce.best((slow, fast)) == "nccl"
    with pytest.raises(BadInput, match=re.escape(fast.problem)):
        allreduce.best((fast,))


def test_serve_uses_what_was_measured_in_this_image_on_these_gpus(tmp_path: Path) -> None:
    configuration, workspace, gpus = (
        configurations.load(TWO),
        Workspace.open(tmp_path / "state"),
        ("0: RTX PRO 6000", "1: RTX PRO 6000"),
    )

    reported: list[str] = []

    def selected(choice: str = "auto", image: str = "1" * 64, gpus: tuple[str, ...] = gpus) -> str:
        return allreduce.selected(choice, configuration, image, gpus, workspace)

    assert selected() == allreduce.DEFAULT
    record = allreduce.AllReduceRecord("1" * 64, gpus, 64, (), "pcie-ipc")
    path = allreduce.store(record, configuration, workspace)
    assert selected() == "pcie-ipc" and selected("nccl") == "nccl"
    assert selected(gpus=("0: RTX 5090", "1: RTX 5090")) == selected(image="") == selected(image="2" * 64) == allreduce.DEFAULT
    for others in (gpus[::-1], ("2: RTX PRO 6000", "3: RTX PRO 6000")):
        assert selected(gpus=others) == allreduce.DEFAULT
    path.write_text("{")
    assert selected() == allreduce.DEFAULT
    os.truncate(path, allreduce.LIMIT_BYTES + 1)
    with reporting.use(SimpleNamespace(warn=reported.append)):  # type: ignore[arg-type]
        assert selected() == allreduce.DEFAULT
    assert "more than 1 MiB" in reported[0] and str(path) in reported[0]
    path.unlink()
    os.mkfifo(path)
    assert selected() == allreduce.DEFAULT
    with pytest.raises(NotFound, match="ring"):
        selected("ring")
    for choice in ("ring", "pcie-ipc"):
        with pytest.raises(NotFound, match=choice):
            allreduce.selected(choice, configurations.load(ONE), "", ("RTX PRO 6000",), workspace)


def test_only_engines_with_its_flashinfer_have_pcie_ipc() -> None:
    today = configurations.load(TWO)
    assert allreduce.measurable(today) == (*NCCL, "custom", "pcie-ipc")
    assert allreduce.measurable(replace_engine(today, "vllm-0.19.1")) == (*NCCL, "custom")
    with pytest.raises(RequirementMissing):
        allreduce.measurable(configurations.load(ONE))


def test_a_server_has_the_arguments_and_variables_of_its_all_reduce() -> None:
    four = configurations.load(TWO)
    service = Service("s", "sha256:1", ("vllm", "serve"), {"A": "1"}, (), (0, 1), 1, False, {}, 8000)
    nccl = allreduce.using(service, four, "nccl")
    assert nccl.argv == ("vllm", "serve", "--disable-custom-all-reduce") and nccl == allreduce.using(nccl, four, "nccl")
    assert allreduce.using(service, four, "pcie-ipc").environment == {"A": "1", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}
    assert allreduce.using(service, four, "custom") == allreduce.using(service, four, allreduce.DEFAULT) == service
    levels = [allreduce.using(service, four, f"nccl-{level}") for level in ("loc", "sys")]
    assert [each.environment["NCCL_P2P_LEVEL"] for each in levels] == ["LOC", "SYS"] and {each.argv for each in levels} == {
        nccl.argv
    }


def test_sglang_uses_pcie_ipc_on_two_gpus_only_without_its_own() -> None:
    """Its own comes first for every message that it takes (srt/distributed/parallel_state.py of 0.5.23)."""
    two = configurations.load("deepseek-v4-flash-2x-rtx-pro-6000-sglang")
    assert "--disable-custom-all-reduce" in two.arguments and "custom" not in allreduce.measurable(two)
    having = two.model_copy(
        update={"arguments": tuple(word for word in two.arguments if word != "--disable-custom-all-reduce")}
    )
    assert "custom" in allreduce.measurable(having)
    service = Service("s", "sha256:1", ("sglang",), {}, (), (0, 1), 1, False, {}, 8000)
    assert allreduce.using(service, having, "pcie-ipc").argv == ("sglang", "--disable-custom-all-reduce")


def replace_engine(configuration: configurations.Configuration, engine: str) -> configurations.Configuration:
    return configuration.model_copy(update={"engine": engine})


def test_rows_are_those_of_requests_with_their_drafts() -> None:
    drafting = configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro-6000-mtp5")
    assert drafting.speculation and drafting.speculation.draft_tokens == 5
    assert {1, 6, 32, 192} <= set(allreduce.rows(drafting))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"hidden_size": "x"}', '{"hidden_size": 1e400}', '{"hidden_size": -1}'])
def test_a_hidden_size_is_read_or_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        allreduce.hidden_size(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config\.json"):
        allreduce.hidden_size(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 3072}}')
    assert allreduce.hidden_size(tmp_path) == 3072
