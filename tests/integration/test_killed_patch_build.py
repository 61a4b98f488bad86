"""A build with a local patch that is killed at any step leaves nothing half done: the next one completes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from locked_engine import LAYERS, Site
from python_base import python_base
from small_assembly import SmallImage

from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, checks, image_inputs
from sm120kit.images.checks import _suite_programs
from sm120kit.images.image_records import VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.patches.local import read_local
from sm120kit.recipes.target import resolve, with_local
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options
from sm120kit.wheels._overlay import build_overlay

PUBLICATIONS = ("rename", "replace", "link")


def killed_before(limit: int, state: Path) -> None:
    """Kill this process before its publication number ``limit`` of a file or directory below ``state``."""
    left = limit

    def counted(publish: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= str(arguments[1]).startswith(f"{state}/")
            if left == 0 and limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return publish(*arguments, **options)

        return call

    for name in PUBLICATIONS:
        setattr(os, name, counted(getattr(os, name)))


def build(directory: Path, state: Path, patch: Path) -> VerifiedImage:
    """Write the base, patch the engine, pack its wheel, write the layers of a small image with it, check and tag it."""
    options = Options(Workspace.open(state), Origin(str(directory / "mirror"), offline=True))
    target = with_local(resolve("vllm-7.0", options), read_local([patch], options.origin)).engine
    assert target is not None
    repacked = build_overlay(target, target.engine_tree)
    assert repacked is not None
    small, store = SmallImage(directory, state=state.name), LocalImages(options.workspace)
    wheels = small.wheels()
    base = python_base(store.layout)
    ours = {path: file_sha256(path) for path in (small.ours(), repacked.wheel)}
    setup = image_inputs.ImageSetup("vllm", "vllm-7.0", {}, {}, "7.0", ("vllm", "serve"))
    context, *described = image_inputs.describe(setup, f"python@{base.layers[0].digest}", ours, [*wheels], options.workspace)
    built = dict(zip((built.wheel for built in context.ours), ours, strict=True))
    files = _assembly.wheel_files(built, [*wheels], lambda _: [*wheels.values()])
    image, _ = _assembly.assemble(context, (described[0], described[1]), base, files, store.layout, options.workspace)
    _suite_programs.COMMON = ()  # the small image has neither FlashInfer nor an engine that starts
    _suite_programs._suite = lambda name: directory / "suite"
    expected = checks.ExpectedImage("vllm", "", "", "", "", "", (), (), (), {}, read_all=False)
    report = checks.run_checks(image, expected, store, options.workspace)
    assert report.verified, report.checks
    return replace(report.verified, facts={})


def run(directory: Path, state: str, limit: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, __file__, directory, directory / state, directory / "mine.diff", str(limit)]
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1] / "support")])
    return subprocess.run(argv, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


def require_complete(workspace: Workspace) -> None:
    """Require that a named image has all its blobs, and a record of its checks."""
    layout = Layout(workspace.root / "oci")
    for listed, names in layout.images():
        layout.verify(listed.digest)
        if any(name.startswith("sm120kit/") for name in names):
            assert checks.record_path(workspace, layout.image(listed.digest)).is_file()


def test_every_kill_leaves_a_state_that_the_next_build_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = data_root() / "image_programs"
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///absent")
    Site(tmp_path).diff("mine.diff", LAYERS, 25)
    (tmp_path / "data" / "image_programs").symlink_to(programs)
    (tmp_path / "suite").mkdir()
    for suite in ("vllm", "changed"):
        (tmp_path / "suite" / f"checks_{suite}.py").write_text("def check_nothing(expected):\n    pass\n")
    source = LocalImages(Workspace.open(tmp_path / "source"))
    base = python_base(source.layout)
    try:
        source.require_runtime(source.layout.add_image(base.layers, base.config).digest)
    except RequirementMissing as reason:
        pytest.skip(str(reason))
    whole = run(tmp_path, "whole", 0)
    assert whole.returncode == 0, whole.stderr
    kills = 0
    while (done := run(tmp_path, "killed", kills + 1)).returncode == -signal.SIGKILL:
        kills += 1  # the next run gets one step further than this one
        for wheel in (tmp_path / "killed").glob("build/*/*/*.whl"):
            assert wheel.with_name("artifacts.json").is_file()
        require_complete(Workspace(tmp_path / "killed"))
        assert kills < 60, done.stderr
    assert done.returncode == 0 and kills > 5, done.stderr
    assert json.loads(done.stdout) == json.loads(whole.stdout)
    layout = Layout(tmp_path / "killed" / "oci")
    found = layout.find(json.loads(done.stdout)["reference"])
    assert found is not None
    layout.verify(found.digest)
    assert not [*(tmp_path / "killed" / "scratch").iterdir()] and not [*(layout.directory / "partial").iterdir()]


if __name__ == "__main__":
    *paths, count = sys.argv[1:]
    root, state_directory, diff = map(Path, paths)
    killed_before(int(count), state_directory)
    made = build(root, state_directory, diff)
    print(json.dumps({"reference": made.reference, "content": made.image.content, "layers": made.image.layers}))
