"""Patched files of an engine's package in its upstream wheel: only these members are replaced."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core.errors import Mismatch, PatchConflict
from sm120kit.core.record_files import read_record, write_record
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, LockedWheel, SdistPin
from sm120kit.wheels import _plan
from sm120kit.wheels._overlay import pack_overlay, patched_members, write_patched_members
from sm120kit.wheels._published_wheels import published
from sm120kit.wheels._repack import repacked_record
from sm120kit.wheels.build_records import BuildPlan

RECIPE = recipes.load_engine("vllm-0.20.0")
KERNEL, OTHER = "vllm/layers/kernel.py", "vllm/other.py"
SOURCE = {"CMakeLists.txt": "project(vllm)\n", KERNEL: "ARCHS = [100]\n", OTHER: "one = 1\n", "tests/test_kernel.py": "\n"}
PATCHES: tuple[tuple[str, dict[str, str | None]], ...] = (
    ("build-only", {"CMakeLists.txt": "project(vllm LANGUAGES CXX)\n", "tests/test_kernel.py": "pass\n"}),
    ("archs", {KERNEL: "ARCHS = [100, 120]\n", "csrc/new.cu": "\n"}),
    ("more-archs", {KERNEL: "ARCHS = [100, 120, 121]\n"}),
)
INFO = "vllm-0.20.0.dist-info"
WHEEL = {
    KERNEL: SOURCE[KERNEL],
    OTHER: SOURCE[OTHER],
    "vllm/_C.abi3.so": "official",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n",
    f"{INFO}/RECORD": "",
}


def make_tree(path: Path, patches: tuple[tuple[str, dict[str, str | None]], ...] = PATCHES) -> PatchedTree:
    """A source with a commit for each patch."""
    repository = Repository.init(path)
    files, commits = dict(SOURCE), []
    for slug, change in (("", {}), *patches):
        files |= {name: text for name, text in change.items() if text is not None}
        files = {name: text for name, text in files.items() if change.get(name, "") is not None}
        with repository.index() as index:
            for name, text in files.items():
                index.add(name, text.encode())
            commits.append(repository.commit_tree(index.write_tree(), commits[-1] if commits else None, slug))
    base, tip = commits[0], commits[-1]
    pin = SdistPin("vllm", "vllm", "0.20.0", "0" * 64)
    applied = tuple(
        AppliedPatch("vllm", slug, "1" * 64, commit) for (slug, _), commit in zip(patches, commits[1:], strict=True)
    )
    return PatchedTree(Checkout(pin, path, base, repository.tree_of(base)), (), tip, repository.tree_of(tip), applied)


@pytest.fixture
def tree(tmp_path: Path) -> PatchedTree:
    return make_tree(tmp_path / "repository")


def make_wheel(directory: Path, **changed: str | None) -> Path:
    path = directory / "vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**WHEEL, **changed}.items():
            if text is not None:
                archive.writestr(name, text)
    return path


def make_plan(tree: PatchedTree, **changed: Any) -> BuildPlan:
    arguments = {"recipe": RECIPE, "tree": tree, "official": locked(), "replaced": patched_members("vllm", tree)}
    return _plan.plan_overlay(**(arguments | changed))


def locked(digit: str = "a") -> LockedWheel:
    return LockedWheel("vllm", "0.20.0", "vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl", digit * 64)


def test_only_files_of_the_package_are_patched_members(tree: PatchedTree) -> None:
    assert {path: [patch.slug for patch in patches] for path, patches in patched_members("vllm", tree).items()} == {
        KERNEL: ["archs", "more-archs"]
    }


def test_series_of_build_files_replaces_no_member(tmp_path: Path) -> None:
    assert patched_members("vllm", make_tree(tmp_path / "repository", PATCHES[:1])) == {}


def test_overlaid_wheel_has_patched_files_and_their_record(tree: PatchedTree, tmp_path: Path) -> None:
    official, overlay = make_wheel(tmp_path), make_plan(tree)
    files = write_patched_members("vllm", tree, official, tmp_path / "files")
    artifacts = pack_overlay(overlay, tree, (locked(), official), files, tmp_path / "target")
    version = f"0.20.0+sm120kit.{overlay.digest[:12]}"
    assert artifacts.wheel.path == f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(tmp_path / "target" / artifacts.wheel.path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    info = f"vllm-{version}.dist-info"
    changed = {name for name, text in WHEEL.items() if not name.startswith(INFO) and members[name] != text.encode()}
    assert changed == {KERNEL} and members[KERNEL] == b"ARCHS = [100, 120, 121]\n"
    assert f"Version: {version}\n".encode() in members[f"{info}/METADATA"]
    rows = {row[0]: row[1:] for row in csv.reader(members[f"{info}/RECORD"].decode().splitlines())}
    assert rows == {
        name: ["sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), str(len(data))]
        for name, data in members.items()
    } | {f"{info}/RECORD": ["", ""]}
    record = json.loads(members[f"{info}/sm120kit.json"])
    assert [patch["slug"] for patch in record["patches"]] == ["archs", "more-archs"], "the other changes no member"
    sums = {"official": WHEEL[KERNEL], "here": "ARCHS = [100, 120, 121]\n"}
    assert record["replaced"] == {KERNEL: {key: hashlib.sha256(text.encode()).hexdigest() for key, text in sums.items()}}
    assert record["official"] == {"wheel": locked().filename, "sha256": "a" * 64}
    assert record["plan"] == overlay.digest and record["toolchain"] == {"nvcc": "none", "host": "none"}
    assert read_record(BuildPlan, tmp_path / "target" / "plan.json") == overlay


@pytest.mark.parametrize("change", ["a byte", "longer", "absent", "no record", "another plan", "moved"])
def test_published_wheel_that_changed_is_refused(tree: PatchedTree, tmp_path: Path, change: str) -> None:
    official, target = make_wheel(tmp_path), tmp_path / "target"
    overlay, files = make_plan(tree), write_patched_members("vllm", tree, official, tmp_path / "out")
    assert published(overlay, target) is None
    artifacts = pack_overlay(overlay, tree, (locked(), official), files, target)
    assert published(overlay, target) == artifacts
    wheel = target / artifacts.wheel.path
    content = bytearray(wheel.read_bytes())
    if change == "a byte":
        content[len(content) // 2] ^= 1
        wheel.write_bytes(content)
    elif change == "longer":
        wheel.write_bytes(content + b"0123456789")
    elif change == "absent":
        wheel.unlink()
    elif change == "no record":
        (target / "artifacts.json").unlink()
    elif change == "another plan":
        write_record(target / "artifacts.json", replace(artifacts, plan="0" * 64))
    else:
        wheel.rename(tmp_path / wheel.name)
        outside = replace(artifacts.wheel, path=f"../{wheel.name}")
        write_record(target / "artifacts.json", replace(artifacts, wheel=outside))
    with pytest.raises(Mismatch, match=str(target)) as caught:
        published(overlay, target)
    assert caught.value.hint.endswith(f"rm -r {target}")


def test_record_of_wheel_with_extensions_lists_patched_files(tree: PatchedTree, tmp_path: Path) -> None:
    official, library = make_wheel(tmp_path), tmp_path / "ours.so"
    library.write_bytes(b"ours")
    files = {**write_patched_members("vllm", tree, official, tmp_path / "files"), "vllm/_C.abi3.so": library}
    replaced = repacked_record(make_plan(tree), tree, (locked(), official), files)["replaced"]
    assert isinstance(replaced, dict) and sorted(replaced) == ["vllm/_C.abi3.so", KERNEL]


def test_series_adds_and_removes_files(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "repository", (*PATCHES, ("last", {**ADDS, **REMOVES})))
    official, overlay = make_wheel(tmp_path), make_plan(tree)
    (tmp_path / "files" / OTHER).parent.mkdir(parents=True)
    (tmp_path / "files" / OTHER).write_text("unpacked before")
    files = write_patched_members("vllm", tree, official, tmp_path / "files")
    assert not (tmp_path / "files" / OTHER).exists()
    artifacts = pack_overlay(overlay, tree, (locked(), official), files, tmp_path / "target")
    with zipfile.ZipFile(tmp_path / "target" / artifacts.wheel.path) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        rows = {row[0] for row in csv.reader(archive.read(f"{info}/RECORD").decode().splitlines())}
        record = json.loads(archive.read(f"{info}/sm120kit.json"))["replaced"]
    assert "vllm/new.py" in names and OTHER not in names and rows == {*names}
    assert (record["vllm/new.py"]["official"], record[OTHER]["here"]) == ("", "")


ADDS: dict[str, str | None] = {"vllm/new.py": "\n"}
REMOVES: dict[str, str | None] = {OTHER: None}


@pytest.mark.parametrize(
    ("change", "changed", "message"),
    [
        (
            {},
            {KERNEL: "ARCHS = [90]\n"},
            rf"{KERNEL}, changed by vllm/archs, vllm/more-archs: the wheel has sha256 \w+, the source",
        ),
        ({}, {KERNEL: None}, rf"{KERNEL}, .*: the wheel has no such file, the source sha256 \w+, after"),
        (ADDS, {"vllm/new.py": "\n"}, "vllm/new.py, .*: the wheel has sha256 \\w+, the source no such file"),
    ],
)
def test_patch_for_another_wheel_is_refused(
    change: dict[str, str | None], changed: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    tree = make_tree(tmp_path / "repository", (*PATCHES, ("last", change)))
    with pytest.raises(PatchConflict, match=message) as caught:
        write_patched_members("vllm", tree, make_wheel(tmp_path, **changed), tmp_path / "files")
    assert "do not fit vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl" in caught.value.message
    assert not (tmp_path / "files").exists(), "nothing is replaced"


def test_digest_covers_source_series_and_wheel(tree: PatchedTree) -> None:
    digest = make_plan(tree).digest
    assert make_plan(replace(tree, commit="5" * 40), replaced=patched_members("vllm", tree)).digest != digest
    assert make_plan(tree, official=locked("b")).digest != digest
    assert make_plan(tree, replaced=[KERNEL, OTHER]).digest != digest
    assert make_plan(tree, recipe=recipes.load_engine("vllm-0.19.1")).digest != digest
    assert make_plan(tree, replaced=[KERNEL]).digest == digest
