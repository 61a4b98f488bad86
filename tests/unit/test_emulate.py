"""The emulations of a table: shared, kept, run once whoever asks, interrupted cleanly. The compiler is a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from sm120kit import tiling
from sm120kit.emulate import Emulator, Mainloop
from sm120kit.errors import CompileFailed, ExpectationFailed, NotEnoughMemory
from sm120kit.records import Numbers, Proof, Tile, TileFacts, Toolchain

TILE = Tile("grouped", "nvfp4", 128, 128, 128, "none", False, "bf16")
PROVEN = '{"passed": true, "outputs": 9, "mismatches": 0, "max_error": 0, "findings": {}}'
WRONG = '{"passed": false, "outputs": 9, "mismatches": 3, "signature": "%s", "findings": {%s}}'
LATE = '"late": {"count": 2, "first": ["at 1", "at 2"]}'


class Compiler:
    """A stand-in for the host compiler, which notes each call and makes programs that print ``says``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, directory / "log"
        self.log.touch()
        self.behave("exit 0")

    def behave(self, commands: str, says: str = PROVEN) -> None:
        """``commands`` run after the program was written; its path is $out."""
        (self.directory / "says").write_text(f"#!/bin/sh\necho '{says}'\n")
        program = self.directory / "c++"
        program.write_text(
            f'#!/bin/sh\necho "$@" >> {self.log}\nfor out; do :; done\n'
            f'cp {self.directory}/says "$out"; chmod +x "$out"\n{commands}\n'
        )
        program.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


@pytest.fixture
def emulator(compiler: Compiler, tmp_path: Path) -> Emulator:
    return make(tmp_path)


def make(tmp_path: Path) -> Emulator:
    (tmp_path / "cutlass").mkdir(exist_ok=True)
    (tmp_path / "cutlass" / "a.h").write_text("int a;\n")
    return Emulator(tmp_path / "cutlass", Toolchain(tmp_path, "13.0.88", str(tmp_path / "c++"), "c++ 12"), tmp_path / "cache")


def fact(tile: Tile = TILE, **changes: object) -> TileFacts:
    known = TileFacts(tile, True, True, schedule="cooperative", scheduler="persistent", stages=4, smem_bytes=1, k_blocks=2)
    return replace(known, **changes)  # type: ignore[arg-type]


def test_tiles_with_one_mainloop_share_an_emulation_that_is_kept(compiler: Compiler, emulator: Emulator) -> None:
    half, finalize = replace(TILE, output="f16"), replace(TILE, epilogue="finalize")
    facts = [fact(), fact(half), fact(finalize), fact(finalize, stages=3), fact(schedule="pingpong")]
    assert {one.numbers.why for one in tiling.with_numbers(facts, emulator, "t", False)} == {"not emulated yet"}
    assert compiler.calls == 0
    found = tiling.with_numbers(facts, emulator, "t", True)
    assert [one.numbers for one in found] == [Numbers(Proof.PROVEN, "", 9)] * 5
    assert compiler.calls == 3
    assert tiling.with_numbers(facts, emulator, "t", False) == found
    assert compiler.calls == 3


def test_other_headers_are_another_emulation(emulator: Emulator, tmp_path: Path) -> None:
    emulator.run(Mainloop.of(TILE))
    (tmp_path / "cutlass" / "a.h").write_text("int b;\n")
    changed = Emulator(emulator.cutlass, emulator.toolchain, tmp_path / "cache")
    assert changed.known(Mainloop.of(TILE)) is None


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (WRONG % ("k tile lost", LATE), "k tile lost"),
        (WRONG % ("", LATE), "late: at 1"),
        (WRONG % ("", ""), "3 of 9 outputs differ"),
    ],
)
def test_wrong_numbers_say_why(compiler: Compiler, emulator: Emulator, says: str, why: str) -> None:
    compiler.behave("exit 0", says)
    (found,) = tiling.with_numbers([fact()], emulator, "t", True)
    assert found.numbers == Numbers(Proof.WRONG, why, 9, 3)


def test_what_cannot_be_emulated_says_why(compiler: Compiler, emulator: Emulator) -> None:
    compiler.behave("echo 'x.hpp:1:1: error: static assertion failed: too small' >&2; exit 1")
    facts = [fact(compiles=False), fact(scheduler="stream-k"), fact(replace(TILE, dtype="bf16xbf16")), fact()]
    found = [one.numbers for one in tiling.with_numbers(facts, emulator, "t", True)]
    assert {one.proof for one in found} == {Proof.NOT_CHECKED}
    reasons = ["does not compile", "divides K among CTAs", "bf16xbf16 is not emulated", "static assertion failed: too small"]
    assert all(reason in one.why for reason, one in zip(reasons, found, strict=True))
    assert not [path for path in emulator.cache.iterdir() if path.name != "locks"], "what did not compile leaves nothing"


@pytest.mark.parametrize(
    ("commands", "says", "error"),
    [
        ("echo 'c++: fatal error: Killed signal' >&2; exit 1", PROVEN, NotEnoughMemory),
        ("echo exit 3 >> $out", PROVEN, ExpectationFailed),
        ("echo 'x.hpp:1:1: error: no' >&2; exit 1", PROVEN, CompileFailed),
    ],
)
def test_what_broke_is_no_result(compiler: Compiler, emulator: Emulator, commands: str, says: str, error: type) -> None:
    compiler.behave(commands, says)
    with pytest.raises(error):
        emulator.run(Mainloop.of(TILE))
    assert emulator.known(Mainloop.of(TILE)) is None


def test_two_that_want_the_same_compile_it_once(compiler: Compiler, emulator: Emulator, tmp_path: Path) -> None:
    compiler.behave("sleep 0.3")
    both = [threading.Thread(target=make(tmp_path).run, args=[Mainloop.of(TILE)]) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert compiler.calls == 1
    assert emulator.known(Mainloop.of(TILE))


def test_what_a_killed_process_left_does_not_last(compiler: Compiler, emulator: Emulator) -> None:
    directory = emulator.cache / emulator._directory(Mainloop.of(TILE)).name
    left = directory.with_name(f".{directory.name}.x")
    left.mkdir(parents=True)
    (left / "program").write_text("half of it")
    assert emulator.run(Mainloop.of(TILE)).passed
    assert not left.exists()


def test_an_interrupt_ends_the_compilers_and_keeps_what_is_finished(compiler: Compiler, tmp_path: Path) -> None:
    """Emulations of which the first is finished and the others hang in the compiler, in a process that gets SIGINT, twice."""
    compiler.behave(f'case "$*" in *TILE_K=64*) ;; *) echo $$ >> {tmp_path}/pids; exec sleep 60;; esac')
    make(tmp_path)
    program = f"""
import signal
from pathlib import Path
from dataclasses import replace
from sm120kit.emulate import Emulator, Mainloop
from sm120kit.records import Tile, Toolchain
from sm120kit.cli import _interrupt
signal.signal(signal.SIGINT, _interrupt)
home = Path({str(tmp_path)!r})
emulator = Emulator(home / "cutlass", Toolchain(home, "13.0.88", str(home / "c++"), "c++ 12"), home / "cache")
emulator.run_all(Mainloop("dense", "nvfp4", 128, 128, k, False, False, 2) for k in (64, 128, 256, 512))
"""
    child = subprocess.Popen([sys.executable, "-c", program], env={**os.environ}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    pids = tmp_path / "pids"
    while not (pids.exists() and pids.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.01)
    compilers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    for _ in range(2):  # as timeout(1) does
        child.send_signal(signal.SIGINT)
        time.sleep(0.01)
    child.wait(timeout=10)
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in compilers)
    kept = sorted(path for path in (tmp_path / "cache" / "emulate").iterdir() if path.name != "locks")
    assert [(path / "none.json").is_file() for path in kept] == [True]
