"""Compare both ways to an engine's image: layers written by sm120kit, and the Dockerfiles built by a daemon.

    python tests/bench/image_routes.py [RECIPE] [DIRECTORY]

Both builds are the command of users with `--kernels none` and all checks, from the same fetched wheels and the same base, in
the order layers, Docker, layers, so that a change of the machine's load shows. Before each, what the one before wrote is
removed. Needs root, docker.io, and 45 GB of disk below DIRECTORY (default: TMPDIR) for vllm-0.19.1, the default. With a
directory that has a `state` of earlier runs, its downloads are used, and the image of the last build stays in it. Prints a
table; asserts nothing. docs/measurements/builds.md has the figures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import containers  # noqa: E402

from sm120kit import sources  # noqa: E402
from sm120kit.core.data_roots import data_root  # noqa: E402
from sm120kit.core.workspace import Workspace  # noqa: E402
from sm120kit.images import context  # noqa: E402
from sm120kit.recipes import bases, load_engine, lockfile  # noqa: E402
from sm120kit.sources import debian  # noqa: E402

WRITTEN = ("oci", "oci-unpacked", "images", "bases", "cache/layers", "cache/contents", "cache/bytecode.sqlite*")
"""What a build of an image writes below the state directory."""


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "vllm-0.19.1"
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        directory = Path(sys.argv[2] if len(sys.argv) > 2 else scratch)
        compare(recipe, directory / "state", directory / "docker-state", directory / "d")


def compare(recipe: str, state: Path, of_docker: Path, daemon: Path) -> None:
    """Measure both routes. The second state directory has the same downloads as hard links."""
    fetch(recipe, state)
    print(f"{recipe}: {os.cpu_count()} cores")
    print(f"{'':10}{'load':>6}{'seconds':>10}{'image':>9}{'rest':>9}{'CPU-s':>9}{'MB sm120kit':>13}", flush=True)
    first = layers(recipe, state)
    shutil.rmtree(of_docker, ignore_errors=True)
    remove(state)
    subprocess.run(["cp", "-al", state, of_docker], check=True)
    with containers.dockerd(daemon) as running:
        environment = {"SM120KIT_STATE": str(of_docker), "DOCKER_HOST": running.socket}
        docker = measure("Docker", ["build", recipe, "--kernels", "none", "--builder", "docker"], environment)
    shutil.rmtree(of_docker)
    second = layers(recipe, state)
    for name, index in (("all, checks included", 0), ("layers against the image of Docker", 1)):
        ratios = [row[index] / docker[index] for row in (first, second)]
        print(f"{name}: {ratios[0]:.3f} before, {ratios[1]:.3f} after")
    ratios = [row[1] / docker[0] for row in (first, second)]
    print(f"layers against all of Docker: {ratios[0]:.3f} before, {ratios[1]:.3f} after")


def fetch(recipe: str, state: Path) -> None:
    """Fetch all wheels and the packages of the base, and build the FlashInfer wheel."""
    environment = {**os.environ, "SM120KIT_STATE": str(state)}
    argv = [sys.executable, "-m", "sm120kit", "build", recipe, "--kernels", "none", "--to", "pack", "--quiet"]
    with tempfile.TemporaryDirectory() as output:
        subprocess.run([*argv, "--output", output], env=environment, check=True, stdout=subprocess.DEVNULL)
    closure = lockfile.read(data_root() / "recipes" / "engines" / f"{recipe}.lock.json").closures[0]
    workspace, origin = Workspace.open(state), sources.Origin()
    sources.wheelhouse((*closure.wheels, context.INSTALLER), workspace, origin)
    debian.fetch(bases.read_lock(load_engine(recipe).base or "", os.uname().machine), workspace, origin)


def remove(state: Path) -> None:
    """Remove the images of a state directory."""
    for path in [path for pattern in WRITTEN for path in state.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["sync"], check=True)


def layers(recipe: str, state: Path) -> tuple[float, float]:
    remove(state)
    argv = ["build", recipe, "--kernels", "none"]
    return measure("layers", argv, {"SM120KIT_STATE": str(state), "DOCKER_HOST": f"unix://{state}/none"})


def measure(case: str, arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Run sm120kit, print what it took, and return the seconds of all and of the image. The rest are base and checks.

    CPU seconds are those of sm120kit and its programs, without the daemon's. The memory is that of sm120kit itself.
    """
    load, started = os.getloadavg()[0], time.monotonic()
    argv = [sys.executable, "-m", "sm120kit", *arguments]
    with tempfile.TemporaryDirectory() as output, tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen([*argv, "--output", output], env=os.environ | environment, stdout=log, stderr=log)
        peak = [0]
        threading.Thread(target=watch, args=(child.pid, peak), daemon=True).start()
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - started
        log.seek(0)
        text = log.read()
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, text
    image = float(re.findall(r"in ([\d.]+) s: sha256:", text)[-1])
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{case:10}{load:6.1f}{seconds:10.1f}{image:9.1f}{seconds - image:9.1f}{cpu:9.1f}{peak[0]:13.0f}", flush=True)
    return seconds, image


def watch(pid: int, peak: list[int]) -> None:
    """Record the largest resident memory of a process, in MB, until it ends."""
    while True:
        try:
            peak[0] = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) // 1000
        except (OSError, IndexError):
            return
        time.sleep(0.2)


if __name__ == "__main__":
    main()
