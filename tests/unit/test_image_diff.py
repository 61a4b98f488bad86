"""What differs between two images, and whether it has a cause."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.imagediff import Cause, Contents, Diff, Entry, What, compare
from sm120kit.imagediff.contents import read
from sm120kit.records import Image

SITE = "opt/venv/lib/python3.11/site-packages"
LABELS = {
    "sm120kit.context": "1",
    "sm120kit.reference": "r1",
    "sm120kit.dockerfile": "d1",
    "sm120kit.wheels": "idna==1.0",
    "sm120kit.patches": "cutlass/one@1",
    "sm120kit.archs": "sm_120f",
    "org.opencontainers.image.base.digest": "sha256:b1",
}
OURS = "0.6.6+sm120kit.1"


def entry(content: str = "", **changed: Any) -> Entry:
    return replace(Entry("file", content, 0o644, "0:0", 1), **changed)


def image(labels: dict[str, str], layers: tuple[str, ...] = ("a", "b")) -> Image:
    return Image(f"sha256:{labels.get('sm120kit.context')}", "", "linux/amd64", layers, labels, "", 0)


def contents(labels: dict[str, str] | None = None, layers: tuple[str, ...] = ("a", "b"), **parts: Any) -> Contents:
    entries = {
        "usr": entry(kind="directory"),
        "usr/bin/sh": entry("sh"),
        "etc/passwd": entry("users"),
        f"{SITE}/idna/core.py": entry("core 1"),
        f"{SITE}/idna/__pycache__/core.cpython-311.pyc": entry("code 1"),
        f"{SITE}/flashinfer/jit.py": entry("jit 1"),
    }
    recorded = {
        f"{SITE}/idna/core.py": ("idna", "1.0", "core 1"),
        f"{SITE}/flashinfer/jit.py": ("flashinfer_python", OURS, "jit 1"),
    }
    given = {"settings": {"Env": ["A=1"]}, "entries": entries, "recorded": recorded} | parts
    return Contents(image(LABELS | (labels or {}), layers), **given)


def changed(one: Contents, path: str, new: Entry | None, record: tuple[str, str, str] | None = None) -> Contents:
    """``one`` with another file, or without it, and with what its wheel says now."""
    entries = {**one.entries, **({path: new} if new else {})}
    if new is None:
        del entries[path]
    recorded = {**one.recorded, **({path: record} if record else {})}
    return replace(one, entries=entries, recorded=recorded, image=replace(one.image, layers=("a", "c")))


def causes(found: Diff) -> dict[str, tuple[What, Cause]]:
    return {one.path: (one.what, one.cause) for one in found.differences if not one.path.startswith("label ")}


def test_the_same_image_has_no_difference() -> None:
    assert compare(contents(), contents()).differences == ()


@pytest.mark.parametrize(
    ("path", "new", "what"),
    [
        ("usr/bin/sh", entry("other"), What.CONTENT),
        ("usr/bin/sh", entry("sh", mode=0o4755), What.MODE),
        ("usr/bin/sh", entry("sh", owner="1000:1000"), What.OWNER),
        ("usr/bin/sh", None, What.REMOVED),
        ("usr/bin/more", entry("new"), What.ADDED),
        (f"{SITE}/idna/core.py", entry("changed"), What.CONTENT),
        (f"{SITE}/idna/__pycache__/core.cpython-311.pyc", entry("changed"), What.CONTENT),
        ("usr/bin/sh", entry("sh", kind="link"), What.CONTENT),
    ],
)
def test_two_images_of_one_context_have_no_excuse_but_time(path: str, new: Entry | None, what: What) -> None:
    found = compare(contents(), changed(contents(), path, new))
    assert causes(found) == {path: (what, Cause.UNEXPLAINED)} and found.common_layers == 1


def test_time_is_a_cause_of_its_own() -> None:
    found = compare(contents(), changed(contents(), "usr/bin/sh", entry("sh", time=2)))
    assert causes(found) == {"usr/bin/sh": (What.TIME, Cause.TIME)} and not found.unexplained


def test_what_no_container_sees_is_unexplained() -> None:
    found = compare(contents(), contents(layers=("a", "c")))
    assert causes(found) == {"layer 2": (What.HIDDEN, Cause.UNEXPLAINED)}


def test_another_wheel_explains_its_files_and_their_bytecode() -> None:
    other = contents({"sm120kit.context": "2", "sm120kit.wheels": "idna==2.0"})
    path = f"{SITE}/idna/core.py"
    other = changed(other, path, entry("core 2"), ("idna", "2.0", "core 2"))
    other = changed(other, f"{SITE}/idna/__pycache__/core.cpython-311.pyc", entry("code 2"))
    found = compare(contents(), other)
    assert {cause for _, cause in causes(found).values()} == {Cause.WHEELS} and len(causes(found)) == 2
    assert any(one.detail == "idna 1.0 -> 2.0" for one in found.differences)
    # The same wheel cannot have another file, and a file must be the one that its wheel records.
    for record in (("idna", "1.0", "core 2"), ("idna", "2.0", "another")):
        assert causes(compare(contents(), changed(other, path, entry("core 2"), record)))[path][1] is Cause.UNEXPLAINED
    # What lies beside a wheel's files is not the wheel's.
    extra = changed(other, f"{SITE}/idna/extra.py", entry("new"))
    assert causes(compare(contents(), extra))[f"{SITE}/idna/extra.py"] == (What.ADDED, Cause.UNEXPLAINED)


@pytest.mark.parametrize(
    ("labels", "cause", "detail"),
    [
        ({"sm120kit.patches": "cutlass/one@2"}, Cause.PATCH, "cutlass/one@1, cutlass/one@2"),
        ({"sm120kit.archs": "sm_121a"}, Cause.OUR_WHEEL, f"flashinfer_python {OURS} -> 0.6.6+sm120kit.2: archs"),
        ({}, Cause.OUR_WHEEL, f"flashinfer_python {OURS} -> 0.6.6+sm120kit.2: its plan"),
    ],
)
def test_our_wheel_says_why_it_is_another(labels: dict[str, str], cause: Cause, detail: str) -> None:
    path = f"{SITE}/flashinfer/jit.py"
    record = ("flashinfer_python", "0.6.6+sm120kit.2", "jit 2")
    other = changed(contents({"sm120kit.context": "2", **labels}), path, entry("jit 2"), record)
    (one,) = (one for one in compare(contents(), other).differences if one.path == path)
    assert (one.cause, one.detail) == (cause, detail)


def test_a_base_explains_only_what_is_its_own() -> None:
    below = {"usr/bin/sh": entry("sh"), "etc/passwd": entry("base 1")}
    first = contents(base=below)
    labels = {"sm120kit.context": "2", "org.opencontainers.image.base.digest": "sha256:b2"}
    second = changed(contents(labels), "usr/bin/sh", entry("sh 2"))
    known = replace(second, base={**below, "usr/bin/sh": entry("sh 2")})
    assert causes(compare(first, known)) == {"usr/bin/sh": (What.CONTENT, Cause.BASE)}
    # Steps of the Dockerfile ran on another base.
    users = changed(known, "etc/passwd", entry("other users"))
    assert causes(compare(first, users))["etc/passwd"] == (What.CONTENT, Cause.DOCKERFILE)
    # A wheel's file is no base's.
    assert causes(compare(first, changed(known, f"{SITE}/idna/core.py", entry("core 2"))))[f"{SITE}/idna/core.py"][1] is (
        Cause.UNEXPLAINED
    )
    assert causes(compare(first, replace(known, base=None)))["usr/bin/sh"] == (What.CONTENT, Cause.UNEXPLAINED)


def test_another_dockerfile() -> None:
    labels = {"sm120kit.context": "2", "sm120kit.dockerfile": "d2"}
    second = changed(contents(labels, settings={"Env": ["A=2"]}), "etc/passwd", entry("other users"))
    second = changed(second, f"{SITE}/idna/core.py", entry("core 1", mode=0o600))
    assert causes(compare(contents(), second)) == {
        "etc/passwd": (What.CONTENT, Cause.DOCKERFILE),
        f"{SITE}/idna/core.py": (What.MODE, Cause.DOCKERFILE),
        "setting Env": (What.SETTING, Cause.DOCKERFILE),
    }


def test_labels_and_settings() -> None:
    found = compare(contents(), contents({"sm120kit.context": "2", "sm120kit.archs": "x"}, settings={"Env": ["A=2"]}))
    said = {one.path: (one.cause, one.detail) for one in found.differences}
    assert said == {
        "label sm120kit.archs": (Cause.OUR_WHEEL, "sm_120f -> x"),
        "setting Env": (Cause.OUR_WHEEL, "['A=1'] -> ['A=2']"),
    }
    for other in (contents({"sm120kit.archs": "x"}), contents(settings={"User": "root"})):
        assert {one.cause for one in compare(contents(), other).differences} == {Cause.UNEXPLAINED}


def test_images_of_others_are_explained_by_their_wheels_alone() -> None:
    first, second = (replace(one, image=image({})) for one in (contents(), contents()))
    path = f"{SITE}/idna/core.py"
    second = changed(changed(second, path, entry("core 2"), ("idna", "2.0", "core 2")), "usr/bin/sh", entry("x"))
    assert causes(compare(first, second)) == {
        path: (What.CONTENT, Cause.WHEELS),
        "usr/bin/sh": (What.CONTENT, Cause.UNEXPLAINED),
    }


def packed(members: dict[str, tuple[bytes, str, str]]) -> io.BytesIO:
    """A file system: by path the bytes, the type and what a link names."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, (content, kind, link) in members.items():
            member = tarfile.TarInfo(path)
            member.type, member.size, member.linkname = kind.encode(), len(content), link
            member.mode = 0o104755  # as some daemons write it, with the type of file in it
            archive.addfile(member, io.BytesIO(content))
    stream.seek(0)
    return stream


def test_a_file_system_is_read_as_a_stream() -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"code").digest()).rstrip(b"=").decode()
    record = f"idna/core.py,sha256={digest},4\n../../../bin/idna,,\n".encode()
    file, link, hard, directory = "0", "2", "1", "5"
    stream = packed(
        {
            "opt/": (b"", directory, ""),
            f"{SITE}/idna/core.py": (b"code", file, ""),
            f"{SITE}/idna-1.0.dist-info/RECORD": (record, file, ""),
            "usr/first": (b"code", file, ""),
            "usr/second": (b"", hard, "usr/first"),
            "usr/python": (b"", link, "python3"),
            "etc/hosts": (b"the daemon's", file, ""),
            "dev/null": (b"", file, ""),
        }
    )
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        entries, recorded = read(archive)
    code = hashlib.sha256(b"code").hexdigest()
    assert recorded == {f"{SITE}/idna/core.py": ("idna", "1.0", code), "opt/venv/bin/idna": ("idna", "1.0", "")}
    assert entries["usr/second"] == entries["usr/first"] and entries["usr/first"].content == code
    assert (entries["usr/python"].kind, entries["usr/python"].content) == ("link", "python3")
    assert (entries["opt"].kind, entries["opt"].mode) == ("directory", 0o4755)
    assert not {"etc/hosts", "dev/null"} & {*entries}


@pytest.mark.parametrize("words", [["flashinfer", "--nonsense"], ["--base", "x", "--nonsense"], ["build", "--nonsense"]])
def test_image_builds_what_is_no_subcommand(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["image", *words])
    assert done.exit_code == 2 and "image build" in done.output and "--nonsense" in done.output
