"""The patches of vLLM for builds from source: its own CMake code and Python, before and after them."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sm120kit.core.workspace import Workspace
from sm120kit.recipes.target import EngineTarget, resolve
from sm120kit.sources.git import Repository
from sm120kit.sources.run_options import Options
from sm120kit.wheels import _from_source
from sm120kit.wheels._extensions import cmake_program


def test_patched_vllm_builds_no_cutlass_2_kernels_for_sm12x(tmp_path: Path) -> None:
    """The effect of the patch of vLLM's CMakeLists.txt, with CMake and vLLM's own functions."""
    target = resolve("vllm-0.20.0", Options(Workspace.open(tmp_path)))
    assert isinstance(target, EngineTarget)
    tree = _from_source.require_source(target)
    repository = Repository(tree.checkout.repository)
    (tmp_path / "utils.cmake").write_bytes(repository.read(tree.commit, "cmake/utils.cmake"))

    def archs(commit: str, targets: str) -> str:
        text = repository.read(commit, "CMakeLists.txt").decode()
        start = text.index("  # For the cutlass_scaled_mm kernels we want to build the c2x")
        lines = text[start : text.index("  # subtract out the archs", start)]
        script = tmp_path / "c2x.cmake"
        output = 'message("${SCALED_MM_2X_ARCHS}")'
        script.write_text(f'include({tmp_path}/utils.cmake)\nset(CUDA_ARCHS "{targets}")\n{lines}\n{output}\n')
        return subprocess.run([cmake_program(), "-P", script], capture_output=True, text=True, check=True).stderr.strip()

    base, patched = tree.checkout.commit, tree.commit
    for targets in ("12.0f", "12.0", "12.1a"):
        assert (archs(base, targets), archs(patched, targets)) == ("8.9+PTX", ""), targets
    for targets in ("7.5;8.0", "8.0;8.9;9.0", "9.0;10.0"):
        assert archs(base, targets) == archs(patched, targets) != "", targets


LINEAR = "vllm/model_executor/kernels/linear"
CHOICE = ("is_supported_and_can_implement_kernel", "choose_scaled_mm_linear_kernel")


def define(source: bytes, names: tuple[str, ...], namespace: dict[str, Any]) -> dict[str, Any]:
    """Define functions, classes or constants of a Python file without its imports, in a ``namespace`` that replaces them."""
    nodes = []
    for node in ast.parse(source).body:
        target = node.target if isinstance(node, ast.AnnAssign) else node
        if getattr(target, "name", getattr(target, "id", "")) in names:
            nodes.append(node)
    assert len(nodes) == len(names)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)  # annotations name what is not imported
    module = ast.fix_missing_locations(ast.Module([future, *nodes], []))
    exec(compile(module, "vllm", "exec"), namespace)
    return namespace


def int8_kernel(files: dict[str, bytes], capability: tuple[int, int]) -> str:
    """The kernel that vLLM's own code chooses for an INT8 layer on a GPU of some capability."""
    cuda = SimpleNamespace(
        _enum="cuda", is_cuda=lambda: True, is_cuda_alike=lambda: True, get_device_capability=lambda: capability
    )
    namespace: dict[str, Any] = {"current_platform": cuda, "Int8ScaledMMLinearKernel": object}
    define(files["scaled_mm/cutlass.py"], ("CutlassInt8ScaledMMLinearKernel",), namespace)
    define(files["scaled_mm/triton.py"], ("TritonInt8ScaledMMLinearKernel",), namespace)
    namespace |= dict.fromkeys(("CPUInt8ScaledMMLinearKernel", "AiterInt8ScaledMMLinearKernel"))
    namespace |= {"PlatformEnum": SimpleNamespace(CUDA="cuda", CPU="cpu", ROCM="rocm")}
    namespace |= {"envs": SimpleNamespace(VLLM_DISABLED_KERNELS=[])}
    define(files["__init__.py"], ("_POSSIBLE_INT8_KERNELS", *CHOICE), namespace)
    chosen: str = namespace[CHOICE[1]](None, namespace["_POSSIBLE_INT8_KERNELS"]).__name__
    return chosen.removesuffix("ScaledMMLinearKernel")


def test_patched_vllm_chooses_triton_for_int8_on_sm12x(tmp_path: Path) -> None:
    """The effect of the patch of vLLM's choice of kernels, with its own code; the CUTLASS kernel has no code for SM12x."""
    target = resolve("vllm-0.20.0", Options(Workspace.open(tmp_path)))
    assert isinstance(target, EngineTarget)
    tree = _from_source.require_source(target)
    repository = Repository(tree.checkout.repository)

    def chosen(commit: str, capability: tuple[int, int]) -> str:
        names = ("__init__.py", "scaled_mm/cutlass.py", "scaled_mm/triton.py")
        return int8_kernel({name: repository.read(commit, f"{LINEAR}/{name}") for name in names}, capability)

    base, patched = tree.checkout.commit, tree.commit
    for capability in ((12, 0), (12, 1)):
        assert (chosen(base, capability), chosen(patched, capability)) == ("CutlassInt8", "TritonInt8"), capability
    for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (11, 0)):
        assert (chosen(base, capability), chosen(patched, capability)) == ("CutlassInt8", "CutlassInt8"), capability
    dispatch = "csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_c3x_sm120.cu"
    code = re.sub(r"//.*", "", repository.read(base, dispatch).decode())
    call = re.search(r"dispatch_scaled_mm\(([^;]*)\);", code)
    assert call and call[1].split(",")[7].strip() == "nullptr", "its INT8 function"


def test_patched_vllm_imports_the_module_for_sm12x_after_the_upstream_one(tmp_path: Path) -> None:
    """The imports at the head of vLLM's own file, with small modules in place of the compiled ones."""
    target = resolve("vllm-0.33.0", Options(Workspace.open(tmp_path)))
    assert isinstance(target, EngineTarget)
    tree = _from_source.require_source(target)
    package = tmp_path / "vllm"
    package.mkdir()

    def imported(commit: str, *modules: str, text: str = "") -> str:
        source = Repository(tree.checkout.repository).read(commit, "vllm/platforms/cuda.py")
        head = [node for node in ast.parse(source).body if re.match(r"(import|with).*\bvllm\._", ast.unparse(node), re.DOTALL)]
        shutil.rmtree(package)
        for name in ("__init__", *modules):
            (package / f"{name}.py").parent.mkdir(exist_ok=True)
            (package / f"{name}.py").write_text(f"print(__name__)\n{text if name == '_C_sm12x' else ''}")
        program = "import contextlib\n" + "\n".join(map(ast.unparse, head))
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
        return "; ".join(done.stdout.split()[1:] + done.stderr.splitlines()[-1:])

    upstream, own = "_C_stable_libtorch", "_C_sm12x"
    assert imported(tree.checkout.commit, upstream, own) == f"vllm.{upstream}"
    assert imported(tree.commit, upstream, own) == f"vllm.{upstream}; vllm.{own}"
    assert imported(tree.commit, upstream) == f"vllm.{upstream}", "the upstream wheel has no such module"
    broken = imported(tree.commit, upstream, own, text="raise ImportError('undefined symbol')")
    assert broken.endswith("ImportError: undefined symbol"), "a module that does not load is not passed over"
