"""An image that is assembled from locked packages and wheels and checked, all without a container daemon."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_flashinfer

from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, _base, _rootfs, image_inputs, image_verification
from sm120kit.images._layers import LayerWriter
from sm120kit.images.image_records import Image
from sm120kit.images.oci import Layout
from sm120kit.recipes import bases
from sm120kit.sources.run_options import Options

pytestmark = pytest.mark.containers


def assemble(base_name: str, machine: str, directory: Path) -> tuple[Image, Workspace]:
    """An image of the small FlashInfer for a machine, and its state directory."""
    workspace = Workspace.open(directory / "state")
    layout = Layout(workspace.root / "oci")
    try:
        image_base = _base.image_base(bases.load(base_name), machine, layout, Options(workspace))
    except RequirementMissing as error:
        pytest.skip(error.message)
    wheels = small_flashinfer.wheels(workspace, directory)
    locked = dict(wheels.locked)
    described, settings, programs = image_inputs.describe(
        small_flashinfer.SETUP,
        f"{base_name}@{image_base.layers[0].digest}",
        {wheels.ours: file_sha256(wheels.ours)},
        [*locked],
        workspace,
    )
    files = locked | {described.ours[0].wheel: wheels.ours}
    image, _ = _assembly.assemble(described, (settings, programs), image_base, files.__getitem__, layout, workspace)
    return image, workspace


def verify(base_name: str, machine: str, directory: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Assemble an image and run its checks: the command, and its report."""
    image, workspace = assemble(base_name, machine, directory)
    done = subprocess.run(
        [sys.executable, "-m", "sm120kit", "verify", "image", image.id, "--json", "--state", workspace.root],
        env=os.environ | {"DOCKER_HOST": f"unix://{directory}/absent"},
        capture_output=True,
        text=True,
    )
    return done, json.loads(done.stdout)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="requires another machine than that of the image")
def test_checks_of_an_image_for_another_machine_run_in_an_emulator(tmp_path: Path) -> None:
    done, report = verify("debian-12-python", "aarch64", tmp_path)
    verdicts = {f"{check['suite']}/{check['name']}": check["verdict"] for check in report["checks"]}
    assert "failed" not in verdicts.values(), [check for check in report["checks"] if check["verdict"] == "failed"]
    assert done.returncode == 0 and verdicts["base/files"] == verdicts["flashinfer/import"] == "passed", done.stderr
    assert report["verified"] and report["facts"]["runtime"] == "unshare, qemu-aarch64"


def test_a_build_reads_no_file_again_and_detects_a_file_of_another_layer(tmp_path: Path) -> None:
    image, workspace = assemble("debian-12-python", platform.machine(), tmp_path)
    layout = Layout(workspace.root / "oci")
    manifest = layout.find(image.id)
    assert manifest is not None

    def checked(image: Image, read_all: bool) -> tuple[str, str]:
        """Result of the check ``files``, and how many files it read."""
        report = image_verification.verify(image.id, workspace, read_all=read_all)
        (check,) = (check for check in report.checks if check.name == "files")
        assert report.verified is not None or check.verdict == "failed", report.checks
        return check.detail.partition(" is ")[0], report.facts.get("files read", "")

    assert checked(image, read_all=False) == ("", "0")
    (detail, read) = checked(image, read_all=True)
    assert not detail and int(read) > 50

    # A layer that replaces a file, which no wheel's RECORD describes.
    config = layout.config(manifest.digest)
    path = f"opt/venv/lib/python{image.labels['sm120kit.python']}/site-packages/tqdm/utils.py"
    with layout.writer() as blob:
        writer = LayerWriter(blob, 0)
        writer.file(path, [b"changed = True\n"], 15)
        layer = writer.finish()
    faulty = layout.add_image((*layout.layers(manifest.digest), layer), config)
    for read_all in (False, True):
        assert checked(layout.image(faulty.digest), read_all)[0] == f"1: /{path}", read_all

    # A file that was changed where the layers are unpacked is read.
    (tree,) = (each.tree for each in _rootfs.layers(layout, manifest.digest, workspace) if (each.tree / path).exists())
    (tree / path).write_bytes(b"changed = True\n")
    assert checked(image, read_all=False)[0] == f"1: /{path}"
