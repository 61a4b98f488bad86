"""A wheel as the source of an engine's patch series: its import as a commit, rejected wheels, and the recipe that pins it."""

from __future__ import annotations

import hashlib
import re
import stat
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from zip_bombs import wheel as zip_bomb

from sm120kit import recipes
from sm120kit.core.errors import BadInput, FetchFailed, Mismatch, NotTrusted, OfflineMiss, Sm120kitError
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.recipes import target as targets
from sm120kit.sources import Origin, fetch
from sm120kit.sources.git import Repository
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import Checkout, WheelPin
from sm120kit.wheels import _from_source

NAME = "demo-1.0-cp311-cp311-linux_x86_64.whl"
METADATA = "demo-1.0.dist-info/METADATA"
GOOD: dict[str, tuple[bytes, int]] = {
    "demo/__init__.py": (b"VERSION = 1\r\n", 0o644),
    "demo/run.sh": (b"#!/bin/sh\n", 0o755),
    "demo/_core.so": (b"\x7fELF\0", 0o755),
    METADATA: (b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n", 0o644),
}
TREE = "16f2eae1a6d88a57c740ca43ed4c2825e49bf22d"
ENGINE = recipes.path_of("sglang-0.5.23")
SOURCE = '[source]\nwheel = "sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl"\nsha256 = "{}"\n'.format("0" * 64)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "state")


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    directory = tmp_path / "shelf"
    directory.mkdir()
    return directory


def pin_of(wheel: Path) -> WheelPin:
    return WheelPin("demo", "demo", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.name)


def put(shelf: Path, members: dict[str, tuple[bytes, int]], *more: zipfile.ZipInfo) -> WheelPin:
    """Write a wheel without compression, whose output depends on the version of zlib."""
    with zipfile.ZipFile(shelf / NAME, "w") as wheel:
        for name, (content, mode) in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFREG | mode) << 16
            wheel.writestr(info, content)
        for info in more:
            wheel.writestr(info, b"x")
    return pin_of(shelf / NAME)


def member(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def test_checkout_has_members_of_wheel(workspace: Workspace, shelf: Path, tmp_path: Path) -> None:
    checkout = fetch(put(shelf, GOOD, member("demo/empty/", stat.S_IFDIR | 0o755)), workspace, Origin(str(shelf)))
    repository = Repository(checkout.repository)
    listed = repository.git("ls-tree", "-r", checkout.commit).stdout.splitlines()
    assert {line.split("\t")[1]: line.split()[0] for line in listed} == {
        "demo/__init__.py": "100644",
        "demo/_core.so": "100755",
        "demo/run.sh": "100755",
        METADATA: "100644",
    }
    assert {name: repository.read(checkout.commit, name) for name in GOOD} == {
        name: content for name, (content, _) in GOOD.items()
    }
    assert repository.git("fsck", "--strict").returncode == 0
    assert checkout.tree == TREE, "the same on every machine"
    write_record(tmp_path / "checkout.json", checkout)
    assert read_record(Checkout, tmp_path / "checkout.json") == checkout


def test_second_fetch_and_download_need_no_index(workspace: Workspace, shelf: Path, tmp_path: Path) -> None:
    pin = put(shelf, GOOD)
    checkout = fetch(pin, workspace, Origin(str(shelf)))
    assert fetch(pin, workspace, Origin(offline=True)) == checkout
    assert fetch(pin, Workspace.open(tmp_path / "other"), Origin(str(workspace.downloads), offline=True)).tree == TREE


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (member("demo/../../evil"), "has '..' in its path"),
        (member("/etc/evil"), "has an absolute path"),
        (member("demo/.git"), "is reserved by git"),
        (member("demo/run.sh/evil"), "is below 'demo/run.sh', which is not a directory"),
        (member("demo/evil", stat.S_IFLNK | 0o777), "is a link or special file, which a wheel cannot contain"),
        (member("demo/evil", stat.S_IFIFO | 0o644), "is a link or special file"),
    ],
)
def test_unsafe_member_is_rejected(workspace: Workspace, shelf: Path, info: zipfile.ZipInfo, problem: str) -> None:
    with pytest.raises(NotTrusted, match=re.escape(problem)) as caught:
        fetch(put(shelf, GOOD, info), workspace, Origin(str(shelf)))
    assert repr(info.filename) in caught.value.message
    assert not list(workspace.checkouts.iterdir())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_member_is_rejected(workspace: Workspace, shelf: Path) -> None:
    with pytest.raises(NotTrusted, match=r"'demo/run\.sh' occurs twice"):
        fetch(put(shelf, GOOD, member("demo/run.sh")), workspace, Origin(str(shelf)))


@pytest.mark.parametrize("damage", ["a byte of a file", "encrypted", "cut", "no archive"])
def test_damaged_wheel_is_rejected(workspace: Workspace, shelf: Path, damage: str) -> None:
    put(shelf, GOOD)
    content = bytearray((shelf / NAME).read_bytes())
    if damage == "a byte of a file":
        content[content.index(b"VERSION")] ^= 1
    elif damage == "encrypted":
        content[content.index(b"PK\x01\x02") + 8] |= 1
    elif damage == "cut":
        del content[-30:]
    else:
        content[:] = b"<html>"
    (shelf / NAME).write_bytes(content)
    with pytest.raises((NotTrusted, BadInput), match="encrypted" if damage == "encrypted" else f"{re.escape(NAME)} is damaged"):
        fetch(pin_of(shelf / NAME), workspace, Origin(str(shelf)))
    assert not list(workspace.checkouts.iterdir())


@pytest.mark.parametrize(("stated", "error"), [(None, BadInput), (10, NotTrusted)])
def test_wheel_that_unpacks_to_too_much_is_rejected(
    workspace: Workspace, shelf: Path, stated: int | None, error: type[Sm120kitError]
) -> None:
    """Honest or not in its header."""
    (shelf / NAME).write_bytes(zip_bomb("demo/zeros", 1 if stated else 65, stated))
    with pytest.raises(error):
        fetch(pin_of(shelf / NAME), workspace, Origin(str(shelf)))
    assert not list(workspace.checkouts.iterdir())


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (b"Name: demo\nVersion: 1.1\n", "has demo 1.1 in demo-1.0.dist-info/METADATA; the recipe has demo 1.0"),
        (b"Name: other\nVersion: 1.0\n", "has other 1.0 in"),
        (None, "has no name and version in demo-1.0.dist-info/METADATA"),
    ],
)
def test_wheel_of_another_release_is_rejected(workspace: Workspace, shelf: Path, metadata: bytes | None, problem: str) -> None:
    members = {name: entry for name, entry in GOOD.items() if name != METADATA}
    with pytest.raises(Mismatch, match=re.escape(problem)):
        fetch(put(shelf, members | ({METADATA: (metadata, 0o644)} if metadata else {})), workspace, Origin(str(shelf)))


def test_missing_or_replaced_wheel_is_named(workspace: Workspace, shelf: Path) -> None:
    pin = put(shelf, GOOD)
    with pytest.raises(OfflineMiss, match=r"demo 1\.0 is not cached") as offline:
        fetch(pin, workspace, Origin(offline=True))
    assert f"copy its wheel to {workspace.downloads / pin.sha256}/" in offline.value.hint
    with pytest.raises(FetchFailed, match=r"no demo-1\.0-cp312-.*\.whl of demo 1\.0 at any configured location"):
        fetch(replace(pin, filename=NAME.replace("cp311", "cp312")), workspace, Origin(str(shelf)))
    with pytest.raises(NotTrusted, match="is pinned to sha256 0000"):
        fetch(replace(pin, sha256="0" * 64), workspace, Origin(str(shelf)))


# Recipes


def written(directory: Path, old: str = "", new: str = "") -> Path:
    """The recipe of an engine with a wheel as its source, and ``old`` replaced in it."""
    text = f"{ENGINE.read_text()}\n{SOURCE}"
    assert old in text
    path = directory / ENGINE.name
    path.write_text(text.replace(old, new, 1) if old else text)
    return path


def test_recipe_pins_wheel(tmp_path: Path) -> None:
    recipe = recipes.load_engine(str(written(tmp_path)))
    assert recipe.pin == WheelPin("sglang", "sglang", "0.5.23", "0" * 64, "sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl")
    assert recipe.inputs()["source"]["sha256"] == "0" * 64, "an input of the lockfile"
    assert "source" not in recipes.load_engine("sglang-0.5.23").inputs(), "other lockfiles stay as they are"


FROM_SOURCE = f"""[from_source]
sha256 = "{"0" * 64}"
environment = []
targets.m = {{ member = "m.so", units = ["m.cu"] }}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sglang-0.5.23-cp312", "sglang-0.5.22-cp312", "is not a wheel of sglang 0.5.23"),
        ("sglang-0.5.23-cp312", "vllm-0.5.23-cp312", "is not a wheel of sglang 0.5.23"),
        (
            '_x86_64.whl"',
            '_x86_64.tar.gz"',
            "x86_64.tar.gz' is not the file name of a wheel",
        ),
        ("0" * 64, "0" * 63, f"source.sha256: '{'0' * 63}' is not a sha256"),
        ("wheel = ", "whel = ", "source.whel: unknown key; did you mean 'wheel'?"),
        (SOURCE, SOURCE + FROM_SOURCE, "source: set, but from_source has the engine's sdist"),
    ],
)
def test_problem_of_source_is_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        recipes.load(str(written(tmp_path, old, new)))


def test_commit_takes_the_place_of_the_sdist_and_builds_no_extension(tmp_path: Path, workspace: Workspace) -> None:
    commit = f'[source]\ngit = "https://git.example.invalid/x.git"\ncommit = "{"0" * 40}"\n'
    target = targets.resolve(str(written(tmp_path, SOURCE, commit + FROM_SOURCE)), Options(workspace))
    assert isinstance(target, targets.EngineTarget)
    assert target.recipe.from_source and target.recipe.pin is None
    with pytest.raises(BadInput, match="source has a commit, whose Python files are packed"):
        _from_source.require_source(target)


def test_wheel_as_source_builds_no_extension(tmp_path: Path, workspace: Workspace) -> None:
    target = targets.resolve(str(written(tmp_path)), Options(workspace))
    assert isinstance(target, targets.EngineTarget)
    with pytest.raises(Sm120kitError, match="has nothing that can be built from source"):
        _from_source.require_source(target)
