"""The container in which an all-reduce is measured, with a docker program of this test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sm120kit.recipes import configurations
from sm120kit.serving import Service, allreduce, launch
from sm120kit.serving._container import Mount

sys.path.insert(0, str(Path(__file__).parents[2] / "image_programs"))
import allreduce as program  # type: ignore[import-not-found]  # in the image

TWO = "minimax-m2.7-nvfp4-2x-rtx-pro-6000"
DOCKER = """#!{python}
import json, os, pathlib, sys
at = pathlib.Path(__file__).parent
with (at / "calls").open("a") as calls:
    print(json.dumps([sys.argv[1:], os.environ.get("SECRET", "")]), file=calls)
if sys.argv[1] == "ps":
    print("our-id")
elif sys.argv[1] == "run":
    request = json.loads(sys.argv[-1])
    print(json.dumps({"rows": request["rows"][0], "wrong": 0, "graph_wrong": 0, "microseconds": 3.0}))
    print(json.dumps({"end": "finished"}))
"""


def test_its_container_is_known_by_its_labels_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launches see that the GPUs are in use; no container is removed by its name; variables are in no command line."""
    (tmp_path / "docker").write_text(DOCKER.replace("{python}", sys.executable))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    label = tmp_path / "runs" / "tune.json"
    mounts = (Mount(Path("/models/x"), "/model", True), Mount(tmp_path / "cache", "/root/.cache/x", False))
    plain = Service("s", "sha256:1", ("serve",), {"SECRET": "s3cret"}, mounts, (2, 3), 1, False, {}, 8000, key="password")
    service = launch.labelled_service(plain, configurations.load(TWO), label)
    request = allreduce.AllReduceRequest(2, 64, (1, 8))
    measured = allreduce.measure(service, label, "pcie-ipc", {"SELECTS": "1"}, request)
    assert measured == allreduce.MeasuredAllReduce("pcie-ipc", (allreduce.Timing(1, 0, 3.0),), "")
    (run, secret), (listing, _), (removal, _) = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    assert {"sm120kit.gpus=2,3", f"sm120kit.record={label}"} <= set(run) and secret == "s3cret"
    assert not any("s3cret" in word or "password" in word or "/models/x" in word for word in run)
    assert f"--filter=label=sm120kit.record={label}" in listing and removal == ["rm", "--force", "our-id"]


class SmallMessages:
    """An all-reduce of one process that doubles, and refuses messages of more than four numbers."""

    disabled, capture = False, None

    def should_custom_ar(self, tensor: Any) -> bool:
        return bool(tensor.numel() <= 4)

    def custom_all_reduce(self, tensor: Any) -> Any:
        return 2 * tensor


def test_what_the_engines_all_reduce_refuses_goes_to_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    communicator = SmallMessages()
    monkeypatch.setattr(program, "custom_communicator", lambda group: communicator)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        reduce, _ = program.custom({}, torch.distributed.group.WORLD, None)
        assert reduce(torch.ones(4)).tolist() == [2.0] * 4 and reduce(torch.ones(5)).tolist() == [1.0] * 5
    finally:
        torch.distributed.destroy_process_group()
    communicator.disabled = True
    with pytest.raises(RuntimeError, match="custom"):
        program.custom({}, None, None)
