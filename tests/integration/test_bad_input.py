"""Invalid input to a build ends with a message and exit code of its own, and leaves no partial results."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "one\ntwo\nthree\nfour\nfive\n"
PATCH = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: sm120kit developers <dev@sm120kit.invalid>
Date: Mon, 5 Jan 2026 00:00:00 +0000
Subject: thing: change the third line

Applies-To: flashinfer >=1
Upstream-Status: Pending
Origin: this test
Matters-For: this test
No-Effect-For: everybody else
Evidence: this test
Drop-When: never

diff --git a/include/x.h b/include/x.h
index 0000000000000000000000000000000000000001..0000000000000000000000000000000000000002 100644
--- a/include/x.h
+++ b/include/x.h
@@ -2,3 +2,3 @@ one
 two
-three
+THREE
 four
"""


class Site:
    """A state directory, its own recipes and patches, and a mirror with a small sdist."""

    def __init__(self, root: Path) -> None:
        self.state, self.data, self.mirror = root / "state", root / "data", root / "mirror"
        self.mirror.mkdir()
        self.sdist = self.mirror / "flashinfer_python-1.0.tar.gz"
        self.pack({"include/x.h": HEADER, "flashinfer/_build_meta.py": '__version__ = "1.0"\n'})
        (self.data / "recipes" / "engines").mkdir(parents=True)
        (self.data / "patches" / "flashinfer").mkdir(parents=True)
        (self.data / "cutlass_overrides" / "include").mkdir(parents=True)
        self.recipe = self.data / "recipes" / "engines" / "flashinfer-1.0.toml"
        self.pin(hashlib.sha256(self.sdist.read_bytes()).hexdigest())
        self.patch("")

    def pack(self, files: dict[str, str]) -> None:
        metadata = {"PKG-INFO": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 1.0\n"}
        with tarfile.open(self.sdist, "w:gz") as archive:
            for name, text in {**metadata, **files}.items():
                member = tarfile.TarInfo(f"flashinfer_python-1.0/{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))

    def pin(self, sha256: str) -> None:
        self.recipe.write_text(
            'edition = 1\nname = "flashinfer-1.0"\nengine = "flashinfer"\nversion = "1.0"\nsummary = "a small one"\n'
            'archs = ["sm_120f"]\ndefault_group = "quick"\n'
            f'[sources.flashinfer]\nsdist = "flashinfer-python"\nversion = "1.0"\nsha256 = "{sha256}"\n'
            '[modules.m]\ngenerator = "flashinfer.jit.m:gen"\n'
            '[groups.quick]\nsummary = "all"\nmodules = ["m"]\n'
        )

    def patch(self, text: str) -> None:
        directory = self.data / "patches" / "flashinfer"
        (directory / "series").write_text("thing\n" if text else "")
        (directory / "thing.patch").unlink(missing_ok=True)
        if text:
            (directory / "thing.patch").write_text(text)

    def run(
        self, *arguments: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SM120KIT_STATE": str(self.state), "SM120KIT_DATA": str(self.data), **(env or {})}
        return subprocess.run(
            [*prefix, sys.executable, "-m", "sm120kit", *arguments], env=environment, capture_output=True, text=True
        )

    def build(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return self.run("build", "flashinfer@1.0", "--mirror", str(self.mirror), *arguments, **options)  # type: ignore[arg-type]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def refused(done: subprocess.CompletedProcess[str], code: int, *messages: str) -> None:
    assert done.returncode == code, done.stderr
    assert "error: " in done.stderr and "hint: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    for message in messages:
        assert message in done.stderr, done.stderr


def test_valid_input(site: Site) -> None:
    site.patch(PATCH)
    done = site.build("--to", "patch")
    assert done.returncode == 0, done.stderr


def test_unknown_names(site: Site) -> None:
    refused(site.run("build", "flashinfer@1.1"), 10, "unknown recipe 'flashinfer@1.1'", "did you mean 'flashinfer-1.0'?")
    refused(site.build("--kernels", "quik"), 10, "no kernel group 'quik'", "did you mean 'quick'?")
    refused(site.build("--arch", "sm_120"), 10, "unknown arch 'sm_120'", "sm_120f")
    refused(site.build("--to", "compile"), 2, "'compile' is not one of", "pack")


def test_recipe_with_problems(site: Site) -> None:
    site.recipe.write_text(site.recipe.read_text().replace("summary", "sumary", 1))
    refused(site.build(), 11, str(site.recipe), "sumary: unknown key; did you mean 'summary'?", "summary: missing")


def test_wrong_sha256(site: Site) -> None:
    site.pin("0" * 64)
    refused(site.build(), 21, "0" * 64, hashlib.sha256(site.sdist.read_bytes()).hexdigest())
    assert not [path for path in site.state.rglob("*") if path.name.endswith(".gz")], "the wrong file is stored"


def test_corrupt_sdist(site: Site) -> None:
    content = site.sdist.read_bytes()
    site.sdist.write_bytes(content[: len(content) // 2])
    refused(site.build(), 21)
    site.pin(hashlib.sha256(site.sdist.read_bytes()).hexdigest())
    refused(site.build(), 21, site.sdist.name)


def test_offline_without_cache(site: Site) -> None:
    refused(site.run("build", "flashinfer@1.0", "--offline"), 20, "flashinfer", "1.0")


@pytest.mark.parametrize(
    ("change", "code", "messages"),
    [
        (lambda text: text.replace("-three\n", "-drei\n"), 30, ("thing", "include/x.h", "@@ -2,3 +2,3 @@")),
        (lambda text: text.replace("x.h", "../x.h"), 11, ("thing.patch", "../x.h")),
        (lambda text: text.replace("Evidence: this test\n", "").replace("Origin: this test\n", ""), 11, ("Evidence", "Origin")),
        (lambda text: text.replace("-three\n+THREE", "-THREE\n+three"), 30, ("thing", "already")),
        (lambda text: text.replace("flashinfer >=1", "flashinfer 1 or so"), 11, ("Applies-To", "1 or so")),
    ],
    ids=["conflicts", "escapes", "lacks-trailers", "already-upstream", "bad-range"],
)
def test_patch_that_cannot_be_applied(site: Site, change: Callable[[str], str], code: int, messages: tuple[str, ...]) -> None:
    site.patch(change(PATCH))
    refused(site.build(), code, *messages)


@pytest.fixture
def path_without_compilers(tmp_path: Path) -> str:
    """A PATH that contains only git."""
    tools = tmp_path / "tools"
    tools.mkdir()
    git = shutil.which("git")
    assert git
    (tools / "git").write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} exec {git} "$@"\n')
    (tools / "git").chmod(0o755)
    return str(tools)


def test_no_compiler_at_all(site: Site, path_without_compilers: str) -> None:
    refused(site.build(env={"PATH": path_without_compilers}), 40, "no C++ compiler")


def test_nvcc_too_old(site: Site, tmp_path: Path) -> None:
    home = tmp_path / "cuda-12.6"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n")
    (home / "bin" / "nvcc").chmod(0o755)
    # Hides the CUDA wheels of the interpreter, which may have a newer nvcc.
    words = [
        "-c",
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'nvidia' else f(n, *a);",
    ]
    words[1] += "import sys; sys.argv[0] = 'sm120kit'; from sm120kit.cli import main; main()"
    env = {
        **os.environ,
        "CUDA_HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "SM120KIT_STATE": str(site.state),
        "SM120KIT_DATA": str(site.data),
    }
    argv = [sys.executable, *words, "build", "flashinfer@1.0", "--mirror", str(site.mirror)]
    refused(
        subprocess.run(argv, env=env, capture_output=True, text=True), 40, "nvcc 12.6.85 is older than 12.9", "sm120kit[cuda]"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory], capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.root
def test_full_disk(site: Site, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(7 << 20))
    site.pack({"include/x.h": HEADER, "big": "".join(map(str, range(900_000)))})
    site.pin(hashlib.sha256(site.sdist.read_bytes()).hexdigest())
    refused(site.build(env={"SM120KIT_STATE": str(small_disk / "state")}), 41, "no space left", str(small_disk))


@pytest.mark.root
def test_read_only_state(site: Site, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    refused(site.build(env={"SM120KIT_STATE": str(small_disk / "state")}), 42, "cannot write below", "SM120KIT_STATE")


def test_state_below_a_file(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(site.build(env={"SM120KIT_STATE": str(tmp_path / "file" / "state")}), 42, "cannot write below")


def test_ctrl_c(site: Site) -> None:
    """Interrupted while it waits for another build; the same command succeeds afterwards."""
    env = {**os.environ, "SM120KIT_STATE": str(site.state), "SM120KIT_DATA": str(site.data)}
    directory = site.state / "locks"
    argv = [sys.executable, "-m", "sm120kit", "build", "flashinfer@1.0", "--mirror", str(site.mirror), "--to", "patch"]
    # Take every lock that the build uses, so that it must wait.
    assert site.build("--to", "fetch").returncode == 0
    locks = [path.open("r+") for path in directory.iterdir() if path.name != "in-use.lock"]
    shutil.rmtree(site.state / "checkouts")
    for file in locks:
        fcntl.flock(file, fcntl.LOCK_EX)
    child = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert "waiting for another sm120kit" in child.stderr.readline()
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    output = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "interrupted" in output and "Traceback" not in output
    for file in locks:
        file.close()
    assert site.build("--to", "patch").returncode == 0
