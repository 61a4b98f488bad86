"""The script of CI that publishes, with the small image and a registry on loopback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import containers
import pytest
from small_image import ROOT, ImageHost


@pytest.fixture
def scripts(image_host: ImageHost, tmp_path: Path) -> ImageHost:
    """A host whose commands are the scripts of CI; they run the ``sm120kit`` under test."""
    program = tmp_path / "bin" / "sm120kit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m sm120kit "$@"\n')
    program.chmod(0o755)

    class Scripts(ImageHost):
        @property
        def environment(self) -> dict[str, str]:
            return {**super().environment, "PATH": f"{program.parent}:{os.environ['PATH']}", "SIGNING_KEY": ""}

        def argv(self, *arguments: object) -> list[str]:
            return [f"{ROOT}/ci/{arguments[0]}", *map(str, arguments[1:])]

    return Scripts(image_host.state, image_host.data, image_host.socket, tmp_path)


@pytest.mark.containers
@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_script_publishes_a_checked_image(scripts: ImageHost, base: str, verified: str, registry: tuple[str, Path]) -> None:
    published = scripts.run("publish.sh", verified, f"{registry[0]}/ci/flashinfer", "index/images.json")
    assert "yes" in published.stdout
    (entry,) = json.loads((scripts.directory / "index" / "images.json").read_text())["images"]
    assert entry["tag"] == verified.rpartition(":")[2] and entry["digest"] in published.stdout
    # A failure ends the script: nothing is published after it.
    scripts.run("publish.sh", base, f"{registry[0]}/ci/base", "other/images.json", code=21)
    assert not (scripts.directory / "other").exists()
