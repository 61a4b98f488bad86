"""b12x in a Python of its own, which compiles its kernels without a GPU by ``image_programs/b12x/compile.py``.

The environment has the locked b12x, its DSL and Triton, and a torch for the CPU: 1.2 GB.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from sm120kit.core.data_roots import data_root
from sm120kit.core.workspace import Workspace
from sm120kit.images import b12x
from sm120kit.recipes import target as targets
from sm120kit.sources.run_options import Options

RECIPE = "sglang-0.5.11-b12x"
ENGINE = data_root() / "image_programs"


class Library:
    """The environment, and the kernels that b12x compiles in it."""

    def __init__(self, scratch: Path, request: dict[str, Any], *, patched: bool = False) -> None:
        target = targets.resolve(RECIPE, Options(Workspace.open(None)))
        assert isinstance(target, targets.EngineTarget)
        self.target = target
        self.environment = os.environ | {"CUTE_DSL_ARCH": "sm_120a", "HOME": str(scratch)}
        self.python = b12x.environment(target, scratch, patched=patched)
        self.request = scratch / "request.json"
        self.request.write_text(json.dumps(request))

    def compile(self, *cache: Path, **variables: str) -> Any:
        """What ``compile.py`` prints."""
        argv = [self.python, ENGINE / "b12x" / "compile.py", self.request, *cache]
        done = subprocess.run(argv, env=self.environment | variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)
