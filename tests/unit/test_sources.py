"""Pins become checkouts: from real archives, indexes, servers and repositories made on the fly, and every refusal."""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import http.server
import io
import lzma
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sm120kit.errors import FetchFailed, HashMismatch, OfflineMiss, Sm120kitError, UnsafeArchive
from sm120kit.gitrepo import Repository
from sm120kit.records import Checkout, GitPin, SdistPin
from sm120kit.sources import archive, fetch, key_of, places
from sm120kit.sources.settings import settings_from
from sm120kit.sources.upstream import _resolve
from sm120kit.workspace import Workspace

COMMIT = "0" * 40
SDIST_COMMIT = "c5e758edcb36ee3999ebedcd5684f70c5f9bb3b1"
SDIST_TREE = "afe8a828507e479b6c0612744b40341691c3078e"
BARE_COMMIT = "4d92ec5d6846b96f8f87d1dfe80f23772ad38e05"
IMPORTED_COMMIT = "6c496d8d7797a71d3a13476e5c6e31a2a88a0346"
Member = tuple[str, "bytes | None", int, dict[str, object]]


def file(name: str, content: bytes = b"x", mode: int = 0o644, **more: object) -> Member:
    return (name, content, mode, more)


def link(name: str, target: str) -> Member:
    return (name, None, 0o777, {"type": tarfile.SYMTYPE, "linkname": target})


GOOD = [
    file("demo-1.0/PKG-INFO", b"Name: demo\n"),
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
    """A flat directory of sdists and repositories, as one would carry it across an air gap."""
    directory = tmp_path / "shelf"
    directory.mkdir()
    return directory


@pytest.fixture(autouse=True)
def _quick_and_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this machine reaches a test, and waiting before asking again takes no time."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "GIT_")) and name != "PIP_CERT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(places, "PAUSE_SECONDS", 0.0)


def put(shelf: Path, members: list[Member] = GOOD, name: str = "demo-1.0.tar.gz") -> SdistPin:
    """Not compressed, whatever the name says: what gzip makes differs between its versions, and the sha256 is in the commit."""
    packed = tar_of(members)
    (shelf / name).write_bytes(packed)
    return pin_of(packed)


def left_behind(workspace: Workspace) -> list[str]:
    """Everything in the state directory but locks."""
    return sorted(
        str(path.relative_to(workspace.root)) for path in workspace.root.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


def test_an_sdist_becomes_exactly_its_content(workspace: Workspace, shelf: Path, tmp_path: Path) -> None:
    checkout = fetch(put(shelf), workspace, mirror=str(shelf))
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
    shown = repository.git("show", "-s", "--format=%B%cI %P", checkout.commit).stdout
    assert shown == f"demo 1.0\n\nsha256: {checkout.pin.sha256}\n1980-01-01T00:00:00+00:00 \n"  # type: ignore[union-attr]


def test_the_commit_id_is_a_constant(workspace: Workspace, shelf: Path) -> None:
    checkout = fetch(put(shelf), workspace, mirror=str(shelf))
    assert (checkout.commit, checkout.tree) == (SDIST_COMMIT, SDIST_TREE)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compression_does_not_change_the_tree(workspace: Workspace, shelf: Path, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(tar_of(GOOD))
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    assert fetch(pin_of(packed), workspace, mirror=str(shelf)).tree == SDIST_TREE


@pytest.mark.usefixtures("hostile_git")
def test_the_users_git_changes_nothing(workspace: Workspace, shelf: Path) -> None:
    checkout = fetch(put(shelf), workspace, mirror=str(shelf))
    assert (checkout.commit, checkout.tree) == (SDIST_COMMIT, SDIST_TREE)


def test_a_second_fetch_needs_nothing(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    first = fetch(pin, workspace, mirror=str(shelf))
    (shelf / "demo-1.0.tar.gz").unlink()
    assert fetch(pin, workspace, offline=True) == first


def test_a_download_alone_is_enough_offline(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    (workspace.downloads / pin.sha256).mkdir(parents=True)
    (shelf / "demo-1.0.tar.gz").rename(workspace.downloads / pin.sha256 / "any-name.tar.gz")
    assert fetch(pin, workspace, offline=True).commit == SDIST_COMMIT


def test_downloads_of_another_machine_are_a_mirror(workspace: Workspace, shelf: Path, tmp_path: Path) -> None:
    pin = put(shelf)
    fetch(pin, workspace, mirror=str(shelf))
    other = Workspace.open(tmp_path / "other")
    assert fetch(pin, other, mirror=workspace.downloads.as_uri(), offline=True).commit == SDIST_COMMIT


def test_a_spoilt_download_is_fetched_again(workspace: Workspace, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pin = put(shelf)
    spoilt = workspace.downloads / pin.sha256 / "demo-1.0.tar.gz"
    spoilt.parent.mkdir(parents=True)
    spoilt.write_bytes(b"spoilt")
    assert fetch(pin, workspace, mirror=str(shelf)).commit == SDIST_COMMIT
    assert "removing it" in capsys.readouterr().err


def test_what_a_killed_run_left_is_swept(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    key = key_of(pin)
    half = workspace.checkouts / f".{key}.abc"
    half.mkdir(parents=True)
    (half / "HEAD").write_text("ref: refs/heads/base\n")
    workspace.downloads.mkdir()
    (workspace.downloads / f".{key}.abc").write_bytes(b"half")
    (workspace.downloads / ".another-pin.abc").write_bytes(b"not mine")
    (workspace.checkouts / key).mkdir()
    assert fetch(pin, workspace, mirror=str(shelf)).commit == SDIST_COMMIT
    names = {path.name for path in (*workspace.checkouts.iterdir(), *workspace.downloads.iterdir())}
    assert names == {key, pin.sha256, ".another-pin.abc"}


def test_every_pin_has_a_key_of_its_own() -> None:
    pin = SdistPin("demo", "demo", "1.0", "a" * 64)
    keys = {
        key_of(pin),
        key_of(replace(pin, sha256="b" * 64)),
        key_of(replace(pin, version="../1")),
        key_of(GitPin("demo", "u", COMMIT, "1.0")),
    }
    assert len(keys) == 4
    assert not any("/" in key for key in keys)


# What is refused


def refused(workspace: Workspace, members: list[Member], shelf: Path) -> str:
    pin = put(shelf, members)
    with pytest.raises(UnsafeArchive) as caught:
        fetch(pin, workspace, mirror=str(shelf))
    assert not list(workspace.checkouts.iterdir())
    return caught.value.message


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (file("demo-1.0/../../evil"), "has '..' in its path"),
        (file("/etc/evil"), "has an absolute path"),
        (file("elsewhere/evil"), "is not below the one top-level directory 'demo-1.0'"),
        (link("demo-1.0/evil", "/etc/passwd"), "is a symbolic link out of the tree: '/etc/passwd'"),
        (link("demo-1.0/evil", "../../etc"), "is a symbolic link out of the tree: '../../etc'"),
        (link("demo-1.0/deep/evil", "../../x"), "is a symbolic link out of the tree: '../../x'"),
        (file("demo-1.0/evil", type=tarfile.LNKTYPE, linkname="demo-1.0/PKG-INFO"), "is a hard link"),
        (file("demo-1.0/evil", type=tarfile.CHRTYPE), "is a device or other special file"),
        (file("demo-1.0/evil", type=tarfile.FIFOTYPE), "is a device or other special file"),
        (file("demo-1.0/PKG-INFO"), "occurs twice"),
        (file("demo-1.0/build"), "occurs twice"),
        (file("demo-1.0/include/demo.h/evil"), "lies below 'include/demo.h', which is not a directory"),
        (file("demo-1.0/sub/.git"), "is git's own"),
        (file("demo-1.0/.GIT/hooks/post-checkout"), "is git's own"),
        (file("demo-1.0"), "stands where the top-level directory should"),
    ],
)
def test_members_that_cannot_be_in_a_tree(workspace: Workspace, shelf: Path, member: Member, why: str) -> None:
    message = refused(workspace, [*GOOD, member], shelf)
    assert repr(member[0]) in message
    assert why in message


def test_a_link_that_escapes_through_another(workspace: Workspace, shelf: Path) -> None:
    chain = [link("demo-1.0/a/up", ".."), link("demo-1.0/evil", "a/up/../x")]
    assert "'demo-1.0/evil' is a symbolic link out of the tree" in refused(workspace, [*GOOD, *chain], shelf)
    loop = [link("demo-1.0/one", "two"), link("demo-1.0/two", "one")]
    assert fetch(put(shelf, [*GOOD, *loop]), workspace, mirror=str(shelf)).tree != SDIST_TREE


def test_a_bomb(workspace: Workspace, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_FREE_BYTES", 1000)
    packed = gzip.compress(tar_of([*GOOD, file("demo-1.0/zeros", bytes(2**20))]))
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    with pytest.raises(UnsafeArchive, match=r"'demo-1.0/zeros' takes the unpacked size beyond"):
        fetch(pin_of(packed), workspace, mirror=str(shelf))


def test_an_empty_archive(workspace: Workspace, shelf: Path) -> None:
    assert "has no files" in refused(workspace, [], shelf)


@pytest.mark.parametrize(
    "spoil", [lambda b: b[: len(b) // 2], lambda b: b[:40] + b"\0\xff\0" + b[43:], lambda b: b"no archive at all"]
)
def test_damage_that_was_published_so(workspace: Workspace, shelf: Path, spoil: Callable[[bytes], bytes]) -> None:
    packed = spoil(gzip.compress(tar_of(GOOD), mtime=0))
    (shelf / "demo-1.0.tar.gz").write_bytes(packed)
    with pytest.raises(UnsafeArchive, match=r"demo-1.0.tar.gz is damaged"):
        fetch(pin_of(packed), workspace, mirror=str(shelf))
    assert not list(workspace.checkouts.iterdir())


def test_a_wrong_hash_names_both_and_the_place(workspace: Workspace, shelf: Path) -> None:
    real = put(shelf)
    pin = replace(real, sha256="1" * 64)
    with pytest.raises(HashMismatch) as caught:
        fetch(pin, workspace, mirror=str(shelf))
    for part in ("1" * 64, real.sha256, (shelf / "demo-1.0.tar.gz").as_uri()):
        assert part in caught.value.message
    assert left_behind(workspace) == []


def test_offline_says_what_to_copy_where(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf)
    for mirror in (None, "https://mirror.invalid/files"):
        with pytest.raises(OfflineMiss) as caught:
            fetch(pin, workspace, mirror=mirror, offline=True)
        assert str(workspace.downloads / pin.sha256) in caught.value.hint
    with pytest.raises(OfflineMiss, match=COMMIT) as caught:
        fetch(GitPin("demo", "https://git.invalid/them/demo", COMMIT, "1.0"), workspace, offline=True)
    assert "demo.git" in caught.value.hint


def test_a_mirror_without_it(workspace: Workspace, shelf: Path) -> None:
    pin = replace(put(shelf), version="2.0")
    with pytest.raises(FetchFailed, match=r"no sdist of demo 2\.0"):
        fetch(pin, workspace, mirror=str(shelf))
    with pytest.raises(FetchFailed, match="is not a directory"):
        fetch(pin, workspace, mirror=str(shelf / "nowhere"))


# The user's index


def simple_index(root: Path, shelf: Path, shown_sha256: str = "") -> str:
    """A directory that is laid out like a simple index and served as files."""
    (root / "demo").mkdir(parents=True)
    fragment = f"#sha256={shown_sha256}" if shown_sha256 else ""
    (root / "demo/index.html").write_text(f'<a href="{(shelf / "demo-1.0.tar.gz").as_uri()}{fragment}">demo-1.0.tar.gz</a>')
    return root.as_uri()


def test_the_configured_places_are_asked(
    workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken find-links, an index that is not there and one without the project do not keep the good one from being asked."""
    pin = put(shelf)
    empty = tmp_path / "empty"
    empty.mkdir()
    extra = " ".join([(tmp_path / "absent").as_uri(), empty.as_uri(), simple_index(tmp_path / "index", shelf, pin.sha256)])
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", extra)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "absent"))
    assert fetch(pin, workspace).commit == SDIST_COMMIT


def test_pips_own_file_is_read(workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = put(shelf)
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links =\n    {tmp_path}/absent\n    {shelf}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert fetch(pin, workspace).commit == SDIST_COMMIT


def test_an_index_that_announces_another_hash(
    workspace: Workspace, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = put(shelf)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", simple_index(tmp_path / "index", shelf, "2" * 64))
    with pytest.raises(HashMismatch, match="2" * 64):
        fetch(pin, workspace)
    assert left_behind(workspace) == []


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
    replaced = settings_from({"global.find-links": "/file", ":env:.find-links": "/env"}, {})
    assert replaced.find_links == ("/env",)


def test_a_certificate_file_that_is_not_there(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere/ca.pem")
    with pytest.raises(FetchFailed, match=r"/nowhere/ca\.pem"):
        fetch(pin_of(b""), workspace)


# A server


@dataclass
class Server:
    """Serves ``files`` by path; ``moods`` are what it does to requests before it behaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    moods: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            state.asked.append(self.path)
            content = state.files.get(self.path)
            mood = state.moods.pop(0) if content is not None and state.moods else ""
            if content is None or mood == "busy":
                self.send_error(503 if content is not None else 404)
                return
            if "gzip" in self.headers["Accept-Encoding"]:
                content = gzip.compress(content)  # what servers do to those who let them
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/x-gzip")
            if mood == "encoded":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if mood == "cut" else content)

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        state.url = f"http://127.0.0.1:{http_server.server_port}"
        thread = threading.Thread(target=functools.partial(http_server.serve_forever, poll_interval=0.01))
        thread.start()
        yield state
        http_server.shutdown()
        thread.join()


@pytest.mark.parametrize("moods", [["cut", "busy"], ["encoded"]])
def test_a_server_that_behaves_in_the_end(workspace: Workspace, shelf: Path, server: Server, moods: list[str]) -> None:
    pin = put(shelf)
    server.files["/files/demo-1.0.tar.gz"] = (shelf / "demo-1.0.tar.gz").read_bytes()
    server.moods = moods
    assert fetch(pin, workspace, mirror=f"{server.url}/files").commit == SDIST_COMMIT


def test_many_at_once_fetch_once(workspace: Workspace, shelf: Path, server: Server) -> None:
    pin = put(shelf)
    server.files["/files/demo-1.0.tar.gz"] = (shelf / "demo-1.0.tar.gz").read_bytes()
    made: list[Checkout] = []
    work = functools.partial(fetch, pin, workspace, mirror=f"{server.url}/files")
    threads = [threading.Thread(target=lambda: made.append(work())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [checkout.commit for checkout in made] == [SDIST_COMMIT] * 3
    assert server.asked.count("/files/") == 1


def test_a_download_that_is_always_cut(workspace: Workspace, shelf: Path, server: Server) -> None:
    pin = put(shelf)
    path = f"/files/{pin.sha256}/demo-1.0.tar.gz"
    server.files[path] = (shelf / "demo-1.0.tar.gz").read_bytes()
    server.moods = ["cut"] * 9
    with pytest.raises(FetchFailed) as caught:
        fetch(pin, workspace, mirror=f"{server.url}/files/")
    assert f"{server.url}{path}" in caught.value.message
    assert server.asked.count(path) == places.ATTEMPTS
    assert left_behind(workspace) == []


def test_nobody_there(workspace: Workspace) -> None:
    with pytest.raises(FetchFailed) as caught:
        fetch(pin_of(b""), workspace, mirror="http://user:secret@127.0.0.1:9/files")
    assert "127.0.0.1:9" in caught.value.message
    assert "secret" not in caught.value.message


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
    """A project with a submodule that has a submodule, each moved on after it was recorded; the URLs are relative."""
    hub = tmp_path / "hub"
    upstream(hub / "inner", leaf="inner")
    upstream(hub / "middle", text="middle")
    git(hub / "middle", "submodule", "--quiet", "add", "../inner", "sub/inner")
    upstream(hub / "middle")
    upstream(hub / "outer", top="outer")
    git(hub / "outer", "submodule", "--quiet", "add", "../middle", "3rdparty/middle")
    git(hub / "outer", "tag", "v1.0")
    pinned = upstream(hub / "outer")
    for name in ("inner", "middle", "outer"):
        upstream(hub / name, later="not in the pin")
    return hub, pinned


@pytest.mark.parametrize("scheme", ["file", "path"])
def test_submodules_become_part_of_one_tree(workspace: Workspace, nested: tuple[Path, str], scheme: str) -> None:
    hub, pinned = nested
    url = (hub / "outer").as_uri() if scheme == "file" else str(hub / "outer")
    checkout = fetch(GitPin("outer", url, pinned, "1.0"), workspace)
    repository = Repository(checkout.repository)
    assert repository.paths(checkout.commit) == [
        ".gitmodules",
        "3rdparty/middle/.gitmodules",
        "3rdparty/middle/sub/inner/leaf",
        "3rdparty/middle/text",
        "top",
    ]
    assert repository.read(checkout.commit, "3rdparty/middle/sub/inner/leaf") == b"inner"
    assert pinned in repository.git("show", "-s", "--format=%B", checkout.commit).stdout
    assert repository.git("show", "-s", "--format=%P", checkout.commit).stdout.strip() == ""
    assert fetch(GitPin("outer", url, pinned, "1.0"), workspace, offline=True) == checkout


@pytest.mark.parametrize("kind", ["clone", "bundle"])
def test_a_git_mirror_needs_no_network(
    workspace: Workspace, nested: tuple[Path, str], shelf: Path, tmp_path: Path, kind: str
) -> None:
    hub, pinned = nested
    direct = fetch(GitPin("outer", str(hub / "outer"), pinned, "1.0"), workspace)
    for name in ("inner", "middle", "outer"):
        if kind == "clone":
            git(tmp_path, "clone", "-q", "--bare", str(hub / name), str(shelf / f"{name}.git"))
        else:
            git(hub / name, "bundle", "create", "-q", str(shelf / f"{name}.bundle"), "--all")
    pin = GitPin("outer", "https://git.invalid/them/outer.git", pinned, "1.0")
    mirrored = fetch(pin, Workspace.open(tmp_path / "other"), mirror=str(shelf), offline=True)
    assert (mirrored.commit, mirrored.tree) == (direct.commit, direct.tree)
    (shelf / "empty").mkdir()
    with pytest.raises(FetchFailed, match=r"has no clone of https://git\.invalid/them/outer\.git"):
        fetch(pin, Workspace.open(tmp_path / "third"), mirror=str(shelf / "empty"))


def test_the_users_git_knows_the_way_there(
    workspace: Workspace, nested: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies, credentials and ``insteadOf`` are the user's; here also the old protocol, which grants no commit by its id."""
    hub, pinned = nested
    (tmp_path / "config").write_text(f'[url "{hub}/"]\ninsteadOf = https://git.invalid/them/\n[protocol]\nversion = 0\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    pin = GitPin("outer", "https://git.invalid/them/outer", pinned, "1.0")
    asked = Repository.init(tmp_path / "asked").git("fetch", "--depth=1", pin.url, pinned, check=False, network=True)
    assert "unadvertised object" in asked.stderr
    assert "3rdparty/middle/sub/inner/leaf" in Repository(fetch(pin, workspace).repository).paths("refs/heads/base")


@pytest.mark.usefixtures("hostile_git")
def test_the_users_git_does_not_change_an_import(workspace: Workspace, tmp_path: Path) -> None:
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
    repository.point("refs/heads/main", commit)
    return commit


def test_a_commit_that_is_not_there_any_more(workspace: Workspace, nested: tuple[Path, str]) -> None:
    """A tag that was moved cannot bring another tree in, and the message says where it points now."""
    hub, _ = nested
    gone = upstream(hub / "outer", top="gone")
    git(hub / "outer", "reset", "-q", "--hard", "HEAD~1")
    git(hub / "outer", "reflog", "expire", "--expire=now", "--all")
    git(hub / "outer", "gc", "-q", "--prune=now")
    git(hub / "outer", "tag", "-f", "-a", "-m", "moved", "v1.0", "HEAD")
    now = git(hub / "outer", "rev-parse", "HEAD")
    with pytest.raises(FetchFailed, match=f"has no commit {gone}; its tag v1.0 is at {now} now"):
        fetch(GitPin("outer", str(hub / "outer"), gone, "1.0"), workspace)
    assert not list(workspace.checkouts.iterdir())


def test_a_moved_tag_does_not_matter_while_the_commit_is_there(workspace: Workspace, nested: tuple[Path, str]) -> None:
    hub, pinned = nested
    git(hub / "outer", "tag", "-f", "v1.0", "HEAD")
    checkout = fetch(GitPin("outer", str(hub / "outer"), pinned, "1.0"), workspace)
    assert "later" not in Repository(checkout.repository).paths(checkout.commit)


def test_a_tag_object_is_not_a_commit(workspace: Workspace, nested: tuple[Path, str]) -> None:
    hub, _ = nested
    git(hub / "outer", "tag", "-a", "-m", "annotated", "v2.0")
    with pytest.raises(FetchFailed, match=r"is a tag in .*, not a commit"):
        fetch(GitPin("outer", str(hub / "outer"), git(hub / "outer", "rev-parse", "v2.0"), "2.0"), workspace)


def test_a_repository_that_is_not_there(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="cannot be read"):
        fetch(GitPin("outer", str(tmp_path / "nowhere"), COMMIT, "1.0"), workspace)
    with pytest.raises(FetchFailed) as caught:
        fetch(GitPin("outer", "http://user:secret@127.0.0.1:9/outer.git", COMMIT, "1.0"), workspace)
    assert "secret" not in str(caught.value)


def test_a_submodule_without_a_url(workspace: Workspace, tmp_path: Path) -> None:
    shelf = tmp_path / "outer.git"
    commit = bare_repository(shelf)
    repository = Repository(shelf)
    with repository.index(commit) as index:
        index.git("update-index", "--add", "--cacheinfo", f"160000,{commit},vendor/lost")
        broken = repository.commit_tree(index.write_tree(), None, "broken\n")
    repository.point("refs/heads/main", broken)
    with pytest.raises(FetchFailed, match="records a submodule at vendor/lost but no URL"):
        fetch(GitPin("outer", str(shelf), broken, "1.0"), workspace)


@pytest.mark.parametrize(
    ("parent", "url", "whole"),
    [
        ("https://git.invalid/a/outer.git", "../inner.git", "https://git.invalid/a/inner.git"),
        ("https://git.invalid:8443/a/outer", "../../b/inner", "https://git.invalid:8443/b/inner"),
        ("ssh://git@git.invalid/a/outer", "../inner", "ssh://git@git.invalid/a/inner"),
        ("git@git.invalid:a/outer.git", "../inner.git", "git@git.invalid:a/inner.git"),
        ("/srv/git/outer", "./inner", "/srv/git/outer/inner"),
        ("file:///srv/git/outer/", "../inner", "file:///srv/git/inner"),
        ("https://git.invalid/a/outer.git", "https://else.invalid/x.git", "https://else.invalid/x.git"),
    ],
)
def test_relative_submodule_urls(parent: str, url: str, whole: str) -> None:
    assert _resolve(parent, url) == whole


def test_every_refusal_has_a_way_out(workspace: Workspace, shelf: Path) -> None:
    put(shelf)
    with pytest.raises(Sm120kitError) as caught:
        fetch(pin_of(b"other"), workspace, mirror=str(shelf))
    assert caught.value.hint
