"""Verify a recipe's kernels on this machine's GPU, from the patched tree to the receipt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sm12x_lab import gpu_tests
from sm12x_lab.gpu_tests.rewriting import RewritingLauncher
from sm12x_lab.gpu_tests.verified_kernels import VerificationScope
from sm12x_lab.ptx import interposed
from sm120kit.core import reporting, toolchain
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import CompileFailed
from sm120kit.core.records import Arch, Toolchain
from sm120kit.kernels.tables import export_tree, tile_table
from sm120kit.patches.checkout import OVERRIDES, PATCHES
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import FlashInferTarget


def verify_kernels(
    target: FlashInferTarget,
    scope: VerificationScope,
    captured: Path | None = None,
    programs: Path | None = None,
    seeds: Sequence[int] = (),
) -> tuple[gpu_tests.VerificationReport, dict[str, Any], str]:
    """Run a recipe's kernels on this machine's GPU; returns the report, the receipt, and the receipt's file name.

    ``captured`` is a directory with the PTX of the recipe's build, for a backend that rewrites PTX; ``programs`` one that
    :func:`compile_verification` wrote, without which the programs are compiled here. With ``seeds``, kernels that pass run
    again with the delays of each, for a backend that rewrites PTX.

    Raises:
        BadInput: ``captured`` has no PTX files.
        BadRecord: ``programs`` is of another verification.
        ResourceUnavailable: CUDA programs see no GPU.
        ResourceUnavailable: the GPU cannot run ``scope.backend``.
    """
    recipe = target.recipe
    gpu = gpu_tests.require(gpu_tests.probe(), scope.backend)
    compiler: gpu_tests.Programs
    if programs:
        compiled = given_programs(target, scope, programs, gpu_tests.arch(scope.backend, gpu), captured=captured is not None)
        compiler, record = compiled, compiled.record
        tree, matrix, seeded = record.tree, record.matrix, list(record.seeded)
    else:
        compiler, tree, matrix, seeded = _programs(target, scope, gpu_tests.arch(scope.backend, gpu))
    rewriting = scope.backend is gpu_tests.Backend.REWRITTEN
    tools = toolchain.find() if programs and rewriting else compiler.toolchain
    reporting.info(f"{gpu.name}: {len(matrix.run)} kernels of {recipe.name}, {len(seeded)} faults in separate programs")
    with _launcher(target, scope.backend, captured, tools, seeds) as launcher:
        report = gpu_tests.verify(matrix, seeded, tree, compiler, scope.backend, quick=scope.quick, launcher=launcher)
    receipt = gpu_tests.record(report, scope, engine=recipe.name, tree=tree.tree, gpu=gpu, compiler=compiler)
    if rewriting:
        receipt |= interposed.digests()
        receipt["toolchain"]["ptxas"] = tools.nvcc_version
    return report, receipt, gpu_tests.receipt_name(gpu, scope.backend)


def given_programs(
    target: FlashInferTarget, scope: VerificationScope, programs: Path, arch: str, *, captured: bool
) -> gpu_tests.CompiledPrograms:
    """The programs of a verification that another machine compiled; neither sources nor network are needed.

    Raises:
        BadRecord: they are of another verification, or of another version or series of the source.
    """
    return gpu_tests.load(programs, target.recipe.name, source_inputs(target), scope, arch, captured=captured)


def source_inputs(target: FlashInferTarget) -> str:
    """The digest of what determines a patched tree: the pin, the projects inside it, and the files of their series."""
    recipe = target.recipe
    projects = [recipe.pin.project, *(inside.project for inside in recipe.inside)]
    folders = [f"{PATCHES}/{project}/" for project in projects] + [f"{OVERRIDES}/"]
    files = {path: sha256 for path, sha256 in target.files.items() if path.removeprefix("own/").startswith(tuple(folders))}
    return digest_of([recipe.pin, recipe.inside, files])


@contextmanager
def _launcher(
    target: FlashInferTarget, backend: gpu_tests.Backend, captured: Path | None, tools: Toolchain, seeds: Sequence[int]
) -> Iterator[gpu_tests.Launcher]:
    if backend is not gpu_tests.Backend.REWRITTEN:
        yield gpu_tests.Launcher()
        return
    workspace = target.options.workspace
    with interposed.prepared(captured, workspace, tools, apart=True, perturbed=bool(seeds)) as interposition:
        yield RewritingLauncher(interposition, captured is not None, seeds)


def compile_verification(
    target: FlashInferTarget, scope: VerificationScope, *, captured: bool = False, programs: Path | None = None
) -> list[tuple[str, CompileFailed | None]]:
    """Compile the programs of ``verify_kernels`` without a GPU; returns each program's name and compile error, if any.

    ``captured``: they run with the kernels of a build. ``programs`` gets a copy, for ``verify_kernels`` on another machine.
    """
    compiler, tree, matrix, seeded = _programs(target, scope, gpu_tests.arch(scope.backend, None))
    built = gpu_tests.compile_only(matrix, seeded, tree, compiler, captured=captured)
    if programs:
        record = gpu_tests.CompiledVerification(
            gpu_tests.compiled.FORMAT,
            target.recipe.name,
            gpu_tests.sources_digest(),
            scope,
            captured,
            compiler.arch,
            compiler.toolchain,
            source_inputs(target),
            tree,
            matrix,
            tuple(seeded),
            {},
            {},
            compiler.seconds(list(built)),
        )
        gpu_tests.save(programs, record, built)
    return [(program.name, each if isinstance(each, CompileFailed) else None) for program, each in built.items()]


def _programs(
    target: FlashInferTarget, scope: VerificationScope, arch: str
) -> tuple[gpu_tests.Compiler, gpu_tests.EngineTree, gpu_tests.Matrix, list[gpu_tests.SeededFault]]:
    """The compiler, the patched tree, the kernels to run, and the seeded faults with programs of their own."""
    recipe, options = target.recipe, target.options
    workspace = options.workspace
    emulated = scope.backend is gpu_tests.Backend.EMULATE
    tools = compilers(target, [] if emulated else [Arch(arch.replace("compute", "sm"))], gpu_tests.HEADERS)
    patched = target.tree
    (cutlass,) = (inside for inside in recipe.inside if inside.project == "cutlass")
    tree, stock = (
        gpu_tests.EngineTree(export_tree(source, workspace), source.tree, cutlass.path)
        for source in (patched, target.source.unpatched_tree)
    )
    matrix = gpu_tests.matrix_of(tile_table(recipe, patched, tools, workspace), pattern=scope.only, quick=scope.quick)
    seeded = [gpu_tests.stock_fault(stock)]
    if scope.complete:
        seeded += gpu_tests.mutants(tree, workspace.cache / "verify" / "mutants", scope.backend)
    compiler = gpu_tests.Compiler(arch, emulated, tools, workspace.cache, jobs=options.jobs, budget_bytes=options.memory_bytes)
    return compiler, tree, matrix, seeded
