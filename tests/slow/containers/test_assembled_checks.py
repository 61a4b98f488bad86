"""An image that is assembled from locked packages and wheels and checked, all without a container daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_flashinfer

from sm120kit.core.errors import NoPackageArchive
from sm120kit.core.state import Workspace, file_sha256
from sm120kit.images import assembly, base, context
from sm120kit.images.oci import Layout
from sm120kit.recipes import bases
from sm120kit.sources.context import Options

pytestmark = pytest.mark.containers


def test_assembled_image_passes_its_checks_but_for_the_compiler_of_its_base(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "state")
    layout = Layout(workspace.root / "oci")
    try:
        image_base = base.image_base(bases.load("debian-12"), "x86_64", layout, Options(workspace))
    except NoPackageArchive as error:
        pytest.skip(error.message)
    wheels = small_flashinfer.wheels(workspace, tmp_path)
    locked = dict(wheels.locked)
    described, text, scripts = context.describe(
        small_flashinfer.SETUP,
        f"debian-12@{image_base.diff_ids[0]}",
        {wheels.ours: file_sha256(wheels.ours)},
        [*locked],
        workspace,
    )
    files = locked | {described.ours[0].wheel: wheels.ours}
    image, _ = assembly.assemble(described, (text, scripts), image_base, files.__getitem__, layout, workspace)
    done = subprocess.run(
        [sys.executable, "-m", "sm120kit", "verify", "image", image.id, "--json", "--state", workspace.root],
        env=os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/absent"},
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    failed = {check["name"]: check["detail"] for check in report["checks"] if check["verdict"] == "failed"}
    assert failed.keys() == {"no_toolchain"} and "/usr/bin/" in failed["no_toolchain"], report["checks"]
    assert done.returncode == 1 and report["facts"]["runtime"] in ("chroot", "unshare", "bubblewrap")
    verdicts = {f"{check['suite']}/{check['name']}": check["verdict"] for check in report["checks"]}
    assert verdicts["base/base"] == verdicts["base/owners"] == verdicts["base/user"] == verdicts["base/files"] == "passed"
