"""vLLM's command line, whose modules are imported before a file lets it begin: many processes import at once, which is most of
a start, and one begins at a time. Their engines and workers are forked, so that they import nothing again.

``python tests/gpu/vllm_gate.py FILE serve ARGUMENTS``: begins when FILE is there.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
)
"""None initializes CUDA, which a forked process could not do again; if one did, vLLM would say so and not fork."""


def main(gate: Path) -> None:
    for module in MODULES:
        importlib.import_module(module)
    print(f"{time.strftime('%H:%M:%S')} imported", flush=True)
    while not gate.exists():
        time.sleep(0.05)
    print(f"{time.strftime('%H:%M:%S')} begins", flush=True)
    importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    gate = Path(sys.argv.pop(1))
    main(gate)
