"""The directory of finished builds that several machines share (``--cache``)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sm120kit.core import reporting
from sm120kit.core.workspace import Workspace
from sm120kit.sources.run_options import Options
from sm120kit.wheels._published_wheels import build_once, keep_newest, publish
from sm120kit.wheels.build_records import Artifacts, BuildPlan, RepackedWheel

PLAN = BuildPlan("vllm-1", "vllm", "1", "a" * 40, "b" * 40, digest="c" * 64)


class Machine:
    """A state directory whose builds are counted."""

    def __init__(self, directory: Path, cache: Path | None, *, push: bool = True) -> None:
        directory.mkdir(mode=0o700)
        self.options = Options(Workspace.open(directory), cache=cache, cache_push=push)
        self.made = 0

    def build(self) -> bytes:
        """The wheel of :data:`PLAN`."""

        def pack(out: Path) -> Path:
            (out / "x.whl").write_bytes(b"wheel" * 1000)
            return out / "x.whl"

        def make(directory: Path) -> Artifacts:
            self.made += 1
            return publish(PLAN, directory, pack, {}, {})

        return build_once(RepackedWheel(PLAN, {}), "work", self.options, make).wheel.read_bytes()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    return directory


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(reporting, "warn", lines.append)
    return lines


def test_only_the_first_machine_builds(cache: Path, tmp_path: Path, warnings: list[str]) -> None:
    first, second = (Machine(tmp_path / name, cache) for name in ("first", "second"))
    assert first.build() == second.build() == second.build()
    assert (first.made, second.made, warnings) == (1, 0, [])
    assert [path.name for path in cache.iterdir()] == [f"vllm-{PLAN.digest}"]
    alone = dataclasses.replace(second.options, cache=None, cache_push=False)
    second.options = alone
    assert second.build() and second.made == 0, "the copy belongs to the state directory"


def test_nothing_is_stored_without_push(cache: Path, tmp_path: Path) -> None:
    Machine(tmp_path / "state", cache, push=False).build()
    assert not [*cache.iterdir()]


@pytest.mark.parametrize("damage", ["wheel", "record", "lacking", "pipe"])
def test_damaged_entry_is_built_again(cache: Path, tmp_path: Path, warnings: list[str], damage: str) -> None:
    Machine(tmp_path / "first", cache).build()
    entry = cache / f"vllm-{PLAN.digest}"
    if damage == "wheel":
        (entry / "x.whl").write_bytes(b"other" * 1000)
    elif damage == "record":
        (entry / "artifacts.json").write_text("{}")
    elif damage == "lacking":
        (entry / "x.whl").unlink()
    else:
        os.mkfifo(entry / "pipe")
    second = Machine(tmp_path / "second", cache)
    second.build()
    assert second.made == 1 and len(warnings) == 1 and "the cache is not used" in warnings[0]


def test_cache_that_cannot_be_written(cache: Path, tmp_path: Path, warnings: list[str]) -> None:
    machine = Machine(tmp_path / "state", cache / "file")
    (cache / "file").write_text("")
    machine.build()
    assert machine.made == 1 and any("nothing is stored in the cache" in line for line in warnings)


def test_newest_builds_with_local_patches_are_kept(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        keep_newest(tmp_path / str(number))
        os.utime(tmp_path / str(number) / "local", (number, number))
    keep_newest(tmp_path / "2")
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3", "4", "without"}


HOLDER = """
import sys, time
from pathlib import Path
from sm120kit.wheels._published_wheels import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_build_that_another_process_uses_is_kept(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "local").touch()
        os.utime(tmp_path / str(number) / "local", (number, number))
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "0"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        keep_newest(tmp_path / "3")
        assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"}
        holder.kill()
    keep_newest(tmp_path / "3")
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3"}
