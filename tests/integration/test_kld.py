"""Compare checkpoints of a tiny model, by Transformers and behind a server with vLLM's protocol."""

from __future__ import annotations

import http.server
import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

import torch
from cpu_server import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sm120kit.cli import app
from sm120kit.core.errors import (
    CannotMeasure,
    NoModel,
    NotACheckpoint,
    NothingMeasured,
    ServerUnreachable,
    StateUnwritable,
    WrongModel,
)

WINDOWS = ["--windows", "3", "--window", "32", "--stride", "8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("home"))


def modified_copy(tiny: Path, target: Path, modify: Any) -> Path:
    """A copy of a checkpoint with ``modify`` applied to each weight."""
    shutil.copytree(tiny, target)
    weights = load_file(target / "model.safetensors")
    save_file({name: modify(name, weight) for name, weight in weights.items()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def perturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return modified_copy(
        tiny, tmp_path_factory.mktemp("p") / "m", lambda name, weight: weight + 0.02 * torch.randn_like(weight)
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Two kilobytes of words are more than a window of them needs; so says the text. " * 4)
    return path


def kld(*argv: object) -> Result:
    return CliRunner().invoke(app, ["kld", *map(str, argv)])


def comparison(*argv: object, exit_code: int = 0) -> dict[str, Any]:
    result = kld(*argv, "--json")
    assert result.exit_code == exit_code, result.output
    return dict(json.loads(result.stdout))


def logits(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return model(torch.tensor(windows)).logits.float()


def test_model_and_itself(tiny: Path, text: Path) -> None:
    record = comparison(tiny, tiny, "--text", text, *WINDOWS)
    assert record["exact"] and record["complete"]
    result = record["result"]
    assert (result["positions"], result["top1_differs"]) == (96, 0)
    assert (result["mean"], result["max"]) == (0, 0), "the same model in the same batch computes the same bits"
    assert 0 <= abs(record["noise"]["mean"]) < 1e-4, "BF16 rounds differently in another batch, by a small amount"


def test_perturbed_copy_equals_float64_computation(tiny: Path, perturbed: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "kld.json"
    record = comparison(tiny, perturbed, "--text", text, *WINDOWS, "--output", output)
    assert json.loads(output.read_text()) == record
    ids = AutoTokenizer.from_pretrained(tiny)(text.read_text(), add_special_tokens=False)["input_ids"]
    nats = []
    for batch in ([ids[0:32], ids[8:40]], [ids[16:48]]):  # the batches of the tool: BF16 rounds by batch
        p, q = (logits(folder, batch).double().log_softmax(-1) for folder in (tiny, perturbed))
        nats += torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).flatten().tolist()
    result = record["result"]
    assert result["positions"] == len(nats) == 96
    assert result["mean"] == pytest.approx(math.fsum(nats) / 96, rel=1e-5)
    assert result["max"] == pytest.approx(max(nats), rel=1e-5)
    assert result["p99"] == pytest.approx(torch.tensor(nats, dtype=torch.float64).quantile(0.99).item(), rel=1e-5)
    assert result["mean"] > 100 * abs(record["noise"]["mean"])
    shown = kld(tiny, perturbed, "--text", text, *WINDOWS)
    assert f"{result['mean']:.3g}" in shown.output and "control" in shown.output and shown.exit_code == 0
    limited = kld(tiny, perturbed, "--text", text, *WINDOWS, "--max-mean", result["mean"] / 2)
    assert limited.exit_code == 1 and f"the mean of {result['mean']:.3g} nats is larger than" in limited.output


def test_nan_in_some_or_all_positions(tiny: Path, text: Path, tmp_path: Path) -> None:
    ids = [AutoTokenizer.from_pretrained(tiny)(letter)["input_ids"][0] for letter in "ab#"]
    rare = tmp_path / "rare.json"
    rare.write_text(json.dumps([ids[position % 2] for position in range(44)] + [ids[2]] * 4))  # only in the third window

    def with_nan(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name == "model.embed_tokens.weight":
            weight = weight.clone()
            weight[ids[2]] = torch.nan
        return weight

    some = modified_copy(tiny, tmp_path / "some", with_nan)
    result = comparison(tiny, some, "--text", rare, *WINDOWS, exit_code=1)["result"]
    # The attention of torch on a CPU spreads a NaN over its window.
    assert (result["nan_reference"], result["nan_test"], result["positions"]) == (0, 32, 64)
    assert result["mean"] == 0 and len(result["window_means"]) == 2
    shown = kld(tiny, some, "--text", rare, *WINDOWS)
    assert shown.exit_code == 1 and "the test returns NaN at 32 of 96 positions" in shown.output
    assert "not rated" in shown.output and "lossless" not in shown.output
    everywhere = modified_copy(tiny, tmp_path / "all", lambda name, weight: weight * torch.nan)
    assert refused(kld(tiny, everywhere, "--text", text, *WINDOWS), NothingMeasured, "96 in the test")


def refused(result: Result, kind: type[Exception], message: str) -> bool:
    assert isinstance(result.exception, kind), (result.exception, result.output)
    assert message in str(result.exception), result.exception
    return True


class Server(http.server.ThreadingHTTPServer):
    """``/v1/models`` and ``/v1/completions`` with ``prompt_logprobs``, as in vLLM. ``silent``: without log-probabilities."""

    def __init__(self, folder: Path, max_logprobs: int, silent: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.max_logprobs, self.silent = folder, max_logprobs, silent
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._respond(200, {"object": "list", "data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        top = request["prompt_logprobs"]
        if self.server.max_logprobs != -1 and not 0 <= top <= self.server.max_logprobs:
            self._respond(400, {"error": {"message": f"Requested prompt logprobs of {top}, which is greater than max allowed"}})
            return
        choices = [
            {"index": n, "text": "x", "prompt_logprobs": None if self.server.silent else self._positions(window, top)}
            for n, window in enumerate(request["prompt"])
        ]
        self._respond(200, {"choices": choices[::-1]})

    def _positions(self, window: list[int], top: int) -> list[Any]:
        logprobs = logits(self.server.folder, [window])[0].log_softmax(-1)
        positions: list[Any] = [None]
        for position, token in enumerate(window[1:]):
            ranked = logprobs[position].argsort(descending=True).tolist()
            listed = ranked if top == -1 else [*ranked[:top], token]
            positions.append(
                {str(id_): {"logprob": float(logprobs[position][id_]), "rank": 1, "decoded_token": "x"} for id_ in listed}
            )
        return positions

    def _respond(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    started: list[Server] = []

    def start(folder: Path, max_logprobs: int, silent: bool = False) -> str:
        started.append(Server(folder, max_logprobs, silent))
        return started[-1].url

    yield start
    for server in started:
        server.shutdown()


def test_models_behind_servers(tiny: Path, perturbed: Path, text: Path, serve: Any) -> None:
    first, second = serve(tiny, -1), serve(perturbed, -1)
    local = comparison(tiny, perturbed, "--text", text, *WINDOWS)["result"]
    full = comparison(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS, "--top", -1)
    assert full["result"]["positions"] == 93, "a server returns no distribution after the last token"
    assert full["result"]["mean"] == pytest.approx(local["mean"], rel=0.05)
    assert not full["exact"]
    few = comparison(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS)
    assert 0 < few["result"]["mean"] < full["result"]["mean"], "a lower bound"
    mixed = comparison(tiny, second, "--text", text, *WINDOWS)
    assert few["result"]["mean"] <= mixed["result"]["mean"] <= full["result"]["mean"] * 1.01
    shown = kld(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS).output
    assert few["result"]["covered"] < 0.5 and "a lower bound" in shown and "lossless" not in shown, (
        "a bound of little coverage has no rating"
    )
    assert full["result"]["covered"] == pytest.approx(1)
    control = comparison(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS, "--control", second)
    assert control["control"] == f"tiny at {second}"
    assert control["noise"]["mean"] == pytest.approx(control["result"]["mean"])


def test_bad_input_is_refused(tiny: Path, perturbed: Path, text: Path, tmp_path: Path, serve: Any) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(3, 100))))
    assert comparison(tiny, perturbed, "--text", ids, *WINDOWS)["result"]["positions"] == 96
    assert refused(kld(tiny, tmp_path / "absent", "--text", text, *WINDOWS), NoModel, "absent")
    (tmp_path / "empty").mkdir()
    assert refused(kld(tiny, tmp_path / "empty", "--text", text, *WINDOWS), NotACheckpoint, "empty")
    assert refused(kld(tiny, tiny, "--text", tmp_path / "no.txt", *WINDOWS), NoModel, "no.txt")
    ids.write_text('["a"]')
    assert refused(kld(tiny, tiny, "--text", ids, *WINDOWS), NotACheckpoint, "not a list of token ids")
    assert refused(kld(tiny, tiny, "--text", text), NothingMeasured, "100 windows of 2048 tokens")
    assert refused(kld(tiny, tiny, "--text", text, *WINDOWS, "--output", tmp_path / "no" / "x.json"), StateUnwritable, "x.json")
    gone = "http://127.0.0.1:9"
    assert refused(kld(tiny, gone, "--text", text, *WINDOWS), ServerUnreachable, gone)
    narrow, silent = serve(tiny, 5), serve(tiny, -1, silent=True)
    assert refused(kld(tiny, narrow, "--text", text, *WINDOWS), CannotMeasure, "greater than max allowed")
    assert comparison(tiny, narrow, "--text", text, *WINDOWS, "--top", 5)["result"]["positions"] == 93
    assert refused(kld(tiny, silent, "--text", text, *WINDOWS), CannotMeasure, "does not return the log-probabilities")
    assert refused(kld(tiny, f"{narrow}#other", "--text", text, *WINDOWS), WrongModel, "'other'")
