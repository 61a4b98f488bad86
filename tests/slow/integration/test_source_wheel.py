"""Extension modules of an engine from source: real cmake, ninja, nvcc and packing, on a small engine that the test creates.

Only the compiler's wheel is a stand-in: it calls the nvcc of this environment.
"""

from __future__ import annotations

import ctypes
import hashlib
import http.server
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from patch_series import git_in
from small_engine import ENGINE, KERNELS, make_sdist, make_wheel, row_hash

from sm120kit.core import toolchain
from sm120kit.kernels import cubin
from sm120kit.wheels import _extensions as environment
from sm120kit.wheels._cuda_home import link_toolchain
from sm120kit.wheels._extensions import Interpreter

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the stand-in engine is for x86_64")
ROOT = Path(__file__).parents[3]
MEMBER, PYTHON = "vllm/_tiny.abi3.so", "vllm/__init__.py"
BEFORE = "version = '9.0'\n"
AFTER = f"{BEFORE}archs = (120, 121)\n"
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@b.invalid>
Date: Mon, 5 Jan 2026 01:02:03 +0000
Subject: say more

Applies-To: vllm ==9.0
Upstream-Status: Pending
Origin: a test
Matters-For: a test
No-Effect-For: nobody
Evidence: a test
Drop-When: never

diff --git a/vllm/__init__.py b/vllm/__init__.py
index {before}..{after} 100644
--- a/vllm/__init__.py
+++ b/vllm/__init__.py
@@ -1 +1,2 @@
 version = '9.0'
+archs = (120, 121)
"""
CMAKE = """\
cmake_minimum_required(VERSION 3.26)
project(tiny LANGUAGES CXX CUDA)
include(FetchContent)
FetchContent_Declare(nothing SOURCE_DIR $ENV{NOTHING_SRC_DIR})
FetchContent_MakeAvailable(nothing)
string(REPLACE "." "" arch "$ENV{TORCH_CUDA_ARCH_LIST}")
add_library(_tiny MODULE csrc/host.cpp csrc/device.cu)
set_target_properties(_tiny PROPERTIES PREFIX "" SUFFIX ".abi3.so" CUDA_ARCHITECTURES "${arch}-real")
target_include_directories(_tiny PRIVATE ${HEADERS})
"""
FETCHES = """\
file(DOWNLOAD "http://127.0.0.1:PORT/more.cmake" "${CMAKE_BINARY_DIR}/more.cmake" STATUS status)
if(NOT status MATCHES "^0;")
  message(FATAL_ERROR "cannot fetch: ${status}")
endif()
"""
HOST = 'extern "C" int doubled(int x) { return 2 * x; }\nextern "C" const char* file() { return __FILE__; }\n'
DEVICE = """\
#include "x.h"
static __device__ int hidden = NUMBER;
__global__ void kernel(int* out) { *out = hidden; }
extern "C" int number() { return NUMBER; }
"""
CUTLASS = """\
[sources.cutlass]
inside = "flashinfer"
path = "3rdparty/cutlass"
version = "4.4.2"
"""
FROM_SOURCE = """\
[from_source]
sha256 = "{sha256}"
environment = ["nvidia-cuda-nvcc"]
[from_source.injected.HEADERS_SRC_DIR]
project = "cutlass"
version = "4.4.2"
definitions = {{ HEADERS = "include" }}
reason = "the headers"
[from_source.injected.NOTHING_SRC_DIR]
files = ["deep/stand-in"]
reason = "nothing of it is compiled"
[from_source.targets._tiny]
member = "vllm/_tiny.abi3.so"
units = ["csrc/host.cpp", "csrc/device.cu"]
expect_kernels = {{ "*kernel*@sm_120f" = 1 }}
[from_source.targets._tiny.answers]
"library.doubled(21)" = "42"
"library.number()" = "7"
"""
PROGRAM = """
import sys
from sm120kit.core import console, reporting
from sm120kit.wheels import _from_source
from sm120kit.core.errors import Sm120kitError
from sm120kit.recipes.target import resolve
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options
from sm120kit.core.workspace import Workspace
options = Options(Workspace.open(), Origin(sys.argv[1]), jobs=1, memory_bytes=int(sys.argv[2]))
target = resolve("vllm-9.0", options)
try:
    with reporting.use(console):
        print(_from_source.build_extensions(_from_source.plan_extensions(target), options).wheel)
except Sm120kitError as error:
    console.error(error.message, error.hint)
    sys.exit(error.exit_code)
"""
OVERLAY = """
import sys
from sm120kit.core import console, reporting
from sm120kit.recipes.target import resolve
from sm120kit.wheels import image_wheels
from sm120kit.wheels._overlay import build_overlay
from sm120kit.core.errors import Sm120kitError
from sm120kit.core.records import Stage
from sm120kit.wheels.build_records import BuildRequest
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options
from sm120kit.core.workspace import Workspace
options = Options(Workspace.open(), Origin(sys.argv[1]))
target = resolve("vllm-9.0", options)
planned = image_wheels.build(target, BuildRequest(stage=Stage.PATCH))
assert [wheel.name for wheel in planned.closure.wheels] == ["nvidia-cuda-nvcc"], "the upstream vllm is replaced"
(own,) = planned.repacked
assert [*own.patched_members] == ["vllm/__init__.py"] and own.artifacts is None
try:
    with reporting.use(console):
        repacked = build_overlay(target, target.engine_tree)
    assert repacked.plan == own.plan
    print(repacked.wheel, repacked.ran)
except Sm120kitError as error:
    console.error(error.message, error.hint)
    sys.exit(error.exit_code)
"""
GIB = 2**30


def blob_id(text: str) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0%s" % (len(text), text.encode())).hexdigest()


def compile_library(path: Path, text: str, *flags: str) -> Path:
    argv = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", path, *flags]
    subprocess.run(argv, input=text.encode(), check=True)
    return path


class Engine:
    """Recipes of a small vLLM and its FlashInfer, and a directory with their sdists and wheels."""

    def __init__(self, root: Path, cmake: str = CMAKE) -> None:
        self.data, self.mirror = root / "data", root / "mirror"
        self.mirror.mkdir(parents=True)
        self.recipes = self.data / "recipes" / "engines"
        self.recipes.mkdir(parents=True)
        (self.data / "cutlass_overrides").mkdir()
        series = self.data / "patches" / "vllm" / "series"
        series.parent.mkdir(parents=True)
        series.write_text("longer-version\n")
        series.with_name("longer-version.patch").write_text(PATCH.format(before=blob_id(BEFORE), after=blob_id(AFTER)))
        numbers = zip(("MAJOR", "MINOR", "PATCH"), (4, 4, 2), strict=True)
        stated = "".join(f"#define CUTLASS_{name} {number}\n" for name, number in numbers)
        include = "3rdparty/cutlass/include"
        headers = {f"{include}/x.h": "#define NUMBER 7\n", f"{include}/cutlass/version.h": stated}
        kernels = make_sdist(self.mirror / "flashinfer_python-1.0.tar.gz", headers)
        own = {"CMakeLists.txt": cmake, "csrc/host.cpp": HOST, "csrc/device.cu": DEVICE, PYTHON: BEFORE}
        sdist = make_sdist(self.mirror / "vllm-9.0.tar.gz", own)
        (self.recipes / "flashinfer-1.0.toml").write_text(KERNELS.format(sha256=kernels) + CUTLASS)
        self.recipe = self.recipes / "vllm-9.0.toml"
        of_here = ENGINE.replace('"3.12"', f'"{sys.version_info.major}.{sys.version_info.minor}"')
        with_compiler = of_here.replace('"vllm==9.0"', '"vllm==9.0", "nvidia-cuda-nvcc==13.0.88"')
        self.recipe.write_text(with_compiler + FROM_SOURCE.format(sha256=sdist))
        tools = toolchain.find()
        # nvcc looks for libraries in lib64 beside itself; the toolkit of this environment may have them elsewhere.
        compiler = f'#!/bin/sh\nexec {link_toolchain(root / "toolkit", tools)}/bin/nvcc "$@"\n'.encode()
        inside = {
            "nvidia/cu13/bin/nvcc": compiler,
            "nvidia/cu13/include/cuda.h": (tools.cuda_home / "include" / "cuda.h").read_bytes(),
        }
        make_wheel(self.mirror, "nvidia-cuda-nvcc", "13.0.88", files=inside)
        official = root / "official.so"
        compile_library(official, "int official;", "-Wl,--no-as-needed", "-l:ld-linux-x86-64.so.2")
        wheel = {MEMBER: official.read_bytes(), PYTHON: BEFORE.encode(), "vllm/_other.so": b"theirs"}
        make_wheel(self.mirror, "vllm", "9.0", "cp38-abi3-linux_x86_64", files=wheel)
        make_wheel(self.mirror, "flashinfer-python", "1.0")

    def environment(self, state: Path) -> dict[str, str]:
        return {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(self.data)}

    def argv(self, memory: float = 8, program: str = PROGRAM) -> list[str]:
        return [sys.executable, "-c", program, str(self.mirror), str(int(memory * GIB))]

    def build(self, state: Path, code: int = 0, memory: float = 8, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.argv(memory, program), env=self.environment(state), capture_output=True, text=True)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def command(self, state: Path, *arguments: str, code: int = 0) -> str:
        argv = [sys.executable, "-m", "sm120kit", *arguments, "--mirror", str(self.mirror)]
        done = subprocess.run(argv, env=self.environment(state), capture_output=True, text=True)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = Engine(tmp_path_factory.mktemp("engine"))
    engine.command(engine.data / "state", "recipe", "lock")
    return engine


@pytest.fixture(scope="module")
def wheel(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished wheel, after a first attempt that had too little memory."""
    state = tmp_path_factory.mktemp("state")
    refused = engine.build(state, code=41, memory=0.2)
    assert "device.cu needs about 2.0 GiB" in refused.stderr
    assert not list(state.glob("build/vllm/*"))
    done = engine.build(state)
    assert list(state.glob("work/*")) == [], "the environment takes gigabytes"
    again = engine.build(state)
    assert again.stdout == done.stdout and "building" not in again.stderr
    return Path(done.stdout.strip())


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_with_built_module_and_patched_python(engine: Engine, wheel: Path, tmp_path: Path) -> None:
    name = re.fullmatch(r"vllm-(9\.0\+sm120kit\.[0-9a-f]{12})-cp38-abi3-linux_x86_64\.whl", wheel.name)
    assert name
    ours, official = members(wheel), members(engine.mirror / "vllm-9.0-cp38-abi3-linux_x86_64.whl")
    info = f"vllm-{name[1]}.dist-info"
    assert {file for file in official if not file.startswith("vllm-9.0.dist-info/") and official[file] != ours[file]} == {
        MEMBER,
        PYTHON,
    }
    assert f"Version: {name[1]}\n" in ours[f"{info}/METADATA"].decode()
    rows = dict(line.split(",", 1) for line in ours[f"{info}/RECORD"].decode().splitlines())
    assert rows == {file: f"{row_hash(data)},{len(data)}" for file, data in ours.items()} | {f"{info}/RECORD": ","}
    record = json.loads(ours[f"{info}/sm120kit.json"])
    assert ours[PYTHON] == AFTER.encode(), "patched Python as without --from-source"
    assert record["replaced"] == {
        file: {"official": hashlib.sha256(official[file]).hexdigest(), "here": hashlib.sha256(ours[file]).hexdigest()}
        for file in (MEMBER, PYTHON)
    }
    assert record["archs"] == ["sm_120f"] and record["pin"]["version"] == "9.0"
    assert record["injected"]["HEADERS_SRC_DIR"] == "cutlass 4.4.2"
    assert "arch=compute_120f,code=[sm_120f]" in record["flags"]["csrc/device.cu"]
    assert "/" not in "".join(record["flags"].values()), "no path"
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", tmp_path / "site", "--quiet", wheel], check=True
    )
    library = ctypes.CDLL(str(tmp_path / "site" / MEMBER))
    library.file.restype = ctypes.c_char_p
    assert (library.number(), library.file()) == (7, b"./source/csrc/host.cpp")
    assert {image.arch for image in cubin.read(tmp_path / "site" / MEMBER)} == {"sm_120f"}
    for log in ("configure.log", "compile.log"):
        first = (wheel.parent / "logs" / log).read_text().splitlines()[0]
        assert not environment.network_isolation() or " unshare " in first, "without a network"


def test_required_project_at_a_commit_comes_from_a_mirror(engine: Engine, tmp_path: Path) -> None:
    """The name of its host is not looked up; another commit is refused, and the hint names the mirror."""
    other = Engine.__new__(Engine)
    other.data, other.mirror = tmp_path / "data", tmp_path / "mirror"
    for name in ("data", "mirror"):
        shutil.copytree(getattr(engine, name), getattr(other, name))
    repository = other.mirror / "cutlass"
    numbers = zip(("MAJOR", "MINOR", "PATCH"), (4, 7, 1), strict=True)
    for name, text in {
        "x.h": "#define NUMBER 7\n",
        "cutlass/version.h": "".join(f"#define CUTLASS_{name} {number}\n" for name, number in numbers),
    }.items():
        (repository / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "include" / name).write_text(text)
    subprocess.run(["git", "init", "-q", repository], check=True)
    git_in(repository, "add", "-A")
    git_in(repository, "commit", "-qm", "4.7.1")
    commit = subprocess.run(
        ["git", "-C", repository, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    path = other.data / "recipes" / "engines" / "vllm-9.0.toml"
    pinned = f'git = "https://git.example.invalid/NVIDIA/cutlass.git"\ncommit = "{commit}"\nversion = "4.7.1"\ndefinitions'
    path.write_text(path.read_text().replace('version = "4.4.2"\ndefinitions', pinned))
    assert path.read_text().count(commit) == 1
    other.command(other.data / "state", "recipe", "lock")
    built = other.build(tmp_path / "state").stdout.strip()
    ours = members(Path(built))
    (record,) = (json.loads(text) for name, text in ours.items() if name.endswith("sm120kit.json"))
    assert record["injected"]["HEADERS_SRC_DIR"] == f"cutlass 4.7.1 at {commit}"
    repository.rename(other.mirror / "elsewhere")
    refused = other.build(tmp_path / "another", code=20)
    assert "looked for cutlass.git, cutlass, cutlass.bundle" in refused.stderr and "Traceback" not in refused.stderr


def test_module_of_a_project_in_the_recipe_lies_beside_the_upstream_one(engine: Engine, tmp_path: Path) -> None:
    """A recipe replaces the engine's CMakeLists.txt; its module is new, and is checked beside that which it overrides."""
    other = Engine.__new__(Engine)
    other.data, other.mirror = tmp_path / "data", engine.mirror
    shutil.copytree(engine.data, other.data)
    project = other.data / "files" / "vllm-9.0" / "CMakeLists.txt"
    project.parent.mkdir(parents=True)
    project.write_text(CMAKE.replace("_tiny", "_own"))
    path = other.data / "recipes" / "engines" / "vllm-9.0.toml"
    text = path.read_text().replace("targets._tiny", "targets._own")
    digest = hashlib.sha256(project.read_bytes()).hexdigest()
    path.write_text(
        text.replace(f'"{MEMBER}"', f'"vllm/_own.abi3.so"\noverrides = "{MEMBER}"').replace(
            "[from_source.injected.HEADERS",
            f'[from_source.files]\n"CMakeLists.txt" = "{digest}"\n[from_source.injected.HEADERS',
        )
        + "\"'/official/vllm/_tiny.abi3.so' in open('/proc/self/maps').read()\" = \"True\"\n"
    )
    other.command(tmp_path / "state", "recipe", "lock")
    ours = members(Path(other.build(tmp_path / "state").stdout.strip()))
    upstream = members(engine.mirror / "vllm-9.0-cp38-abi3-linux_x86_64.whl")
    assert ours[MEMBER] == upstream[MEMBER] and {*ours} - {*upstream} >= {"vllm/_own.abi3.so"}
    (record,) = (json.loads(text) for name, text in ours.items() if name.endswith("sm120kit.json"))
    assert record["replaced"]["vllm/_own.abi3.so"]["official"] == ""
    project.write_text(project.read_text() + "\n")
    refused = other.build(tmp_path / "another", code=12).stderr
    assert "vllm-9.0/CMakeLists.txt has sha256" in refused and digest in refused


def test_patched_python_is_packed_without_a_compiler(engine: Engine, wheel: Path, tmp_path: Path) -> None:
    built, ran = engine.build(tmp_path / "state", program=OVERLAY).stdout.split()
    name = re.fullmatch(r"vllm-(9\.0\+sm120kit\.[0-9a-f]{12})-cp38-abi3-linux_x86_64\.whl", Path(built).name)
    assert name and Path(built).name != wheel.name and ran == "True"
    assert engine.build(tmp_path / "state", program=OVERLAY).stdout.split() == [built, "False"]
    other = engine.build(tmp_path / "another" / "directory", program=OVERLAY).stdout.split()[0]
    assert Path(other).read_bytes() == Path(built).read_bytes()
    assert list((tmp_path / "state").glob("work/*")) == []
    ours, official = members(Path(built)), members(engine.mirror / "vllm-9.0-cp38-abi3-linux_x86_64.whl")
    assert {file for file in official if not file.startswith("vllm-9.0.dist-info/") and official[file] != ours[file]} == {
        PYTHON
    }
    record = json.loads(ours[f"vllm-{name[1]}.dist-info/sm120kit.json"])
    assert [*record["replaced"]] == [PYTHON] and [patch["slug"] for patch in record["patches"]] == ["longer-version"]
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", site, "--quiet", built], check=True)
    assert (site / PYTHON).read_text() == AFTER


def with_patched_package(engine: Engine, root: Path, pinned: str = "") -> Engine:
    """The engine with another locked package, of which a series changes a file. ``pinned`` replaces the sha256 of its wheel."""
    other = Engine.__new__(Engine)
    other.data, other.mirror = root / "data", root / "mirror"
    for name in ("data", "mirror"):
        shutil.copytree(getattr(engine, name), root / name)
    make_wheel(other.mirror, "kernels", "2.0", files={"kernels/__init__.py": b"barrier = 0\n", "kernels/same.py": b""})
    wheel = other.mirror / "kernels-2.0-py3-none-any.whl"
    series = other.data / "patches" / "kernels" / "series"
    series.parent.mkdir()
    series.write_text("barrier\n")
    before, after = "barrier = 0\n", "barrier = 1\n"
    patch = PATCH.format(before=blob_id(before), after=blob_id(after)).replace("vllm", "kernels").replace("9.0", "2.0")
    head, _, _ = patch.partition("@@")
    series.with_name("barrier.patch").write_text(f"{head}@@ -1 +1 @@\n-{before}+{after}")
    path = other.data / "recipes" / "engines" / "vllm-9.0.toml"
    table = f'[[patched]]\nwheel = "{wheel.name}"\nsha256 = "{pinned or hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n'
    path.write_text(path.read_text().replace('"vllm==9.0",', '"vllm==9.0", "kernels==2.0",') + table)
    return other


PACKAGES = (
    OVERLAY.partition("(own,)")[0].replace('["nvidia-cuda-nvcc"], "the', '["nvidia-cuda-nvcc"], "every patched')
    + """
assert [wheel.plan.engine for wheel in planned.repacked] == ["vllm", "kernels"]
repacked = build_overlay(target, target.patched[0].tree)
assert repacked.plan == planned.repacked[1].plan
print(repacked.wheel, repacked.ran)
"""
)


def test_another_package_is_patched(engine: Engine, tmp_path: Path) -> None:
    other = with_patched_package(engine, tmp_path)
    locked = other.command(tmp_path / "state", "recipe", "lock", "vllm@9.0")
    built, ran = other.build(tmp_path / "state", program=PACKAGES).stdout.split()
    name = re.fullmatch(r"kernels-(2\.0\+sm120kit\.[0-9a-f]{12})-py3-none-any\.whl", Path(built).name)
    assert name and ran == "True" and other.build(tmp_path / "state", program=PACKAGES).stdout.split() == [built, "False"]
    packed = members(Path(built))
    assert packed["kernels/__init__.py"] == b"barrier = 1\n" and packed["kernels/same.py"] == b""
    record = json.loads(packed[f"kernels-{name[1]}.dist-info/sm120kit.json"])
    assert [patch["slug"] for patch in record["patches"]] == ["barrier"] and record["pin"]["version"] == "2.0"
    status = other.command(tmp_path / "state", "patch", "status", "vllm@9.0")
    assert "longer-version" in status and "barrier" in status
    plan = other.command(tmp_path / "state", "build", "vllm@9.0", "--dry-run", "--kernels", "none")
    assert f"kernels {name[1]}: the upstream wheel packed again" in plan
    edited = ("vllm@9.0", "--project", "kernels")
    other.command(tmp_path / "state", "patch", "edit", *edited, "--into", str(tmp_path / "edit"))
    assert (tmp_path / "edit" / "kernels" / "__init__.py").read_text() == "barrier = 1\n"

    def without_index(*arguments: str) -> str:
        argv = [sys.executable, "-m", "sm120kit", *arguments]
        done = subprocess.run(argv, env=other.environment(tmp_path / "state"), capture_output=True, text=True)
        assert done.returncode == 0, done
        return done.stdout + done.stderr

    assert "0 files changed" in without_index("patch", "export", "--from", str(tmp_path / "edit"), *edited)
    argv = [
        sys.executable,
        "-m",
        "sm120kit",
        "patch",
        "export",
        "vllm@9.0",
        "--project",
        "no",
        "--from",
        str(tmp_path / "edit"),
    ]
    unknown = subprocess.run(argv, env=other.environment(tmp_path / "state"), capture_output=True, text=True)
    assert unknown.returncode == 10 and "vllm-9.0" in unknown.stderr, unknown
    assert "barrier applies" in other.command(tmp_path / "state", "patch", "prove", "kernels/barrier")
    message = other.command(tmp_path / "state", "patch", "edit", "vllm@9.0", "--project", "no", "--into", "x", code=10)
    assert "vllm-9.0 has no source of no" in message and "it has sources of vllm, kernels" in message
    series = other.data / "patches" / "kernels" / "barrier.patch"
    series.write_text(
        series.read_text().replace("barrier = 1", "barrier = 2").replace(blob_id("barrier = 1\n"), blob_id("barrier = 2\n"))
    )
    changed = other.command(tmp_path / "state", "recipe", "lock", "vllm@9.0")
    ids = [re.findall("build id ([0-9a-f]{64})", output) for output in (locked, changed)]
    assert len(ids[0]) == 1 and ids[0] != ids[1]


def test_package_to_patch_is_the_locked_one(engine: Engine, tmp_path: Path) -> None:
    other = with_patched_package(engine, tmp_path, pinned="0" * 64)
    message = other.command(tmp_path / "state", "recipe", "lock", "vllm@9.0", code=11)
    assert "patched names kernels-2.0-py3-none-any.whl, sha256 0000" in message


def test_wheel_of_another_source_is_refused(engine: Engine, tmp_path: Path) -> None:
    other = Engine.__new__(Engine)
    other.data, other.mirror = tmp_path / "data", tmp_path / "mirror"
    for name in ("data", "mirror"):
        shutil.copytree(getattr(engine, name), tmp_path / name)
    make_wheel(other.mirror, "vllm", "9.0", "cp38-abi3-linux_x86_64", files={PYTHON: b"version = '9'\n"})
    other.command(tmp_path / "state", "recipe", "lock", "--upgrade")
    message = other.build(tmp_path / "state", program=OVERLAY, code=30).stderr
    assert (
        f"{PYTHON}, changed by vllm/longer-version: the wheel has sha256" in message and "do not fit vllm-9.0-cp38" in message
    )
    assert not list((tmp_path / "state").glob("build/vllm/*"))


def test_rebuild_after_sigterm_in_another_directory_gives_same_bytes(engine: Engine, wheel: Path, tmp_path: Path) -> None:
    state = tmp_path / "another" / "state"
    build = subprocess.Popen(engine.argv(), env=engine.environment(state), start_new_session=True, stderr=subprocess.DEVNULL)
    while build.poll() is None and not any("host.cpp.o" in log.read_text() for log in state.glob("work/*/.ninja_log")):
        time.sleep(0.02)
    build.send_signal(signal.SIGTERM)
    assert build.wait(timeout=60) == -signal.SIGTERM
    (work,) = state.glob("work/*")
    assert not list(state.glob("build/vllm/*"))
    deadline = time.monotonic() + 60
    while running := programs_in(work):
        assert time.monotonic() < deadline, running
        time.sleep(0.1)
    done = engine.build(state)
    second = Path(done.stdout.strip())
    log = (second.parent / "logs" / "compile.log").read_text()
    assert "device.cu.o" in log and "host.cpp.o" not in log, "what was compiled is not compiled again"
    assert second.read_bytes() == wheel.read_bytes()


def programs_in(directory: Path) -> list[str]:
    """Programs that run in a directory."""
    programs = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(directory):
                programs.append((process / "cmdline").read_text())
        except OSError:
            continue
    return programs


class Server(http.server.BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[int, list[str]]]:
    handler = type("Recorder", (Server,), {"requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_port, handler.requests
        listening.shutdown()


@pytest.mark.skipif(not environment.network_isolation(), reason="this system permits no network namespace")
def test_build_that_fetches_fails(server: tuple[int, list[str]], tmp_path: Path) -> None:
    port, requests = server
    engine = Engine(tmp_path / "engine", f"{FETCHES}\n{CMAKE}".replace("PORT", str(port)))
    engine.command(tmp_path / "state", "recipe", "lock")
    refused = engine.build(tmp_path / "state", code=50)
    assert "cannot fetch" in refused.stderr and "configure.log" in refused.stderr
    assert requests == []


def test_sdist_with_another_hash_is_refused(engine: Engine, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(engine.mirror, mirror)
    with (mirror / "vllm-9.0.tar.gz").open("ab") as sdist:
        sdist.write(b"\0")
    output = engine.command(tmp_path / "state", "build", "vllm@9.0", "--from-source", "--to", "patch", "--mirror", str(mirror))
    assert "done" in output, "the last --mirror counts"
    swapped = Engine.__new__(Engine)
    swapped.data, swapped.mirror = engine.data, mirror
    output = swapped.command(tmp_path / "other", "build", "vllm@9.0", "--from-source", "--to", "patch", code=21)
    assert "vllm 9.0 is pinned to sha256" in output


def test_search_paths_symbols_and_answers_of_a_module(tmp_path: Path) -> None:
    driver = compile_library(tmp_path / "libcuda.so", 'extern "C" int cuInit(unsigned) { return 34; }')
    good = compile_library(tmp_path / "good.so", 'extern "C" int number() { return 1; }', "-Wl,-rpath,/added")
    assert environment.dynamic_section(good)[1] == ("/added",)
    undefined = compile_library(
        tmp_path / "undefined.so", 'extern "C" int missing(); extern "C" int number() { return missing(); }'
    )

    def problems(library: Path, expected: dict[str, str]) -> tuple[str, ...]:
        return environment.wrong_answers(library, ["json"], expected, Interpreter(Path(sys.executable), tmp_path, driver))

    assert problems(good, {"library.number()": "1", "json.loads('2')": "2"}) == ()
    assert problems(good, {"library.number()": "2"}) == ("library.number() is 1, not 2",)
    (problem,) = problems(undefined, {})
    assert problem.startswith("does not load: ") and "missing" in problem
    (problem,) = problems(good, {"library.absent()": "2"})
    assert "undefined symbol: absent" in problem


def test_units_that_differ_from_the_recipe_are_refused(engine: Engine, tmp_path: Path) -> None:
    changed = Engine.__new__(Engine)
    changed.data, changed.mirror = tmp_path / "data", engine.mirror
    shutil.copytree(engine.data, changed.data)
    path = changed.data / "recipes" / "engines" / "vllm-9.0.toml"
    path.write_text(path.read_text().replace('"csrc/host.cpp", ', '"csrc/more.cu", '))
    changed.command(tmp_path / "state", "recipe", "lock")
    message = changed.build(tmp_path / "state", code=51).stderr
    assert "host.cpp.o" in message and "more.cu.o" in message
