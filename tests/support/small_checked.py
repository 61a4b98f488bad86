"""A small image of an engine that passes the checks of every image: real wheels, a FlashInfer without modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_engine import make_wheel

from sm120kit import sources
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, _base, image_inputs
from sm120kit.images.checks import CheckReport, ExpectedImage, _image_checks, run_checks
from sm120kit.images.image_records import Image
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.recipes import bases
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel

CLOSURE = Path(__file__).with_name("image_closure.json")
BASE = "debian-12"
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
    "patches": [],
}
SERVE = ("python", "-m", "http.server")
LABELS = {"sm120kit.build-id": "f" * 64, "sm120kit.python": "3.11"}
SETUP = image_inputs.ImageSetup("vllm", "vllm-1.0", LABELS, {}, "1.0", SERVE, "served by: python")


def assemble(machine: str, directory: Path) -> tuple[Image, Workspace]:
    """The image for a machine, and its state directory."""
    workspace = Workspace.open(directory / "state")
    layout = Layout(workspace.root / "oci")
    try:
        image_base = _base.image_base(bases.load(BASE), machine, layout, Options(workspace))
    except RequirementMissing as error:
        pytest.skip(error.message)
    ours, locked = wheels(workspace, directory)
    base = f"{BASE}@{image_base.layers[0].digest}"
    described, settings, programs = image_inputs.describe(SETUP, base, {ours: file_sha256(ours)}, [*locked], workspace)
    files = locked | {described.ours[0].wheel: ours}
    image, _ = _assembly.assemble(described, (settings, programs), image_base, files.__getitem__, layout, workspace)
    return image, workspace


def wheels(workspace: Workspace, directory: Path) -> tuple[Path, dict[LockedWheel, Path]]:
    """The wheel of FlashInfer, and the others with their files: fetched, or written to ``directory``."""
    files = {
        "flashinfer/__init__.py": f"__version__ = {VERSION!r}\n".encode(),
        f"flashinfer_python-{VERSION}.dist-info/sm120kit.json": json.dumps(ORIGIN).encode(),
    }
    make_wheel(directory, "flashinfer-python", VERSION, requires=["tqdm"], files=files)
    cuda_h = b"CUresult cuInit(unsigned int Flags);\n"
    make_wheel(directory, "nvidia-cuda-runtime", "13.0", files={"nvidia/cu13/include/cuda.h": cuda_h})
    (ours,), (cuda,) = directory.glob("flashinfer*.whl"), directory.glob("nvidia*.whl")
    listed = [LockedWheel(**wheel) for wheel in json.loads(CLOSURE.read_text())["wheels"] if wheel["name"] in REAL]
    paths = sources.wheelhouse(listed, workspace)
    stand_in = LockedWheel("nvidia-cuda-runtime", "13.0", cuda.name, file_sha256(cuda))
    return ours, dict(zip(listed, paths, strict=True)) | {stand_in: cuda}


def check(image: Image, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> CheckReport:
    """The report of the checks of every image: it has no engine that could pass others."""
    monkeypatch.setattr(_image_checks, "required_suites", lambda kind: ("base",))
    labels = image.labels["sm120kit.wheels"], image.labels["sm120kit.ours"]
    installed = dict(wheel.split("==") for listed in labels for wheel in listed.split(","))
    expected = ExpectedImage("vllm", "", "", "", "", "", (), (), (), installed, serve=SERVE, **changed)
    return run_checks(image, expected, LocalImages(workspace), workspace)
