"""Fetching FlashInfer's sdist from the configured package index."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sm120kit.core.workspace import Workspace
from sm120kit.sources import Origin, fetch
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import SdistPin

PIN = SdistPin("flashinfer", "flashinfer-python", "0.6.6", "0730ba7c7aad332961933bcebc5119762797161ede57d955f6fd199818ed1d92")
COMMIT = "b23f79d4b9b9a53414aa1e044d14c1ab020b69e3"
TREE = "fce70352e0dbd1d01c4ac3212c175ccacad12620"
"""Also the ids after ``tar x`` and ``git add --force`` of the unpacked directory; see the last test."""


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace.open(tmp_path_factory.mktemp("state"))
    fetch(PIN, workspace)
    return workspace


def test_commit_and_tree_ids_are_constant(fetched: Workspace, tmp_path: Path) -> None:
    checkout = fetch(PIN, fetched, Origin(offline=True))
    assert (checkout.commit, checkout.tree) == (COMMIT, TREE)
    again = fetch(PIN, Workspace.open(tmp_path / "gap"), Origin(str(fetched.downloads), offline=True))
    assert (again.commit, again.tree) == (COMMIT, TREE)


def test_cutlass_is_in_the_tree(fetched: Workspace) -> None:
    checkout = fetch(PIN, fetched, Origin(offline=True))
    version = Repository(checkout.repository).read(checkout.commit, "3rdparty/cutlass/include/cutlass/version.h").decode()
    for line in ("CUTLASS_MAJOR 4", "CUTLASS_MINOR 2", "CUTLASS_PATCH 1"):
        assert f"#define {line}" in version


def test_fetch_after_sigkill(fetched: Workspace, tmp_path: Path) -> None:
    """SIGKILL at several times during a fetch may leave files, and the final fetch gives the same result and removes them."""
    root = tmp_path / "state"
    program = f"""
from pathlib import Path
from sm120kit.sources.source_records import SdistPin
from sm120kit.sources import Origin, fetch
from sm120kit.core.workspace import Workspace
fetch({PIN!r}, Workspace.open(Path({str(root)!r})), Origin({str(fetched.downloads)!r}))
"""

    def partial_files() -> set[Path]:
        return {path for name in ("checkouts", "downloads") for path in (root / name).glob(".*")}

    leftovers: set[Path] = set()
    for seconds in (0, 0.2, 0.4, 0.8, 1.6):  # after it start to write, however long it takes to start
        with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as child:
            before = partial_files()
            while child.poll() is None and not partial_files() - before:
                time.sleep(0.005)
            time.sleep(seconds)
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        leftovers |= partial_files()
    assert leftovers, "no kill hit the middle of a fetch"
    checkout = fetch(PIN, Workspace.open(root), Origin(str(fetched.downloads), offline=True))
    assert (checkout.commit, checkout.tree) == (COMMIT, TREE)
    assert [path.name for path in (root / "checkouts").iterdir()] == [checkout.repository.name]
    assert [path.name for path in (root / "downloads").iterdir()] == [PIN.sha256]
    assert Repository(checkout.repository).git("fsck", "--connectivity-only").returncode == 0


def test_git_ends_with_a_killed_fetch(fetched: Workspace, tmp_path: Path) -> None:
    """A git that is about to create a repository does not create it after the next fetch has removed its directory."""
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(
        f"""#!/bin/sh
case "$*" in *init*) echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 2;; esac
exec {shutil.which("git")} "$@"
"""
    )
    slow.chmod(0o755)
    root = tmp_path / "state"
    program = f"""
from pathlib import Path
from sm120kit.sources.source_records import SdistPin
from sm120kit.sources import Origin, fetch
from sm120kit.core.workspace import Workspace
fetch({PIN!r}, Workspace.open(Path({str(root)!r})), Origin({str(fetched.downloads)!r}))
"""
    environment = os.environ | {"PATH": f"{slow.parent}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as child:
        while not (tmp_path / "pid").is_file():
            assert child.poll() is None
            time.sleep(0.005)
        child.kill()
    for leftover in (root / "checkouts").iterdir():
        shutil.rmtree(leftover)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(60)
    assert not [*(root / "checkouts").iterdir()]


def test_tree_equals_tar_content(fetched: Workspace, tmp_path: Path) -> None:
    (packed,) = (fetched.downloads / PIN.sha256).iterdir()
    subprocess.run(["tar", "-xf", packed, "--strip-components=1", "-C", tmp_path], check=True)
    repository = Repository.init(tmp_path / ".git")
    index = {"GIT_INDEX_FILE": str(tmp_path.parent / "index")}
    repository.git("-C", str(tmp_path), f"--work-tree={tmp_path}", "add", "--force", "--all", ".", env=index)
    assert repository.git("write-tree", env=index).stdout.strip() == TREE
