"""Locks for real: uv resolves, pip and uv install, git applies.

The engine and its dependencies are small and made here; only the last tests look at our own locks and ask the configured index.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import small_engine
from small_engine import KERNELS, make_sdist, make_wheel

ROOT = Path(__file__).parents[2]
VLLM_TAG = "cp38-abi3-manylinux_2_28_x86_64"
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: sm120kit <sm120kit@localhost>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: jit: shout

So that there is something to apply.

Applies-To: flashinfer >=0.1
Upstream-Status: Inappropriate [a test]
Origin: a test
Evidence: a test
Matters-For: a test
No-Effect-For: all else
Drop-When: never

diff --git a/include/x.h b/include/x.h
--- a/include/x.h
+++ b/include/x.h
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""
ENGINE = f"""\
{small_engine.ENGINE}\
[[known_bad]]
distribution = "helper"
version = "1.3"
reason = "it is slow"
"""


class Site:
    """Recipes of a small FlashInfer and a small vLLM, and a directory with their sdist and wheels."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self.data, self.mirror = root, root / "state", root / "data", root / "mirror"
        self.mirror.mkdir(parents=True)
        sha256 = make_sdist(self.mirror / "flashinfer_python-1.0.tar.gz", {"include/x.h": "one\ntwo\nthree\n"})
        self.recipes = self.data / "recipes" / "engines"
        self.recipes.mkdir(parents=True)
        self.patch = self.data / "patches" / "flashinfer" / "shout.patch"
        self.patch.parent.mkdir(parents=True)
        (self.patch.parent / "series").write_text("shout\n")
        self.patch.write_text(PATCH)
        self.header = self.data / "cutlass_overrides" / "include" / "sm120kit" / "ours.hpp"
        self.header.parent.mkdir(parents=True)
        self.header.write_text("// ours\n")
        self.kernels, self.engine = self.recipes / "flashinfer-1.0.toml", self.recipes / "vllm-9.0.toml"
        self.kernels.write_text(KERNELS.format(sha256=sha256))
        self.engine.write_text(ENGINE)
        self.lock = self.recipes / "vllm-9.0.lock.json"
        make_wheel(self.mirror, "vllm", "9.0", VLLM_TAG, requires=("flashinfer-python==1.0", "helper>=1"))
        make_wheel(self.mirror, "flashinfer-python", "1.0")
        for version in ("1.0", "1.2", "1.3"):
            make_wheel(self.mirror, "helper", version)

    def run(self, *words: str, code: int = 0, mirror: str | None = None) -> subprocess.CompletedProcess[str]:
        surroundings = {**os.environ, "SM120KIT_STATE": str(self.state), "SM120KIT_DATA": str(self.data)}
        argv = [sys.executable, "-m", "sm120kit", *words, "--mirror", mirror or str(self.mirror)]
        done = subprocess.run(argv, env=surroundings, capture_output=True, text=True)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def locks(self) -> dict[str, object]:
        return {path.name: path.read_bytes() for path in self.recipes.glob("*.lock.json")}

    def wheels(self) -> dict[str, str]:
        (closure,) = json.loads(self.lock.read_text())["closures"]
        return {wheel["name"]: wheel["version"] for wheel in closure["wheels"]}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


@pytest.fixture
def locked(site: Site) -> Site:
    site.run("recipe", "lock")
    return site


def test_the_same_recipe_gives_the_same_bytes_in_another_place_and_again(locked: Site, tmp_path: Path) -> None:
    first = locked.locks()
    assert set(first) == {"flashinfer-1.0.lock.json", "vllm-9.0.lock.json"}
    said = locked.run("recipe", "lock").stdout
    assert locked.locks() == first
    other = Site(tmp_path / "a" / "longer" / "place")
    other.run("recipe", "lock")
    assert other.locks() == first
    build_id = hashlib.sha256(locked.lock.read_bytes()).hexdigest()
    assert f"locked vllm-9.0: build id {build_id}" in said
    assert f"ok vllm-9.0: build id {build_id}" in locked.run("recipe", "lock", "--check", "--offline").stdout
    assert str(tmp_path) not in locked.lock.read_text() and "file:" not in locked.lock.read_text()


def test_the_closure_is_what_the_engine_needs_without_what_is_built_and_without_what_is_bad(locked: Site) -> None:
    assert locked.wheels() == {"helper": "1.2", "vllm": "9.0"}, "1.3 is known to be bad; flashinfer-python is ours"


def test_versions_stay_until_an_upgrade_is_asked_for(locked: Site) -> None:
    before = locked.locks()
    make_wheel(locked.mirror, "helper", "1.4")
    locked.run("recipe", "lock")
    assert locked.locks() == before
    engine_with('"vllm==9.0"', '"vllm==9.0", "more==1"')(locked)
    make_wheel(locked.mirror, "more", "1")
    locked.run("recipe", "lock", "vllm@9.0")
    assert locked.wheels() == {"helper": "1.2", "vllm": "9.0", "more": "1"}, "what is not asked for stays"
    locked.run("recipe", "lock", "vllm@9.0", "--upgrade")
    assert locked.wheels()["helper"] == "1.4"


def engine_with(old: str, new: str) -> Callable[[Site], object]:
    return lambda site: site.engine.write_text(ENGINE.replace(old, new))


def edit_json(change: Callable[[dict[str, object]], object]) -> Callable[[Site], None]:
    def edit(site: Site) -> None:
        data = json.loads(site.lock.read_text())
        change(data)
        site.lock.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")

    return edit


CHANGES: dict[str, tuple[Callable[[Site], object], str]] = {
    "recipe": (engine_with('"serve"]', '"serve", "--x"]'), r"recipe\.serve\.--x: not in the lock"),
    "patch": (lambda site: site.patch.write_text(PATCH.replace("+TWO", "+TWO!")), r"patches\.flashinfer/shout\.sha256"),
    "patched tree": (
        lambda site: site.patch.write_text(PATCH.replace("+TWO", "+TWO!")),
        r"sources\.flashinfer\.patched_tree",
    ),
    "header": (lambda site: site.header.write_text("// theirs\n"), r"overrides\.include/sm120kit/ours\.hpp\.sha256"),
    "kernels": (
        lambda site: site.kernels.write_text(site.kernels.read_text().replace("sm_120f", "sm_121a")),
        r"the lock of flashinfer-1\.0 .*\n  recipe\.archs\.sm_120f",
    ),
    "wheel": (
        edit_json(lambda data: data["closures"][0]["wheels"][0].update(sha256="0" * 64)),  # type: ignore[index]
        r"closures\.manylinux_2_35_x86_64: .*were edited",
    ),
    "no lock": (lambda site: site.lock.unlink(), "vllm-9.0 is not locked"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_build_from_an_outdated_or_edited_lock_stops_and_says_what_differs(locked: Site, name: str) -> None:
    change, said = CHANGES[name]
    before = locked.lock.read_bytes()
    change(locked)
    for words in (("recipe", "lock", "vllm@9.0", "--check"), ("build", "vllm@9.0", "--dry-run"), ("build", "vllm@9.0")):
        stopped = locked.run(*words, code=12)
        assert re.search(said, stopped.stderr), stopped.stderr
        assert "sm120kit recipe lock" in stopped.stderr and not stopped.stdout
    locked.run("recipe", "lock")
    locked.run("recipe", "lock", "--check")
    assert (locked.lock.read_bytes() == before) == (name in ("wheel", "no lock"))


def test_a_build_of_kernels_stops_as_well(locked: Site) -> None:
    locked.patch.write_text(PATCH.replace("+TWO", "+TWO!"))
    for words in (("--dry-run",), ()):
        stopped = locked.run("build", "flashinfer@1.0", *words, code=12)
        assert "patches.flashinfer/shout.sha256" in stopped.stderr and not stopped.stdout
    locked.run("build", "flashinfer@1.0", "--to", "patch")


def test_settings_of_the_resolver_itself_change_nothing(locked: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = locked.locks()
    monkeypatch.setenv("UV_RESOLUTION", "lowest")
    monkeypatch.setenv("UV_CONSTRAINT", str(locked.root / "nothing"))
    locked.run("recipe", "lock", "--upgrade")
    assert locked.locks() == before


def test_a_wheel_edited_in_the_lock_is_the_right_one_again_after_locking(locked: Site) -> None:
    before = locked.lock.read_bytes()
    CHANGES["wheel"][0](locked)
    assert locked.lock.read_bytes() != before
    locked.run("recipe", "lock", "vllm@9.0")
    assert locked.lock.read_bytes() == before


def test_pip_and_uv_install_from_what_a_lock_lists_and_refuse_anything_else(locked: Site, tmp_path: Path) -> None:
    listed = tmp_path / "requirements.txt"
    surroundings = {**os.environ, "SM120KIT_DATA": str(locked.data)}
    argv = [sys.executable, "-m", "sm120kit", "recipe", "requirements", "vllm@9.0"]
    listed.write_text(subprocess.run(argv, env=surroundings, check=True, capture_output=True, text=True).stdout)
    place = ["--no-index", "--find-links", str(locked.mirror), "--no-deps", "--require-hashes", "-r", str(listed)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
    subprocess.run([*pip, str(tmp_path / "pip"), *place], check=True)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-config", "--target"]
    subprocess.run([*uv, str(tmp_path / "uv"), *place], check=True)
    for made in ("pip", "uv"):
        assert {path.name for path in (tmp_path / made).glob("*.dist-info")} == {"helper-1.2.dist-info", "vllm-9.0.dist-info"}
    make_wheel(locked.mirror, "helper", "1.2", requires=("evil",))
    for install in (pip, [*uv[:-1], "--no-cache", "--target"]):
        refused = subprocess.run([*install, str(tmp_path / "evil"), *place], capture_output=True, text=True)
        assert refused.returncode != 0 and re.search("hash", refused.stderr, re.IGNORECASE)


BAD: dict[str, tuple[Callable[[Site], object], tuple[str, ...], int, str]] = {
    "no such wheel": (
        lambda site: (site.mirror / f"vllm-9.0-{VLLM_TAG}.whl").unlink(),
        (),
        24,
        "vllm was not found",
    ),
    "another FlashInfer is pinned": (
        lambda site: make_wheel(site.mirror, "vllm", "9.0", VLLM_TAG, requires=("flashinfer-python==0.9",)),
        (),
        24,
        "flashinfer-python==0.9",
    ),
    "only for another machine": (
        engine_with("x86_64", "aarch64"),
        (),
        24,
        "vllm==9.0 has no wheels with a matching platform tag|no usable wheels",
    ),
    "glibc too old": (engine_with("manylinux_2_35", "manylinux_2_17"), (), 24, "vllm"),
    "a glibc that the resolver does not know": (
        engine_with("manylinux_2_35", "manylinux_2_99"),
        (),
        11,
        "the resolver knows no platform 'manylinux_2_99_x86_64'",
    ),
    "unpinned": (
        engine_with('"vllm==9.0"', '"vllm==9.0", "helper"'),
        (),
        11,
        "'helper' is not pinned: write name==version",
    ),
    "only bad versions": (
        lambda site: [(site.mirror / f"helper-{one}-py3-none-any.whl").unlink() for one in ("1.0", "1.2")],
        (),
        24,
        "helper",
    ),
    "kernels are not locked": (
        lambda site: (site.recipes / "flashinfer-1.0.lock.json").unlink(),
        (),
        12,
        "flashinfer-1.0 is not locked",
    ),
    "check and upgrade": (lambda site: None, ("--check", "--upgrade"), 2, "--check writes nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_clear_error_and_writes_nothing(site: Site, name: str) -> None:
    spoil, words, code, said = BAD[name]
    site.run("recipe", "lock", "flashinfer@1.0")
    spoil(site)
    failed = site.run("recipe", "lock", "vllm@9.0", *words, code=code)
    assert re.search(said, failed.stderr), failed.stderr
    assert "Traceback" not in failed.stderr and not site.lock.exists()
    assert not list(site.recipes.glob(".*"))


def test_no_network_and_nothing_asked_before(site: Site) -> None:
    site.run("recipe", "lock", "flashinfer@1.0")
    surroundings = {**os.environ, "SM120KIT_STATE": str(site.state), "SM120KIT_DATA": str(site.data)}
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@9.0"]
    offline = subprocess.run([*argv, "--offline"], env=surroundings, capture_output=True, text=True)
    assert offline.returncode == 23 and "not all of it was asked for before" in offline.stderr
    missing = subprocess.run([*argv, "--mirror", str(site.root / "nowhere")], env=surroundings, capture_output=True, text=True)
    assert missing.returncode == 20 and "is not a directory" in missing.stderr
    closed = {**surroundings, "PIP_INDEX_URL": "http://somebody:secret@127.0.0.1:9/simple"}
    unreachable = subprocess.run(argv, env=closed, capture_output=True, text=True)
    assert unreachable.returncode == 20 and "127.0.0.1:9" in unreachable.stderr and "secret" not in unreachable.stderr


@contextmanager
def index(mirror: Path, uploaded: dict[str, str]) -> Iterator[str]:
    """A package index on loopback that says when each wheel was uploaded."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").rpartition("/")[2]
            if name.endswith(".metadata"):
                with zipfile.ZipFile(mirror / name.removesuffix(".metadata")) as wheel:
                    (member,) = (one for one in wheel.namelist() if one.endswith("/METADATA"))
                    body, kind = wheel.read(member), "text/plain"
            else:
                wheels = [path for path in sorted(mirror.glob("*.whl")) if path.name.split("-")[0].replace("_", "-") == name]
                files = [
                    {
                        "filename": path.name,
                        "url": f"/files/{path.name}",
                        "hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
                        "core-metadata": True,
                        "upload-time": f"{uploaded.get(path.name, '2026-01-01')}T00:00:00Z",
                    }
                    for path in wheels
                ]
                body = json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": files}).encode()
                kind = "application/vnd.pypi.simple.v1+json"
                if not files:
                    self.send_error(404)
                    return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://somebody:secret@127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()


def test_an_old_engine_meets_the_dependencies_of_its_own_day(site: Site) -> None:
    site.run("recipe", "lock", "flashinfer@1.0")
    engine_with('python = "3.12"', 'python = "3.12"\nas_of = "2026-05-01"')(site)
    uploaded = {"helper-1.2-py3-none-any.whl": "2026-05-01", f"vllm-9.0-{VLLM_TAG}.whl": "2026-06-01"}
    with index(site.mirror, uploaded) as url:
        surroundings = {**os.environ, "SM120KIT_STATE": str(site.state), "SM120KIT_DATA": str(site.data), "PIP_INDEX_URL": url}
        argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@9.0"]
        done = subprocess.run(argv, env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert site.wheels() == {"helper": "1.0", "vllm": "9.0"}, "what is named in the recipe may be newer"
    assert not re.search("127.0.0.1|secret|http", site.lock.read_text())


def test_wheels_of_a_lock_are_fetched_once_and_checked(locked: Site) -> None:
    from sm120kit import lock, sources
    from sm120kit.errors import HashMismatch, OfflineMiss
    from sm120kit.workspace import Workspace

    (closure,) = lock.read(locked.lock).closures
    workspace = Workspace.open(locked.state)
    with pytest.raises(OfflineMiss, match="2 of 2 wheels"):
        sources.wheelhouse(closure.wheels, workspace, offline=True)
    good = locked.mirror / "helper-1.2-py3-none-any.whl"
    kept = good.read_bytes()
    good.write_bytes(kept + b"x")
    with pytest.raises(HashMismatch, match=r"helper 1\.2 is pinned to sha256"):
        sources.wheelhouse(closure.wheels, workspace, mirror=str(locked.mirror))
    good.write_bytes(kept)
    paths = sources.wheelhouse(closure.wheels, workspace, mirror=str(locked.mirror))
    assert [path.name for path in paths] == [wheel.filename for wheel in closure.wheels]
    assert sources.wheelhouse(closure.wheels, workspace, offline=True) == paths


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A state directory, and a copy of our recipes, patches and headers."""
    root = tmp_path_factory.mktemp("ours")
    for name in ("recipes", "patches", "cutlass_overrides"):
        shutil.copytree(ROOT / name, root / "data" / name)
    return root / "state", root / "data"


def test_our_own_locks_are_what_would_be_locked_now(ours: tuple[Path, Path]) -> None:
    """Trees and commits too: every source is fetched and every series applied."""
    state, data = ours
    surroundings = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "--check"]
    checked = subprocess.run(argv, env=surroundings, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("ok ") == len(list((data / "recipes" / "engines").glob("*.toml")))


@pytest.mark.skipif(platform.machine() == "aarch64", reason="this machine can build it")
def test_an_engine_for_another_machine_is_planned_but_not_built_here(ours: tuple[Path, Path]) -> None:
    state, data = ours
    surroundings = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    argv = [sys.executable, "-m", "sm120kit", "build", "sglang@0.5.23-spark"]
    refused = subprocess.run(argv, env=surroundings, capture_output=True, text=True)
    assert refused.returncode == 41, refused.stderr
    assert "sglang-0.5.23-spark is built natively on aarch64" in refused.stderr and "--dry-run" in refused.stderr


def test_an_engine_resolves_again_to_the_bytes_of_its_lock(ours: tuple[Path, Path]) -> None:
    """Without a lock to go by: the index of today, asked for the wheels of the day of its release.

    Not vllm-0.19.1: its setuptools is one that fitted an earlier Python as well, and a lock keeps versions that still fit.
    """
    state, data = ours
    surroundings = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    path = data / "recipes" / "engines" / "vllm-0.20.0.lock.json"
    path.unlink()
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@0.20.0"]
    done = subprocess.run(argv, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == (ROOT / "recipes" / "engines" / path.name).read_bytes()
