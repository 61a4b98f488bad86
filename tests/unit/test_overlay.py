"""What an engine's series changes in its own package goes into its official wheel, and nothing else does."""

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

from sm120kit import plan, recipe
from sm120kit.build import finish_overlay, lay, overlaid
from sm120kit.build.finishing import repacked
from sm120kit.errors import PatchConflict
from sm120kit.gitrepo import Repository
from sm120kit.records import AppliedPatch, BuildPlan, Checkout, LockedWheel, PatchedTree, SdistPin
from sm120kit.workspace import read_record

ITEM = recipe.load_engine("vllm-0.20.0")
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
    "vllm/_C.abi3.so": "theirs",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n",
    f"{INFO}/RECORD": "",
}


def patched(path: Path, patches: tuple[tuple[str, dict[str, str | None]], ...] = PATCHES) -> PatchedTree:
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
    return patched(tmp_path / "repository")


def make_wheel(directory: Path, **changed: str | None) -> Path:
    path = directory / "vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**WHEEL, **changed}.items():
            if text is not None:
                archive.writestr(name, text)
    return path


def planned(tree: PatchedTree, **changed: Any) -> BuildPlan:
    given = {"item": ITEM, "tree": tree, "official": locked(), "replaced": overlaid("vllm", tree)}
    return plan.overlay(**(given | changed))


def locked(digit: str = "a") -> LockedWheel:
    return LockedWheel("vllm", "0.20.0", "vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl", digit * 64)


def test_only_files_of_the_package_are_overlaid(tree: PatchedTree) -> None:
    assert {path: [patch.slug for patch in patches] for path, patches in overlaid("vllm", tree).items()} == {
        KERNEL: ["archs", "more-archs"]
    }


def test_a_series_of_build_files_replaces_nothing(tmp_path: Path) -> None:
    assert overlaid("vllm", patched(tmp_path / "repository", PATCHES[:1])) == {}


def test_the_wheel_has_the_patched_files_and_says_so(tree: PatchedTree, tmp_path: Path) -> None:
    official, made = make_wheel(tmp_path), planned(tree)
    places = lay("vllm", tree, official, tmp_path / "files")
    artifacts = finish_overlay(made, tree, (locked(), official), places, tmp_path / "target")
    version = f"0.20.0+sm120kit.{made.digest[:12]}"
    assert artifacts.wheel.path == f"vllm-{version}-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(tmp_path / "target" / artifacts.wheel.path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = f"vllm-{version}.dist-info"
    changed = {name for name, text in WHEEL.items() if not name.startswith(INFO) and files[name] != text.encode()}
    assert changed == {KERNEL} and files[KERNEL] == b"ARCHS = [100, 120, 121]\n"
    assert f"Version: {version}\n".encode() in files[f"{info}/METADATA"]
    rows = {row[0]: row[1:] for row in csv.reader(files[f"{info}/RECORD"].decode().splitlines())}
    assert rows == {
        name: ["sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), str(len(data))]
        for name, data in files.items()
    } | {f"{info}/RECORD": ["", ""]}
    said = json.loads(files[f"{info}/sm120kit.json"])
    assert [patch["slug"] for patch in said["patches"]] == ["archs", "more-archs"], "the third changes nothing in it"
    sums = {"official": WHEEL[KERNEL], "here": "ARCHS = [100, 120, 121]\n"}
    assert said["replaced"] == {KERNEL: {key: hashlib.sha256(text.encode()).hexdigest() for key, text in sums.items()}}
    assert said["official"] == {"wheel": locked().filename, "sha256": "a" * 64}
    assert said["plan"] == made.digest and said["toolchain"] == {"nvcc": "none", "host": "none"}
    assert read_record(BuildPlan, tmp_path / "target" / "plan.json") == made


def test_a_wheel_with_extensions_says_the_same_of_patched_files(tree: PatchedTree, tmp_path: Path) -> None:
    official, library = make_wheel(tmp_path), tmp_path / "ours.so"
    library.write_bytes(b"ours")
    places = {**lay("vllm", tree, official, tmp_path / "files"), "vllm/_C.abi3.so": library}
    said = repacked(planned(tree), tree, (locked(), official), places)["replaced"]
    assert isinstance(said, dict) and sorted(said) == ["vllm/_C.abi3.so", KERNEL]


ADDS: dict[str, str | None] = {"vllm/new.py": "\n"}
REMOVES: dict[str, str | None] = {OTHER: None}


@pytest.mark.parametrize(
    ("change", "changed", "said"),
    [
        (
            {},
            {KERNEL: "ARCHS = [90]\n"},
            rf"{KERNEL}, changed by vllm/archs, vllm/more-archs: the wheel has sha256 \w+, the source",
        ),
        ({}, {KERNEL: None}, rf"{KERNEL}, .*: the wheel has no such file, the source sha256 \w+, after"),
        (
            ADDS,
            {},
            "vllm/new.py, changed by vllm/last: the wheel has no such file, the source no such file, after the patches sha256",
        ),
        (ADDS, {"vllm/new.py": "\n"}, "vllm/new.py, .*: the wheel has sha256 \\w+, the source no such file"),
        (REMOVES, {}, rf"{OTHER}, changed by vllm/last: .* after the patches no such file"),
    ],
)
def test_a_patch_that_was_not_made_for_this_wheel(
    change: dict[str, str | None], changed: dict[str, str | None], said: str, tmp_path: Path
) -> None:
    tree = patched(tmp_path / "repository", (*PATCHES, ("last", change)))
    with pytest.raises(PatchConflict, match=said) as caught:
        lay("vllm", tree, make_wheel(tmp_path, **changed), tmp_path / "files")
    assert "do not fit vllm-0.20.0-cp38-abi3-manylinux_2_35_x86_64.whl" in caught.value.message
    assert not (tmp_path / "files").exists(), "nothing is replaced"


def test_the_digest_covers_source_series_and_wheel(tree: PatchedTree) -> None:
    digest = planned(tree).digest
    assert planned(replace(tree, commit="5" * 40), replaced=overlaid("vllm", tree)).digest != digest
    assert planned(tree, official=locked("b")).digest != digest
    assert planned(tree, replaced=[KERNEL, OTHER]).digest != digest
    assert planned(tree, item=recipe.load_engine("vllm-0.19.1")).digest != digest
    assert planned(tree, replaced=[KERNEL]).digest == digest
