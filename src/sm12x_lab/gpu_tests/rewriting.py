"""Start the programs of a verification with the driver that rewrites their PTX."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from sm12x_lab.gpu_tests.verification import Launcher
from sm12x_lab.ptx.interposed import Interposition
from sm12x_lab.ptx.races import DELAYS, EVERY_MODULE, EVERY_SITE


class RewritingLauncher(Launcher):
    """Starts the programs of a verification with the preloaded driver, each with records of its own."""

    def __init__(self, interposition: Interposition, captured: bool, seeds: Sequence[int] = ()) -> None:
        self.interposition, self.captured, self.seeds = interposition, captured, seeds
        self.parts: dict[str, Interposition] = {}

    def launched(self, name: str, program: Path, captured: bool) -> Path:
        """A script that starts the program. Programs with a seeded fault run their own PTX, which has it."""
        part = self.parts[name] = self.interposition.part(name, captured)
        words = " ".join(f"{variable}={shlex.quote(value)}" for variable, value in part.environment().items())
        script = part.directory / "program"
        script.write_text(f'#!/bin/sh\nexport {words}\nexec {shlex.quote(str(program))} "$@"\n')
        script.chmod(0o700)
        return script

    def delayed(self, name: str, seed: int) -> Path:
        """A script that starts the script of a program with the delays of a seed at all sites."""
        script = self.parts[name].directory / f"program-{seed}"
        first = (self.parts[name].directory / "program").resolve()
        delays = f"{seed} 0 {EVERY_SITE} {EVERY_MODULE}"
        script.write_text(f'#!/bin/sh\n{DELAYS}={shlex.quote(delays)} exec {shlex.quote(str(first))} "$@"\n')
        script.chmod(0o700)
        return script

    def ptx(self, name: str) -> tuple[str, ...]:
        """Origin and digest of each module that the program loaded; none if it was not started."""
        modules = self.parts[name].modules() if name in self.parts else ()
        return tuple(f"{module['origin']}: {module['ptx']}" for module in modules if module["kernels"])
