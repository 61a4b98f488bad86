"""b12x in a Python of its own, which compiles its kernels without a GPU by ``image_programs/b12x/compile.py``.

The environment has the locked b12x, its DSL and Triton, and a torch for the CPU: 1.2 GB.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import parser_options

from sm120kit.core.data_roots import data_root
from sm120kit.core.workspace import Workspace
from sm120kit.recipes import target as targets
from sm120kit.sources import wheelhouse
from sm120kit.sources.run_options import Options
from sm120kit.wheels._overlay import locked_wheels, write_patched_members

RECIPE = "sglang-0.5.11-b12x"
ENGINE = data_root() / "image_programs"


LIBRARIES = re.compile(r"(b12x|nvidia-cutlass-dsl.*|cuda-(python|bindings|pathfinder)|triton|numpy)$")
"""Locked distributions of the environment, beside torch."""


def environment(target: targets.EngineTarget, scratch: Path, *, patched: bool) -> Path:
    """The Python of a new environment with the locked b12x and DSL; with ``patched``, b12x has the recipe's patches."""
    options, locked = target.options, locked_wheels(target)
    names = [f"{wheel.name}=={wheel.version}" for wheel in locked.values() if LIBRARIES.match(wheel.name)]
    python = parser_options.environment(scratch, names, options.workspace, options.origin)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    for source in target.patched:
        if patched and source.pin.project == "b12x":
            (wheel,) = wheelhouse([locked["b12x"]], options.workspace, options.origin)
            write_patched_members("b12x", source.tree, wheel, site)
    return python


class Library:
    """The environment, and the kernels that b12x compiles in it."""

    def __init__(self, scratch: Path, request: dict[str, Any], *, patched: bool = False) -> None:
        target = targets.resolve(RECIPE, Options(Workspace.open(None)))
        assert isinstance(target, targets.EngineTarget)
        self.target = target
        self.environment = os.environ | {"CUTE_DSL_ARCH": "sm_120a", "HOME": str(scratch)}
        self.python = environment(target, scratch, patched=patched)
        self.request = scratch / "request.json"
        self.request.write_text(json.dumps(request))

    def compile(self, *cache: Path, **variables: str) -> Any:
        """What ``compile.py`` prints."""
        argv = [self.python, ENGINE / "b12x" / "compile.py", self.request, *cache]
        done = subprocess.run(argv, env=self.environment | variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)
