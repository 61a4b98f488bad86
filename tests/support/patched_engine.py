"""An engine's Python files as released and with the recipe's patches, and a Python for the CPU that can import both."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import parser_options

from sm120kit.core.workspace import Workspace
from sm120kit.recipes import target as targets
from sm120kit.sources.run_options import Options

STATES = ("released", "patched")


class PatchedEngine:
    """The engine of ``recipe`` in ``scratch``, with its light locked wheels, those that ``libraries`` matches, and FlashInfer
    as released, of which images have one that is built here.
    """

    def __init__(self, recipe: str, scratch: Path, libraries: str = "$.", *, flashinfer: bool = False) -> None:
        options = Options(Workspace.open(None))
        target = targets.resolve(recipe, options)
        assert isinstance(target, targets.EngineTarget)
        wheels = parser_options.unpack_engine(target, scratch / "patched").values()
        parser_options.unpack_engine(target, scratch / "released", patched=False)
        names = [wheel for wheel in wheels if re.match(libraries, wheel.name) or parser_options.is_light(wheel.name)]
        locked = [f"{wheel.name}=={wheel.version}" for wheel in names]
        if flashinfer:
            locked.append(target.recipe.flashinfer.replace("flashinfer-", "flashinfer-python=="))
        self.scratch = scratch
        self.python = parser_options.environment(scratch, locked, options.workspace, options.origin)

    def answer(
        self, program: Path, *arguments: str, state: str, stdin: str = "", variables: Mapping[str, str] | None = None
    ) -> Any:
        """The last line of JSON that a program prints with the files of ``state``, one of :data:`STATES`."""
        own = {"PYTHONPATH": str(self.scratch / state), "HOME": str(self.scratch), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [self.python, "-W", "ignore", program, *arguments],
            input=stdin,
            env=os.environ | dict(variables or {}) | own,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
