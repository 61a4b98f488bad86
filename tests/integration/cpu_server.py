"""A real server of a real model on the CPU: ``transformers serve`` with a tiny Qwen3 of random weights, made on the spot."""

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
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Nothing is fetched, and a tiny model needs no more than one thread."""


def free_port() -> int:
    """A loopback port on which nobody listened a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tiny_model(home: Path) -> Path:
    """A Qwen3 of two layers in BF16 with a byte tokenizer, the same each time; about 1 MB. It never says that it is done.

    It lies in the download cache ``home`` as ``MODEL`` would. The folder that is returned has links to its files, as there.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(["a few words, again and again"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=special[2], pad_token=special[0])
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


def surroundings(home: Path) -> dict[str, str]:
    """Variables for it. ``home`` is its download cache: what ``/v1/models`` lists."""
    return QUIET | {"HF_HOME": str(home)}


@contextlib.contextmanager
def cpu_server(place: Path) -> Iterator[tuple[str, str]]:
    """A running server below ``place``, as its URL (without ``/v1``) and the name of its model."""
    home, port = place / "home", free_port()
    tiny_model(home)
    url, log = f"http://127.0.0.1:{port}", place / "server.log"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    env = os.environ | surroundings(home)
    with log.open("wb") as talk:
        child = subprocess.Popen(command(MODEL, port), stdout=talk, stderr=talk, env=env, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), direct.open(f"{url}/health", timeout=5):
                break
            assert child.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.2)
        yield url, MODEL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
