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
from sm120kit.core.errors import BadInput, BadRecord, NotFound, RequirementMissing, ServerFailed, SystemRefused

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
    assert shown.exit_code == 1 and "NaN at 32 of 96" in shown.output
    assert "not rated" in shown.output and "lossless" not in shown.output
    everywhere = modified_copy(tiny, tmp_path / "all", lambda name, weight: weight * torch.nan)
    assert refused(kld(tiny, everywhere, "--text", text, *WINDOWS), ServerFailed, "96 in the test")


def refused(result: Result, kind: type[Exception], message: str) -> bool:
    assert isinstance(result.exception, kind), (result.exception, result.output)
    assert message in str(result.exception), result.exception
    return True


class Server(http.server.ThreadingHTTPServer):
    """``/v1/models`` with ``/v1/completions`` as in vLLM, or ``/generate`` as in SGLang (``kind``), and ``/tokenize`` of both.

    ``silent``: without log-probabilities. ``max_logprobs`` is that of vLLM.
    """

    def __init__(self, folder: Path, max_logprobs: int, kind: str, silent: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.max_logprobs, self.kind, self.silent = folder, max_logprobs, kind, silent
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        listed = {"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]}
        pages = {"/v1/models": listed, **({"/get_server_info": {"version": "0.5.23"}} if self.server.kind == "sglang" else {})}
        self._respond(200 if self.path in pages else 404, pages.get(self.path))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokenizer = AutoTokenizer.from_pretrained(self.server.folder)
            ids = tokenizer(request["prompt"], add_special_tokens=request["add_special_tokens"])["input_ids"]
            self._respond(200, {"tokens": ids, "count": len(ids)})
        elif self.path == "/generate" and self.server.kind == "sglang":
            assert request["logprob_start_len"] == 0 and request["return_logprob"]
            self._respond(200, [self._sglang(window, request["top_logprobs_num"]) for window in request["input_ids"]])
        elif self.path == "/v1/completions" and self.server.kind == "vllm":
            top = request["prompt_logprobs"]
            if self.server.max_logprobs != -1 and not 0 <= top <= self.server.max_logprobs:
                message = f"Requested prompt logprobs of {top}, which is greater than max allowed"
                self._respond(400, {"error": {"message": message}})
                return
            choices = [
                {"index": n, "text": "x", "prompt_logprobs": None if self.server.silent else self._vllm(window, top)}
                for n, window in enumerate(request["prompt"])
            ]
            self._respond(200, {"choices": choices[::-1]})
        else:
            self._respond(404, {"detail": "Not Found"})

    def _ranked(self, window: list[int], top: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        logprobs = logits(self.server.folder, [window])[0].log_softmax(-1)
        for position, token in enumerate(window[1:]):
            ranked = logprobs[position].argsort(descending=True).tolist()
            yield token, [(id_, float(logprobs[position][id_])) for id_ in (ranked if top == -1 else [*ranked[:top], token])]

    def _vllm(self, window: list[int], top: int) -> list[Any]:
        return [None] + [
            {str(id_): {"logprob": value, "rank": 1, "decoded_token": "x"} for id_, value in listed}
            for _, listed in self._ranked(window, top)
        ]

    def _sglang(self, window: list[int], top: int) -> dict[str, Any]:
        listed = [[(value, id_, None) for id_, value in position[:top]] for _, position in self._ranked(window, top)]
        return {"text": "x", "meta_info": {"input_top_logprobs": [None, *listed]}}

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

    def start(folder: Path, max_logprobs: int = -1, kind: str = "vllm", silent: bool = False) -> str:
        started.append(Server(folder, max_logprobs, kind, silent))
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
    sglang = serve(perturbed, kind="sglang")
    from_sglang = comparison(first, sglang, "--text", text, "--tokenizer", tiny, *WINDOWS, "--top", 2000)["result"]
    assert from_sglang["positions"] == 93
    assert from_sglang["mean"] == pytest.approx(full["result"]["mean"], rel=1e-6), "2000 are all tokens of this model"
    assert refused(
        kld(first, sglang, "--text", text, "--tokenizer", tiny, *WINDOWS, "--top", -1), RequirementMissing, "is SGLang"
    )


def test_bad_input_is_refused(tiny: Path, perturbed: Path, text: Path, tmp_path: Path, serve: Any) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(3, 100))))
    assert comparison(tiny, perturbed, "--text", ids, *WINDOWS)["result"]["positions"] == 96
    assert refused(kld(tiny, tmp_path / "absent", "--text", text, *WINDOWS), NotFound, "absent")
    (tmp_path / "empty").mkdir()
    assert refused(kld(tiny, tmp_path / "empty", "--text", text, *WINDOWS), BadInput, "empty")
    assert refused(kld(tiny, tiny, "--text", tmp_path / "no.txt", *WINDOWS), NotFound, "no.txt")
    ids.write_text('["a"]')
    assert refused(kld(tiny, tiny, "--text", ids, *WINDOWS), BadInput, "not a list of token ids")
    assert refused(kld(tiny, tiny, "--text", text), ServerFailed, "100 windows of 2048 tokens")
    assert refused(kld(tiny, tiny, "--text", text, *WINDOWS, "--output", tmp_path / "no" / "x.json"), SystemRefused, "x.json")
    gone = "http://127.0.0.1:9"
    assert refused(kld(tiny, gone, "--text", text, *WINDOWS), ServerFailed, gone)
    narrow, silent = serve(tiny, 5), serve(tiny, -1, silent=True)
    assert refused(kld(tiny, narrow, "--text", text, *WINDOWS), RequirementMissing, "greater than max allowed")
    assert comparison(tiny, narrow, "--text", text, *WINDOWS, "--top", 5)["result"]["positions"] == 93
    assert refused(kld(tiny, silent, "--text", text, *WINDOWS), RequirementMissing, "does not return the log-probabilities")
    assert refused(kld(tiny, f"{narrow}#other", "--text", text, *WINDOWS), ServerFailed, "'other'")


def test_saved_reference(tiny: Path, perturbed: Path, text: Path, tmp_path: Path, serve: Any) -> None:
    direct = comparison(tiny, perturbed, "--text", text, *WINDOWS)
    few, served = (tmp_path / name for name in ("few.kld", "served.kld"))
    assert kld(tiny, "--text", text, *WINDOWS, "--save", few, "--top", -1).exit_code == 2
    shown = kld(tiny, "--text", text, *WINDOWS, "--save", few, "--top", 100)
    assert "100 tokens a position" in shown.output, shown.output
    url = serve(tiny)
    assert kld(url, "--text", text, "--tokenizer", tiny, *WINDOWS, "--save", served, "--top", 2000).exit_code == 0
    from_few = comparison(few, perturbed)
    assert not from_few["exact"] and from_few["reference"] == str(tiny) and 0.2 < from_few["result"]["covered"] < 0.9
    assert 0 < from_few["result"]["mean"] < direct["result"]["mean"] and from_few["noise"] == direct["noise"]
    assert comparison(served, perturbed)["result"]["mean"] == pytest.approx(direct["result"]["mean"], rel=0.05)
    assert comparison(few, serve(perturbed))["reference"] == str(tiny)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.kld", "served.kld"], "no partial file"


def test_bad_references_are_refused(tiny: Path, text: Path, tmp_path: Path) -> None:
    saved = tmp_path / "r.kld"
    for arguments in ([tiny, "--text", text], [tiny, tiny, "--text", text, "--save", saved], [tiny, tiny]):
        assert kld(*arguments).exit_code == 2
    assert kld(tiny, "--text", text, *WINDOWS, "--save", saved).exit_code == 0
    assert kld(saved, tiny, "--text", text).exit_code == 2, "a reference has its own text"
    assert kld(saved, "--save", tmp_path / "again.kld").exit_code == 2
    truncated = tmp_path / "truncated.kld"
    truncated.write_bytes(saved.read_bytes()[:-100])
    assert refused(kld(truncated, tiny), BadRecord, "truncated.kld is not a reference")
    damaged = bytearray(saved.read_bytes())
    damaged[200] ^= 0xFF
    truncated.write_bytes(damaged)
    assert refused(kld(truncated, tiny), BadRecord, "is damaged at")


def test_other_tokenizers_and_long_windows_are_refused(tiny: Path, text: Path, tmp_path: Path, serve: Any) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    described = json.loads((other / "tokenizer.json").read_text())
    ids = described["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(described))
    saved = tmp_path / "r.kld"
    assert kld(tiny, "--text", text, *WINDOWS, "--save", saved).exit_code == 0
    for reference in ([tiny, other, "--text", text, *WINDOWS], [saved, other]):
        assert refused(kld(*reference), RequirementMissing, "other has another tokenizer: 2 token ids differ")
    for reference in ([tiny, serve(other), "--text", text, *WINDOWS], [saved, serve(other)]):
        assert refused(kld(*reference), RequirementMissing, "has another tokenizer: the first")
    ids_file = tmp_path / "ids.json"
    ids_file.write_text(json.dumps([5] * 5000))
    long = ["--text", ids_file, "--windows", 1, "--window", 4097]
    assert refused(kld(tiny, tiny, *long), RequirementMissing, "4,097 tokens is longer than max_position_embeddings 4,096")
    assert refused(kld(tiny, serve(tiny), *long[:-1], 4096), RequirementMissing, "longer than max_model_len 4,096")
