"""vLLM's server on one GPU and on two: the same tokens, and what ``verify server`` finds, healthy and with seeded faults.

``python3 tests/gpu/vllm_two_gpus.py DIR [SERVER ...]`` on a machine with two GPUs, vLLM (``carry_vllm.py``) and ``src`` on
PYTHONPATH. All servers run at once, with models of random weights that it writes to DIR, and its logs. Prints a line for each
comparison and each probed server. Exit code 1 if a server ends, answers other tokens in float32 than one GPU where neither is
a tie, or a verdict is not as expected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent / "support")]

PROMPTS, TOKENS, TOGETHER, TOP = 32, 24, 8, 5
TIE_NATS = 0.01
"""In float32, two tokens whose log-probabilities differ by less may change places. In bfloat16 answers are not judged."""
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'
GRAPHS = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16]}'
EAGER = ("--enforce-eager",)
SPECULATE = (*EAGER, "--speculative-config", NGRAM)
MTP = (*EAGER, "--speculative-config", '{"method":"mtp","num_speculative_tokens":1}')


@dataclass(frozen=True)
class Server:
    """``like`` names the server on one GPU with the same weights; ``wrong`` whether a fault is seeded that must be found."""

    model: str
    world: int
    arguments: tuple[str, ...]
    like: str = ""
    dtype: str = "bfloat16"
    fault: str = ""
    gpu: int = 0


SERVERS = {
    "one": Server("moe", 1, EAGER),
    "one-again": Server("moe", 1, EAGER, "one", gpu=1),
    "two": Server("moe", 2, EAGER, "one"),
    "two-nccl": Server("moe", 2, (*EAGER, "--disable-custom-all-reduce"), "one"),
    "two-graphs-chunks": Server("moe", 2, ("--compilation-config", GRAPHS, "--max-num-batched-tokens", "256"), "one"),
    "one-ngram": Server("moe", 1, SPECULATE, "one", gpu=1),
    "two-ngram": Server("moe", 2, SPECULATE, "one"),
    "one-float32": Server("moe", 1, EAGER, dtype="float32", gpu=1),
    "two-float32": Server("moe", 2, EAGER, "one-float32", "float32"),
    "dense-one": Server("dense", 1, EAGER, dtype="float32", gpu=1),
    "dense-two": Server("dense", 2, EAGER, "dense-one", "float32"),
    "dense-two-graphs-ngram": Server("dense", 2, ("--compilation-config", GRAPHS, *SPECULATE[1:]), "dense-one", "float32"),
    "mtp-off": Server("glm", 1, EAGER, dtype="float32", gpu=1),
    "mtp-one": Server("glm", 1, MTP, "mtp-off", "float32"),
    "mtp-two": Server("glm", 2, MTP, "mtp-off", "float32"),
    "stale-all-reduce": Server("moe", 2, EAGER, fault="stale-all-reduce"),
    "left-out-all-reduce": Server("moe", 2, EAGER, "one", fault="left-out-all-reduce"),
    "exchanged-rows": Server("moe", 2, EAGER, fault="exchanged-rows"),
    "blocks-by-length": Server("moe", 2, EAGER, fault="blocks-by-length"),
    "drafts-all": Server("moe", 2, SPECULATE, fault="drafts-all"),
}
PROBES = [
    "log-probabilities",
    "counts of tokens",
    "repeated requests",
    "decoding against prefill",
    "cached prefixes",
    "needles",
]


def models(folder: Path) -> None:
    """Qwen3 with and without experts, and GLM-4.5 with a layer of multi-token prediction, all of random weights."""
    import torch
    from safetensors.torch import load_file, save_file
    from small_models import probe_tokenizer, tiny_model, word_ids
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    tokenizer = probe_tokenizer()
    words = torch.zeros(len(tokenizer), 1)
    words[word_ids(tokenizer)] = 1.0  # others are never the most likely ones: a text is read as the tokens that were generated
    for name, experts in (("moe", 8), ("dense", 0)):
        model = tiny_model(len(tokenizer), experts=experts)
        model.lm_head.weight.data *= words
        model.save_pretrained(folder / name)
    layers = 3
    config = {"num_hidden_layers": layers + 1, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config |= {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    config |= {"moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1, "initializer_range": 0.1}
    torch.manual_seed(0)
    Glm4MoeForCausalLM(
        Glm4MoeConfig(**config, vocab_size=len(tokenizer), max_position_embeddings=4096, tie_word_embeddings=False)
    ).save_pretrained(folder / "glm")
    weights = load_file(folder / "glm" / "model.safetensors")
    weights["lm_head.weight"] *= 6 * words
    ahead = f"model.layers.{layers}"
    weights |= {f"{ahead}.{name}.weight": torch.ones(128) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {f"{ahead}.eh_proj.weight": torch.cat([torch.zeros(128, 128), torch.eye(128)], 1)}
    weights |= {f"{ahead}.shared_head.head.weight": weights["lm_head.weight"].clone()}
    weights |= {f"{ahead}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights, folder / "glm" / "model.safetensors", {"format": "pt"})
    file = folder / "glm" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}))
    for model in ("moe", "dense", "glm"):
        tokenizer.save_pretrained(folder / model)


def started(name: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """The process of a server, in a session of its own."""
    server = SERVERS[name]
    plugins = folder / "plugins"
    entry = plugins / "seeded_faults-0.dist-info" / "entry_points.txt"
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_text("[vllm.general_plugins]\nseeded = vllm_faults:seed\n")
    entry.with_name("METADATA").write_text("Metadata-Version: 2.1\nName: seeded-faults\nVersion: 0\n")
    path = os.pathsep.join((str(plugins), str(HERE), os.environ.get("PYTHONPATH", "")))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "SEEDED_FAULT": server.fault,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    if server.world == 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(server.gpu)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / server.model)]
    argv += [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "small",
        "--tensor-parallel-size",
        str(server.world),
    ]
    argv += ["--dtype", server.dtype, "--max-model-len", "2048", "--gpu-memory-utilization", "0.05", "--max-logprobs", "20"]
    argv += [
        "--kv-cache-memory-bytes",
        "1G",
        "--attention-backend",
        "TRITON_ATTN",
        "--structured-outputs-config",
        '{"backend":"guidance"}',
        *server.arguments,
    ]
    return subprocess.Popen(
        argv, env=environment, stdout=(folder / f"{name}.log").open("wb"), stderr=subprocess.STDOUT, start_new_session=True
    )


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


def main(folder: Path, names: list[str]) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    models(folder)
    ports = {name: 18100 + number for number, name in enumerate(names)}
    processes = {name: started(name, port, folder) for name, port in ports.items()}
    failed = False
    try:
        until = time.monotonic() + 300
        with ThreadPoolExecutor(len(names)) as pool:
            up = dict(zip(names, pool.map(lambda name: ready(ports[name], processes[name], until), names), strict=True))
            alive = [name for name in names if up[name]]
            for name in sorted({*names} - {*alive}):
                failed = True
                print(
                    f"{name}: no answer\n    "
                    + "\n    ".join((folder / f"{name}.log").read_text(errors="replace").splitlines()[-8:])
                )
            print(f"{len(alive)} of {len(names)} servers answer after {time.monotonic() - until + 300:.0f} s", flush=True)
            taken = dict(zip(alive, pool.map(lambda name: answers(ports[name]), alive), strict=True))
            for name in alive:
                server = SERVERS[name]
                if server.like in taken:
                    result = compared(taken[server.like], taken[name])
                    failed |= bool(result["other"]) and server.dtype == "float32"
                    print(f"{name} against {server.like}: {json.dumps(result)}", flush=True)
            judge = lambda name: probed(ports[name], ports.get(SERVERS[name].like) if SERVERS[name].fault else None)  # noqa: E731
            for name, (wrong, found) in zip(alive, pool.map(judge, alive), strict=True):
                right = wrong == bool(SERVERS[name].fault)
                failed |= not right
                print(
                    f"{name}: {'wrong' if wrong else 'none wrong'}, {'as' if right else 'NOT as'} expected",
                    *found,
                    sep="\n    ",
                    flush=True,
                )
    finally:
        for process in processes.values():
            process.kill()
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(SERVERS)))
