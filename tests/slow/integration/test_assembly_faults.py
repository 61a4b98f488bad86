"""Assembly of images that is killed, runs twice at once, or has no space left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_assembly import SmallImage

from sm120kit.core.errors import ResourceUnavailable
from sm120kit.images import _assembly, oci
from sm120kit.images.image_records import Image
from sm120kit.images.oci import BlobWriter


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


@contextmanager
def events(monkeypatch: pytest.MonkeyPatch, at: Callable[[int], None]) -> Iterator[None]:
    """Call ``at`` with a count before each write of a blob, each rename of one, and each write of a record or index."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            at(count)
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(BlobWriter, "write", counted(BlobWriter.write))
        patch.setattr(BlobWriter, "commit", counted(BlobWriter.commit))
        patch.setattr(_assembly, "write_record", counted(_assembly.write_record))
        patch.setattr(oci, "write_atomic", counted(oci.write_atomic))
        yield


def test_killed_anywhere_and_repeated_gives_the_same_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed runs one after the other on the same state: what each left is continued."""
    (tmp_path / "whole").mkdir()
    total = 0

    def remember(count: int) -> None:
        nonlocal total
        total = count

    with events(monkeypatch, remember):
        whole = assembled(tmp_path / "whole")
    points = random.Random(14).sample(range(1, total), 24)
    continued = tmp_path / "continued"
    continued.mkdir()
    for number, point in enumerate(points):

        def kill(count: int, point: int = point) -> None:
            if count >= point:
                os.kill(os.getpid(), signal.SIGKILL)

        directory = tmp_path / f"killed-{point}"
        directory.mkdir()
        with events(monkeypatch, kill):
            assert exit_code(forked(lambda directory=directory: assembled(directory))) == -signal.SIGKILL
            exit_code(forked(lambda: assembled(continued)))  # later runs have less to do, and may succeed
        if number % 3 == 0:
            require_complete(directory, whole)
    require_complete(continued, whole)


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
