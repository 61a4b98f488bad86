"""FlashInfer's real sdist from the index that this machine is set to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm120kit.gitrepo import Repository
from sm120kit.records import SdistPin
from sm120kit.sources import fetch
from sm120kit.workspace import Workspace

PIN = SdistPin("flashinfer", "flashinfer-python", "0.6.6", "0730ba7c7aad332961933bcebc5119762797161ede57d955f6fd199818ed1d92")
COMMIT = "b23f79d4b9b9a53414aa1e044d14c1ab020b69e3"
TREE = "fce70352e0dbd1d01c4ac3212c175ccacad12620"
"""What ``tar x`` and ``git add --force`` of the unpacked directory give, too: the last test here."""


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace.open(tmp_path_factory.mktemp("state"))
    fetch(PIN, workspace)
    return workspace


def test_the_same_ids_as_everywhere(fetched: Workspace, tmp_path: Path) -> None:
    checkout = fetch(PIN, fetched, offline=True)
    assert (checkout.commit, checkout.tree) == (COMMIT, TREE)
    again = fetch(PIN, Workspace.open(tmp_path / "gap"), mirror=str(fetched.downloads), offline=True)
    assert (again.commit, again.tree) == (COMMIT, TREE)


def test_cutlass_is_in_it(fetched: Workspace) -> None:
    checkout = fetch(PIN, fetched, offline=True)
    version = Repository(checkout.repository).read(checkout.commit, "3rdparty/cutlass/include/cutlass/version.h").decode()
    for line in ("CUTLASS_MAJOR 4", "CUTLASS_MINOR 2", "CUTLASS_PATCH 1"):
        assert f"#define {line}" in version


def test_killed_in_the_middle_and_again(fetched: Workspace, tmp_path: Path) -> None:
    """SIGKILL at moments all through a fetch; each time a rest may be left, and the last fetch is as if nothing had been."""
    root = tmp_path / "state"
    program = f"""
from pathlib import Path
from sm120kit.records import SdistPin
from sm120kit.sources import fetch
from sm120kit.workspace import Workspace
fetch({PIN!r}, Workspace.open(Path({str(root)!r})), mirror={str(fetched.downloads)!r})
"""
    rests = 0
    for seconds in (0.3, 0.5, 0.7, 0.9, 1.2):
        child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
        started = time.monotonic()
        while time.monotonic() - started < 30 and not (root / "locks").exists():
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        time.sleep(0.2)
        rests += sum(len(list((root / place).glob(".*"))) for place in ("checkouts", "downloads"))
    assert rests, "no kill hit the middle of a fetch"
    checkout = fetch(PIN, Workspace.open(root), mirror=str(fetched.downloads), offline=True)
    assert (checkout.commit, checkout.tree) == (COMMIT, TREE)
    assert [path.name for path in (root / "checkouts").iterdir()] == [checkout.repository.name]
    assert [path.name for path in (root / "downloads").iterdir()] == [PIN.sha256]
    assert Repository(checkout.repository).git("fsck", "--connectivity-only").returncode == 0


def test_tar_and_git_agree(fetched: Workspace, tmp_path: Path) -> None:
    (packed,) = (fetched.downloads / PIN.sha256).iterdir()
    subprocess.run(["tar", "-xf", packed, "--strip-components=1", "-C", tmp_path], check=True)
    repository = Repository.init(tmp_path / ".git")
    index = {"GIT_INDEX_FILE": str(tmp_path.parent / "index")}
    repository.git("-C", str(tmp_path), f"--work-tree={tmp_path}", "add", "--force", "--all", ".", env=index)
    assert repository.git("write-tree", env=index).stdout.strip() == TREE
