"""What ``serve --nodes`` prints, run by real programs on loopback and in other directories."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic_hosts
from cpu_server import free_port
from model_folders import MINIMAX, NVFP4, folder
from typer.testing import CliRunner

from sm120kit import recipes, serving
from sm120kit.cli import app
from sm120kit.core.errors import ResourceUnavailable
from sm120kit.core.workspace import Workspace
from sm120kit.engines import Node
from sm120kit.images.image_records import Image
from sm120kit.recipes import configurations
from sm120kit.serving import _remote_nodes

SPARKS = "minimax-m2.7-nvfp4-2x-dgx-spark"


def test_printed_preparation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that never planned this server."""
    root = synthetic_hosts.build("gb10-ready", tmp_path / "host")
    model = folder(tmp_path / "model", MINIMAX, NVFP4)
    monkeypatch.chdir(root)  # without images.json, the default of --index
    state, other = tmp_path / "state", tmp_path / "other"
    options = ["--root", str(root), "--model", str(model), "--state", str(state), "--interface", "eth0", "--print"]
    result = CliRunner().invoke(app, ["serve", SPARKS, "--nodes", "10.0.0.1,10.0.0.2", *options])
    assert result.exit_code == 0, result.output
    _, worker = result.stdout.split("\n\n")
    _, doctor, *install, run = worker.splitlines()
    assert doctor == f"sm120kit doctor {SPARKS}" and run.startswith("docker run ")
    for line in install:
        subprocess.run(shlex.split(line.replace(str(state), str(other))), check=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (other / "caches").rglob("*") if path.is_dir()}
    assert (other / "caches").stat().st_mode & 0o777 == 0o700
    assert [modes[name] for name in ("cache", "triton")] == [0o777, 0o777]


MEET = """
import datetime, os, sys
import torch.distributed as group
head, port, rank, size = sys.argv[1:]
group.init_process_group(
    "gloo", init_method=f"tcp://{head}:{port}", rank=int(rank), world_size=int(size), timeout=datetime.timedelta(seconds=60)
)
import torch
ranks = torch.tensor([2.0 ** int(rank)])
group.all_reduce(ranks)
group.destroy_process_group()
print(ranks.item())
"""


def test_processes_meet_by_the_printed_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rendezvous of both engines, torch.distributed over TCP, on loopback."""
    pytest.importorskip("torch")
    port = free_port()
    for module in ("vllm", "sglang"):
        monkeypatch.setattr(f"sm120kit.engines.{module}.MASTER_PORT", port)
    configuration = configurations.load(SPARKS)
    engine = recipes.load_engine(configuration.engine)
    model = folder(tmp_path / "model", MINIMAX, NVFP4)
    image = Image("sha256:1", "c" * 64, "linux/arm64", (), {}, "1000", 1)
    running = []
    for rank in range(2):
        node = Node(rank, ("127.0.0.1", "127.0.0.2"), "lo")
        placement = serving.Placement([(0, "GB10")], 8000, Workspace(tmp_path / "s"), node=node)
        planned = serving.make_service(configuration, engine, image, image.id, model, placement)
        argv = planned.argv
        words = [argv[argv.index(option) + 1] for option in ("--master-addr", "--master-port", "--node-rank", "--nnodes")]
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", MEET, *words],
                env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **planned.variables},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["3.0", "3.0"]


def test_machine_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(_remote_nodes, "SHELL_SECONDS", 0.2)
    with pytest.raises(ResourceUnavailable, match=re.escape("192.0.2.7")) as error:
        _remote_nodes.RemoteMachine("192.0.2.7").memory()
    assert "ssh 192.0.2.7" in error.value.hint
