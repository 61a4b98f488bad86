"""The checks that run inside images, each on a small tree that passes and on trees with a fault."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import py_compile
import re
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core.data_roots import data_root
from sm120kit.images import checks
from sm120kit.images import image_inputs as contexts
from sm120kit.images.checks import _image_checks, _outside
from sm120kit.images.checks._suite_programs import RUNNER
from sm120kit.images.image_records import Check, CheckResult, Image
from sm120kit.kernels import driver_stub

IMAGE = Path(checks.__file__).parent / "suites"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Load ``run``, ``driver_stub`` or a suite, as the runner does."""
    monkeypatch.syspath_prepend(str(IMAGE))
    monkeypatch.setitem(sys.modules, "driver_stub", driver_stub)

    def load(name: str) -> ModuleType:
        path = RUNNER.get(f"{name}.py", IMAGE / name / f"checks_{name}.py")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        module.__dict__["NotRun"] = NotRun
        if path.stem != name:
            module.__dict__["is_left_out"] = load("run").is_left_out
        spec.loader.exec_module(module)
        return module

    return load


class NotRun(Exception):
    """Stands for the exception that the runner adds to suites."""


# The stub of the driver's library.


def elf(strings: bytes) -> bytes:
    """A file with one dynamic section and its string table."""
    sections = struct.pack("<IIQQQQIIQQ", 0, 6, 0, 0, 0, 0, 1, 0, 0, 0) + struct.pack(
        "<IIQQQQIIQQ", 0, 3, 0, 0, 192, len(strings), 0, 0, 0, 0
    )
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 2, 0)
    return head + sections + strings


def test_driver_stub_functions_return_no_device(load: Callable[[str], Any], tmp_path: Path) -> None:
    driver_stub = load("driver_stub")
    names = [f"cuCall{number}" for number in range(300)]
    (tmp_path / "libcuda.so.1").write_bytes(driver_stub.library(names))
    # In a process of its own, because a loaded library cannot be unloaded.
    script = (
        "import ctypes, sys; library = ctypes.CDLL('libcuda.so.1')\n"
        "print({getattr(library, name)(1, 2, 3) for name in sys.argv[1:]}, hasattr(library, 'cuOther'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "{100} False\n", done.stderr


def test_driver_stub_has_machine_code_of_its_machine(load: Callable[[str], Any]) -> None:
    driver_stub = load("driver_stub")
    file = driver_stub.library(["cuInit"], "aarch64")
    (machine,) = struct.unpack_from("<H", file, 18)
    assert machine == 183 and bytes.fromhex("800c8052c0035fd6") in file  # mov w0, #100; ret
    assert bytes.fromhex("b864000000c3") in driver_stub.library(["cuInit"], "x86_64")
    with pytest.raises(KeyError):
        driver_stub.library(["cuInit"], "riscv64")


def test_driver_stub_names_are_imports_of_libraries_that_need_the_driver(load: Callable[[str], Any], tmp_path: Path) -> None:
    driver_stub = load("driver_stub")
    python = Path(sys.executable).resolve()
    assert b"\0libc.so.6\0" in driver_stub.dynamic_strings(python)
    for name, content in (("empty", b""), ("text", b"x" * 100), ("cut", b"\x7fELF\x02\x01")):
        (tmp_path / name).write_bytes(content)
    assert [driver_stub.dynamic_strings(path) for path in sorted(tmp_path.iterdir())] == [b"", b"", b""]

    linked = tmp_path / "linked.so"
    linked.write_bytes(elf(b"\0libcuda.so.1\0cuMemAlloc_v2\0cudaMalloc\0cuLaunchKernel\0"))
    other = tmp_path / "other.so"
    other.write_bytes(elf(b"\0libcufile.so\0cuFileRead\0"))
    assert driver_stub.imported_names([linked, other, python]) == ["cuInit", "cuLaunchKernel", "cuMemAlloc_v2"]


# The runner.

SUITE = """
import ctypes, subprocess, time, warnings
def check_slow(expected): time.sleep(0.2)
def check_driver(expected): return {"answer": str(ctypes.CDLL("libcuda.so.1").cuInit(0))}
def check_known_messages(expected):
    print("INFO 12:00 started")
    subprocess.run(["echo", "INFO 12:01 running"])
    warnings.warn("old name", DeprecationWarning)
def check_unknown_message(expected): subprocess.run("echo oops >&2", shell=True)
def check_unknown_warning(expected): warnings.warn("old name, used again", DeprecationWarning)
"""
ALLOWED = """
[[messages]]
pattern = "INFO .*"
reason = "its log"
[[messages]]
pattern = "DeprecationWarning: old name"
reason = "the name is old"
"""


def test_runner_fails_on_messages_without_exemption(tmp_path: Path) -> None:
    for name, program in RUNNER.items():
        shutil.copy(program, tmp_path / name)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "checks_small.py").write_text(SUITE)
    (tmp_path / "small" / "allowed.toml").write_text(ALLOWED)
    (tmp_path / "expected.json").write_text("{}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "run.py", "expected.json", "small"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert lines["slow"]["seconds"] >= 0.2
    assert lines["driver"]["verdict"] == "passed", "the runner did not restart with the stub"
    assert lines["known_messages"]["verdict"] == "passed"
    assert lines["known_messages"]["facts"] == {"exempt in small/known_messages": "1 x the name is old; 2 x its log"}
    assert lines["unknown_warning"]["verdict"] == "failed" and "used again" in lines["unknown_warning"]["detail"]
    # The host treats any line on stderr as a failure.
    assert done.stderr == "small/unknown_message: oops\n"


def test_checks_outside_the_container_are_timed() -> None:
    def results() -> Iterator[tuple[Check, dict[str, str]]]:
        yield Check("base", "size", CheckResult.PASSED), {}
        time.sleep(0.2)
        yield Check("base", "signature", CheckResult.PASSED), {}

    _, slow = (check for check, _ in _image_checks._timed(results()))
    assert slow.seconds >= 0.2


MEETING = """
import os, pathlib, subprocess, time
BESIDE = ("program",)
def meet(name, other):
    pathlib.Path(name).touch()
    deadline = time.monotonic() + 60
    while not pathlib.Path(other).exists():
        assert time.monotonic() < deadline, f"{other} is not running"
        time.sleep(0.01)
def check_program(expected):
    meet("one", "two")
    subprocess.run("echo oops >&2", shell=True)
    return {"home": os.environ["HOME"]}
def check_module(expected): meet("two", "one"); return {"home of a module": os.environ["HOME"]}
"""


@pytest.mark.parametrize("ends", [False, True])
def test_checks_that_start_programs_run_beside_the_others(tmp_path: Path, ends: bool) -> None:
    for name, program in RUNNER.items():
        shutil.copy(program, tmp_path / name)
    (tmp_path / "small").mkdir()
    end = "    if 'ends' in expected: os.kill(os.getpid(), 9)\n    subprocess"
    (tmp_path / "small" / "checks_small.py").write_text(MEETING.replace("    subprocess", end))
    (tmp_path / "expected.json").write_text(json.dumps({"ends": True} if ends else {}))
    argv = [sys.executable, "-B", "run.py", "expected.json", "small"]
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True)
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert lines["module"]["verdict"] == "passed", lines["module"]["detail"]
    assert lines["module"]["facts"] == {"home of a module": str(tmp_path)}
    if ends:
        assert done.returncode != 0 and "program" not in lines  # the host reports that the checks did not finish
    else:
        assert [*lines] == ["module", "program"] and lines["program"]["facts"]["home"] != str(tmp_path)
        assert done.returncode == 0 and done.stderr == "small/program: oops\n"


@pytest.fixture
def tree(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The base suite on a small Python environment with a single distribution."""
    base = load("base")
    prefix = tmp_path / "venv"
    site = prefix / "lib" / "python3" / "site-packages"
    info = site / "one-1.0.dist-info"
    info.mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text("")
    (site / "one.py").write_text("ONE = 1\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: One\nVersion: 1.0\nRequires-Dist: packaging>=1\n")
    lines = []
    for file in (site / "one.py", info / "METADATA"):
        lines.append(f"{file.relative_to(site)},sha256={hash_of(file.read_bytes())},{file.stat().st_size}")
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]))
    py_compile.compile(str(site / "one.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    monkeypatch.setattr(base, "PREFIX", prefix)
    monkeypatch.setattr(base, "SITE", site)
    monkeypatch.setattr(base, "distributions", base.distributions.__wrapped__)
    return base, site


def hash_of(content: bytes) -> str:
    """A hash in the encoding of RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_base_versions_must_be_those_of_the_lock(tree: tuple[Any, Path]) -> None:
    base, _ = tree
    base.check_versions({"distributions": {"one": "1.0"}})
    for locked, message in (({"one": "2.0"}, "one 1.0, not 2.0"), ({}, "not in the lock"), ({"two": "1"}, "two absent")):
        with pytest.raises(AssertionError, match=message):
            base.check_versions({"distributions": locked})


def test_base_files_must_be_those_of_the_wheels(tree: tuple[Any, Path]) -> None:
    base, site = tree
    base.check_files({})
    (site / "added.py").write_text("")
    with pytest.raises(AssertionError, match="belongs to no wheel"):
        base.check_files({})
    (site / "added.py").unlink()
    (site / "one.py").write_text("ONE = 2\n")
    with pytest.raises(AssertionError, match="is not the file of One"):
        base.check_files({})
    with pytest.raises(AssertionError, match="do not belong to their source"):
        base.check_bytecode({})
    (site / "one.py").unlink()
    with pytest.raises(AssertionError, match=r"one\.py: No such file"):
        base.check_files({})


def test_base_files_are_checked_in_pieces_and_metadata_is_parsed_once(
    tree: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheels of an engine have 60,000 files, one of them 0.6 GB."""
    base, site = tree
    rows = []
    for number in range(200):
        (site / f"data{number}").touch()
        rows.append(f"data{number},sha256={hash_of(b'')},0\n")
    with (site / "large").open("wb") as file:
        file.truncate(64 * 2**20)
    record = site / "one-1.0.dist-info" / "RECORD"
    record.write_text(f"{record.read_text()}\n{''.join(rows)}large,sha256={hash_of(bytes(64 * 2**20))},{64 * 2**20}\n")
    read: list[str] = []
    parse = metadata.PathDistribution.read_text

    def count(distribution: metadata.PathDistribution, name: Any) -> str | None:
        read.append(str(name))
        return parse(distribution, name)

    monkeypatch.setattr(metadata.PathDistribution, "read_text", count)
    tracemalloc.start()
    base.check_files({})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read.count("METADATA") <= 3 and peak < 16 * 2**20


def test_base_files_that_were_hashed_before_are_not_read(tree: tuple[Any, Path]) -> None:
    base, site = tree
    digests = {
        str(path): "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        for path in site.rglob("*.py")
    }
    count = base.check_files({})["files read"]
    assert int(base.check_files({"digests": digests})["files read"]) == int(count) - len(digests) < int(count)
    path = site / "one.py"
    for wrong in ("sha256=" + "A" * 43, "sha512=" + "A" * 43):
        with pytest.raises(AssertionError, match=r"one\.py is not the file of One 1\.0"):
            base.check_files({"digests": digests | {str(path): wrong}})
    path.unlink()
    with pytest.raises(AssertionError, match=r"one\.py: No such file"):
        base.check_files({"digests": digests})
    path.mkdir()
    with pytest.raises(AssertionError, match=r"one\.py: Is a directory"):
        base.check_files({"digests": digests})


def test_base_left_out_files_are_absent_and_no_library_needs_them(tree: tuple[Any, Path]) -> None:
    base, site = tree
    record = site / "one-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + f"\none/big.a,sha256={'A' * 43},100\none/lib/libone.so.2,,20\n")
    expected: dict[str, Any] = {"leave_out": {"one": ["one/*.a", "one/lib/libone.so.2"]}}
    with pytest.raises(AssertionError, match=r"big\.a"):
        base.check_files({})
    base.check_files(expected)
    assert base.check_left_out(expected) == {"files left out": "one: 2 files, 120 bytes", "bytes left out": "120"}
    assert base.check_left_out({}) == {"files left out": "none", "bytes left out": "0"}
    for distribution, pattern, message in (("one", "absent/*", "one: no file matches"), ("two", "*", "not installed: two")):
        with pytest.raises(AssertionError, match=message):
            base.check_left_out({"leave_out": {distribution: [pattern]}})
    (site / "writes.py").write_text("from pathlib import Path; Path.home().joinpath('.written').touch()")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        base.check_imports_without_left_out({"imports": ("writes",)})
    assert not (Path.home() / ".written").exists()
    imported = base.check_imports_without_left_out({"imports": ("json", "base64")})
    assert imported == {"imported without them": "json, base64"}
    with pytest.raises(AssertionError, match=r"cannot import json, absent_module: .*No module named 'absent_module'"):
        base.check_imports_without_left_out({"imports": ("json", "absent_module")})
    assert base.check_imports_without_left_out({}) == {}
    (site / "one").mkdir()
    (site / "one" / "big.a").write_text("")
    with pytest.raises(AssertionError, match=r"one: one/big\.a"):
        base.check_left_out(expected)
    (site / "one" / "big.a").unlink()
    (site / "user.so").write_bytes(elf(b"\0libone.so.2\0libc.so.6\0"))
    with pytest.raises(AssertionError, match=r"user\.so needs libone\.so\.2"):
        base.check_left_out(expected)
    (site / "libone.so.2").write_bytes(b"")  # of another toolkit
    base.check_left_out(expected)


def test_base_left_out_file_may_be_that_of_another_distribution(tree: tuple[Any, Path]) -> None:
    base, site = tree
    other = site / "two-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: Two\nVersion: 1.0\n")
    (other / "RECORD").write_text("one.py,,9\n")
    assert base.check_left_out({"leave_out": {"two": ["one.py"]}})["files left out"] == "two: 1 files, 9 bytes"
    with pytest.raises(AssertionError, match=r"two: one\.py"):
        base.check_left_out({"leave_out": {"two": ["one.py"], "one": ["one.py"]}})


def test_base_file_of_which_the_wheels_record_is_wrong_is_reported(tree: tuple[Any, Path]) -> None:
    base, site = tree
    (site / "one.py").write_text("ONE = 3\n")
    for patterns in ([], ["two.py"]):
        with pytest.raises(AssertionError, match=r"one\.py is not the file of One 1\.0"):
            base.check_files({"wrong_record": {"one": patterns}})
    assert base.check_files({"wrong_record": {"one": ["one.*"]}})["not as in their RECORD"] == "one.py"
    (site / "one.py").unlink()
    with pytest.raises(AssertionError, match=r"one\.py: No such file"):
        base.check_files({"wrong_record": {"one": ["one.*"]}})


def test_base_file_in_two_unrelated_wheels_may_be_either(tree: tuple[Any, Path]) -> None:
    base, site = tree
    other = site / "two-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: Two\nVersion: 1.0\n")
    (other / "RECORD").write_text(f"one.py,sha256={'A' * 43},9\ntwo-1.0.dist-info/METADATA,,\ntwo-1.0.dist-info/RECORD,,\n")
    shared = base.check_files({})["several wheels bring"]
    assert shared.startswith("one.py of ") and "One 1.0" in shared and "Two 1.0" in shared
    (site / "one.py").write_text("ONE = 2\n")
    with pytest.raises(AssertionError, match="is not the file of"):
        base.check_files({})


@pytest.mark.parametrize(
    ("requirement", "message"), [("One==1.0", "is not the file of Two 1.0"), ("One; extra == 'more'", ""), ("Three", "")]
)
def test_base_file_in_two_wheels_must_be_that_of_the_requiring_wheel(
    tree: tuple[Any, Path], requirement: str, message: str
) -> None:
    base, site = tree
    other = site / "two-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Two\nVersion: 1.0\nRequires-Dist: {requirement}\n")
    (other / "RECORD").write_text(f"one.py,sha256={'A' * 43},9\ntwo-1.0.dist-info/METADATA,,\ntwo-1.0.dist-info/RECORD,,\n")
    if not message:
        assert "Two 1.0" in base.check_files({})["several wheels bring"]
        return
    with pytest.raises(AssertionError, match=message):
        base.check_files({})
    (other / "RECORD").write_text((other / "RECORD").read_text().replace("A" * 43, hash_of(b"ONE = 2\n")))
    (site / "one.py").write_text("ONE = 2\n")
    assert base.check_files({})["several wheels bring"] == "nothing"


def test_base_requirements_are_satisfied_or_overridden(tree: tuple[Any, Path]) -> None:
    base, site = tree
    strict: dict[str, list[str]] = {"overridden": []}
    for name in ("packaging", "pytest"):
        (site / f"{name}-2.0.dist-info").mkdir()
        (site / f"{name}-2.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    base.check_requirements(strict)
    metadata = site / "one-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: Absent_Thing\nRequires-Dist: pytest<1\n")
    with pytest.raises(AssertionError, match=r"(?s)Absent_Thing, which is absent.*pytest<1, installed is"):
        base.check_requirements(strict)
    with pytest.raises(AssertionError, match=r"^One requires Absent_Thing, which is absent$"):
        base.check_requirements({"overridden": ["pytest"]})


# flashinfer


def test_flashinfer_package_must_match_the_labels(load: Callable[[str], Any], monkeypatch: Any) -> None:
    suite = load("flashinfer")
    patch = {"project": "cutlass", "slug": "one", "sha256": "e" * 64}
    installed = {"recipe": "r", "commit": "c", "tree": "t", "plan": "p", "patches": [patch], "modules": ["m"]}
    expected = installed | {"patches": ["cutlass/one@eeeeeeeeeeee"]}
    monkeypatch.setattr(suite, "origin", lambda: installed)
    suite.check_patched(expected)
    for key in installed:
        with pytest.raises(AssertionError, match=key):
            suite.check_patched(expected | {key: ["other"]})


def test_flashinfer_module_that_would_be_compiled_fails(load: Callable[[str], Any], monkeypatch: Any, tmp_path: Path) -> None:
    suite = load("flashinfer")

    def compile_module() -> None:
        (tmp_path / "module.so").touch()

    spec = SimpleNamespace(name="m", is_aot=True, aot_path="m.so", build_and_load=lambda: None)
    monkeypatch.setattr(suite, "specs", lambda expected: iter([spec]))
    monkeypatch.setattr(suite.Path, "home", lambda: tmp_path)
    expected: dict[str, Any] = {"modules": ["m"]}
    suite.check_compiled_ahead(expected)
    suite.check_modules_load(expected)
    with pytest.raises(AssertionError, match="the label is"):
        suite.check_compiled_ahead(expected | {"modules": ["m", "n"]})
    spec.build_and_load = compile_module
    with pytest.raises(AssertionError, match=r"was compiled: .*module.so"):
        suite.check_modules_load(expected)
    spec.is_aot = False
    with pytest.raises(AssertionError, match="would be compiled on first use"):
        suite.check_compiled_ahead(expected)


# engines: small packages with the interfaces of vLLM and SGLang

VLLM = {
    "torch.py": "",
    "flashinfer/__init__.py": "",
    "vllm/__init__.py": "",
    "vllm/_C.py": "",
    "vllm/platforms/__init__.py": """
class Nowhere:
    def is_unspecified(self): return True
current_platform = Nowhere()
""",
    "vllm/platforms/cuda.py": """
class CudaPlatform:
    def is_unspecified(self): return False
    @classmethod
    def get_device_capability(cls, device_id=0): raise RuntimeError("Found no NVIDIA driver")
""",
    "vllm/platforms/interface.py": """
from typing import NamedTuple
class DeviceCapability(NamedTuple):
    major: int
    minor: int
""",
    "vllm/platforms/cpu.py": """
class CpuPlatform:
    def is_unspecified(self): return False
""",
    "vllm/_custom_ops.py": "def cutlass_scaled_mm_supports_fp4(capability): return capability >= 100\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/flashinfer.py": "def has_flashinfer(): return True\ndef has_flashinfer_cutlass_fused_moe(): return True\n",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/openai/__init__.py": "",
    "vllm/entrypoints/openai/cli_args.py": """
import json
def make_arg_parser(parser):
    parser.add_argument("model")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--tool-call-parser", choices=["hermes", "qwen3_coder"])
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--speculative-config", type=json.loads)
    return parser
def validate_parsed_serve_args(args):
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("--enable-auto-tool-choice requires --tool-call-parser")
""",
    "vllm/entrypoints/openai/api_server.py": """
def validate_api_server_args(args):
    if args.tool_call_parser not in (None, "hermes"): raise KeyError(f"invalid tool call parser: {args.tool_call_parser}")
""",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/main.py": """
import sys
from vllm import platforms
def main():
    if platforms.current_platform.is_unspecified(): raise RuntimeError("Failed to infer device type")
    print("0.19.1" if sys.argv[1] == "--version" else "usage: vllm serve")
""",
    "vllm-0.19.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.19.1\n",
    "vllm-0.19.1.dist-info/RECORD": "vllm/_C.abi3.so,,\nvllm/__init__.py,,\n",
    "flashinfer_python-0.6.6.dist-info/METADATA": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.6\n",
    "flashinfer_python-0.6.6.dist-info/RECORD": "flashinfer/__init__.py,,\n",
}
SGLANG = {
    "torch.py": "class ops:\n    class sgl_kernel:\n        fp8_scaled_mm = None\n",
    "sgl_kernel/__init__.py": "from sgl_kernel.sm100 import common_ops\n",
    "sgl_kernel/sm100/__init__.py": "",
    "sgl_kernel/sm100/common_ops.py": "",
    "flashinfer/__init__.py": "",
    "flashinfer_python-0.7.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n",
    "flashinfer_python-0.7.2.dist-info/RECORD": "flashinfer/__init__.py,,\n",
    "sgl_kernel/flash_ops.py": "",
    "sglang_kernel-0.4.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang-kernel\nVersion: 0.4.2\n",
    "sglang_kernel-0.4.2.dist-info/RECORD": """sgl_kernel/flash_ops.abi3.so,,
sgl_kernel/sm90/common_ops.abi3.so,,
lib/mscclpp.so,,
""",
    "sglang-0.5.23.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n",
    "sglang-0.5.23.dist-info/RECORD": "sglang/__init__.py,,\n",
    "sglang/__init__.py": "",
    "sglang/launch_server.py": "print('--model-path')\n",
    "sglang/jit_kernel/__init__.py": "",
    "sglang/jit_kernel/utils.py": """
import flashinfer
def get_cutlass_include_paths(): return [flashinfer.__path__[0] + "/data/cutlass/include"]
def override_jit_cuda_arch(major, minor, suffix=""): return f"{major}.{minor}{suffix}"
""",
    "sglang/jit_kernel/nvfp4.py": """
class Module:
    def scaled_fp4_quant(self): pass
def _nvfp4_arch_env(): raise RuntimeError("NVFP4 JIT kernels require CUDA.")
def _jit_nvfp4_quant_module():
    assert _nvfp4_arch_env() == "12.0a"
    return Module()
""",
    "sglang/srt/__init__.py": "",
    "sglang/srt/server_args.py": """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--tp-size", type=int)
""",
}
SGLANG_0_5_23 = {
    "sglang/jit_kernel/__init__.py": "raise ModuleNotFoundError('sglang.jit_kernel')",
    "sglang/kernels/jit/utils/__init__.py": """
import contextlib
archs = []
@contextlib.contextmanager
def override_jit_cuda_arch(major, minor, suffix=""):
    archs.append(f"{major}.{minor}{suffix}")
    yield
    archs.pop()
""",
    "sglang/kernels/jit/utils/deps.py": SGLANG["sglang/jit_kernel/utils.py"],
    "sglang/kernels/ops/gemm/sm120_nvfp4_moe.py": """
from sglang.kernels.jit import utils
class Module:
    def run(self): pass
def _mtp_module():
    assert utils.archs == ["12.0a"]
    return Module()
""",
}
"""Files of SGLang that replace others of it, or are new."""
ARGUMENTS = {
    "vllm": ["/model", "--max-num-seqs", "8", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"],
    "sglang": ["--model-path", "/model", "--tp-size", "2"],
}


NEED_ENGINE = ("compiles_at_run_time", "modules_ahead", "triton_kernels", "backends")
"""Checks that need FlashInfer, and the engine's own selection of kernels and back-ends."""

RunEngine = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def engine(load: Callable[[str], Any]) -> RunEngine:
    """Run the checks of a small engine with some files replaced: returns the runner's lines by name, and its stderr."""
    return partial(run_engine, load("driver_stub").library(["cuInit"]))


def run_engine(
    driver_stub: bytes, tmp_path: Path, kind: str, faults: dict[str, str], **changed: Any
) -> tuple[dict[str, Any], str]:
    site = tmp_path / "site"
    for name, content in (VLLM if kind == "vllm" else SGLANG).items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for name, content in faults.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(content)
    expected = {
        "distributions": {"vllm": "0.19.1", "sglang": "0.5.23"},
        "env": {"ENGINE_SETTING": "1"},
        "serve": ["python", "-m", "sglang.launch_server"] if kind == "sglang" else ["python"],
        "arguments": {"a-configuration": ARGUMENTS[kind]},
        "served": {"a-configuration": {"architecture": None}},
        "kind": kind,
        "triton": None,
        "backends": {},
    }
    (tmp_path / "expected.json").write_text(json.dumps(expected | changed))
    directory = tmp_path / "checks"
    programs = [f"engine/{name}.py" for name in ("checks_engine", "gpu", "select_backends")]
    programs += [f"{kind}/{name}.py" for name in (f"checks_{kind}", "backends")]
    for path, program in (RUNNER | {path: IMAGE / path for path in programs}).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, directory / path)
    (tmp_path / "libcuda.so.1").write_bytes(driver_stub)
    environment = {**os.environ, "PYTHONPATH": str(site), "ENGINE_SETTING": "1", "LD_LIBRARY_PATH": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-B", directory / "run.py", tmp_path / "expected.json", "engine", kind],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}, done.stderr


def test_vllm_without_fault_passes(engine: RunEngine, tmp_path: Path) -> None:
    lines, stderr = engine(tmp_path, "vllm", {})
    verdicts = {name: (line["verdict"], line["detail"]) for name, line in lines.items() if name not in NEED_ENGINE}
    assert set(verdicts.values()) == {("passed", "")} and len(verdicts) == 7 and stderr == "", (verdicts, stderr)
    assert lines["arguments"]["facts"] == {"takes the arguments of": "a-configuration"}


def test_vllm_with_a_fault_for_every_check_fails_all(engine: RunEngine, tmp_path: Path) -> None:
    """All at once: a failed check must not prevent the others from running."""
    faults = {
        "vllm/_C.abi3.so": "not an extension",
        "vllm/_custom_ops.py": "def cutlass_scaled_mm_supports_fp4(capability): return True\n",
        "vllm/utils/flashinfer.py": "def has_flashinfer(): return False\n",
        "vllm/entrypoints/cli/main.py": "def main(): print('0.20.0')\n",
        "vllm/platforms/cuda.py": VLLM["vllm/platforms/cuda.py"] + "print('WARNING: cuda')\n",
    }
    arguments = {"a-configuration": ["/model", "--max-num-sequences", "8"]}
    lines, stderr = engine(tmp_path, "vllm", faults, arguments=arguments, env={"ENGINE_SETTING": "2"}, serve=["sh"])
    failed = {name: line["detail"] for name, line in lines.items() if line["verdict"] == "failed"}
    assert failed.keys() == {
        "environment",
        "serve_command",
        "compiles_at_run_time",
        "extensions",
        "fp4_support",
        "uses_our_flashinfer",
        "command",
        "arguments",
    }
    for name, part in (
        ("extensions", "vllm/_C: "),
        ("fp4_support", "90: True"),
        ("command", "not 0.19.1: exit code 0: 0.20.0"),
        ("arguments", "a-configuration: unknown option --max-num-sequences"),
        ("environment", "the recipe sets {'ENGINE_SETTING': '2'}"),
    ):
        assert part in failed[name], failed[name]
    assert "vllm/fp4_support: WARNING: cuda" in stderr.splitlines()


def test_vllm_with_its_argument_parser_in_another_module(engine: RunEngine, tmp_path: Path) -> None:
    files = [VLLM[f"vllm/entrypoints/openai/{name}.py"] for name in ("cli_args", "api_server")]
    moved = {
        "vllm/entrypoints/common/cli_args.py": "\n".join(files),
        "vllm/entrypoints/openai/cli_args.py": "raise ImportError",
    }
    lines, _ = engine(tmp_path, "vllm", moved)
    assert lines["arguments"]["verdict"] == "passed", lines["arguments"]


def test_vllm_plugin_that_queries_the_gpu_when_it_is_imported_is_loaded(engine: RunEngine, tmp_path: Path) -> None:
    query = "from vllm.platforms import current_platform\nassert current_platform.get_device_capability() >= (10, 0)\n"
    name = "vllm/entrypoints/openai/cli_args.py"
    load = "    import vllm.loader\n    parser.add_argument"
    parser = VLLM[name].replace("    parser.add_argument", load, 1)
    lines, stderr = engine(tmp_path, "vllm", {name: parser, "vllm/loader.py": query})
    assert lines["arguments"]["verdict"] == "passed" and stderr == "", (lines["arguments"], stderr)


def test_vllm_unknown_tool_call_parser_fails(engine: RunEngine, tmp_path: Path) -> None:
    argv = ["/model", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
    lines, _ = engine(tmp_path, "vllm", {}, arguments={"a-configuration": argv})
    assert "invalid tool call parser: qwen3_coder" in lines["arguments"]["detail"]


def test_engine_with_a_foreign_flashinfer_fails(engine: RunEngine, tmp_path: Path) -> None:
    other = tmp_path / "other" / "flashinfer" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("")
    start = f"import sys\nsys.path.insert(0, {str(other.parents[1])!r})\n"
    for kind, name in (("vllm", "vllm/utils/flashinfer.py"), ("sglang", "sgl_kernel/sm100/common_ops.py")):
        lines, _ = engine(tmp_path / kind, kind, {name: start + (VLLM | SGLANG)[name]})
        line = lines["uses_our_flashinfer"]
        assert line["verdict"] == "failed" and str(other) in line["detail"]


def test_sglang_without_and_with_faults(engine: RunEngine, tmp_path: Path) -> None:
    lines, _ = engine(tmp_path / "correct", "sglang", {})
    for name in ("extensions", "compiles_fp4", "uses_our_flashinfer", "arguments", "serve_command"):
        assert lines[name]["verdict"] == "passed", lines[name]
    faults = {"sgl_kernel/__init__.py": "raise ImportError('libcuda.so.1')", "sglang/launch_server.py": "raise SystemExit(3)"}
    arguments = {"a-configuration": ["--model-path", "/model", "--tp-size", "two"]}
    lines, _ = engine(tmp_path / "wrong", "sglang", faults, arguments=arguments)
    for name in ("extensions", "command", "arguments"):
        assert lines[name]["verdict"] == "failed", lines[name]
    assert "invalid int value" in lines["arguments"]["detail"]
    faults = {
        "sgl_kernel/flash_ops.py": "raise ImportError('libnuma.so.1')",
        "sglang/jit_kernel/utils.py": "def get_cutlass_include_paths(): return ['/usr/include']\n",
    }
    lines, _ = engine(tmp_path / "broken", "sglang", faults)
    assert lines["compiles_fp4"]["detail"] == "CUTLASS is taken from /usr/include"
    assert lines["extensions"]["detail"] == "sgl_kernel/flash_ops: libnuma.so.1"


SELECTS = {
    "torch.py": "class cuda: pass\nclass accelerator: pass\n",
    "triton/__init__.py": "class runtime:\n    class driver:\n        def set_active(active): pass\n",
    "triton/backends/__init__.py": "class nvidia:\n    class driver: pass\nbackends = {'nvidia': nvidia}\n",
    "triton/backends/compiler.py": "def GPUTarget(*values): return values\n",
    "sglang/srt/configs/__init__.py": "",
    "sglang/srt/configs/model_config.py": """
import json
from pathlib import Path
class ModelConfig:
    def __init__(self, path): self.quantization = json.loads((Path(path) / "config.json").read_text())["quantization"]
    @classmethod
    def from_server_args(cls, server): return cls(server.model_path)
""",
    "sglang/srt/server_args.py": """
import torch
from sglang.srt.configs.model_config import ModelConfig
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--tp-size", type=int)
    @classmethod
    def from_cli_args(cls, parsed):
        if ModelConfig.from_server_args(parsed).quantization == "nvfp4" and parsed.tp_size == 1:
            raise ValueError("needs\\n  two GPUs")
        server = cls()
        server.model_path = parsed.model_path
        server.speculative_algorithm = None
        server.attention_backend = {12: "flashinfer", 9: "fa3"}[torch.cuda.get_device_capability()[0]]
        print("selected", server.attention_backend)
        return server
""",
    "sglang/srt/layers/__init__.py": "",
    "sglang/srt/layers/quantization/__init__.py": "",
    **{
        f"sglang/srt/layers/quantization/{kind}_utils.py": f"""
class chosen: value = ""
def initialize_{kind}_gemm_config(server): chosen.value = f"{{server.attention_backend}}_{kind}"
def get_{kind}_gemm_runner_backend(): return chosen
"""
        for kind in ("fp4", "fp8")
    },
}
"""Files of a small SGLang that selects its attention."""


def test_engine_must_select_the_recorded_back_ends(engine: RunEngine, tmp_path: Path) -> None:
    """The engine decides with the model's config.json and the GPU of the configuration; what it prints is no answer."""

    def check(name: str, attention: str, gpus: str, **changed: Any) -> Any:
        case = {
            "argv": ["--model-path", "/model", "--tp-size", gpus],
            "environment": {},
            "gpu": {"name": "NVIDIA RTX PRO 6000", "capability": [12, 0], "multiprocessors": 188, "memory_gb": 96.0},
            "model": {"repository": "a/b", "config": {"quantization": "nvfp4"}},
        }
        layers = ["fp4: flashinfer_fp4", "fp8: flashinfer_fp8"]
        selected = {"attention": [attention], "quantization": ["nvfp4"], "layers": layers}
        entry = {"refusal": "", "selected": selected, "case": case} | changed
        lines, stderr = engine(
            tmp_path / name, "sglang", SELECTS, backends={"a-configuration": entry, "b": entry | {"case": None}}
        )
        assert "selected" not in stderr
        return lines["backends"]

    line = check("same", "flashinfer", "2")
    assert line["verdict"] == "passed", line["detail"]
    assert line["facts"] == {"selects the recorded back-ends for": "a-configuration", "back-ends not recorded": "b"}
    line = check("other", "triton", "2")
    assert (line["verdict"], line["detail"]) == ("failed", "a-configuration: attention flashinfer, recorded triton")
    line = check("refused", "flashinfer", "1")
    assert line["detail"] == "a-configuration: ValueError: needs two GPUs, recorded accepted"
    assert check("recorded", "", "1", refusal="ValueError: needs two GPUs", selected={})["verdict"] == "passed"
    assert check("none", "flashinfer", "2", case=None)["verdict"] == "not run"


def test_process_that_fails_does_not_continue_in_its_parent() -> None:
    program = """
import gpu
def fails(): raise SystemExit("stopped by the engine")
def unwritable(): return {"selected": object()}
try: print(gpu.forked({"a": fails, "b": unwritable, "c": lambda: {"selected": {}}}, 2))
finally: print("end")
"""
    argv = [sys.executable, "-B", "-c", program]
    done = subprocess.run(argv, cwd=IMAGE / "engine", capture_output=True, text=True, check=True)
    refused = {"refusal": "the process ended without an answer", "selected": {}}
    assert done.stdout.splitlines() == [str({"a": refused, "b": refused, "c": {"selected": {}}}), "end"]
    assert "stopped by the engine" in done.stderr and "not JSON serializable" in done.stderr


def test_sglang_0_5_23_compiles_its_fp4_experts(engine: RunEngine, tmp_path: Path) -> None:
    lines, _ = engine(tmp_path, "sglang", SGLANG_0_5_23)
    assert lines["compiles_fp4"]["verdict"] == "passed", lines["compiles_fp4"]
    assert lines["compiles_fp4"]["facts"]["compiled by SGLang"] == "its GEMM of NVFP4 experts, for sm_120a"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["/model", "--max-num-seqs=8"], ""),
        (["/model", "--max_num_seqs", "8"], ""),
        (["/model", "--max-num", "8"], "unknown option --max-num"),
        (["/model", "--max-num-seqs", "many"], "invalid int value"),
        (["/model", "--tool-call-parser", "qwen"], "invalid choice"),
        (["/model", "--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["/model", "--speculative-config", '{"method":"mtp"}'], ""),
        (["/model", "--speculative-config", "{method}"], "invalid loads value"),
        (["--max-num-seqs", "8"], "required: model"),
    ],
)
def test_refusal_gives_the_reason_of_the_argument_parser(load: Callable[[str], Any], argv: list[str], reason: str) -> None:
    load("run")
    suite = load("engine")
    names: dict[str, Any] = {}
    exec(VLLM["vllm/entrypoints/openai/cli_args.py"], names)
    parser = names["make_arg_parser"](UnderscoreParser())
    refusal = suite.refusal(parser, argv, names["validate_parsed_serve_args"])
    assert reason in refusal and bool(reason) == bool(refusal), refusal


class UnderscoreParser(argparse.ArgumentParser):
    """A parser that accepts ``--a_b`` for ``--a-b``, as vLLM's does."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args([a.replace("_", "-") if a.startswith("--") else a for a in args], namespace)


def test_arguments_check_is_not_run_without_a_configuration(load: Callable[[str], Any]) -> None:
    with pytest.raises(NotRun, match="no configuration"):
        load("engine").accepts_configurations(argparse.ArgumentParser(), {"arguments": {}})


def test_expected_image_of_a_recipe_has_the_arguments_of_its_configurations() -> None:
    name = {"context": "4" * 64, "reference": f"sm120kit/sglang:0.5.11-sm120kit.{'4' * 12}"}
    values = dict.fromkeys(checks.CLAIMS, "") | {"kind": "sglang", "recipe": "sglang-0.5.11-b12x"} | name
    labels = {f"sm120kit.{key}": value for key, value in values.items()} | {"org.opencontainers.image.version": "0.5.11"}
    expected = checks.expected_image(Image("sha256:1", "c" * 64, "linux/amd64", (), labels, "", 1))
    assert "nvidia-cutlass-dsl" in expected.overridden and expected.serve[0] == "python"
    (arguments,) = expected.arguments.values()
    assert arguments[:2] == ("--model-path", "/model")
    assert "b12x" in arguments and "--speculative-eagle-topk" in arguments
    (entry,) = expected.backends.values()
    assert entry["case"]["argv"] == list(arguments) and entry["selected"]["experts"] == ["b12x"]


def labelled(recipe: str, version: str, **changed: str) -> Image:
    """An image with the labels of a recipe's."""
    name = {"context": "4" * 64, "reference": f"sm120kit/vllm:{version}-sm120kit.{'4' * 12}"}
    values = dict.fromkeys(checks.CLAIMS, "") | {"kind": "vllm", "recipe": recipe} | name | changed
    labels = {f"sm120kit.{key}": value for key, value in values.items()} | {"org.opencontainers.image.version": version}
    return Image("sha256:1", "c" * 64, "linux/amd64", (), labels, "", 1)


@pytest.mark.parametrize("version", ["0.19.1", "0.33.0"])
def test_image_with_all_modules_is_complete_if_the_recipe_lists_those_that_engines_request(version: str) -> None:
    recipe = recipes.load_engine(f"vllm-{version}")
    groups = recipes.load_flashinfer(recipe.flashinfer).groups
    assert {*groups["serve"].modules} <= {*groups["all"].modules}
    every = {"modules": ",".join(groups["all"].modules)}
    assert checks.expected_image(labelled(recipe.name, version, **every)).complete
    assert not checks.expected_image(labelled(recipe.name, version, modules=groups["all"].modules[0])).complete


def test_expected_image_has_the_back_ends_that_were_recorded_for_its_configurations() -> None:
    served = checks.expected_image(labelled("vllm-0.33.0", "0.33.0")).served
    assert served["minimax-m2.7-nvfp4-2x-rtx-pro-6000"]["selected"]["experts"] == ["NvFp4 FLASHINFER_CUTLASS"]
    assert "FLASHINFER" in served["qwen3.8-27b-fp8-1x-rtx-pro-6000"]["selected"]["attention"]


def test_files_that_are_exempt_are_those_of_the_recipe() -> None:
    expected = checks.expected_image(labelled("vllm-0.33.0", "0.33.0", **{"wrong-record": "vllm:*"}))
    assert expected.wrong_record == {"pynvvideocodec": ("PyNvVideoCodec/PyNvVideoCodec_*.so",)}
    assert "nvidia/cu13/lib/libcusolverMg.so.12" in expected.leave_out["nvidia-cusolver"]


@pytest.mark.parametrize(("modules", "complete"), [(("sampling",), False), (("sampling",), True), (("sampling", "moe"), True)])
def test_requested_modules_are_compiled_ahead_in_a_complete_image(
    load: Callable[[str], Any], modules: tuple[str, ...], complete: bool
) -> None:
    engine = load("engine")

    def module(name: str) -> Any:
        def call() -> None:
            raise engine.Requested(name)

        return engine.requested(call)

    requests = {"one": {"sampler": module("sampling"), "experts": module("moe")}, "two": {"draft": module("moe")}}
    expected = {"modules": modules, "complete": complete}
    missing = "moe (draft, experts)" if "moe" not in modules else ""
    if complete and missing:
        with pytest.raises(AssertionError, match=re.escape(f"not compiled ahead of time: {missing}")):
            engine.modules_ahead(requests, expected)
        return
    assert engine.modules_ahead(requests, expected) == {
        "modules requested": "moe (draft, experts); sampling (sampler)",
        "modules compiled on first use": missing or "none",
        "configurations looked up": "one, two",
    }
    with pytest.raises(AssertionError, match="did not"):
        engine.requested(lambda: None)


@pytest.mark.parametrize(
    ("version", "reason"), [("0.34.0", "written for vllm 0.33.0; 0.34.0"), ("0.33.0+local", "no configuration")]
)
def test_modules_are_looked_up_only_in_the_version_whose_functions_are_called(
    load: Callable[[str], Any], version: str, reason: str
) -> None:
    expected = {"distributions": {"vllm": version}, "served": {"one": {"architecture": None, "selected": {}}}}
    with pytest.raises(NotRun, match=reason):
        load("engine").require_served(expected, "vllm", "0.33.0")


@pytest.mark.parametrize(
    ("level", "chosen", "expected"), [(2, None, True), (0, None, False), (2, False, False), (0, True, True)]
)
def test_vllm_tunes_at_start_by_its_level_and_its_argument(
    level: int, chosen: bool | None, expected: bool, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load("engine")
    suite = load("vllm")
    config = ModuleType("vllm.config.vllm")
    levels = {number: {"kernel_config": {"enable_flashinfer_autotune": number > 0}} for number in range(4)}
    config.__dict__["OPTIMIZATION_LEVEL_TO_CONFIG"] = levels  # as in vLLM 0.19.1 and 0.33.0
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.config", ModuleType("vllm.config")), (config.__name__, config)):
        monkeypatch.setitem(sys.modules, name, module)
    assert suite._autotunes(SimpleNamespace(optimization_level=level, enable_flashinfer_autotune=chosen)) is expected


def test_every_recorded_back_end_of_vllm_is_looked_up_or_is_not_of_flashinfer(load: Callable[[str], Any]) -> None:
    load("engine")
    suite = load("vllm")
    recorded = json.loads((data_root() / "recipes" / "engines" / "vllm-0.33.0.backends.json").read_text())["configurations"]
    selected = {(use, name) for entry in recorded.values() for use, names in entry["selected"].items() for name in names}
    calls = {pair: suite._calls(*pair, None, None) for pair in selected if pair[1] != "FLASHINFER"}
    assert {name for (_, name), every in calls.items() if every} == {
        *suite.SPARSE_MLA,
        "FlashInferCutlassMxfp8LinearKernel",
        "FlashInferCutlassNvFp4LinearKernel",
        "FlashInferFP8ScaledMMLinearKernel",
        "NvFp4 FLASHINFER_CUTLASS",
        "Unquantized FLASHINFER_CUTLASS",
    }
    with pytest.raises(AssertionError, match="layers: FlashInferNewKernel uses FlashInfer, and is not looked up"):
        suite._calls("layers", "FlashInferNewKernel", None, None)


def test_back_end_of_sglang_that_uses_flashinfer_is_looked_up(load: Callable[[str], Any]) -> None:
    load("engine")
    suite = load("sglang")
    files = (data_root() / "recipes" / "engines").glob("sglang-0.5.23*.backends.json")
    recorded = [entry for path in files for entry in json.loads(path.read_text())["configurations"].values()]
    known = {("attention", "flashinfer"), ("sampling", "flashinfer"), ("experts", "flashinfer_mxfp4")}
    selected = [(entry, use, name) for entry in recorded for use, names in entry["selected"].items() for name in names]
    met = {(use.removeprefix("draft: "), name) for _, use, name in selected}
    gemm = ("layers", "fp4: flashinfer_cutlass")
    assert met >= known | {gemm}
    for entry, use, name in selected:
        if (use.removeprefix("draft: "), name) not in known:
            fp4 = (use, name) == gemm and "modelopt_fp4" in entry["selected"]["quantization"]
            calls = suite._calls(use, name, None, {"selected": entry["selected"]})
            assert {*calls} == ({"fp4 inputs", "fp4 GEMM"} if fp4 else set())
    with pytest.raises(AssertionError, match="experts: flashinfer_new uses FlashInfer, and is not looked up"):
        suite._calls("experts", "flashinfer_new", None, None)


def test_image_without_a_record_has_no_kernels_of_triton_to_look_up(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its recipe got a record later. What records kernels is in every image."""
    suite = load("engine")
    setup = contexts.ImageSetup("vllm", "vllm-1.0", "1.0", {}, {}, ("vllm", "serve"))
    for name, text in contexts.programs(setup).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(suite, "TRITON", tmp_path / "triton")
    with pytest.raises(NotRun, match="no record"):
        suite.triton_kernels({"triton": True})


@pytest.mark.parametrize("disabled", [False, True])
def test_sglang_tunes_its_mxfp4_experts_unless_that_is_disabled(
    disabled: bool, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load("engine")
    suite = load("sglang")
    for name in ("flashinfer", "torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    calls = suite._calls("draft: experts", "flashinfer_mxfp4", SimpleNamespace(disable_flashinfer_autotune=disabled), None)
    assert {*calls} == {"inputs", "GEMM"} | (set() if disabled else {"autotuner"})


@pytest.mark.parametrize(
    ("selected", "architecture", "reason"),
    [
        ({}, {"attention": {}}, "its back-ends are not recorded"),
        ({"attention": ["FLASHINFER"]}, None, "the sizes of its model are not recorded"),
        ({"attention": ["FLASHINFER"]}, {"attention": {}}, ""),
        ({"attention": ["TRITON_ATTN"]}, None, ""),
    ],
)
def test_recorded_kernels_are_looked_up_without_sizes_unless_attention_is_flashinfers(
    load: Callable[[str], Any], selected: dict[str, list[str]], architecture: Any, reason: str
) -> None:
    load("engine")
    suite = load("vllm")
    served = {"selected": selected, "architecture": architecture}
    assert suite._not_looked_up(served) == reason


@pytest.mark.parametrize(
    ("speculative", "tokens"),
    [(None, 0), ('{"method": "mtp", "num_speculative_tokens": 4}', 4), ({"num_speculative_tokens": 2}, 2)],
)
def test_drafted_tokens_are_read_from_the_arguments(load: Callable[[str], Any], speculative: Any, tokens: int) -> None:
    load("engine")
    assert load("vllm")._drafted_tokens(SimpleNamespace(speculative_config=speculative)) == tokens


def test_version_of_sglang_is_that_of_the_wheel_that_was_packed_again(load: Callable[[str], Any], capsys: Any) -> None:
    engine = load("engine")
    suite = load("sglang")
    answers = {"version": "sglang version: 0.5.11 | git revision: N/A", "--help": "--model-path"}
    engine.run = lambda argv: SimpleNamespace(returncode=0, stdout=answers[argv[-1]], stderr="")
    expected = {"distributions": {"sglang": "0.5.11+sm120kit.ec101745e4ed"}, "serve": ["python", "-m", "sglang.launch_server"]}
    assert suite.check_command(expected) == {"version of the command": "0.5.11"}
    with pytest.raises(AssertionError, match=r"not 0\.5\.12"):
        suite.check_command(expected | {"distributions": {"sglang": "0.5.12"}})


def test_kernels_of_b12x_are_not_looked_up_without_a_table(load: Callable[[str], Any]) -> None:
    load("engine")
    suite = load("sglang")
    with pytest.raises(NotRun, match="compiles no kernels of b12x"):
        suite.check_b12x_kernels({"b12x": {}})
    assert suite.group([("experts", 1), ("GEMM", 2), ("experts", 3)]) == {"experts": [1, 3], "GEMM": [2]}


def test_names_of_wheels_in_the_history_are_no_secrets() -> None:
    wheels = {"tokenspeed-triton": "3.9", "tokenizers": "1.0"}
    labels = {"sm120kit.wheels": "tokenizers==1.0"}
    image = Image("sha256:1", "c", "linux/amd64", (), labels, "1000:1000", 0)
    expected = checks.ExpectedImage("vllm", "r", "1", "c", "t", "p", (), (), (), wheels)
    steps = ["sm120kit: tokenspeed-triton 3.9", "#(nop) LABEL sm120kit.wheels=tokenizers==1.0", "sm120kit: 12 wheels"]
    assert _outside.suspect_steps(steps, image, expected) == []
    leaks = ["sm120kit: tokenspeed-triton 3.9 token=1", "RUN pip install --index-url=https://a:b@host", "LABEL token=x"]
    assert _outside.suspect_steps([*steps, *leaks], image, expected) == leaks


def test_stale_bytecode_below_a_changed_file_is_found_by_the_quick_check(tree: tuple[Any, Path]) -> None:
    """Of a patch that cannot be compiled: Python would run the released file's bytecode, which a lower layer has."""
    base, site = tree
    source = site / "stale.py"
    source.write_text("x = 1\n")
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    base.check_bytecode({"changed": [str(source)]})
    source.write_text("x = (\n")
    with pytest.raises(AssertionError, match="stale"):
        base.check_bytecode({"changed": [str(source)]})


def test_bytecode_of_a_file_with_dots_in_its_name(tree: tuple[Any, Path]) -> None:
    """Such a name is not importable, but compileall compiles the file."""
    base, site = tree
    source = site / "fp8.decode.py"
    source.write_text("")
    for optimize in (0, 1):
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, optimize=optimize)
    assert len(list((site / "__pycache__").glob("fp8.decode.*.pyc"))) == 2
    base.check_bytecode({})
    source.write_text("changed = True\n")
    with pytest.raises(AssertionError, match=r"^2 do not belong to their source"):
        base.check_bytecode({})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda home, site: (home / ".netrc").write_text("x"), "netrc"),
        (lambda home, site: (home / ".config" / "pip").mkdir(parents=True) or (home / ".config/pip/x").touch(), "pip/x"),
        (lambda home, site: (site.parents[2] / "pip.conf").touch(), "pip.conf"),
        (lambda home, site: (site / "one-1.0.dist-info" / "direct_url.json").touch(), "origin of a wheel"),
    ],
)
def test_base_secrets_must_be_absent(
    tree: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Callable[..., Any], message: str
) -> None:
    base, site = tree
    home = tmp_path / "home"
    (home / ".cache" / "empty").mkdir(parents=True)
    monkeypatch.setattr(base, "ETC", tmp_path / "etc")
    monkeypatch.setattr(base, "HOMES", (home,))
    for name in list(os.environ):
        if base.SECRET.search(name):
            monkeypatch.delenv(name)
    base.check_no_secrets({})
    monkeypatch.setenv("MY_API_KEY", "x")
    with pytest.raises(AssertionError, match="MY_API_KEY"):
        base.check_no_secrets({})
    monkeypatch.delenv("MY_API_KEY")
    fault(home, site)
    with pytest.raises(AssertionError, match=message):
        base.check_no_secrets({})
