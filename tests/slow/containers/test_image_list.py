"""``sm120kit image list`` with a real daemon: images and the status of their checks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import containers
import pytest

from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.docker import Daemon
from sm120kit.images.image_records import Check, CheckResult, VerifiedImage

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


def import_image(client: Any, directory: Path, name: str, *changes: str) -> str:
    """Import an image with a single file and return its id."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    path = directory / f"{name}.tar"
    path.write_bytes(packed.getvalue())
    output = client.api.import_image_from_file(str(path), changes=list(changes))
    return str(json.loads(output.strip().splitlines()[-1])["status"])


def test_image_list_shows_tags_and_status(daemon: containers.Dockerd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import docker

    monkeypatch.setenv("DOCKER_HOST", daemon.socket)
    client = docker.DockerClient(base_url=daemon.socket)
    labels = "LABEL sm120kit.context=x sm120kit.kind=flashinfer sm120kit.recipes=flashinfer-0.6.6"
    ids = {name: import_image(client, tmp_path, name, labels) for name in ("current", "older", "never")}
    foreign = import_image(client, tmp_path, "foreign")
    workspace = Workspace.open(tmp_path / "state")
    imports = set(ids.values())
    connection = Daemon()
    results = (Check("base", "user", CheckResult.PASSED), Check("flashinfer", "kernels", CheckResult.NOT_RUN))
    for name, suite in (("current", checks.suite_digest("flashinfer")), ("older", "0" * 64)):
        image = connection.find(ids[name])
        write_record(checks.record_path(workspace, image), VerifiedImage(image, f"x:{name}", suite, results, {}))
        connection.tag(image.id, f"x:{name}")

    def run(*options: str) -> str:
        argv = [sys.executable, "-m", "sm120kit", "image", "list", "--state", str(workspace.root), *options]
        return subprocess.run(argv, capture_output=True, text=True, check=True, env=os.environ).stdout

    # The daemon is shared with other tests; their images are listed too.
    listed = {entry["image"]["id"]: (entry["tags"], entry["standing"]) for entry in json.loads(run("--json"))}
    assert foreign not in listed
    assert {image: listed[image] for image in imports & listed.keys()} == {
        ids["current"]: (["x:current"], "verified"),
        ids["older"]: (["x:older"], "verified by older checks"),
        ids["never"]: ([], "not verified"),
    }
    short = {image.removeprefix("sha256:")[:12] for image in imports}
    rows = [line for line in run().splitlines() if any(image in line for image in short)]
    assert len(rows) == 3
    (current,) = (line for line in rows if "x:current" in line)
    assert ids["current"].removeprefix("sha256:")[:12] in current and "verified: 1 passed, 1 not run" in current
    assert any("(no tag)" in line and "not verified" in line for line in rows)
    for image_id in (*imports, foreign):
        client.images.remove(image_id, force=True)
