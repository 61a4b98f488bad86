"""``build vllm --cache`` with the image of another machine in a real registry: it is pulled, and nothing is built."""

from __future__ import annotations

import shutil
from pathlib import Path

import containers
import layout_images
import pytest

from sm120kit.core import process
from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks, shared_images
from sm120kit.images.image_records import VerifiedImage
from sm120kit.images.oci import Layout
from sm120kit.images.remote_cache import CacheAccess, RegistryCache
from sm120kit.recipes import target as targets
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources.run_options import Options
from sm120kit.wheels.build_records import BuildRequest

pytestmark = pytest.mark.skipif(not shutil.which("docker-registry"), reason="not installed: docker-registry")


def test_image_of_the_cache_is_pulled_instead_of_built(tmp_path: Path) -> None:
    builder = Workspace.open(tmp_path / "builder")
    target = targets.resolve("vllm-0.19.1", Options(builder))
    assert isinstance(target, EngineTarget)
    key = shared_images.shared_key(target, BuildRequest(), "")
    manifest, name = layout_images.add_image(builder, (1, 2), more={"sm120kit.build-id": target.build_id})
    image = Layout(builder.root / "oci").image(manifest)
    verified = read_record(VerifiedImage, checks.record_path(builder, image))
    state = tmp_path / "state"
    with containers.registry(tmp_path / "registry") as address:
        repository = f"{address}/team/cache"
        shared_images.push(key, verified, RegistryCache(repository, CacheAccess(push=True)), builder)
        argv = ["sm120kit", "build", "vllm@0.19.1", "--cache", repository]
        done = process.run(argv, cwd=tmp_path, env={"SM120KIT_STATE": str(state), "DOCKER_HOST": "unix:///nonexistent"})
    assert done.stdout.splitlines()[-1] == name
    assert "the cache has the image" in done.stderr and "signature not verified" in done.stderr
    assert not (tmp_path / "wheelhouse").exists() and not (state / "build").exists()
    assert not (state / "cache" / "toolchains").exists()
    group = shared_images.shared_key(target, BuildRequest(group="quick"), "")
    local = shared_images.shared_key(target, BuildRequest(), f"sha256:{'0' * 64}")
    assert group not in ("", key) and local == ""
