"""Every configuration's command line against the recorded options of its engine's argument parser."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import parser_options
import pytest
import synthetic_hosts
from model_folders import HYBRID, NVFP4, folder
from typer.testing import CliRunner

from sm120kit import engines, recipes
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput
from sm120kit.engines import parser
from sm120kit.engines.parser import Option, ParserRecord, rejection
from sm120kit.recipes import arguments, configurations, lockfile

COLLECT = runpy.run_path(str(Path(__file__).parents[1] / "arguments" / "collect.py"))
VLLM = "vllm-0.19.1"
GOOD = (data_root() / "recipes" / "configurations" / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml").read_text()


def recorded(name: str) -> ParserRecord:
    record = parser.load(name)
    assert record, f"{name}: record its options: nox -s arguments -- {name}"
    return record


@pytest.mark.parametrize("name", configurations.names())
def test_every_configuration_is_accepted_by_its_engines_parser(name: str, tmp_path: Path) -> None:
    configuration = configurations.load(name)
    known = recorded(configuration.engine)
    argv = COLLECT["command_line"](configuration, recipes.load_engine(configuration.engine), tmp_path)
    assert set(configuration.arguments) < set(argv) and "--served-model-name" in argv
    assert rejection(known, argv) == known.answers[name] == ""


@pytest.mark.parametrize("name", sorted({configurations.load(name).engine for name in configurations.names()}))
def test_options_were_recorded_from_the_locked_wheel(name: str) -> None:
    known, engine = recorded(name), recipes.load_engine(name)
    (wheel,) = [
        wheel
        for wheel in lockfile.read(recipes.lock_path(recipes.locate(name))).closures[0].wheels
        if wheel.name == engine.engine
    ]
    assert (known.recipe, known.wheel_sha256) == (name, wheel.sha256)
    served = {configuration for configuration in configurations.names() if configurations.load(configuration).engine == name}
    assert set(known.answers) == served
    assert len(known.options) > 200


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-model-len", "4096", "--enable-prefix-caching"], ""),
        (["/model", "--max-model-length", "4096"], "unknown argument --max-model-length; did you mean '--max-model-len'?"),
        (["--tensor-parallel-siz", "4"], ""),
        (["--tensor-parallel", "4"], ""),
        (["--max-num", "4"], "ambiguous option"),
        (["--kv-cache-dtype", "fp9"], "invalid choice: 'fp9'"),
        (["--gpu-memory-utilization", "most"], "invalid"),
        (["--max-num-seqs"], "expected one argument"),
        (["--enable-prefix-caching", "--no-such-thing", "x"], "unknown argument --no-such-thing"),
    ],
)
def test_unknown_and_invalid_arguments_are_rejected(argv: list[str], message: str) -> None:
    reason = rejection(recorded(VLLM), argv)
    assert message in reason and bool(message) == bool(reason)


ACCEPTED = (
    ["--trust_remote_code"],
    ["--max_model_len=4096", "--kv_cache_dtype", "fp8"],
    ["-O3"],
    ["-O", "2"],
    ["-O=1"],
    ["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "3"],
    ["--speculative_config.method=mtp"],
    ["-cc.pass_config.fuse_allreduce_rms", "true", "-cc.custom_ops+=all,none"],
    ["--no-enable-prefix-caching"],
    ["--disable-prefix-caching"],
    ["--no_enable_prefix_caching"],
    ["-tp", "1", "--no-async-scheduling"],
)
REJECTED = (
    (["--no-enable-prefix-cachin_g"], "unknown argument --no-enable-prefix-cachin-g"),
    (["--no-max-model-len"], "unknown argument --no-max-model-len"),
    (["--no-disable-prefix-caching"], "unknown argument --no-disable-prefix-caching"),
    (["-O"], "unknown argument -O"),
    (["--no_such_option.x", "1"], "unknown argument --no-such-option"),
    (["--max-model-len.x", "1"], "invalid"),
    (["--speculative-config.method"], "expected one argument"),
    (["--speculative-config.draft_lm_head_quantization", "int8"], "'fp8' or 'nvfp4'"),
    ([f"--speculative-config{'.x' * 50_000}", "1"], "expected one argument"),
)


@pytest.mark.parametrize("argv", ACCEPTED, ids=" ".join)
def test_spellings_of_vllm_are_accepted(argv: list[str], tmp_path: Path) -> None:
    assert rejection(recorded("vllm-0.33.0"), argv) == ""
    result = CliRunner().invoke(app, ["config", "check", str(with_arguments(tmp_path, "vllm-0.33.0", argv))])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "ok"), result.output


@pytest.mark.parametrize(("argv", "message"), REJECTED)
def test_what_vllm_rejects_is_rejected(argv: list[str], message: str) -> None:
    assert message in rejection(recorded("vllm-0.33.0"), argv)


SHARES = (
    *(("vllm-0.33.0", option) for option in ("--gpu-memory-utilization", "--gpu_memory_util", "--device-memory-utilization")),
    ("vllm-0.19.1", "--gpu-memory-utilization"),
    ("sglang-0.5.11", "--mem-fraction-static"),
    ("sglang-0.5.23", "--mem-fraction-static"),
)


@pytest.mark.parametrize(("recipe", "option"), SHARES)
def test_share_of_memory_is_above_0_and_at_most_1(recipe: str, option: str, tmp_path: Path) -> None:
    for share in ("-5", "0", "-0.0", "nan", "inf", "1.01", "5e-324x"):
        assert share in rejection(recorded(recipe), [option, share])
    file = str(with_arguments(tmp_path, recipe, [option, "nan"]))
    for command in (["config", "check", file], ["serve", file, "--print"], ["plan", file]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, BadInput) and result.stdout == "" and result.exception.hint
        assert all(text in result.exception.message for text in (file, "'nan'", "at most 1"))
    assert [rejection(recorded(recipe), [option, share]) for share in ("1", "1e-3", ".9", "0.90")] == [""] * 4


@pytest.mark.parametrize("argv", [["--trust_remote_code"], ["-O3"], ["--speculative-config.method", "mtp"]])
def test_spellings_of_vllm_are_not_those_of_sglang(argv: list[str]) -> None:
    assert rejection(recorded("sglang-0.5.23"), ["--model-path", "x", *argv])


def test_options_are_found_in_every_spelling(tmp_path: Path) -> None:
    for argv in (["--tensor_parallel_size", "1"], ["--tensor-parallel-size=1"], ["-tp=1"], ["--tensor-parallel", "1"]):
        configuration = configurations.load(str(with_arguments(tmp_path, "vllm-0.33.0", [*argv, "--max_model_len=32K"])))
        assert configuration.option_for("tensor_parallel") == "1" and configuration.option_for("context") == "32K"
        assert configuration.served_by.integer("32K") == 32768 and configuration.served_by.integer("25.6k") == 25600
        assert configuration.served_by.integer("auto") is None


@pytest.mark.parametrize("spelling", [["--tensor_parallel_size", "2"], ["-tp=2"], ["--tensor-parallel", "2"]])
def test_contradiction_is_found_in_every_spelling(spelling: list[str], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tensor_parallel: 1, but arguments have"):
        configurations.load(str(with_arguments(tmp_path, "vllm-0.33.0", spelling)))


def test_options_that_no_parser_checked_are_not_ok(tmp_path: Path) -> None:
    for argv, word in ((["--no-such-option"], "not checked"), ([], "ok")):
        result = CliRunner().invoke(app, ["config", "check", str(with_arguments(tmp_path, "vllm-0.20.0", argv))])
        assert result.exit_code == 0 and result.stdout.startswith(f"{word} "), result.output


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm-0.33.0", "--enable-prefix-caching"), ("sglang-0.5.23", "--trust-remote-code")]
)
def test_a_word_without_an_option_is_refused(engine: str, option: str, tmp_path: Path) -> None:
    """vLLM's parser would take it for the model, which `serve` gives."""
    result = CliRunner().invoke(app, ["config", "check", str(with_arguments(tmp_path, engine, [option, "False"]))])
    assert isinstance(result.exception, BadInput) and "unknown argument False" in result.exception.message


@pytest.mark.parametrize(
    ("engine", "argv", "refused"),
    [
        (
            "vllm-0.33.0",
            ["--port", "9", "--host=127.0.0.1", "--model", "other/model", "--nnodes", "2"],
            ["--port 9", "--host 127", "--model other", "--nnodes 2: hardware.nodes is 1"],
        ),
        ("sglang-0.5.23", ["--por=30000", "--model-path", "other/model"], ["--port 30000", "--model-path other/model"]),
        ("sglang-0.5.23", ["--nnodes=2"], ["--nnodes 2"]),
        ("vllm-0.33.0", ["-n", "2"], ["--nnodes 2"]),
        ("vllm-0.33.0", ["-n2", "-r1"], ["--nnodes 2", "--node-rank 1"]),
        ("vllm-0.33.0", ["--node-rank", "1"], ["--node-rank 1"]),
        ("vllm-0.33.0", ["--master-addr", "192.0.2.1"], ["--master-addr 192.0.2.1"]),
        ("sglang-0.5.23", ["--dist-init-addr", "192.0.2.1:5000"], ["--dist-init-addr 192.0.2.1:5000"]),
        ("sglang-0.5.23", ["--nccl-init-addr=[2001:db8::1]:5000"], ["--nccl-init-addr [2001:db8::1]:5000"]),
        (
            "vllm-0.33.0",
            ["-n1", "--node-rank=0", "--master-addr", "127.0.0.1", "--master-port=29600", "--served-model-name", "mine"],
            [],
        ),
        ("sglang-0.5.23", ["--nnodes", "1", "--dist-init-addr", "localhost:5000", "--served-model-name", "mine"], []),
        ("sglang-0.5.23", ["--nccl-init-addr=[::1]:5000", "--node-rank", "0", "--served-model-name", "mine"], []),
        ("vllm-0.33.0", ["--port=8000", "--host", "::", "--model", "Qwen/Qwen3.5-27B-FP8", "--served-model-name", "mine"], []),
        (
            "sglang-0.5.23",
            ["--port", "8000", "--host", "0.0.0.0", "--model", "/model", "--nnodes=1", "--served-model-name", "mine"],
            [],
        ),
    ],
)
def test_address_and_model_are_those_of_serve(engine: str, argv: list[str], refused: list[str], tmp_path: Path) -> None:
    """Others are refused; the same are given once, so that those of several machines and of a snapshot stay."""
    file = with_arguments(tmp_path, engine, argv)
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert result.exit_code == (1 if refused else 0), result.output
    if refused:
        assert isinstance(result.exception, BadInput) and all(text in result.exception.message for text in refused)
        return
    words = arguments.serve_arguments(configurations.load(str(file)), "/model/snapshots/1", ("10.0.0.1", 9000))
    given = parser.options(engine, words)
    assert (given["--host"], given["--port"], given["--served-model-name"]) == ("10.0.0.1", "9000", "mine")
    assert "/model/snapshots/1" in words and not {"/model", "--model"} & {*words}


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        (["--node-rank", "0"], "--node-rank 0: hardware.nodes is 2"),
        (["-n1"], "--nnodes 1: hardware.nodes is 2"),
        (["-n2", "--master-addr", "192.0.2.1", "--master-port", "29600"], ""),
    ],
)
def test_machines_of_arguments_are_those_of_hardware(argv: list[str], refused: str, tmp_path: Path) -> None:
    """Each machine has its own rank; another port, or the address of the first, is that of all."""
    file = with_arguments(tmp_path, "vllm-0.33.0", ["--tensor-parallel-size=2", *argv])
    file.write_text(
        file.read_text().replace("gpus = 1\n", "gpus = 2\nnodes = 2\n").replace("tensor_parallel = 1", "tensor_parallel = 2")
    )
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert (result.exit_code == 0) == (not refused) and refused in str(result.exception), result.output


@pytest.mark.parametrize(("length", "ok"), [(96, True), (97, False), (3000, False)])
def test_check_and_plan_agree_on_names_of_repositories(length: int, ok: bool, tmp_path: Path) -> None:
    file = with_arguments(tmp_path, "vllm-0.33.0", [])
    file.write_text(re.sub('^repository = ".*"', f'repository = "me/{"a" * length}"', file.read_text(), flags=re.MULTILINE))
    for command in (["config", "check"], ["plan", "--offline", "--state", str(tmp_path)]):
        error = str(CliRunner().invoke(app, [*command, str(file)]).exception)
        assert ("is no name of a repository" in error) != ok, error


@pytest.mark.parametrize(("writable", "ok"), [(False, False), (True, True)])
def test_temporary_files_can_be_mounted_where_the_root_is_writable(writable: bool, ok: bool, tmp_path: Path) -> None:
    file = with_arguments(tmp_path, "vllm-0.33.0", [])
    text = f'\n[container]\nwritable_root = {str(writable).lower()}\nmounts = {{ "/tmp" = "/tmp" }}\n'
    file.write_text(re.sub(r"^\[container\].*?(?=^\[)", "", file.read_text(), flags=re.MULTILINE | re.DOTALL) + text)
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert result.exit_code == (0 if ok else 1) and (ok or "/tmp" in str(result.exception)), result.output


def with_arguments(directory: Path, engine: str, argv: list[str]) -> Path:
    """A configuration of a file of the user with these arguments."""
    file = directory / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml"
    text = re.sub(r"^arguments = \[.*?^\]", lambda _: f"arguments = {json.dumps(argv)}", GOOD, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\[speculation\].*?(?=^\[)", "", text, flags=re.MULTILINE | re.DOTALL)
    file.write_text(re.sub(r"^engine = .*", f'engine = "{engine}"', text, flags=re.MULTILINE))
    return file


def test_renamed_option_is_detected() -> None:
    known = recorded(VLLM)
    renamed = tuple(
        replace(option, names=("--max-context",)) if "--max-model-len" in option.names else option for option in known.options
    )
    configuration = configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
    assert "--max-model-len" in rejection(replace(known, options=renamed), configuration.arguments)
    assert rejection(known, configuration.arguments) == ""


def test_choices_of_numbers() -> None:
    known = ParserRecord("vllm-x", "", (Option(("--size",), None, "int", ("1", "16")),), {})
    assert rejection(known, ["--size", "16"]) == "" and "invalid choice" in rejection(known, ["--size", "2"])


def test_config_check_of_user_file(tmp_path: Path) -> None:
    file = tmp_path / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml"
    file.write_text(GOOD)
    assert CliRunner().invoke(app, ["config", "check", str(file)]).exit_code == 0
    file.write_text(GOOD.replace("--max-model-len", "--max-model-length"))
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert isinstance(result.exception, BadInput)
    assert "vllm-0.19.1 rejects" in result.exception.message and "did you mean '--max-model-len'?" in result.exception.message


def test_argument_that_needs_an_extra_requires_it_of_the_lockfile() -> None:
    loading = configurations.load("minimax-m2.5-nvfp4-2x-rtx-pro-6000")
    assert "fastsafetensors" in loading.arguments and arguments.missing_extras(loading.engine, loading.arguments) == ()
    streamed = loading.model_copy(update={"arguments": ("--load-format=runai_streamer",)})
    assert arguments.missing_extras(streamed.engine, streamed.arguments) == ("runai-model-streamer",)
    with pytest.raises(BadInput, match=r"need runai-model-streamer, which the lockfile of vllm-0\.19\.1 lacks"):
        arguments.require_known(streamed)
    for option in ("--moe-backend", "--linear-backend"):
        assert arguments.missing_extras("vllm-0.20.0", (option, "b12x")) == ("b12x",)


def test_every_problem_of_a_file_is_in_one_error(tmp_path: Path) -> None:
    """Form, and each argument that the parser, the lockfile or the image refuses."""
    wrong = ["--no-such-option", "--max-num-seqs", "x", "--load-format", "runai_streamer", "--chat-template", "my.jinja"]
    file = with_arguments(tmp_path, "vllm-0.33.0", [*wrong, "--block-size", "y"])
    file.write_text(file.read_text().replace("edition = 1", "editions = 1"))
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert isinstance(result.exception, BadInput) and "6 problems" in result.exception.message
    for name in ("editions", "--no-such-option", "--max-num-seqs", "--block-size", "runai-model-streamer", "my.jinja"):
        assert name in result.exception.message


@pytest.mark.parametrize(
    ("value", "there"),
    [
        ("my.jinja", False),
        ("/templates/a.jinja", True),
        ("/model/tools.jinja", True),
        ("{{ messages }}/x", True),
        ("/t/a", False),
    ],
)
def test_a_template_is_in_the_image_or_mounted(value: str, there: bool, tmp_path: Path) -> None:
    file = with_arguments(tmp_path, "vllm-0.33.0", ["--chat-template", value])
    file.write_text(file.read_text() + '\n[container.mounts]\n"/templates" = "/srv/templates"\n')
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert result.exit_code == (0 if there else 1), result.output
    if there:
        assert (value in configurations.load(str(file)).arguments) and result.stdout.startswith("ok ")
    else:
        assert isinstance(result.exception, BadInput) and value in result.exception.message


@pytest.mark.parametrize(
    ("recipe", "option", "value", "there"),
    [
        ("vllm-0.33.0", "--tokenizer", "org/tokenizer", True),
        ("vllm-0.33.0", "--tokenizer", "/tokenizer", False),
        ("vllm-0.33.0", "--lora-modules", "mine=/adapter", False),
        ("vllm-0.33.0", "--lora-modules", "mine=org/adapter", True),
        ("vllm-0.33.0", "--ssl-ca-certs", "ca.crt", False),
        ("vllm-0.33.0", "--generation-config", "vllm", True),
        ("sglang-0.5.23", "--speculative-draft-model-path", "/draft", False),
        ("sglang-0.5.23", "--speculative-draft-model-path", "org/draft", True),
        ("sglang-0.5.23", "--tokenizer-path", "./tokenizer", False),
    ],
)
def test_every_path_of_an_argument_is_in_the_image_or_mounted(
    recipe: str, option: str, value: str, there: bool, tmp_path: Path
) -> None:
    file = with_arguments(tmp_path, recipe, [option, value])
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert there == (f"{option} {value.rpartition('=')[2]} is neither" not in getattr(result.exception, "message", ""))


@pytest.mark.parametrize("recipe", ["vllm-0.33.0", "vllm-0.33.0-spark", "sglang-0.5.23", "sglang-0.5.23-spark"])
def test_parsers_of_models_are_parsers_of_the_engine(recipe: str) -> None:
    """The names in each engine's table are in the record that its wheel gave."""
    known, engine = recorded(recipe), engines.of_recipe(recipe)
    choices = {name: option.choices for option in known.options for name in option.names if option.choices}
    reasoning = {*known.models.get("reasoning", choices.get("--reasoning-parser") or ())}
    tools = {*known.models.get("tools", choices.get("--tool-call-parser") or ())}
    assert engine.model_parsers and len(known.models["architectures"]) > 100
    for each in engine.model_parsers:
        assert each.reasoning in {"", *reasoning} and each.tools in {"", *tools}, each
    assert {*engine.quantizations.values(), *engine.other_gpus} <= {*known.models["quantizations"]}


def test_names_of_models_are_read_from_an_engine_without_importing_it(tmp_path: Path) -> None:
    files = {
        "vllm/model_executor/models/registry.py": "import absent\n_TEXT_GENERATION_MODELS = {'A': ('a', 'C1'), 'B': 'C2'}\n"
        "_MULTIMODAL_MODELS = {'C': ('c', 'C')}\n_EMBEDDING_MODELS = {'D': ('d', 'D'), 'A': ('a', 'C1')}",
        "vllm/config/speculative.py": "def hf_config_override(c):\n  if c.x in ('a', 'b'):\n    c.x = 'mtp'",
        "vllm/model_executor/layers/quantization/__init__.py": "QuantizationMethods = Literal['q', 'r']",
        "vllm/reasoning/__init__.py": "_REASONING_PARSERS_TO_REGISTER = {'think': ('file', 'Class')}",
        "vllm/transformers_utils/chat_templates/a.jinja": "",
        "vllm/tool_parsers/__init__.py": "_TOOL_PARSERS_TO_REGISTER = {'call': ('file', 'Class')}",
        "sglang/srt/models/deep/a.py": "EntryClass = [AForCausalLM, ANextN]",
        "sglang/srt/models/b.py": "EntryClass = B",
        "sglang/srt/layers/quantization/__init__.py": "BASE_QUANTIZATION_METHODS: dict = {'fp8': C}",
        "sglang/srt/configs/model_config.py": "def _config_draft_model(c):\n  if c.x == 'B':\n    c.x = 'BNextN'\n"
        "SWA_SINK_ARCHS = frozenset({'Sink'})\nMIMO_V2_MODEL_ARCHS = ('Mimo',)\n"
        "def is_generation_model(c):\n  if 'Bert' in c:\n    return False\n"
        "def is_hybrid_swa_model(c):\n  return c in {'Swa', 'SwaMTP', *SWA_SINK_ARCHS} or c.kind == 'sliding'",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert engines.VLLM.model_names(tmp_path) == {
        "architectures": ["A", "B", "C"],
        "mtp": ["a", "b"],
        "pooling": ["D"],
        "quantizations": ["q", "r"],
        "reasoning": ["think"],
        "templates": ["a.jinja"],
        "tools": ["call"],
    }
    assert engines.SGLANG.model_names(tmp_path) == {
        "architectures": ["AForCausalLM", "B"],
        "mtp": ["B"],
        "pooling": ["Bert"],
        "quantizations": ["fp8", "mxfp4"],
        "windows": ["Mimo", "Sink", "Swa"],
    }


@pytest.mark.parametrize(("changed", "kept"), [({}, True), ({"wheel": {}}, False), ({"options": []}, False)])
def test_answers_stay_if_the_parser_is_the_same(changed: dict[str, Any], kept: bool) -> None:
    text = parser.record_path("vllm-0.19.1").read_text()
    record = json.loads(text)
    new = parser_options.record_text(record["recipe"], record["wheel"], record | {"answers": {}})
    before = json.dumps(record | changed)
    assert parser_options.with_answers(new, before) == (text if kept else new)


def test_committed_records_are_in_written_form() -> None:
    for name in {configurations.load(name).engine for name in configurations.names()}:
        text = parser.record_path(name).read_text()
        record = json.loads(text)
        assert parser_options.record_text(name, record["wheel"], record) == text


def test_serve_names_arguments_that_no_parser_checked(tmp_path: Path) -> None:
    root, model = synthetic_hosts.build("turin-8", tmp_path / "host"), folder(tmp_path / "model", HYBRID, NVFP4)
    for engine, named in (("vllm-0.20.0", True), ("vllm-0.33.0", False)):
        file = with_arguments(tmp_path, engine, ["--no-enable-prefix-caching"])
        file.write_text(file.read_text().replace("Qwen/Qwen3.5-27B-FP8", "some/model"))
        options = ["--root", str(root), "--state", str(tmp_path / "state"), "--print"]
        result = CliRunner().invoke(app, ["serve", str(file), "--model", str(model), *options])
        assert ("are not checked" in result.stderr) == named, result.output
