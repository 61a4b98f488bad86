"""The checks of a small image have the same results in a user namespace and under bubblewrap.

The image has Debian's Python, a few real wheels, and a FlashInfer without modules.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import containers
import pytest
import small_flashinfer
from small_image import ImageHost

from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, _base
from sm120kit.images import image_inputs as contexts
from sm120kit.images.oci import Layout
from sm120kit.sources.run_options import Options

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

SITE = "/opt/venv/lib/python3.11/site-packages"
INIT = f"{SITE}/flashinfer/{{}}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageHost]:
    """A state directory and a daemon of these tests' own: the checked image gets a tag there."""
    directory = tmp_path_factory.mktemp("host")
    with containers.dockerd() as running:
        yield ImageHost(directory / "state", data_root(), running.socket, directory)


@pytest.fixture(scope="module")
def image(host: ImageHost, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of the image."""
    workspace = Workspace.open(host.state)
    wheels = small_flashinfer.wheels(workspace, tmp_path_factory.mktemp("wheels"))
    locked, layout = dict(wheels.locked), Layout(workspace.root / "oci")
    image_base, base = _base.debian_image("debian-12-python", platform.machine(), Options(workspace))
    ours = {wheels.ours: file_sha256(wheels.ours)}
    context, settings, programs = contexts.describe(small_flashinfer.SETUP, base, ours, [*locked], workspace)
    files = locked | {context.ours[0].wheel: wheels.ours}
    built, _ = _assembly.assemble(context, (settings, programs), image_base, files.__getitem__, layout, workspace)
    return built.id


def results(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {f"{check['suite']}/{check['name']}": (check["verdict"], check["detail"]) for check in report["checks"]}


def test_report_of_bubblewrap_is_equal(host: ImageHost, image: str) -> None:
    """The program is that of the command; only the choice of the runtime is limited."""
    program = """
import sys
from sm120kit.images import local_images
local_images._command = lambda *request: ["false"]
from sm120kit.cli import main
sys.argv = ["sm120kit", *sys.argv[1:]]
main()
"""
    first = json.loads(host.run("verify", "image", image, "--json").stdout)
    argv = [sys.executable, "-c", program, "verify", "image", image, "--json"]
    done = subprocess.run(argv, env=host.environment, cwd=host.directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    second = json.loads(done.stdout)
    assert [report["facts"].pop("runtime") for report in (first, second)] == ["unshare", "bubblewrap"]
    assert results(first) == results(second) and first["facts"] == second["facts"]
    assert host.names() == {first["verified"]["reference"]}
