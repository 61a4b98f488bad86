"""Receipts of operators: what each has compared, which calls are wrong, and that every seeded fault was detected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm12x_lab import RECEIPTS
from sm12x_lab.ptx import library

OPERATORS = {
    path.relative_to(RECEIPTS).as_posix().removesuffix(".json"): record
    for path in sorted(RECEIPTS.rglob("*.json"))
    if {"rows", "faults"} <= {*(record := json.loads(path.read_text()))} and record["kind"] != "ptx-instructions"
}
"""Records that the programs of operators wrote, by folder and name."""

WRONG = {"engines/triton-nvidia-h200": 2, "flashinfer-0.7.2.post1/b12x-moe-stock-nvidia-h200": 1}
"""Calls beyond their bound, by receipt: the defects of docs/findings; of engines one was not launched, and one
has a bound that was chosen."""


def verdicts(record: dict[str, Any]) -> list[str]:
    return [row["verdict"] for row in record["rows"]]


@pytest.mark.parametrize("name", OPERATORS)
def test_receipt_has_right_rows_known_wrong_ones_and_detected_faults(name: str) -> None:
    record = OPERATORS[name]
    found = verdicts(record)
    assert record["capability"] == "12.0" and found.count("right") > 0
    assert found.count("WRONG") == WRONG.get(name, 0)
    assert all(row["error_over_bound"] <= 1 for row in record["rows"] if row["verdict"] == "right")
    assert {*record["faults"].values()} <= {"detected"}


@pytest.mark.parametrize("name", OPERATORS)
def test_receipt_names_its_program_and_the_present_rewriter(name: str) -> None:
    """By the record of its run, which lies beside it: of the present rewriter, and of the run that wrote the receipt."""
    folder, _, file = name.partition("/")
    record = json.loads((RECEIPTS / folder / f"run-{file}.json").read_text())
    assert OPERATORS[name]["program"] and record["rewriter"] == library.rewriter_digest()
    assert record["modules"] and {"--receipt", "compare"} & {*record["command"]}


def test_a_receipt_binds_a_program_that_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("")
    (tmp_path / "program.py").write_text("import json, part, report; print(json.dumps(report.sources()))")
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env={"PYTHONPATH": str(Path(RECEIPTS).parent / "operators")},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout).keys() == {"reference.py", "report.py", "program.py", "part.py"}
