"""Differences between two images and their causes."""

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
from sm120kit.images.diff import Cause, Contents, DifferenceKind, FileEntry, ImageDiff, WheelFile, compare
from sm120kit.images.diff.contents import read
from sm120kit.images.records import Image

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


def entry(content: str = "", **changed: Any) -> FileEntry:
    return replace(FileEntry("file", content, 0o644, "0:0", 1), **changed)


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
        f"{SITE}/idna/core.py": WheelFile("idna", "1.0", "core 1"),
        f"{SITE}/flashinfer/jit.py": WheelFile("flashinfer_python", OURS, "jit 1"),
    }
    values = {"settings": {"Env": ["A=1"]}, "entries": entries, "recorded": recorded} | parts
    return Contents(image(LABELS | (labels or {}), layers), **values)


def changed(side: Contents, path: str, new: FileEntry | None, record: WheelFile | None = None) -> Contents:
    """Contents with a file replaced, or removed, and optionally another record of its wheel."""
    entries = {**side.entries, **({path: new} if new else {})}
    if new is None:
        del entries[path]
    recorded = {**side.recorded, **({path: record} if record else {})}
    return replace(side, entries=entries, recorded=recorded, image=replace(side.image, layers=("a", "c")))


def causes(diff: ImageDiff) -> dict[str, tuple[DifferenceKind, Cause]]:
    return {entry.path: (entry.what, entry.cause) for entry in diff.differences if not entry.path.startswith("label ")}


def test_same_image_has_no_difference() -> None:
    assert compare(contents(), contents()).differences == ()


@pytest.mark.parametrize(
    ("path", "new", "what"),
    [
        ("usr/bin/sh", entry("other"), DifferenceKind.CONTENT),
        ("usr/bin/sh", entry("sh", mode=0o4755), DifferenceKind.MODE),
        ("usr/bin/sh", entry("sh", owner="1000:1000"), DifferenceKind.OWNER),
        ("usr/bin/sh", None, DifferenceKind.REMOVED),
        ("usr/bin/more", entry("new"), DifferenceKind.ADDED),
        (f"{SITE}/idna/core.py", entry("changed"), DifferenceKind.CONTENT),
        (f"{SITE}/idna/__pycache__/core.cpython-311.pyc", entry("changed"), DifferenceKind.CONTENT),
        ("usr/bin/sh", entry("sh", kind="link"), DifferenceKind.CONTENT),
    ],
)
def test_images_of_the_same_context_have_no_cause_but_time(path: str, new: FileEntry | None, what: DifferenceKind) -> None:
    diff = compare(contents(), changed(contents(), path, new))
    assert causes(diff) == {path: (what, Cause.UNEXPLAINED)} and diff.common_layers == 1


def test_time_is_a_cause() -> None:
    diff = compare(contents(), changed(contents(), "usr/bin/sh", entry("sh", time=2)))
    assert causes(diff) == {"usr/bin/sh": (DifferenceKind.TIME, Cause.TIME)} and not diff.unexplained


def test_difference_hidden_from_containers_is_unexplained() -> None:
    diff = compare(contents(), contents(layers=("a", "c")))
    assert causes(diff) == {"layer 2": (DifferenceKind.HIDDEN, Cause.UNEXPLAINED)}


def test_changed_wheel_explains_its_files_and_their_bytecode() -> None:
    other = contents({"sm120kit.context": "2", "sm120kit.wheels": "idna==2.0"})
    path = f"{SITE}/idna/core.py"
    other = changed(other, path, entry("core 2"), WheelFile("idna", "2.0", "core 2"))
    other = changed(other, f"{SITE}/idna/__pycache__/core.cpython-311.pyc", entry("code 2"))
    diff = compare(contents(), other)
    assert {cause for _, cause in causes(diff).values()} == {Cause.WHEELS} and len(causes(diff)) == 2
    assert any(difference.detail == "idna 1.0 -> 2.0" for difference in diff.differences)
    # The same wheel cannot have another file, and a file must have the hash that its wheel records.
    for record in (WheelFile("idna", "1.0", "core 2"), WheelFile("idna", "2.0", "another")):
        assert causes(compare(contents(), changed(other, path, entry("core 2"), record)))[path][1] is Cause.UNEXPLAINED
    # A file beside those of a wheel does not belong to the wheel.
    extra = changed(other, f"{SITE}/idna/extra.py", entry("new"))
    assert causes(compare(contents(), extra))[f"{SITE}/idna/extra.py"] == (DifferenceKind.ADDED, Cause.UNEXPLAINED)


@pytest.mark.parametrize(
    ("labels", "cause", "detail"),
    [
        ({"sm120kit.patches": "cutlass/one@2"}, Cause.PATCH, "cutlass/one@1, cutlass/one@2"),
        ({"sm120kit.archs": "sm_121a"}, Cause.OUR_WHEEL, f"flashinfer_python {OURS} -> 0.6.6+sm120kit.2: archs"),
        ({}, Cause.OUR_WHEEL, f"flashinfer_python {OURS} -> 0.6.6+sm120kit.2: plan"),
    ],
)
def test_cause_of_a_changed_wheel_of_ours(labels: dict[str, str], cause: Cause, detail: str) -> None:
    path = f"{SITE}/flashinfer/jit.py"
    record = WheelFile("flashinfer_python", "0.6.6+sm120kit.2", "jit 2")
    other = changed(contents({"sm120kit.context": "2", **labels}), path, entry("jit 2"), record)
    (difference,) = (entry for entry in compare(contents(), other).differences if entry.path == path)
    assert (difference.cause, difference.detail) == (cause, detail)


def test_left_out_file_of_a_wheel_has_that_cause() -> None:
    path = f"{SITE}/idna/core.py"
    left = {"sm120kit.context": "2", "sm120kit.left-out": "idna:idna/c*.py,other:idna/x.py"}
    diff = compare(contents(), changed(contents(left), path, None))
    assert causes(diff)[path] == (DifferenceKind.REMOVED, Cause.LEFT_OUT)
    labels = {entry.path: entry.cause for entry in diff.differences if entry.path.startswith("label ")}
    assert labels["label sm120kit.left-out"] is Cause.LEFT_OUT
    other = left | {"sm120kit.left-out": "other:idna/c*.py"}
    assert causes(compare(contents(), changed(contents(other), path, None)))[path][1] is Cause.UNEXPLAINED


def test_kernels_of_b12x_differ_with_the_wheels() -> None:
    path = "opt/sm120kit/b12x/entries/ab/ab0.o"
    labels = {"sm120kit.context": "2", "sm120kit.wheels": "b12x==2", "sm120kit.wrong-record": "b12x:*"}
    diff = compare(contents(), changed(contents(labels), path, entry("code")))
    assert causes(diff)[path][1] is Cause.WHEELS
    assert {entry.path: entry.cause for entry in diff.differences}["label sm120kit.wrong-record"] is Cause.WHEELS
    assert causes(compare(contents(), changed(contents({"sm120kit.context": "2"}), path, entry("code"))))[path][1] is (
        Cause.UNEXPLAINED
    )


def test_changed_base_explains_only_its_own_files() -> None:
    base = {"usr/bin/sh": entry("sh"), "etc/passwd": entry("base 1")}
    first = contents(base=base)
    labels = {"sm120kit.context": "2", "org.opencontainers.image.base.digest": "sha256:b2"}
    second = changed(contents(labels), "usr/bin/sh", entry("sh 2"))
    known = replace(second, base={**base, "usr/bin/sh": entry("sh 2")})
    assert causes(compare(first, known)) == {"usr/bin/sh": (DifferenceKind.CONTENT, Cause.BASE)}
    # Steps of the Dockerfile ran on another base.
    users = changed(known, "etc/passwd", entry("other users"))
    assert causes(compare(first, users))["etc/passwd"] == (DifferenceKind.CONTENT, Cause.DOCKERFILE)
    # A file of a wheel is not explained by the base.
    assert causes(compare(first, changed(known, f"{SITE}/idna/core.py", entry("core 2"))))[f"{SITE}/idna/core.py"][1] is (
        Cause.UNEXPLAINED
    )
    assert causes(compare(first, replace(known, base=None)))["usr/bin/sh"] == (DifferenceKind.CONTENT, Cause.UNEXPLAINED)


def test_changed_dockerfile_explains_files_modes_and_settings() -> None:
    labels = {"sm120kit.context": "2", "sm120kit.dockerfile": "d2"}
    second = changed(contents(labels, settings={"Env": ["A=2"]}), "etc/passwd", entry("other users"))
    second = changed(second, f"{SITE}/idna/core.py", entry("core 1", mode=0o600))
    assert causes(compare(contents(), second)) == {
        "etc/passwd": (DifferenceKind.CONTENT, Cause.DOCKERFILE),
        f"{SITE}/idna/core.py": (DifferenceKind.MODE, Cause.DOCKERFILE),
        "setting Env": (DifferenceKind.SETTING, Cause.DOCKERFILE),
    }


def test_labels_and_settings_have_causes() -> None:
    diff = compare(contents(), contents({"sm120kit.context": "2", "sm120kit.archs": "x"}, settings={"Env": ["A=2"]}))
    assert {entry.path: (entry.cause, entry.detail) for entry in diff.differences} == {
        "label sm120kit.archs": (Cause.OUR_WHEEL, "sm_120f -> x"),
        "setting Env": (Cause.OUR_WHEEL, "['A=1'] -> ['A=2']"),
    }
    for other in (contents({"sm120kit.archs": "x"}), contents(settings={"User": "root"})):
        assert {entry.cause for entry in compare(contents(), other).differences} == {Cause.UNEXPLAINED}


def test_foreign_images_are_explained_by_their_wheels_only() -> None:
    first, second = (replace(side, image=image({})) for side in (contents(), contents()))
    path = f"{SITE}/idna/core.py"
    second = changed(changed(second, path, entry("core 2"), WheelFile("idna", "2.0", "core 2")), "usr/bin/sh", entry("x"))
    assert causes(compare(first, second)) == {
        path: (DifferenceKind.CONTENT, Cause.WHEELS),
        "usr/bin/sh": (DifferenceKind.CONTENT, Cause.UNEXPLAINED),
    }


def packed(members: dict[str, tuple[bytes, str, str]]) -> io.BytesIO:
    """A file system as a tar file: by path the bytes, the type and the target of a link."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, (content, kind, link) in members.items():
            member = tarfile.TarInfo(path)
            member.type, member.size, member.linkname = kind.encode(), len(content), link
            member.mode = 0o104755  # as some daemons write it, with the type of file in it
            archive.addfile(member, io.BytesIO(content))
    stream.seek(0)
    return stream


def test_file_system_is_read_as_a_stream() -> None:
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


@pytest.mark.parametrize("arguments", [["flashinfer", "--nonsense"], ["--base", "x", "--nonsense"], ["build", "--nonsense"]])
def test_image_without_a_subcommand_is_image_build(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["image", *arguments])
    assert result.exit_code == 2 and "image build" in result.output and "--nonsense" in result.output
