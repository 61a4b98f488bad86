"""Entries of the state directory: references to them, disk usage, and removal while no other command runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.core.disk import size
from sm120kit.core.errors import Mismatch, NotFound, NotTrusted, Sm120kitError
from sm120kit.core.temporary import TEMPORARY, owned_directory, publish_directory
from sm120kit.core.workspace import Workspace
from sm120kit.images import state_entries
from sm120kit.images.oci import LAYER, Layout
from sm120kit.recipes import lockfile
from sm120kit.sources import _download
from sm120kit.sources.source_records import LockedWheel

NAME = "flashinfer-0.6.6"
RECIPE = recipes.load_flashinfer(NAME)
ENGINE = "vllm-0.19.1"
LOCK = lockfile.read(recipes.lock_path(recipes.locate(NAME)))
TREE = LOCK.sources[0].tree
NO_TREE = "9" * 40
ABSENT = "a" * 64
DAY = 24 * 3600.0


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("sm120kit.serving.server_containers.in_use", frozenset)  # docker lists no server
    Workspace.open()
    return Workspace.at()


def fill(directory: Path, size: int = 10_000, name: str = "file") -> Path:
    """Create a directory with a file of ``size`` bytes."""
    directory.mkdir(parents=True)
    (directory / name).write_bytes(b"x" * size)
    return directory


def age(*entries: Path, days: float = 40) -> None:
    """Set the time of last use of entries and the files in them."""
    for entry in entries:
        for path in (*entry.rglob("*"), entry):
            os.utime(path, (time.time() - days * DAY,) * 2)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cache", *arguments])


def remaining(workspace: Workspace) -> set[str]:
    return {entry.name for entry in state_entries.entries(workspace.root)}


# ---- names


def test_docs_page_lists_the_kinds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == [kind.name for kind in state_entries.KINDS]


def test_foreign_names_are_not_entries(workspace: Workspace) -> None:
    """For example, if a home directory is given as the state directory by mistake."""
    names = ["downloads/film.mkv", "work/thesis", "build/app/main", "images/cat", "caches/x", "runs/today", "checkouts/a"]
    for name in [*names, "bases/songs", "oci/compressed/x"]:
        fill(workspace.root / name)
    (workspace.downloads / ABSENT).symlink_to(workspace.root / "work")
    assert state_entries.entries(workspace.root) == []


def test_hidden_names_are_temporary(workspace: Workspace) -> None:
    fill(workspace.checkouts / ".flashinfer.x")
    (workspace.downloads / ".wheel-torch.y").parent.mkdir()
    (workspace.downloads / ".wheel-torch.y").touch()
    fill(workspace.build("flashinfer", ".digest.z"))
    (fill(workspace.root / "scratch" / "abc") / TEMPORARY).touch()
    assert [entry.kind for entry in state_entries.entries(workspace.root)] == ["temporary"] * 4
    with owned_directory(workspace.root / "scratch", ""), publish_directory(workspace.build("flashinfer", ABSENT)) as temporary:
        (temporary / "file").touch()
        assert len(state_entries.entries(workspace.root)) == 3, "two have owners, one of them in the place of an abandoned one"


def test_sizes_are_disk_usage_and_count_hard_links_once(workspace: Workspace) -> None:
    wheel = fill(workspace.downloads / ABSENT, 1_000_000) / "file"
    image = workspace.root / "images" / ABSENT
    image.mkdir(parents=True)
    os.link(wheel, image / "wheel")
    first, second = state_entries.entries(workspace.root)
    assert (first.kind, second.kind) == ("downloads", "images")
    small, large = sorted(state_entries.sizes([first, second]))
    assert large >= 1_000_000 > 20_000 > small, "a hard link counts once"
    assert state_entries.freed([first]) < 20_000 and state_entries.freed([second]) < 20_000, "the file stays"
    assert state_entries.freed([first, second]) >= 1_000_000
    (usage, *_) = state_entries.usage([first, second])
    assert usage["kind"] == "downloads" and usage["bytes"] == large


@pytest.mark.parametrize(
    ("bytes_", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1 kB"), (5_230_000_000, "5.2 GB"), (123_456_789, "123 MB")]
)
def test_size_for_humans(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


# ---- commands


def test_clean_removes_what_was_not_used_for_30_days(workspace: Workspace) -> None:
    kept, gone = fill(workspace.work(f"{NAME}-sm_120f")), fill(workspace.work("flashinfer-0.0.1-none"), 2_000_000)
    tree = fill(workspace.cache / "trees" / TREE)
    (index := workspace.cache / "trees" / f".{TREE}.index").touch()
    record = fill(workspace.root / "runs", name="run-20260101T000000Z-1.json") / "run-20260101T000000Z-1.json"
    age(gone, tree, record)
    age(kept, days=20)
    result = run("--clean", "--dry-run")
    assert result.exit_code == 0 and "would remove 2 entries, 2.0" in result.stdout
    assert gone.is_dir() and tree.is_dir()
    report = json.loads(run("--clean", "--json").stdout)
    assert [entry["name"] for entry in report["entries"]] == [TREE, gone.name]
    assert report["bytes"] >= 2_000_000 and not report["dry_run"]
    assert kept.is_dir() and record.is_file() and not gone.exists() and not tree.exists() and not index.exists()
    assert not [path for path in workspace.root.rglob(".*") if path.name != ".gitignore"]


def test_clean_removes_by_kind_and_age(workspace: Workspace) -> None:
    old, new = fill(workspace.downloads / ("1" * 64)), fill(workspace.downloads / ("2" * 64))
    emulation = fill(workspace.cache / "emulate" / ("3" * 64))
    record = fill(workspace.root / "runs", name="run-20260101T000000Z-1.json") / "run-20260101T000000Z-1.json"
    age(old, emulation, record)
    for arguments, removed in (
        (("--clean", "builds"), set()),
        (("--clean", "downloads", "--older", "60d"), set()),
        (("--clean", "downloads", "--older", "30d", "--dry-run"), set()),
        (("--clean", "downloads", "--older", "4w"), {old.name}),
        (("--clean", "--older", "900h"), {emulation.name}),
        (("--clean", "--older", "0h"), {new.name}),
        (("--clean", "records"), {record.name}),
    ):
        before = remaining(workspace)
        result = run(*arguments)
        assert result.exit_code == 0, result
        assert before - remaining(workspace) == removed, arguments
    assert remaining(workspace) == set()


def test_what_tagged_images_have_is_kept(workspace: Workspace) -> None:
    layout = Layout(workspace.root / "oci")
    shared, own, loose = (layout.add_blob(content * 1000, LAYER) for content in (b"s", b"o", b"l"))
    labels = [{"Labels": {"sm120kit.context": digit * 64}} for digit in "34"]
    settings = [{"os": "linux", "architecture": "amd64", "config": each} for each in labels]
    tagged, untagged = (layout.add_image(*image) for image in zip([[shared], [shared, own]], settings, strict=True))
    layout.tag(tagged.digest, "name:tag")
    contexts = [fill(workspace.root / "images" / (digit * 64)) for digit in "34"]
    (workspace.root / "oci" / "partial" / "killed").mkdir()
    run("--clean")
    assert layout.has(loose.digest) and len(layout.images()) == 2
    assert run("--clean", "blobs", "--dry-run").stdout.splitlines()[-1].startswith("would remove 4 entries")
    assert len(layout.images()) == 2
    run("--clean", "--older", "0h")
    assert layout.images() == [(layout.find("name:tag"), ("name:tag",))] and not layout.has(own.digest)
    assert not layout.has(loose.digest) and layout.find(untagged.digest) is None
    assert not [*(workspace.root / "oci" / "partial").iterdir()]
    assert [context.is_dir() for context in contexts] == [True, False]
    layout.verify(tagged.digest)
    layout.path(tagged.digest).write_bytes(b"damaged")
    assert isinstance(run("--clean", "blobs").exception, Mismatch), "nothing is removed"
    assert layout.has(shared.digest)


def test_image_rm_keeps_what_other_images_have(workspace: Workspace) -> None:
    """A tag goes first; the image goes with its last tag, and by id at once, but not a layer that another image has."""
    layout = Layout(workspace.root / "oci")
    shared, own = (layout.add_blob(content * 100_000, LAYER) for content in (b"s", b"o"))
    settings = {"os": "linux", "architecture": "amd64"}
    first, second = (layout.add_image(layers, settings) for layers in ([shared, own], [shared]))
    for digest, tags in ((first.digest, ("a:1", "a:2")), (second.digest, ("b:1", "b:2"))):
        for tag in tags:
            layout.tag(digest, tag)
    unpacked = {
        blob.digest: fill(workspace.root / "oci-unpacked" / blob.digest.removeprefix("sha256:")) for blob in (shared, own)
    }

    def rm(*references: str) -> Any:
        return CliRunner().invoke(app, ["image", "rm", *references])

    refused = rm("a:1", "none:1")
    assert isinstance(refused.exception, NotFound) and "none:1" in refused.exception.message
    assert "a:1" not in refused.exception.message and len(layout.images()) == 2 and layout.find("a:1")

    assert json.loads(rm("a:1", "--json").stdout) == {"untagged": ["a:1"], "removed": [], "bytes": 0}
    layout.verify(first.digest)
    assert layout.find("a:1") is None and layout.find("a:2")

    removed = json.loads(rm("a:2", layout.image(first.digest).id, "--json").stdout)
    assert (removed["untagged"], removed["removed"]) == (["a:2"], [first.digest])
    assert removed["bytes"] >= 100_000 + 10_000
    assert not layout.has(own.digest) and not unpacked[own.digest].exists()
    assert unpacked[shared.digest].is_dir() and [tags for _, tags in layout.images()] == [("b:1", "b:2")]
    layout.verify(second.digest)

    lines = rm(second.digest).stdout.splitlines()
    assert lines[:3] == ["untagged b:1", "untagged b:2", f"removed {second.digest}"]
    assert layout.images() == [] and not [*(workspace.root / "oci" / "blobs" / "sha256").iterdir()]
    assert not unpacked[shared.digest].exists()


def test_image_rm_removes_a_damaged_image(workspace: Workspace) -> None:
    layout = Layout(workspace.root / "oci")
    image = layout.add_image([], {"os": "linux", "architecture": "amd64"})
    layout.tag(image.digest, "a:1")
    layout.path(image.digest).write_bytes(b"damaged")
    assert CliRunner().invoke(app, ["image", "rm", "a:1"]).exit_code == 0
    assert layout.images() == [] and not layout.has(image.digest)


def test_image_rm_removes_two_damaged_images_at_once(workspace: Workspace) -> None:
    layout = Layout(workspace.root / "oci")
    for number in range(2):
        layer = layout.add_blob(f"{number}".encode(), LAYER)
        image = layout.add_image([layer], {"os": "linux", "architecture": "amd64"})
        layout.tag(image.digest, f"a:{number}")
        layout.path(image.digest).write_bytes(b"damaged")
    result = CliRunner().invoke(app, ["image", "rm", "a:0", "a:1"])
    assert result.exit_code == 0, result
    assert layout.images() == []


def test_cached_download_updates_its_time_of_last_use(workspace: Workspace) -> None:
    sha256 = hashlib.sha256(b"x" * 10).hexdigest()
    directory = fill(workspace.downloads / sha256, 10)
    age(directory)
    (entry,) = state_entries.entries(workspace.root)
    assert state_entries.removable(workspace.root, [entry], 30 * DAY)
    assert _download.cached(LockedWheel("q", "1", "file", sha256), workspace.downloads)
    (entry,) = state_entries.entries(workspace.root)
    assert not state_entries.removable(workspace.root, [entry], 30 * DAY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--clean", "--older", "30"), "'30' is not an age"),
        (("--clean", "--older", "-1d"), "'-1d' is not an age"),
        (("--clean", "download"), "did you mean 'downloads'"),
    ],
)
def test_clean_refuses_invalid_arguments(arguments: tuple[str, ...], message: str, workspace: Workspace) -> None:
    fill(workspace.downloads / ABSENT)
    result = run(*arguments)
    assert result.exit_code == 2 or isinstance(result.exception, NotFound)
    assert message in (result.stderr or str(result.exception))
    assert remaining(workspace) == {ABSENT}


@pytest.mark.parametrize("arguments", [("--clean",), ("--clean", "--older", "0h")])
def test_removal_in_a_directory_that_is_no_state_directory_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    directory = fill(tmp_path / "home" / "downloads" / ABSENT)
    result = run(*arguments, "--state", str(tmp_path / "home"))
    assert isinstance(result.exception, NotTrusted)
    assert isinstance(run(*arguments, "--dry-run", "--state", str(tmp_path / "home")).exception, NotTrusted)
    assert directory.is_dir() and not (tmp_path / "home" / "locks").exists()


@pytest.mark.parametrize("arguments", [("--clean",), ("--clean", "--older", "0h")])
def test_nothing_is_removed_through_a_link(arguments: tuple[str, ...], workspace: Workspace, tmp_path: Path) -> None:
    mine = fill(tmp_path / "mine" / ABSENT)
    emulated = fill(tmp_path / "data" / "emulate" / ABSENT)
    workspace.downloads.symlink_to(mine.parent)
    workspace.cache.symlink_to(tmp_path / "data")
    assert run(*arguments).exit_code == 0
    assert (mine / "file").is_file() and (emulated / "file").is_file()


@pytest.mark.parametrize("arguments", [("--clean",), ("--clean", "--older", "30d")])
def test_nothing_is_removed_before_the_first_command(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*arguments, "--state", str(tmp_path / "new"))
    assert (result.exit_code, result.stdout) == (0, "removed 0 entries, 0 B\n"), result.output
    assert not (tmp_path / "new").exists()


def test_sizes_are_printed_by_kind(workspace: Workspace) -> None:
    fill(workspace.downloads / ABSENT, 3_000_000)
    fill(workspace.cache / "emulate" / ABSENT)
    output = run().stdout
    (line,) = [line for line in output.splitlines() if "downloads" in line]
    assert line.split()[-5:] == ["3.0", "MB", "within", "the", "hour"]
    report = json.loads(run("--json").stdout)
    kinds = {row["kind"]: row for row in report["kinds"]}
    assert set(kinds) == {kind.name for kind in state_entries.KINDS}
    assert kinds["downloads"]["entries"] == 1 and kinds["downloads"]["bytes"] >= 3_000_000
    assert report["bytes"] == sum(row["bytes"] for row in kinds.values())


def test_info_of_a_missing_directory(tmp_path: Path) -> None:
    result = run("--state", str(tmp_path / "none"))
    assert result.exit_code == 0 and "0 B in" in result.stdout
    assert not (tmp_path / "none").exists()


# ---- other commands at the same time

HOLDER = """
import time
from sm120kit.core import console, reporting
from sm120kit.core.workspace import Workspace
with reporting.use(console):
    workspace = Workspace.open()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("command", ["cache --clean --older 0h", "image rm absent"])
def test_removal_waits_for_running_commands(workspace: Workspace, command: str) -> None:
    fill(workspace.downloads / ABSENT)
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        waiting = subprocess.Popen([sys.executable, "-m", "sm120kit", *command.split()], stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        message = waiting.stderr.readline()
        assert message.startswith(f"waiting for other commands that use {workspace.root} (process {holder.pid} of user ")
        assert remaining(workspace) == {ABSENT}
        holder.kill()
        assert waiting.wait(timeout=60) == (0 if command.startswith("cache") else NotFound.exit_code)
        waiting.stderr.close()
    assert remaining(workspace) == (set() if command.startswith("cache") else {ABSENT})


def test_command_waits_for_a_removal(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    with workspace.maintenance():
        other = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert other.stdout is not None and other.stderr is not None
        assert "waiting for `sm120kit cache`" in other.stderr.readline()
        assert other.poll() is None
    assert other.stdout.readline() == "ready\n"
    other.kill()
    other.communicate()


def test_interrupted_removal_is_completed_by_the_next(workspace: Workspace) -> None:
    directory = fill(workspace.downloads / ABSENT)
    directory.rename(directory.with_name(f".{ABSENT}.123"))
    assert run("--clean").exit_code == 0
    assert not list(workspace.downloads.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_error_names_an_entry_that_cannot_be_removed(workspace: Workspace) -> None:
    directory = fill(workspace.root / "caches" / "0123456789abcdef" / "root")
    directory.chmod(0o500)
    result = run("--clean", "servers")
    assert isinstance(result.exception, Sm120kitError) and "cannot remove" in result.exception.message
    assert "rm -r" in result.exception.hint
    (hidden,) = (workspace.root / "caches").iterdir()
    (hidden / "root").chmod(0o700)
