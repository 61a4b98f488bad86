"""Lockfiles with the real programs: uv resolves, pip and uv install, git applies.

The engine and its dependencies are small and built by the test.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_engine
from small_engine import KERNELS, PATCH, make_sdist, make_wheel

ROOT = Path(__file__).parents[3]
VLLM_TAG = "cp38-abi3-manylinux_2_28_x86_64"
EDITED_PATCH = PATCH.replace("+TWO", "+TWO!").replace(
    "ddc897f039f57aa91e16efa6dfde386c4255206f", "0917d02f0c6247d2f474d6f5311ec05e313e7e62"
)
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

    def run(self, *arguments: str, code: int = 0, mirror: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SM120KIT_STATE": str(self.state), "SM120KIT_DATA": str(self.data)}
        argv = [sys.executable, "-m", "sm120kit", *arguments, "--mirror", mirror or str(self.mirror)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def count_reads(self, out: Path, *arguments: str) -> Any:
        """The result of ``tests/support/count_reads.py`` for a command."""
        environment = {**os.environ, "SM120KIT_STATE": str(self.state), "SM120KIT_DATA": str(self.data)}
        argv = [sys.executable, ROOT / "tests" / "support" / "count_reads.py", out, *arguments, "--mirror", self.mirror]
        subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        return json.loads(out.read_text())

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


def test_lockfile_is_the_same_again_and_in_another_directory(locked: Site, tmp_path: Path) -> None:
    first = locked.locks()
    assert set(first) == {"flashinfer-1.0.lock.json", "vllm-9.0.lock.json"}
    output = locked.run("recipe", "lock").stdout
    assert locked.locks() == first
    other = Site(tmp_path / "a" / "longer" / "path")
    other.run("recipe", "lock")
    assert other.locks() == first
    (build_id,) = re.findall(r"^locked vllm-9.0: build id ([0-9a-f]{64})$", output, re.MULTILINE)
    assert f"ok vllm-9.0: build id {build_id}" in locked.run("recipe", "lock", "--check", "--offline").stdout
    assert str(tmp_path) not in locked.lock.read_text() and "file:" not in locked.lock.read_text()


def test_closure_excludes_built_flashinfer_and_known_bad_versions(locked: Site) -> None:
    assert locked.wheels() == {"helper": "1.2", "vllm": "9.0"}, "1.3 is known to be bad; flashinfer-python is built from source"


@pytest.mark.parametrize("arguments", [("build", "vllm@9.0", "--to", "patch"), ("recipe", "lock", "--check")])
def test_warm_command_reads_each_input_once(locked: Site, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Recipes, lockfiles, files of the patch series, and the records of patched trees."""
    locked.run(*arguments)
    counts = locked.count_reads(tmp_path / "reads.json", *arguments)
    inputs = [path for path in locked.data.rglob("*") if path.is_file()]
    inputs += (locked.state / "cache" / "trees").glob("*.json")
    assert {locked.patch, locked.header, locked.lock, locked.kernels} <= {*inputs}
    assert {path: counts["opened"].get(str(path)) for path in inputs} == dict.fromkeys(inputs, 1)
    assert not [argv for argv in counts["programs"] if argv[0] != "git"]
    assert not [path for path in counts["opened"] if "/git/objects/" in path], "a warm command loads no GitPython"


def test_locked_versions_stay_until_upgrade(locked: Site) -> None:
    before = locked.locks()
    make_wheel(locked.mirror, "helper", "1.4")
    locked.run("recipe", "lock")
    assert locked.locks() == before
    engine_with('"vllm==9.0"', '"vllm==9.0", "more==1"')(locked)
    make_wheel(locked.mirror, "more", "1")
    locked.run("recipe", "lock", "vllm@9.0")
    assert locked.wheels() == {"helper": "1.2", "vllm": "9.0", "more": "1"}, "versions that still fit stay"
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
    "recipe": (engine_with('"serve"]', '"serve", "--x"]'), r"\+ +.--x."),
    "kernels": (
        lambda site: site.kernels.write_text(site.kernels.read_text().replace("sm_120f", "sm_121a")),
        r"the lockfile of flashinfer-1\.0 [^\0]*sm_120f",
    ),
    "wheel": (
        edit_json(lambda data: data["closures"][0]["wheels"][0].update(sha256="0" * 64)),  # type: ignore[index]
        r"closures\.manylinux_2_35_x86_64: .*were edited",
    ),
    "no lock": (lambda site: site.lock.unlink(), "vllm-9.0 is not locked"),
}


@pytest.mark.parametrize("withdrawn", ["replaced", "removed"])
def test_check_reports_withdrawn_wheels(locked: Site, withdrawn: str) -> None:
    """The lockfile stays; with --offline nothing is compared; one distribution can be locked anew."""
    before = locked.lock.read_bytes()
    assert locked.wheels()["helper"] == "1.2"
    (file,) = locked.mirror.glob("helper-1.2-*.whl")
    file.unlink()
    if withdrawn == "replaced":
        make_wheel(locked.mirror, "helper", "1.2", requires=("other",))
    stopped = locked.run("recipe", "lock", "--check", code=12)
    assert file.name in stopped.stderr and "--upgrade-package" in stopped.stderr
    locked.run("recipe", "lock", "--check", "--offline")
    assert file.name in locked.run("recipe", "lock").stderr, "the wheels stay as they were locked"
    assert locked.lock.read_bytes() == before
    file.unlink(missing_ok=True)
    locked.run("recipe", "lock", "vllm@9.0", "--upgrade-package", "Helper")
    assert locked.wheels()["helper"] == "1.0"
    locked.run("recipe", "lock", "--check")


def test_check_reports_replaced_sdists(locked: Site) -> None:
    make_sdist(locked.mirror / "flashinfer_python-1.0.tar.gz", {"include/x.h": "one\ntwo\nfour\n"})
    stopped = locked.run("recipe", "lock", "--check", code=12)
    assert "sdist of flashinfer-python 1.0: listed with another sha256" in stopped.stderr


@pytest.mark.parametrize("name", CHANGES)
def test_build_with_outdated_or_edited_lockfile_reports_differences(locked: Site, name: str) -> None:
    change, message = CHANGES[name]
    before = locked.lock.read_bytes()
    change(locked)
    for arguments in (
        ("recipe", "lock", "vllm@9.0", "--check"),
        ("build", "vllm@9.0", "--dry-run"),
        ("build", "vllm@9.0", "--to", "pack"),
    ):
        stopped = locked.run(*arguments, code=12)
        assert re.search(message, stopped.stderr), stopped.stderr
        assert "sm120kit recipe lock" in stopped.stderr and not stopped.stdout
    locked.run("recipe", "lock")
    locked.run("recipe", "lock", "--check")
    assert (locked.lock.read_bytes() == before) == (name in ("wheel", "no lock", "kernels"))


@pytest.mark.parametrize("change", ["patch", "header"])
def test_patch_and_header_change_the_build_id_and_no_lockfile(locked: Site, change: str) -> None:
    before, ids = locked.locks(), json.loads(locked.run("recipe", "lock", "--check", "--json").stdout)
    if change == "patch":
        locked.patch.write_text(EDITED_PATCH)
    else:
        locked.header.write_text("// theirs\n")
    changed = json.loads(locked.run("recipe", "lock", "--json").stdout)
    assert locked.locks() == before and set(ids) == set(changed)
    assert not set(ids.values()) & set(changed.values())


def test_uv_environment_variables_do_not_change_the_lockfile(locked: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = locked.locks()
    monkeypatch.setenv("UV_RESOLUTION", "lowest")
    monkeypatch.setenv("UV_CONSTRAINT", str(locked.root / "nothing"))
    locked.run("recipe", "lock", "--upgrade")
    assert locked.locks() == before


def test_locking_again_restores_an_edited_wheel(locked: Site) -> None:
    before = locked.lock.read_bytes()
    CHANGES["wheel"][0](locked)
    assert locked.lock.read_bytes() != before
    locked.run("recipe", "lock", "vllm@9.0")
    assert locked.lock.read_bytes() == before


BAD_INPUT: dict[str, tuple[Callable[[Site], object], tuple[str, ...], int, str]] = {
    "no such wheel": (
        lambda site: (site.mirror / f"vllm-9.0-{VLLM_TAG}.whl").unlink(),
        (),
        22,
        "vllm was not found",
    ),
    "another FlashInfer is pinned": (
        lambda site: make_wheel(site.mirror, "vllm", "9.0", VLLM_TAG, requires=("flashinfer-python==0.9",)),
        (),
        22,
        "flashinfer-python==0.9",
    ),
    "only for another machine": (
        engine_with("x86_64", "aarch64"),
        (),
        22,
        "vllm==9.0 has no wheels with a matching platform tag|no usable wheels",
    ),
    "glibc too old": (engine_with("manylinux_2_35", "manylinux_2_17"), (), 22, "vllm"),
    "a glibc that the resolver does not know": (
        engine_with("manylinux_2_35", "manylinux_2_99"),
        (),
        11,
        "uv does not support platform 'manylinux_2_99_x86_64'",
    ),
    "unpinned": (
        engine_with('"vllm==9.0"', '"vllm==9.0", "helper"'),
        (),
        11,
        "'helper' is not pinned: write name==version",
    ),
    "only bad versions": (
        lambda site: [(site.mirror / f"helper-{version}-py3-none-any.whl").unlink() for version in ("1.0", "1.2")],
        (),
        22,
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


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_an_error_and_writes_nothing(site: Site, name: str) -> None:
    change, arguments, code, message = BAD_INPUT[name]
    site.run("recipe", "lock", "flashinfer@1.0")
    change(site)
    failed = site.run("recipe", "lock", "vllm@9.0", *arguments, code=code)
    assert re.search(message, failed.stderr), failed.stderr
    assert "Traceback" not in failed.stderr and not site.lock.exists()
    assert not list(site.recipes.glob(".*"))


def test_offline_without_cache_and_unreachable_index(site: Site) -> None:
    site.run("recipe", "lock", "flashinfer@1.0")
    environment = {**os.environ, "SM120KIT_STATE": str(site.state), "SM120KIT_DATA": str(site.data)}
    argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@9.0"]
    offline = subprocess.run([*argv, "--offline"], env=environment, capture_output=True, text=True)
    assert offline.returncode == 20 and "not all of it is cached" in offline.stderr
    missing = subprocess.run([*argv, "--mirror", str(site.root / "nowhere")], env=environment, capture_output=True, text=True)
    assert missing.returncode == 20 and "is not a directory" in missing.stderr
    closed = {**environment, "PIP_INDEX_URL": "http://somebody:secret@127.0.0.1:9/simple"}
    unreachable = subprocess.run(argv, env=closed, capture_output=True, text=True)
    assert unreachable.returncode == 20 and "127.0.0.1:9" in unreachable.stderr and "secret" not in unreachable.stderr


@contextmanager
def index(mirror: Path, uploaded: dict[str, str]) -> Iterator[str]:
    """A package index on loopback with the upload time of each wheel."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").rpartition("/")[2]
            if name.endswith(".metadata"):
                with zipfile.ZipFile(mirror / name.removesuffix(".metadata")) as wheel:
                    (member,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
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


def test_as_of_ignores_later_uploads_of_dependencies(site: Site) -> None:
    site.run("recipe", "lock", "flashinfer@1.0")
    engine_with('python = "3.12"', 'python = "3.12"\nas_of = "2026-05-01"')(site)
    uploaded = {"helper-1.2-py3-none-any.whl": "2026-05-01", f"vllm-9.0-{VLLM_TAG}.whl": "2026-06-01"}
    with index(site.mirror, uploaded) as url:
        environment = {**os.environ, "SM120KIT_STATE": str(site.state), "SM120KIT_DATA": str(site.data), "PIP_INDEX_URL": url}
        argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@9.0"]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert site.wheels() == {"helper": "1.0", "vllm": "9.0"}, "requirements of the recipe itself may be newer"
    assert not re.search("127.0.0.1|secret|http", site.lock.read_text())


@pytest.mark.parametrize("way", ["option", "variable", "file"])
def test_index_from_option_variable_or_file(site: Site, way: str) -> None:
    site.run("recipe", "lock", "flashinfer@1.0")
    file = site.root / "config.toml"
    environment = {
        **os.environ,
        "SM120KIT_STATE": str(site.state),
        "SM120KIT_DATA": str(site.data),
        "SM120KIT_CONFIG": str(file),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    }
    with index(site.mirror, {}) as url:
        file.write_text(f'index-url = "{url}"\n' if way == "file" else "")
        argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@9.0", *["--index-url", url] * (way == "option")]
        if way == "variable":
            environment["SM120KIT_INDEX_URL"] = url
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert site.wheels() == {"helper": "1.2", "vllm": "9.0"}
    assert "secret" not in done.stderr + site.lock.read_text()


def test_find_links_add_to_an_index(site: Site) -> None:
    site.run("recipe", "lock", "flashinfer@1.0")
    environment = {**os.environ, "SM120KIT_STATE": str(site.state), "SM120KIT_DATA": str(site.data)}
    empty = site.root / "empty"
    empty.mkdir()
    with index(empty, {}) as url:
        argv = [sys.executable, "-m", "sm120kit", "recipe", "lock", "vllm@9.0", "--index-url", url]
        refused = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert refused.returncode == 22, refused.stderr
        argv += ["--find-links", site.mirror.name]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=site.mirror.parent)
        assert done.returncode == 0, done.stderr
    assert site.wheels() == {"helper": "1.2", "vllm": "9.0"}


def test_locked_wheels_are_fetched_once_and_verified(locked: Site) -> None:
    from sm120kit import sources
    from sm120kit.core.errors import NotTrusted, OfflineMiss
    from sm120kit.core.workspace import Workspace
    from sm120kit.recipes import lockfile

    (closure,) = lockfile.read(locked.lock).closures
    workspace = Workspace.open(locked.state)
    with pytest.raises(OfflineMiss, match="2 of 2 wheels"):
        sources.wheelhouse(closure.wheels, workspace, sources.Origin(offline=True))
    good = locked.mirror / "helper-1.2-py3-none-any.whl"
    content = good.read_bytes()
    good.write_bytes(content + b"x")
    with pytest.raises(NotTrusted, match=r"helper 1\.2 is pinned to sha256"):
        sources.wheelhouse(closure.wheels, workspace, sources.Origin(str(locked.mirror)))
    good.write_bytes(content)
    paths = sources.wheelhouse(closure.wheels, workspace, sources.Origin(str(locked.mirror)))
    assert [path.name for path in paths] == [wheel.filename for wheel in closure.wheels]
    assert sources.wheelhouse(closure.wheels, workspace, sources.Origin(offline=True)) == paths
