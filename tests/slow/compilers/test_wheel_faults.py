"""Builds of a wheel that are killed, run at once, or lack disk, memory, permissions or a steady clock.

The same command completes each with the same bytes, and no fault leaves anything half published. The wheel is that of a
FlashInfer with one kernel, in the stages of every other: fetch, patch, generate, compile, pack. ``SM120KIT_KILL_SEED``
repeats a run and ``SM120KIT_KILLS`` is the number of kills, by default 12.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import tiny_flashinfer

from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import ResourceUnavailable, SystemRefused

KILLS = int(os.environ.get("SM120KIT_KILLS", "12"))
SEED = int(os.environ.get("SM120KIT_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
STAGES = {
    "fetching": "fetch",
    "applying": "patch",
    "generating": "generate",
    "compiling": "compile",
    "checking": "pack",
    "built": "end",
    "nothing": "end",
}
"""Stages by the first word of what a build prints."""
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NO_SPACE, UNWRITABLE = ResourceUnavailable.exit_code, SystemRefused.exit_code


@dataclass
class Builder:
    """The inputs of all builds, and the wheel that they give."""

    data: Path
    mirror: Path
    directory: Path
    wheel: str = ""
    sha256: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def log(self, state: Path) -> Path:
        """The file of what builds in a state directory print; not beside it, where the disk may be full."""
        return self.directory / f"{state.parent.name}-{state.name}.log"

    def start(self, state: Path, limit: Callable[[], None] | None = None, stage: str = "pack") -> subprocess.Popen[str]:
        """Start a build up to a stage. ``limit`` runs in its process before it."""
        argv = [sys.executable, "-m", "sm120kit", "build", "flashinfer@1.0", "--mirror", self.mirror, "--offline"]
        env = os.environ | {"SM120KIT_STATE": str(state), "SM120KIT_DATA": str(self.data)} | self.env
        return subprocess.Popen(
            [*argv, "--to", stage, "-o", state.with_suffix(".out")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=self.log(state).open("a"),
            text=True,
            preexec_fn=limit,
            cwd=self.directory,
        )

    def complete(self, state: Path) -> None:
        """Require that a build succeeds with the wheel that every build gives, and leaves no other file."""
        child = self.start(state)
        printed, _ = child.communicate()
        assert child.returncode == 0, self.log(state).read_text()
        assert Path(printed.strip()).name == self.wheel
        assert {path.name: file_sha256(path) for path in state.with_suffix(".out").iterdir()} == {self.wheel: self.sha256}
        self.require_nothing_half_done(state)
        assert not list((state / "build").rglob("*.tmp*")) and not list((state / "work").glob("*/pack"))

    def require_nothing_half_done(self, state: Path) -> None:
        """Require that each wheel that was delivered or published is complete."""
        for record in (state / "build").glob("*/*/artifacts.json"):
            listed = json.loads(record.read_text())["wheel"]
            assert file_sha256(record.parent / listed["path"]) == listed["sha256"] == self.sha256
        for path in state.with_suffix(".out").glob("*.whl"):
            assert file_sha256(path) == self.sha256

    def refused(self, state: Path, limit: Callable[[], None] | None = None) -> int:
        """Run a build that may fail, and require an error without a traceback if it does; returns its exit code."""
        log = self.log(state)
        log.unlink(missing_ok=True)
        child = self.start(state, limit)
        child.communicate()
        text = log.read_text()
        assert "Traceback" not in text, text
        assert child.returncode == 0 or re.search(r"^error: .+\nhint: ", text, re.MULTILINE), f"{child.returncode}: {text}"
        self.require_nothing_half_done(state)
        return child.returncode


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    directory = tmp_path_factory.mktemp("tiny")
    made = Builder(*tiny_flashinfer.write(directory), directory)
    child = made.start(directory / "first")
    printed, _ = child.communicate()
    assert child.returncode == 0, made.log(directory / "first").read_text()
    made.wheel, made.sha256 = Path(printed.strip()).name, file_sha256(directory / printed.strip())
    return made


def test_killed_builds_give_the_same_wheel(builder: Builder, tmp_path: Path) -> None:
    print(f"SM120KIT_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    started = time.monotonic()
    builder.complete(tmp_path / "whole")
    lasts = {"pack": time.monotonic() - started}
    started = time.monotonic()
    assert builder.start(tmp_path / "patched", stage="patch").wait() == 0
    lasts["patch"] = time.monotonic() - started
    kills: Counter[str] = Counter()
    number = 0
    while kills.total() < KILLS:
        number += 1
        state = tmp_path / f"state{number}"
        log = builder.log(state)
        while True:
            log.write_text("")
            stage = chance.choice([*lasts])  # fetch and patch take a small part of a whole build
            child = builder.start(state, stage=stage)
            time.sleep(lasts[stage] * chance.random())
            child.send_signal(signal.SIGKILL)
            if child.wait() == 0:
                if stage == "patch":
                    continue
                break
            assert child.returncode == -signal.SIGKILL, f"seed {SEED}: {log.read_text()}"
            words = [line.split()[0] for line in log.read_text().splitlines() if line.split()]
            kills[next((STAGES[word] for word in reversed(words) if word in STAGES), "start")] += 1
            builder.require_nothing_half_done(state)
            if kills.total() >= KILLS:
                break
        builder.complete(state)
        shutil.rmtree(state)
    print(f"{kills.total()} kills in {number} builds: {dict(kills)}")


@pytest.mark.parametrize("count", [2, 8])
def test_builds_at_once_give_the_same_wheel(builder: Builder, tmp_path: Path, count: int) -> None:
    """They compile once."""
    state = tmp_path / "state"
    children = [builder.start(state) for _ in range(count)]
    for child in children:
        child.communicate()
    text = builder.log(state).read_text()
    assert [child.returncode for child in children] == [0] * count, text
    assert text.count("compiling 1 of 1 units") == 1
    builder.complete(state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory of its own file system with 200 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m,mode=700", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.root
def test_full_disk_in_each_stage(builder: Builder, small_disk: Path) -> None:
    """The disk is filled to a rest that is enough for ever more stages."""
    state, filler, codes = small_disk / "state", small_disk / "filler", []
    for room in (0, 40, 200, 400, 700, 1000, 1400, 2000, 3000, 5000):
        free = shutil.disk_usage(small_disk).free
        filler.write_bytes(bytes(max(0, free - room * 1024)))
        codes.append(builder.refused(state))
        filler.unlink()
    print(codes)
    assert {*codes} <= {0, NO_SPACE} and NO_SPACE in codes
    builder.complete(state)


@pytest.mark.root
def test_state_that_becomes_read_only(builder: Builder, small_disk: Path) -> None:
    state = small_disk / "state"
    child = builder.start(state)
    while child.poll() is None and not any((state / "work").glob("*/tree/*")):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    until = time.monotonic() + 60
    while subprocess.run(["mount", "-o", "remount,ro", small_disk], stderr=subprocess.DEVNULL).returncode:
        assert time.monotonic() < until, "a process of the killed build still writes"
        time.sleep(0.1)
    assert builder.refused(state) == UNWRITABLE
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    builder.complete(state)


@pytest.mark.skipif(FAKETIME is None, reason="not installed: libfaketime")
def test_clock_that_steps_between_stages(builder: Builder, tmp_path: Path) -> None:
    """Builds are killed, and run years earlier or later on what they left; compilers run at the true time.

    NVIDIA's cicc does not end when libfaketime is loaded into it.
    """
    state, chance, stepped = tmp_path / "state", random.Random(SEED), replace(builder)
    offsets = ("+3y", "-5y", "+0d", "-1d", "+20y")
    for offset in offsets:
        stepped.env = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        child = stepped.start(state, stage="plan")
        time.sleep(5 * chance.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        builder.require_nothing_half_done(state)
    builder.complete(state)
    for offset in offsets:
        stepped.env["FAKETIME"] = offset
        stepped.complete(state)
    assert builder.log(state).read_text().count("nothing to do for") == len(offsets)


def test_little_memory(builder: Builder, tmp_path: Path) -> None:
    """The address space of a build with its compilers is limited to ever more; the first limits suffice for no compiler."""
    state, codes = tmp_path / "state", []
    for mebibytes in (150, 250, 400, 700, 1200, 2500):

        def limit(limit_bytes: int = mebibytes * 2**20) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

        codes.append(builder.refused(state, limit))
    print(codes)
    builder.complete(state)
