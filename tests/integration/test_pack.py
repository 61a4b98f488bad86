"""Wheels of patched trees: version, compiled modules, and the backend's wheel that serves trees with other headers."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from patch_series import checkout_of, trees

from sm120kit import patches, recipes
from sm120kit.core.errors import CheckFailed
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.wheels import pack
from sm120kit.wheels._plan import BuildEnvironment, Selection, plan_flashinfer
from sm120kit.wheels.build_records import NO_TOOLCHAIN, BuildPlan

RECIPE = recipes.load_flashinfer("flashinfer-0.6.6")
HEADER = "include/scale.cuh"
BACKEND = """\
import os, pathlib, shutil
from setuptools.build_meta import *
from setuptools import build_meta

def build_wheel(*arguments, **settings):
    shutil.copytree("include", "flashinfer/data/include")
    installs = not (os.environ.get("BUILD_NVEP") == "0" and os.environ.get("FLASHINFER_BUILD_NO_PIP") == "1")
    pathlib.Path("flashinfer/data/installs.txt").write_text(str(installs))
    return build_meta.build_wheel(*arguments, **settings)
"""
FILES = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    '[project]\nname = "flashinfer-python"\nversion = "0.6.6"\n'
    '[tool.setuptools]\npackages = ["flashinfer"]\npackage-data = {flashinfer = ["data/**"]}\n',
    "backend.py": BACKEND,
    "flashinfer/__init__.py": "from flashinfer._build_meta import __version__\n",
    "flashinfer/_build_meta.py": '__version__ = "0.6.6"\n',
    HEADER: "#define LAUNCHES 1\n",
    "include/twin/one.h": "same\n",
    "include/other/one.h": "same\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(checkout_of(tmp_path / "r", FILES).repository)


def tree_of(repository: Repository, change: dict[str, str]) -> PatchedTree:
    (tree,) = trees(repository, {**FILES, **change})
    checkout = checkout_of(repository.path, FILES)
    return PatchedTree(checkout, (), repository.commit_tree(tree, None, "patched"), tree, ())


def packed(tree: PatchedTree, work: Path, libraries: dict[str, Path] | None = None) -> tuple[BuildPlan, Path]:
    """The plan and the wheel of a tree, packed in ``work``."""
    plan = plan_flashinfer(Selection(RECIPE, RECIPE.archs, "none"), tree, (), BuildEnvironment(NO_TOOLCHAIN, {}), ())
    patches.materialise(tree, work / "tree")
    out = work / "out" / tree.tree
    out.mkdir(parents=True, exist_ok=True)
    return plan, pack.pack_wheel(plan, tree, libraries or {}, out, work, {"recipe": RECIPE.name})


@pytest.mark.parametrize(
    ("digest", "label"),
    [
        ("0123456789ab" * 5, "0123456789ab"),
        ("9" * 64, "9" * 12),
        ("012345678901" * 5, "p012345678901"),
        ("0" * 64, "p" + "0" * 12),
    ],
)
def test_installers_do_not_change_our_version(digest: str, label: str) -> None:
    version = pack.local_version("0.6.6", digest)
    assert version == f"0.6.6+sm120kit.{label}" == str(Version(version))
    assert SpecifierSet("==0.6.6").contains(version)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def record_hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_wheel_has_our_version_and_modules(repository: Repository, tmp_path: Path) -> None:
    library = tmp_path / "m.so"
    library.write_bytes(b"\x7fELF")
    plan, wheel = packed(tree_of(repository, {}), tmp_path / "work", {pack.member_of("m"): library})
    version = pack.local_version(plan.version, plan.digest)
    assert wheel.name.startswith(f"flashinfer_python-{version}-py3-none-linux_")
    members, info = contents(wheel), f"flashinfer_python-{version}.dist-info"
    assert members["flashinfer/_build_meta.py"].decode() == f'__version__ = "{version}"\n'
    assert f"\nVersion: {version}\n" in members[f"{info}/METADATA"].decode()
    assert b"Root-Is-Purelib: false" in members[f"{info}/WHEEL"] and b"Tag: py3-none-linux_" in members[f"{info}/WHEEL"]
    assert members["flashinfer/data/aot/m/m.so"] == b"\x7fELF"
    changed = ["flashinfer/_build_meta.py", "flashinfer/data/aot/m/m.so"]
    assert json.loads(members[f"{info}/sm120kit.json"]) == {"recipe": RECIPE.name, "changed": changed}
    assert members["flashinfer/data/installs.txt"] == b"False"  # the backend changes no environment
    rows = {path: value for path, value, _ in csv.reader(members[f"{info}/RECORD"].decode().splitlines())}
    assert rows == {name: "" if name.endswith("/RECORD") else record_hash(content) for name, content in members.items()}


def test_record_lists_changed_members_and_the_plain_wheel_is_kept_for_its_tree(repository: Repository, tmp_path: Path) -> None:
    work = tmp_path / "work"
    _, plain = packed(tree_of(repository, {}), work)
    before = plain.read_bytes()
    (kept,) = (work / "plain").rglob("*.whl")
    written = kept.stat().st_mtime_ns
    _, again = packed(tree_of(repository, {}), work)
    assert again.read_bytes() == before and kept.stat().st_mtime_ns == written
    _, wheel = packed(tree_of(repository, {"include/scale.cuh": "// changed\n"}), work)
    (record,) = (json.loads(text) for name, text in contents(wheel).items() if name.endswith("/sm120kit.json"))
    assert record["changed"] == ["flashinfer/_build_meta.py", "flashinfer/data/include/scale.cuh"]
    assert contents(wheel)["flashinfer/data/include/scale.cuh"] == b"// changed\n"


def test_version_that_cannot_be_set(repository: Repository, tmp_path: Path) -> None:
    tree = tree_of(repository, {"flashinfer/_build_meta.py": "version = 1\n", "flashinfer/__init__.py": ""})
    with pytest.raises(CheckFailed, match="in 0 lines"):
        packed(replace(tree), tmp_path / "work")
