"""A local patch of the upstream wheel of the current vLLM: 0.3 GB are fetched, and packed again in seconds."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path

import pytest

from sm120kit.core.workspace import Workspace
from sm120kit.patches.local import read_local
from sm120kit.recipes.target import EngineTarget, resolve, with_local
from sm120kit.sources.git import Repository
from sm120kit.sources.origin import DEFAULT
from sm120kit.sources.run_options import Options
from sm120kit.wheels.overlay import build_overlay

PATH = "vllm/connections.py"


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(Workspace.open(None))


def cpu_seconds() -> float:
    """CPU time of this process and its programs, which other work on the machine does not change much."""
    return sum(os.times()[:4])


def patch_of(target: EngineTarget, text: str) -> bytes:
    """A plain diff that adds a first line."""
    assert target.source is not None
    checkout = target.source.checkout
    first = Repository(checkout.repository).read(checkout.commit, PATH).decode().split("\n")[0]
    return f"--- a/{PATH}\n+++ b/{PATH}\n@@ -1 +1,2 @@\n+# {text}\n {first}\n".encode()


def test_python_of_the_upstream_wheel_is_patched(options: Options, tmp_path: Path) -> None:
    target = resolve("vllm-0.33.0", options).engine
    assert target is not None
    series = build_overlay(target, target.engine_tree)
    for text in ("first", "second"):
        file = tmp_path / f"{text}.patch"
        file.write_bytes(patch_of(target, f"{text} {tmp_path.name} {time.time()}"))
        patched = with_local(target, read_local([file], DEFAULT)).engine
        began = cpu_seconds()
        repacked = build_overlay(patched, patched.engine_tree) if patched else None
        seconds = cpu_seconds() - began
    assert series is not None and repacked is not None and repacked.ran
    with zipfile.ZipFile(series.wheel) as before, zipfile.ZipFile(repacked.wheel) as after:
        sums = [{i.filename: i.CRC for i in wheel.infolist() if ".dist-info/" not in i.filename} for wheel in (before, after)]
        assert {name for name in sums[0] if sums[0][name] != sums[1][name]} == {PATH} and sums[0].keys() == sums[1].keys()
        (name,) = (name for name in after.namelist() if name.endswith("sm120kit.json"))
        assert [patch["slug"] for patch in json.loads(after.read(name))["local"]] == ["second"]
        assert after.testzip() is None
    assert seconds < 60, "to compress the members again takes minutes"
