"""Serve a real model on the CPU: ``transformers serve`` with a tiny Qwen3 of random weights."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{{ message['content'][0]['text'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL, REVISION = "tiny/qwen3", "0" * 40
CONFIGURATION = """edition = 1
name = "{name}"
summary = "a tiny model"
engine = "vllm-0.19.1"
original = "this test"
tensor_parallel = {gpus}
arguments = ["--tensor-parallel-size={gpus}"]
host = []

[model]
repository = "{model}"
revision = "unpinned"
why_unpinned = "the test's Hub has one commit"
quantization = "none"
needs_mtp = false

[hardware]
gpu = "any"
gpus = {gpus}
memory_gb = 1.0

[container]
shm_gib = 1
caches = ["/root/.cache/huggingface"]

[environment]
{environment}

[[reference]]
value = 1.0
unit = "tok/s"
method = "none"
conditions = "none"
source = "this test"
reproducibility = "not-found"
"""
"""A configuration of the tiny model, for ``str.format`` with name, gpus, model and environment."""
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""No downloads, and one thread, which is enough for a tiny model."""


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tiny_model(home: Path) -> Path:
    """Create a deterministic Qwen3 of two layers in BF16 with a byte tokenizer, about 1 MB. It never ends an answer.

    It is stored in the download cache ``home`` as ``MODEL``. The returned snapshot folder has links to its files.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer, byte_pairs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    byte_pairs.train_from_iterator(["a few words, again and again"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=tokenizer.pad_token_id)
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    blobs, folder = repository / "blobs", repository / "snapshots" / REVISION
    model.to(torch.bfloat16).save_pretrained(blobs)
    tokenizer.save_pretrained(blobs)
    folder.mkdir(parents=True)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return folder


def command(model: str, port: int) -> tuple[str, ...]:
    """The command line that serves a model, by name or folder, on loopback."""
    options = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    return (sys.executable, "-m", "transformers.cli.transformers", "serve", model, *options)


def server_environment(home: Path) -> dict[str, str]:
    """Environment of the server. ``/v1/models`` lists the models in the download cache ``home``."""
    return QUIET | {"HF_HOME": str(home)}


@contextlib.contextmanager
def cpu_server(directory: Path) -> Iterator[tuple[str, str]]:
    """A running server with its files in ``directory``: its URL (without ``/v1``) and the name of its model."""
    home, port = directory / "home", free_port()
    tiny_model(home)
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    env = os.environ | server_environment(home)
    with log.open("wb") as output:
        child = subprocess.Popen(command(MODEL, port), stdout=output, stderr=output, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), direct.open(f"{url}/health", timeout=5):
                break
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield url, MODEL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
