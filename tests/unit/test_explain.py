"""Explain logs: each rule matches its sample, no fix has an option that the engine rejects, and no log causes an error."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shlex
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput
from sm120kit.engines import parser
from sm120kit.hosts import log_rules
from sm120kit.hosts.log_rules import Kind, Rule, _explanation, _lines, _scan, inputs, search_address
from sm120kit.hosts.log_rules._rule import Remedy

RULES = log_rules.rules()
VLLM = "vLLM API server version 0.33.0"
BY_ID = {rule.id: rule for rule in RULES}
NOW = datetime(2026, 11, 22, 12)


def explain(text: str | bytes, *, ended: bool = False) -> log_rules.Explanation:
    return log_rules.explain(io.BytesIO(text.encode() if isinstance(text, str) else text), ended=ended, now=NOW)


def ids(explanation: log_rules.Explanation) -> list[str]:
    return [match.rule.id for match in explanation.found]


def sample_log(rule: Rule, sample: str) -> str:
    """A log with the sample of a rule, with the engine that the rule applies to."""
    engine = Requirement(rule.engines[0]) if rule.engines else None
    version = next(iter(engine.specifier), None) if engine else None
    names = {"vllm": "vLLM API server version ", "nccl": "NCCL version "}
    head = ""
    if engine:
        head = names.get(engine.name, f"{engine.name}==") + (
            str(version.version) if version and version.operator in (">=", "<=") else "0.0.1"
        )
    head += f"\n{rule.log[0]}" if rule.log else ""
    return f"{head}\n{sample}\n" + ("" if rule.kind is Kind.HANG else "end\n")


def test_each_rule_has_an_id_a_source_and_a_known_confidence() -> None:
    assert len(BY_ID) == len(RULES)
    assert all(rule.sources and rule.confidence in ("confirmed", "reported", "inferred") for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_sample_matches_its_own_rule_only(rule: Rule) -> None:
    assert ids(explain(sample_log(rule, rule.sample))) == [rule.id]
    assert "{" not in explain(sample_log(rule, rule.sample)).found[0].cause


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
COMMAND = re.compile(r"`(--[^`]+)`")
"""An option in a fix, with its value if the fix depends on it."""
RECORDED = [
    (recipes.load_engine(name), record)
    for path in sorted((data_root() / "recipes" / "engines").glob("*.arguments.json"))
    if (record := parser.load(name := path.name.removesuffix(".arguments.json")))
]
"""Engine recipes with a record of their parser's options."""


def refusals(fix: Remedy) -> list[str]:
    """Options in a fix that a recorded parser of its engine rejects, in versions that the fix applies to."""
    required = Requirement(fix.engine) if fix.engine else None
    if required is None:
        return [
            f"{option} is an option of {engine.name}: restrict the fix to an engine"
            for engine, record in RECORDED
            for option in OPTION.findall(fix.text)
            if any(option in known.names for known in record.options)
        ]
    rejected = [f"{option} is not in backquotes" for option in OPTION.findall(COMMAND.sub("", fix.text))]
    fitting = [
        record
        for engine, record in RECORDED
        if engine.engine == required.name and required.specifier.contains(Version(engine.version), prereleases=True)
    ]
    for command in COMMAND.findall(fix.text):
        if not fitting:
            rejected.append(f"no record of the options of {fix.engine}")
        rejected += [f"{record.recipe}: {reason}" for record in fitting if (reason := rejection(record, shlex.split(command)))]
    return rejected


def rejection(record: parser.ParserRecord, argv: list[str]) -> str:
    """As :func:`parser.rejection`; an option without its value is only required to exist."""
    if len(argv) == 1 and any(argv[0] in option.names for option in record.options):
        return ""
    model = [] if all(option.names for option in record.options) else ["model"]
    return parser.rejection(record, [*model, *argv])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_engines_accept_the_options_in_fixes(rule: Rule) -> None:
    assert [reason for fix in rule.fixes for reason in refusals(fix)] == []


@pytest.mark.parametrize(
    ("engine", "text", "reason"),
    [
        ("vllm>=0.19", "`--moe-backend flashinfer_b12x`", "vllm-0.19.1: argument --moe-backend: invalid choice"),
        ("vllm", "`--absent-option`", "vllm-0.33.0: unknown argument"),
        ("vllm<0.2", "`--moe-backend marlin`", "no record"),
        ("vllm", "use --moe-backend marlin", "not in backquotes"),
        (None, "`--moe-backend marlin`", "restrict the fix"),
    ],
)
def test_refused_options_are_found(engine: str | None, text: str, reason: str) -> None:
    assert any(reason in found for found in refusals(Remedy(text, engine)))


MAXIMUM_AGE = timedelta(days=90)


def stale(rule: Rule) -> list[str]:
    """Engine recipes that are much newer than the last check of a rule without upper bound for their engine."""
    open_ended = {
        required.name
        for required in map(Requirement, rule.engines)
        if not any(specifier.operator in ("<", "<=", "==") for specifier in required.specifier)
    }
    newest = {engine.name: date.fromisoformat(str(engine.environment.as_of)) for engine, _ in RECORDED}
    return [
        f"{engine.name} is of {newest[engine.name]}; {rule.id} was checked on {rule.checked}"
        for engine, _ in RECORDED
        if engine.engine in open_ended and newest[engine.name] - rule.checked > MAXIMUM_AGE
    ]


def test_rules_are_not_stale() -> None:
    assert [reason for rule in RULES for reason in stale(rule)] == []


def test_stale_rules_are_found() -> None:
    rule = replace(BY_ID["moe-no-backend"], checked=date(2026, 1, 1))
    assert any("vllm-0.33.0" in reason for reason in stale(rule))
    assert stale(replace(rule, engines=("vllm<0.20",))) == []


def test_first_failure_precedes_consequences_and_harmless_lines() -> None:
    log = [
        BY_ID["symm-mem"].sample,
        BY_ID["marlin-fp4"].sample,
        BY_ID["engine-dead"].sample,
        BY_ID["illegal-instruction"].sample,
        "",
        BY_ID["kv-cache-none"].sample,
        BY_ID["illegal-instruction"].sample,
    ]
    explanation = explain("\r\n".join(log))
    assert [(match.rule.id, match.count, match.number) for match in explanation.found] == [
        ("illegal-instruction", 2, 4),
        ("kv-cache-none", 1, 6),
        ("marlin-fp4", 1, 2),
        ("engine-dead", 1, 3),
    ]
    assert explanation.lines == 7 and explanation.known


def test_precise_failures_precede_general_ones() -> None:
    log = [BY_ID["module-missing"].sample, BY_ID["grouped-gemm-init"].sample, BY_ID["kv-cache-none"].sample]
    assert ids(explain("\n".join(log))) == ["kv-cache-none", "module-missing", "grouped-gemm-init"]
    assert explain(log[0]).known


@pytest.mark.parametrize("text", BY_ID["no-kernel-image"].any)
def test_each_alternative_matches(text: str) -> None:
    assert ids(explain(f"ERROR {text.upper()} end")) == ["no-kernel-image"]


NCCL = "(Worker pid=9) INFO 11-22 {} [pynccl.py:113] vLLM is using nccl==2.28.9"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ([NCCL.format("11:00:00"), NCCL.format("11:00:01")], ["hang-after-nccl"]),
        (["vLLM is using nccl==2.28.9"], ["hang-after-nccl"]),
        ([NCCL.format("11:00:00"), "INFO 11-22 11:00:09 loading"], []),
        ([NCCL.format("11:59:30")], []),
        (["RuntimeError: NCCL error: unhandled cuda error", NCCL.format("11:00:00")], ["nccl-unhandled-cuda"]),
        (["flashinfer.jit: [Autotuner]: Autotuning process ends"], []),
        (["[HAMI-core Msg(1:2:libvgpu.c:873)]: Initializing.....", NCCL.format("11:00:00")], ["hami-hang"]),
    ],
)
def test_a_hang_requires_that_nothing_follows_for_a_minute(log: list[str], found: list[str]) -> None:
    assert ids(explain("\n".join(log) + "\n")) == found
    assert not any(match.rule.kind is Kind.HANG for match in explain("\n".join(log), ended=True).found)


HEALTHY = """\
INFO 11-21 11:59:01 [api_server.py:100] vLLM API server version 0.33.0
INFO 11-21 11:59:02 [utils.py:200] non-default args: {'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}
(Worker_TP0 pid=1) INFO 11-21 11:59:10 [pynccl.py:113] vLLM is using nccl==2.28.9
(Worker_TP0 pid=1) INFO 11-21 11:59:30 [gpu_worker.py:298] Available KV cache memory: 40.17 GiB
(EngineCore pid=9) INFO 11-21 11:59:30 [kv_cache_utils.py:1091] Maximum concurrency for 131,072 tokens per request: 8.17x
(Worker_TP0 pid=1) INFO 11-21 12:00:00 [kernel_warmup.py:64] Running FlashInfer autotune
(EngineCore pid=9) INFO 11-21 12:01:00 [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds.
Capturing CUDA graphs: 100%|####| 35/35
INFO 11-21 12:02:00 Application startup complete.
INFO 11-21 12:03:00 [loggers.py:123] Engine 000: Avg generation throughput: 198.0 tokens/s, Running: 1 reqs
"""


def test_a_backend_that_was_replaced_is_no_failure() -> None:
    """A line of sglang/multimodal_gen/runtime/platforms/cuda.py, printed on each start on SM12x."""
    line = "FlashAttention is not supported on SM12.x in this build; falling back to Torch SDPA."
    assert explain(f"[10-11 21:17:41] {line}\n").found == ()


def test_a_healthy_log_has_no_failure() -> None:
    explanation = explain(HEALTHY)
    assert not explanation.known and ids(explanation) == [] and explanation.errors == ()


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("ImportError: libnuma.so.1: cannot open shared object file\nCould not load any common_ops library!", "libnuma"),
        ("RuntimeError: Assertion error (/w/csrc/apis/attention.hpp:136): Unsupported architecture", "deepgemm-architecture"),
        ("/entry.sh: line 7: 111 Illegal instruction (core dumped) vllm serve", "cpu-illegal-instruction"),
        ("torch.AcceleratorError: CUDA error: an illegal instruction was encountered", "illegal-instruction"),
        ("GPU 0: NVIDIA RTX PRO 6000\nNVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)", "nv-no-memory"),
        ("CUDA error: out of memory", "cuda-oom-driver"),
        ("    return torch.cuda.cudart().cudaMemGetInfo(device)\nCUDA error: out of memory", "memory-query"),
        ("CUDA error: device-side assert triggered", "device-assert"),
        ("VLLM::EngineCor invoked oom-killer: gfp_mask=0x0", "oom-killer-invoked"),
        ("python invoked oom-killer: x\nMemory cgroup out of memory: Killed process 1 (python)", "oom-kill-cgroup"),
        ("GPU 0: NVIDIA GB10\nNVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)", "gb10-memory"),
    ],
)
def test_similar_lines_with_different_causes(log: str, found: str) -> None:
    assert ids(explain(log + "\n"))[0] == found


@pytest.mark.parametrize("gpu", ["GPU 0: NVIDIA GB10", "GPU 0: NVIDIA GeForce RTX 5090"])
def test_a_failed_allocation_of_the_driver_is_no_failure_if_the_server_serves(gpu: str) -> None:
    lines = [gpu, "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)", "INFO:     Application startup complete."]
    assert explain("\n".join(lines)).found == ()
    assert explain("\n".join([lines[0], lines[2], lines[1]])).known


def test_sglang_is_known_by_its_own_lines() -> None:
    log = (
        "[2026-07-22 08:14:55 TP3] Scheduler hit an exception: Traceback (most recent call last):\nCUDA error: out of memory\n"
    )
    assert explain(log).found[0].fixes == explain("sglang\nCUDA error: out of memory\n").found[0].fixes
    assert "--gpu-memory-utilization" not in str(explain(log).found[0].fixes)


def test_what_slows_a_server_is_explained() -> None:
    slow = CliRunner().invoke(app, ["explain", "-"], input=BY_ID["marlin-fp4"].sample)
    assert slow.exit_code == 0 and "marlin-fp4 (slow)" in slow.output and "unknown" not in slow.output


def test_inexact_backend_is_reported_but_recommended_nowhere() -> None:
    line = "Using 'FLASHINFER_B12X' NvFp4 MoE backend out of potential backends: ['FLASHINFER_CUTLASS'].\n"
    (match,) = explain(f"{VLLM}\n{line}").found
    assert match.rule.id == "flashinfer-b12x-scales" and "--moe-backend b12x" in match.fixes[0]
    assert not [rule.id for rule in RULES for fix in rule.fixes if "flashinfer_b12x" in fix.text]


@pytest.mark.parametrize(
    ("line", "versions"),
    [
        ("INFO [api_utils.py:345]  \u2584\u2584 \u2584\u2588 \u2588  version 0.27.1", {"vllm": "0.27.1"}),
        ("vLLM API server version 0.7.0+5e800e3d.nv25.02", {"vllm": "0.7.0+5e800e3d.nv25.02"}),
        ("vLLM Version                 : 0.16.0", {"vllm": "0.16.0"}),
        ("flashinfer-python==0.6.4 torch==2.10.0 NCCL version 2.25.1+cuda12.8", {"flashinfer": "0.6.4", "torch": "2.10.0"}),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build", {"driver": "595.71.05"}),
        (
            "GPU 0: NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition (UUID)",
            {"gpu": "RTX PRO 6000 Blackwell Max-Q Workstation Edition"},
        ),
    ],
)
def test_versions_in_logs(line: str, versions: dict[str, str]) -> None:
    assert versions.items() <= explain(line + "\n").versions.items()


def test_rules_apply_to_their_versions_only() -> None:
    line = BY_ID["triton-mma-version"].sample
    assert ids(explain(f"triton==3.2.0\n{line}\n")) == ["triton-mma-version"]
    assert ids(explain(f"triton==3.4.0\n{line}\n")) == []


def test_progress_bars_escape_sequences_and_invalid_utf8() -> None:
    bar = b"Capturing CUDA graphs: 14%|\xe2\x96\x88| 1/7\r" * 50
    fault = (
        b"\xff\xfe(Worker_TP0)\x1b[0;36m Failed: Cuda error /w/custom_all_\x1b[1mreduce.cuh:164 'invalid argument'\x1b[0m\xff"
    )
    explanation = explain(bar + fault + b"\n\x00\x00\n")
    assert ids(explanation) == ["custom-ar-invalid"] and explanation.found[0].number == 51
    assert "custom_all_reduce.cuh" in explanation.found[0].line and "\x1b" not in explanation.found[0].line


def test_unknown_log_lists_possible_errors() -> None:
    explanation = explain(
        "fine\nTraceback (most recent call last):\n(pid=1) ValueError: of a new kind\n(pid=2) ValueError: of a new kind"
    )
    assert not explanation.known and explanation.found == ()
    assert [(error.number, error.line) for error in explanation.errors] == [(3, "(pid=1) ValueError: of a new kind")]
    assert not explain(BY_ID["symm-mem"].sample).known
    assert explain("").lines == 0


NOISE = """\
INFO 11-21 11:59:30 [gpu_worker.py:298] Available KV cache memory: 40.17 GiB
WARNING 11-21 11:59:31 [vllm.py:848] Failed to import Triton kernels of a new kind {0}
WARNING 11-21 11:59:32 [registry.py:512] Model architecture {0} has no implementation, falling back to Transformers.
"""


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=9) ERROR 11-21 12:00:00 [core.py:700] RuntimeError: the flux is broken",
        "panic: 0",
        "what():  the flux is broken",
        "kernel: flux[12]: segfault",
        "flux: Operation not permitted",
        "flux is unreachable",
    ],
)
def test_unknown_logs_show_the_decisive_line_among_warnings(line: str) -> None:
    noise = [NOISE.format(chr(97 + number)) for number in range(26)]
    wrapper = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    log = "".join(noise[:13]) + line + "\n" + ("".join(noise[13:]) if "Error" in line else "") + wrapper
    if "Error" not in line:
        log = line + "\n" + wrapper
    explanation = explain(log)
    assert line in [error.line for error in explanation.errors] and ids(explanation)[0] == "engine-failed"
    assert f": {line}" in CliRunner().invoke(app, ["explain", "-"], input=log).output


NO_KERNEL = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
EXTENSION = '  File "/w/site-packages/causal_conv1d/cpp_functions.py", line 118, in forward'


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([EXTENSION, NO_KERNEL], "extension-no-kernel"),
        ([EXTENSION, '  File "/w/site-packages/torch/_ops.py", line 1, in __call__', NO_KERNEL], "extension-no-kernel"),
        ([EXTENSION, '  File "/w/site-packages/vllm/_custom_ops.py", line 1, in silu', NO_KERNEL], "no-kernel-image"),
        ([EXTENSION, "RuntimeError: another failure", NO_KERNEL], "no-kernel-image"),
        ([EXTENSION, *["INFO of a server"] * 40, NO_KERNEL], "no-kernel-image"),
        (['  File "/home/jane/train.py", line 3, in <module>', NO_KERNEL], "no-kernel-image"),
        (['  File "flash_attn3/interface.py", line 3, in f', NO_KERNEL], "flash-attention-3-extension"),
    ],
)
def test_the_innermost_frame_outside_of_torch_names_the_extension(lines: list[str], found: str) -> None:
    explanation = explain("\n".join(lines) + "\n")
    assert found in ids(explanation) and ("extension-no-kernel" in ids(explanation)) is (found == "extension-no-kernel")
    if found == "extension-no-kernel":
        assert "the extension causal_conv1d, " in explanation.found[0].cause and "{" not in explanation.found[0].fixes[0]


def test_line_across_blocks_is_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scan, "BLOCK_BYTES", 64)
    text = "x" * 50 + "\n" + BY_ID["libnuma"].sample + "\n" + "y" * 500 + "\n"
    assert [(match.rule.id, match.number) for match in explain(text).found] == [("libnuma", 2)]


LINE = b"INFO 11-21 12:00:00 [loggers.py:123] Engine 000: Avg generation throughput: 198.0 tokens/s, Running: 1 reqs\n"


@pytest.mark.parametrize(
    "line",
    [
        "Installing signal handler for SIGSEGV",
        "faulthandler: SIGSEGV handler registered",
        "*** unblocked SIGSEGV for worker threads",
        "curl: (7) Failed to connect to localhost port 8000 after 0 ms: Connection refused",
        "curl: (7) Failed to connect to 127.0.0.1 port 8000: Connection refused",
        "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
        "vllm 0.33.0 requires torch==2.13.0, but you have torch 2.12.1 which is incompatible.",
        "pci 0000:00:1c.0: BAR 13: no space for [mem size 0x00200000 64bit pref]",
        "pci 0000:01:00.0: BAR 6 [mem size 0x00080000 pref]: can't assign; no space",
        "[AutoTuner]: Skipping tactic 14, due to failure: Failed to initialize cutlass TMA WS grouped gemm",
        "[2026-04-13 12:34:29 TP0] Cutlass MLA only supports a page_size of 128, change page_size to 128.",
        "[2026-04-13 12:34:29 TP0] Sliding Window Attention is not implemented for `x`; unexpected results may occur.",
        "[2026-04-13 12:34:29 TP0] MXFP8 attention is disabled because it is only supported on Ascend devices.",
        "[2026-04-13 12:34:29 TP0] Unsupported head_dim=96 for JIT QK-Norm kernel",
        "[2026-04-13 12:34:29 TP0] FlashInfer workspace size check failed: 1",
        "[2026-04-13 12:34:29 TP0] Port 30000 is already in use, trying port 30001",
        "[2026-04-13 12:34:29 TP0] Error when compiling Jinja template: x",
        "Flashinfer TRTLLM MOE backend is only supported on SM100 and later, using CUTLASS backend instead",
        "[W socket.cpp:436] [c10d] The server socket has failed to bind to [::]:29500 (errno: 97 - unsupported family).",
        "[2026-04-13 12:34:29] Some weights were not initialized from checkpoint: ['model.layers.0.mlp.gate.bias']",
        "[2026-04-13 12:34:29] Following weight_scale weights were not initialized from checkpoint: {'model.x_scale'}",
        "trtllm MoE requires SM100, not selected",
        "W1203 08:20:11.772031       1 devices.go:77] Ignoring error getting device memory: Not Supported",
        "        HW Thermal Slowdown                          : Not Active",
        "EDAC MC0: Giving out device to module skx_edac",
    ],
)
def test_healthy_lines_do_not_explain_a_log(line: str) -> None:
    """Lines of programs that went on, many from the messages in the source of SGLang and FlashInfer."""
    assert not explain(line + "\nend\n").known


def test_a_class_that_every_release_has_is_not_called_newer_than_the_engine() -> None:
    line = "vLLM API server version 0.19.0\nValueError: Model architectures ['{}'] are not supported for now."
    assert ids(explain(line.format("NewForCausalLM"))) == ["architecture-unknown"]
    assert ids(explain(line.format("LlamaForCausalLM"))) == []


def test_a_bar_that_is_assigned_later_is_no_failure() -> None:
    refused = "pci 0000:01:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space\n"
    assert ids(explain(refused)) == ["bar-no-space"]
    assert not explain(refused + "pci 0000:01:00.0: BAR 1 [mem 0x8000000000-0x87ffffffff 64bit pref]: assigned\n").known


def test_a_bar_of_another_gpu_that_is_assigned_does_not_hide_the_failure() -> None:
    refused = "pci 0000:{}:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space\n"
    assigned = "pci 0000:{}:00.0: BAR 1 [mem 0x8000000000-0x87ffffffff 64bit pref]: assigned\n"
    log = refused.format("01") + refused.format("41") + assigned.format("01")
    (match,) = explain(log).found
    assert (match.rule.id, match.count, match.number) == ("bar-no-space", 1, 2)
    assert not explain(log + assigned.format("41")).known
    again = assigned.format("01") + refused.format("01")
    assert ids(explain(again)) == ["bar-no-space"]


GLOO = "[rank0]:[W1014 05:11:02.123456 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=7, addr=[localhost]:29500)"
FALLBACK = "The client socket has failed to connect to [localhost]:29500 (errno: 97 - Address family not supported)."
IGNORED = "[2026-04-13 12:34:29] Ignore import error when loading sglang.srt.models."


@pytest.mark.parametrize(
    "line",
    [
        IGNORED + "gemma4_audio: cannot import name 'Gemma4AudioConfig' from 'transformers' (/w/transformers/__init__.py)",
        IGNORED + "qwen3_omni: libavutil.so.58: cannot open shared object file: No such file or directory",
        GLOO,
        GLOO.removeprefix("[rank0]:") + ": DistNetworkError",
        f"[W1014 05:11:02.123456789 socket.cpp:767] [c10d] {FALLBACK}",
        f"[W socket.cpp:663] [c10d] {FALLBACK}",
        f"W1014 05:11:02.123456 77 socket.cpp:767] {FALLBACK}",
        "[2026-04-13 12:34:29] using TCPStore at 10.0.0.1:29500",
        "Prefill batch. #new-seq: 1, image tokens: 256",
        "Multimodal: image tokens per item: 256",
        "Found 'cmake': /usr/bin/cmake",
        "modprobe: nvidia_peermem loaded",
        "nvidia_peermem is not loaded, disabling GDR",
        "nvcc -gencode arch=compute_120a required for sm_120a",
        "FP8 KV cache requires Blackwell; ok on sm_120",
        "TRTLLM-gen kernels not available on sm_120, using fa2",
        "FA3 kernels unsupported on sm_120, using fa2",
        "rope_scaling 'factor' field: 4.0",
        "Health check failed: Connection refused, will retry",
        "Retrying in 5 s after an error: Connection refused",
        "cat: /sys/class/infiniband: Permission denied",
        "-- Could NOT find OpenMP_CXX (missing: OpenMP_CXX_FLAGS)",
        "CMake Warning at CMakeLists.txt:12 (find_package): Could not find cuDNN",
        "fatal: not a git repository (or any of the parent directories): .git",
        "Error: No such container: vllm_node",
        "spark:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "spark:1:1 [0] NCCL INFO NET/Socket : Connected after Resource temporarily unavailable",
        "Using max model len 131072, maximum context length of the checkpoint is 262144",
        "Using dtype bfloat16, as float16 is not supported for this model",
        "ptxas info    : Used 128 registers, line 12; no error",
        "Attempting to cast dtype bfloat16, no kernel found in the cache: compiling",
        "[rank0]:[W0622 10:11:12.1 ProcessGroupNCCL.cpp:1771] TCPStore server has shut down too early",
        "earlyoom v1.7: mem avail: 64012 of 124612 MiB (51.37%), swap free: 0 of 0 MiB",
        "Requirement already satisfied: numpy, please install nothing",
        "max_num_batched_tokens must be a multiple of 16: 8192",
        "Docker Desktop cannot connect to the update server, will retry",
        "WARNING Unknown load_format: LoadFormat.X, the default is used",
        "[TP0] Parameter model.layers.0.self_attn.attn.k_scale not found in params_dict",
        "INFO Downloading over hf_xet: 0 errors, Task error: none",
        "Determined top_k from config: 8",
        "Valid configuration: NUM_MMA_Q=1 NUM_MMA_KV=2",
        "NVRM: Xid (PCI:0000:01:00): none since boot",
        "INFO backend_selector: prefill needs another backend than decode, please use `--attention-backend auto` for both",
        "WARNING could not pickle the graph, fallback to no cache",
        "WARNING Could not load this library: libtorchcodec.so, video input is off",
        "Process 8812 terminated with exit code 0",
        "mode is supported for GDN_ATTN",
        "libcufft.dylib, libcufft_static.a, libcufftw.dylib,",
        "    raise LocalEntryNotFoundError(",
        "pcieport 0000:00:01.1: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "i2c_designware AMDI0010:03: SMBus error, arbitration lost",
        "nvidia_peermem: module verification failed: signature and/or required key missing - tainting kernel",
        'level=info msg="grpc: addrConn.createTransport failed to connect to {unix:///run/containerd/containerd.sock}. Err: '
        'connection error: dial unix /run/containerd/containerd.sock: connect: connection refused. Reconnecting..."',
        'level=info msg="Attempting next endpoint for pull after error: manifest unknown: manifest unknown"',
        "Some attention backends are not valid for cuda with AttentionSelectorConfig(has_sink=True). Reasons: "
        "{FLASH_ATTN: [sink setting not supported]}.",
        "[2026-04-13 12:34:29] FA4 vision attention uses torch SDPA because FA4 does not support packed sequences",
        "[2026-04-13 12:34:29] Failed to fetch 4f2a from HiCacheFile storage.",
        "process was killed",
        "job finished with exit status 1",
        "[2026-04-13 12:34:29] rope_dim=64 must be divisible by per-thread width=48 for fused QKNorm+RoPE",
        "[2026-04-13 12:34:29] Failed to release an unused multimodal feature transport",
    ],
)
def test_lines_of_programs_that_went_on_do_not_explain_a_log(line: str) -> None:
    assert not explain(line + "\nend\n").known


def test_the_source_code_of_an_assertion_has_its_condition() -> None:
    for prefix in ("", "(Worker_TP0 pid=7) ERROR 09-15 10:11:12 [multiproc_executor.py:962] "):
        lines = ["    assert param_data.shape == loaded_weight.shape", "           ^^^^^^^^^^^^^^^", "AssertionError"]
        assert ids(explain("\n".join(prefix + line for line in lines) + "\n")) == ["weight-shape"]
    assert not explain("    assert width\nAssertionError\n").known


def test_large_logs_take_little_time() -> None:
    log = io.BytesIO(LINE * 30_000 + BY_ID["no-devices"].sample.encode())
    started = time.process_time()
    explanation = log_rules.explain(log)
    assert explanation.lines == 30_001 and ids(explanation) == ["no-devices"]
    assert time.process_time() - started < 3


class GeneratedLog(io.RawIOBase):
    """A log of a given number of bytes that is generated while it is read."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int = -1) -> bytes:
        size = min(self.left, size if size >= 0 else self.left)
        self.left -= size
        return (LINE * (size // len(LINE) + 1))[:size]


def test_large_logs_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scan, "BLOCK_BYTES", 64 << 10)
    tracemalloc.start()
    try:
        assert log_rules.explain(GeneratedLog(3 << 20)).lines > 20_000  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_command_line(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(BY_ID["marlin-fp4"].sample.encode() + b"\n" + BY_ID["symm-mem"].sample.encode())
    result = CliRunner().invoke(app, ["explain", str(log)])
    assert (
        result.exit_code == 0
        and "marlin-fp4 (slow): line 1" in result.output
        and "symm-mem (harmless): line 2" in result.output
    )
    record = json.loads(CliRunner().invoke(app, ["explain", "-", "--json"], input=log.read_bytes()).stdout)["logs"][0]
    assert record["known"] and [match["rule"]["id"] for match in record["found"]] == ["marlin-fp4", "symm-mem"]
    assert record["issue"] == record["search"] == ""
    unknown = CliRunner().invoke(app, ["explain", "-"], input="all is well\n")
    assert unknown.exit_code == 1 and "unknown" in unknown.output
    for path in (tmp_path, tmp_path / "absent.log"):
        assert isinstance(CliRunner().invoke(app, ["explain", str(path)]).exception, BadInput)


def test_unknown_failures_have_an_issue_text() -> None:
    log = (
        "vLLM API server version 0.33.0\nGPU 0: NVIDIA RTX PRO 6000 Blackwell Workstation Edition\nDriver Version: 595.71.05\n"
        "ok\nRuntimeError: the flux in /home/jane/model is broken\nEngine core initialization failed. See root cause above.\n"
    )
    result = CliRunner().invoke(app, ["explain", "-"], input=log)
    assert result.exit_code == 1
    issue = result.output.partition("text for an issue")[2]
    for text in ("vllm: 0.33.0", "RTX PRO 6000 Blackwell Workstation Edition", "595.71.05", "the flux in ~/model is broken"):
        assert text in issue
    assert "line 5: RuntimeError" in result.output and "jane" not in issue
    table = json.loads(CliRunner().invoke(app, ["explain", "-", "--json"], input=log).stdout)["logs"][0]
    assert table["issue"] in result.output and table["errors"][0]["number"] == 5


def test_several_logs(tmp_path: Path) -> None:
    first, second = tmp_path / "rank0.log", tmp_path / "rank1.log"
    first.write_text("all is well\n")
    second.write_text(BY_ID["no-kernel-image"].sample)
    result = CliRunner().invoke(app, ["explain", str(first), str(second)])
    assert result.exit_code == 0 and f"== {first}" in result.output and "no-kernel-image (failure): line 1" in result.output
    assert CliRunner().invoke(app, ["explain"]).exit_code == 2


UNKNOWN = "RuntimeError: the flux is broken at /home/jane/x.py"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_encodings_with_a_byte_order_mark(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scan, "BLOCK_BYTES", 151)
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    explanation = explain(f"{mark}start\r\n{NO_KERNEL}\r\n".encode(encoding))
    assert [(match.rule.id, match.line, match.number) for match in explanation.found] == [("no-kernel-image", NO_KERNEL, 2)]
    assert explain(f"{mark}{UNKNOWN}\r\n".encode(encoding)).errors[0].line == UNKNOWN


def test_the_start_of_a_long_line_is_shown() -> None:
    (match,) = explain("x " * 5000 + NO_KERNEL + " y" * 5000).found
    assert len(match.line) <= _lines.KEPT_CHARACTERS


def test_lines_have_no_control_characters() -> None:
    (error,) = explain("ERROR the \x07flux\x00\x9b31m is broken\n").errors
    assert error.line.isprintable() and "flux" in error.line


COMPRESSED = b"".join(f"{number} {number * number}\n".encode() for number in range(2000))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs_and_programs_are_refused(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    packed = tmp_path / "server.log"
    packed.write_bytes(pack(COMPRESSED))
    for path in (packed, Path(sys.executable)):
        with pytest.raises(BadInput) as refused:
            inputs.of_file(path)
        assert str(path) in str(refused.value) and str(path) in str(refused.value.hint)


@pytest.mark.parametrize(
    "start", [b"", b"\0" * 5000, b"ok \x1b[0;36m 50%\r\b\xe2\x96\x88\n" * 9, "\ufeff\u0103\u0203".encode("utf-16-le")]
)
def test_logs_with_zeros_colours_and_other_encodings_are_text(start: bytes, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(start + NO_KERNEL.encode("utf-16-le" if start.startswith(b"\xff\xfe") else "utf-8"))
    assert inputs.of_file(log).known


def test_of_a_huge_file_of_zeros_the_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scan, "MAX_BLOCKS", 8)
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(BadInput) as refused:
        inputs.of_file(log)
    assert str(log) in refused.value.message and "GiB" in refused.value.message and f"tail -c 500M {log}" in refused.value.hint


def test_compressed_standard_input_is_refused() -> None:
    command = [sys.executable, "-m", "sm120kit", "explain", "-"]
    result = subprocess.run(command, input=gzip.compress(COMPRESSED), capture_output=True, check=False)
    assert result.returncode == BadInput.exit_code
    assert b"standard input" in result.stderr and b"zcat FILE | sm120kit explain -" in result.stderr


def test_closed_standard_input_is_an_error() -> None:
    command = [sys.executable, "-m", "sm120kit", "explain", "-"]
    result = subprocess.run(["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, check=False)
    assert result.returncode == BadInput.exit_code and "standard input is closed" in result.stderr


def test_an_empty_log_has_no_text_for_an_issue() -> None:
    result = CliRunner().invoke(app, ["explain", "-"], input="")
    assert result.exit_code == 1 and "unknown" in result.output and "issue" not in result.output


SITE = "/usr/lib/python3.12/site-packages"
KEYWORD = "{}() got an unexpected keyword argument 'x'"
MISSING = "GlmDecoderLayer.forward() missing 1 required positional argument: 'y'"
SCALE = "NVFP4 weight_scale for layer 'parallel_lm_head' was never loaded (still NaN)"
COMPILED = "/root/.cache/vllm/torch_compile_cache/a/inductor_cache/x4/c.py"
ASKED = "No valid attention backend found for cuda with AttentionSelectorConfig(kv_cache_dtype={}). Reasons: {{A: [{}]}}."


@pytest.mark.parametrize(
    ("before", "error", "found"),
    [
        (f"{SITE}/vllm/models/a.py", f"TypeError: {KEYWORD.format('FusedMoE.__init__')}", "mixed-files-call"),
        ("/opt/vllm/vllm/models/glm_mtp.py", f"TypeError: {MISSING}", "mixed-files-call"),
        (f"{SITE}/vllm/models/a.py", f"TypeError: {KEYWORD.format('trtllm_decode')}", ""),
        (f"{SITE}/mine/a.py", f"TypeError: {KEYWORD.format('FusedMoE.__init__')}", ""),
        (f"{SITE}/sglang/a.py", "ImportError: cannot import name 'f' from 'sglang.srt.utils'", "mixed-files-import"),
        (f"{SITE}/vllm/a.py", "ImportError: cannot import name 'F' from 'transformers.cache'", "interface-missing"),
        ("torch 2.12.0+cu130, triton 3.7.0", "RuntimeError: PassManager::run failed", "triton-370-pass-manager"),
        ("torch 2.9.0, triton 3.5.0", "RuntimeError: PassManager::run failed", ""),
        ("speculative_config=SpeculativeConfig(method='mtp')", f"RuntimeError: {SCALE}", "drafter-scale-not-loaded"),
        ('--speculative-config {"method":"qwen3_next_mtp"}', f"RuntimeError: {SCALE}", "drafter-scale-not-loaded"),
        ("speculative_config=SpeculativeConfig(method='ngram')", f"RuntimeError: {SCALE}", ""),
        ("SpeculativeConfig(method='mtp')", f"RuntimeError: {SCALE.replace('parallel_', '')}", ""),
        (f"{SITE}/vllm/model_loader/utils.py", f"TypeError: {KEYWORD.format('MyForCausalLM.__init__')}", ""),
        ("", "draft: unexpected weight 'mtp.0.w1.scale' -> 'stages.0.w1.scale_inv'", "drafter-weight-unexpected"),
        ("", "WARNING draft: unexpected weight 'rotary.inv_freq'", ""),
        ("", ASKED.format("fp8", "kv_cache_dtype not supported"), "attention-none-kv-dtype"),
        ("", ASKED.format("auto", "head_size not supported"), "attention-none"),
        ("", "RuntimeError: Triton Error [CUDA]: operation not permitted", "triton-not-permitted"),
        ("", "CUDA error (w/csrc/combine.cu:201): invalid configuration argument", "kernel-launch-configuration"),
        (COMPILED, "AssertionError: expected size 328==82", "compile-cache-stale"),
        ("/tmp/torchinductor_root/x4/c.py", "KeyError: 'arg12_1'", "compile-cache-stale"),
        (COMPILED, "ValueError: not enough values to unpack (expected 24, got 22)", "compile-cache-stale"),
        (COMPILED, "RuntimeError: the op of a library failed", ""),
        (f'{COMPILED}", line 9, in call\n  File "{SITE}/flashinfer/gemm.py', "AssertionError: hidden size", ""),
    ],
)
def test_causes_that_more_than_one_line_shows(before: str, error: str, found: str) -> None:
    frame = f'  File "{before}", line 9, in call' if before.startswith("/") else before
    assert ids(explain(f"{frame}\n{error}\n")) == [found] * bool(found)


REFUSED = "{}: error: unrecognized arguments: {}\n"


@pytest.mark.parametrize(
    ("program", "given", "replacements"),
    [
        ("launch_server.py", "--num-nodes 2 --max-model-len 8", ["`--num-nodes`: here `--nnodes`", "here `--context-length`"]),
        ("vllm serve", "--context-length 8", ["here `--max-model-len`"]),
        ("vllm serve", "--flux 8", ["`--flux`: not in this version's parser"]),
    ],
)
def test_refused_options_have_replacements(program: str, given: str, replacements: list[str]) -> None:
    (match,) = explain(REFUSED.format(program, given)).found
    assert match.rule.id == "option-unknown" and len(match.fixes) == len(replacements)
    assert all(text in fix for text, fix in zip(replacements, match.fixes, strict=True))


@pytest.mark.parametrize("given", ["--no-enable-prefix-caching", "-O3", "--max_model_len 8", "--compilation-config.level 3"])
def test_spellings_that_an_engine_may_accept_are_not_called_unknown(given: str) -> None:
    explanation = explain(REFUSED.format("vllm serve", given))
    assert not explanation.known and given in explanation.errors[0].line


def test_an_option_after_a_blank_is_not_called_unknown() -> None:
    assert ids(explain(REFUSED.format("vllm serve", " --port 8000"))) == ["option-after-blank"]


@pytest.mark.parametrize("given", ["serve org/Model-NVFP4", "vllm serve m --port 1", "python3 -m sglang.launch_server"])
def test_a_repeated_command_is_no_unknown_option(given: str) -> None:
    assert ids(explain(REFUSED.format("vllm serve", given))) == ["command-repeated"]


@pytest.mark.parametrize("engine", _explanation.RENAMED)
def test_replacements_are_options_of_the_newest_recorded_parser(engine: str) -> None:
    records = [record for recipe, record in RECORDED if recipe.engine == engine]
    names = {name for option in max(records, key=lambda record: record.recipe).options for name in option.names}
    for old, new in _explanation.RENAMED[engine].items():
        assert old not in names and set(OPTION.findall(new)) <= names


WATCHDOG = "[rank1]:[E1002 08:10:02] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)\n"
STALL = "WARNING Triton kernel JIT compilation during inference: _prepare. This causes a latency spike\n"


def test_a_late_timeout_is_the_consequence_of_an_earlier_error() -> None:
    assert ids(explain(WATCHDOG)) == ["nccl-watchdog"]
    assert ids(explain(STALL + WATCHDOG)) == ["nccl-watchdog-after-compilation"]
    explanation = explain("RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling x\n" + WATCHDOG)
    (match,) = explanation.found
    assert match.kind is Kind.CONSEQUENCE and not match.fixes and not explanation.known
    assert [error.number for error in explanation.errors] == [1]


@pytest.mark.parametrize("time", ["10-01 23:02:10", "10-02 08:30:00", "2026-10-01 08:02:10"])
def test_a_compilation_long_before_a_timeout_or_after_it_is_not_its_cause(time: str) -> None:
    stall = STALL.replace("WARNING", f"WARNING {time}")
    assert ids(explain(stall + WATCHDOG)) == ids(explain(WATCHDOG + STALL)) == ["nccl-watchdog"]
    assert ids(explain(STALL.replace("WARNING", "WARNING 10-02 07:52:00") + WATCHDOG)) == ["nccl-watchdog-after-compilation"]


DEAD = "(APIServer pid=1) ERROR EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
REFUSAL = "(APIServer pid=1) ERROR 10-02 03:15:10 [serving.py:13] ValueError: the flux of this request is odd\n"


def test_late_failures_follow_the_end_of_the_engine_and_errors_of_ranks_only() -> None:
    assert [match.kind for match in explain(DEAD + WATCHDOG).found] == [Kind.CONSEQUENCE] * 2
    assert [match.kind for match in explain(WATCHDOG + DEAD + WATCHDOG).found] == [Kind.FAILURE, Kind.CONSEQUENCE]
    assert [match.kind for match in explain(REFUSAL + WATCHDOG).found] == [Kind.FAILURE]
    store = BY_ID["rendezvous-other-node"].sample
    assert explain(store).known and not explain(f"(Worker_TP0 pid=2) ERROR ValueError: odd\n{store}").known


STARTED = "(APIServer pid=1) INFO:     Application startup complete.\n"
ANSWERED = '(APIServer pid=1) INFO:     127.0.0.1:50000 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize(
    ("log", "exit_code"),
    [
        (BY_ID["symm-mem"].sample + "\n" + STARTED + ANSWERED, 0),
        ("ERROR flux of a new kind\n" + STARTED + ANSWERED, 0),
        (STARTED, 1),
        (ANSWERED, 1),
        (STARTED + ANSWERED + "RuntimeError: the flux is broken\n", 1),
    ],
)
def test_a_server_that_answers_is_healthy(log: str, exit_code: int) -> None:
    result = CliRunner().invoke(app, ["explain", "-"], input=log)
    assert result.exit_code == exit_code and ("no failure found" in result.output) is (exit_code == 0)


def test_unknown_failures_show_key_lines_and_a_search() -> None:
    log = (
        "RuntimeError: ninja exited with status 1\n[1/2] /opt/x/cc -c a.cu\nFAILED: [code=127] a.o\n"
        "/bin/sh: 1: /opt/x/cc: not found\nvllm\n"
    )
    explanation = explain(log)
    assert [error.number for error in explanation.errors] == [1, 3, 4]
    assert (
        search_address(explanation) == "https://github.com/vllm-project/vllm/issues?q=RuntimeError%3A+ninja+exited+with+status"
    )
    result = CliRunner().invoke(app, ["explain", "-"], input=log)
    assert result.exit_code == 1 and search_address(explanation) in result.output


SEEDS = ("`", "error ", "Error: '", "a.", "layer ", "x", "1", " ", "cuda ", "(", "required ")


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.pattern or rule.frame], ids=lambda rule: rule.id)
def test_expressions_of_rules_take_linear_time(rule: Rule) -> None:
    """Twice the text takes less than four times the time, which a quadratic expression takes."""
    for expression in filter(None, (rule.pattern, rule.frame)):
        for seed in (*SEEDS, rule.sample[:40], rule.sample.rpartition("\n")[2][:20]):
            seconds = [search_seconds(expression, seed * (size // len(seed))) for size in (2_500, 5_000)]
            assert seconds[1] < max(3 * seconds[0], 0.004), (expression, seed)


def search_seconds(expression: str, text: str) -> float:
    """The lowest processor time of three searches."""
    pattern, times = re.compile(expression, re.IGNORECASE), []
    for _ in range(3):
        started = time.process_time()
        pattern.search(text)
        times.append(time.process_time() - started)
    return min(times)


def test_adversarial_lines_take_little_more_time_than_others() -> None:
    """Lines with the strings of a rule between characters that its expressions repeat."""
    plain = b"INFO Error: " + b"x" * 1000 + b"\n"
    started = time.process_time()
    explain(plain * 1000)
    least = max(time.process_time() - started, 0.1)
    for rule in RULES:
        text = " ".join((*rule.match, *rule.any[:1])).encode()
        log = (b"Error: " + b"`" * 480 + text + b"`" * 480 + b"\n") * 40
        started = time.process_time()
        explain(log)
        assert time.process_time() - started < least, rule.id


def test_a_fifo_whose_writer_may_never_come_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "fifo")])
    assert isinstance(result.exception, BadInput) and "FIFO" in result.exception.message
