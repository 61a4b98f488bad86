"""Download a model with huggingface_hub from a server of this test: complete, interrupted, refused and offline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic_hosts
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from model_folders import HYBRID, MTP, NVFP4, Shapes, folder, shard
from model_hub import COMMIT, ModelHub, huge_shard, model_hub
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import BadInput, FetchFailed, NotFound, OfflineMiss, ResourceUnavailable, Sm120kitError
from sm120kit.recipes import configurations
from sm120kit.serving import checkpoint, model_download
from sm120kit.serving._container import Mount, _model_mounts

ROOT = Path(__file__).parents[2]
NAME = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
REPOSITORY = "Qwen/Qwen3.5-27B-FP8"
DRIVER = """
import sys
from sm120kit.core import signals
from sm120kit.recipes import configurations
from sm120kit.serving import model_download

signals.handle()
try:
    getattr(model_download, sys.argv[2])(model_download.plan(configurations.load(sys.argv[1]), "", offline=False))
except signals.Interrupted:
    sys.exit(130)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ModelHub]:
    folder(tmp_path / "remote", HYBRID, NVFP4, MTP)
    (tmp_path / "remote" / "pytorch_model.bin").write_bytes(bytes(100))
    with model_hub(REPOSITORY, tmp_path / "remote") as running:
        yield running


@pytest.fixture
def home(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The download cache of this process, which uses the test's Hub without a token."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setenv("HF_TOKEN", "")
    return tmp_path / "home"


def fetch(revision: str = "", *, offline: bool = False) -> Path:
    return model_download.fetch(model_download.plan(configurations.load(NAME), revision, offline=offline))


def start(step: str, hub: ModelHub, home: Path) -> subprocess.Popen[bytes]:
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "300",
    }
    return subprocess.Popen([sys.executable, "-c", DRIVER, NAME, step], env=os.environ | variables)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_download_that_is_killed_resumes_and_then_needs_no_network(sent: int, code: int, hub: ModelHub, home: Path) -> None:
    """An interrupt ends it at once, although the server has half of a file still to send."""
    shard = max(hub.files, key=lambda name: len(hub.files[name]))
    others = {name for name in hub.files if name not in (shard, "pytorch_model.bin")}
    hub.slow = shard
    child = start("fetch", hub, home)
    assert hub.halfway.wait(60)
    snapshot = model_download.cache_folder(REPOSITORY, COMMIT)
    while not others <= {path.name for path in snapshot.glob("*")}:
        assert child.poll() is None
    child.send_signal(sent)
    assert child.wait(timeout=60) == code
    hub.slow = ""
    (left,) = (snapshot.parents[1] / "blobs").glob("*.incomplete")
    running = left.with_name(f"another.{'0' * 8}.incomplete")
    retrying = left.with_name(f"without-lock.{'0' * 8}.incomplete")
    for path, written in ((left, 1.0), (running, 1.0), (retrying, time.time() - 360)):
        path.touch()
        os.utime(path, (written, written))
    plan = model_download.plan(configurations.load(NAME), "", offline=False)
    assert (plan.repository, plan.commit, plan.missing_bytes) == (REPOSITORY, COMMIT, len(hub.files[shard]))
    with WeakFileLock(home / "hub" / ".locks" / running.parents[1].name / "another.lock"):
        assert model_download.fetch(plan) == snapshot
    assert running.exists() and retrying.exists() and not left.exists(), "what another download writes stays"
    expected = {name: content for name, content in hub.files.items() if name != "pytorch_model.bin"}
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == expected
    assert hub.sent == dict.fromkeys(others, 1) | {shard: 2}, "finished files are not downloaded again, other formats never"
    hub.gone = True
    assert fetch(offline=True) == fetch(COMMIT) == snapshot
    with pytest.raises(FetchFailed, match="with status 410"):
        fetch()
    (snapshot / shard).unlink()
    with pytest.raises(OfflineMiss, match="does not have all files"):
        fetch(offline=True)


def test_refused_downloads(hub: ModelHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match=f"{REPOSITORY} has no revision v9"):
        fetch("v9")
    for revision in ("v" * 70_000, "v\udcff"):  # of no URL
        with pytest.raises(NotFound, match="has no revision v"):
            fetch(revision)
    hub.token = "right"
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    with pytest.raises(FetchFailed, match="status 401") as refused:
        fetch()
    assert "HF_TOKEN" in refused.value.hint and "hunter2" not in f"{refused.value.message} {refused.value.hint}"
    monkeypatch.delenv("HF_TOKEN")
    os.mkfifo(home.parent / "token")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home.parent / "token"))  # as no token: nobody writes to it
    with pytest.raises(FetchFailed, match="status 401") as anonymous:
        fetch()
    assert "HF_TOKEN" in anonymous.value.hint and anonymous.value.hint != refused.value.hint
    hub.token, hub.repository = "", "another/model"
    with pytest.raises(NotFound, match=f"the Hub has no model {REPOSITORY}"):
        fetch()
    hub.repository = REPOSITORY
    hub.files["model-9.safetensors"] = _Huge()
    plan = model_download.plan(configurations.load(NAME), "", offline=False)
    assert plan.missing_bytes > 2**59, "a command line can be printed for a machine with more space"
    with pytest.raises(ResourceUnavailable, match="GiB free"):
        model_download.fetch(plan)
    assert not hub.sent, "refused before any file is requested"
    hub.files["config.json"] = _Huge()
    with pytest.raises(NotFound, match=r"config.json cannot be read: it has more than 64 MiB") as larger:
        model_download.preview(model_download.plan(configurations.load(NAME), "", offline=False))
    assert not hub.sent and "readable" not in larger.value.hint


LAST = "model-00002-of-00002.safetensors"


def preview() -> checkpoint.Checkpoint:
    return model_download.preview(model_download.plan(configurations.load(NAME), "", offline=False))


@pytest.mark.parametrize("whole", [False, True], ids=["ranges", "a server that ignores ranges"])
@pytest.mark.parametrize("first", [10, 100_000])
def test_model_is_read_before_its_shards_are_downloaded(
    first: int, whole: bool, hub: ModelHub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first request has only a part of a header."""
    monkeypatch.setattr(model_download, "HEADER_BYTES", first)
    hub.whole = whole
    hub.files["extra/model.safetensors"] = b"in a folder, which engines do not read"
    facts = preview()
    assert replace(facts, source="") == replace(checkpoint.read(tmp_path / "remote"), source="")
    assert facts.source == f"{REPOSITORY} at {COMMIT}" and len(facts.mtp) == 2
    assert hub.sent == dict.fromkeys(("config.json", checkpoint.INDEX), 1)
    shards = {name for name in hub.files if name.endswith(".safetensors") and "/" not in name}
    assert hub.parts == dict.fromkeys(shards, 1 if first > 10 else 2)
    folder = fetch()
    assert replace(checkpoint.read(folder), source="") == replace(facts, source="") and set(hub.sent.values()) == {1}
    hub.parts.clear()
    (folder / LAST).unlink()
    assert replace(preview(), source="") == replace(facts, source="")
    assert hub.parts == {LAST: hub.parts[LAST]}, "headers of shards in the download cache are read there"


def test_interrupt_ends_the_reading_of_headers_at_once(hub: ModelHub, home: Path) -> None:
    hub.slow_parts = LAST
    child = start("preview", hub, home)
    assert hub.halfway.wait(60)
    child.send_signal(signal.SIGINT)
    try:
        assert child.wait(timeout=60) == 130
    finally:
        child.kill()


def test_headers_are_not_awaited_forever(hub: ModelHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.slow_parts = LAST
    with pytest.raises(FetchFailed, match="ReadTimeout"):
        preview()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda files: files.pop(LAST), BadInput, f"1 of 2 shards are missing: {LAST}"),
        (lambda files: files.update({LAST: files["model-00001-of-00002.safetensors"]}), BadInput, "lacks the tensor mtp"),
        (lambda files: files.update({LAST: files[LAST][:-9]}), BadInput, "instead of the"),
        (lambda files: files.update({LAST: b"\xff" * 99}), BadInput, "truncated or no safetensors file"),
        (lambda files: files.update({LAST: b"version https://git-lfs.github.com/spec/v1"}), BadInput, "Git LFS pointer"),
        (lambda files: files.pop("config.json"), BadInput, "has no config.json"),
        (lambda files: files.update({"config.json": b"{"}), BadInput, "config.json is not JSON"),
    ],
)
def test_damaged_model_is_refused_before_the_download(
    damage: Any, error: type[Sm120kitError], message: str, hub: ModelHub, home: Path
) -> None:
    damage(hub.files)
    with pytest.raises(error) as caught:
        preview()
    assert message in caught.value.message and f"{REPOSITORY} at {COMMIT}" in caught.value.message
    assert not {name for name in hub.sent if name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("shapes", "code", "message"),
    [
        ((NVFP4,), 11, "none of the 5 tensors belongs to one"),
        ((NVFP4, MTP, {}), 41, "549.8 GB"),
        ((NVFP4, MTP), 0, "docker run"),
    ],
)
def test_model_that_cannot_be_served_is_refused_before_the_download(
    shapes: tuple[Shapes, ...],
    code: int,
    message: str,
    hub: ModelHub,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by ``--print``, which downloads no shard at all."""
    configuration = "qwen3.5-397b-nvfp4-4x-rtx-pro-6000"
    hub.repository = configurations.load(configuration).model.repository
    other = folder(tmp_path / "other", HYBRID, *(part for part in shapes if part))
    hub.files = {path.name: path.read_bytes() for path in other.iterdir()}
    if {} in shapes:
        hub.files[LAST] = huge_shard(2**41, "huge")
        index = json.loads(hub.files[checkpoint.INDEX])
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != LAST} | {"huge": LAST}
        index["weight_map"]["mtp.fc.weight"] = "model-00001-of-00002.safetensors"
        shard(other / "first", NVFP4 | {"mtp.fc.weight": MTP["mtp.fc.weight"]})
        hub.files |= {
            "model-00001-of-00002.safetensors": (other / "first").read_bytes(),
            checkpoint.INDEX: json.dumps(index).encode(),
        }
    root = synthetic_hosts.build("turin-8", tmp_path / "host")
    monkeypatch.chdir(root)  # without images.json, the default of --index
    options = ["--root", str(root), "--state", str(tmp_path / "state"), "--print"]
    result = CliRunner().invoke(app, ["serve", configuration, *options])
    if code:
        assert isinstance(result.exception, Sm120kitError), result.output
        assert result.exception.exit_code == code and message in result.exception.message
        assert f"{hub.repository} at {COMMIT}" in result.exception.message or code == 41
    else:
        assert result.exit_code == 0 and message in result.stdout and "2 MTP tensors" in result.stderr, result.output
        snapshot = model_download.cache_folder(hub.repository, COMMIT)
        cache = snapshot.parents[1]
        mounts = {snapshot: f"/model/snapshots/{COMMIT}", cache / "blobs": "/model/blobs", cache.parent / "blobs": "/blobs"}
        for source, target in mounts.items():
            assert f"source={source},target={target}," in result.stdout
    assert not {name for name in hub.sent if name.endswith(".safetensors")}


class _Huge(bytes):
    """Empty content that claims to be larger than any disk."""

    def __len__(self) -> int:
        return 2**60


def test_shared_blobs_of_the_download_cache_are_mounted(tmp_path: Path) -> None:
    """huggingface_hub 2 links a file of a model to one store for all models, beside the model's own directory."""
    hub = tmp_path / "hub"
    snapshot, blobs, shared = hub / "models--a--b" / "snapshots" / COMMIT, hub / "models--a--b" / "blobs", hub / "blobs" / "ab"
    for directory in (snapshot, blobs, shared):
        directory.mkdir(parents=True)
    (shared / "abcd").write_text("weights")
    (blobs / "etag").symlink_to("../../blobs/ab/abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/etag")
    own = Mount(snapshot, f"/model/snapshots/{COMMIT}", True)
    mounts = (own, Mount(blobs, "/model/blobs", True), Mount(hub / "blobs", "/blobs", True))
    with pytest.raises(NotFound, match="safetensors links"):
        _model_mounts(snapshot)  # a directory is no store because of its name
    (hub / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    assert _model_mounts(snapshot) == mounts
    later = Mount(snapshot.with_name("f" * 40), f"/model/snapshots/{'f' * 40}", True)
    assert _model_mounts(later.source, planned=True) == (later, *mounts[1:]), "a model that is downloaded later"
    (snapshot / "model.safetensors").unlink()
    assert _model_mounts(snapshot) == (own,), "no file is a link"
    assert _model_mounts(snapshot, planned=True) == mounts, "of which only small files are there"
    assert os.path.normpath(Path("/model/blobs") / (blobs / "etag").readlink()) == "/blobs/ab/abcd"
