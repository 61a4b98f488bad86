"""The container in which an all-reduce is measured, with a docker program of this test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import containers
import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import BadInput
from sm120kit.core.workspace import Workspace
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.images.published_images import Source
from sm120kit.recipes import configurations, load_engine
from sm120kit.serving import Device, Service, allreduce, launch
from sm120kit.serving._container import Mount
from sm120kit.serving.resolve import ResolvedLaunch, ServerLocation

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


@pytest.mark.parametrize("broken", [False, True])
def test_the_command_prints_json_alone_and_keeps_no_result_if_no_method_works(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch is of this test; docker answers as the program in the image does."""
    (tmp_path / "docker").write_text(
        DOCKER.replace("{python}", sys.executable).replace('"wrong": 0', f'"wrong": {int(broken)}')
    )
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    image = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1), "some/image:tag", "", (), {})
    configuration, workspace = configurations.load(TWO), Workspace.open(tmp_path / "state")
    gpus = (Device(2, "RTX PRO 6000", 1), Device(3, "RTX PRO 6000", 1))
    engine = load_engine(configuration.engine)
    resolved = ResolvedLaunch(configuration, engine, image, None, gpus, ServerLocation(), Source(tmp_path))  # type: ignore[arg-type]
    service = Service("s", "sha256:1", ("serve",), {}, (), (2, 3), 1, False, {}, 8000)
    monkeypatch.setattr("sm120kit.cli.tune.resolve", lambda *arguments: resolved)
    monkeypatch.setattr(launch, "require_daemon", lambda *arguments: None)
    monkeypatch.setattr(launch, "idle_service", lambda *arguments: service)
    earlier = allreduce.AllReduceRecord("c" * 64, resolved.gpu_names, 64, (), "custom")
    path = allreduce.store(earlier, configuration, workspace)
    arguments = ["tune", TWO, "--model", str(tmp_path), "--state", str(tmp_path / "state"), "--json"]
    ran = CliRunner().invoke(app, arguments)
    if broken:
        assert isinstance(ran.exception, BadInput) and not path.exists()
        return
    record = json.loads(ran.stdout)
    assert record["gpus"] == ["2: RTX PRO 6000", "3: RTX PRO 6000"] and len(record["measured"]) == 5
    assert allreduce.selected("auto", configuration, "c" * 64, resolved.gpu_names, workspace) == record["best"] == "nccl"


PYTHON = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char** arguments) {
  int tuned = open("/cache/tuned", O_CREAT | O_WRONLY, 0600), given = open(arguments[1], O_RDONLY);
  printf("{\"rows\": 1, \"wrong\": 0, \"graph_wrong\": %d, \"microseconds\": 3.0}\n", tuned < 0 || given < 0);
  puts("{\"end\": \"finished\"}");
  return 0;
}
"""
HOOK = r"""#!/bin/sh
bundle=$(sed 's/.*"bundle":"\([^"]*\)".*/\1/')
cp "$bundle/config.json" {at}/started.json
"""


@pytest.mark.containers
@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_its_container_has_the_gpus_and_a_cache_that_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a daemon of its own, for which a program of this test stands in for NVIDIA's hook."""
    (tmp_path / "python.c").write_text(PYTHON)
    (tmp_path / "root").mkdir()
    subprocess.run(["gcc", "-static", "-o", tmp_path / "root" / "python3", tmp_path / "python.c"], check=True)
    subprocess.run(["tar", "-C", tmp_path / "root", "-cf", tmp_path / "image.tar", "."], check=True)
    (tmp_path / "cache").mkdir()
    hook = tmp_path / "nvidia-container-runtime-hook"
    hook.write_text(HOOK.replace("{at}", str(tmp_path)))
    hook.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with containers.dockerd() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        loading = ["docker", "import", "--change", "ENV PATH=/", tmp_path / "image.tar"]
        image = subprocess.run(loading, check=True, capture_output=True, text=True).stdout.strip()
        plain = Service("s", image, ("serve",), {}, (Mount(tmp_path / "cache", "/cache", False),), (2, 3), 1, True, {}, 8000)
        label = tmp_path / "runs" / "tune.json"
        service = launch.labelled_service(plain, configurations.load(TWO), label)
        measured = allreduce.measure(
            service, label, "nccl-sys", {"NCCL_P2P_LEVEL": "SYS"}, allreduce.AllReduceRequest(2, 64, (1,))
        )
        assert measured == allreduce.MeasuredAllReduce("nccl-sys", (allreduce.Timing(1, 0, 3.0),), "")
        left = subprocess.run(["docker", "ps", "--all", "--quiet"], check=True, capture_output=True, text=True).stdout
        assert not left and (tmp_path / "cache" / "tuned").is_file()
    started = json.loads((tmp_path / "started.json").read_text())
    assert {"NVIDIA_VISIBLE_DEVICES=2,3", "NCCL_P2P_LEVEL=SYS"} <= set(started["process"]["env"])
    assert not any(each["type"] == "ipc" for each in started["linux"]["namespaces"]), "the host's"


def _package(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("parameters", [True, False])
def test_sglangs_all_reduce_has_its_group_of_all_ranks_first(
    parameters: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """0.5.23 takes the group, 0.5.11 does not; both copy between the GPUs in turns of that group."""
    torch = pytest.importorskip("torch")
    groups: list[dict[str, Any]] = []

    def communicator(group: Any, device: Any) -> tuple[Any, ...]:
        assert groups, "it would end: SGLang has no group of all ranks"
        return group, device

    dispatch = (lambda group, device: communicator) if parameters else (lambda: communicator)
    base = "sglang.srt.distributed"
    for name in ("sglang", "sglang.srt", base, f"{base}.device_communicators"):
        _package(monkeypatch, name, __path__=[])
    _package(monkeypatch, f"{base}.device_communicators.custom_all_reduce", dispatch_custom_allreduce=dispatch)
    _package(monkeypatch, f"{base}.parallel_state", init_distributed_environment=lambda **given: groups.append(given))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        assert program.sglang_communicator("group", torch.device("cuda", 0)) == ("group", torch.device("cuda", 0))
    finally:
        torch.distributed.destroy_process_group()
    assert groups == [{"world_size": 1, "rank": 0, "local_rank": 0, "backend": "gloo"}]


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
