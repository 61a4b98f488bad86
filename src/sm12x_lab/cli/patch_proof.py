"""``sm120kit patch prove``: the effects of a patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import Json, Sources
from sm120kit.core import console

if TYPE_CHECKING:
    from sm12x_lab.proofs.proof_records import KernelCode, ProbeComparison, ProbeResult, SourceChange
    from sm120kit.core.records import Arch
    from sm120kit.patches.patch_records import Probe

Dtype = Annotated[
    str | None, typer.Option("--for", metavar="DTYPE", help="Only this data type: nvfp4, mxfp4, mxfp8 or fp8xmxfp4.")
]


@dataclass(frozen=True)
class ProbeOptions:
    """The probes that are compared, and the recipe and arch that they are compiled for."""

    dtype: Dtype = None
    arch: Annotated[str | None, typer.Option("--arch", metavar="ARCH", help="Target of nvcc; default: the recipe's.")] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="RECIPE", help="Recipe whose source is patched; default: the first of its Applies-To."
        ),
    ] = None
    code: Annotated[
        bool, typer.Option("--code", help="Also compare the machine code of nvcc: about a minute per probe and tree, cached.")
    ] = False
    probe: Annotated[
        list[str] | None,
        typer.Option("--probe", metavar="TEXT", help="Probe to compile instead of those that the patch names; repeatable."),
    ] = None
    trust_patch: Annotated[
        bool,
        typer.Option("--trust-patch", help="Run the code of a patch that is in no series without a sandbox, with your rights."),
    ] = False

    @property
    def selected(self) -> bool:
        """Whether an option selects probes or what is compiled of them."""
        return bool(self.dtype or self.arch or self.code or self.probe)


def prove(
    patch: Annotated[str, typer.Argument(metavar="PATCH", help="project/slug, slug, or any patch file.")],
    *,
    probes: ProbeOptions,
    write: Annotated[
        bool,
        typer.Option("--write", help="Store the result: in the receipts of a clone, beside a patch of your own repository."),
    ] = False,
    sources: Sources,
    json: Json = False,
) -> None:
    """Show the effects of a patch: compile its probes with and without it.

    The host compiler shows what compiles, with types, stages and bytes; emulation on the CPU shows whether the numbers are
    right; nvcc, with --code, whether the machine code of a kernel differs. A file that is in no series is applied alone to the
    unpatched source, and its code runs in a sandbox. No GPU is used: the effect on speed is unverified on SM120.

    Exit code 1 if no effect is seen. Probes compile kernels of CUTLASS. Of a patch without probes, such as vLLM's, the files
    that it changes are listed, and the tests that it names as evidence; they are not run.
    """
    from sm12x_lab.proofs import prover
    from sm12x_lab.proofs.proof_records import Effect, ProofRequest
    from sm120kit.recipes.target import resolve

    if write and (probes.dtype or probes.probe):
        raise typer.BadParameter("only a complete proof is written: leave out --for and --probe", param_hint="--write")
    if write:
        prover.require_storable(patch)
    options = sources.run_options()
    target = resolve(probes.recipe, options) if probes.recipe else None
    if not (write or probes.selected) and (change := prover.source_change(patch, options, target)):
        _print_change(change, json)
        return
    proof = prover.prove_patch(
        patch,
        options,
        ProofRequest(
            dtype=_dtype(probes.dtype),
            arch=_arch(probes.arch),
            code=probes.code,
            probes=tuple(_probe(text) for text in probes.probe or ()),
            trusted=probes.trust_patch,
        ),
        target,
    )
    if write:
        proof, path = prover.store(patch, proof)
        console.info(f"wrote {path}")
    shown = any({*result.effects} - {Effect.NONE, Effect.NOT_COMPARED} for result in proof.results)
    if json:
        from sm12x_lab import proofs

        console.data(proofs.text(proof).rstrip())
        raise typer.Exit(not shown)
    console.table(("probe", "dtype", "arch", "effect", "without", "with"), map(_cells, proof.results))
    console.data(f"{proof.patch} on {proof.recipe}: tree {proof.tree_below[:12]} → {proof.tree_above[:12]}")
    if any("not compared" in effect for result in proof.results for effect in result.effects):
        console.info("machine code was not compared: --code does that")
    if not shown:
        console.info("no effect of the patch is shown")
        raise typer.Exit(1)


def _print_change(change: SourceChange, json: bool) -> None:
    from dataclasses import asdict

    if json:
        console.json_data(asdict(change))
        return
    console.table(("file",), ((file,) for file in change.files))
    offsets = f" ({change.offsets})" if change.offsets else ""
    trees = f"tree {change.tree_below[:12]} → {change.tree_above[:12]}"
    console.data(f"{change.patch} applies to {change.recipe}{offsets}: {trees}")
    console.data(f"no probe compiled: {change.why}; evidence, not run: {change.evidence}")


def _dtype(name: str | None) -> str | None:
    from sm120kit.core.errors import NotFound
    from sm120kit.patches.patch_records import DTYPES

    if name is not None and name not in DTYPES:
        raise NotFound(f"unknown dtype {name!r}", f"dtypes: {', '.join(DTYPES)}")
    return name


def _arch(name: str | None) -> Arch | None:
    from sm120kit.recipes import parse_arch

    return parse_arch(name) if name else None


def _probe(text: str) -> Probe:
    from sm120kit.core.errors import BadInput
    from sm120kit.patches.patch_records import BadProbe, parse_probe

    try:
        return parse_probe(text)
    except BadProbe as problem:
        raise BadInput(f"--probe {text!r}: {problem}", "patches/README.md describes probes") from problem


def _cells(result: ProbeComparison) -> list[str]:
    archs = ", ".join(sorted(result.below.code.keys() | result.above.code.keys()))
    return [
        result.probe.text,
        result.probe.dtype,
        archs,
        ", ".join(result.effects),
        _side(result.probe, result.below, result.above),
        _side(result.probe, result.above, result.below),
    ]


def _side(probe: Probe, side: ProbeResult, other: ProbeResult) -> str:
    """One side of a comparison: stages, shared memory, and everything else that differs from the other side."""
    if side.error:
        return f"error: {side.error} ({side.where})"
    parts = [
        f"{name} {_part(value, other.facts.get(name))}".strip()
        for name, value in sorted(side.facts.items())
        if name.endswith(("stages", "smem_bytes")) or other.facts.get(name) != value
    ]
    if probe.numbers:
        parts.append(f"numbers {side.numbers}" + (f": {side.why}" if side.why else ""))
    parts += [f"{arch} {_code(kernels)}" for arch, kernels in sorted(side.code.items())]
    return "; ".join(parts)


def _part(value: str | int, other: str | int | None) -> str:
    """A value; of compiler flags, those that the other side lacks."""
    if isinstance(value, int):
        return f"{value:,}"
    if not value.startswith("-D"):
        return value
    return " ".join(flag for flag in value.split() if flag not in str(other).split()) or "without those"


def _code(kernels: tuple[KernelCode, ...]) -> str:
    return " and ".join(
        f"{kernel.text_sha256[:12]}, {kernel.registers} registers"
        + (f", {kernel.stack_bytes} B stack" if kernel.stack_bytes else "")
        + (f", {kernel.grid_waits} grid waits" if kernel.grid_waits else "")
        for kernel in kernels
    )
