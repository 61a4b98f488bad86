"""What a log shows besides its failure, and messages that are not in the form in which their program prints them."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime

import pytest
from pydantic import TypeAdapter, ValidationError

from sm120kit.hosts import log_rules
from sm120kit.hosts.log_rules import Kind, facts
from sm120kit.hosts.log_rules.records import Fact

NOW = datetime(2026, 11, 22, 12)
RULES = log_rules.rules()
FACTS = facts.facts()
IDS = {fact.id for fact in FACTS.fact}
STATS = (
    "INFO 11-22 10:00:{:02} [loggers.py:9] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
    "{}.0 tokens/s, Running: {} reqs, Waiting: 0 reqs"
)


def explain(*lines: str) -> log_rules.Explanation:
    return log_rules.explain(io.BytesIO("\n".join((*lines, "")).encode()), now=NOW)


def noted(*lines: str) -> dict[str, str]:
    scan = log_rules.LogScan()
    scan.feed("\n".join((*lines, "")).encode())
    return scan._facts


def test_facts_are_distinct() -> None:
    assert len(IDS) == len(FACTS.fact)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("config: speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=2)", {"speculation": "mtp"}),
        ("config: speculative_config=None, tensor_parallel_size=1, kv_cache_dtype=auto, enforce_eager=False", {}),
        ("ServerArgs(speculative_algorithm='EAGLE')", {"speculation": "EAGLE"}),
        ("ServerArgs(kv_cache_dtype='fp8_e4m3', tp_size=2)", {"kv_fp8": "fp8_e4m3", "gpus": ""}),
        ("server_args=ServerArgs(speculative_algorithm=None, kv_cache_dtype='auto', tp_size=1)", {}),
        ("INFO [cache.py:216] Using fp8 data type to store kv cache. It reduces the GPU memory footprint", {"kv_fp8": ""}),
        ("INFO [cuda.py:352] Using FLASHINFER attention backend out of potential backends", {"flashinfer_attention": ""}),
        ("kernel_config=KernelConfig(enable_flashinfer_autotune=False)", {}),
        ("Running FlashInfer autotune with cache: /root/.cache/sglang/x.json", {"autotune": ""}),
        ("(Worker_TP1 pid=9) INFO starts", {"gpus": ""}),
        ("vLLM is using nccl==2.27.5", {"gpus": ""}),
        ("world_size=1 rank=0 local_rank=0", {}),
        ("|   0  NVIDIA GB10                    On  |", {"gb10": ""}),
        ("GB100 and GGB10X", {}),
    ],
)
def test_facts_of_lines(line: str, found: dict[str, str]) -> None:
    assert noted(line) == found


def test_advice_is_chosen_by_the_rest_of_the_log() -> None:
    fault = "torch.AcceleratorError: CUDA error: misaligned address"
    (plain,) = explain(fault).found
    (match,) = explain('vllm serve m --speculative-config \'{"method": "mtp"}\'', fault).found
    assert match.rule.id == plain.rule.id and match.cause.startswith(plain.cause) and "draft tokens" in match.cause
    assert {*plain.fixes} < {*match.fixes} and any("--speculative-config" in fix for fix in match.fixes)
    assert "Speculative" not in explain("speculative_config=None", fault).found[0].cause


def test_advice_has_a_maximum_and_uses_each_fact_once() -> None:
    rule = next(rule for rule in RULES if rule.symptom == "fault")
    chosen = list(facts.fitting(rule, dict.fromkeys(IDS - {"eager"}, "")))
    assert len(chosen) == facts.MAXIMUM_ADVICE
    used = [fact for advice in chosen for fact in advice.facts]
    assert len(used) == len(set(used))
    assert not list(facts.fitting(replace(rule, symptom=None), dict.fromkeys(IDS, "")))


def test_advice_follows_the_fixes_of_a_precise_failure_and_precedes_those_of_a_general_one() -> None:
    for rule in RULES:
        if rule.symptom == "hang" and rule.kind in (Kind.FAILURE, Kind.GENERAL) and rule.fixes and rule.least == 1:
            (match,) = explain("vLLM is using nccl==2.27.5", rule.sample, "end").found
            own = [index for index, fix in enumerate(match.fixes) if any(fix.endswith(remedy.text) for remedy in rule.fixes)]
            assert own[0] == 0 if rule.kind is Kind.FAILURE else own[0] > 0


def test_reasons_of_attention_backends_may_be_in_another_line() -> None:
    refused = "ValueError: Selected backend FLASHINFER is not valid for this configuration."
    match = explain(refused, "Reason: ['head_size not supported']").found[0]
    assert "64, 128, 256 and 512" in match.cause and any("TRITON_ATTN" in fix for fix in match.fixes)
    assert "64, 128" not in explain(refused).found[0].cause


def test_facts_without_strings_are_refused() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Fact).validate_python({"id": "x", "any": ()})
    with pytest.raises(ValidationError, match="regular expression"):
        TypeAdapter(Fact).validate_python({"id": "x", "any": ("x",), "pattern": "("})


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("No module named 'deep_ep'", "module-missing"),
        ("module 'xformers.ops' has no attribute 'memory_efficient_attention'", "interface-missing"),
        ("name 'envs' is not defined", "name-undefined"),
        (
            "(EngineCore pid=9) ERROR 11-22 10:00:00 [core.py:9] GGUF model with architecture qwen35 is not supported.",
            "class-gguf",
        ),
        ("2026-11-22 10:00:00.1 | ERROR    | a.b:c:9 - No module named 'mooncake'", "module-missing"),
        ("ModuleNotFoundError: No module named \u2018deep_ep\u2019", "module-missing"),
        ("nvcc fatal   : Unsupported gpu architecture `compute_120a`", "nvcc-arch"),
        ('"message": "ptxas fatal   : Value \\"sm_121a\\" is not defined for option \\"gpu-name\\""', ""),
    ],
)
def test_messages_that_are_repeated_match_the_rules_of_the_program(line: str, found: str) -> None:
    assert [match.rule.id for match in explain(line, "end").found][:1] == ([found] if found else [])


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-22 10:00:00 [a.py:1] No module named 'deep_ep', using another backend",
        "[2026-11-22 10:00:00] FP8 KV cache requires Blackwell; ok on sm_120",
        "WARNING name 'envs' is not defined",
    ],
)
def test_repeated_messages_of_programs_that_go_on_are_no_failures(line: str) -> None:
    assert not explain(line, "end").known


def test_repeated_messages_count_only_if_nothing_else_explains_the_log() -> None:
    lines = ["RuntimeError: CUDA error: misaligned address", "No module named 'deep_ep'"]
    assert [match.rule.id for match in explain(*lines).found] == ["misaligned-address"]


STACK = (
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f12a3b4d740 (most recent call first):",
    '  File "/v/lib/python3.12/site-packages/torch/nn/modules/module.py", line 9 in __call__',
    '  File "/v/lib/python3.12/site-packages/{}", line 713 in f',
)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("triton/backends/nvidia/driver.py", "crash-triton"),
        ("vllm/distributed/device_communicators/pynccl.py", "crash-communication"),
        ("safetensors/torch.py", "crash-loading"),
        ("some/other.py", "class-signal"),
    ],
)
def test_the_stack_after_a_crash_names_its_part(path: str, found: str) -> None:
    for rest in ((), ("", "Extension modules: numpy (total: 1)"), ("another line",)):
        matches = explain(*(line.format(path) for line in STACK), *rest).found
        assert [(match.rule.id, match.number) for match in matches] == [(found, 1)]


def test_an_engine_that_generates_nothing_hangs() -> None:
    stalled = [STATS.format(second, 0, 2) for second in (10, 20)]
    assert [match.rule.id for match in explain(*stalled).found] == ["engine-stalled"]
    watched = 'INFO:     10.0.0.2:1 - "GET /health HTTP/1.1" 200 OK'
    assert [match.rule.id for match in explain(*stalled, watched).found] == ["engine-stalled"]
    for log in ([stalled[0]], [*stalled, STATS.format(30, 9, 2)], [*stalled, STATS.format(30, 0, 0)]):
        assert not explain(*log).known


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("ValueError: block_size 8 is not supported. Reduce --block-size to 16 or more.", "Reduce --block-size to 16 or more"),
        ("ValueError: this mode is not supported; please use the flashinfer backend.", "please use the flashinfer backend"),
        ("ValueError: this mode is not supported. Please report this bug.", ""),
    ],
)
def test_what_a_message_tells_its_reader_is_the_first_fix_of_a_class(line: str, fix: str) -> None:
    (match,) = explain(line, "end").found
    assert match.rule.kind is Kind.CLASS
    assert match.fixes[0].startswith("The message itself") is bool(fix) and fix in match.fixes[0]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('"content": "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!", "finish_reason": "length"', True),
        ('"content":"++++++++++++++++++++++++++++++++++++"', True),
        ("To understand how a modern Mixture (Mo!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!", True),
        ("!!!!!!!!!!!!!!!!!!!!!!!!!!!!! WARNING !!!!!!!!!!!!!!!!!!!!!!!!!!!!!", False),
        (" src/a.py | 40 ++++++++++++++++++++++++++++++++++++++++", False),
    ],
)
def test_runs_of_one_token_are_wrong_output(line: str, found: bool) -> None:
    assert [match.rule.id for match in explain(line, "end").found] == (["class-output-repeated"] if found else [])


def test_an_answer_of_tool_calls_is_not_empty() -> None:
    answer = '{{"message":{{"content":null,"tool_calls":{}}},"finish_reason":"stop"}}'
    assert not explain(answer.format('[{"id":"a"}]')).known
    assert [match.rule.id for match in explain(answer.format("[]")).found] == ["class-output-empty"]


def test_a_version_that_is_too_old_for_the_gpu_counts_if_nothing_failed_otherwise() -> None:
    versions = ("GPU 0: NVIDIA GeForce RTX 5090", "PyTorch version: 2.6.0+cu124", "[pip3] nvidia-nccl-cu12==2.21.5")
    assert [match.rule.id for match in explain(*versions).found] == ["version-torch-before-sm120", "version-nccl-before-sm120"]
    failed = explain(*versions, "ValueError: width 8 is not supported. Use 16.").found
    assert failed[0].rule.kind is Kind.CLASS and failed[1].rule.kind is Kind.VERSION
    assert not explain("GPU 0: NVIDIA GeForce RTX 4090", *versions[1:]).known
    assert not explain(versions[0], "PyTorch version: 2.9.0+cu128", "[pip3] nvidia-nccl-cu12==2.27.5").known


@pytest.mark.parametrize("line", ["curl: (52) Empty reply from server", "Still waiting for vLLM ... API not ready (20 s)"])
def test_waiting_for_a_server_that_starts_is_no_failure(line: str) -> None:
    assert explain(line, "end").known
    assert not explain(line, "INFO:     Application startup complete.").known


def test_an_old_version_does_not_determine_the_cause_of_an_unknown_failure() -> None:
    versions = ("GPU 0: NVIDIA GeForce RTX 5090", "Cuda compilation tools, release 12.4, V12.4.1")
    explanation = explain(*versions, "ZorkError: nothing known")
    assert (
        explanation.known
        and not explanation.determined
        and [error.line for error in explanation.errors] == ["ZorkError: nothing known"]
    )
    upgraded = "    Found existing installation: torch 2.6.0+cu124"
    assert not explain(versions[0], upgraded, "Successfully installed torch-2.9.0+cu130").known


def test_statuses_of_curl_are_compared_as_numbers() -> None:
    found = {number: explain(f"curl: ({number}) text of the failure").found[0].cause for number in (6, 7, 67, 77)}
    assert "resolve" in found[6] and found[67] == found[77].replace("77", "67") and found[7] not in (found[6], found[77])


@pytest.mark.parametrize(
    "line",
    [
        "WARNING nvcc not found, skipping",
        "ERROR: ld.so: object '/x/libnccl.so.2' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
    ],
)
def test_ignored_preloads_and_warnings_are_no_failures(line: str) -> None:
    assert not explain(line, "INFO:     Application startup complete.").known
