"""A real model from start to stop through launch's own waiting, health and record code: as a process, and in a container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import containers
import pytest
from cpu_server import MODEL, QUIET, command, free_port, surroundings, tiny_model

from sm120kit import checkpoint, launch, launching, recipe
from sm120kit.launch.service import Mount
from sm120kit.recipe import configuration
from sm120kit.records import Image, Run, VerifiedImage
from sm120kit.workspace import Workspace

pytest.importorskip("transformers", reason="the extra serve is not installed")

NAME = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
LABELS = {"sm120kit.recipe": "vllm-0.19.1"}
IMAGE = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), LABELS, "", 1), "some/image:tag", "", (), {})
SERVE = f"""echo kept > /root/.cache/kept
exec {sys.executable} -m transformers.cli.transformers serve "$1" --host 127.0.0.1 --port "$PORT" --device cpu"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "home")


def test_a_checkpoint_that_its_own_library_saved(model: Path) -> None:
    found = checkpoint.read(model)
    assert (found.architecture, found.quantization, found.mtp, found.context) == ("Qwen3ForCausalLM", "none", (), 4096)
    assert found.bytes_by_dtype == {"BF16": found.weight_bytes} and len(found.bf16) == found.tensors
    assert found.attention == checkpoint.Attention(layers=2, kv_heads=2, head_dim=64)
    wanted = configuration.load(NAME).model_copy(update={"arguments": ()})
    fit = launch.judge(wanted, IMAGE, found, [launch.Device(0, "a GPU", 1 << 30)])
    assert fit.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2 and fit.weight_bytes == found.weight_bytes


def answered_and_stopped(one: launch.Service, argv: tuple[str, ...], model: str, tmp_path: Path) -> tuple[Run, str]:
    """Launch, ask for 16 tokens when it is said to serve, and stop it as Ctrl-C does. The record and the log."""
    answers: list[dict[str, object]] = []

    def tell(line: str) -> None:
        if line.startswith("serving"):
            answers.append(ask(one.url, model))
            os.kill(os.getpid(), signal.SIGINT)

    seen: list[str] = []
    progress: Callable[[float, str], None] = lambda seconds, line: seen.append(line)  # noqa: E731
    wanted, workspace = configuration.load(NAME), Workspace(tmp_path / "state")
    kept = launching.serve(wanted, IMAGE, one, argv, workspace, wait_seconds=240, tell=tell, progress=progress)
    log = Path(kept.log).read_text()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [16], log  # type: ignore[index]
    assert kept.ending == "stopped" and kept.healthy_seconds and kept.seconds and kept.seconds >= kept.healthy_seconds, log
    (record,) = (tmp_path / "state" / "runs").glob("*.json")
    assert json.loads(record.read_text())["ending"] == "stopped"
    assert launch.port_is_free(one.port) and any(seen), "what it said while it loaded was shown"
    return kept, log


def ask(url: str, model: str) -> dict[str, object]:
    """A chat completion of 16 tokens."""
    asked = {"model": model, "messages": [{"role": "user", "content": "a few words"}], "max_tokens": 16}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        return dict(json.load(answer))


def test_as_a_process(model: Path, tmp_path: Path) -> None:
    home, port = model.parents[3], free_port()
    one = launch.Service("s", "i", (), surroundings(home), (Mount(model, "/model", True),), (0,), 1, False, {}, port)
    kept, log = answered_and_stopped(one, command(MODEL, port), MODEL, tmp_path)
    assert kept.exit_code == -signal.SIGTERM and "Application shutdown complete" in log, "it ended as it was asked to"
    assert kept.environment == tuple(sorted(surroundings(home)))


@pytest.mark.containers
@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_in_a_container(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    environment = QUIET | {"PORT": str(port), "HF_HOME": "/root/.cache/huggingface"}
    wanted = configuration.load(NAME).model_copy(update={"arguments": (), "environment": environment})
    engine = recipe.load_engine("vllm-0.19.1").model_copy(update={"serve": ("/bin/sh", "-c", SERVE, "sh")})
    with containers.dockerd(Path(f"/tmp/sm120kit-model-{os.getpid()}")) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        image = empty_image(tmp_path)
        one = launch.make(wanted, engine, IMAGE, image, model, [(0, "a GPU")], Workspace(tmp_path / "state"), port)
        # The image is empty: the Python that runs this test serves, read-only. There is no GPU, and no network but the host's.
        borrowed = {Path("/usr"), *(Path(place) for place in (sys.prefix, sys.base_prefix) if not place.startswith("/usr"))}
        one = replace(one, mounts=(*one.mounts, *(Mount(place, str(place), True) for place in sorted(borrowed))))
        argv = launch.docker_run(one, values=False)
        at = argv.index("--gpus")
        argv = (*argv[:at], "--network=host", *argv[at + 2 :])
        kept, log = answered_and_stopped(one, argv, f"/model/snapshots/{model.name}", tmp_path)
        assert kept.exit_code == 128 + signal.SIGTERM and "Application shutdown complete" in log
        assert kept.model == str(model.parents[1]) and (one.mounts[1].source / "kept").read_text() == "kept\n"
        left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
        assert left.stdout == ""


def empty_image(place: Path) -> str:
    """An image with nothing in it but the folders and links that programs of the host's ``/usr`` expect."""
    root = place / "root"
    for name in ("tmp", "usr", "etc", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    subprocess.run(["tar", "-C", root, "-cf", place / "image.tar", "."], check=True)
    done = subprocess.run(["docker", "import", place / "image.tar"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
