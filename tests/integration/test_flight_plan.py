"""Plans of repositories, folders and configurations, with and without the Hub: what fits, what is derived, what is unknown."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import synthetic_hosts
from huggingface_hub import constants
from model_folders import Shapes, folder
from model_hub import COMMIT, ModelHub, huge_shard, model_hub
from pydantic import TypeAdapter
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import AlreadyExists, BadInput, FetchFailed, NotFound, ResourceUnavailable, SystemRefused
from sm120kit.core.outside import parse_json
from sm120kit.engines import parser
from sm120kit.recipes import configurations, new_repository
from sm120kit.serving import fit
from sm120kit.serving.flight_plan import FlightPlan

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "plan.schema.json"
WEIGHT: Shapes = {"model.layers.0.mlp.down_proj.weight": ("BF16", (64, 32))}
PLAIN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 40960,
}

CHECKPOINTS = sorted((data_root() / "recipes" / "checkpoints").glob("*.json"))
"""The ``config.json`` of published checkpoints."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A Hub of this test, without any repository, and a download cache of its own."""
    with model_hub("nobody/nothing", (tmp_path / "none").mkdir() or tmp_path / "none") as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
        yield running


def publish(hub: ModelHub, directory: Path, repository: str, config: dict[str, Any] | None, shapes: Shapes = WEIGHT) -> str:
    """Publish a repository on the Hub."""
    folder(directory / repository.replace("/", "--"), config or {}, shapes)
    hub.publish(repository, directory / repository.replace("/", "--"))
    if config is None:
        del hub.repositories[repository]["config.json"]
    return repository


def plan(*argv: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *argv[:1], "--json", *argv[1:]])
    assert result.exit_code == 0, (result.output, result.exception)
    content: dict[str, Any] = json.loads(result.stdout)
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    return content


def failure(*argv: str) -> BaseException | None:
    return CliRunner().invoke(app, [*argv]).exception


def test_json_has_the_documented_schema() -> None:
    """UPDATE_PLAN=1 writes docs/plan.schema.json. An incompatible change increases ``schema_version``."""
    schema = TypeAdapter(FlightPlan).json_schema(mode="serialization")
    if os.environ.get("UPDATE_PLAN"):
        SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")
    assert json.loads(SCHEMA.read_text()) == schema


def test_context_is_the_longest_that_fits(hub: ModelHub, tmp_path: Path) -> None:
    """4 layers x 2 x 2 heads x 32 elements of BF16 are 1 KiB a token; the weights are as large as most of a GPU."""
    name = publish(hub, tmp_path, "me/plain", PLAIN)
    content = plan(name, "--gpu", "rtx-5090", "--gpus", "1")
    assert content["memory"]["kv_bytes_per_token"] == 4 * 2 * 2 * 32 * 2 and content["memory"]["fits"] is True
    assert content["memory"]["context"] == 40960 and content["model"]["revision"] == COMMIT
    long = publish(hub, tmp_path, "me/long", PLAIN | {"max_position_embeddings": 10**8})
    tight = plan(long, "--gpu", "rtx-5090", "--gpus", "1")["memory"]
    room = int(32e9 * 0.96 * 0.9) - tight["weight_bytes"]
    assert room - 1024 * 1024 < tight["context"] * tight["kv_bytes_per_token"] <= room


def test_no_context_is_derived_for_weights_that_do_not_fit(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/large", PLAIN)
    hub.repositories[name]["model.safetensors"] = huge_shard(300 * 10**9)
    content = plan(name, "--gpu", "rtx-pro-6000", "--gpus", "1")
    assert content["memory"]["fits"] is False and "--max-model-len" not in content["arguments"], content
    assert not any("of context fit" in note for note in content["notes"])


def test_fewest_gpus_that_hold_a_model_are_chosen(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/plain", PLAIN)
    assert [plan(name, "--gpu", kind)["gpus"] for kind in ("rtx-5090", "rtx-pro-6000", "dgx-spark")] == [1, 1, 1]
    two = plan(name, "--gpu", "rtx-5090", "--gpus", "2")
    assert two["arguments"][:2] == ["--tensor-parallel-size", "2"]
    sparks = plan(name, "--gpu", "dgx-spark", "--gpus", "2")
    assert (sparks["nodes"], sparks["engine"]) == (2, "vllm-0.33.0-spark")
    here = plan(name, "--gpus", "2")
    assert (here["gpu"], here["gpus"]) == ("RTX PRO 6000 Blackwell, 96 GB", 2), "on a host without GPUs"
    odd = plan(publish(hub, tmp_path, "me/odd", PLAIN | {"num_attention_heads": 6}), "--gpu", "rtx-pro-6000", "--gpus", "4")
    assert odd["arguments"][:4] == ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]


def test_model_without_a_cache_of_tokens_fits_by_its_states(hub: ModelHub, tmp_path: Path) -> None:
    config = PLAIN | {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "state_size": 128, "conv_kernel": 4}
    config |= {"num_heads": 80, "n_groups": 1, "layers_block_type": ["mamba"] * 4, "head_dim": 64}
    for gigabytes, fits in ((20, True), (86.4, False)):
        name = publish(hub, tmp_path, f"me/states-{gigabytes}", config)
        hub.repositories[name]["model.safetensors"] = huge_shard(int(gigabytes * 1e9) - (1 << 20))
        memory = plan(name, "--gpu", "rtx-pro-6000", "--gpus", "1")["memory"]
        assert memory["fits"] is fits and "sequences" in memory["reason"], memory


def test_engine_and_options_of_the_user_win(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/plain", PLAIN)
    content = plan(name, "--gpu", "rtx-5090", "--engine", "sglang", "--", "--context-length", "4096", "--tp", "2")
    assert (content["engine"], content["gpus"], content["memory"]["context"]) == ("sglang-0.5.23", 2, 4096)
    assert content["command"] == f"sm120kit serve {name} --engine sglang -- --context-length 4096 --tp 2"
    assert plan(name, "--gpu", "rtx-5090", "--gpus", "2")["command"] == f"sm120kit serve {name} --gpus 0,1"
    publish(hub, tmp_path, "openai/gpt-oss-20b", PLAIN)
    own = plan("gpt-oss-20b-1x-rtx-pro-6000", "--", "--max-model-len", "16k")
    assert own["memory"]["context"] == 16000 and own["arguments"].count("--max-model-len") == 1
    refused = failure("plan", name, "--gpu", "rtx-5090", "--", "--no-such-option")
    assert refused is not None and "--no-such-option" in str(refused)


def test_existing_configuration_for_the_gpus_wins(hub: ModelHub, tmp_path: Path) -> None:
    """Only on the newest version of its engine."""
    config = parse_json((data_root() / "recipes/checkpoints/openai--gpt-oss-20b.json").read_bytes())["config"]
    name = publish(hub, tmp_path, "openai/gpt-oss-20b", config)
    content = plan(name, "--gpu", "rtx-pro-6000", "--gpus", "1")
    assert (content["configuration"], content["derived"]) == ("gpt-oss-20b-1x-rtx-pro-6000", False)
    assert plan(name, "--gpu", "rtx-pro-6000", "--gpus", "2")["derived"], "there is none for two"
    assert plan(name, "--gpu", "rtx-pro-6000", "--gpus", "1", "--engine", "sglang")["derived"]
    for old in map(configurations.load, configurations.names()):
        if old.engine == "vllm-0.19.1":
            publish(hub, tmp_path, old.model.repository, PLAIN)
            assert plan(old.model.repository, "--gpu", "rtx-pro-6000", "--gpus", str(old.hardware.gpus))["engine"] != old.engine
            break


@pytest.mark.parametrize("offline", [(), ("--offline",)])
def test_configuration_that_the_engines_parser_rejects_is_never_chosen(
    offline: tuple[str, ...], hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = new_repository.make(tmp_path / "own")
    monkeypatch.chdir(own)
    name = "gpt-oss-20b-1x-rtx-pro-6000"
    text = (data_root() / "recipes" / "configurations" / f"{name}.toml").read_text()
    (own / "configurations" / f"{name}.toml").write_text(text.replace("arguments = [", 'arguments = ["--no-such-option", '))
    config = parse_json((data_root() / "recipes/checkpoints/openai--gpt-oss-20b.json").read_bytes())["config"]
    repository = publish(hub, tmp_path, "openai/gpt-oss-20b", config)
    result = CliRunner().invoke(app, ["plan", repository, "--json", "--gpu", "rtx-pro-6000", "--gpus", "1", *offline])
    content = json.loads(result.stdout)
    assert content["derived"] and "--no-such-option" not in content["arguments"]
    assert name in result.stderr and "--no-such-option" in result.stderr


@pytest.mark.parametrize("engine", ["vllm-0.19.1", "sglang-0.5.11"])
def test_values_that_an_earlier_engine_lacks_are_not_derived(engine: str, hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "deepseek-ai/V4.1", PLAIN | {"model_type": "deepseek_v41"})
    arguments = plan(name, "--gpu", "rtx-5090", "--gpus", "1", "--engine", engine)["arguments"]
    record = parser.load(engine)
    assert record and not parser.rejections(record, arguments)


def test_gpus_of_the_host_are_used(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/plain", PLAIN)
    root = str(synthetic_hosts.build("node-pair", tmp_path / "host"))
    content = plan(name, "--root", root)
    assert "RTX PRO 6000" in content["gpu"] and content["gpus"] == 1 and content["memory"]["gpu_bytes"] > 90e9
    assert isinstance(failure("serve", name), ResourceUnavailable), "this host has none"


@pytest.mark.parametrize(("tensors", "expected"), [(True, "mtp, 3 draft tokens"), (False, "")])
def test_speculation_needs_the_tensors(tensors: bool, expected: str, hub: ModelHub, tmp_path: Path) -> None:
    config = PLAIN | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_nextn_predict_layers": 1}
    shapes = WEIGHT | ({"mtp.fc.weight": ("BF16", (32, 32))} if tensors else {})
    content = plan(publish(hub, tmp_path, "me/next", config, shapes), "--gpu", "rtx-pro-6000")
    assert content["speculation"] == expected and content["model"]["mtp_tensors"] == int(tensors)
    claimed = any("config.json claims" in text for text in content["defects"])
    assert claimed is not tensors, "layers that the tensors do not have"
    assert any("issues/53912" in text for text in content["defects"]) is tensors, "known of hybrid models with MTP"


def test_a_drafter_of_another_repository_is_named_and_used(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/Qwen3.8-27B-own", PLAIN)
    drafter = "incoai/Qwen3.8-27B-DFlash2"
    alone = plan(name, "--gpu", "rtx-5090")
    assert any(drafter in text and "recipes/pull/837" in text for text in alone["drafters"]) and not alone["speculation"]
    drafting = plan(name, "--gpu", "rtx-5090", "--draft", drafter)
    assert drafting["speculation"] == "dflash, 7 draft tokens" and f"--draft {drafter}" in drafting["command"]
    assert drafter in " ".join(drafting["arguments"]) and not any(drafter in text for text in drafting["drafters"])
    assert isinstance(failure("plan", name, "--gpu", "rtx-5090", "--draft", "me/other"), NotFound)


def test_without_the_hub_the_rest_is_known(hub: ModelHub) -> None:
    """A configuration's sizes are in recipes; of a repository that is not there, only the name is known."""
    hub.gone = True
    every = [configurations.load(name) for name in configurations.names()]
    sized = next(each for each in every if each.model.gigabytes and each.engine == "vllm-0.33.0")
    content = plan(sized.name)
    assert content["model"]["weight_bytes"] == int(sized.model.gigabytes * 1e9) and content["download"]["missing_bytes"] is None
    assert content["model"]["mtp_tensors"] is None and any("Hub" in text for text in content["unknown"])
    printed = CliRunner().invoke(app, ["serve", sized.name, "--print"])
    assert printed.exit_code == (41 if content["memory"]["fits"] is False else 0), printed.output
    unknown = plan("me/absent", "--gpu", "rtx-5090")
    assert unknown["memory"]["fits"] is None and len(unknown["unknown"]) > 2
    assert (unknown["engine"], unknown["gpu"], unknown["arguments"]) == ("", "GeForce RTX 5090, 32 GB", [])
    assert isinstance(failure("serve", "me/absent", "--print", "--gpu", "rtx-5090"), FetchFailed)


@pytest.mark.parametrize(
    ("config", "options", "error", "word"),
    [
        (None, [], 11, "config.json"),
        ("me/two--dashes", [], 11, "two--dashes"),
        (PLAIN | {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}}, [], 10, "auto_map"),
        (PLAIN | {"architectures": []}, [], 10, "architecture"),
        (PLAIN | {"quantization_config": {"quant_method": "exl3", "bits": 4}}, [], 12, "exl3"),
        (PLAIN | {"quantization_config": {"quant_method": "w4afp8"}}, ["--engine", "sglang"], 12, "w4afp8"),
        (PLAIN | {"quantization_config": "fp8"}, [], 11, "quantization_config is 'fp8', not an object"),
        (PLAIN | {"architectures": ["BertModel"]}, [], 10, "generates no text"),
        (PLAIN | {"architectures": ["Qwen3ForSequenceClassification"]}, ["--engine", "vllm-0.33.0"], 10, "generates no text"),
        (PLAIN, ["--gpu", "h100"], 10, "h100"),
        (PLAIN, ["--gpus", "many"], 2, "many"),
        (PLAIN, ["--engine", "llama.cpp"], 10, "llama.cpp"),
    ],
)
def test_bad_input_is_named(config: Any, options: list[str], error: int, word: str, hub: ModelHub, tmp_path: Path) -> None:
    name = config if isinstance(config, str) else publish(hub, tmp_path, "me/bad", config)
    for command in (["plan"], ["serve", "--print"]):
        gpu = [] if "--gpu" in options or (command == ["plan"] and "--gpus" in options) else ["--gpu", "rtx-pro-6000"]
        result = CliRunner().invoke(app, [command[0], name, *command[1:], *gpu, *options])
        code = getattr(result.exception, "exit_code", result.exit_code)
        assert (getattr(result.exception, "code", code) if isinstance(result.exception, SystemExit) else code) == error
        assert word in f"{result.output} {result.exception}", (command, result.output, result.exception)


def test_gated_repository(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/gated", PLAIN)
    hub.token = "another"
    for command in (["plan", name], ["serve", name, "--print", "--gpu", "rtx-5090"]):
        refused = failure(*command)
        assert isinstance(refused, FetchFailed) and "HF_TOKEN" in (refused.hint or "")


def test_repository_in_another_format(hub: ModelHub) -> None:
    """Weights that no engine here reads are named."""
    hub.repositories["me/quantized"] = {"model-Q4_K_M.gguf": b"GGUF"}
    for command in (["plan", "me/quantized"], ["serve", "me/quantized", "--print", "--gpu", "rtx-5090"]):
        refused = failure(*command)
        assert isinstance(refused, BadInput) and "model-Q4_K_M.gguf" in refused.message and refused.hint


def test_remote_code_does_not_run_unless_it_is_allowed(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/code", PLAIN | {"auto_map": {"AutoConfig": "own.Config"}})
    content = plan(name, "--gpu", "rtx-5090")
    assert "--trust-remote-code" not in content["arguments"] and any("auto_map" in note for note in content["notes"])
    assert "--trust-remote-code" in plan(name, "--gpu", "rtx-5090", "--", "--trust-remote-code")["arguments"]


def test_back_ends_of_a_model_of_the_same_kind_are_named_as_such(hub: ModelHub, tmp_path: Path) -> None:
    """Only if the configuration leaves them to the engine, as the derived one does."""
    for name, recorded in (("gpt-oss-120b", "openai/gpt-oss-120b"), ("Qwen3.6-35B-A3B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4")):
        (path,) = (path for path in CHECKPOINTS if path.stem.endswith(f"--{name}"))
        own = publish(hub, tmp_path, f"me/{name}", parse_json(path.read_bytes())["config"])
        for engine in ("vllm", "sglang"):
            found = plan(own, "--gpu", "rtx-pro-6000", "--gpus", "1", "--engine", engine)["backends"]
            assert found["source"] == recorded and {"attention", "experts", "layers", "sampling"} <= {*found["selected"]}
            assert not any(use.startswith("draft") for use in found["selected"])
    for words in (("--moe-backend", "marlin"), ("--enforce-eager",)):
        other = plan(own, "--gpu", "rtx-pro-6000", "--gpus", "1", "--", *words)
        assert not other["backends"]["selected"] and any("options" in text for text in other["unknown"])


def test_folder_and_file(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = folder(tmp_path / "weights", PLAIN, WEIGHT)
    content = plan(str(local), "--gpu", "rtx-5090")
    assert content["model"]["repository"] == "local/weights" and content["download"]["missing_bytes"] == 0
    printed = CliRunner().invoke(app, ["serve", str(local), "--print", "--gpu", "rtx-5090"])
    assert printed.exit_code == 0 and f"source={local},target=/model" in printed.stdout
    assert isinstance(failure("config", "new", str(local), "--gpu", "rtx-5090"), SystemRefused), "not in a repository"
    monkeypatch.chdir(new_repository.make(tmp_path / "own"))
    made = CliRunner().invoke(app, ["config", "new", str(local), "--gpu", "rtx-5090", "--name", "mine"])
    assert made.exit_code == 0 and made.stdout == "mine\n", (made.output, made.exception)
    configuration = configurations.load("mine")
    assert list(configuration.arguments) == content["arguments"] and configuration.hardware.memory_gb == 32
    assert isinstance(failure("config", "new", str(local), "--gpu", "rtx-5090", "--name", "mine"), AlreadyExists)
    assert CliRunner().invoke(app, ["config", "check", "mine"]).stdout == "ok mine\n"


def test_usage() -> None:
    for argv in (["serve", "gpt-oss-20b-1x-rtx-pro-6000", "word"], ["serve", "a/b", "--gpu", "rtx-5090"], ["config", "new"]):
        result = CliRunner().invoke(app, argv)
        assert result.exit_code == 2, result.output
    assert isinstance(failure("plan", "gpt-oss-20b-1x-rtx-pro-6000", "--gpu", "rtx-5090"), Exception)
    for target in ("no-such-configuration", "./nowhere", "../no/folder"):
        assert isinstance(failure("plan", target), NotFound)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_published_models_are_planned_and_printed(path: Path, hub: ModelHub, tmp_path: Path) -> None:
    """Under names that no configuration has, with shards of their size; the engine's parser accepts what is derived."""
    record = parse_json(path.read_bytes())
    size = fit.recorded_model(record["repository"])
    name = f"me/{record['repository'].partition('/')[2]}"
    publish(hub, tmp_path, name, record["config"])
    hub.repositories[name]["model.safetensors"] = huge_shard(size.weight_bytes if size else 20 * 10**9)
    content = plan(name, "--gpu", "rtx-pro-6000")
    assert content["derived"] and content["model"]["weight_bytes"] == (size.weight_bytes if size else 20 * 10**9)
    known = parser.load(content["engine"])
    assert known and parser.rejection(known, content["arguments"]) == ""
    assert {*content["model"]["architectures"]} & {*known.models["architectures"]}
    assert "--reasoning-parser" in content["arguments"] and "--tool-call-parser" in content["arguments"]
    assert not content["speculation"], "the shard has no MTP tensors"
    assert content["memory"]["fits"] is not False and content["memory"]["weight_bytes"] < 96e9 * 0.9
    assert content["gpus"] == next(n for n in (1, 2, 4, 8, 16) if n >= content["gpus"])
    printed = CliRunner().invoke(app, ["serve", name, "--print", "--gpu", "rtx-pro-6000"])
    assert printed.exit_code == 0, (printed.output, printed.exception)
    assert shlex.join(content["arguments"]) in printed.stdout
    assert not hub.sent.get("model.safetensors"), "only its header is requested"


def test_a_model_for_one_or_two_gpus_is_not_planned_for_more(hub: ModelHub, tmp_path: Path) -> None:
    name = publish(hub, tmp_path, "me/large", PLAIN)
    for size, gpus in ((20e9, 1), (60e9, 4), (100e9, 4)):
        hub.repositories[name]["model.safetensors"] = huge_shard(int(size))
        content = plan(name, "--gpu", "rtx-5090")
        assert (content["gpus"], content["memory"]["fits"]) == (gpus, True)
    hub.repositories[name]["model.safetensors"] = huge_shard(int(900e9))
    assert plan(name, "--gpu", "rtx-5090")["gpus"] == 16, "none holds it: the most that can be planned for"
    hub.repositories[name]["model.safetensors"] = huge_shard(int(300e9))
    content = plan(name, "--gpu", "rtx-5090", "--gpus", "1")
    assert content["memory"]["fits"] is False and "300.0 GB" in content["memory"]["reason"]
    refused = failure("serve", name, "--print", "--gpu", "rtx-5090", "--gpus", "1")
    assert isinstance(refused, ResourceUnavailable) and "exceed" in refused.message
