"""Compare the build of an image by sm120kit with a Dockerfile that compiles inside: first build, repetition, new patch.

    python tests/bench/image_build.py [DIRECTORY]

Both have the same base, wheels, sdist, module (FP4 quantization, the smallest) and nvcc, and download nothing; both use the
same daemon, which the program starts. The new patch adds a comment to a header that the module's kernels include. Needs root,
docker.io, debootstrap, 6 GB of disk below DIRECTORY, and the extras cuda, torch and docker. Prints a table; asserts nothing.
docs/measurements/builds.md has the figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import containers  # noqa: E402
from small_flashinfer import PIP  # noqa: E402

from sm120kit import sources  # noqa: E402
from sm120kit.core.workspace import Workspace  # noqa: E402
from sm120kit.images import delivery  # noqa: E402

CLOSURE = ROOT / "tests" / "support" / "image_closure.json"
WITHOUT_CHECKS = ROOT / "tests" / "support" / "image_without_checks.py"
HEADER = "csrc/nv_internal/tensorrt_llm/kernels/quantization.cuh"
TINY = """
[groups.tiny]
summary = "the smallest module"
modules = ["fp4_quantization_120f"]
"""
NAIVE = """\
FROM base:test AS installed
COPY cuda/ /usr/local/cuda/
RUN cd /usr/local/cuda && ln -s lib lib64 && ln -s libcudart.so.13 lib/libcudart.so && mkdir lib/stubs \\
 && echo | g++ -shared -x c++ - -o lib/stubs/libcuda.so
COPY wheels/ /wheels/
RUN python3 -m venv --without-pip /opt/venv && PYTHONPATH=$(echo /wheels/pip-*.whl) /opt/venv/bin/python -m pip install \\
  --quiet --no-index --no-deps $(ls /wheels/*.whl | grep -v /pip-)
COPY flashinfer.tar.gz edit.sh /src/
RUN cd /src && tar -xzf flashinfer.tar.gz --strip-components=1 && sh edit.sh \\
 && PYTHONPATH=$(echo /wheels/pip-*.whl) /opt/venv/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation .
FROM installed
ENV CUDA_HOME=/usr/local/cuda FLASHINFER_CUDA_ARCH_LIST=12.0f PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/bin:/bin
RUN python -c "from flashinfer.jit.fp4_quantization import gen_fp4_quantization_sm120f_module as module; module().build(False)"
"""
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: sm120kit developers <dev@sm120kit.invalid>
Date: Sat, 21 Nov 2026 09:00:00 +0000
Subject: quantization: a comment

For a change in the series.

Applies-To: flashinfer >=0.6.6,<0.6.7
Upstream-Status: Inappropriate [for a measurement]
Origin: tests/bench/image_build.py
Matters-For: nobody
No-Effect-For: all
Probe: flags fp4_quantization_120f
Evidence: tests/bench/image_build.py
Drop-When: now

diff --git a/{path} b/{path}
index {before}..{after} 100644
--- a/{path}
+++ b/{path}
@@ -1,3 +1,4 @@
+// {text}
{lines}
"""


def main() -> None:
    parent = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as scratch:
        for line in measure(Path(scratch)):
            print(line, flush=True)


def measure(scratch: Path) -> list[str]:
    data, naive, sdist, downloads = prepare(scratch)
    with containers.dockerd(scratch / "d") as running:
        environment = {**os.environ, "DOCKER_HOST": running.socket, "SM120KIT_DATA": str(data), "CUDA_HOME": str(toolkit())}
        client = connect(running.socket)
        packed = containers.debian(scratch, "g++")
        base = json.loads(client.api.import_image_from_file(str(packed), repository="base", tag="test").splitlines()[-1])[
            "status"
        ]
        command = [
            str(WITHOUT_CHECKS),
            "flashinfer@0.6.6",
            "--kernels",
            "tiny",
            "--base",
            base,
            "--closure",
            str(CLOSURE),
            "--offline",
        ]
        state = scratch / "state"
        shutil.copytree(downloads, state / "downloads")

        def build_with_sm120kit() -> str:
            environment["SM120KIT_STATE"] = str(state)
            return output([sys.executable, *command, "--offline"], environment)

        def build_dockerfile() -> str:
            return str(client.images.build(path=str(naive), network_mode="none", rm=True)[0].id)

        rows = []
        before: dict[str, str] = {}
        for case in ("the first build", "nothing changed", "one patch changed"):
            if case == "one patch changed":
                add_patch(data, naive, sdist)
            row = [case]
            for name, build in (("sm120kit", build_with_sm120kit), ("naive", build_dockerfile)):
                seconds, image = timed(build)
                row.append(f"{seconds:7.1f} s  {new_bytes(client, image, before.get(name)) / 2**20:6.0f} MiB new")
                before[name] = image
            rows.append("   ".join(row))
        return [
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "                   sm120kit              naive",
            *rows,
        ]


def prepare(scratch: Path) -> tuple[Path, Path, Path, Path]:
    """Recipes with the tiny group, the build context of the Dockerfile, the sdist, and the downloads for sm120kit."""
    data = scratch / "data"
    for name in ("recipes", "patches", "cutlass_overrides", "image_programs"):
        shutil.copytree(ROOT / name, data / name)
    with (data / "recipes" / "engines" / "flashinfer-0.6.6.toml").open("a") as recipe:
        recipe.write(TINY)
    (data / "recipes" / "engines" / "flashinfer-0.6.6.lock.json").unlink()
    state = scratch / "fetched"
    environment = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    output([sys.executable, "-m", "sm120kit", "build", "flashinfer@0.6.6", "--to", "fetch"], environment)
    wheels = (*delivery.read_closure(CLOSURE).wheels, PIP)
    naive = scratch / "naive"
    (naive / "wheels").mkdir(parents=True)
    for wheel in sources.wheelhouse(wheels, Workspace.open(state), sources.Origin()):
        shutil.copyfile(wheel, naive / "wheels" / wheel.name)
    (sdist,) = state.rglob("flashinfer_python-0.6.6.tar.gz")
    shutil.copyfile(sdist, naive / "flashinfer.tar.gz")
    shutil.copytree(
        toolkit(), naive / "cuda", ignore=shutil.ignore_patterns("libcublas*", "libnvrtc*", "libcurand*", "libnvblas*")
    )
    (naive / "edit.sh").write_text(edit("original"))
    (naive / "Dockerfile").write_text(NAIVE)
    shutil.move(state / "downloads", scratch / "downloads")
    shutil.rmtree(state)
    return data, naive, naive / "flashinfer.tar.gz", scratch / "downloads"


def toolkit() -> Path:
    """The CUDA compiler of this environment's wheels."""
    import nvidia

    homes = (Path(directory) / "cu13" for directory in nvidia.__path__)
    (home,) = (home for home in homes if (home / "bin" / "nvcc").is_file())
    return home


def edit(text: str) -> str:
    return f"sed -i '1i // {text}' {HEADER}\n"


def add_patch(data: Path, naive: Path, sdist: Path) -> None:
    """Add a patch to the series that adds a line to the header, and the same with sed to the Dockerfile."""
    import tarfile

    with tarfile.open(sdist) as archive:
        (member,) = (member for member in archive if member.name.endswith(f"/{HEADER}"))
        file = archive.extractfile(member)
        assert file is not None
        content = file.read()
    text = "changed"
    versions = (content, f"// {text}\n".encode() + content)
    ids = [hashlib.sha1(b"blob %d\0" % len(version) + version).hexdigest() for version in versions]
    lines = "\n".join(f" {line}" for line in content.decode().splitlines()[:3])
    patch = PATCH.format(path=HEADER, before=ids[0], after=ids[1], text=text, lines=lines)
    (data / "patches" / "flashinfer" / "comment.patch").write_text(patch)
    with (data / "patches" / "flashinfer" / "series").open("a") as series:
        series.write("comment\n")
    (naive / "edit.sh").write_text(edit(text))


def timed(build: Callable[[], str]) -> tuple[float, str]:
    started = time.monotonic()
    image = build()
    return time.monotonic() - started, image


def output(argv: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout.strip()


def connect(socket: str) -> Any:
    import docker

    return docker.DockerClient(base_url=socket, timeout=3600)


def new_bytes(client: Any, image: str, before: str | None) -> int:
    """Unpacked bytes of the layers that ``before`` does not have, which a host with ``before`` has to pull."""
    present = set(client.images.get(before).attrs["RootFS"]["Layers"]) if before else set()
    layers = client.images.get(image).attrs["RootFS"]["Layers"]
    sizes = [step["Size"] for step in reversed(client.api.history(image)) if step["Size"]]
    assert len(sizes) == len(layers), "a layer without bytes, or a step without layer"
    return sum(size for layer, size in zip(layers, sizes, strict=True) if layer not in present)


if __name__ == "__main__":
    main()
