"""vLLM's server on one GPU and on several: the same tokens, and what ``verify server`` finds, healthy and with seeded faults.

``python3 tests/gpu/vllm_servers.py DIR WORLD [SERVER ...]`` on a machine with two or four GPUs, vLLM and FlashInfer
(``carry_vllm.py``) and ``src`` on PYTHONPATH. All servers run at once, with models of random weights that it writes to DIR, and
its logs. Prints a line for each comparison and each probed server. Exit code 1 if a server ends, answers other tokens in
float32 than one GPU where neither is a tie, or a verdict is not as expected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_checkpoints

HERE = Path(__file__).resolve().parent

PROMPTS, TOKENS, TOGETHER, TOP = 32, 24, 8, 5
TIE_NATS = 0.01
"""In float32, two tokens whose log-probabilities differ by less may change places. In bfloat16 answers are not judged."""
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'
GRAPHS = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16]}'
EAGER = ("--enforce-eager",)
CAPTURED = ("--compilation-config", GRAPHS)
CHUNKS = ("--max-num-batched-tokens", "256")
SPECULATE = ("--speculative-config", NGRAM)
MTP = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}')
NCCL = ("--disable-custom-all-reduce",)
PCIE_IPC = {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SAFE |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Without NVLink multicast, which can put a shared host's GPUs out of service, and FlashInfer's sampler, which it compiles."""


@dataclass(frozen=True)
class Server:
    """On all GPUs, or with ``gpu`` on one of them; ``like`` names the server on one GPU with the same weights.

    ``fault`` is seeded and must be found.
    """

    model: str
    arguments: tuple[str, ...]
    like: str = ""
    dtype: str = "bfloat16"
    fault: str = ""
    gpu: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


SERVERS = {
    "one": Server("moe", EAGER, gpu=0),
    "one-again": Server("moe", EAGER, "one", gpu=1),
    "several": Server("moe", EAGER, "one"),
    "several-nccl": Server("moe", (*EAGER, *NCCL), "one"),
    "several-graphs-chunks": Server("moe", (*CAPTURED, *CHUNKS), "one"),
    "several-pcie-ipc": Server("moe", (*CAPTURED, *CHUNKS), "one", environment=PCIE_IPC),
    "one-ngram": Server("moe", (*EAGER, *SPECULATE), "one", gpu=1),
    "several-ngram": Server("moe", (*EAGER, *SPECULATE), "one"),
    "one-float32": Server("moe", EAGER, dtype="float32", gpu=0),
    "several-float32": Server("moe", EAGER, "one-float32", "float32"),
    "several-float32-nccl": Server("moe", (*EAGER, *NCCL), "one-float32", "float32"),
    "dense-one": Server("dense", EAGER, dtype="float32", gpu=1),
    "dense-several": Server("dense", EAGER, "dense-one", "float32"),
    "dense-several-graphs-chunks-ngram": Server("dense", (*CAPTURED, *CHUNKS, *SPECULATE), "dense-one", "float32"),
    "dense-one-float16": Server("dense", EAGER, dtype="float16", gpu=1),
    "dense-several-float16-pcie-ipc": Server("dense", CAPTURED, "dense-one-float16", "float16", environment=PCIE_IPC),
    "mtp-off": Server("glm", EAGER, dtype="float32", gpu=0),
    "mtp-one": Server("glm", (*EAGER, *MTP), "mtp-off", "float32", gpu=1),
    "mtp-several-graphs-chunks": Server("glm", (*CAPTURED, *CHUNKS, *MTP), "mtp-off", "float32"),
    "mtp-several-bfloat16-pcie-ipc": Server("glm", (*CAPTURED, *CHUNKS, *MTP), environment=PCIE_IPC),
    "stale-all-reduce": Server("moe", EAGER, fault="stale-all-reduce"),
    "left-out-all-reduce": Server("moe", EAGER, "one", fault="left-out-all-reduce"),
    "exchanged-rows": Server("moe", EAGER, fault="exchanged-rows"),
    "blocks-by-length": Server("moe", EAGER, fault="blocks-by-length"),
    "drafts-all": Server("moe", (*EAGER, *SPECULATE), fault="drafts-all"),
}
PROBES = [
    "log-probabilities",
    "counts of tokens",
    "repeated requests",
    "decoding against prefill",
    "cached prefixes",
    "needles",
]
PLUGINS = "[vllm.general_plugins]\nseeded = vllm_faults:seed\nwatched = compile_watch:install\n"


def launch(argv: list[str], environment: Mapping[str, str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A server's process, in a session of its own, with the plugins beside this file; its log is ``folder/name.log``."""
    plugins = folder / "plugins"
    entry = plugins / "seeded_faults-0.dist-info" / "entry_points.txt"
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_text(PLUGINS)
    entry.with_name("METADATA").write_text("Metadata-Version: 2.1\nName: seeded-faults\nVersion: 0\n")
    variables = {**os.environ, **SAFE, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"VLLM_HOST_IP": "127.0.0.1", **environment}
    if (ninja := shutil.which("ninja")) and not server_compiles(environment):
        found = [path for path in variables["PATH"].split(os.pathsep) if Path(path) != Path(ninja).parent]
        variables["PATH"] = os.pathsep.join(found)
    variables["PYTHONPATH"] = os.pathsep.join((str(plugins), str(HERE), variables.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *argv, "--host", "127.0.0.1"]
    command += ["--served-model-name", "small"]
    log = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def server_compiles(environment: Mapping[str, str]) -> bool:
    """Whether FlashInfer may compile: without ninja, vLLM does not use it for operators whose sources are not carried."""
    return bool(PCIE_IPC.keys() & environment.keys())


def end(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """End servers and all that they started."""
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes.values():
        process.wait()


def started(name: str, port: int, folder: Path, world: int) -> subprocess.Popen[bytes]:
    """The process of a server."""
    server = SERVERS[name]
    environment = {**server.environment, "SEEDED_FAULT": server.fault}
    if server.gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(server.gpu)
    argv = [str(folder / server.model), "--port", str(port), "--dtype", server.dtype]
    argv += ["--tensor-parallel-size", str(world if server.gpu is None else 1), "--max-model-len", "2048"]
    argv += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "1G", "--attention-backend", "TRITON_ATTN"]
    return launch([*argv, *server.arguments], environment, folder, name)


def ready(port: int, process: subprocess.Popen[bytes], until: float) -> bool:
    """Whether a server answers before a time."""
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def answers(port: int) -> list[list[tuple[str, dict[str, float]]]]:
    """Of each prompt the tokens with the most likely ones at their places."""
    from sm120kit.probes import probe_prompts

    words = " ".join(probe_prompts.inventory(60, "two")).split()
    prompts = [" ".join(words[:length]) for length in (1 + 20 * number for number in range(PROMPTS))]

    def answer(prompt: str) -> list[tuple[str, dict[str, float]]]:
        body = {"model": "small", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": TOP, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            listed = json.load(response)["choices"][0]["logprobs"]
        return list(zip(listed["tokens"], listed["top_logprobs"], strict=True))

    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(answer, prompts))


def compared(one: list[Any], two: list[Any]) -> dict[str, Any]:
    """Equal answers, ties where the others part, and the largest difference of a log-probability before that."""
    equal, parts, worst = 0, [], 0.0
    for a, b in zip(one, two, strict=True):
        first = next((number for number, (x, y) in enumerate(zip(a, b, strict=False)) if x[0] != y[0]), None)
        equal += first is None
        for (_, x), (_, y) in list(zip(a, b, strict=False))[: None if first is None else first + 1]:
            worst = max([worst, *(abs(x[token] - y[token]) for token in x.keys() & y.keys())])
        if first is not None:
            ours, other = a[first][1], b[first][0]
            parts.append(round(max(ours.values()) - ours.get(other, float("-inf")), 4))
    return {
        "equal": equal,
        "of": len(one),
        "part": sorted(parts),
        "differ": round(worst, 5),
        "other": sum(gap > TIE_NATS for gap in parts),
    }


def probed(port: int, reference: int | None) -> tuple[bool, list[str]]:
    """Whether a server is wrong, and what each probe found."""
    from sm120kit import probes
    from sm120kit.core.urls import Endpoint

    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
    like = (Endpoint.parse(f"http://127.0.0.1:{reference}"), "small") if reference else None
    found = probes.verify(probes.VerifiedServer(endpoint, "small", like), probes.selected(PROBES), 150)
    return bool(found.wrong), [f"{each.probe}: {each.verdict.value}: {each.saw}" for each in found.probes]


def accepted(port: int) -> str:
    """What the server's metrics say of drafts, and its all-reduces."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = {line.split("{")[0].rpartition(":")[2]: line.split()[-1] for line in lines if line.startswith("vllm:spec_decode")}
    return ", ".join(f"{name} {value}" for name, value in found.items() if "total" in name)


def log_lines(folder: Path, name: str, words: tuple[str, ...]) -> list[str]:
    """The lines of a server's log with one of these words, each once."""
    lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    return list(dict.fromkeys(line.partition("] ")[2] for line in lines if any(word in line for word in words)))


def all_ready(
    processes: Mapping[str, subprocess.Popen[bytes]], ports: Mapping[str, int], folder: Path, seconds: float
) -> list[str]:
    """The servers that answer in time; the end of the log of each other is printed."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(ports)) as pool:
        up = list(pool.map(lambda name: ready(ports[name], processes[name], begin + seconds), ports))
    for name, answering in zip(ports, up, strict=True):
        if not answering:
            errors = log_lines(folder, name, ("Error", "error:"))
            print(f"{name}: no answer", *errors[:12], *errors[-4:], sep="\n    ", flush=True)
    print(f"{sum(up)} of {len(up)} servers answer after {time.monotonic() - begin:.0f} s", flush=True)
    return [name for name, answering in zip(ports, up, strict=True) if answering]


def judged(alive: list[str], ports: Mapping[str, int], servers: Mapping[str, Server]) -> bool:
    """Probe servers, print what was found, and whether all is as expected."""

    def judge(name: str) -> tuple[bool, list[str]]:
        return probed(ports[name], ports.get(servers[name].like) if servers[name].fault else None)

    right = True
    with ThreadPoolExecutor(len(ports)) as pool:
        for name, (wrong, found) in zip(alive, pool.map(judge, alive), strict=True):
            expected = wrong == bool(servers[name].fault)
            right &= expected
            verdict = f"{'wrong' if wrong else 'none wrong'}, {'as' if expected else 'NOT as'} expected"
            print(f"{name}: {verdict}; {accepted(ports[name])}", *found, sep="\n    ", flush=True)
    return right


def main(folder: Path, world: int, names: list[str]) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    vllm_checkpoints.small(folder)
    ports = {name: 18100 + number for number, name in enumerate(names)}
    processes = {name: started(name, port, folder, world) for name, port in ports.items()}
    try:
        alive = all_ready(processes, ports, folder, 300)
        right = len(alive) == len(names)
        with ThreadPoolExecutor(len(names)) as pool:
            taken = dict(zip(alive, pool.map(lambda name: answers(ports[name]), alive), strict=True))
        for name in alive:
            server = SERVERS[name]
            if server.like in taken:
                result = compared(taken[server.like], taken[name])
                right &= not result["other"] or server.dtype != "float32" or bool(server.fault)
                print(f"{name} against {server.like}: {json.dumps(result)}", flush=True)
            for line in log_lines(folder, name, ("all-reduce backends", "PCIe IPC")) if server.gpu is None else ():
                print(f"    {line[:300]}")
        return judged(alive, ports, SERVERS) and right
    finally:
        end(processes)


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(SERVERS)))
