"""What the hunt for races counts as shaken, with programs that need no GPU."""

from __future__ import annotations

import importlib
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from operator_programs import program

GPU = Path(__file__).parent / "gpu"

SEEDED = """
import sys
for seed in sys.argv[1:]:
    print(seed, "kernel:", {result!r})
"""


@pytest.fixture
def hunt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(GPU)
    monkeypatch.delitem(sys.modules, "hunt", raising=False)
    return importlib.import_module("hunt")


def command(code: str, *words: str) -> str:
    return shlex.join([sys.executable, "-c", code, *words])


@pytest.mark.parametrize(
    ("result", "shaken"),
    [("right 0.5", True), ("refused ValueError", False), ("WRONG", False), ("exit code 1: ImportError", False)],
)
def test_equal_results_of_calls_that_were_refused_or_wrong_are_no_hunt(hunt: ModuleType, result: str, shaken: bool) -> None:
    (row,) = hunt.rows("a", command(SEEDED.format(result=result), "SEEDS"), 2, {})
    assert (row.kernel, row.result, row.seeds, row.differ) == ("a: kernel", result, 2, {})
    assert replace(row, sites=3).shaken is shaken and not row.shaken


def test_program_without_a_result_is_a_row_that_was_not_shaken(hunt: ModuleType) -> None:
    (row,) = hunt.rows("a", command("import absent", "SEEDS"), 2, {})
    assert row.seeds == 0 and not replace(row, sites=3).shaken


def test_program_that_always_fails_was_not_shaken(hunt: ModuleType) -> None:
    (fails,), (ends,) = (hunt.rows("a", command(f"import sys; sys.exit({code})"), 2, {}) for code in (3, 0))
    assert fails.result.startswith("exit code 3") and not fails.differ and not replace(fails, sites=3).shaken
    assert ends.seeds == 2 and not ends.differ and replace(ends, sites=3).shaken


def test_process_of_a_seed_that_dies_is_named(hunt: ModuleType) -> None:
    code = (
        f"import os, sys; sys.path.insert(0, {str(GPU)!r}); import hunt\n"
        "def run():\n    yield 'kernel: right'\n    if os.environ[hunt.DELAYS].startswith('2 '): os.abort()\n"
        "hunt.forked(list(map(int, sys.argv[1:])), run)"
    )
    rows = {row.kernel: row for row in hunt.rows("a", command(code, "SEEDS"), 3, {})}
    assert rows["a: kernel"].seeds == 3 and not rows["a: kernel"].differ
    assert rows["a: process"].differ == {2: "exit code -6"}


def test_the_end_leaves_no_process_of_a_program(hunt: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was printed until then counts; a process of a seed would go on beside the next program."""
    file = tmp_path / "pid"
    code = f"""
import os, pathlib, time
print("0 kernel: right", flush=True)
if not os.fork():
    pathlib.Path({str(file)!r}).write_text(str(os.getpid()))
time.sleep(600)
"""
    monkeypatch.setattr(hunt, "END", time.monotonic() + 10)
    (row,) = hunt.rows("a", command(code, "SEEDS"), 2, {})
    assert row.result == "right" and row.seeds == 0
    for _ in range(100):
        if not Path(f"/proc/{file.read_text()}/cwd").exists():  # of a process that has ended, also before it is waited for
            return
        time.sleep(0.1)
    raise AssertionError("the process of a seed goes on")


def test_pages_of_other_sizes(hunt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a call has them, and the reference knows its calls apart."""
    attention = program("attention", monkeypatch)
    seeds = importlib.import_module("operator_seeds")
    seeds.paged(attention, "32,128")
    assert [(shape.page, shape.sink) for shape in attention.SPARSE_SHAPES] == [
        (32, False),
        (32, True),
        (128, False),
        (128, True),
    ]
    for shape in attention.SPARSE_SHAPES:
        call = attention.SparseCall.random(shape)
        assert call.caches[0].stored().shape == (2048 // shape.page, shape.page * 584)
