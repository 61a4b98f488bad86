"""Print the back-ends that an engine selects for configurations on an SM12x GPU that is not there.

``select_backends.py ENGINE``, run by a Python that has the engine, reads ``{name: {"argv": [...], "environment": {...}, "gpu":
{...}, "model": {"repository": name, "config": {...}}}}`` from stdin. ``/model`` in ``argv`` stands for a directory with the
model's ``config.json``. Prints ``{name: {"refusal": text, "selected": {use: [back-end, ...]}}}``. ``../ENGINE/backends.py`` has
the engine's own way from a command line to its choices.
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import gpu

MODEL_DIRECTORY = "/model"
TOKENS = (
    "<unk>",
    "<think>",
    "</think>",
    "<mm:think>",
    "</mm:think>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
)
"""Tokens of the tokenizer beside ``config.json``: vLLM reads those that delimit reasoning, and nothing else of it."""


def write_model(model, directory):
    """Write a model's directory: its ``config.json``, and a tokenizer of a few tokens or as many as n-gram tables need."""
    path = directory / model["repository"].replace("/", "--")
    path.mkdir(exist_ok=True)
    config = model["config"].get("text_config", model["config"])
    distinct = config.get("engram_compressed_vocab_size", 0)  # which vLLM compares with the tokenizer's
    words = (*TOKENS, *map(str, range(distinct - len(TOKENS))))
    vocabulary = {token: number for number, token in enumerate(words)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in enumerate(TOKENS)],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": TOKENS[0]},
        **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")),
    }
    (path / "config.json").write_text(json.dumps(model["config"]))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def answer(engine, case):
    """The selection or the refusal for a configuration."""
    os.environ.update(case["environment"])
    gpu.install(case["gpu"])
    with tempfile.TemporaryDirectory(prefix="sm120kit-model-") as directory:
        model = str(write_model(case["model"], Path(directory)))
        argv = [model if argument == MODEL_DIRECTORY else argument for argument in case["argv"]]
        try:
            return {"refusal": "", "selected": engine.select(argv)}
        except SystemExit as end:
            return {"refusal": f"exit code {end.code}", "selected": {}}
        except Exception as error:
            traceback.print_exc()
            lines = f"{type(error).__name__}: {error}".replace(directory, "").splitlines()
            return {"refusal": " ".join(line.strip() for line in lines)[:400], "selected": {}}


def main():
    """Answer for each configuration in a process of its own, as settings and process groups of engines are global."""
    gc.disable()  # it would take a sixth of the time, and no process runs long
    sys.path.insert(1, str(Path(__file__).parents[1] / sys.argv[1]))
    cases = json.load(sys.stdin)
    gpus = [case["gpu"] for case in cases.values()]
    assert len({tuple(each["capability"]) for each in gpus}) == 1, "the engine caches the capability: one kind of GPU a process"
    gpu.install(gpus[0])
    stdout = os.dup(1)
    os.dup2(2, 1)
    import backends

    backends.prepare()
    answers = gpu.forked({name: partial(answer, backends, case) for name, case in cases.items()}, min(os.cpu_count() or 1, 4))
    os.write(stdout, json.dumps(answers).encode())


if __name__ == "__main__":
    main()
