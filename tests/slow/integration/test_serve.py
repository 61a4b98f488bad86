"""``sm120kit serve`` from nothing to an answer: a tiny model from a Hub of this test, served on the CPU in a real container.

Replaced are the GPU (an nvidia-smi), the engine of the recipe (``transformers serve``), and what this daemon lacks: a network
and GPUs, in a docker program that calls the real one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import containers
import layout_images
import pytest
from cpu_server import CONFIGURATION, MODEL, QUIET, free_port, tiny_model
from model_hub import ModelHub, model_hub

from sm120kit.bench import bench_environment
from sm120kit.core.errors import BadInput
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.image_records import Check, CheckResult, VerifiedImage
from sm120kit.images.oci import LAYER, Layout
from sm120kit.sources.debian import ARCHITECTURES

pytest.importorskip("transformers", reason="the extra serve is not installed")
pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

ROOT = Path(__file__).parents[3]
TOKEN = "hf_hunter2hunter2"
SERVE = f"""cache="$HF_HOME/hub/models--{MODEL.replace("/", "--")}" # with the branch, which is not mounted
commit=$(ls /model/snapshots) && mkdir -p "$cache/refs" "$cache/snapshots" && printf %s "$commit" > "$cache/refs/main"
cp -rL /model/snapshots/. "$cache/snapshots"
exec {sys.executable} -m transformers.cli.transformers serve {MODEL} --host 127.0.0.1 --port "$PORT" --device cpu"""
DOCKER = """#!{python}
import os, sys

argv = sys.argv[1:]
if argv[0] == "run":
    for option in ("--gpus", "--publish"):
        at = argv.index(option)
        value = argv[at + 1]
        del argv[at : at + 2]
    mounts = [word for path in {paths!r} for word in ("--mount", f"type=bind,source={{path}},target={{path}},readonly")]
    argv[1:1] = ["--network=host", "--env", "PORT=" + value.split(":")[-2], *mounts]
os.execv({docker!r}, ["docker", *argv])
"""
NVIDIA_SMI = """#!/bin/sh
[ "$DRIVER" != absent ] || exit 9
case "$*" in
-q*)
    echo '<nvidia_smi_log><driver_version>580.126.09</driver_version>'
    for bus in 01 41; do
        echo "<gpu id='00000000:$bus:00.0'><product_name>NVIDIA RTX PRO 6000 Blackwell Workstation Edition</product_name>"
        echo '<fb_memory_usage><total>97887 MiB</total><used>2 MiB</used></fb_memory_usage></gpu>'
    done
    echo '</nvidia_smi_log>' ;;
--query-gpu=pci.bus_id,compute_cap*) printf '00000000:%s:00.0, 12.0\\n' 01 41 ;;
*) exit 1 ;;
esac
"""
"""Two GPUs; exits as without a driver with DRIVER=absent."""


@dataclass(frozen=True)
class Host:
    """A machine with programs nvidia-smi and docker, a checked image and a Hub."""

    directory: Path
    environment: dict[str, str]
    hub: ModelHub

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "sm120kit", *arguments]
        env = self.environment | variables
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.directory, env=env, text=True, stdout=pipe, stderr=pipe)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command, in which no token may be."""
        child = self.start(*arguments, **variables)
        out, err = child.communicate(timeout=300)
        assert TOKEN not in out + err and "Traceback" not in err, err
        return child.returncode, out, err

    def refused(self, code: int, *arguments: str, message: str, **variables: str) -> None:
        """A command that fails before anything is downloaded or started."""
        sent = dict(self.hub.sent)
        returned, _, err = self.run(*arguments, **variables)
        assert returned == code and message in err and "hint: " in err, err
        assert self.hub.sent == sent


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    data, programs, state = tmp_path / "data", tmp_path / "bin", Workspace.open(tmp_path / "state")
    engines = data / "recipes" / "engines"
    engines.mkdir(parents=True)
    for directory, source in ((data, ROOT), (data / "recipes", ROOT / "recipes"), (engines, ROOT / "recipes" / "engines")):
        for path in source.iterdir():
            if not (directory / path.name).exists() and not path.name.startswith("."):
                (directory / path.name).symlink_to(path)
    recipe = engines / "vllm-0.19.1.toml"
    text = recipe.read_text()
    recipe.unlink()
    (line,) = (line for line in text.splitlines() if line.startswith("serve = "))
    recipe.write_text(text.replace(line, f"serve = {json.dumps(['/bin/sh', '-c', SERVE, 'sh'])}"))
    environment = "\n".join(f'{name} = "{value}"' for name, value in (QUIET | {"HF_HOME": "/root/.cache/huggingface"}).items())
    for name, gpus in (("tiny", 1), ("tiny-on-two", 2)):
        content = CONFIGURATION.format(name=name, gpus=gpus, model=MODEL, environment=environment)
        (tmp_path / f"{name}.toml").write_text(content)
    programs.mkdir()
    paths = ["/usr", *sorted({prefix for prefix in (sys.prefix, sys.base_prefix) if not prefix.startswith("/usr")})]
    (programs / "docker").write_text(DOCKER.format(python=sys.executable, paths=paths, docker=shutil.which("docker")))
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    for program in programs.iterdir():
        program.chmod(0o755)
    with (
        model_hub(MODEL, tiny_model(tmp_path / "made"), TOKEN) as hub,
        containers.dockerd() as daemon,
    ):
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        add_image(tmp_path, state)
        variables = {
            "DOCKER_HOST": daemon.socket,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": TOKEN,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "SM120KIT_DATA": str(data),
            "SM120KIT_STATE": str(state.root),
        }
        try:
            yield Host(tmp_path, os.environ | variables, hub)
        finally:
            left = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True).stdout
            subprocess.run(["docker", "rm", "--force", *left.split()], capture_output=True, check=False)


def add_image(directory: Path, workspace: Workspace) -> None:
    """An image of the engine with only the directories that programs in ``/usr`` require, and the record of its checks."""
    root = directory / "root"
    for name in ("tmp", "usr", "etc", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    subprocess.run(["tar", "-C", root, "-cf", directory / "image.tar", "."], check=True)
    labels = layout_images.labels("4" * 64)
    name, layout = labels["sm120kit.reference"], Layout(workspace.root / "oci")
    config = {"os": "linux", "architecture": ARCHITECTURES[platform.machine()], "config": {"Labels": labels}}
    manifest = layout.add_image([layout.add_blob((directory / "image.tar").read_bytes(), LAYER)], config).digest
    layout.tag(manifest, name)
    image = layout.image(manifest)
    passed = (Check("base", "user", CheckResult.PASSED),)
    write_record(checks.record_path(workspace, image), VerifiedImage(image, name, checks.suite_digest("vllm"), passed, {}))


def test_serve_from_nothing_to_an_answer(host: Host) -> None:
    port, url = str(port_number := free_port()), f"http://127.0.0.1:{port_number}"
    serve = ("serve", "tiny.toml", "--port", port)
    host.refused(10, "serve", "tinny", message="no configuration")
    host.refused(10, *serve, "--state", str(host.directory / "empty"), message="there is no image of vllm-0.19.1 on this host")
    host.refused(41, *serve, DRIVER="absent", message="this host has 0 SM12x GPUs")
    host.refused(10, *serve, "--revision", "v9", message=f"{MODEL} has no revision v9")
    host.refused(20, *serve, HF_TOKEN="hf_wrong", message="status 401")
    host.refused(40, *serve, "--listen", "0.0.0.0", message="requires an API key")

    stored = Workspace.open(host.directory / "stored")
    layout_images.add_image(stored, (1,))
    elsewhere = ("--state", str(stored.root))
    host.refused(60, *serve, *elsewhere, message="daemon", DOCKER_HOST="unix:///nonexistent")

    host.hub.slow = "model.safetensors"
    child = host.start(*serve)
    assert host.hub.halfway.wait(120)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    host.hub.slow = ""
    code, out, err = host.run(*serve)
    assert code == 0, err
    assert host.hub.sent["model.safetensors"] == 2 and "healthy after" in err and "first answer after" in err
    assert out.startswith(f"curl {url}/v1/chat/completions") and f'"model": "{MODEL}"' in out

    code, out, err = host.run("ps", "--json")
    (server,) = json.loads(out)
    assert (server["name"], server["gpus"], server["url"], server["running"]) == (f"sm120kit-tiny-{port}", "0", url, True)
    assert json.loads(Path(server["record"]).read_text())["ending"] == "", "serve has ended, and not the server"
    host.refused(41, *serve, message=f"127.0.0.1:{port} is in use")
    two = ("serve", "tiny-on-two.toml", "--port", str(free_port()))
    host.refused(41, *two, message=f"1 of 2 are free, others are used by {server['name']}")
    code, out, err = host.run("logs", "tiny")
    assert code == 0 and "POST /v1/chat/completions" in out and "GET /while-followed" not in out, (out, err)
    host.refused(10, "stop", "other", message="no server is named other")

    interrupted, followed = (host.start("logs", "-f", "tiny") for _ in range(2))
    for child in (interrupted, followed):
        assert child.stdout and any("POST /v1/chat/completions" in line for line in child.stdout)
    with pytest.raises(urllib.error.HTTPError, match="404"), urllib.request.urlopen(f"{url}/while-followed", timeout=60):
        pass
    assert interrupted.stdout and any("GET /while-followed" in line for line in interrupted.stdout)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(60) == 0
    code, out, err = host.run("stop")
    assert code == 0 and f"stopped: {server['name']}" in err
    out, err = followed.communicate(timeout=60)
    assert followed.returncode == 0 and "error" not in err and "GET /while-followed" in out, "until the server exits"
    assert host.run("ps", "--json")[:2] == (0, "[]\n")
    record = json.loads(Path(server["record"]).read_text())
    assert record["ending"] == "stopped" and record["healthy_seconds"] < record["seconds"]
    assert "POST /v1/chat/completions" in Path(record["log"]).read_text(), "the log until the end"
    kept = b"".join(path.read_bytes() for path in (host.directory / "state").rglob("*") if path.is_file())
    assert TOKEN.encode() not in kept


def test_serve_that_is_killed_leaves_a_server_that_can_be_stopped(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL between the start of the container and its health: bench takes the record, and stop completes it."""
    monkeypatch.setenv("DOCKER_HOST", host.environment["DOCKER_HOST"])
    url = f"http://127.0.0.1:{(port := free_port())}"
    child = host.start("serve", "tiny.toml", "--port", str(port))
    listing = ("docker", "ps", "--quiet", "--filter=label=sm120kit.record")
    deadline = time.monotonic() + 240
    while not subprocess.run(listing, capture_output=True, check=True).stdout:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()
    child.communicate()
    (server,) = json.loads(host.run("ps", "--json")[1])
    path = Path(server["record"])
    record = json.loads(path.read_text())
    assert server["running"] and (record["url"], record["ending"], record["healthy_seconds"]) == (url, "", None)
    assert bench_environment.served_by_record(path, url).configuration == "tiny"
    while "Uvicorn running" not in host.run("logs")[1]:
        assert time.monotonic() < deadline
    assert host.run("stop")[0] == 0
    record = json.loads(path.read_text())
    assert record["ending"] == "stopped" and "Uvicorn running" in Path(record["log"]).read_text()
    with pytest.raises(BadInput, match="does not run: stopped"):
        bench_environment.served_by_record(path, url)


def test_two_servers_beside_each_other(host: Host) -> None:
    """On different GPUs: one on a GPU that is named."""
    ports = [str(free_port()) for _ in range(2)]
    host.refused(41, "serve", "tiny.toml", "--port", ports[0], "--gpus", "2", message="cannot use GPU 2")
    code, _, err = host.run("serve", "tiny.toml", "--port", ports[0], "--gpus", "1")
    assert code == 0, err
    host.refused(41, "serve", "tiny.toml", "--port", ports[1], "--gpus", "1", message=f"are used by sm120kit-tiny-{ports[0]}")
    assert host.run("serve", "tiny.toml", "--port", ports[1])[0] == 0
    servers = {server["url"]: server for server in json.loads(host.run("ps", "--json")[1])}
    assert {url: server["gpus"] for url, server in servers.items()} == {
        f"http://127.0.0.1:{ports[0]}": "1",
        f"http://127.0.0.1:{ports[1]}": "0",
    }
    host.refused(41, "serve", "tiny.toml", "--port", str(free_port()), message="0 of 2 are free")
    assert host.run("stop", f"sm120kit-tiny-{ports[1]}")[0] == 0
    (first,) = json.loads(host.run("ps", "--json")[1])
    assert first["url"].endswith(ports[0]) and first["running"], "the other server runs on"
    assert host.run("stop", first["name"])[0] == 0
