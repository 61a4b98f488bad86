"""Results are there whole or not at all, and refusals of the disk say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm120kit.errors import StateUnwritable
from sm120kit.records import LeftOut
from sm120kit.workspace import Workspace, digest_of, publish_directory, read_record, write_atomic, write_record


def test_a_directory_is_published_when_the_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "results" / "one"
    with publish_directory(target) as beside:
        (beside / "file").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["one"] and (target / "file").read_text() == "x"


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), publish_directory(tmp_path / "one") as beside:
        (beside / "file").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_beside_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".one.abcd").mkdir()
    (tmp_path / ".other.abcd").mkdir()
    with publish_directory(tmp_path / "one"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.abcd", "one"]


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", b"old")
    write_atomic(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"new"


def test_records_are_read_back(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", LeftOut("what", "why"))
    assert read_record(LeftOut, tmp_path / "r.json") == LeftOut("what", "why")
    write_record(tmp_path / "many.json", {"all": [LeftOut("what", "why")], "where": tmp_path})
    assert json.loads((tmp_path / "many.json").read_text()) == {
        "all": [{"what": "what", "reason": "why"}],
        "where": str(tmp_path),
    }
    assert digest_of({"b": 1, "a": (LeftOut("x", "y"),)}) == digest_of({"a": [{"what": "x", "reason": "y"}], "b": 1})


def test_a_state_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "state", Path("/proc/sm120kit")):
        with pytest.raises(StateUnwritable, match="cannot write below"):
            Workspace.open(place)
