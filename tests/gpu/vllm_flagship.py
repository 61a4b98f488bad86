"""The command line of a configuration with a small checkpoint of its architecture, and what compiles while it starts.

``python3 tests/gpu/vllm_flagship.py DIR WORLD [--seconds N] [faults]`` on a machine with WORLD GPUs (four for the command line
as it is) or fewer, which ranks share (``one_gpu.py``), with vLLM and FlashInfer (``carry_vllm.py``) and ``src`` on PYTHONPATH.
Starts the server twice, the second time with the caches of the first, and prints what the log states, answers, drafts, the
verdict of ``verify server``, and the table of ``compile_watch.py``. With ``faults``: one server, eagerly, with a KV cache
of 1 GB instead of a share of the memory, healthy and with seeded faults; N seconds at most.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import compile_watch
import one_gpu
import vllm_checkpoints
import vllm_servers
from vllm_servers import Server

CONFIGURATION = "qwen3.5-397b-nvfp4-4x-rtx-pro-6000-vllm"
CHANGED = {"--moe-backend": "marlin"}
"""Values for Hopper, for which b12x has no code."""
ADDED = ("--gdn-prefill-backend", "triton", "--attention-backend", "TRITON_ATTN")
"""vLLM selects FlashInfer on Hopper, too, which would compile its kernels: they are not carried, nor is FlashAttention."""
PORT = 18200
STATED = (
    "backend",
    "Backend",
    "compil",
    "Graph captur",
    "KV cache size",
    "warm",
    "Warm",
    "took",
    "speculative",
    "prefix cache",
)
FAULTS = ("stale-all-reduce", "left-out-all-reduce", "exchanged-rows", "drafts-all", "blocks-by-length")


def command(world: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of the configuration, with what is changed for Hopper and for fewer GPUs than ranks."""
    import torch

    recipes = vllm_checkpoints.HERE.parents[1] / "recipes" / "configurations"
    configuration = tomllib.loads((recipes / f"{CONFIGURATION}.toml").read_text())
    words = list(configuration["arguments"])
    for option, value in (*CHANGED.items(), ("--tensor-parallel-size", str(world))):
        words[words.index(option) + 1] = value
    gpus = torch.cuda.device_count() or 1
    added = (*ADDED, "--distributed-executor-backend", "mp") if world > 1 else ADDED
    return [*words, *added], configuration["environment"] | (one_gpu.variables(gpus) if gpus < world else {})


def replaced(words: list[str], without: tuple[str, ...], more: tuple[str, ...]) -> list[str]:
    """A command line without some options and their values, and with others."""
    kept = list(words)
    for option in without:
        at = kept.index(option)
        del kept[at : at + 2]
    return [*kept, *more]


def chat(text: str, port: int = PORT) -> dict[str, Any]:
    """A message's answer, with the tokens of its reasoning."""
    body = {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 48, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=200) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def started(folder: Path, world: int, name: str, caches: Path, port: int) -> tuple[subprocess.Popen[bytes], Path]:
    """The server as the configuration states it."""
    words, environment = command(world)
    watched = folder / f"compiled-{name}"
    watched.mkdir(parents=True, exist_ok=True)
    kinds = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
    environment |= {variable: str(caches / kind) for variable, kind in kinds.items()}
    environment |= {"CUDA_CACHE_PATH": str(caches / "cuda"), "COMPILE_WATCH": str(watched)}
    environment |= {"SM120KIT_RECORD_TRITON": str(watched / "record")}
    argv = [str(folder / "qwen35"), "--port", str(port), *words]
    return vllm_servers.launch(argv, environment, folder, name), watched


def one_start(folder: Path, world: int, name: str, caches: Path, *, probe: bool = False, port: int = PORT) -> bool:
    """Start, answer, probe and end the server; what it compiled is in ``folder/compiled-NAME``."""
    processes = compile_watch.Processes(folder / f"compiled-{name}")
    processes.start()
    begin = time.monotonic()
    process, watched = started(folder, world, name, caches, port)
    right = False
    try:
        if vllm_servers.all_ready({name: process}, {name: port}, folder, float(os.environ.get("READY_SECONDS", "330"))):
            ready = time.monotonic() - begin
            answer = chat("what follows the third item", port)
            first = time.monotonic() - begin
            print(f"{name}: ready after {ready:.0f} s, first answer after {first:.0f} s: {json.dumps(answer)[:400]}")
            vllm_servers.answers(port)
            wrong, found = vllm_servers.probed(port, None, folder / f"{name}.verification.json") if probe else (False, [])
            print(f"{name}: {'wrong' if wrong else 'none wrong'}", *found, sep="\n    ")
            right = not wrong
            print(f"{name}: {vllm_servers.accepted(port)}")
        for line in vllm_servers.log_lines(folder, name, STATED)[:60]:
            print("    ", line[:260])
    finally:
        vllm_servers.end({name: process})
        processes.stop(watched)
    print(f"{name}: kind | times | different | seconds of all processes | asked by | kernels", flush=True)
    print("\n".join(compile_watch.table(watched)), flush=True)
    return right


def with_faults(folder: Path, world: int, limit: float) -> bool:
    """A server of the configuration, and seeded faults in it."""
    words, environment = command(world)
    more = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "1G", "--max-model-len", "32768", "--enforce-eager")
    words = replaced(words, ("--gpu-memory-utilization", "--max-model-len"), more)
    server = Server("qwen35", (), faults=FAULTS)

    def begin(name: str, port: int) -> subprocess.Popen[bytes]:
        variables = environment | vllm_servers.seedable(folder, name, server)
        argv = [str(folder / "qwen35"), "--port", str(port), *words]
        return vllm_servers.launch(argv, variables, folder, name, vllm_servers.gate(folder, name))

    run = vllm_servers.Run(folder, {"flagship": server}, {"flagship": PORT}, begin)
    run.fresh = one_gpu.fresh if "RANKS_SHARE_GPU" in environment else run.fresh
    return run.all(vllm_servers.ready, reads=False, limit=limit)


def main(folder: Path, world: int, faults: bool, limit: float = 3600) -> bool:
    if not (folder / "qwen35" / "config.json").exists():
        vllm_checkpoints.qwen35(folder / "qwen35")
    if faults:
        return with_faults(folder, world, limit)
    print("arguments:", " ".join(command(world)[0]), flush=True)
    caches = folder / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    return one_start(folder, world, "cold", caches, probe=True) and one_start(folder, world, "warm", caches)


if __name__ == "__main__":
    given, seconds = vllm_servers.limited(sys.argv[1:])
    sys.exit(not main(Path(given[0]), int(given[1]), given[2:] == ["faults"], seconds))
