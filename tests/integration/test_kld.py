"""Real checkpoints of a tiny model through Transformers, and a server in front of one that answers as vLLM does."""

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
from sm120kit.errors import (
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


def changed(tiny: Path, place: Path, change: Any) -> Path:
    """A copy of a checkpoint whose weights went through ``change``."""
    shutil.copytree(tiny, place)
    weights = load_file(place / "model.safetensors")
    save_file({name: change(name, weight) for name, weight in weights.items()}, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.fixture(scope="module")
def perturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return changed(tiny, tmp_path_factory.mktemp("p") / "m", lambda name, weight: weight + 0.02 * torch.randn_like(weight))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Two kilobytes of words are more than a window of them needs; so says the text. " * 4)
    return path


def kld(*argv: object) -> Result:
    return CliRunner().invoke(app, ["kld", *map(str, argv)])


def compared(*argv: object) -> dict[str, Any]:
    ran = kld(*argv, "--json")
    assert ran.exit_code == 0, ran.output
    return dict(json.loads(ran.stdout))


def logits(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        return model(torch.tensor(windows)).logits.float()


def test_a_model_does_not_diverge_from_itself(tiny: Path, text: Path) -> None:
    made = compared(tiny, tiny, "--text", text, *WINDOWS)
    assert made["exact"] and made["complete"]
    result = made["result"]
    assert (result["positions"], result["top1_differs"]) == (96, 0)
    assert (result["mean"], result["max"]) == (0, 0), "the same model in the same batch gives the same bits"
    assert 0 <= abs(made["noise"]["mean"]) < 1e-4, "in another batch BF16 rounds differently, and not by much"


def test_a_perturbed_copy_diverges_as_computed_apart(tiny: Path, perturbed: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "kld.json"
    made = compared(tiny, perturbed, "--text", text, *WINDOWS, "--output", output)
    assert json.loads(output.read_text()) == made
    ids = AutoTokenizer.from_pretrained(tiny)(text.read_text(), add_special_tokens=False)["input_ids"]
    nats = []
    for batch in ([ids[0:32], ids[8:40]], [ids[16:48]]):  # the batches of the tool: BF16 rounds by batch
        p, q = (logits(folder, batch).double().log_softmax(-1) for folder in (tiny, perturbed))
        nats += torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).flatten().tolist()
    result = made["result"]
    assert result["positions"] == len(nats) == 96
    assert result["mean"] == pytest.approx(math.fsum(nats) / 96, rel=1e-5)
    assert result["max"] == pytest.approx(max(nats), rel=1e-5)
    assert result["p99"] == pytest.approx(torch.tensor(nats, dtype=torch.float64).quantile(0.99).item(), rel=1e-5)
    assert result["mean"] > 100 * abs(made["noise"]["mean"])
    shown = kld(tiny, perturbed, "--text", text, *WINDOWS)
    assert f"{result['mean']:.3g}" in shown.output and "control" in shown.output


def test_nan_is_counted_and_a_model_of_nan_has_no_divergence(tiny: Path, text: Path, tmp_path: Path) -> None:
    ids = [AutoTokenizer.from_pretrained(tiny)(letter)["input_ids"][0] for letter in "ab#"]
    rare = tmp_path / "rare.json"
    rare.write_text(json.dumps([ids[place % 2] for place in range(44)] + [ids[2]] * 4))  # only in the third window

    def without_it(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name == "model.embed_tokens.weight":
            weight = weight.clone()
            weight[ids[2]] = torch.nan
        return weight

    result = compared(tiny, changed(tiny, tmp_path / "some", without_it), "--text", rare, *WINDOWS)["result"]
    # The attention of torch on a CPU spreads a NaN over its window.
    assert (result["nan_reference"], result["nan_test"], result["positions"]) == (0, 32, 64)
    assert result["mean"] == 0 and len(result["window_means"]) == 2
    everywhere = changed(tiny, tmp_path / "all", lambda name, weight: weight * torch.nan)
    assert refused(kld(tiny, everywhere, "--text", text, *WINDOWS), NothingMeasured, "96 in the test")


def refused(ran: Result, kind: type[Exception], words: str) -> bool:
    assert isinstance(ran.exception, kind), (ran.exception, ran.output)
    assert words in str(ran.exception), ran.exception
    return True


class Server(http.server.ThreadingHTTPServer):
    """``/v1/models`` and ``/v1/completions`` with ``prompt_logprobs``, as vLLM answers; ``most`` is its ``--max-logprobs``."""

    def __init__(self, folder: Path, most: int, silent: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.most, self.silent = folder, most, silent
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        top = asked["prompt_logprobs"]
        if self.server.most != -1 and not 0 <= top <= self.server.most:
            self._answer(400, {"error": {"message": f"Requested prompt logprobs of {top}, which is greater than max allowed"}})
            return
        choices = [
            {"index": n, "text": "x", "prompt_logprobs": None if self.server.silent else self._positions(window, top)}
            for n, window in enumerate(asked["prompt"])
        ]
        self._answer(200, {"choices": choices[::-1]})

    def _positions(self, window: list[int], top: int) -> list[Any]:
        shares = logits(self.server.folder, [window])[0].log_softmax(-1)
        given: list[Any] = [None]
        for place, token in enumerate(window[1:]):
            ranked = shares[place].argsort(descending=True).tolist()
            chosen = ranked if top == -1 else [*ranked[:top], token]
            given.append({str(one): {"logprob": float(shares[place][one]), "rank": 1, "decoded_token": "x"} for one in chosen})
        return given

    def _answer(self, status: int, body: Any) -> None:
        said = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    started: list[Server] = []

    def start(folder: Path, most: int, silent: bool = False) -> str:
        started.append(Server(folder, most, silent))
        return started[-1].url

    yield start
    for one in started:
        one.shutdown()


def test_served_models(tiny: Path, perturbed: Path, text: Path, serve: Any) -> None:
    first, second = serve(tiny, -1), serve(perturbed, -1)
    local = compared(tiny, perturbed, "--text", text, *WINDOWS)["result"]
    whole = compared(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS, "--top", -1)
    assert whole["result"]["positions"] == 93, "a server says nothing of what follows the last token"
    assert whole["result"]["mean"] == pytest.approx(local["mean"], rel=0.05)
    assert not whole["exact"]
    few = compared(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS)
    assert 0 < few["result"]["mean"] < whole["result"]["mean"], "a lower bound"
    mixed = compared(tiny, second, "--text", text, *WINDOWS)
    assert few["result"]["mean"] <= mixed["result"]["mean"] <= whole["result"]["mean"] * 1.01
    shown = kld(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS).output
    assert few["result"]["covered"] < 0.5 and "a lower bound" in shown and "lossless" not in shown, "no verdict from so little"
    assert whole["result"]["covered"] == pytest.approx(1)
    control = compared(first, second, "--text", text, "--tokenizer", tiny, *WINDOWS, "--control", second)
    assert control["control"] == f"tiny at {second}"
    assert control["noise"]["mean"] == pytest.approx(control["result"]["mean"])


def test_bad_input(tiny: Path, perturbed: Path, text: Path, tmp_path: Path, serve: Any) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(3, 100))))
    assert compared(tiny, perturbed, "--text", ids, *WINDOWS)["result"]["positions"] == 96
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
    assert compared(tiny, narrow, "--text", text, *WINDOWS, "--top", 5)["result"]["positions"] == 93
    assert refused(kld(tiny, silent, "--text", text, *WINDOWS), CannotMeasure, "without the log-probabilities")
    assert refused(kld(tiny, f"{narrow}#other", "--text", text, *WINDOWS), WrongModel, "'other'")
