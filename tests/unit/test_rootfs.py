"""Layers are unpacked safely, and combined as a container daemon combines them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import layers
import pytest
from small_engine import row_hash

from sm120kit.core.errors import BadInput, NotTrusted
from sm120kit.images import _rootfs


def unpacked(directory: Path, *members: layers.Member) -> Path:
    tree = directory / "tree"
    tree.mkdir(parents=True)
    digests = _rootfs.unpack(io.BytesIO(layers.packed(*members)), tree, Path("blob"))
    (directory / "digests.json").write_text(json.dumps(digests))
    return tree


def test_modes_times_and_links_are_those_of_the_headers(tmp_path: Path) -> None:
    tree = unpacked(
        tmp_path,
        ("./", None, {"mode": 0o755}),
        ("./a", None, {"mode": 0o500, "mtime": 7}),
        ("a/program", b"x", {"mode": 0o4711, "uid": 3, "gid": 4}),
        ("a/name", b"", {"type": b"1", "linkname": "./a/program"}),
        ("a/link", b"", {"type": b"2", "linkname": "/etc/passwd"}),
        ("b/c/made", b"", {"mode": 0o200}),
        ("dev/null", b"", {"type": b"3", "uid": 5}),
        ("pipe", b"", {"type": b"6"}),
    )
    assert (tree / "a/program").samefile(tree / "a/name") and (tree / "a/link").readlink() == Path("/etc/passwd")
    assert (tree / "a/program").stat().st_mode & 0o7777 == 0o711 and (tree / "a").stat().st_mtime == 7
    assert (tree / "b/c/made").stat().st_mode & 0o7777 == 0o600
    assert not (tree / "dev/null").exists() and not (tree / "pipe").exists()


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("../evil", b"", {})], "leads out of its directory"),
        ([("a/../../evil", b"", {})], "leads out of its directory"),
        ([("link", b"", {"type": b"2", "linkname": "/"}), ("link/evil", b"", {})], "is not a directory"),
        ([("link", b"", {"type": b"2", "linkname": ".."}), ("link/evil", None, {})], "is not a directory"),
        ([("link", b"", {"type": b"2", "linkname": "/"}), ("a", b"", {"type": b"1", "linkname": "link"})], "is a hard link to"),
        ([("a", b"", {"type": b"1", "linkname": "/etc/passwd"})], "is a hard link to"),
        ([("a", b"", {}), ("a/b", b"", {})], "is not a directory"),
        ([("a/b", b"", {}), ("a", b"", {})], "is a directory and a file"),
        ([("./", b"", {})], "is not a directory"),
        ([("a" * 300, b"", {})], "name too long"),
        ([("a", b"", {"type": b"2", "linkname": ""})], "the layer is damaged"),
        ([("a/.wh.b", b"", {})], "removes a file of a lower layer"),
    ],
)
def test_layer_cannot_write_outside(tmp_path: Path, members: list[layers.Member], problem: str) -> None:
    with pytest.raises(NotTrusted, match=problem):
        unpacked(tmp_path / "layer", *members)
    assert [path.name for path in tmp_path.iterdir()] == ["layer"]


def test_absolute_paths_are_below_the_root(tmp_path: Path) -> None:
    assert (unpacked(tmp_path, ("/etc/added", b"x", {})) / "etc/added").read_bytes() == b"x"


def test_damaged_layer(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with pytest.raises(NotTrusted, match="damaged"):
        _rootfs.unpack(io.BytesIO(layers.packed(("a", b"x" * 5000, {}))[:2000]), tree, Path("blob"))
    with pytest.raises(NotTrusted, match="damaged"):
        _rootfs.unpack(io.BytesIO(b"not a tar file" * 100), tree, Path("blob"))


def test_last_of_two_members_counts(tmp_path: Path) -> None:
    layer = unpacked(tmp_path, ("a", b"first", {"uid": 1}), ("b", b"", {"type": b"1", "linkname": "a"}), ("a", b"second", {}))
    assert (layer / "a").read_bytes() == b"second" and (layer / "b").read_bytes() == b"first"


def test_digests_are_those_of_the_visible_files(tmp_path: Path) -> None:
    link = {"type": b"2", "linkname": "a"}
    sources = [
        unpacked(tmp_path / "0", *((name, b"0", {}) for name in ("a", "b", "c", "d/x", "e", "f/x", "f/g/x", "\udcff"))),
        unpacked(
            tmp_path / "1",
            ("a", b"1", {}),
            ("b", b"", link),
            ("name", b"", {"type": b"1", "linkname": "a"}),
            ("e/x", b"1", {}),
            ("f", b"", link),
            ("last", b"first", {}),
            ("last", b"1", {}),
        ),
    ]
    zero, one = row_hash(b"0"), row_hash(b"1")
    assert _rootfs.digests(sources) == {"/a": one, "/name": one, "/c": zero, "/d/x": zero, "/last": one, "/\udcff": zero}
    (tmp_path / "0" / "tree" / "c").write_bytes(b"2")
    (tmp_path / "0" / "tree" / "d/x").unlink()
    assert _rootfs.digests(sources) == {"/a": one, "/name": one, "/last": one, "/\udcff": zero}
    for damaged in ('{"c": ["a", 1]', "[]", '{"c": [1, 2]}', '{"c": "text"}'):
        (tmp_path / "0" / "digests.json").write_text(damaged)
        assert _rootfs.digests(sources) == {}
    (tmp_path / "0" / "digests.json").unlink()  # unpacked by an older version
    assert _rootfs.digests(sources) == {}


def test_combined_directory_has_each_layers_entries_once(tmp_path: Path) -> None:
    sources = [
        unpacked(
            tmp_path / "0", ("d", None, {}), ("d/0", b"0", {}), ("d/both", b"0", {}), ("file", b"0", {}), ("dir/x", b"0", {})
        ),
        unpacked(
            tmp_path / "1", ("d", None, {}), ("d/1", b"1", {}), ("d/both", b"1", {}), ("file/x", b"1", {}), ("dir", b"1", {})
        ),
        unpacked(tmp_path / "2", ("d", None, {"mode": 0o700}), ("dir/y", b"2", {})),
    ]
    expected = {"d/0": "0", "d/1": "1", "d/both": "1", "file/x": "1", "dir/y": "2"}
    into = tmp_path / "into"
    into.mkdir()
    _rootfs.combine(sources, into)
    assert {str(path.relative_to(into)): path.read_text() for path in into.rglob("*") if path.is_file()} == expected
    assert (into / "d").stat().st_mode & 0o777 == 0o700 and (into / "file/x").samefile(sources[1] / "file/x")
    assert [entry.path for entry in _rootfs.walk(sources)] == ["d", "d/0", "d/1", "d/both", "dir", "dir/y", "file", "file/x"]
    entry = _rootfs.find(sources, "/dir/y")
    assert entry is not None and entry.source == sources[2] / "dir/y"
    assert _rootfs.find(sources, "dir/x") is None


@pytest.mark.parametrize("path", ["../../outside", "/home/../../../outside", "/.."])
def test_no_path_leads_out_of_the_layers(tmp_path: Path, path: str) -> None:
    """Such as a home in the ``passwd`` of an image."""
    layer = unpacked(tmp_path / "layer", ("home/file", b"x", {}))
    (tmp_path / "outside").mkdir()
    assert _rootfs.find([layer], path) is None and _rootfs.find([layer], "/home/./file") is not None


def test_copies_do_not_share_bytes_with_the_layer(tmp_path: Path) -> None:
    layer = unpacked(tmp_path, ("home/file", b"x", {}))
    (tmp_path / "into").mkdir()
    _rootfs.combine([layer], tmp_path / "into", "home", link=False)
    assert (tmp_path / "into" / "file").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", {"uid": 0, "gid": 0, "home": "/root"}),
        ("1000:7", {"uid": 1000, "gid": 7, "home": "/home/user"}),
        ("12", {"uid": 12, "gid": 0, "home": "/"}),
    ],
)
def test_user_of_an_image(tmp_path: Path, user: str, expected: dict[str, object]) -> None:
    assert _rootfs.user_of([unpacked(tmp_path, ("etc/passwd", layers.ACCOUNTS.encode(), {}))], user) == expected


@pytest.mark.parametrize("user", ["user", "²", "9" * 5000, "0:user"], ids=lambda user: user[:6])
def test_user_of_an_image_without_a_number(tmp_path: Path, user: str) -> None:
    with pytest.raises(BadInput, match=user[:6]):
        _rootfs.user_of([unpacked(tmp_path)], user)
