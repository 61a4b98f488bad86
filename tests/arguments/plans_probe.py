"""Print what an engine selects and keeps for command lines on GPUs that are not there: ``plans_probe.py SUITES ENGINE``.

Reads the cases of ``select_backends.py`` from stdin, and prints ``{name: {"refusal": text, "selected": {use: [back-end, ...]},
...}}``: of vLLM, whose layers are built, with ``"weights": bytes, "rows": [[kind, bytes, window, layers], ...]``, the rows
of ``kv_specs_probe.py``; of SGLang with ``"pool"``, the answer of ``kv_pools_probe.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import kv_pools_probe
import kv_specs_probe

AT_ONCE = 2


def vllm_answer(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The answer of ``select_backends.py`` for a case, with the weights and the KV cache specifications of the model."""
    import select_backends
    from vllm.config import get_current_vllm_config

    found: dict[str, Any] = {"weights": 0, "rows": []}
    collect = engine.collect

    def collected(model: Any, prefix: str, selected: Any) -> None:
        collect(model, prefix, selected)
        found["weights"] += sum(each.numel() * each.element_size() for each in model.parameters())
        if not prefix:
            config = get_current_vllm_config()
            layers = config.compilation_config.static_forward_context.values()
            specs = (layer.get_kv_cache_spec(config) for layer in layers if hasattr(layer, "get_kv_cache_spec"))
            rows = Counter(kv_specs_probe.row(spec) for spec in specs if spec is not None)
            found["rows"] = [[*each, number] for each, number in rows.items()]
            selected["sampling"].add(sampler())

    engine.collect = collected
    return select_backends.answer(engine, case) | found


def sampler() -> str:
    """Which kernels of vLLM choose the next token by top-k and top-p."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    chosen = TopKTopPSampler().forward.__name__.removeprefix("forward_")
    return {"cuda": "FlashInfer"}.get(chosen, chosen)  # it is forward_cuda only with FlashInfer


def sglang_answer(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The answer of ``select_backends.py`` for a case, and the pool of a process of its own with the same command line."""
    import gpu
    import select_backends

    def pool() -> dict[str, Any]:
        os.environ.update(case["environment"])
        return kv_pools_probe.answer({"argv": case["argv"], "config": case["model"]["config"]})

    return select_backends.answer(engine, case) | {"pool": gpu.forked({"": pool}, 1)[""]}


def main() -> None:
    """Answer on stdout; all else goes to stderr."""
    suites, name = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(suites / "engine"), str(suites / name)]
    cases = json.load(sys.stdin)
    stdout = os.dup(1)
    os.dup2(2, 1)
    import gpu

    gpu.install(next(iter(cases.values()))["gpu"])
    import backends

    backends.prepare()
    answer = {"vllm": vllm_answer, "sglang": sglang_answer}[name]
    answers: dict[str, Any] = {}
    names = list(cases)
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        found = gpu.forked({case: partial(with_modules, answer, backends, cases[case]) for case in some}, AT_ONCE)
        share(found)
        answers |= found
    os.write(stdout, json.dumps(answers).encode())


def with_modules(answer: Any, engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    """An answer, with the names of the modules that it imported."""
    return dict(answer(engine, case)) | {"modules": sorted(sys.modules)}


def share(answers: dict[str, Any]) -> None:
    """Import what processes of answers did, so that those of the next ones need not."""
    for each in answers.values():
        for module in each.pop("modules", ()):
            if module.startswith(("vllm.", "sglang.", "flashinfer.", "transformers.models.")) and module not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)


if __name__ == "__main__":
    main()
