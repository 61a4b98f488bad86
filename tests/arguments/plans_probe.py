"""Print what vLLM selects and keeps for command lines on GPUs that are not there: ``plans_probe.py SUITES``.

Reads the cases of ``select_backends.py`` from stdin, and prints ``{name: {"refusal": text, "selected": {use: [back-end, ...]},
"weights": bytes, "rows": [[kind, bytes, window, layers], ...]}}`` with the rows of ``kv_specs_probe.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import kv_specs_probe


def answer(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
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

    engine.collect = collected
    return select_backends.answer(engine, case) | found


def main() -> None:
    """Answer on stdout; all else goes to stderr."""
    suites = Path(sys.argv[1])
    sys.path[:0] = [str(suites / "engine"), str(suites / "vllm")]
    stdout = os.dup(1)
    os.dup2(2, 1)
    import gpu

    gpu.install(kv_specs_probe.GPU)
    import backends

    backends.prepare()
    answers = gpu.forked({name: partial(answer, backends, case) for name, case in json.load(sys.stdin).items()}, 2)
    os.write(stdout, json.dumps(answers).encode())


if __name__ == "__main__":
    main()
