"""The stub of the CUDA driver's library, loaded by a library from a real compiler and linker."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sm120kit.images import checks
from sm120kit.images.checks._suite_programs import RUNNER

IMAGE = Path(checks.__file__).parent / "suites"
SOURCE = """
int cuTensorMapEncodeTiled(void *map, int type);
int encode(void) { char map[128]; return cuTensorMapEncodeTiled(map, 1); }
"""
SUITE = """
import ctypes, sysconfig
def check_loads(expected):
    return {"answer": str(ctypes.CDLL(sysconfig.get_path("purelib") + "/linked.so").encode())}
"""


def has_driver() -> bool:
    try:
        return bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_library_that_links_the_driver_loads_with_the_stub(tmp_path: Path) -> None:
    (tmp_path / "linked.c").write_text(SOURCE)
    (tmp_path / "driver.c").write_text("int cuTensorMapEncodeTiled(void *map, int type) { return 0; }")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=tmp_path, check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    for argv in (
        ["-o", "libcuda.so", "-Wl,-soname,libcuda.so.1", "driver.c"],
        ["-o", site / "linked.so", "linked.c", "-L.", "-lcuda"],
    ):
        subprocess.run(["cc", "-shared", "-fPIC", *argv], cwd=tmp_path, check=True)
    load = f"import ctypes; ctypes.CDLL({str(site / 'linked.so')!r})"  # in a process that has no stub of another test
    assert "libcuda.so.1: cannot open" in subprocess.run([sys.executable, "-c", load], capture_output=True, text=True).stderr
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "checks_small.py").write_text(SUITE)
    (tmp_path / "expected.json").write_text("{}")
    for name, program in RUNNER.items():
        shutil.copy(program, tmp_path / name)
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "run.py", "expected.json", "small"], cwd=tmp_path, capture_output=True, text=True
    )
    (line,) = map(json.loads, done.stdout.splitlines())
    assert line["verdict"] == "passed" and line["facts"] == {"answer": "100"} and not done.stderr, (line, done.stderr)
