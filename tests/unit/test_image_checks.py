"""The checks that run inside images, each on a small tree that is right and on one that is not."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import py_compile
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sm120kit import delivery
from sm120kit.records import Image

IMAGE = Path(__file__).parents[1] / "image"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads ``run``, ``standin`` or a suite, as the runner does."""
    monkeypatch.syspath_prepend(str(IMAGE))

    def load(name: str) -> ModuleType:
        path = IMAGE / f"{name}.py" if (IMAGE / f"{name}.py").is_file() else IMAGE / name / "checks.py"
        spec = importlib.util.spec_from_file_location(f"checks_{name}" if path.name == "checks.py" else name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        module.__dict__["NotRun"] = NotRun
        spec.loader.exec_module(module)
        return module

    return load


class NotRun(Exception):
    """What the runner gives to suites."""


# The stand-in for the driver's library.


def test_every_name_of_the_stand_in_answers_no_device(load: Callable[[str], Any], tmp_path: Path) -> None:
    standin = load("standin")
    names = [f"cuCall{number}" for number in range(300)]
    (tmp_path / "libcuda.so.1").write_bytes(standin.library(names))
    # In a process of its own: what is loaded stays.
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


def test_the_stand_in_for_another_machine_has_its_code(load: Callable[[str], Any]) -> None:
    standin = load("standin")
    file = standin.library(["cuInit"], "aarch64")
    (machine,) = struct.unpack_from("<H", file, 18)
    assert machine == 183 and file[288:296] == bytes.fromhex("800c8052c0035fd6")  # mov w0, #100; ret
    assert standin.library(["cuInit"], "x86_64")[288:294] == bytes.fromhex("b864000000c3")
    with pytest.raises(KeyError):
        standin.library(["cuInit"], "riscv64")


def test_names_are_those_of_libraries_that_need_the_driver(load: Callable[[str], Any], tmp_path: Path) -> None:
    standin = load("standin")
    this = Path(sys.executable).resolve()
    assert b"\0libc.so.6\0" in standin.dynamic_strings(this)
    for name, content in (("empty", b""), ("text", b"x" * 100), ("cut", b"\x7fELF\x02\x01")):
        (tmp_path / name).write_bytes(content)
    assert [standin.dynamic_strings(path) for path in sorted(tmp_path.iterdir())] == [b"", b"", b""]

    def elf(strings: bytes) -> bytes:
        """A file with one dynamic section and its string table."""
        sections = struct.pack("<IIQQQQIIQQ", 0, 6, 0, 0, 0, 0, 1, 0, 0, 0) + struct.pack(
            "<IIQQQQIIQQ", 0, 3, 0, 0, 192, len(strings), 0, 0, 0, 0
        )
        head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 2, 0)
        return head + sections + strings

    linked = tmp_path / "linked.so"
    linked.write_bytes(elf(b"\0libcuda.so.1\0cuMemAlloc_v2\0cudaMalloc\0cuLaunchKernel\0"))
    other = tmp_path / "other.so"
    other.write_bytes(elf(b"\0libcufile.so\0cuFileRead\0"))
    assert standin.imported([linked, other, this]) == ["cuInit", "cuLaunchKernel", "cuMemAlloc_v2"]


# The runner.

SUITE = """
import ctypes, subprocess, warnings
def check_driver(expected): return {"answer": str(ctypes.CDLL("libcuda.so.1").cuInit(0))}
def check_known_words(expected):
    print("INFO 12:00 started")
    subprocess.run(["echo", "INFO 12:01 went on"])
    warnings.warn("an old song", DeprecationWarning)
def check_strange_words(expected): subprocess.run("echo oops >&2", shell=True)
def check_strange_warning(expected): warnings.warn("an old song, sung again", DeprecationWarning)
"""
ALLOWED = """
[[words]]
pattern = "INFO .*"
reason = "its log"
[[words]]
pattern = "DeprecationWarning: an old song"
reason = "the song is old"
[[tools]]
paths = ["/usr/bin/*"]
reason = "the base's"
"""


def test_only_what_a_suite_allows_may_be_said(tmp_path: Path) -> None:
    for name in ("run.py", "standin.py"):
        (tmp_path / name).write_bytes((IMAGE / name).read_bytes())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "checks.py").write_text(SUITE)
    (tmp_path / "one" / "allowed.toml").write_text(ALLOWED)
    (tmp_path / "expected.json").write_text("{}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "run.py", "expected.json", "one"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert lines["driver"]["verdict"] == "passed", "it did not start again with a stand-in"
    assert lines["known_words"]["verdict"] == "passed"
    assert lines["known_words"]["said"] == {"exempt in one/known_words": "1 x the song is old; 2 x its log"}
    assert lines["strange_warning"]["verdict"] == "failed" and "sung again" in lines["strange_warning"]["detail"]
    # What was said is told to whoever runs the checks, and there any word on stderr is a failure.
    assert done.stderr == "one/strange_words: oops\n"


# base


@pytest.fixture
def tree(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """The base suite, looking at a small Python environment with one distribution."""
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
    return base, site


def hash_of(content: bytes) -> str:
    """As a RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_versions_are_those_of_the_lock(tree: tuple[Any, Path]) -> None:
    base, _ = tree
    base.check_versions({"distributions": {"one": "1.0"}})
    for wanted, words in (({"one": "2.0"}, "one 1.0, not 2.0"), ({}, "not in the lock"), ({"two": "1"}, "two absent")):
        with pytest.raises(AssertionError, match=words):
            base.check_versions({"distributions": wanted})


def test_files_are_those_of_the_wheels(tree: tuple[Any, Path]) -> None:
    base, site = tree
    base.check_files({})
    (site / "added.py").write_text("")
    with pytest.raises(AssertionError, match="belongs to no wheel"):
        base.check_files({})
    (site / "added.py").unlink()
    (site / "one.py").write_text("ONE = 2\n")
    with pytest.raises(AssertionError, match="is not the file of One"):
        base.check_files({})
    with pytest.raises(AssertionError, match="not those of their source"):
        base.check_bytecode({})


def test_bytecode_of_a_file_with_dots_in_its_name(tree: tuple[Any, Path]) -> None:
    """No module can be called so; compileall compiles it all the same."""
    base, site = tree
    source = site / "fp8.decode.py"
    source.write_text("")
    for optimize in (0, 1):
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, optimize=optimize)
    assert len(list((site / "__pycache__").glob("fp8.decode.*.pyc"))) == 2
    base.check_bytecode({})
    source.write_text("changed = True\n")
    with pytest.raises(AssertionError, match=r"^2 are not those of their source"):
        base.check_bytecode({})


def test_a_file_of_two_wheels_is_that_of_one_of_them(tree: tuple[Any, Path]) -> None:
    base, site = tree
    other = site / "two-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: Two\nVersion: 1.0\n")
    (other / "RECORD").write_text(f"one.py,sha256={'A' * 43},9\ntwo-1.0.dist-info/METADATA,,\ntwo-1.0.dist-info/RECORD,,\n")
    said = base.check_files({})["several wheels bring"]
    assert said.startswith("one.py of ") and "One 1.0" in said and "Two 1.0" in said
    (site / "one.py").write_text("ONE = 2\n")
    with pytest.raises(AssertionError, match="is not the file of"):
        base.check_files({})


@pytest.mark.parametrize(
    ("needs", "words"), [("One==1.0", "is not the file of Two 1.0"), ("One; extra == 'more'", ""), ("Three", "")]
)
def test_a_file_of_a_wheel_that_another_requires_is_that_of_the_other(tree: tuple[Any, Path], needs: str, words: str) -> None:
    base, site = tree
    other = site / "two-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Two\nVersion: 1.0\nRequires-Dist: {needs}\n")
    (other / "RECORD").write_text(f"one.py,sha256={'A' * 43},9\ntwo-1.0.dist-info/METADATA,,\ntwo-1.0.dist-info/RECORD,,\n")
    if not words:
        assert "Two 1.0" in base.check_files({})["several wheels bring"]
        return
    with pytest.raises(AssertionError, match=words):
        base.check_files({})
    (other / "RECORD").write_text((other / "RECORD").read_text().replace("A" * 43, hash_of(b"ONE = 2\n")))
    (site / "one.py").write_text("ONE = 2\n")
    assert base.check_files({})["several wheels bring"] == "nothing"


def test_owners_are_root_and_nobody_else_writes(tree: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, site = tree
    if os.getuid() != 0:
        pytest.skip("the tree would not belong to root")
    for path in [site.parents[2], *site.parents[2].rglob("*")]:
        path.chmod(0o755)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    base.check_owners({})
    (site / "one.py").chmod(0o777)
    with pytest.raises(AssertionError, match="mode"):
        base.check_owners({})
    (site / "one.py").chmod(0o644)
    os.chown(site / "one.py", 1000, 1000)
    with pytest.raises(AssertionError, match="belongs to 1000"):
        base.check_owners({})


def test_requirements_may_be_absent_or_other_only_on_purpose(tree: tuple[Any, Path]) -> None:
    base, site = tree
    nothing: dict[str, list[str]] = {"left_out": [], "overridden": []}
    base.check_requirements(nothing)
    metadata = site / "one-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: Absent_Thing\nRequires-Dist: pytest<1\n")
    with pytest.raises(AssertionError, match=r"(?s)Absent_Thing, which is absent.*pytest<1, here"):
        base.check_requirements(nothing)
    with pytest.raises(AssertionError, match="pytest"):
        base.check_requirements({"left_out": ["absent-thing"], "overridden": []})
    base.check_requirements({"left_out": ["absent-thing"], "overridden": ["pytest"]})


def test_a_compiler_needs_a_reason(tree: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base, site = tree
    monkeypatch.setattr(base, "TOOLKIT", tmp_path / "cuda")
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    allowed: list[dict[str, Any]] = []
    expected = {"allowed": {"tools": allowed}}
    assert base.check_no_toolchain(expected) == {}
    nvcc = site / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    for tool in (nvcc, place / "g++"):
        tool.write_text("")
    with pytest.raises(AssertionError, match=r"g\+\+, .*nvcc"):
        base.check_no_toolchain(expected)
    allowed.append({"paths": ["nvidia/cu13/bin/*"], "reason": "it compiles"})
    with pytest.raises(AssertionError, match=r"bin/g\+\+$"):
        base.check_no_toolchain(expected)
    allowed.append({"paths": ["/none", f"{place}/*"], "reason": "it helps"})
    assert set(base.check_no_toolchain(expected).values()) == {"it compiles", "it helps"}
    (tmp_path / "cuda").mkdir()
    with pytest.raises(AssertionError, match="/cuda"):
        base.check_no_toolchain(expected)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda home, site: (home / ".netrc").write_text("x"), "netrc"),
        (lambda home, site: (home / ".config" / "pip").mkdir(parents=True) or (home / ".config/pip/x").touch(), "pip/x"),
        (lambda home, site: (site.parents[2] / "pip.conf").touch(), "pip.conf"),
        (lambda home, site: (site / "one-1.0.dist-info" / "direct_url.json").touch(), "where a wheel came from"),
    ],
)
def test_no_secret_stays(
    tree: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Callable[..., Any], words: str
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
    with pytest.raises(AssertionError, match=words):
        base.check_no_secrets({})


# flashinfer


def test_the_patched_package_is_the_one_that_the_image_claims(load: Callable[[str], Any], monkeypatch: Any) -> None:
    suite = load("flashinfer")
    patch = {"project": "cutlass", "slug": "one", "sha256": "e" * 64}
    said = {"recipe": "r", "commit": "c", "tree": "t", "plan": "p", "patches": [patch], "modules": ["m"]}
    expected = said | {"patches": ["cutlass/one@eeeeeeeeeeee"]}
    monkeypatch.setattr(suite, "origin", lambda: said)
    suite.check_patched(expected)
    for key in said:
        with pytest.raises(AssertionError, match=key):
            suite.check_patched(expected | {key: ["other"]})


def test_as_many_tactics_as_kernels_for_each_type(load: Callable[[str], Any], monkeypatch: Any) -> None:
    suite = load("flashinfer")
    monkeypatch.setattr(suite, "module", lambda expected, name: SimpleNamespace(fp4_gemm_tactic_num=lambda: 6))
    name = "fp4_gemm_cutlass_sm120"
    assert suite.check_tactics({"kernels": {name: {"a": 12}}}) == {"FP4 GEMM tactics": "6"}
    with pytest.raises(AssertionError, match="6 tactics, and the recipe expects 14 kernels"):
        suite.check_tactics({"kernels": {name: {"a": 14}}})
    with pytest.raises(NotRun, match="does not say"):
        suite.check_tactics({"kernels": {}})


def test_a_module_that_must_be_compiled_is_found(load: Callable[[str], Any], monkeypatch: Any, tmp_path: Path) -> None:
    suite = load("flashinfer")
    made: list[Path] = []

    def compiled() -> None:
        made.append(tmp_path / "module.so")
        made[0].touch()

    spec = SimpleNamespace(name="m", is_aot=True, aot_path="m.so", build_and_load=lambda: None)
    monkeypatch.setattr(suite, "specs", lambda expected: iter([spec]))
    monkeypatch.setattr(suite.Path, "home", lambda: tmp_path)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    expected: dict[str, Any] = {"modules": ["m"], "allowed": {"tools": []}}
    suite.check_compiled_ahead(expected)
    suite.check_modules_load(expected)
    with pytest.raises(AssertionError, match="the image says"):
        suite.check_compiled_ahead(expected | {"modules": ["m", "n"]})
    spec.build_and_load = compiled
    with pytest.raises(AssertionError, match=r"was compiled: .*module.so"):
        suite.check_modules_load(expected)
    spec.is_aot = False
    with pytest.raises(AssertionError, match="would be compiled at first use"):
        suite.check_compiled_ahead(expected)
    spec.is_aot = True
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    with pytest.raises(AssertionError, match="DISABLE_JIT is not set"):
        suite.check_compiled_ahead(expected)
    suite.check_compiled_ahead(expected | {"allowed": {"tools": [{"paths": ["nvcc"], "reason": ""}]}})


# engines: small packages that answer as vLLM and SGLang do

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
ARGUMENTS = {
    "vllm": ["/model", "--max-num-seqs", "8", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"],
    "sglang": ["--model-path", "/model", "--tp-size", "2"],
}


Say = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def engine(load: Callable[[str], Any]) -> Say:
    """What the runner says of a small engine with some files exchanged: its lines by name, and the words on stderr."""
    return partial(run_engine, load("standin").library(["cuInit"]))


def run_engine(
    stand_in: bytes, tmp_path: Path, kind: str, faults: dict[str, str], **changed: Any
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
        "unreleased": {},
    }
    (tmp_path / "expected.json").write_text(json.dumps(expected | changed))
    place = tmp_path / "checks"
    for path in ("run.py", "standin.py", "engine/checks.py", f"{kind}/checks.py"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes((IMAGE / path).read_bytes())
    (tmp_path / "libcuda.so.1").write_bytes(stand_in)
    environment = {**os.environ, "PYTHONPATH": str(site), "ENGINE_SETTING": "1", "LD_LIBRARY_PATH": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-B", place / "run.py", tmp_path / "expected.json", "engine", kind],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}, done.stderr


def test_a_right_vllm_passes(engine: Say, tmp_path: Path) -> None:
    said, words = engine(tmp_path, "vllm", {})
    verdicts = {name: (line["verdict"], line["detail"]) for name, line in said.items() if name != "compiles_at_run_time"}
    assert set(verdicts.values()) == {("passed", "")} and len(verdicts) == 7 and words == "", (verdicts, words)
    assert said["arguments"]["said"] == {"takes the arguments of": "a-configuration"}


def test_every_fault_of_vllm_is_found(engine: Say, tmp_path: Path) -> None:
    """All at once: they do not hide each other."""
    faults = {
        "vllm/_C.abi3.so": "not an extension",
        "vllm/_custom_ops.py": "def cutlass_scaled_mm_supports_fp4(capability): return True\n",
        "vllm/utils/flashinfer.py": "def has_flashinfer(): return False\n",
        "vllm/entrypoints/cli/main.py": "def main(): print('0.20.0')\n",
        "vllm/platforms/cuda.py": VLLM["vllm/platforms/cuda.py"] + "print('WARNING: cuda')\n",
    }
    arguments = {"a-configuration": ["/model", "--max-num-sequences", "8"]}
    said, words = engine(tmp_path, "vllm", faults, arguments=arguments, env={"ENGINE_SETTING": "2"}, serve=["sh"])
    failed = {name: line["detail"] for name, line in said.items() if line["verdict"] == "failed"}
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
        ("arguments", "a-configuration: it does not know --max-num-sequences"),
        ("environment", "the recipe sets {'ENGINE_SETTING': '2'}"),
    ):
        assert part in failed[name], failed[name]
    assert "vllm/fp4_support: WARNING: cuda" in words.splitlines()


def test_a_tool_call_parser_that_the_server_does_not_know(engine: Say, tmp_path: Path) -> None:
    argv = ["/model", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
    said, _ = engine(tmp_path, "vllm", {}, arguments={"a-configuration": argv})
    assert "invalid tool call parser: qwen3_coder" in said["arguments"]["detail"]


def test_a_flashinfer_of_somebody_else_is_found(engine: Say, tmp_path: Path) -> None:
    other = tmp_path / "other" / "flashinfer" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("")
    start = f"import sys\nsys.path.insert(0, {str(other.parents[1])!r})\n"
    for kind, name in (("vllm", "vllm/utils/flashinfer.py"), ("sglang", "sgl_kernel/sm100/common_ops.py")):
        said, _ = engine(tmp_path / kind, kind, {name: start + (VLLM | SGLANG)[name]})
        assert said["uses_our_flashinfer"]["verdict"] == "failed" and str(other) in said["uses_our_flashinfer"]["detail"]


def test_sglang(engine: Say, tmp_path: Path) -> None:
    said, _ = engine(tmp_path / "right", "sglang", {})
    for name in ("extensions", "compiles_fp4", "uses_our_flashinfer", "arguments", "serve_command"):
        assert said[name]["verdict"] == "passed", said[name]
    faults = {"sgl_kernel/__init__.py": "raise ImportError('libcuda.so.1')", "sglang/launch_server.py": "raise SystemExit(3)"}
    arguments = {"a-configuration": ["--model-path", "/model", "--tp-size", "two"]}
    said, _ = engine(tmp_path / "wrong", "sglang", faults, arguments=arguments)
    for name in ("extensions", "command", "arguments"):
        assert said[name]["verdict"] == "failed", said[name]
    assert "invalid int value" in said["arguments"]["detail"]
    faults = {
        "sgl_kernel/flash_ops.py": "raise ImportError('libnuma.so.1')",
        "sglang/jit_kernel/utils.py": "def get_cutlass_include_paths(): return ['/usr/include']\n",
    }
    said, _ = engine(tmp_path / "broken", "sglang", faults)
    assert said["compiles_fp4"]["detail"] == "it takes CUTLASS from /usr/include"
    assert said["extensions"]["detail"] == "sgl_kernel/flash_ops: libnuma.so.1"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/model", "--max-num-seqs=8"], ""),
        (["/model", "--max_num_seqs", "8"], ""),
        (["/model", "--max-num", "8"], "does not know --max-num"),
        (["/model", "--max-num-seqs", "many"], "invalid int value"),
        (["/model", "--tool-call-parser", "qwen"], "invalid choice"),
        (["/model", "--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["/model", "--speculative-config", '{"method":"mtp"}'], ""),
        (["/model", "--speculative-config", "{method}"], "invalid loads value"),
        (["--max-num-seqs", "8"], "required: model"),
    ],
)
def test_what_an_argument_parser_refuses(load: Callable[[str], Any], argv: list[str], words: str) -> None:
    load("run")
    suite = load("engine")
    names: dict[str, Any] = {}
    exec(VLLM["vllm/entrypoints/openai/cli_args.py"], names)
    parser = names["make_arg_parser"](Underscores())
    found = suite.refusal(parser, argv, names["validate_parsed_serve_args"])
    assert words in found and bool(words) == bool(found), found


class Underscores(argparse.ArgumentParser):
    """A parser that takes ``--a_b`` for ``--a-b``, as vLLM's does."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args([a.replace("_", "-") if a.startswith("--") else a for a in args], namespace)


def test_without_a_configuration_there_is_nothing_to_pass(load: Callable[[str], Any]) -> None:
    with pytest.raises(NotRun, match="no configuration"):
        load("engine").refused(argparse.ArgumentParser(), {"arguments": {}})


def test_unreleased_arguments_have_to_be_refused(load: Callable[[str], Any]) -> None:
    """The rest of the command line is taken; what no release knows is not, or its configuration is wrong about it."""
    suite = load("engine")
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp4", choices=["cutlass"])
    expected = {"arguments": {"one": ["--fp4", "cutlass"], "two": []}, "unreleased": {"one": ["--fp4 b12x", "--moe b12x"]}}
    assert suite.refused(parser, expected) == {"takes the arguments of": "one, two", "refuses of one": "--fp4 b12x, --moe b12x"}
    parser.add_argument("--moe")
    with pytest.raises(AssertionError, match=r"^one calls --moe b12x unreleased, and it takes that$"):
        suite.refused(parser, expected)


def test_what_a_recipe_expects_of_its_image() -> None:
    """Of a configuration with unreleased arguments: the others, and these apart."""
    said = dict.fromkeys(delivery.CLAIMS, "") | {"kind": "sglang", "recipe": "sglang-0.5.11"}
    labels = {f"sm120kit.{name}": value for name, value in said.items()}
    found = delivery.expected(Image("sha256:1", "c" * 64, "linux/amd64", (), labels, "", 1))
    assert found.overridden == ("nvidia-cutlass-dsl",) and found.serve[0] == "python" and len(found.arguments) == 3
    (name,) = found.unreleased
    assert found.unreleased[name] == ("--fp4-gemm-backend b12x", "--moe-runner-backend b12x")
    assert "b12x" not in found.arguments[name] and "--speculative-eagle-topk" in found.arguments[name]
    assert found.arguments[name][:2] == ("--model-path", "/model")
