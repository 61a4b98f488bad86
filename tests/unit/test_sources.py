"""Fetching of pins from archives, indexes, servers and repositories that the tests create, and rejected input."""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import re
import subprocess
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hostile_server import HostileServer, hostile_server
from loopback import http_served

from sm120kit.core import archives, console, reporting, retry
from sm120kit.core.errors import BadInput, FetchFailed, Mismatch, NotTrusted, OfflineMiss
from sm120kit.core.workspace import Workspace
from sm120kit.sources import Origin, _archive, _git_urls, checkout_name, fetch, index_client
from sm120kit.sources._settings import Settings, settings_from
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin, SdistPin

COMMIT = "0" * 40
SDIST_COMMIT = "c0916288b8474a8d1353089087b8406b1cd20117"
SDIST_TREE = "14974a1e74743335881676b06e7a6195abe52d31"
BARE_COMMIT = "4d92ec5d6846b96f8f87d1dfe80f23772ad38e05"
IMPORTED_COMMIT = "6c496d8d7797a71d3a13476e5c6e31a2a88a0346"
Member = tuple[str, "bytes | None", int, dict[str, object]]


def file(name: str, content: bytes = b"x", mode: int = 0o644, **more: object) -> Member:
    return (name, content, mode, more)


def link(name: str, target: str) -> Member:
    return (name, None, 0o777, {"type": tarfile.SYMTYPE, "linkname": target})


GOOD = [
    file("demo-1.0/PKG-INFO", b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"),
    file("demo-1.0/.gitignore", b"*.so\nbuild/\n"),
    file("demo-1.0/.gitattributes", b"* text=auto eol=crlf\n"),
    file("demo-1.0/build/kept.so", b"\x7fELF\r\n"),
    file("demo-1.0/run.sh", b"#!/bin/sh\r\n", 0o775),
    file("demo-1.0/private", b"", 0o600),
    file('demo-1.0/odd "name" \\ \u00fc\n', b"odd"),
    link("demo-1.0/include/demo.h", "../src/demo.h"),
    file("demo-1.0/src/demo.h", b"int demo;\n"),
]


def tar_of(members: list[Member]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:") as tar:
        for name, content, mode, more in members:
            info = tarfile.TarInfo(name)
            info.mode, info.mtime, info.size = mode, 1_700_000_000, len(content or b"")
            for key, value in more.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content) if content is not None else None)
    return raw.getvalue()


def pin_of(packed: bytes) -> SdistPin:
    return SdistPin("demo", "demo", "1.0", hashlib.sha256(packed).hexdigest())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "state")


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A flat directory of sdists and repositories, such as a mirror for an air gap."""
    directory = tmp_path / "shelf"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def _quick_and_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of this machine, and the pause between retries."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "GIT_")) and name != "PIP_CERT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(retry, "PAUSE_SECONDS", 0.0)


def put(shelf: Path, members: list[Member] = GOOD, name: str = "demo-1.0.tar.gz") -> SdistPin:
    """Write an uncompressed sdist: gzip's output depends on its version, and the commit has the sha256."""
    packed = tar_of(members)
    (shelf / name).write_bytes(packed)
    return pin_of(packed)


def left_behind(workspace: Workspace) -> list[str]:
    """All files in the state directory except locks."""
    return sorted(
        str(path.relative_to(workspace.root)) for path in workspace.root.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


def test_sdist_content_of_checkout(workspace: Workspace, shelf: Path, tmp_path: Path) -> None:
    checkout = fetch(put(shelf), workspace, Origin(str(shelf)))
    repository = Repository(checkout.repository)
    listed = repository.git("ls-tree", "-r", "-z", checkout.commit).raw.decode().split("\0")[:-1]
    modes = {entry.split("\t")[1]: entry.split()[0] for entry in listed}
    assert modes == {
        "PKG-INFO": "100644",
        ".gitignore": "100644",
        ".gitattributes": "100644",
        "build/kept.so": "100644",
        "run.sh": "100755",
        "private": "100644",
        'odd "name" \\ \u00fc\n': "100644",
        "include/demo.h": "120000",
        "src/demo.h": "100644",
    }
    repository.export(checkout.commit, tmp_path / "out")
    assert (tmp_path / "out/run.sh").read_bytes() == b"#!/bin/sh\r\n"
    assert (tmp_path / "out/include/demo.h").read_bytes() == b"int demo;\n"
    assert repository.git("fsck", "--strict").returncode == 0
    shown = repository.git("show", "-s", "--date=raw", "--format=%B%cd %P", checkout.commit).stdout
    assert shown == f"demo 1.0\n\nsha256: {checkout.pin.sha256}\n315532800 +0000 \n"  # type: ignore[union-attr]


def test_sdist_commit_id_is_constant(workspace: Workspace, shelf: Path) -> None:
    checkout = fetch(put(shelf), workspace, Origin(str(shelf)))
    assert (checkout.commit, checkout.tree) == (SDIST_COMMIT, SDIST_TREE)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compression_does_not_change_tree(workspace: Workspace, shelf: Path, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(tar_of(GOOD))
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    assert fetch(pin_of(packed), workspace, Origin(str(shelf))).tree == SDIST_TREE


@pytest.mark.usefixtures("hostile_git")
def test_sdist_commit_id_with_hostile_user_git_config(workspace: Workspace, shelf: Path) -> None:
    checkout = fetch(put(shelf), workspace, Origin(str(shelf)))
    assert (checkout.commit, checkout.tree) == (SDIST_COMMIT, SDIST_TREE)


def test_second_fetch_uses_checkout(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    first = fetch(pin, workspace, Origin(str(shelf)))
    (shelf / "demo-1.0.tar.gz").unlink()
    assert fetch(pin, workspace, Origin(offline=True)) == first


def test_offline_with_cached_download(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    (workspace.downloads / pin.sha256).mkdir(parents=True)
    (shelf / "demo-1.0.tar.gz").rename(workspace.downloads / pin.sha256 / "any-name.tar.gz")
    assert fetch(pin, workspace, Origin(offline=True)).commit == SDIST_COMMIT


def test_downloads_directory_as_mirror(workspace: Workspace, shelf: Path, tmp_path: Path) -> None:
    pin = put(shelf)
    fetch(pin, workspace, Origin(str(shelf)))
    other = Workspace.open(tmp_path / "other")
    assert fetch(pin, other, Origin(workspace.downloads.as_uri(), offline=True)).commit == SDIST_COMMIT


def test_damaged_download_is_fetched_again(workspace: Workspace, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pin = put(shelf)
    spoilt = workspace.downloads / pin.sha256 / "demo-1.0.tar.gz"
    spoilt.parent.mkdir(parents=True)
    spoilt.write_bytes(b"spoilt")
    with reporting.use(console):
        assert fetch(pin, workspace, Origin(str(shelf))).commit == SDIST_COMMIT
    assert "removing it" in capsys.readouterr().err


def test_leftovers_of_killed_fetch_are_removed(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    key = checkout_name(pin)
    half = workspace.checkouts / f".{key}.abc"
    half.mkdir(parents=True)
    (half / "HEAD").write_text("ref: refs/heads/base\n")
    workspace.downloads.mkdir()
    (workspace.downloads / f".{key}.abc").write_bytes(b"half")
    (workspace.downloads / ".another-pin.abc").write_bytes(b"not mine")
    (workspace.checkouts / key).mkdir()
    assert fetch(pin, workspace, Origin(str(shelf))).commit == SDIST_COMMIT
    names = {path.name for path in (*workspace.checkouts.iterdir(), *workspace.downloads.iterdir())}
    assert names == {key, pin.sha256, ".another-pin.abc"}


def test_checkout_names_are_unique() -> None:
    pin = SdistPin("demo", "demo", "1.0", "a" * 64)
    keys = {
        checkout_name(pin),
        checkout_name(replace(pin, sha256="b" * 64)),
        checkout_name(replace(pin, version="../1")),
        checkout_name(GitPin("demo", "u", COMMIT, "1.0")),
    }
    assert len(keys) == 4
    assert not any("/" in key for key in keys)


# Rejected input


def metadata(text: str) -> list[Member]:
    return [file("demo-1.0/PKG-INFO", text.encode()), file("demo-1.0/kept", b"x")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Name: demo\nVersion: 1.1\n", r"has demo 1\.1 in PKG-INFO; the recipe has demo 1\.0"),
        ("Name: other\nVersion: 1.0\n", r"has other 1\.0 in PKG-INFO; the recipe has demo 1\.0"),
        ("Name: demo\nVersion: newest\n", "has demo newest in PKG-INFO"),
        ("Name: demo\n", "has no name and version in PKG-INFO"),
        (f"Summary: {'x' * 2**20}\nName: demo\nVersion: 1.0\n", "has no name and version"),
    ],
)
def test_sdist_of_another_release_is_rejected(workspace: Workspace, shelf: Path, text: str, problem: str) -> None:
    """With a changed version and the old sha256 in a recipe, the old source must not be accepted as the new version."""
    pin = put(shelf, metadata(text))
    for _ in range(2):
        with pytest.raises(Mismatch, match=problem):
            fetch(pin, workspace, Origin(str(shelf)))
        assert not list(workspace.checkouts.iterdir())


def test_sdist_without_pkg_info_is_rejected(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf, [file("demo-1.0/kept")])
    with pytest.raises(Mismatch, match="has no name and version in PKG-INFO"):
        fetch(pin, workspace, Origin(str(shelf)))


@pytest.mark.parametrize("text", ["Name: Demo\nVersion: 1.0\n", "Name: demo\nVersion: 1.0.0\n", "Name: demo\nVersion: v1\n"])
def test_equal_spellings_of_name_and_version(workspace: Workspace, shelf: Path, text: str) -> None:
    assert fetch(put(shelf, metadata(text)), workspace, Origin(str(shelf)))


@pytest.mark.parametrize(("version", "right"), [("1.0", True), ("1.1", False)])
def test_commit_of_another_release_is_rejected(workspace: Workspace, tmp_path: Path, version: str, right: bool) -> None:
    repository = Repository.init(tmp_path / "flashinfer.git")
    with repository.index() as index:
        index.add("version.txt", f"{version}\n".encode())
        commit = repository.commit_tree(index.write_tree(), None, "release\n")
    repository.set_ref("refs/heads/main", commit)
    pin = GitPin("flashinfer", str(repository.path), commit, "1.0")
    if right:
        assert fetch(pin, workspace)
    else:
        with pytest.raises(Mismatch, match=r"has flashinfer 1\.1 in version\.txt; the recipe has flashinfer 1\.0"):
            fetch(pin, workspace)


def refused(workspace: Workspace, members: list[Member], shelf: Path) -> str:
    pin = put(shelf, members)
    with pytest.raises(NotTrusted) as error:
        fetch(pin, workspace, Origin(str(shelf)))
    assert not list(workspace.checkouts.iterdir())
    return error.value.message


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (file("demo-1.0/../../evil"), "has '..' in its path"),
        (file("/etc/evil"), "has an absolute path"),
        (file("elsewhere/evil"), "is not below the top-level directory 'demo-1.0'"),
        (link("demo-1.0/evil", "/etc/passwd"), "is a symbolic link out of the tree: '/etc/passwd'"),
        (link("demo-1.0/evil", "../../etc"), "is a symbolic link out of the tree: '../../etc'"),
        (link("demo-1.0/deep/evil", "../../x"), "is a symbolic link out of the tree: '../../x'"),
        (file("demo-1.0/evil", type=tarfile.LNKTYPE, linkname="demo-1.0/PKG-INFO"), "is a hard link"),
        (file("demo-1.0/evil", type=tarfile.CHRTYPE), "is a device or other special file"),
        (file("demo-1.0/evil", type=tarfile.FIFOTYPE), "is a device or other special file"),
        (file("demo-1.0/PKG-INFO"), "occurs twice"),
        (file("demo-1.0/build"), "occurs twice"),
        (file("demo-1.0/include/demo.h/evil"), "is below 'include/demo.h', which is not a directory"),
        (file("demo-1.0/sub/.git"), "is reserved by git"),
        (file("demo-1.0/.GIT/hooks/post-checkout"), "is reserved by git"),
        (file("demo-1.0"), "has the path of the top-level directory"),
    ],
)
def test_unsafe_archive_members_are_rejected(workspace: Workspace, shelf: Path, member: Member, problem: str) -> None:
    message = refused(workspace, [*GOOD, member], shelf)
    assert repr(member[0]) in message
    assert problem in message


def test_symlink_out_of_tree_through_another(workspace: Workspace, shelf: Path) -> None:
    chain = [link("demo-1.0/a/up", ".."), link("demo-1.0/evil", "a/up/../x")]
    assert "'demo-1.0/evil' is a symbolic link out of the tree" in refused(workspace, [*GOOD, *chain], shelf)
    loop = [link("demo-1.0/one", "two"), link("demo-1.0/two", "one")]
    assert fetch(put(shelf, [*GOOD, *loop]), workspace, Origin(str(shelf))).tree != SDIST_TREE


def test_archive_bomb_is_rejected(workspace: Workspace, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_FREE_BYTES", 1000)
    packed = gzip.compress(tar_of([*GOOD, file("demo-1.0/zeros", bytes(2**20))]))
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    with pytest.raises(NotTrusted, match=r"'demo-1.0/zeros' makes the unpacked size exceed"):
        fetch(pin_of(packed), workspace, Origin(str(shelf)))


def packed_header(name: str, size: int, kind: bytes = tarfile.REGTYPE, times: int = 1) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) * times)


START = packed_header("demo-1.0/x", 0)
ZEROS = gzip.compress(bytes(2**24)) * 64
"""1 GiB."""
LONG = "has a header of more than 64 KiB"
HUGE = {
    "a PAX header of 1 GiB": (START + packed_header("pax", 2**30, tarfile.XHDTYPE) + ZEROS, LONG),
    "a global PAX header of 1 GiB": (packed_header("pax", 2**30, tarfile.XGLTYPE) + ZEROS, LONG),
    "a name of 1 GiB": (START + packed_header("name", 2**30, tarfile.GNUTYPE_LONGNAME) + ZEROS, LONG),
    "a link of 1 GiB": (START + packed_header("link", 2**30, tarfile.GNUTYPE_LONGLINK) + ZEROS, LONG),
    "headers in headers": (START + packed_header("pax", 0, tarfile.XHDTYPE, 100_000), LONG),
    "a file of 1 TiB": (START + packed_header("demo-1.0/big", 2**40) + ZEROS, "makes the unpacked size exceed 1024 MiB"),
    "a directory of 1 TiB": (
        START + packed_header("demo-1.0/d", 2**40, tarfile.DIRTYPE) + ZEROS,
        "makes the unpacked size exceed",
    ),
    "many members": (packed_header("demo-1.0/d/", 0, tarfile.DIRTYPE, 1000) * 3, "exceeds the limit of 2000 members"),
}


@pytest.mark.parametrize("name", HUGE)
def test_archive_headers_over_limit_are_rejected(
    workspace: Workspace, shelf: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They are rejected without much memory or CPU time."""
    monkeypatch.setattr(_archive, "MAX_MEMBERS", 2000)
    packed, problem = HUGE[name]
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(NotTrusted, match=problem):
            fetch(pin_of(packed), workspace, Origin(str(shelf)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not list(workspace.checkouts.iterdir())
    assert peak < 64 * 2**20 and time.process_time() - start < 60, (peak, time.process_time() - start)


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (file("demo-1.0/" + "d/" * 100 + "x"), "more than 1024 bytes or 64 directories"),
        (file("demo-1.0/" + "d" * 1100), "more than 1024 bytes or 64 directories"),
        (link("demo-1.0/x", "a/" * 600), "more than 1024 bytes or 64 directories"),
        (file("demo-1.0/x", pax_headers={f"k{number}": "v" for number in range(100)}), "more than 64 header records"),
        (file("demo-1.0/x", pax_headers={"GNU.sparse.size": "10", "GNU.sparse.map": "0,1"}), "is a sparse file"),
    ],
)
def test_archive_member_limits(workspace: Workspace, shelf: Path, member: Member, problem: str) -> None:
    assert problem in refused(workspace, [*GOOD, member], shelf)


@pytest.mark.parametrize("spoil", ["header", "size", "end"])
def test_invalid_header_does_not_end_archive(workspace: Workspace, shelf: Path, spoil: str) -> None:
    """In tarfile it does, except for a negative size before Python 3.14."""
    if spoil == "size":
        members = [*GOOD, file("demo-1.0/x", pax_headers={"size": "-1"}), file("demo-1.0/y")]
        assert re.search("a header is not valid|special file", refused(workspace, members, shelf))
        return
    plain = tar_of([*GOOD, file("demo-1.0/last")])
    at = plain.rindex(b"demo-1.0/last")
    packed = gzip.compress(plain[: at + 100] if spoil == "end" else plain[:at] + b"X" * 512 + plain[at + 512 :], mtime=0)
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    with pytest.raises(NotTrusted, match=r"demo-1.0.tar.gz is damaged: a header is not valid"):
        fetch(pin_of(packed), workspace, Origin(str(shelf)))


def test_empty_archive_is_rejected(workspace: Workspace, shelf: Path) -> None:
    assert "has no files" in refused(workspace, [], shelf)


@pytest.mark.parametrize(
    "spoil", [lambda b: b[: len(b) // 2], lambda b: b[:40] + b"\0\xff\0" + b[43:], lambda b: b"no archive at all"]
)
def test_damaged_archive_with_pinned_hash(workspace: Workspace, shelf: Path, spoil: Callable[[bytes], bytes]) -> None:
    packed = spoil(gzip.compress(tar_of(GOOD), mtime=0))
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    with pytest.raises(NotTrusted, match=r"demo-1.0.tar.gz is damaged"):
        fetch(pin_of(packed), workspace, Origin(str(shelf)))
    assert not list(workspace.checkouts.iterdir())


def test_hash_mismatch_names_both_hashes_and_location(workspace: Workspace, shelf: Path) -> None:
    real = put(shelf)
    pin = replace(real, sha256="1" * 64)
    with pytest.raises(NotTrusted) as error:
        fetch(pin, workspace, Origin(str(shelf)))
    for part in ("1" * 64, real.sha256, (shelf / "demo-1.0.tar.gz").as_uri()):
        assert part in error.value.message
    assert error.value.hint and left_behind(workspace) == []


def test_offline_hint_names_directory(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    for mirror in (None, "https://mirror.invalid/files"):
        with pytest.raises(OfflineMiss) as error:
            fetch(pin, workspace, Origin(mirror, offline=True))
        assert str(workspace.downloads / pin.sha256) in error.value.hint
    with pytest.raises(OfflineMiss, match=COMMIT) as error:
        fetch(GitPin("demo", "https://git.invalid/them/demo", COMMIT, "1.0"), workspace, Origin(offline=True))
    assert "demo.git" in error.value.hint


def test_mirror_without_file(workspace: Workspace, shelf: Path) -> None:
    pin = replace(put(shelf), version="2.0")
    with pytest.raises(FetchFailed, match=r"no sdist of demo 2\.0"):
        fetch(pin, workspace, Origin(str(shelf)))
    with pytest.raises(FetchFailed, match="is not a directory"):
        fetch(pin, workspace, Origin(str(shelf / "nowhere")))


# The user's index


def simple_index(root: Path, shelf: Path, shown_sha256: str = "") -> str:
    """A directory that is laid out like a simple index and served as files."""
    (root / "demo").mkdir(parents=True)
    fragment = f"#sha256={shown_sha256}" if shown_sha256 else ""
    (root / "demo/index.html").write_text(f'<a href="{(shelf / "demo-1.0.tar.gz").as_uri()}{fragment}">demo-1.0.tar.gz</a>')
    return root.as_uri()


def test_configured_indexes_are_queried(
    workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken find-links, an absent index and an index without the project do not prevent the query of the right index."""
    pin = put(shelf)
    empty = tmp_path / "empty"
    empty.mkdir()
    extra = " ".join([(tmp_path / "absent").as_uri(), empty.as_uri(), simple_index(tmp_path / "index", shelf, pin.sha256)])
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", extra)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "absent"))
    assert fetch(pin, workspace).commit == SDIST_COMMIT


def test_pip_configuration_file_is_read(
    workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = put(shelf)
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links =\n    {tmp_path}/absent\n    {shelf}\n")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert fetch(pin, workspace).commit == SDIST_COMMIT


def test_index_with_another_hash(workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = put(shelf)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", simple_index(tmp_path / "index", shelf, "2" * 64))
    with pytest.raises(NotTrusted, match="2" * 64):
        fetch(pin, workspace)
    assert left_behind(workspace) == []


def test_index_url_replaces_index_of_pip(
    workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = put(shelf)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    url = simple_index(tmp_path / "index", shelf, pin.sha256)
    assert Origin(index_url=url).settings().index == (url,)
    assert fetch(pin, workspace, Origin(index_url=url)).commit == SDIST_COMMIT


def test_find_links_option_precedes_index(workspace: Workspace, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = put(shelf)
    monkeypatch.setenv("PIP_FIND_LINKS", "/absent")
    monkeypatch.chdir(shelf.parent)
    assert Origin(find_links=(shelf.name,)).settings().find_links == (str(shelf), "/absent")
    assert fetch(pin, workspace, Origin(find_links=(shelf.name,))).commit == SDIST_COMMIT


def test_index_url_that_is_not_a_url_is_rejected(workspace: Workspace, shelf: Path) -> None:
    with pytest.raises(BadInput, match=r"'pypi\.invalid/simple' is not the URL of a package index"):
        fetch(put(shelf), workspace, Origin(index_url="pypi.invalid/simple"))
    assert Origin(str(shelf), index_url="pypi.invalid").settings().no_index, "a local mirror needs no index"


def test_settings_of_pip_and_uv() -> None:
    pip = {"global.index-url": "https://a.invalid/simple", ":env:.extra-index-url": "https://b.invalid https://c.invalid"}
    env = {
        "UV_DEFAULT_INDEX": "https://d.invalid",
        "UV_INDEX": "corp=https://e.invalid https://f.invalid/x=y",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INSECURE_HOST": "g.invalid",
        "PIP_NO_INDEX": "true",
        "SSL_CERT_FILE": "/env.pem",
    }
    settings = settings_from(pip | {"global.cert": "/pip.pem", ":env:.default-timeout": "180"}, env)
    assert settings.index == ("https://a.invalid/simple", "https://d.invalid")
    assert settings.extra_index == ("https://b.invalid", "https://c.invalid", "https://e.invalid", "https://f.invalid/x=y")
    assert settings.find_links == ("/one", "/two")
    assert settings.trusted_hosts == ("g.invalid",)
    assert settings.no_index
    assert (settings.certificates, settings.timeout) == ("/pip.pem", 180.0)
    assert settings_from({}, {"SSL_CERT_FILE": "/env.pem"}).certificates == "/env.pem"
    for text in ("²", "nan", "-1", "soon", "9" * 5000, "1e300"):
        assert settings_from({}, {"PIP_DEFAULT_TIMEOUT": text}).timeout == settings_from({}, {}).timeout
    replaced = settings_from({"global.find-links": "/file", ":env:.find-links": "/env"}, {})
    assert replaced.find_links == ("/env",)


def test_missing_certificate_file(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere/ca.pem")
    with pytest.raises(FetchFailed, match=r"/nowhere/ca\.pem"):
        fetch(pin_of(b""), workspace)


# A server


@dataclass
class Server:
    """Serves ``files`` by path. ``faults`` apply to the first requests: busy, cut or encoded."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            state.requests.append(self.path)
            content = state.files.get(self.path)
            fault = state.faults.pop(0) if content is not None and state.faults else ""
            if content is None or fault == "busy":
                self.send_error(503 if content is not None else 404)
                return
            if "gzip" in self.headers["Accept-Encoding"]:
                content = gzip.compress(content)  # as servers do where the client accepts it
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/x-gzip")
            if fault == "encoded":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)

        do_HEAD = do_GET

    with http_served(Handler) as state.url:
        yield state


@pytest.mark.parametrize("faults", [["cut", "busy"], ["encoded"]])
def test_failing_server_is_retried(workspace: Workspace, shelf: Path, server: Server, faults: list[str]) -> None:
    pin = put(shelf)
    server.files["/files/demo-1.0.tar.gz"] = (shelf / "demo-1.0.tar.gz").read_bytes()
    server.faults = faults
    assert fetch(pin, workspace, Origin(f"{server.url}/files")).commit == SDIST_COMMIT


def test_parallel_fetches_download_once(workspace: Workspace, shelf: Path, server: Server) -> None:
    pin = put(shelf)
    server.files["/files/demo-1.0.tar.gz"] = (shelf / "demo-1.0.tar.gz").read_bytes()
    checkouts: list[Checkout] = []
    work = functools.partial(fetch, pin, workspace, Origin(f"{server.url}/files"))
    threads = [threading.Thread(target=lambda: checkouts.append(work())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [checkout.commit for checkout in checkouts] == [SDIST_COMMIT] * 3
    assert server.requests.count("/files/") == 1


def test_truncated_download_fails_after_retries(workspace: Workspace, shelf: Path, server: Server) -> None:
    pin = put(shelf)
    path = f"/files/{pin.sha256}/demo-1.0.tar.gz"
    server.files[path] = (shelf / "demo-1.0.tar.gz").read_bytes()
    server.faults = ["cut"] * 9
    with pytest.raises(FetchFailed) as error:
        fetch(pin, workspace, Origin(f"{server.url}/files/"))
    assert f"{server.url}{path}" in error.value.message
    assert server.requests.count(path) == retry.ATTEMPTS
    assert left_behind(workspace) == []


def test_unreachable_index(workspace: Workspace) -> None:
    with pytest.raises(FetchFailed) as error:
        fetch(pin_of(b""), workspace, Origin("http://user:secret@127.0.0.1:9/files"))
    assert "127.0.0.1:9" in error.value.message
    assert "secret" not in error.value.message


# Hostile servers

PAGE = "text/html"


@pytest.fixture
def hostile() -> Iterator[HostileServer]:
    with hostile_server() as state:
        yield state


@pytest.mark.parametrize(
    "body",
    [{"body": bytes(2**16), "endless": True}, {"body": b"x", "Content_Length": str(2**40)}],
    ids=["endless", "announced"],
)
def test_endless_download_is_stopped(
    workspace: Workspace, shelf: Path, hostile: HostileServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """There is one request: no retry, and none for the mirror's other location."""
    monkeypatch.setattr(index_client, "MAX_FILE_BYTES", 2**20)
    pin = put(shelf)
    for path in ("/demo-1.0.tar.gz", f"/{pin.sha256}/demo-1.0.tar.gz"):
        hostile.respond(path, **body)
    with pytest.raises(FetchFailed, match=r"demo-1\.0\.tar\.gz: it sends more than 1 MiB; the download was stopped"):
        fetch(pin, workspace, Origin(hostile.url))
    assert [path for path in hostile.requests if path.endswith(".gz")] == ["/demo-1.0.tar.gz"]
    assert left_behind(workspace) == []


@pytest.mark.parametrize(
    "body",
    [
        {"body": bytes(2**16), "endless": True},
        {"body": bytes(2**16), "endless": True, "status": 302, "Location": "/elsewhere"},
        {"body": gzip.compress(bytes(2**26)), "Content_Encoding": "gzip"},
    ],
    ids=["endless", "endless-redirection", "compressed"],
)
def test_endless_index_page_is_stopped(
    workspace: Workspace, shelf: Path, hostile: HostileServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(index_client, "MAX_PAGE_BYTES", 2**18)
    hostile.respond("/", Content_Type=PAGE, **body)
    tracemalloc.start()
    try:
        with pytest.raises(FetchFailed):
            fetch(put(shelf), workspace, Origin(hostile.url))
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_index_page_that_takes_too_long_is_stopped(
    workspace: Workspace, shelf: Path, hostile: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_client, "MAX_PAGE_SECONDS", 0)
    hostile.respond("/", b"<!-- -->", endless=True, Content_Type=PAGE)
    with pytest.raises(FetchFailed, match="it takes more than 0 s"):
        fetch(put(shelf), workspace, Origin(hostile.url))


@pytest.mark.parametrize("which", ["page", "file"])
def test_redirect_to_local_file_is_rejected(workspace: Workspace, shelf: Path, hostile: HostileServer, which: str) -> None:
    """Even to the right file."""
    pin = put(shelf)
    (shelf / "index.html").write_text(f'<a href="{hostile.url}/x/demo-1.0.tar.gz">demo</a>')
    target = shelf / ("index.html" if which == "page" else "demo-1.0.tar.gz")
    hostile.respond("/" if which == "page" else "/demo-1.0.tar.gz", status=302, Location=target.as_uri())
    with pytest.raises(FetchFailed, match="redirects from http to file"):
        fetch(pin, workspace, Origin(hostile.url))


def test_index_page_with_local_files_is_rejected(
    workspace: Workspace, shelf: Path, hostile: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = put(shelf)
    hostile.respond("/simple/demo/", f'<a href="{(shelf / "demo-1.0.tar.gz").as_uri()}">x</a>'.encode(), Content_Type=PAGE)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"{hostile.url}/simple/")
    with pytest.raises(FetchFailed, match=r"lists file:///.*demo-1\.0\.tar\.gz, a local file"):
        fetch(pin, workspace)


@pytest.mark.parametrize("hashes", [5, [], {"sha256": 5}, {"sha256": None}, {"sha256": [5]}])
def test_index_page_whose_hashes_are_none(
    workspace: Workspace, shelf: Path, hostile: HostileServer, monkeypatch: pytest.MonkeyPatch, hashes: object
) -> None:
    pin, name = put(shelf), "demo-1.0.tar.gz"
    listed = {
        "meta": {"api-version": "1.0"},
        "name": "demo",
        "files": [{"filename": name, "url": f"/{name}", "hashes": hashes}],
    }
    hostile.respond("/simple/demo/", json.dumps(listed).encode(), Content_Type="application/vnd.pypi.simple.v1+json")
    hostile.respond(f"/{name}", b"something else")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"{hostile.url}/simple/")
    with pytest.raises(NotTrusted, match=pin.sha256):
        fetch(pin, workspace)


def test_mirror_with_special_file(workspace: Workspace, shelf: Path) -> None:
    """Opening a pipe would wait for a writer."""
    pin = put(shelf)
    (shelf / "demo-1.0.tar.gz").unlink()
    os.mkfifo(shelf / "demo-1.0.tar.gz")
    with pytest.raises(FetchFailed, match="is not a regular file"):
        fetch(pin, workspace, Origin(str(shelf)))


@pytest.mark.parametrize(
    ("url", "target", "follows"),
    [
        ("https://a.invalid/x", "https://b.invalid/y", True),
        ("https://a.invalid/x", "/y", True),
        ("http://a.invalid/x", "https://a.invalid/x", True),
        ("https://a.invalid/x", "http://a.invalid/x", False),
        ("https://a.invalid/x", "file:///etc/passwd", False),
        ("http://a.invalid/x", "ftp://a.invalid/x", False),
    ],
)
def test_allowed_redirects(url: str, target: str, follows: bool) -> None:
    hook = index_client.connect(Settings()).event_hooks["response"][0]
    response = httpx2.Response(302, headers={"Location": target}, request=httpx2.Request("GET", url))
    if follows:
        hook(response)
    else:
        with pytest.raises(index_client.RefusedRedirect, match="redirects from"):
            hook(response)


# Git


def git(directory: Path, *args: str) -> str:
    identity = [
        "-c",
        "user.name=T",
        "-c",
        "user.email=t@example.invalid",
        "-c",
        "protocol.file.allow=always",
        "-c",
        "init.defaultBranch=main",
    ]
    return subprocess.run(["git", *identity, *args], cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


def upstream(directory: Path, **files: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / ".git").exists():
        git(directory, "init", "-q")
    for name, content in files.items():
        (directory / name).write_text(content)
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", "work", "--date=2020-01-01T00:00:00Z")
    return git(directory, "rev-parse", "HEAD")


@pytest.fixture
def nested(tmp_path: Path) -> tuple[Path, str]:
    """A project that moved on after its commit was pinned."""
    hub = tmp_path / "hub"
    upstream(hub / "outer", first="1")
    git(hub / "outer", "tag", "v1.0")
    pinned = upstream(hub / "outer", top="outer")
    upstream(hub / "outer", later="not in the pin")
    return hub, pinned


@pytest.mark.parametrize("scheme", ["file", "path"])
def test_commit_is_the_tree(workspace: Workspace, nested: tuple[Path, str], scheme: str) -> None:
    hub, pinned = nested
    url = (hub / "outer").as_uri() if scheme == "file" else str(hub / "outer")
    checkout = fetch(GitPin("outer", url, pinned, "1.0"), workspace)
    repository = Repository(checkout.repository)
    assert repository.paths(checkout.commit) == ["first", "top"]
    assert pinned in repository.git("show", "-s", "--format=%B", checkout.commit).stdout
    assert repository.git("show", "-s", "--format=%P", checkout.commit).stdout.strip() == ""
    assert fetch(GitPin("outer", url, pinned, "1.0"), workspace, Origin(offline=True)) == checkout


@pytest.mark.parametrize("kind", ["clone", "bundle"])
def test_git_mirror_without_network(
    workspace: Workspace, nested: tuple[Path, str], shelf: Path, tmp_path: Path, kind: str
) -> None:
    hub, pinned = nested
    direct = fetch(GitPin("outer", str(hub / "outer"), pinned, "1.0"), workspace)
    if kind == "clone":
        git(tmp_path, "clone", "-q", "--bare", str(hub / "outer"), str(shelf / "outer.git"))
    else:
        git(hub / "outer", "bundle", "create", "-q", str(shelf / "outer.bundle"), "--all")
    pin = GitPin("outer", "https://git.invalid/them/outer.git", pinned, "1.0")
    mirrored = fetch(pin, Workspace.open(tmp_path / "other"), Origin(str(shelf), offline=True))
    assert (mirrored.commit, mirrored.tree) == (direct.commit, direct.tree)
    (shelf / "empty").mkdir()
    with pytest.raises(FetchFailed, match=r"has no clone of https://git\.invalid/them/outer\.git"):
        fetch(pin, Workspace.open(tmp_path / "third"), Origin(str(shelf / "empty")))


def test_user_git_config_applies_to_network(
    workspace: Workspace, nested: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``insteadOf`` and the protocol version, here 0, in which servers send no commit by its id."""
    hub, pinned = nested
    (tmp_path / "config").write_text(f'[url "{hub}/"]\ninsteadOf = https://git.invalid/them/\n[protocol]\nversion = 0\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    pin = GitPin("outer", "https://git.invalid/them/outer", pinned, "1.0")
    fetched = Repository.init(tmp_path / "direct").git("fetch", "--depth=1", pin.url, pinned, check=False, network=True)
    assert "unadvertised object" in fetched.stderr
    assert Repository(fetch(pin, workspace).repository).paths("refs/heads/base") == ["first", "top"]


@pytest.mark.usefixtures("hostile_git")
def test_import_with_hostile_user_git_config(workspace: Workspace, tmp_path: Path) -> None:
    shelf = tmp_path / "outer.git"
    commit = bare_repository(shelf)
    checkout = fetch(GitPin("outer", str(shelf), commit, "1.0"), workspace)
    assert (commit, checkout.commit) == (BARE_COMMIT, IMPORTED_COMMIT)


def bare_repository(path: Path) -> str:
    repository = Repository.init(path)
    with repository.index() as index:
        index.add("a.txt", b"one\r\n")
        commit = repository.commit_tree(
            index.write_tree(), None, "upstream\n", author="U <u@example.invalid>", date="@1600000000 +0900"
        )
    repository.set_ref("refs/heads/main", commit)
    return commit


def test_moved_tag_is_ignored_while_commit_exists(workspace: Workspace, nested: tuple[Path, str]) -> None:
    hub, pinned = nested
    git(hub / "outer", "tag", "-f", "v1.0", "HEAD")
    checkout = fetch(GitPin("outer", str(hub / "outer"), pinned, "1.0"), workspace)
    assert "later" not in Repository(checkout.repository).paths(checkout.commit)


def test_tag_object_is_rejected(workspace: Workspace, nested: tuple[Path, str]) -> None:
    hub, _ = nested
    git(hub / "outer", "tag", "-a", "-m", "annotated", "v2.0")
    with pytest.raises(FetchFailed, match=r"is a tag in .*, not a commit"):
        fetch(GitPin("outer", str(hub / "outer"), git(hub / "outer", "rev-parse", "v2.0"), "2.0"), workspace)


def test_absent_repository(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="cannot be read"):
        fetch(GitPin("outer", str(tmp_path / "nowhere"), COMMIT, "1.0"), workspace)
    with pytest.raises(FetchFailed) as error:
        fetch(GitPin("outer", "https://user:secret@127.0.0.1:9/outer.git", COMMIT, "1.0"), workspace)
    assert "secret" not in str(error.value)


def test_submodule_is_rejected(workspace: Workspace, tmp_path: Path) -> None:
    shelf = tmp_path / "outer.git"
    commit = bare_repository(shelf)
    repository = Repository(shelf)
    with repository.index(commit) as index:
        index.git("update-index", "--add", "--cacheinfo", f"160000,{commit},vendor/lost")
        incomplete = repository.commit_tree(index.write_tree(), None, "incomplete\n")
    repository.set_ref("refs/heads/main", incomplete)
    with pytest.raises(FetchFailed, match="has the submodule 'vendor/lost', which is not fetched"):
        fetch(GitPin("outer", str(shelf), incomplete, "1.0"), workspace)
    assert not list(workspace.checkouts.iterdir())


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("text/html", b"<a href=demo-1.0.tar.gz>" * 800_000),
        ("text/html; charset=hex", b"<A href=demo-1.0.tar.gz>" * 800_000),
        ("application/vnd.pypi.simple.v1+json", b'{"files": [' + b'{"\\u0075rl":"demo-1.0.tar.gz"},' * 800_000 + b"{}]}"),
    ],
)
def test_page_with_too_many_links(workspace: Workspace, hostile: HostileServer, kind: str, page: bytes) -> None:
    hostile.respond("/", page, Content_Type=kind)
    started = time.process_time()
    with pytest.raises(FetchFailed, match=r"it has more than 100000 links"):
        fetch(SdistPin("demo", "demo", "1.0", "0" * 64), workspace, Origin(hostile.url))
    assert time.process_time() - started < 15


@pytest.mark.parametrize("charset", ["hex", "rot13", "undefined", "²", "no-such-encoding"])
def test_page_in_what_is_no_encoding_of_text(workspace: Workspace, hostile: HostileServer, shelf: Path, charset: str) -> None:
    pin = put(shelf)
    hostile.respond("/", b"<a href=files/demo-1.0.tar.gz>", Content_Type=f"text/html; charset={charset}")
    hostile.respond("/files/demo-1.0.tar.gz", (shelf / "demo-1.0.tar.gz").read_bytes())
    assert fetch(pin, workspace, Origin(hostile.url)).commit


@pytest.mark.parametrize("length", ["²", "9" * 5_000, "-1", "1e3", ""])
def test_impossible_lengths(length: str) -> None:
    response = httpx2.Response(
        200, headers=[(b"Content-Length", length.encode()), (b"Content-Range", f"bytes 0-0/{length}".encode())]
    )
    assert not index_client.content_length(response) and not index_client.whole_length(response)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://token@git.invalid:8443/a/b", "https://git.invalid:8443/a/b"),
        ("http://user:p@ss@git.invalid/a@b", "http://git.invalid/a@b"),
        *((url, url) for url in ("https://git.invalid/a@b", "ssh://git@git.invalid/a", "git@git.invalid:a", "/srv/a@b")),
    ],
)
def test_credentials_of_a_url_are_in_no_command_line(url: str, shown: str) -> None:
    """Every user of the machine can read git's command line, and that of its children."""
    assert _git_urls.without_credentials(url) == shown


HOSTILE_URLS = [
    "--upload-pack=touch {mark};",
    "-u touch {mark};",
    "ext::sh -c touch% {mark}",
    "ext::sh -c touch% {mark} https://git.invalid/x",
    "fd::17",
    "helper::https://git.invalid/x",
    "ssh://-oProxyCommand=touch%20{mark}/x",
    "ssh://-oProxyCommand=touch {mark}@git.invalid/x",
    "-oProxyCommand=touch {mark}:x",
    "git@-oProxyCommand=touch {mark}:x",
    "git.invalid:-oProxyCommand=touch {mark}",
    "ftp://git.invalid/x",
    "HTTPS://git.invalid/x",
    "https://git.invalid%0ahost=else.invalid/x",
    "https://git.invalid/x\nhost=else.invalid",
    "relative/path",
    "../outside",
    "",
]


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_hostile_git_url_runs_no_program(workspace: Workspace, tmp_path: Path, url: str) -> None:
    """It is rejected before git runs."""
    url = url.format(mark=tmp_path / "ran")
    for mirror in (None, "https://mirror.invalid"):
        with pytest.raises(NotTrusted, match=r"the git URL of outer 1\.0 is"):
            fetch(GitPin("outer", url, COMMIT, "1.0"), workspace, Origin(mirror))
    assert not (tmp_path / "ran").exists()
    assert not list(workspace.checkouts.iterdir())


def test_instead_of_cannot_select_ext_transport(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = f'[url "ext::touch {tmp_path}/ran "]\ninsteadOf = https://git.invalid/\n[protocol "ext"]\nallow = always\n'
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    with pytest.raises(FetchFailed, match="transport 'ext' not allowed"):
        fetch(GitPin("outer", "https://git.invalid/x", COMMIT, "1.0"), workspace)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("commit", ["--upload-pack=touch ran", "main", "0" * 39, f"{COMMIT}\n"])
def test_pin_that_is_not_a_commit_is_rejected(workspace: Workspace, tmp_path: Path, commit: str) -> None:
    bare_repository(tmp_path / "outer.git")
    with pytest.raises(NotTrusted, match="is not a commit"):
        fetch(GitPin("outer", str(tmp_path / "outer.git"), commit, "1.0"), workspace)


@pytest.mark.parametrize(
    "url", ["https://git.invalid/a/..", "https://git.invalid/a/-x;y.git", "https://git.invalid/a/b?c=.git"]
)
def test_git_url_cannot_leave_mirror_directory(workspace: Workspace, shelf: Path, url: str) -> None:
    with pytest.raises(NotTrusted, match="is not a valid file name for a mirror"):
        fetch(GitPin("outer", url, COMMIT, "1.0"), workspace, Origin(str(shelf)))


def test_endless_repository_is_stopped(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit ends the first fetch; there is no second fetch with all branches."""
    monkeypatch.setattr("sm120kit.sources.git.MAX_FETCH_BYTES", 2**20)
    repository = Repository.init(tmp_path / "outer.git")
    with repository.index() as index:
        index.add("big", os.urandom(4 * 2**20))
        commit = repository.commit_tree(index.write_tree(), None, "big\n")
    repository.set_ref("refs/heads/main", commit)
    with pytest.raises(FetchFailed, match=r"sends more than 0\.000976562 GiB; the fetch was stopped"):
        fetch(GitPin("outer", str(repository.path), commit, "1.0"), workspace)
    assert left_behind(workspace) == []


@pytest.mark.parametrize(
    ("url", "transport"),
    [
        ("https://git.invalid/a/b.git", "https"),
        ("https://user:pa%40ss@git.invalid:8443/a/b", "https"),
        ("http://git.invalid/a", "http"),
        ("git://git.invalid/a", "git"),
        ("ssh://git@git.invalid:2222/a/b.git", "ssh"),
        ("ssh://git.invalid/~me/b.git", "ssh"),
        ("git@git.invalid:a/b.git", "ssh"),
        ("alias:b.git", "ssh"),
        ("file:///srv/git/a b", "file"),
        ("/srv/git/ä", "file"),
    ],
)
def test_transports_of_plain_urls(url: str, transport: str) -> None:
    assert _git_urls.transport_of(url) == transport
