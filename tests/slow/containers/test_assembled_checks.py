"""An image that is assembled from locked packages and wheels and checked, all without a container daemon."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import small_checked

from sm120kit.images import _rootfs, local_images
from sm120kit.images._layers import LayerWriter
from sm120kit.images.checks import CheckReport
from sm120kit.images.image_records import Check, CheckResult, Image
from sm120kit.images.oci import Layout

pytestmark = pytest.mark.containers

SITE = "opt/venv/lib/python3.11/site-packages"


def failed(report: CheckReport) -> list[Check]:
    return [check for check in report.checks if check.verdict is CheckResult.FAILED]


def changed(image: Image, layout: Layout, files: dict[str, bytes]) -> Image:
    """The image with a layer above it that adds and replaces files."""
    manifest = layout.require(image.id)
    with layout.writer() as blob:
        writer = LayerWriter(blob)
        for path, content in files.items():
            writer.file(path, [content], len(content))
        layer = writer.finish()
    layers = (*layout.layers(manifest.digest), layer)
    return layout.image(layout.add_image(layers, layout.config(manifest.digest)).digest)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="requires another machine than that of the image")
def test_checks_of_an_image_for_another_machine_run_in_an_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = small_checked.check(*small_checked.assemble("aarch64", tmp_path), monkeypatch)
    assert not failed(report) and report.verified and report.facts["runtime"] == "unshare, qemu-aarch64"


def test_report_of_bubblewrap_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, workspace = small_checked.assemble(platform.machine(), tmp_path)
    first = small_checked.check(image, workspace, monkeypatch)
    monkeypatch.setattr(local_images, "_command", lambda *request: ["false"])
    second = small_checked.check(image, workspace, monkeypatch)
    assert not failed(first) and first.verified
    assert [report.facts.pop("runtime") for report in (first, second)] == ["unshare", "bubblewrap"]
    one, other = ([(each.name, each.verdict, each.detail) for each in report.checks] for report in (first, second))
    assert one == other and first.facts == second.facts


def test_each_check_detects_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All faults in one image: they do not mask each other."""
    image, workspace = small_checked.assemble(platform.machine(), tmp_path)
    layout = Layout(workspace.root / "oci")
    trees = _rootfs.layers(layout, layout.require(image.id).digest, workspace)
    (tree,) = (each for each in trees if (each / SITE / "idna/core.py").exists())
    bytecode = f"{SITE}/idna/__pycache__/codec.cpython-311.pyc"
    (metadata,) = (tree / SITE).glob("tabulate-*.dist-info/METADATA")
    (of_tqdm,) = (tree / SITE).glob("tqdm-*.dist-info/METADATA")
    faults = {
        f"{SITE}/tqdm/utils.py": b"changed = True\n",
        f"{SITE}/added.py": b"",
        bytecode: (tree / bytecode.replace("codec", "core")).read_bytes(),
        "etc/pip.conf": b"x",
        str(metadata.relative_to(tree)): metadata.read_bytes().replace(b"\nVersion: ", b"\nVersion: 9"),
        str(of_tqdm.relative_to(tree)): of_tqdm.read_bytes().replace(b"\n\n", b"\nRequires-Dist: absent\n\n", 1),
    }
    report = small_checked.check(changed(image, layout, faults), workspace, monkeypatch)
    assert {check.name for check in failed(report)} == {"files", "bytecode", "no_secrets", "versions", "requirements"}
    (files,) = (check.detail for check in report.checks if check.name == "files")
    assert "tqdm/utils.py is not the file of tqdm" in files and "added.py belongs to no wheel" in files
    assert report.verified is None and not [tags for _, tags in layout.images() if tags]


def test_a_build_reads_no_file_again_and_detects_a_file_of_another_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, workspace = small_checked.assemble(platform.machine(), tmp_path)
    layout, path = Layout(workspace.root / "oci"), f"{SITE}/tqdm/utils.py"

    def checked(image: Image, read_all: bool) -> tuple[str, str]:
        """Result of the check ``files``, and how many files it read."""
        report = small_checked.check(image, workspace, monkeypatch, read_all=read_all)
        (check,) = (check for check in report.checks if check.name == "files")
        assert report.verified is not None or check.verdict == "failed", report.checks
        return check.detail.partition(" is ")[0], report.facts.get("files read", "")

    assert checked(image, read_all=False) == ("", "0")
    (detail, read) = checked(image, read_all=True)
    assert not detail and int(read) > 50

    # A layer that replaces a file, which no wheel's RECORD describes.
    faulty = changed(image, layout, {path: b"changed = True\n"})
    for read_all in (False, True):
        assert checked(faulty, read_all)[0] == f"1: /{path}", read_all

    # A file that was changed where the layers are unpacked is read.
    manifest = layout.require(image.id).digest
    (tree,) = (each for each in _rootfs.layers(layout, manifest, workspace) if (each / path).exists())
    (tree / path).write_bytes(b"changed = True\n")
    assert checked(image, read_all=False)[0] == f"1: /{path}"
