"""Layers of real wheels have the files that pip and compileall leave."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from small_checked import PIP
from small_engine import make_wheel

from sm120kit import sources
from sm120kit.core.digests import file_sha256
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, _wheel_layers
from sm120kit.images._bytecode import BytecodeCompiler, BytecodeWriter
from sm120kit.images._layers import LayerWriter
from sm120kit.images.oci import Layout
from sm120kit.sources.source_records import LockedWheel

CLOSURE = Path(__file__).parents[2] / "support" / "image_closure.json"
REAL = ("charset-normalizer", "click", "jinja2", "markupsafe", "ninja", "nvidia-cuda-runtime", "setuptools", "tqdm")
"""Scripts, entry points, programs, libraries, headers, data files, and files for other Pythons."""


def test_layer_equals_what_pip_and_compileall_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = [LockedWheel(**wheel) for wheel in json.loads(CLOSURE.read_text())["wheels"] if wheel["name"] in REAL]
    *paths, pip = sources.wheelhouse((*locked, PIP), Workspace.open(tmp_path / "state"))
    files = dict(zip(locked, paths, strict=True)) | replacing(tmp_path)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    installed = install(files, venv, pip, tmp_path)
    monkeypatch.setattr(_wheel_layers, "VENV", str(venv).lstrip("/"))
    layout = Layout(tmp_path / "oci")
    compiler = BytecodeCompiler([venv / "bin" / "python"])
    with layout.writer() as blob:
        contents = {wheel: _wheel_layers.read_contents(wheel, path, compiler.python) for wheel, path in files.items()}
        winners = _wheel_layers.winners([[*files]], contents)
        without = _assembly._shadowed([[*files]], winners, contents)
        layer = LayerWriter(blob)
        bytecode = BytecodeWriter(compiler, layer)
        for wheel, path in files.items():
            _wheel_layers.install(wheel, path, layer, bytecode, without[wheel])
        bytecode.finish()
        written = layer.finish()
    with tarfile.open(layout.path(written.digest)) as archive:
        ours = {member.name: (member.mode, digest(read(archive, member))) for member in archive}
    theirs = {
        str(path.relative_to(installed)): (path.stat().st_mode & 0o7777, digest(path.read_bytes() if path.is_file() else b""))
        for path in installed.rglob("*")
    }
    assert {*ours} ^ {*theirs} == set()
    assert {name: value for name, value in ours.items() if theirs[name] != value} == {}
    assert len([name for name in ours if name.endswith(".pyc")]) > 100 and len(winners) == 4


def replacing(tmp_path: Path) -> dict[LockedWheel, Path]:
    """Wheels that install the same paths: by order of names, or because one requires the other."""
    house = tmp_path / "house"
    house.mkdir()
    requires = {"zz-replaces": ["aa-replaced"]}
    found = {}
    for name in ("aa-replaced", "bb-first", "cc-second", "zz-replaces"):
        both = "replaced" if name in ("aa-replaced", "zz-replaces") else "ordered"
        content = {
            f"{both}/file.py": f"name = {name!r}\n".encode(),
            f"{both}/equal.py": b"equal = True\n",
            f"{name}-1.0.data/scripts/{both}".replace("-", "_", 1): f"#!python\n# {name}\n".encode(),
        }
        make_wheel(house, name, "1.0", files=content, requires=requires.get(name, ()))
        path = house / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        found[LockedWheel(name, "1.0", path.name, file_sha256(path))] = path
    return found


def install(files: dict[LockedWheel, Path], venv: Path, pip: Path, tmp_path: Path) -> Path:
    """Install wheels with pip; what replaces files of a wheel that it requires is installed once more."""
    links, overlay = tmp_path / "links", tmp_path / "overlay"
    links.mkdir()
    for path in files.values():
        (links / path.name).symlink_to(path)
    requirements = tmp_path / "requirements.txt"
    lines = sorted(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in files)
    requirements.write_text("".join(lines))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(pip), "PYTHONDONTWRITEBYTECODE": "1", "PIP_CONFIG_FILE": os.devnull}
    python = venv / "bin" / "python"
    library = overlay / str(venv).lstrip("/") / "lib"

    def run_pip(listed: Path) -> None:
        argv = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--root-user-action",
            "ignore",
            "--no-warn-script-location",
            "--no-index",
        ]
        argv += [
            "--no-deps",
            "--no-compile",
            "--require-hashes",
            "--root",
            overlay,
            "--find-links",
            links,
            "--requirement",
            listed,
        ]
        subprocess.run(argv, check=True, env=environment)

    run_pip(requirements)
    again = tmp_path / "again.txt"
    again.write_text("".join(line for line in lines if line.startswith("zz-replaces==")))
    run_pip(again)
    compileall = [python, "-m", "compileall", "-qq", "-s", overlay, "-p", "/", "--invalidation-mode", "unchecked-hash", library]
    subprocess.run(compileall, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return overlay


def read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
