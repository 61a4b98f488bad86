"""Launch a real model from start to stop, as a process and in a container."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import containers
import pytest
from cpu_server import MODEL, QUIET, command, free_port, server_environment, tiny_model

from sm120kit import recipes, serving
from sm120kit.core.workspace import Workspace
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.images.published_images import Source
from sm120kit.recipes import configurations
from sm120kit.serving import Run, checkpoint, launch
from sm120kit.serving._container import Mount
from sm120kit.serving.launch import LaunchOptions

pytest.importorskip("transformers", reason="the extra serve is not installed")

NAME = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
LABELS = {"sm120kit.recipe": "vllm-0.19.1"}
IMAGE = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), LABELS, "", 1), "some/image:tag", "", (), {})
SERVE = f"""echo cached > /root/.cache/cached
grep -E '^(CapBnd|NoNewPrivs)' /proc/self/status
touch /escaped /usr/escaped /model/escaped
touch /tmp/fits /root/fits && echo scratch is writable
exec {sys.executable} -m transformers.cli.transformers serve "$1" --host 127.0.0.1 --port "$PORT" --device cpu"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "home")


def test_read_a_checkpoint_saved_by_transformers(model: Path) -> None:
    facts = checkpoint.read(model)
    assert (facts.architectures, facts.quantization, facts.mtp, facts.context) == (("Qwen3ForCausalLM",), "none", (), 4096)
    named = configurations.load(NAME)
    unrecorded = named.model.model_copy(update={"repository": MODEL})
    configuration = named.model_copy(update={"arguments": (), "model": unrecorded})
    fit = serving.check_fit(configuration, facts, [serving.Device(0, "a GPU", 1 << 30)])
    assert fit.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2 and fit.weight_bytes == facts.weight_bytes


def answer_and_stop(service: serving.Service, argv: tuple[str, ...], model: str, tmp_path: Path) -> tuple[Run, str]:
    """Launch, request 16 tokens when the server is healthy, and stop it. The record and the log."""
    answers: list[dict[str, object]] = []

    progress_lines: list[str] = []
    prepared = launch.PreparedLaunch(
        configurations.load(NAME),
        IMAGE,
        None,
        None,
        service,
        (),
        Source(tmp_path / "none"),  # type: ignore[arg-type]
    )
    options = LaunchOptions(Workspace(tmp_path / "state"), 240, lambda seconds, line: progress_lines.append(line))
    run = launch.serve(prepared, argv, options, lambda run: answers.append(request_tokens(service.url, model)))
    log = Path(run.log).read_text()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [16], log  # type: ignore[index]
    assert run.ending == "stopped" and run.healthy_seconds and run.seconds and run.seconds >= run.healthy_seconds, log
    (record,) = (tmp_path / "state" / "runs").glob("*.json")
    assert json.loads(record.read_text())["ending"] == "stopped"
    assert serving.port_is_free(service.port) and any(progress_lines), "lines of the log were shown while it loaded"
    return run, log


def request_tokens(url: str, model: str) -> dict[str, object]:
    """A chat completion of 16 tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": "a few words"}], "max_tokens": 16}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
        return dict(json.load(response))


def test_launch_a_model_as_a_process(model: Path, tmp_path: Path) -> None:
    home, port = model.parents[3], free_port()
    mounts = (Mount(model, "/model", True),)
    service = serving.Service("s", "i", (), server_environment(home), mounts, (0,), 1, False, {}, port)
    run, log = answer_and_stop(service, command(MODEL, port), MODEL, tmp_path)
    assert run.exit_code == -signal.SIGTERM and "Application shutdown complete" in log, "a regular shutdown"
    assert run.environment == tuple(sorted(server_environment(home)))


@pytest.mark.containers
@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_launch_a_model_in_a_container(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    environment = QUIET | {"PORT": str(port), "HF_HOME": "/root/.cache/huggingface"}
    configuration = configurations.load(NAME).model_copy(update={"arguments": (), "environment": environment})
    engine = recipes.load_engine("vllm-0.19.1").model_copy(update={"serve": ("/bin/sh", "-c", SERVE, "sh")})
    with containers.dockerd() as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        image = empty_image(tmp_path)
        placement = serving.Placement([(0, "a GPU")], port, Workspace(tmp_path / "state"))
        service = serving.make_service(configuration, engine, IMAGE.image, image, model, placement)
        # The image is empty: this test's Python is mounted read-only. There is no GPU, and only the host's network.
        (cache, *_) = (mount.source for mount in service.mounts if not mount.read_only)
        python = {Path("/usr"), *(Path(prefix) for prefix in (sys.prefix, sys.base_prefix) if not prefix.startswith("/usr"))}
        service = replace(service, mounts=(*service.mounts, *(Mount(path, str(path), True) for path in sorted(python))))
        argv = serving.docker_run(service, values=False)
        index = argv.index("--gpus")
        argv = (*argv[:index], "--network=host", *argv[index + 2 :])
        run, log = answer_and_stop(service, argv, f"/model/snapshots/{model.name}", tmp_path)
        assert run.exit_code == 128 + signal.SIGTERM and "Application shutdown complete" in log
        assert run.model == str(model) and (cache / "cached").read_text() == "cached\n"
        assert f"CapBnd:\t{0:016x}\nNoNewPrivs:\t1\n" in log and "scratch is writable\n" in log
        for path in ("/escaped", "/usr/escaped", "/model/escaped"):
            assert f"cannot touch '{path}': Read-only file system" in log
        left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
        assert left.stdout == ""


def empty_image(directory: Path) -> str:
    """An image with only the folders and links that programs in the host's ``/usr`` require."""
    root = directory / "root"
    for name in ("tmp", "usr", "etc", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    subprocess.run(["tar", "-C", root, "-cf", directory / "image.tar", "."], check=True)
    done = subprocess.run(["docker", "import", directory / "image.tar"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
