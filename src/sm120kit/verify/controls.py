"""Faults that are planted on purpose and have to be found, or the verification proves nothing.

Those in ``mutants.json`` are text edits of the patched tree, one program each. CUTLASS as it is released, without our patches,
is one more: its K=64 tile computes wrong numbers. The programs themselves plant some in their arguments (``gemm --list``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CompileFailed, ExpectationFailed
from sm120kit.records import Tile
from sm120kit.verify.gpu import Device
from sm120kit.verify.matrix import Configuration
from sm120kit.verify.programs import SOURCES, Program, Tree
from sm120kit.verify.running import Arguments, Run, Verdict, run, worst
from sm120kit.workspace import digest_of, write_atomic

STOCK = "stock-k64"
STOCK_SIGNATURE = "first k tile lost, last counted twice"
RACE = "missing barrier"
MUTANTS = SOURCES / "mutants.json"


@dataclass(frozen=True)
class Control:
    """A fault, the program that has it, and how it is run. ``signature``: what the result must look like, if that is known."""

    name: str
    kind: str
    what: str
    program: Program
    arguments: Arguments
    signature: str = ""


def stock_control(stock: Tree) -> Control:
    """CUTLASS's K=64 tile as released, which must be found wrong in the known way."""
    k64 = Configuration(Tile("grouped", "nvfp4", 128, 128, 64, "none", False, "bf16"))
    program = Program(STOCK, "gemm.cu", k64.definitions(), stock)
    what = "NVFP4 128x128x64 with CUTLASS and FlashInfer as they are released"
    return Control(STOCK, "mainloop order", what, program, Arguments(("std",)), STOCK_SIGNATURE)


def mutants(tree: Tree, directory: Path, device: Device) -> list[Control]:
    """The edits, each with a program of its own. The edited files are written below ``directory``.

    A missing barrier is a race: whether it shows depends on timing, which only the emulation controls.

    Raises:
        ExpectationFailed: an edit does not fit the tree.
    """
    found = []
    for mutant in json.loads(MUTANTS.read_text()):
        if device is Device.NATIVE and mutant["class"] == RACE:
            continue
        edited = _edited(mutant, tree, directory)
        program = Program(f"mutant-{mutant['name']}", "gemm.cu", _configuration(mutant["config"]).definitions(), edited)
        found.append(Control(mutant["name"], mutant["class"], mutant["what"], program, _arguments(mutant["arguments"])))
    return found


def _edited(mutant: dict[str, str], tree: Tree, directory: Path) -> Tree:
    """The tree with one file edited: a directory with that file alone, searched first."""
    text = (tree.root / mutant["file"]).read_text()
    times = text.count(mutant["old"])
    if times != 1:
        raise ExpectationFailed(
            f"the planted fault {mutant['name']} does not fit: its text is {times} times in {mutant['file']}",
            f"correct it in {MUTANTS}",
        )
    base = max((name for name in tree.names() if mutant["file"].startswith(f"{name}/")), key=len)
    edited = text.replace(mutant["old"], mutant["new"])
    key = digest_of([mutant["file"], edited])
    place = directory / key
    write_atomic(place / mutant["file"].removeprefix(f"{base}/"), edited.encode())
    return replace(tree, before=(place,), key=key)


def _configuration(config: dict[str, object]) -> Configuration:
    m, n, k = (int(extent) for extent in config["tile"])  # type: ignore[attr-defined]
    epilogue = "finalize" if config["finalize"] else "none"
    family = "grouped" if config["grouped"] else "dense"
    tile = Tile(family, str(config["dtype"]), m, n, k, epilogue, bool(config["swap"]), str(config["output"]))
    return Configuration(tile, bool(config["pingpong"]), bool(config["streamk"]))


def _arguments(words: list[str]) -> Arguments:
    given = dict(zip(words[::2], words[1::2], strict=True))
    numbers = {name: tuple(map(int, given.get(name, default).split(","))) for name, default in _DEFAULTS.items()}
    return Arguments(tuple(given["--set"].split(",")), numbers["--clc"], numbers["--jitter"], numbers["--seed"])


_DEFAULTS = {"--clc": "0", "--jitter": "0", "--seed": "1"}


@dataclass(frozen=True)
class Caught:
    """A planted fault: on which kernels it was planted, and how each showed it."""

    name: str
    kind: str
    what: str
    seen: dict[str, Verdict]
    missed: tuple[str, ...]
    signature: str = ""


def in_arguments(name: str, built: Path, stop: threading.Event) -> list[Caught]:
    """The faults that the program of kernel ``name`` plants in its arguments, each in turn."""
    done = process.run([built, "--list"], check=False)
    try:
        known = {fault["name"]: fault for fault in json.loads(done.stdout)["faults"] if fault["name"] != "none"}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ExpectationFailed(
            f"{built} --list says {done.stdout[:200]!r}", "the program is not one of verify kernels"
        ) from error
    left, runs = list(known), []
    while left:
        runs += run(built, Arguments(("std",), faults=tuple(left)), stop)
        left = list(known)[len(runs) :]
    return [
        _caught(each.fault, known[each.fault]["class"], known[each.fault]["what"], name, [each], each.signature)
        for each in runs
    ]


def in_program(control: Control, built: Path | CompileFailed, stop: threading.Event) -> Caught:
    """A program with a fault of its own."""
    name = control.program.name
    if isinstance(built, CompileFailed):
        raise ExpectationFailed(f"the planted fault {control.name} does not compile: {built.message}", built.hint)
    runs = run(built, control.arguments, stop)
    signature = next((each.signature for each in runs if each.signature), "")
    caught = _caught(control.name, control.kind, control.what, name, runs, signature)
    if control.signature and signature != control.signature:
        return Caught(control.name, control.kind, control.what, caught.seen, (name,), signature)
    return caught


def _caught(name: str, kind: str, what: str, on: str, runs: Sequence[Run], signature: str) -> Caught:
    verdict = worst([each.verdict for each in runs])
    return Caught(name, kind, what, {on: verdict}, (on,) if verdict is Verdict.PASS else (), signature)


def merged(caught: Sequence[Caught]) -> list[Caught]:
    """Each fault once, with all the kernels on which it was planted."""
    found: dict[tuple[str, str], Caught] = {}
    for one in sorted(caught, key=lambda one: (one.kind, one.name, *one.seen)):
        same = found.get((one.kind, one.name))
        found[one.kind, one.name] = (
            replace(one, seen=same.seen | one.seen, missed=(*same.missed, *one.missed), signature="") if same else one
        )
    return list(found.values())


def words(one: Caught) -> str:
    """Whether a fault was found, and how."""
    verdicts = ", ".join(one.seen.values())
    return f"{'NOT FOUND' if one.missed else 'found'} ({verdicts}{': ' + one.signature if one.signature else ''})"
