"""Download a model with huggingface_hub from a server of this test: complete, interrupted, refused and offline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from model_folders import HYBRID, MTP, NVFP4, folder
from model_hub import COMMIT, ModelHub, model_hub

from sm120kit.core.errors import FetchFailed, ModelRefused, NoSuchModel, NotEnoughDisk, OfflineMiss
from sm120kit.recipes import configurations
from sm120kit.serving import download
from sm120kit.serving.container import Mount, _model_mounts

ROOT = Path(__file__).parents[2]
NAME = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
REPOSITORY = "Qwen/Qwen3.5-27B-FP8"
DRIVER = """
import sys
from sm120kit.core import signals
from sm120kit.recipes import configurations
from sm120kit.serving import download

signals.handle()
try:
    download.fetch(download.plan(configurations.load(sys.argv[1]), "", offline=False))
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
    return download.fetch(download.plan(configurations.load(NAME), revision, offline=offline))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_download_that_is_killed_resumes_and_then_needs_no_network(sent: int, code: int, hub: ModelHub, home: Path) -> None:
    """An interrupt ends it at once, although the server has half of a file still to send."""
    shard = max(hub.files, key=lambda name: len(hub.files[name]))
    others = {name for name in hub.files if name not in (shard, "pytorch_model.bin")}
    hub.slow = shard
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.Popen([sys.executable, "-c", DRIVER, NAME], env=os.environ | variables)
    assert hub.halfway.wait(60)
    snapshot = download.cache_folder(REPOSITORY, COMMIT)
    while not others <= {path.name for path in snapshot.glob("*")}:
        assert child.poll() is None
    child.send_signal(sent)
    assert child.wait(timeout=30) == code
    hub.slow = ""
    plan = download.plan(configurations.load(NAME), "", offline=False)
    assert plan == download.ModelDownload(REPOSITORY, COMMIT, len(hub.files[shard]), offline=False)
    assert download.fetch(plan) == snapshot
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
    with pytest.raises(NoSuchModel, match=f"{REPOSITORY} has no revision v9"):
        fetch("v9")
    hub.token = "right"
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    with pytest.raises(ModelRefused, match="status 401") as refused:
        fetch()
    assert "HF_TOKEN" in refused.value.hint and "hunter2" not in f"{refused.value.message} {refused.value.hint}"
    hub.token, hub.repository = "", "another/model"
    with pytest.raises(NoSuchModel, match=f"the Hub has no model {REPOSITORY}"):
        fetch()
    hub.repository = REPOSITORY
    hub.files["model-9.safetensors"] = _Huge()
    plan = download.plan(configurations.load(NAME), "", offline=False)
    assert plan.missing_bytes > 2**59, "a command line can be printed for a machine with more space"
    with pytest.raises(NotEnoughDisk, match="GiB free"):
        download.fetch(plan)
    assert not hub.sent, "refused before any file is requested"


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
    mounts = (Mount(hub / "models--a--b", "/model", True), Mount(hub / "blobs", "/blobs", True))
    assert _model_mounts(snapshot) == mounts
    assert _model_mounts(snapshot.with_name("f" * 40)) == mounts, "a model that is downloaded later"
    assert os.path.normpath(Path("/model/blobs") / (blobs / "etag").readlink()) == "/blobs/ab/abcd"
