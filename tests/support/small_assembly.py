"""Inputs of a small engine image that is assembled from layers: wheels, a base with this Python."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from small_engine import make_wheel

from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import file_sha256
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, _base, image_inputs
from sm120kit.images._layers import LayerWriter
from sm120kit.images.image_records import Image
from sm120kit.images.oci import Layout
from sm120kit.sources.source_records import LockedWheel

ORIGIN = {
    "recipe": "flashinfer-0.6.6",
    "plan": "b" * 64,
    "commit": "c" * 40,
    "tree": "d" * 40,
    "archs": ["sm_120f"],
    "kernel_groups": [],
    "pin": {"project": "flashinfer"},
    "inside": [],
    "modules": ["fp4_quantization_120f"],
    "patches": [],
}
RELEASED = {
    "flashinfer/released.py": b"released = 1\n",
    "flashinfer/data/gemm.cuh": b"gemm\n",
    "flashinfer/data/bin/tool": b"#!/bin/sh\n",
}
"""Files of the patched FlashInfer that are those of its release."""
CUDA_H = b"CUresult cuInit(unsigned int Flags);\nCUresult cuMemAlloc_v2(void);\n"
WHEELS: dict[str, dict[str, bytes]] = {
    "engine": {
        "engine/__init__.py": b"version = 1\n",
        "engine/old.py": b"print 'of another Python'\n",
        "engine/tool.sh": b"#!/bin/sh\n",
        "engine-1.0.data/scripts/bin/run": b"#!python\nprint('run')\n",
        "engine-1.0.data/data/share/engine.txt": b"data",
        "engine-1.0.dist-info/entry_points.txt": b"[console_scripts]\nserve = engine.cli:main.run\n",
    },
    "nvidia-cuda-runtime": {
        "nvidia/__init__.py": b"",
        "nvidia/cu13/include/cuda.h": CUDA_H,
        "nvidia/cu13/lib/libcudart.so.13": b"\x7fELF",
        "nvidia/cu13/lib/libnvrtc.alt.so.13": b"\x7fELF",
    },
    "nvidia-cublas": {"nvidia/__init__.py": b"", "nvidia/cu13/lib/libcublas.so.13": bytes(100_000)},
    "other": {"other/__init__.py": b"value = {'a', 'b', 'c'} and 'x'\n", "shared/common.py": b"shared = 1\n"},
    "zlast": {"zlast.py": b"pass\n", "shared/common.py": b"shared = 'of zlast'\n"},
}


@dataclass
class SmallImage:
    """A directory with wheels, and an image of them in a state directory below it."""

    directory: Path
    released: dict[str, bytes] = field(default_factory=lambda: dict(RELEASED))
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {name: dict(files) for name, files in WHEELS.items()})
    requires: Mapping[str, Sequence[str]] = field(default_factory=dict)
    state: str = "state"
    read: list[str] = field(default_factory=list)
    python: tuple[str, ...] = (sys.executable,)
    labels: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    patched: dict[str, dict[str, bytes | None]] = field(default_factory=dict)
    """The upstream wheels that are packed again, by name, with the files that replace theirs; None removes one."""

    @property
    def layout(self) -> Layout:
        return Layout(self.workspace.root / "oci")

    @property
    def workspace(self) -> Workspace:
        return Workspace.open(self.directory / self.state)

    def wheels(self) -> dict[LockedWheel, Path]:
        """The upstream wheels."""
        found = {}
        for name, files in self.files.items():
            path = self._wheel(name, "1.0", files)
            found[LockedWheel(name, "1.0", path.name, file_sha256(path))] = path
        return found

    def ours(self, content: bytes = b"patched = 1\n") -> Path:
        """The wheel of the patched FlashInfer, with a module that is as released, and one that patches change."""
        version = f"0.6.6+sm120kit.{hashlib.sha256(content).hexdigest()[:12]}"
        origin = ORIGIN | {"changed": ["flashinfer/__init__.py"]}
        files = {
            "flashinfer/__init__.py": content,
            **self.released,
            f"flashinfer_python-{version}.dist-info/sm120kit.json": json.dumps(origin).encode(),
        }
        return self._wheel("flashinfer-python", version, files)

    def packed_again(self, official: LockedWheel) -> Path:
        """The wheel of :attr:`patched` in place of an upstream one."""
        files = self.patched[official.name]
        version = f"1.0+sm120kit.{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
        origin = ORIGIN | {"official": {"sha256": official.sha256}, "replaced": {name: {} for name in files}}
        record = {f"{official.name}-{version}.dist-info/sm120kit.json": json.dumps(origin).encode()}
        packed = {name: content for name, content in (self.files[official.name] | files).items() if content is not None}
        return self._wheel(official.name, version, packed | record)

    def b12x(self, content: bytes) -> Path:
        """A wheel of b12x that was packed again."""
        version = f"0.8.3+sm120kit.{hashlib.sha256(content).hexdigest()[:12]}"
        record = json.dumps(ORIGIN | {"pin": {"project": "b12x"}}).encode()
        return self._wheel("b12x", version, {"b12x/__init__.py": content, f"b12x-{version}.dist-info/sm120kit.json": record})

    def _wheel(self, name: str, version: str, files: Mapping[str, bytes]) -> Path:
        """Write a wheel in one step: another process may read it."""
        house = self.directory / "wheels"
        house.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
            make_wheel(Path(scratch), name, version, files=files, requires=self.requires.get(name, ()))
            (written,) = Path(scratch).iterdir()
            return written.replace(house / written.name)

    def base(self) -> _assembly.ImageBase:
        assert self.workspace.root.is_dir()  # made and marked before anything is written there
        root = self.directory / "root"
        (root / "etc").mkdir(parents=True, exist_ok=True)
        for name in ("passwd", "group"):
            write_atomic(root / "etc" / name, b"root:x:0:0:root:/root:/bin/bash\n")  # another process may read it
        with self.layout.writer() as blob:
            layer = LayerWriter(blob)
            layer.directory("usr")
            written = layer.finish()
        made = _base.described("debian-12", "x86_64", written, root, self.python)
        config: dict[str, Any] = {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["bash"]}
        return replace(made, config=made.config | {"config": config})

    def assemble(
        self, ours: bytes = b"patched = 1\n", base: _assembly.ImageBase | None = None, repacked: Sequence[Path] = ()
    ) -> tuple[Image, bool]:
        """The image, and whether it was built. ``repacked`` are more patched wheels, after that of FlashInfer."""
        every = self.wheels()
        official = [wheel for wheel in every if wheel.name in self.patched]
        wheels = [wheel for wheel in every if wheel not in official]
        all_ours = (self.ours(ours), *repacked, *map(self.packed_again, official))
        labels = {"sm120kit.build-id": "f" * 64, **self.labels}
        env = {"A": 'two "words" and $3'}
        setup = image_inputs.ImageSetup("vllm", "vllm-1.0", labels, env, "1.0", ("vllm", "serve"), files=self.added)
        name = f"debian-12@sha256:{'a' * 64}"
        digests = {path: file_sha256(path) for path in all_ours}
        described, settings, scripts = image_inputs.describe(setup, name, digests, wheels, self.workspace)
        built = dict(zip((built.wheel for built in described.ours), all_ours, strict=True))
        files = _assembly.wheel_files(built, [*every], lambda _: [*every.values()])

        def file(wheel: LockedWheel) -> Path:
            self.read.append(wheel.name)
            return files(wheel)

        inputs = described, (settings, scripts), base or self.base()
        return _assembly.assemble(*inputs, file, self.layout, self.workspace, official)
