"""Kernels that a program in an image compiles without a GPU, as entries of a cache in a layer above that image."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm120kit.core import reporting
from sm120kit.core.errors import CommandFailed
from sm120kit.core.outside import parse_json
from sm120kit.core.workspace import Workspace
from sm120kit.images.local_images import LocalImages

if TYPE_CHECKING:
    from sm120kit.images._layers import LayerWriter


@dataclass(frozen=True)
class Compiler:
    """A program of an image, by its arguments for Python, that prints JSON: ``kernels``, and ``entries`` in base64 by path.

    The image gets these below ``directory``, where their paths match ``entry``, and ``kernels.json`` with what ``listed`` makes
    of the output and the contents; it raises ValueError if they are of another form. ``hint`` names what lists the kernels.
    """

    name: str
    directory: str
    argv: tuple[str, ...]
    entry: re.Pattern[str]
    listed: Callable[[dict[str, Any], Mapping[str, bytes]], object]
    hint: str

    def write(self, layer: LayerWriter, image: str, workspace: Workspace) -> dict[str, Any]:
        """Compile the kernels in ``image``, write them to a layer above it, and return what the program printed.

        Raises:
            CommandFailed: the program failed, or compiled no kernel.
            RequirementMissing: this system does not permit to run programs in an image.
        """
        reporting.info(f"compiling kernels of {self.name} in the image")
        done = LocalImages(workspace).run(image, ["python", *self.argv], {})
        try:
            result: dict[str, Any] = parse_json(done.stdout)
            contents = {path: base64.b64decode(text, validate=True) for path, text in result["entries"].items()}
            if done.code or not contents or not all(map(self.entry.fullmatch, contents)):
                raise ValueError("its output is not that of a complete run")
            text = (json.dumps(self.listed(result, contents), indent=1) + "\n").encode()
            seconds = sum(kernel["seconds"] for kernel in result["kernels"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            last = " | ".join(done.stderr.strip().splitlines()[-5:])
            problem = f"kernels of {self.name} could not be compiled in the image: exit code {done.code}: {last or error}"
            raise CommandFailed(problem, self.hint) from error
        reporting.info(f"compiled {len(result['kernels'])} kernels of {self.name}: {seconds:.0f} s of CPU time")
        layer.file(f"{self.directory}/kernels.json", [text], len(text))
        for path, content in sorted(contents.items()):
            layer.file(f"{self.directory}/entries/{path}", [content], len(content))
        return result
