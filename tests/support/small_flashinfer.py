"""Inputs of an image that passes its checks without a compiled module: real wheels, a FlashInfer, a substitute for torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from small_engine import make_wheel
from small_image import CLOSURE

from sm120kit import sources
from sm120kit.core.digests import file_sha256
from sm120kit.core.workspace import Workspace
from sm120kit.images import image_inputs
from sm120kit.sources.source_records import LockedWheel

PIP = LockedWheel(
    "pip", "26.3", "pip-26.3-py3-none-any.whl", "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
)

REAL = ("idna", "markupsafe", "packaging", "tabulate", "tqdm", "typing-extensions")
PLAN = "b" * 64
VERSION = f"0.6.6+sm120kit.{PLAN[:12]}"
ORIGIN = {
    "recipe": "flashinfer-0.6.6",
    "plan": PLAN,
    "commit": "c" * 40,
    "tree": "d" * 40,
    "archs": ["sm_120f"],
    "modules": [],
    "kernel_groups": [],
    "pin": {"project": "flashinfer"},
    "inside": [],
    "patches": [{"project": "cutlass", "slug": "one", "sha256": "e" * 64}],
}
SETUP = image_inputs.ImageSetup(
    "flashinfer",
    "flashinfer-0.6.6",
    {"sm120kit.build-id": "f" * 64, "sm120kit.python": "3.11"},
    {"FLASHINFER_CUDA_ARCH_LIST": "12.0f"},
)


@dataclass(frozen=True)
class SmallWheels:
    """The wheel of FlashInfer, and the others with their files."""

    ours: Path
    locked: tuple[tuple[LockedWheel, Path], ...]


def wheels(workspace: Workspace, directory: Path) -> SmallWheels:
    """Fetch the real wheels, and write the others to ``directory``."""
    files = {
        "flashinfer/__init__.py": f"__version__ = {VERSION!r}\n".encode(),
        f"flashinfer_python-{VERSION}.dist-info/sm120kit.json": json.dumps(ORIGIN).encode(),
    }
    make_wheel(directory, "flashinfer-python", VERSION, requires=["tqdm", "torch"], files=files)
    make_wheel(directory, "torch", "2.13.0", files={"torch.py": b"class version:\n    cuda = '13.0'\n"})
    (ours,) = directory.glob("flashinfer*.whl")
    (torch,) = directory.glob("torch*.whl")
    listed = [LockedWheel(**wheel) for wheel in json.loads(CLOSURE.read_text())["wheels"] if wheel["name"] in REAL]
    paths = sources.wheelhouse(listed, workspace)
    stand_in = (LockedWheel("torch", "2.13.0", torch.name, file_sha256(torch)), torch)
    return SmallWheels(ours, (*zip(listed, paths, strict=True), stand_in))
