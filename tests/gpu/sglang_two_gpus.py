"""SGLang's server of a Qwen3.5 MoE with its MTP layer on one GPU and on two: the command line of
qwen3.5-122b-nvfp4-2x-rtx-pro-6000, the same tokens, and what ``verify server`` finds, healthy and with seeded faults.

``python3 tests/gpu/sglang_two_gpus.py DIR [--seconds N] [SERVER ...]`` with SGLang (``carry_sglang.py``) and ``src`` on
PYTHONPATH. On a machine with one GPU both ranks share it (``one_gpu.py``). Servers of one rank run side by side, with models of
random weights that it writes to DIR, and its logs. Prints each comparison and each probed server as soon as it is known, and
keeps them in DIR as ``vllm_servers.py`` does. Exit code 1 if a server ends, or a verdict is not as expected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src"), str(HERE.parent / "support")]

import one_gpu  # noqa: E402

CONFIGURATION = HERE.parents[1] / "recipes" / "configurations" / "qwen3.5-122b-nvfp4-2x-rtx-pro-6000.toml"
NOT_ON_HOPPER = {
    "--quantization": "NVFP4 needs capability 10.0",
    "--fp4-gemm-backend": "of --quantization modelopt_fp4 only, and b12x has kernels of SM120 only",
    "--moe-runner-backend": "of --quantization modelopt_fp4 only, and b12x has kernels of SM120 only",
}
"""Arguments of the configuration that are left out, and why."""
COMPARABLE = {"--attention-backend": "triton", "--kv-cache-dtype": "auto"}
"""Other values, with which two GPUs can give the tokens of one: a cache in bfloat16. Triton compiles less than FlashInfer."""
ADDED = (
    *("--max-total-tokens", "131072", "--max-mamba-cache-size", "150", "--max-running-requests", "32"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--enforce-disable-flashinfer-allreduce-fusion", "--sleep-on-idle"),
)
"""Many servers share a machine; there is no xgrammar; that fusion is for Hopper and B200 only, and uses NVLink multicast."""
SPECULATION = (
    "--speculative-algorithm",
    "--speculative-num-steps",
    "--speculative-num-draft-tokens",
    "--speculative-eagle-topk",
)
LAYERS, DRAFTS = 4, 6
PADDING = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"
"""What ``patches/sglang/verification-padding.patch`` changes."""


@dataclass(frozen=True)
class Server:
    """``like`` names the server on one GPU with the same weights; ``faults`` are seeded while it runs and must be found;
    ``refused`` is what the log of a server must have that does not start; ``released``: without ``verification-padding``, whose
    defect answers beside a prompt of one token show."""

    world: int = 1
    like: str = ""
    model: str = "all-experts"
    drafts: bool = True
    values: Mapping[str, str] = field(default_factory=lambda: COMPARABLE)
    left_out: Container[str] = frozenset(NOT_ON_HOPPER)
    more: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    released: bool = False
    refused: str = ""
    gpu: int = 0
    truth: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.world

    @property
    def exact(self) -> bool:
        """In bfloat16 answers are not judged."""
        return False


SERVERS = {
    "command": Server(2, values={}),
    "published": Server(
        2, model="nvfp4", values={}, left_out=(), more=("--load-format", "dummy"), refused="Minimum capability: 100"
    ),
    "one": Server(drafts=False),
    "one-nextn": Server(like="one", gpu=1, faults=("drafts-all", "stale-state", "blocks-by-length")),
    "one-nextn-released": Server(like="one", gpu=1, released=True),
    "two": Server(2, "one", drafts=False),
    "two-eager": Server(2, "one", drafts=False, more=("--disable-cuda-graph",), faults=("exchanged-rows", "stale-all-reduce")),
    "two-nextn": Server(2, "one"),
    "two-nextn-chunks": Server(2, "one", values={**COMPARABLE, "--chunked-prefill-size": "256"}),
    "routed-one": Server(model="routed", drafts=False, gpu=1),
    "routed-two-nextn": Server(2, "routed-one", "routed"),
}


def models(folder: Path) -> None:
    """A Qwen3.5 MoE of four layers with its MTP layer, whose tokens go through all eight experts, and through four."""
    import torch
    from safetensors.torch import load_file, save_file
    from small_models import probe_tokenizer, word_ids
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    tokenizer = probe_tokenizer()
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    words = word_ids(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 262144,
        "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "eos_token_id": int(tokenizer.eos_token_id),
    }
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 512}
    ids = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            tokenizer.convert_tokens_to_ids(marks),
            strict=True,
        )
    )
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=text, vision_config={**vision, "num_position_embeddings": 256}, **ids)
    model = Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)
    path = folder / "all-experts"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    stored = json.loads((path / "config.json").read_text())
    stored["text_config"]["full_attention_interval"] = LAYERS  # Transformers writes layer_types, SGLang reads this
    (path / "config.json").write_text(json.dumps(stored))
    weights = load_file(path / "model.safetensors")
    only = torch.zeros(len(tokenizer), 1, dtype=torch.bfloat16)
    only[words] = 4.0  # others are never the most likely ones: a text is read as the tokens that were generated
    weights["lm_head.weight"] *= only
    weights["model.language_model.embed_tokens.weight"] *= 8  # a third of the tokens follow from the last one alone
    for name in weights:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
            weights[name] *= 0.3
    last = f"model.language_model.layers.{LAYERS - 1}."
    ahead = {f"mtp.layers.0.{name.removeprefix(last)}": each.clone() for name, each in weights.items() if name.startswith(last)}
    ahead |= {
        f"mtp.{name}.weight": torch.zeros(512, dtype=torch.bfloat16)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    ahead["mtp.fc.weight"] = torch.cat([torch.eye(512), 0.2 * torch.eye(512)], 1).bfloat16()
    save_file({**weights, **ahead}, path / "model.safetensors", {"format": "pt"})
    processor = {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4096, "longest_edge": 65536},
    }
    for name, kind in (("preprocessor_config", "image_processor_type"), ("video_preprocessor_config", "video_processor_type")):
        which = "Qwen2VLImageProcessorFast" if name == "preprocessor_config" else "Qwen3VLVideoProcessor"
        (path / f"{name}.json").write_text(json.dumps({**processor, kind: which, "processor_class": "Qwen3VLProcessor"}))
    routed = folder / "routed"
    routed.mkdir(exist_ok=True)
    for file in path.iterdir():
        (routed / file.name).write_bytes(file.read_bytes())
    text = json.loads((path / "config.json").read_text())
    text["text_config"]["num_experts_per_tok"] = 4
    (routed / "config.json").write_text(json.dumps(text))
    (folder / "nvfp4").mkdir(exist_ok=True)
    quantized = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "mtp*"]}
    (path / "nvfp4.json").write_text(json.dumps(text | {"quantization_config": quantized}))
    for file in path.iterdir():
        name = "config.json" if file.name == "nvfp4.json" else file.name
        if file.name not in ("config.json", "model.safetensors"):
            (folder / "nvfp4" / name).write_bytes(file.read_bytes())


def released(folder: Path) -> None:
    """SGLang's package in ``folder/released``, without the patch of padding."""
    package = Path(next(path for path in os.environ["PYTHONPATH"].split(os.pathsep) if Path(path, "sglang").is_dir()), "sglang")
    shutil.copytree(package, folder / "released" / "sglang", copy_function=os.link, dirs_exist_ok=True)
    module = folder / "released" / PADDING
    module.unlink()
    shutil.copy(package.parent / f"{PADDING}.released", module)


def arguments(server: Server) -> list[str]:
    """The configuration's arguments, without those of :data:`NOT_ON_HOPPER`, and those of a server."""
    listed, kept = tomllib.loads(CONFIGURATION.read_text())["arguments"], []
    values = {**server.values, "--tp-size": str(server.world)}
    for number, word in enumerate(listed):
        option = word if word.startswith("--") else listed[number - 1]
        if option not in server.left_out and (server.drafts or option not in SPECULATION):
            kept.append(word if word == option else values.get(option, word))
    return [*kept, *ADDED, *server.more]


def started(name: str, port: int, folder: Path, gpus: int) -> subprocess.Popen[bytes]:
    """The process of a server, in a session of its own."""
    server = SERVERS[name]
    environment = {**os.environ, "SEEDED_DRAFTS": str(DRAFTS), "HF_HUB_OFFLINE": "1"}
    environment |= {"SEEDED_FAULT": str(folder / f"{name}.fault")} if server.faults else {}
    environment |= {"PYTHONPATH": f"{folder / 'released'}:{os.environ['PYTHONPATH']}"} if server.released else {}
    environment |= {"OMP_NUM_THREADS": "1", "SGLANG_ENABLE_SPEC_V2": "True", "NCCL_P2P_LEVEL": "SYS", "NCCL_NVLS_ENABLE": "0"}
    if server.world == 1:
        environment |= one_gpu.alone(server.gpu % gpus)
    elif gpus < server.world:
        environment |= one_gpu.variables()
    argv = [sys.executable, str(HERE / "sglang_faults.py"), "--model-path", str(folder / server.model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--served-model-name", "small", *arguments(server)]
    log = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def listening(port: int, process: subprocess.Popen[bytes], until: float) -> bool:
    """Whether a server accepts connections before a time. Its /health fails while the first request compiles for 20 s."""
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return True
        time.sleep(0.5)
    return False


def run(folder: Path, ports: Mapping[str, int], gpus: int, limit: float) -> bool:
    """Whether all is as expected; also compares answers to prompts of which every fourth is one token."""
    import vllm_servers

    class Run(vllm_servers.Run):
        reset, gated = "/flush_cache", False
        short: ClassVar[dict[str, Any]] = {}

        def ask(self, name: str, until: float, listening: vllm_servers.Listening, reads: bool) -> None:
            super().ask(name, until, listening, reads)
            if name not in self.alive:
                return
            texts = ["The" if not number % 4 else text for number, text in enumerate(vllm_servers.prompts())]
            self.short[name] = vllm_servers.answers(self.ports[name], texts=texts)
            for each, other in ((each, SERVERS[each].like) for each in self.short):
                if name in (each, other) and other in self.short:
                    result = vllm_servers.compared(self.short[other], self.short[each])
                    self.note(each, f"prompts of one token among others, against {other}", result)
                    self.say(f"{each} against {other}, prompts of one token among others: {json.dumps(result)}")

    return Run(folder, SERVERS, ports, lambda name, port: started(name, port, folder, gpus)).all(
        listening, reads=False, limit=limit
    )


def main(folder: Path, names: list[str], limit: float = 3600) -> bool:
    import torch
    from compile_watch import Processes

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "nvfp4" / "config.json").exists():
        models(folder)
    if any(SERVERS[name].released for name in names):
        released(folder)
    compilers = Processes()
    compilers.start()
    gpus = torch.cuda.device_count() or 1
    ports = {name: 18100 + 20 * number for number, name in enumerate(names)}
    right = run(folder, ports, gpus, limit)
    compilers.ended.set()
    print("processes of compilers:", dict(Counter(each["process"] for each in compilers.seen.values())), flush=True)
    return right


if __name__ == "__main__":
    from vllm_servers import limited

    given, seconds = limited(sys.argv[1:])
    sys.exit(not main(Path(given[0]), given[1:] or list(SERVERS), seconds))
