"""Assembly of images that runs twice at once, or has no space left. Kills: tests/integration/test_killed_patch_build.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from small_assembly import SmallImage

from sm120kit.core.errors import ResourceUnavailable
from sm120kit.images import _assembly
from sm120kit.images.image_records import Image


def assembled(directory: Path) -> Image:
    return SmallImage(directory).assemble()[0]


def forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def require_complete(directory: Path, expected: Image) -> None:
    """Assemble, and require the expected image with all blobs and without leftovers."""
    small = SmallImage(directory)
    assert small.assemble()[0] == expected
    manifest = small.layout.find(expected.id)
    assert manifest is not None and [listed for listed, _ in small.layout.images()] == [manifest]
    small.layout.verify(manifest.digest)
    assert [*(small.layout.directory / "partial").iterdir()] == []
    assert [path for path in (directory / "state").rglob(".*.json.*") if path.is_file()] == []


def test_two_builds_at_once_give_one_image(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "shared").mkdir()
    SmallImage(tmp_path / "shared").wheels()
    children = [forked(lambda: assembled(tmp_path / "shared")) for _ in range(3)]
    assert [exit_code(child) for child in children] == [0, 0, 0]
    require_complete(tmp_path / "shared", assembled(tmp_path / "alone"))


@pytest.mark.root
def test_full_disk_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alone").mkdir()
    whole = assembled(tmp_path / "alone")
    small = SmallImage(tmp_path)
    (tmp_path / "state").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k,mode=700", "tmpfs", tmp_path / "state"], check=True)
    try:
        with pytest.raises(ResourceUnavailable, match="the image with its unpacked files needs"):
            small.assemble()
        assert small.layout.images() == []
        monkeypatch.setattr(_assembly, "require_disk", lambda *_: None)
        filler = tmp_path / "state" / "filler"
        failed = 0
        for room in (4, 12, 24, 48, 96, 160):
            filler.write_bytes(bytes(max(0, shutil.disk_usage(filler.parent).free - room * 1024)))
            try:
                small.assemble()
            except ResourceUnavailable as error:
                failed += 1
                assert "no space left" in error.message
                assert [*(small.layout.directory / "partial").iterdir()] == []
                assert small.layout.images() == []
            filler.unlink()
        assert failed >= 3
        subprocess.run(["mount", "-o", "remount,size=20m", tmp_path / "state"], check=True)
        require_complete(tmp_path, whole)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path / "state"], check=True)
