"""A recipe's kernels on the GPU at hand: from the patched tree to a receipt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sm120kit import recipe, toolchain
from sm120kit import verify as verifier
from sm120kit.errors import CompileFailed
from sm120kit.records import Arch
from sm120kit.tiling import exported, table, unpatched_tree
from sm120kit.trees import Options, patched_tree


@dataclass(frozen=True)
class Verification:
    """What ``verify kernels`` runs: all that there is, or a part, which no receipt can stand on."""

    device: verifier.Device
    only: str = ""
    quick: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is the whole matrix."""
        return not (self.only or self.quick)


def verify_kernels(
    name: str, options: Options, asked: Verification, *, tell: Callable[[str], None] = lambda message: None
) -> tuple[verifier.Report, dict[str, Any], str]:
    """Run a recipe's kernels on the GPU at hand: what was found, its record, and the file name for it."""
    item = recipe.load(name)
    gpu = verifier.require(verifier.probe(), asked.device)
    compiler, tree, matrix, planted = _programs(item, options, asked, verifier.arch(asked.device, gpu))
    tell(f"{gpu.name}: {len(matrix.run)} kernels of {item.name}, {len(planted)} planted faults with programs of their own")
    report = verifier.verify(matrix, planted, tree, compiler, asked.device, quick=asked.quick, tell=tell)
    kept = verifier.record(
        report,
        engine=item.name,
        tree=tree.tree,
        device=asked.device,
        gpu=gpu,
        compiler=compiler,
        only=asked.only,
        quick=asked.quick,
    )
    return report, kept, verifier.receipt_name(item.name, gpu)


def compile_verification(
    name: str, options: Options, asked: Verification, *, tell: Callable[[str], None] = lambda message: None
) -> list[tuple[str, CompileFailed | None]]:
    """Compile what ``verify_kernels`` would run, where there is no GPU."""
    item = recipe.load(name)
    compiler, tree, matrix, planted = _programs(item, options, asked, verifier.arch(asked.device, None))
    return verifier.compile_only(matrix, planted, tree, compiler, tell)


def _programs(
    item: recipe.Recipe, options: Options, asked: Verification, arch: str
) -> tuple[verifier.Compiler, verifier.Tree, verifier.Matrix, list[verifier.Control]]:
    """The compiler, the patched tree, what to run of it, and the faults to plant."""
    workspace = options.workspace
    native = asked.device is verifier.Device.NATIVE
    tools = toolchain.find([Arch(arch)] if native else [], verifier.HEADERS)
    patched = patched_tree(item, options)
    (cutlass,) = (inside for inside in item.inside if inside.project == "cutlass")
    tree, stock = (
        verifier.Tree(exported(one, workspace), one.tree, cutlass.path) for one in (patched, unpatched_tree(item, options))
    )
    matrix = verifier.matrix_of(table(item, patched, tools, workspace), pattern=asked.only, quick=asked.quick)
    planted = [verifier.stock_control(stock)]
    if asked.whole:
        planted += verifier.mutants(tree, workspace.cache / "verify" / "mutants", asked.device)
    compiler = verifier.Compiler(arch, not native, tools, workspace.cache, jobs=options.jobs, budget_bytes=options.memory_bytes)
    return compiler, tree, matrix, planted
