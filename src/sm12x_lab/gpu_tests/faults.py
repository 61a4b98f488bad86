"""Seeded faults, which the verification must detect; a missed fault invalidates its result.

There are three kinds: the text edits of the patched tree in ``mutants.json``, one program each; CUTLASS as released, without
our patches, whose K=64 tile computes wrong numbers; and faults that a program seeds in its own arguments (``gemm --list``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm12x_lab.gpu import Backend
from sm12x_lab.gpu_tests.programs import SOURCES, EngineTree, Program
from sm12x_lab.gpu_tests.running import GemmRun, RunArguments, RunOutcome, run, worst
from sm12x_lab.gpu_tests.verified_kernels import KernelConfiguration
from sm120kit.core import process
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import CheckFailed, CompileFailed
from sm120kit.kernels.kernel_records import Tile

STOCK = "stock-k64"
STOCK_SIGNATURE = "first k tile lost, last counted twice"
RACE = "missing barrier"
MUTANTS = SOURCES / "mutants.json"


@dataclass(frozen=True)
class SeededFault:
    """A fault, the program that contains it, and its runs. ``signature`` is the expected kind of wrong result, if known."""

    name: str
    kind: str
    what: str
    program: Program
    arguments: RunArguments
    signature: str = ""


def stock_fault(stock: EngineTree) -> SeededFault:
    """CUTLASS's K=64 tile as released, whose numbers must be wrong in the known way."""
    k64 = KernelConfiguration(Tile("grouped", "nvfp4", 128, 128, 64, "none", False, "bf16"))
    program = Program(STOCK, "gemm.cu", k64.definitions(), stock)
    what = "NVFP4 128x128x64 with CUTLASS and FlashInfer as they are released"
    return SeededFault(STOCK, "mainloop order", what, program, RunArguments(("std",)), STOCK_SIGNATURE)


def mutants(tree: EngineTree, directory: Path, backend: Backend) -> list[SeededFault]:
    """The faults of ``mutants.json``, each with a program of its own. The edited files are written below ``directory``.

    A missing barrier is a race whose effect depends on timing. Only the emulation controls timing, so others leave it out.

    Raises:
        CheckFailed: the text of an edit does not occur exactly once in the tree.
    """
    faults = []
    for mutant in json.loads(MUTANTS.read_text()):
        if backend is not Backend.EMULATE and mutant["class"] == RACE:
            continue
        edited = _edited(mutant, tree, directory)
        program = Program(f"mutant-{mutant['name']}", "gemm.cu", _configuration(mutant["config"]).definitions(), edited)
        faults.append(SeededFault(mutant["name"], mutant["class"], mutant["what"], program, _arguments(mutant["arguments"])))
    return faults


def _edited(mutant: dict[str, str], tree: EngineTree, directory: Path) -> EngineTree:
    """The tree with one file edited: an include directory with that file alone, which is searched first."""
    text = (tree.root / mutant["file"]).read_text()
    occurrences = text.count(mutant["old"])
    if occurrences != 1:
        raise CheckFailed(
            f"the seeded fault {mutant['name']} cannot be applied: its text occurs {occurrences} times in {mutant['file']}",
            f"correct it in {MUTANTS}",
        )
    base = max((name for name in tree.names() if mutant["file"].startswith(f"{name}/")), key=len)
    edited = text.replace(mutant["old"], mutant["new"])
    key = digest_of([mutant["file"], edited])
    include = directory / key
    write_atomic(include / mutant["file"].removeprefix(f"{base}/"), edited.encode())
    return replace(tree, before=(include,), key=key)


def _configuration(config: dict[str, object]) -> KernelConfiguration:
    m, n, k = (int(extent) for extent in config["tile"])  # type: ignore[attr-defined]
    epilogue = "finalize" if config["finalize"] else "none"
    family = "grouped" if config["grouped"] else "dense"
    tile = Tile(family, str(config["dtype"]), m, n, k, epilogue, bool(config["swap"]), str(config["output"]))
    return KernelConfiguration(tile, bool(config["pingpong"]), bool(config["streamk"]))


def _arguments(argv: list[str]) -> RunArguments:
    options = dict(zip(argv[::2], argv[1::2], strict=True))
    numbers = {name: tuple(map(int, options.get(name, default).split(","))) for name, default in _DEFAULTS.items()}
    return RunArguments(tuple(options["--set"].split(",")), numbers["--clc"], numbers["--jitter"], numbers["--seed"])


_DEFAULTS = {"--clc": "0", "--jitter": "0", "--seed": "1"}


@dataclass(frozen=True)
class FaultResult:
    """The result of a seeded fault: the outcome of each kernel it was seeded in, and the kernels that missed it."""

    name: str
    kind: str
    what: str
    seen: dict[str, RunOutcome]
    missed: tuple[str, ...]
    signature: str = ""


def in_arguments(name: str, program: Path, stop: threading.Event, sets: Collection[str]) -> list[FaultResult]:
    """Run each fault that the program of kernel ``name`` seeds in its arguments, if its set is one of ``sets``, which ran."""
    done = process.run([program, "--list"], check=False)
    try:
        every = {fault["name"]: fault for fault in json.loads(done.stdout)["faults"] if fault["name"] != "none"}
        listed = {fault: values for fault, values in every.items() if values["set"] in sets}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckFailed(
            f"{program} --list printed {done.stdout[:200]!r}, not a list of faults",
            f"delete {program.parent}; the next run compiles the program again",
        ) from error
    runs: list[GemmRun] = []
    for gemms in dict.fromkeys(fault["set"] for fault in listed.values()):
        left = [name for name in listed if listed[name]["set"] == gemms]
        while left:  # a fault that hangs ends the process
            done_runs = run(program, RunArguments((gemms,), faults=tuple(left)), stop)
            runs += done_runs
            left = left[len(done_runs) :]
    return [
        _result(each.fault, listed[each.fault]["class"], listed[each.fault]["what"], name, [each], each.signature)
        for each in runs
    ]


def in_program(fault: SeededFault, program: Path | CompileFailed, stop: threading.Event) -> FaultResult:
    """Run a program that contains a fault."""
    name = fault.program.name
    if isinstance(program, CompileFailed):
        raise CheckFailed(f"the seeded fault {fault.name} does not compile: {program.message}", program.hint)
    runs = run(program, fault.arguments, stop)
    signature = next((each.signature for each in runs if each.signature), "")
    result = _result(fault.name, fault.kind, fault.what, name, runs, signature)
    if fault.signature and signature != fault.signature:
        return replace(result, missed=(name,))
    return result


def _result(name: str, kind: str, what: str, kernel: str, runs: Sequence[GemmRun], signature: str) -> FaultResult:
    outcome = worst([each.verdict for each in runs])
    return FaultResult(name, kind, what, {kernel: outcome}, (kernel,) if outcome is RunOutcome.PASS else (), signature)


def merged(results: Sequence[FaultResult]) -> list[FaultResult]:
    """One result for each fault, with all kernels it was seeded in."""
    by_fault: dict[tuple[str, str], FaultResult] = {}
    for result in sorted(results, key=lambda result: (result.kind, result.name, *result.seen)):
        same = by_fault.get((result.kind, result.name))
        by_fault[result.kind, result.name] = (
            replace(result, seen=same.seen | result.seen, missed=(*same.missed, *result.missed), signature="")
            if same
            else result
        )
    return list(by_fault.values())


def summary(result: FaultResult) -> str:
    """Whether a fault was detected, and the outcomes of its runs."""
    outcomes = ", ".join(result.seen.values())
    detected = "NOT DETECTED" if result.missed else "detected"
    return f"{detected} ({outcomes}{': ' + result.signature if result.signature else ''})"
