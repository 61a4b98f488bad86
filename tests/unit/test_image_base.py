"""Root file systems of small Debian packages, as layers."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from debian_archive import ar, control, member, package, tar, written_base

from sm120kit.core.errors import BadInput, Mismatch, NotFound, NotTrusted
from sm120kit.core.unpacking import Unpacking
from sm120kit.images._base import DebianSystem
from sm120kit.images.oci import Layout
from sm120kit.recipes import bases
from sm120kit.recipes.bases import Base
from sm120kit.sources.debian_files import PackageContents, read

Members = list[tuple[tarfile.TarInfo, bytes]]


def base(**fields: object) -> Base:
    described = {"edition": 1, "name": "small", "summary": "s", "suite": "bookworm", "python": "3.11", "machines": ["x86_64"]}
    return Base.model_validate({**described, "packages": {"one": "needed"}, **fields})


def owned(name: str, uid: int, gid: int, mode: int) -> tuple[tarfile.TarInfo, bytes]:
    header, content = member(name, b"owned", mode=mode)
    header.uid, header.gid = uid, gid
    return header, content


def entries(layout: Layout, digest: str) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(layout.path(digest)) as layer:
        return {entry.name: entry for entry in layer}


CONTENTS: Members = [
    member("./", kind="directory", mode=0o755),
    member("./bin/", kind="directory", mode=0o755),
    member("./bin/gunzip", b"#!/bin/sh\n", mode=0o755),
    member("./bin/uncompress", kind="hardlink", target="./bin/gunzip", mode=0o755),
    member("./bin/awk", kind="hardlink", target="./bin/gunzip", mode=0o755),
    member("./lib/libone.so", kind="symlink", target="libone.so.1"),
    member("./tmp/", kind="directory", mode=0o1777),
    member("./usr/bin/gcc", b"gcc", mode=0o4755),
    owned("./var/mail/box", 8, 12, 0o660),
    member("./var/run/", kind="directory", mode=0o755),
    member("./usr/share/doc/one/copyright", b"license"),
    member("./usr/share/doc/one/changelog.gz", b"12345"),
    member("./usr/share/base-passwd/passwd.master", b"root:*:0:0:root:/root:/bin/bash\n"),
    member("./usr/share/ca-certificates/mozilla/A.crt", b"-----A-----\n"),
    member("./usr/share/ca-certificates/mozilla/B.crt", b"-----B-----"),
]


def unpack(deb: Path, root: Path) -> PackageContents:
    return read(deb, Unpacking(root, root).add)


def write(directory: Path, description: Base | None = None, *debs: Path) -> tuple[DebianSystem, Layout, str]:
    """The root file system of ``debs``, by default one package, and its layer."""
    directory.mkdir(parents=True, exist_ok=True)
    debs = debs or (package(directory, "one", CONTENTS),)
    description = description or base(
        alternatives={"cc": "gcc"},
        copies={"etc/passwd": "usr/share/base-passwd/passwd.master"},
        links={"var/run": "/run"},
        directories={"run/lock": "1777"},
        left_out={"usr/share/doc/*": "documentation"},
    )
    return written_base(directory, description, debs)


def test_files_are_as_in_packages_with_merged_usr(tmp_path: Path) -> None:
    _, layout, digest = write(tmp_path)
    layer = entries(layout, digest)
    assert (layer["bin"].linkname, layer["lib"].linkname) == ("usr/bin", "usr/lib")
    assert "sbin" not in layer and "lib64" not in layer
    assert layer["usr/bin/gunzip"].isreg() and layer["usr/bin/gunzip"].mode == 0o755
    for name in ("usr/bin/awk", "usr/bin/uncompress"):
        assert layer[name].islnk() and layer[name].linkname == "usr/bin/gunzip"
    assert layer["usr/lib/libone.so"].linkname == "libone.so.1"
    assert layer["tmp"].mode == 0o1777 and layer["usr/bin/gcc"].mode == 0o4755
    box = layer["var/mail/box"]
    assert (box.uid, box.gid, box.mode) == (8, 12, 0o660)
    assert {entry.mtime for entry in layer.values()} == {315532800}


def test_what_maintainer_scripts_would_do(tmp_path: Path) -> None:
    _, layout, digest = write(tmp_path)
    layer = entries(layout, digest)
    root = tmp_path / "root"
    assert (root / "etc/passwd").read_text().startswith("root:*:0:0:")
    assert layer["usr/bin/cc"].linkname == "/etc/alternatives/cc" and layer["etc/alternatives/cc"].linkname == "/usr/bin/gcc"
    assert layer["var/run"].linkname == "/run" and layer["run/lock"].mode == 0o1777
    assert (root / "etc/ssl/certs/ca-certificates.crt").read_bytes() == b"-----A-----\n-----B-----\n"
    assert layer["etc/ssl/certs/A.pem"].linkname == "/usr/share/ca-certificates/mozilla/A.crt"
    assert (root / "etc/ca-certificates.conf").read_text() == "mozilla/A.crt\nmozilla/B.crt\n"
    status = (root / "var/lib/dpkg/status").read_text()
    assert status.startswith("Package: one\nStatus: install ok installed\nVersion: 1.0\n") and status.endswith("\n\n")
    listed = (root / "var/lib/dpkg/info/one.list").read_text().splitlines()
    assert listed[0] == "/." and "/bin/gunzip" in listed and "/usr/share/doc/one/changelog.gz" in listed
    assert (root / "etc/ld.so.cache").read_bytes().startswith(b"glibc-ld.so.cache1.1")
    assert "usr/share/doc/one/copyright" in layer and "usr/share/doc/one/changelog.gz" not in layer


def test_digest_does_not_depend_on_directory_umask_or_order(tmp_path: Path) -> None:
    other = package(tmp_path, "two", [member("./etc/two", b"2")])
    one = package(tmp_path, "one", CONTENTS)
    description = base(links={"var/run": "/run"})
    digests = set()
    for name, mask in (("a", 0o022), ("b/c", 0o077)):
        before = os.umask(mask)
        try:
            digests.add(write(tmp_path / name, description, one, other)[2])
        finally:
            os.umask(before)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".xz", lzma.compress),
        (".gz", gzip.compress),
        (".zst", zstandard.ZstdCompressor().compress),
        ("", bytes),
    ],
)
def test_compressions(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    parts = {
        "debian-binary": b"2.0\n",
        f"control.tar{suffix}": pack(tar([member("./control", control("one").encode())])),
        f"data.tar{suffix}": pack(tar([member("./etc/one", b"1" * 2**21)])),
    }
    (tmp_path / "one.deb").write_bytes(ar(parts))
    (tmp_path / "root").mkdir()
    unpacked = unpack(tmp_path / "one.deb", tmp_path / "root")
    assert unpacked.paths == ("etc/one",)
    assert (tmp_path / "root/etc/one").read_bytes() == b"1" * 2**21
    assert unpacked.control["control"].startswith(b"Package: one\n")


HOSTILE: dict[str, tuple[Members, str]] = {
    "absolute path": ([member("/etc/cron.d/x")], "outside its directory"),
    "path above": ([member("./../x")], "outside its directory"),
    "path above in the middle": ([member("./usr/../../x")], "outside its directory"),
    "path of two lines": ([member("./etc/a\nb")], "outside its directory"),
    "name too long": ([member(f"./etc/{'a' * 300}", b"1")], "name too long"),
    "device": ([member("./dev/sda", kind="device")], "no file, directory or link"),
    "hard link out": ([member("./etc/x", kind="hardlink", target="/etc/passwd")], "which is no file"),
    "hard link above": ([member("./etc/x", kind="hardlink", target="../../etc/passwd")], "which is no file"),
    "hard link to a link": (
        [member("./etc/y", kind="symlink", target="/etc/passwd"), member("./etc/x", kind="hardlink", target="./etc/y")],
        "which is no file",
    ),
    "file through a link": (
        [member("./etc/x", kind="symlink", target="/tmp"), member("./etc/x/y", b"1")],
        "which is no directory",
    ),
    "file below a file": ([member("./etc/x", b"1"), member("./etc/x/y", b"1")], "which is no directory"),
    "a path twice": ([member("./etc/x", b"1"), member("./etc/x", b"2")], "in a layer twice"),
    "a file of sm120kit": ([member("./etc/ld.so.cache", b"1")], "in a layer twice"),
    "a file where a link is put": ([member("./var/run/x", b"1"), member("./usr/bin/gcc", b"1")], "in a layer twice"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_packages(tmp_path: Path, kind: str) -> None:
    members, message = HOSTILE[kind]
    deb = package(tmp_path / "debs", "one", members)
    with pytest.raises(NotTrusted, match=message) as caught:
        write(tmp_path / "made", base(links={"var/run": "/run"}), deb)
    assert caught.value.hint
    inside = {tmp_path / "made" / "root", tmp_path / "made" / "oci"}
    assert [path for path in tmp_path.rglob("*") if path.is_file() and not inside & {*path.parents}] == [deb]


def test_packages_with_the_same_file_or_a_link_below_another(tmp_path: Path) -> None:
    link = package(tmp_path, "link", [member("./usr/share/x", kind="symlink", target="/tmp")])
    through = package(tmp_path, "through", [member("./usr/share/x/passwd", b"1")])
    with pytest.raises(NotTrusted, match="usr/share/x"):
        write(tmp_path / "a", base(), link, through)
    one, two = (package(tmp_path, name, [member("./etc/same", name.encode())]) for name in ("one", "two"))
    with pytest.raises(NotTrusted, match=r"two_.*etc/same is in a layer twice"):
        write(tmp_path / "b", base(), one, two)


def _truncated(deb: bytes) -> bytes:
    return deb[: len(deb) // 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_truncated, "truncated"),
        (lambda deb: b"", "no ar archive"),
        (lambda deb: deb.replace(b"data.tar.xz", b"data.tar.q "), "unknown compression .q"),
        (lambda deb: deb.replace(b"2.0\n", b"3.0\n", 1), "not 2.x"),
        (lambda deb: deb.replace(b"data.tar.xz", b"other      "), "no data.tar"),
        (lambda deb: ar({"debian-binary": b"2.0\n", "control.tar": tar([]), "data.tar": tar([])}), "no control file"),
        (lambda deb: deb[:-40] + bytes(40), "not a Debian package"),
        (lambda deb: deb[:116] + b"9999999999" + deb[126:], "truncated"),  # a member of 10 GB
    ],
)
def test_damaged_packages(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    deb = package(tmp_path, "one", CONTENTS)
    deb.write_bytes(change(deb.read_bytes()))
    (tmp_path / "root").mkdir()
    with pytest.raises(NotTrusted, match=message):
        unpack(deb, tmp_path / "root")


def test_a_package_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm120kit.sources.debian_files.max_unpacked_bytes", lambda packed: 2**16)
    deb = package(tmp_path, "one", [member("./etc/x", bytes(2**17))])
    (tmp_path / "root").mkdir()
    with pytest.raises(NotTrusted, match="unpacks to more than"):
        unpack(deb, tmp_path / "root")
    assert not list((tmp_path / "root").iterdir())


def test_a_base_whose_packages_lack_what_it_names(tmp_path: Path) -> None:
    deb = package(tmp_path, "one", [member("./etc/x", b"1")])
    for number, fields in enumerate(({"copies": {"etc/passwd": "usr/none"}}, {"alternatives": {"cc": "gcc"}})):
        with pytest.raises(NotTrusted, match="no package of the base small has usr"):
            write(tmp_path / str(number), base(**fields), deb)


def test_content_of_layer_is_that_of_packages(tmp_path: Path) -> None:
    _, layout, digest = write(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(layout.path(digest).read_bytes())) as layer:
        for path in ("usr/bin/awk", "usr/bin/uncompress"):
            content = layer.extractfile(path)
            assert content is not None and content.read() == b"#!/bin/sh\n"


def test_base_like_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the keys of that base, and the entries of both in its tables."""
    directory = tmp_path / "recipes" / "bases"
    shutil.copytree(bases.lock_path("debian-12").parent, directory)
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    parent, base = bases.load("debian-12"), bases.load("debian-12-rdma")
    assert {*base.packages} - {*parent.packages} == {"libibverbs1", "ibverbs-providers"}
    assert {*parent.packages} < {*base.packages} and {*parent.left_out} < {*base.left_out}
    assert (base.suite, base.links) == (parent.suite, parent.links) and base.summary != parent.summary
    bases.read_lock("debian-12-rdma", "aarch64")
    file = directory / "debian-12.toml"
    file.write_text(file.read_text().replace("[packages]\n", '[packages]\ncurl = "a test"\n'))
    with pytest.raises(Mismatch, match="other values of packages"):
        bases.read_lock("debian-12-rdma", "aarch64")
    other = directory / "debian-12-rdma.toml"
    other.write_text(other.read_text().replace('like = "debian-12"', 'like = "debian-21"'))
    with pytest.raises(NotFound, match="like: unknown base 'debian-21'; did you mean"):
        bases.load("debian-12-rdma")
    other.write_text(other.read_text().replace('like = "debian-21"', 'like = "debian-12"\nlinks = 5'))
    with pytest.raises(BadInput, match="links: input should be a valid dictionary"):
        bases.load("debian-12-rdma")
    file.write_text(file.read_text().replace("edition = 1\n", 'edition = 1\nlike = "debian-12-rdma"\n', 1))
    for name in ("debian-12", "debian-12-rdma"):
        with pytest.raises(BadInput, match=r"like: .* is the base itself, or like it"):
            bases.load(name)
