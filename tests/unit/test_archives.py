"""Limits for wheels that are not trusted."""

from __future__ import annotations

import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import zip_bombs

from sm120kit.core import archives
from sm120kit.core.errors import BadInput


@contextmanager
def cheaply() -> Iterator[None]:
    start = time.process_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20 and time.process_time() - start < 20, (peak, time.process_time() - start)


def test_small_wheel_that_unpacks_to_4_gb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bomb-1.0-py3-none-any.whl"
    path.write_bytes(zip_bombs.wheel("x.so", 255))
    assert path.stat().st_size < 5 * 2**20
    with (
        cheaply(),
        pytest.raises(BadInput, match=r"bomb-1\.0.* unpacks to 4080 MiB; the limit for its size is 1024 MiB"),
        archives.open_wheel(path),
    ):
        pass


def test_member_larger_than_its_header_states(tmp_path: Path) -> None:
    path = tmp_path / "bomb.whl"
    path.write_bytes(zip_bombs.wheel("x.so", 64, stated=10))
    with cheaply(), pytest.raises(BadInput), archives.open_wheel(path) as wheel:
        archives.read_member(wheel, "x.so")


def test_too_many_members_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 1000)
    path = tmp_path / "many.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for number in range(1001):
            wheel.writestr(f"m{number}", b"")
    with pytest.raises(BadInput, match="has 1001 members; the limit is 1000"), archives.open_wheel(path):
        pass


def test_unsupported_compression_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "odd.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as wheel:
        wheel.writestr("metadata", b"x")
    with pytest.raises(BadInput, match="may not use: metadata"), archives.open_wheel(path):
        pass


@pytest.mark.parametrize(("name", "limit"), [("METADATA", 16), ("RECORD", 16), ("entry_points.txt", 1)])
def test_metadata_that_unpacks_to_100_mib_is_rejected(tmp_path: Path, name: str, limit: int) -> None:
    path = tmp_path / "x-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel, wheel.open(f"x-1.0.dist-info/{name}", "w") as member:
        for _ in range(100):
            member.write(bytes(2**20))
    with cheaply(), pytest.raises(BadInput, match=rf"{name} of 100.0 MiB; the limit is {limit} MiB"), archives.open_wheel(path):
        pass


def test_scripts_of_a_wheel_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "x-1.0-py3-none-any.whl"
    for scripts, refused in ((10_000, False), (200_000, True)):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            lines = "".join(f"s{number} = a:b\n" for number in range(scripts))
            wheel.writestr("x-1.0.dist-info/entry_points.txt", f"[console_scripts]\n{lines}")
        with pytest.raises(BadInput, match=r"entry_points\.txt") if refused else nullcontext(), archives.open_wheel(path):
            pass


def test_damaged_wheel_is_bad_input_wherever_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("x", b"content")
    whole = path.read_bytes()
    for content in (whole[:-30], b"", b"<html>", whole.replace(b"PK\3\4", b"PK\0\0"), whole.replace(b"content", b"changed")):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="damaged"), archives.open_wheel(path) as wheel:
            wheel.read("x")


def test_read_member_returns_packed_content(tmp_path: Path) -> None:
    path, data = tmp_path / "good.whl", bytes(range(256)) * 20_000
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("x", data)
    with archives.open_wheel(path) as wheel:
        assert archives.read_member(wheel, "x") == data


def test_member_that_is_absent_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "damaged.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("x", b"content")
    path.write_bytes(path.read_bytes().replace(b"content", b"another"))
    with archives.open_wheel(path) as wheel:
        for member in ("x", "absent"):
            with pytest.raises(BadInput, match=rf"damaged\.whl is damaged: .*'{member}'"):
                archives.read_member(wheel, member)


def test_member_without_a_name_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("x", b"")
    packed = (tmp_path / "a.whl").read_bytes().replace(b"x", b"\0")  # zipfile ends names at NUL
    (tmp_path / "a.whl").write_bytes(packed)
    with pytest.raises(BadInput, match="has a member without a name"), archives.open_wheel(tmp_path / "a.whl"):
        pass
