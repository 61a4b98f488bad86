"""FlashInfer's generators run without torch and tvm-ffi: stand-ins have what they use, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from toolkits import toolkit

from sm120kit.core.errors import CommandFailed
from sm120kit.core.records import Arch, Toolchain
from sm120kit.recipes.locked_toolchain import TvmFfi
from sm120kit.wheels import flashinfer_generators, generators

GENERATOR = """\
import dataclasses, os
from pathlib import Path
import requests
import torch
import tvm_ffi

names = {torch.float16: "half", torch.bfloat16: "nv_bfloat16"}

def convert(x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

@dataclasses.dataclass
class Spec:
    name: str
    sources: list
    @property
    def build_dir(self): return Path(os.environ["FLASHINFER_WORKSPACE_BASE"], self.name)
    @property
    def ninja_path(self): return self.build_dir / "build.ninja"
    @property
    def jit_library_path(self): return self.build_dir / "m.so"
    def write_ninja(self):
        headers = tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()
        flags = f"{names[torch.half]} {torch.int32} {torch.int.itemsize} {int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        lines = [f"# {flags} {headers[0]} {headers[1]}", *(f"build m/{n.stem}.o: cuda_compile {n}" for n in self.sources)]
        self.ninja_path.write_text("\\n".join(lines) + "\\n")

def gen(): return Spec("m", [Path("b.cu"), Path("a.cu")])
def fetch(): requests.get("x")
def count(): torch.cuda.device_count()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = tmp_path / "tree" / "flashinfer" / "jit"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit('the package itself is imported')\n")
    (package / "__init__.py").touch()
    (package / "m.py").write_text(GENERATOR)
    return tmp_path / "tree"


def generate(tree: Path, function: str) -> tuple[generators.Generated, ...]:
    home = tree.parent / "cuda"
    if not home.is_dir():
        toolkit(home, "13.0.88")
        (home / "bin" / "cudafe++").touch()
        (home / "include" / "cuda.h").touch()
        (home / "nvvm").mkdir()
    tools = Toolchain(home, "13.0.88", "/usr/bin/c++", "c++ 12")
    work = tree.parent / "work"
    work.mkdir(exist_ok=True)
    requests = {"m": {"generator": f"flashinfer.jit.m:{function}", "leave_out": [], "only": None}}
    return generators.generate(tree, work, requests, [Arch.SM_120F], tools, TvmFfi("0.1.9", tree.parent / "tvm_ffi"))


def test_generators_run_with_stand_ins(tree: Path) -> None:
    """Paths are relative, and sources in the order of their names."""
    (module,) = generate(tree, "gen")
    assert module.units == (("a.cu", "m/a.o"), ("b.cu", "m/b.o"))
    assert module.ninja.splitlines()[0] == "# half torch.int32 4 1 include/dlpack include/dlpack"
    assert (tree.parent / "work" / "include" / "tvm_ffi").readlink() == tree.parent / "tvm_ffi" / "include"


@pytest.mark.parametrize(("function", "attribute"), [("count", "cuda"), ("fetch", "get")])
def test_other_uses_of_stand_ins_fail(tree: Path, function: str, attribute: str) -> None:
    with pytest.raises(CommandFailed, match=f"has no attribute '{attribute}'"):
        generate(tree, function)


def test_data_types_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, size in flashinfer_generators.DTYPES.items():
        actual = getattr(torch, name)
        assert (repr(actual), actual.itemsize) == (f"torch.{flashinfer_generators.ALIASES.get(name, name)}", size)
    assert torch._C._GLIBCXX_USE_CXX11_ABI
