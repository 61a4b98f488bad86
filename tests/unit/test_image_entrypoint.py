"""The entrypoint of an engine's image without a driver, and with one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.kernels import driver_stub
from sm120kit.recipes import arguments

ROOT = Path(__file__).parents[2]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The files of the entrypoint, and an installed engine."""
    shutil.copyfile(ROOT / "image_programs" / "serve.py", tmp_path / "serve.py")
    (tmp_path / "help.txt").write_text(arguments.help_text(recipes.load_engine("vllm-0.19.1")))
    info = tmp_path / "site" / "vllm-0.19.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.19.1\n")
    return tmp_path


def start(image: Path, *argv: str, driver: bytes = b"") -> subprocess.Popen[str]:
    if driver:
        (image / "libcuda.so.1").write_bytes(driver)
    return subprocess.Popen(
        [sys.executable, image / "serve.py", *argv],
        env={
            "HOME": str(image / "home"),
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(image),
            "PYTHONPATH": str(image / "site"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def driver() -> bytes:
    return driver_stub.library(["cuInit"])


@pytest.mark.parametrize("option", ["--help", "-h", "--help=ModelConfig"])
def test_help_lists_the_recorded_options(image: Path, option: str) -> None:
    child = start(image, "vllm", "serve", "/model", option)
    out, err = child.communicate()
    assert child.returncode == 0 and err == ""
    assert out.startswith("vllm 0.19.1, served by: vllm serve [ARGUMENT]...") and "  --max-num-seqs INT\n" in out
    assert "  --api-key VALUE [VALUE ...]\n" in out and "  --calculate-kv-scales, --no-calculate-kv-scales\n" in out
    assert "--gpus all" in out


def test_version_is_that_of_the_installed_engine(image: Path) -> None:
    child = start(image, "vllm", "serve", "--version")
    assert child.communicate() == ("0.19.1\n", "") and child.returncode == 0


def test_serving_without_a_driver_is_refused(image: Path) -> None:
    child = start(image, "vllm", "serve", "/model")
    out, err = child.communicate()
    assert child.returncode == 1 and out == "" and "no NVIDIA driver" in err and "Traceback" not in err


def test_with_a_driver_the_process_becomes_the_serve_command(image: Path, driver: bytes) -> None:
    program = "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)"
    child = start(image, sys.executable, "-c", program, "/model", "--help", driver=driver)
    out, err = child.communicate()
    assert (out, err, child.returncode) == (f"{child.pid} ['/model', '--help']\n", "", 7)


def test_kernels_of_the_image_are_added_to_the_cache(image: Path, driver: bytes) -> None:
    key = "ab" + 62 * "0"
    for name in ("ab/" + key, "cd/cd" + 62 * "1"):
        entry = image / "b12x" / "entries" / f"{name}.o"
        entry.parent.mkdir(parents=True)
        entry.write_bytes(name.encode())
    cache = image / "home" / ".cache" / "b12x" / "cute_compile"
    (cache / "ab").mkdir(parents=True)
    (cache / "ab" / f"{key}.o").write_bytes(b"compiled before")
    program = "import os; print(sorted(os.listdir(os.environ['HOME'] + '/.cache/b12x/cute_compile')))"
    child = start(image, sys.executable, "-c", program, driver=driver)
    out, err = child.communicate()
    assert (out, err, child.returncode) == ("['ab', 'cd']\n", "", 0)
    assert (cache / "ab" / f"{key}.o").read_bytes() == b"compiled before"
    assert [path.name for path in (cache / "cd").iterdir()] == ["cd" + 62 * "1" + ".o"]


def test_kernels_of_b12x_1_5_are_added_with_their_manifests(image: Path, driver: bytes) -> None:
    entry = image / "b12x" / "entries" / "ab"
    entry.mkdir(parents=True)
    for name in ("ab.o", "ab.json"):
        (entry / name).touch()
    program = "import os, sys; print(sorted(os.listdir(os.environ['HOME'] + '/.cache/b12x/compile/ab')))"
    out, err = start(image, sys.executable, "-c", program, driver=driver).communicate()
    assert (out, err) == ("['ab.json', 'ab.o']\n", "")


def test_cache_of_triton_names_the_kernels_of_the_image(image: Path, driver: bytes, tmp_path: Path) -> None:
    entry = image / "triton_ahead" / "entries" / "KEY"
    entry.mkdir(parents=True)
    for name in ("__grp__add.json", "add.json", "add.cubin"):
        (entry / name).write_text(name)
    program = "import os, pathlib, sys; print(*filter(os.path.isfile, pathlib.Path(os.environ[sys.argv[1]]).rglob('*')))"
    child = start(image, sys.executable, "-c", program, "TRITON_CACHE_DIR", driver=driver)
    out, err = child.communicate()
    assert (out.strip(), err) == (str(image / "home" / ".triton" / "cache" / "KEY" / "__grp__add.json"), "")


def test_cache_of_triton_that_cannot_be_written_is_not_named(image: Path, driver: bytes) -> None:
    """With a root file system that is read-only, the caches that are mounted are written, and vLLM has its own there."""
    entry = image / "triton_ahead" / "entries" / "KEY"
    entry.mkdir(parents=True)
    (entry / "__grp__add.json").touch()
    (image / "home").mkdir()
    (image / "home" / ".triton").write_text("no directory")
    program = "import os; print(os.environ.get('TRITON_CACHE_DIR'))"
    child = start(image, sys.executable, "-c", program, driver=driver)
    out, err = child.communicate()
    assert out == "None\n" and err.startswith("warning: ") and "Triton compiles its kernels on first use" in err


def test_server_starts_without_a_writable_cache(image: Path, driver: bytes) -> None:
    entry = image / "b12x" / "entries" / "ab" / "ab.o"
    entry.parent.mkdir(parents=True)
    entry.touch()
    (image / "home").write_text("no directory")
    child = start(image, sys.executable, "-c", "print('serving')", driver=driver)
    out, err = child.communicate()
    assert out == "serving\n" and err.startswith("warning: ") and "b12x compiles its kernels on first use" in err


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The entrypoint in a container with a mount below the home directory of root, and that mount."""
    spec = importlib.util.spec_from_file_location("serve", ROOT / "image_programs" / "serve.py")
    assert spec and spec.loader
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    source = tmp_path / "root" / ".cache" / "hugging face"
    source.mkdir(parents=True)
    (source / "model").touch()
    points = [tmp_path / "proc", source, tmp_path / "rooted" / "x"]
    lines = [f"22 1 0:1 / {str(point).replace(' ', chr(92) + '040')} rw - ext4 /dev/sda rw\n" for point in points]
    (tmp_path / "mountinfo").write_text("".join(lines))
    monkeypatch.setattr(serve, "MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(serve, "ROOT_HOME", tmp_path / "root")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return serve, source


def test_mount_below_the_home_of_root_is_that_of_the_user(mounted: tuple[Any, Path], tmp_path: Path) -> None:
    serve, source = mounted
    (tmp_path / "home" / ".cache" / source.name).mkdir(parents=True)
    for _ in range(2):  # a container that is started again has the link
        serve.link_mounts()
        assert (tmp_path / "home" / ".cache" / source.name / "model").samefile(source / "model")


def test_mounted_file_is_linked_too(mounted: tuple[Any, Path], tmp_path: Path) -> None:
    serve, source = mounted
    shutil.rmtree(source)
    source.write_text("token")
    serve.link_mounts()
    assert (tmp_path / "home" / ".cache" / source.name).read_text() == "token"


@pytest.mark.parametrize("problem", ["file in the way", "no directory"])
def test_mount_that_the_user_cannot_use_is_refused(
    mounted: tuple[Any, Path], tmp_path: Path, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, source = mounted
    target = tmp_path / "home" / ".cache" / source.name
    if problem == "file in the way":
        target.mkdir(parents=True)
        (target / "kept").touch()
    else:
        shutil.rmtree(source)
    with pytest.raises(SystemExit) as ended:
        serve.link_mounts()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and str(source) in error and f":{target}" in error and target.is_dir() == target.exists()


def test_help_of_a_recipe_without_recorded_options() -> None:
    text = arguments.help_text(recipes.load_engine("vllm-0.20.0"))
    assert "vllm 0.20.0" in text and "were not recorded" in text
