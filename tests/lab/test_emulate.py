"""Emulations of a tile table: shared between tiles, cached, compiled once, interrupted cleanly. The compiler is a script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sm12x_lab import tile_numbers
from sm12x_lab.emulation import Emulator, Mainloop
from sm120kit.core.errors import CheckFailed, CompileFailed, ResourceUnavailable
from sm120kit.core.records import Toolchain
from sm120kit.core.temporary import TEMPORARY
from sm120kit.kernels.kernel_records import NumericResult, NumericStatus, Tile, TileFacts

TILE = Tile("grouped", "nvfp4", 128, 128, 128, "none", False, "bf16")
PROVEN = '{"passed": true, "outputs": 9, "mismatches": 0, "max_error": 0, "findings": {}}'
WRONG = '{"passed": false, "outputs": 9, "mismatches": 3, "signature": "%s", "findings": {%s}}'
LATE = '"late": {"count": 2, "first": ["at 1", "at 2"]}'


class Compiler:
    """A script in place of the host compiler: it logs each program's source and writes programs that print ``output``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, directory / "log"
        self.log.touch()
        self.behave("exit 0")

    def behave(self, commands: str, output: str = PROVEN) -> None:
        """``commands`` run after a program was written; its path is $out, that of its source $unit."""
        (self.directory / "template").write_text(f"#!/bin/sh\necho '{output}'\n")
        program = self.directory / "c++"
        program.write_text(
            '#!/bin/sh\nfor out; do case "$out" in *.cpp) unit=$out;; esac; done\n'
            f'(echo "// $@"; cat "$unit") >> {self.log}\n'
            f'cp {self.directory}/template "$out"; chmod +x "$out"\n{commands}\n'
        )
        program.chmod(0o755)

    @property
    def programs(self) -> list[str]:
        """The sources of all programs, each after a comment with the compiler's arguments."""
        return re.findall(r"^// .*\n(?:(?!// ).*\n)*", self.log.read_text(), re.MULTILINE)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


@pytest.fixture
def emulator(compiler: Compiler, tmp_path: Path) -> Emulator:
    return make_emulator(tmp_path)


def make_emulator(tmp_path: Path) -> Emulator:
    (tmp_path / "cutlass").mkdir(exist_ok=True)
    (tmp_path / "cutlass" / "a.h").write_text("int a;\n")
    return Emulator(tmp_path / "cutlass", Toolchain(tmp_path, "13.0.88", str(tmp_path / "c++"), "c++ 12"), tmp_path / "cache")


def fact(tile: Tile = TILE, **changes: object) -> TileFacts:
    facts = TileFacts(tile, True, True, schedule="cooperative", scheduler="persistent", stages=4, smem_bytes=1, k_blocks=2)
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_tiles_with_one_mainloop_share_a_cached_emulation(compiler: Compiler, emulator: Emulator) -> None:
    half, finalize = replace(TILE, output="f16"), replace(TILE, epilogue="finalize")
    facts = [fact(), fact(half), fact(finalize), fact(replace(finalize, output="f16"), stages=3), fact(schedule="pingpong")]
    assert {tile.numbers.why for tile in tile_numbers.with_numbers(facts, emulator, "t", False)} == {"not emulated yet"}
    assert compiler.programs == []
    emulated = tile_numbers.with_numbers(facts, emulator, "t", True)
    assert emulated[0].numbers == NumericResult(NumericStatus.PROVEN, "", 9)
    assert [(tile.numbers.proof, tile.numbers.why) for tile in emulated[1:]] == [
        (NumericStatus.MAINLOOP_PROVEN, "not run: f16 output"),
        (NumericStatus.MAINLOOP_PROVEN, "not run: finalize epilogue"),
        (NumericStatus.MAINLOOP_PROVEN, "not run: finalize epilogue, f16 output"),
        (NumericStatus.MAINLOOP_PROVEN, "not run: tile scheduler"),
    ]
    assert [tile.numbers.outputs for tile in emulated] == [9] * 5
    (dense,) = tile_numbers.with_numbers([fact(replace(TILE, family="dense"))], emulator, "t", True)
    assert (dense.numbers.proof, dense.numbers.why) == (NumericStatus.MAINLOOP_PROVEN, "not run: tile scheduler")
    assert [(text.count("#define KERNEL 1\n"), text.count("#define KERNEL 0\n")) for text in compiler.programs] == [
        (2, 1),
        (0, 1),
    ], "a program for each shape; the whole kernel of grouped cooperative tiles only"
    assert tile_numbers.with_numbers(facts, emulator, "t", False) == emulated
    assert len(compiler.programs) == 2


def test_each_tile_of_a_program_that_does_not_compile_has_its_own_result(compiler: Compiler, emulator: Emulator) -> None:
    compiler.behave("if grep -q 'STAGES 9$' $unit; then echo 'x.hpp:1:1: error: too many' >&2; exit 1; fi")
    stages = [Mainloop.of(TILE, stages=count) for count in (4, 9, 3)]
    results = emulator.run_all(stages)
    assert [isinstance(results[mainloop], CompileFailed) for mainloop in stages] == [False, True, False]
    assert "too many" in str(results[stages[1]])
    assert [text.count("#define STAGES") for text in compiler.programs] == [3, 1, 1, 1]


def test_changed_headers_need_another_emulation(emulator: Emulator, tmp_path: Path) -> None:
    emulator.run(Mainloop.of(TILE))
    (tmp_path / "cutlass" / "a.h").write_text("int b;\n")
    changed = Emulator(emulator.cutlass, emulator.toolchain, tmp_path / "cache")
    assert changed.cached(Mainloop.of(TILE)) is None


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (WRONG % ("k tile lost", LATE), "k tile lost"),
        (WRONG % ("", LATE), "late: at 1"),
        (WRONG % ("", ""), "3 of 9 outputs differ"),
    ],
)
def test_wrong_numbers_have_a_reason(compiler: Compiler, emulator: Emulator, output: str, why: str) -> None:
    compiler.behave("exit 0", output)
    (tile,) = tile_numbers.with_numbers([fact()], emulator, "t", True)
    assert tile.numbers == NumericResult(NumericStatus.WRONG, why, 9, 3)


def test_tiles_that_are_not_emulated_have_a_reason(compiler: Compiler, emulator: Emulator) -> None:
    compiler.behave("echo 'x.hpp:1:1: error: static assertion failed: too small' >&2; exit 1")
    facts = [fact(compiles=False), fact(scheduler="stream-k"), fact(replace(TILE, dtype="bf16xbf16")), fact()]
    numbers = [tile.numbers for tile in tile_numbers.with_numbers(facts, emulator, "t", True)]
    assert {result.proof for result in numbers} == {NumericStatus.NOT_CHECKED}
    reasons = ["does not compile", "divides K among CTAs", "bf16xbf16 is not emulated", "static assertion failed: too small"]
    assert all(reason in result.why for reason, result in zip(reasons, numbers, strict=True))
    assert not [path for path in emulator.cache.iterdir() if path.name != "locks"], "a failed compile leaves nothing"


@pytest.mark.parametrize(
    ("commands", "output", "error"),
    [
        ("echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", PROVEN, ResourceUnavailable),
        ("echo exit 3 >> $out", PROVEN, CheckFailed),
        ("echo 'x.hpp:1:1: error: no' >&2; exit 1", PROVEN, CompileFailed),
    ],
)
def test_failed_emulation_is_not_cached(
    compiler: Compiler, emulator: Emulator, commands: str, output: str, error: type
) -> None:
    compiler.behave(commands, output)
    with pytest.raises(error):
        emulator.run(Mainloop.of(TILE))
    assert emulator.cached(Mainloop.of(TILE)) is None


def test_concurrent_runs_compile_once(compiler: Compiler, emulator: Emulator, tmp_path: Path) -> None:
    compiler.behave("sleep 0.3")
    both = [threading.Thread(target=make_emulator(tmp_path).run, args=[Mainloop.of(TILE)]) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(compiler.programs) == 1
    assert emulator.cached(Mainloop.of(TILE))


def test_unfinished_directory_of_a_killed_process_is_removed(compiler: Compiler, emulator: Emulator) -> None:
    directory = emulator.cache / emulator._directory(Mainloop.of(TILE)).name
    left = directory.with_name(f".{directory.name}.x")
    left.mkdir(parents=True)
    (left / TEMPORARY).touch()
    (left / "program").write_text("incomplete")
    assert emulator.run(Mainloop.of(TILE)).passed
    assert not left.exists()


def test_interrupt_ends_compilers_and_keeps_finished_results(compiler: Compiler, tmp_path: Path) -> None:
    """The first emulation is finished and the others hang in the compiler when their process receives SIGINT twice."""
    compiler.behave(f'grep -q "TILE_K 64$" $unit || {{ echo $$ >> {tmp_path}/pids; exec sleep 600; }}')
    make_emulator(tmp_path)
    program = f"""
from pathlib import Path
from sm12x_lab.emulation import Emulator, Mainloop
from sm120kit.kernels.kernel_records import Tile
from sm120kit.core.records import Toolchain
from sm120kit.core import signals
signals.handle()
home = Path({str(tmp_path)!r})
emulator = Emulator(home / "cutlass", Toolchain(home, "13.0.88", str(home / "c++"), "c++ 12"), home / "cache")
emulator.run_all(Mainloop("dense", "nvfp4", 128, 128, k, False, False, 2) for k in (64, 128, 256, 512))
"""
    child = subprocess.Popen([sys.executable, "-c", program], env={**os.environ}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    pids = tmp_path / "pids"
    while not (pids.exists() and pids.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.01)
    compilers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    for _ in range(2):  # timeout(1) sends it to the process and to its group
        child.send_signal(signal.SIGINT)
        time.sleep(0.01)
    child.wait(timeout=60)
    assert not any(program.is_running() and program.status() != psutil.STATUS_ZOMBIE for program in compilers)
    cached = sorted(path for path in (tmp_path / "cache" / "emulate").iterdir() if path.name != "locks")
    assert [(path / "none.json").is_file() for path in cached] == [True]
