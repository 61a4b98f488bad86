"""The image of an engine starts what recipe and lock define, and without the engine it fails its checks.

The engine is a substitute: two small wheels, and Python's web server as the serve command. Images of real engines take
gigabytes and are built by hand, see docs/measurements/builds.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import containers
import pytest
from small_checked import CLOSURE
from small_image import ROOT, ImageHost, added_to_layout

from sm120kit.core import toolchain
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import NotFound
from sm120kit.core.record_files import record_json
from sm120kit.core.records import Arch
from sm120kit.images.oci import Layout

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

RECIPE = """
edition = 1
name = "vllm-0.0.1"
engine = "vllm"
version = "0.0.1"
summary = "a substitute"
state = "resolved"
archs = ["sm_120f"]
flashinfer = "flashinfer-0.6.6"
kernels = "tiny"
serve = ["python", "-m", "http.server", "--directory", "/home/sm120kit"]
built = [{ what = "flashinfer-python", reason = "patched" }]
upstream = []

[environment]
python = "3.11"
platforms = ["manylinux_2_35_x86_64"]
requires = ["vllm==0.0.1"]

[env]
GREETING = 'costs $5, "all" in'
"""


@pytest.fixture(scope="module")
def engine(image_host: ImageHost, tmp_path_factory: pytest.TempPathFactory) -> ImageHost:
    """The same daemon and finished wheel, and a locked recipe with a closure of two wheels."""
    data = tmp_path_factory.mktemp("engine")
    shutil.copytree(image_host.data, data, dirs_exist_ok=True)
    recipes = data / "recipes" / "engines"
    (recipes / "vllm-0.0.1.toml").write_text(RECIPE)
    for name in ("flashinfer-0.6.6", "vllm-0.19.1"):
        shutil.copyfile(ROOT / "recipes" / "engines" / f"{name}.lock.json", recipes / f"{name}.lock.json")
    seed = json.loads((recipes / "vllm-0.19.1.lock.json").read_text())
    wheels = [wheel for wheel in json.loads(CLOSURE.read_text())["wheels"] if wheel["name"] in ("idna", "nvidia-cuda-runtime")]
    (closure,) = seed["closures"]
    seed["closures"] = [closure | {"wheels": wheels, "sha256": digest_of(wheels)}]
    environment = seed["recipe"]["environment"]
    environment |= {"as_of": "", "requires": ["vllm==0.0.1"]}
    (recipes / "vllm-0.0.1.lock.json").write_text(record_json(seed))
    host = ImageHost(image_host.state, data, image_host.socket, tmp_path_factory.mktemp("folder"))
    host.run("recipe", "lock", "flashinfer@0.6.6", "--offline")
    host.run("recipe", "lock", "vllm@0.0.1", "--offline")
    return host


@pytest.fixture(scope="module")
def engine_image(engine: ImageHost) -> str:
    """The id of the image."""
    built = engine.without_checks("vllm@0.0.1", "--base", "debian-12").stdout.strip()
    return engine.run("image", "load", built).stdout.strip()


def test_build_without_a_base_stops_before_the_wheel(engine: ImageHost) -> None:
    done = engine.run("build", "vllm@0.0.1", code=10)
    assert "no base: neither vllm-0.0.1 nor --base names one" in done.stderr
    assert "sm120kit build vllm@0.0.1 --to pack" in done.stderr
    assert not (engine.directory / "wheelhouse").exists()
    assert engine.run("build", "vllm@0.0.1", "--to", "pack").stdout.strip().endswith(".whl")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("build", "vllm@0.0.1", "--base", "debian:12"), NotFound.exit_code, "no base 'debian:12'"),
        (("build", "vllm@0.0.1", "--base", "debian-12", "--to", "pack"), 2, "without --to"),
        (("build", "flashinfer@0.6.6", "--base", "debian-12"), 2, "an engine's image"),
    ],
)
def test_invalid_combinations_of_options(engine: ImageHost, arguments: tuple[object, ...], code: int, message: str) -> None:
    assert message in " ".join(engine.run(*arguments, code=code).stderr.replace("│", " ").split())


def test_labels_and_settings_are_those_of_recipe_and_lock(engine: ImageHost, engine_image: str) -> None:
    settings = engine.client.api.inspect_image(engine_image)["Config"]
    labels = settings["Labels"]
    checked = engine.run("recipe", "lock", "vllm@0.0.1", "--check", "--offline")
    assert f"build id {labels['sm120kit.build-id']}" in " ".join((checked.stdout + checked.stderr).split())
    assert labels["sm120kit.recipe"] == "vllm-0.0.1" and labels["sm120kit.kind"] == "vllm"
    assert labels["sm120kit.wheels"] == "idna==3.20,nvidia-cuda-runtime==13.0.96"
    assert labels["sm120kit.ours"].startswith("flashinfer-python==0.6.6+sm120kit.")
    serve = ["python", "-m", "http.server", "--directory", "/home/sm120kit"]
    assert settings["Entrypoint"] == ["python", "/opt/sm120kit/serve.py", *serve]
    assert 'GREETING=costs $5, "all" in' in settings["Env"] and "SM120KIT_PORT=8000" in settings["Env"]
    assert settings["User"] == "1000:1000"
    assert settings["Healthcheck"]["Test"] == ["CMD", "python", "/opt/sm120kit/healthy.py"]


def test_health_check_uses_the_port_of_the_engine_or_of_the_command_line(engine: ImageHost, engine_image: str) -> None:
    for arguments, port in (([], "8000"), (["8123", "--port", "8123"], "8123")):
        container = engine.client.containers.create(
            engine_image, entrypoint=["python", "-c", SERVE, port, *arguments], network_mode="none", cap_drop=["ALL"]
        )
        try:
            container.start()
            health = ["python", "/opt/sm120kit/healthy.py"]
            assert container.exec_run(health).exit_code == 1
            container.put_archive("/home/sm120kit", packed("health", b"ok"))
            assert container.exec_run(["sh", "-c", f"until {' '.join(health)} 2> /dev/null; do sleep 0.1; done"]).exit_code == 0
        finally:
            container.remove(force=True)


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (["--help"], 0, b"served by: python -m http.server"),
        (["/model", "--help=ModelConfig"], 0, b"served by: python -m http.server"),
        (["--version"], 0, b"\n"),
        (["/model"], 1, b"no NVIDIA driver"),
    ],
)
def test_container_without_a_gpu_prints_help_or_the_reason(
    engine: ImageHost, engine_image: str, arguments: list[str], code: int, output: bytes
) -> None:
    container = engine.client.containers.create(engine_image, arguments, network_mode="none", cap_drop=["ALL"])
    try:
        container.start()
        assert container.wait()["StatusCode"] == code and output in container.logs()
    finally:
        container.remove(force=True)


SERVE = "import sys; from http.server import *; HTTPServer(('', int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()"


def packed(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_libraries_of_cuda_13_load_by_name(engine: ImageHost, engine_image: str) -> None:
    program = "import ctypes; print(ctypes.CDLL('libcudart.so.13').cudaRuntimeGetVersion)"
    output = engine.client.containers.run(
        engine_image, ["-c", program], entrypoint=["python"], network_mode="none", remove=True
    )
    assert b"_FuncPtr" in output


def test_rebuilt_module_must_be_the_recorded_file_with_code_for_sm12x_only(
    engine: ImageHost, engine_image: str, tmp_path: Path
) -> None:
    tools = toolchain.find([Arch.SM_120F])
    source = tmp_path / "x.cu"
    source.write_text("__global__ void kernel(int* out) { *out = 1; }")
    libraries = {}
    for arch in ("sm_120f", "sm_90a"):
        library, target = tmp_path / f"{arch}.so", f"arch={arch.replace('sm', 'compute')},code={arch}"
        argv = [tools.cuda_home / "bin" / "nvcc", "-gencode", target, "-cudart", "none", "-Xcompiler", "-fPIC", "-shared"]
        subprocess.run([*argv, "-o", library, source], check=True)
        libraries[arch] = library.read_bytes()
    ours, other = libraries["sm_120f"], libraries["sm_90a"]
    assert rebuilt(engine, engine_image, ours, ours) == ("passed", "")
    assert rebuilt(engine, engine_image, ours + b" ", ours) == ("failed", "vllm/tiny.so is not the file that was built")
    assert rebuilt(engine, engine_image, other, other) == (
        "failed",
        "vllm/tiny.so: device code for sm_90a, which was not requested",
    )
    assert rebuilt(engine, engine_image, ours, b"") == ("failed", "vllm 0.0.1+sm120kit.abc records no replaced file")
    assert rebuilt(engine, engine_image, ours, None) == ("failed", "vllm 0.0.1+sm120kit.abc does not record its replaced files")


SITE = "/opt/venv/lib/python3.11/site-packages"


def rebuilt(engine: ImageHost, engine_image: str, library: bytes, recorded: bytes | None) -> tuple[str, str]:
    """Result and detail of the check ``rebuilt`` for an image with a module, and a wheel that records ``recorded`` if any."""
    container = engine.client.containers.create(engine_image)
    container.put_archive(SITE, packed("vllm/tiny.so", library))
    if recorded is not None:
        origin = {"replaced": {"vllm/tiny.so": {"here": hashlib.sha256(recorded).hexdigest()}} if recorded else {}}
        container.put_archive(SITE, packed("vllm-0.0.1+sm120kit.abc.dist-info/sm120kit.json", json.dumps(origin).encode()))
    config = engine.client.api.inspect_image(engine_image)["Config"]
    config["Labels"]["sm120kit.ours"] += ",vllm==0.0.1+sm120kit.abc"
    changed = container.commit(conf=config)
    container.remove()
    local = added_to_layout(changed, Layout(engine.state / "oci"))
    report = json.loads(engine.run("verify", "image", local, "--json", code=1).stdout)
    engine.client.images.remove(changed.id, noprune=True)
    (check,) = (check for check in report["checks"] if check["name"] == "rebuilt")
    return check["verdict"], check["detail"]


def test_image_without_the_engine_fails_and_is_not_tagged(engine: ImageHost, engine_image: str) -> None:
    before = engine.tags()
    done = engine.run("build", "vllm@0.0.1", "--base", "debian-12", "--json", code=1)
    report: dict[str, Any] = json.loads(done.stdout)
    verdicts = {f"{check['suite']}/{check['name']}": check["verdict"] for check in report["checks"]}
    assert verdicts["base/versions"] == verdicts["flashinfer/device_code"] == verdicts["engine/environment"] == "passed"
    assert verdicts["vllm/extensions"] == "failed" and report["verified"] is None and report["image"]["id"] == engine_image
    assert "built sm120kit/" not in done.stderr and engine.tags() == before
