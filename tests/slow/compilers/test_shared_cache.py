"""Builds that share a directory: one machine compiles, the others copy the wheel, unless the entry is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_flashinfer

from sm120kit.core import process
from sm120kit.core.digests import file_sha256


class Team:
    """A FlashInfer of one kernel, and a shared directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.cache = directory, directory / "cache"
        self.cache.mkdir()
        self.data, self.mirror = tiny_flashinfer.write(directory)

    def build(self, state: str, *options: str) -> tuple[str, bool, str]:
        """The sha256 of a wheel that is built in a state directory, whether anything was compiled, and what was printed."""
        out = self.directory / f"{state}.out"
        argv = ["sm120kit", "build", "flashinfer@1.0", "--mirror", self.mirror, "-o", out, "--cache", self.cache, *options]
        env = {"SM120KIT_STATE": str(self.directory / state), "SM120KIT_DATA": str(self.data)}
        done = process.run(argv, cwd=self.directory, env=env)
        (wheel,) = out.iterdir()
        return file_sha256(wheel), "compiling" in done.stderr, done.stderr


@pytest.fixture
def team(tmp_path: Path) -> Team:
    return Team(tmp_path)


def test_only_the_first_machine_compiles(team: Team) -> None:
    first, compiled, printed = team.build("first", "--cache-push")
    assert compiled and "stored in the cache" in printed
    second, compiled, printed = team.build("second")
    assert (second, compiled) == (first, False) and "warning" not in printed


def test_entries_that_cannot_be_used_are_compiled(team: Team) -> None:
    first, *_ = team.build("first", "--cache-push")
    (wheel,) = team.cache.glob("flashinfer-*/*.whl")
    wheel.write_bytes(b"x" + wheel.read_bytes()[1:])
    damaged, compiled, printed = team.build("damaged")
    assert (damaged, compiled) == (first, True) and "warning" in printed
