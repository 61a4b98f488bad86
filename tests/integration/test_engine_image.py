"""The image of an engine: what the recipe and its lock say is what starts, and without the engine in it, it gets no name.

The engine is a stand-in: two small wheels and Python's own web server, which is served from and asked for its health. The image
of a real one takes gigabytes and is made by hand, see docs/images.md.
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
from small_image import CLOSURE, ROOT, Place

from sm120kit import toolchain
from sm120kit.records import Arch
from sm120kit.workspace import digest_of, record_json

pytestmark = [
    pytest.mark.containers,
    pytest.mark.compiler,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

RECIPE = """
edition = 1
name = "vllm-0.0.1"
engine = "vllm"
version = "0.0.1"
summary = "a stand-in"
state = "resolved"
archs = ["sm_120f"]
flashinfer = "flashinfer-0.6.6"
kernels = "tiny"
serve = ["python", "-m", "http.server", "--directory", "/home/sm120kit"]
built = [{ what = "flashinfer-python", reason = "patched" }]
official = []

[environment]
python = "3.11"
platforms = ["manylinux_2_35_x86_64"]
requires = ["vllm==0.0.1"]

[env]
GREETING = 'costs $5, "all" in'
"""


@pytest.fixture(scope="module")
def engine(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The same daemon and finished wheel, and a locked recipe. Its closure is two wheels, not what a resolver would find."""
    data = tmp_path_factory.mktemp("engine")
    shutil.copytree(place.data, data, dirs_exist_ok=True)
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
    made = Place(place.state, data, place.socket, tmp_path_factory.mktemp("folder"))
    made.run("recipe", "lock", "flashinfer@0.6.6", "--offline")
    made.run("recipe", "lock", "vllm@0.0.1", "--offline")
    return made


@pytest.fixture(scope="module")
def made(engine: Place, base: str) -> str:
    """The image's id."""
    return engine.run("image", "vllm@0.0.1", "--base", base).stdout.strip()


def test_without_a_base_the_wheel_is_there_and_the_way_on_is_said(engine: Place) -> None:
    done = engine.run("build", "vllm@0.0.1", code=61)
    assert len(list((engine.folder / "wheelhouse").glob("flashinfer_python-0.6.6+sm120kit.*.whl"))) == 1
    assert "the wheel of vllm-0.0.1 is ready; its image is not made" in done.stderr and "--base" in done.stderr
    assert engine.run("build", "vllm@0.0.1", "--to", "pack").stdout.strip().endswith(".whl")


def test_without_a_daemon_the_context_is_ready(engine: Place, base: str) -> None:
    absent = Place(engine.state, engine.data, f"unix://{engine.folder}/nobody", engine.folder)
    done = absent.run("build", "vllm@0.0.1", "--base", base, code=60)
    assert "the build context is ready: " in done.stderr and "the same command goes on" in done.stderr
    place = Path(absent.run("build", "vllm@0.0.1", "--base", base, "--context-only").stdout.strip())
    assert (place / "Dockerfile").is_file() and f"is ready: {place}" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("build", "vllm@0.0.1", "--base", "debian:12"), 61, "not named by digest"),
        (("build", "vllm@0.0.1", "--base", f"sha256:{'1' * 64}", "--to", "pack"), 2, "without --to"),
        (("build", "flashinfer@0.6.6", "--context-only"), 2, "an engine's image"),
        (("image", "vllm@0.0.1", "--closure", CLOSURE), 2, "an engine's recipe and lock"),
        (("image", "flashinfer@0.6.6", "--kernels", "tiny"), 2, "needs --closure"),
    ],
)
def test_what_does_not_go_together(engine: Place, words: tuple[object, ...], code: int, said: str) -> None:
    assert said in " ".join(engine.run(*words, code=code).stderr.replace("│", " ").split())


def test_it_is_what_recipe_and_lock_say(engine: Place, made: str) -> None:
    found = engine.client.api.inspect_image(made)["Config"]
    labels = found["Labels"]
    lock = engine.data / "recipes" / "engines" / "vllm-0.0.1.lock.json"
    assert labels["sm120kit.build-id"] == hashlib.sha256(lock.read_bytes()).hexdigest()
    assert labels["sm120kit.recipe"] == "vllm-0.0.1" and labels["sm120kit.kind"] == "vllm"
    assert labels["sm120kit.wheels"] == "idna==3.20,nvidia-cuda-runtime==13.0.96"
    assert labels["sm120kit.ours"].startswith("flashinfer-python==0.6.6+sm120kit.")
    assert found["Entrypoint"] == ["python", "-m", "http.server", "--directory", "/home/sm120kit"]
    assert 'GREETING=costs $5, "all" in' in found["Env"] and "SM120KIT_PORT=8000" in found["Env"]
    assert found["User"] == "1000:1000" and found["Healthcheck"]["Test"] == ["CMD", "python", "/opt/sm120kit/healthy.py"]


def test_it_says_whether_it_serves(engine: Place, made: str) -> None:
    """On the engine's own port, and on one that the command line names."""
    for words, port in (([], "8000"), (["8123", "--port", "8123"], "8123")):
        container = engine.client.containers.create(
            made, entrypoint=["python", "-c", SERVE, port, *words], network_mode="none", cap_drop=["ALL"]
        )
        try:
            container.start()
            health = ["python", "/opt/sm120kit/healthy.py"]
            assert container.exec_run(health).exit_code == 1
            container.put_archive("/home/sm120kit", packed("health", b"ok"))
            assert container.exec_run(["sh", "-c", f"until {' '.join(health)} 2> /dev/null; do sleep 0.1; done"]).exit_code == 0
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


def test_libraries_of_cuda_13_are_found_by_name(engine: Place, made: str) -> None:
    program = "import ctypes; print(ctypes.CDLL('libcudart.so.13').cudaRuntimeGetVersion)"
    said = engine.client.containers.run(made, ["-c", program], entrypoint=["python"], network_mode="none", remove=True)
    assert b"_FuncPtr" in said


def test_what_was_built_from_source_is_what_the_wheel_says_for_sm12x_alone(engine: Place, made: str, tmp_path: Path) -> None:
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
    assert rebuilt(engine, made, ours, ours) == ("passed", "")
    assert rebuilt(engine, made, ours + b" ", ours) == ("failed", "vllm/tiny.so is not the file that was built")
    assert rebuilt(engine, made, other, other) == ("failed", "vllm/tiny.so: device code for sm_90a, which is not asked for")
    assert rebuilt(engine, made, ours, None) == ("failed", "vllm 0.0.1+sm120kit.abc does not say what is replaced in it")


SITE = "/opt/venv/lib/python3.11/site-packages"


def rebuilt(engine: Place, made: str, library: bytes, recorded: bytes | None) -> tuple[str, str]:
    """The check's verdict on an image with a module of the engine's in it, and a wheel that names the ``recorded`` one."""
    container = engine.client.containers.create(made)
    container.put_archive(SITE, packed("vllm/tiny.so", library))
    if recorded is not None:
        said = {"replaced": {"vllm/tiny.so": {"here": hashlib.sha256(recorded).hexdigest()}, "vllm/x.py": {"here": "0"}}}
        container.put_archive(SITE, packed("vllm-0.0.1+sm120kit.abc.dist-info/sm120kit.json", json.dumps(said).encode()))
    config = engine.client.api.inspect_image(made)["Config"]
    config["Labels"]["sm120kit.ours"] += ",vllm==0.0.1+sm120kit.abc"
    changed = container.commit(conf=config)
    container.remove()
    report = json.loads(engine.run("verify", "image", changed.id, "--json", code=1).stdout)
    engine.client.images.remove(changed.id, noprune=True)
    (check,) = (check for check in report["checks"] if check["name"] == "rebuilt")
    return check["verdict"], check["detail"]


def test_without_the_engine_in_it_it_gets_no_name(engine: Place, base: str, made: str) -> None:
    before = engine.names()
    done = engine.run("build", "vllm@0.0.1", "--base", base, "--json", code=1)
    said: dict[str, Any] = json.loads(done.stdout)
    verdicts = {f"{check['suite']}/{check['name']}": check["verdict"] for check in said["checks"]}
    assert verdicts["base/versions"] == verdicts["flashinfer/device_code"] == verdicts["engine/environment"] == "passed"
    assert verdicts["vllm/extensions"] == "failed" and said["verified"] is None and said["image"]["id"] == made
    assert "nothing to do" in done.stderr and engine.names() == before
