"""The drift matrix: the state of each patch on every release that an index offers, stored by content."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from patch_series import BASE, BUILDER, KERNEL, LAUNCHER, VERSION_H, PatchDirectory, changed, inside, patch_text, version_h
from small_engine import make_sdist
from typer.testing import CliRunner

from sm120kit import patches, sources
from sm120kit.cli import app
from sm120kit.core import retry
from sm120kit.core.errors import FetchFailed, NotFound, OfflineMiss, Sm120kitError
from sm120kit.core.workspace import Workspace
from sm120kit.patches.patch_records import PatchState
from sm120kit.sources.origin import Origin
from sm120kit.sources.source_records import SdistPin

FIXED = {BUILDER: changed(KERNEL, 10, "ten\n")}
MOVED = {BUILDER: f"line 0\n{KERNEL}"}
OTHER = {BUILDER: changed(KERNEL, 10, "TEN\n")}


class Shelf:
    """A directory of FlashInfer's sdists, and a series of two CUTLASS patches and one of FlashInfer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sdists = path / "sdists"
        self.sdists.mkdir()
        (path / "data" / "recipes").mkdir(parents=True)
        self.patches = PatchDirectory(path / "data")
        self.cutlass("cutlass-fix", 10, "ten\n", "ten, or the fix")
        self.cutlass("next-line", 11, "eleven\n", "more", {**BASE, **FIXED})
        launcher = patch_text(self.patches.edit(LAUNCHER, 3, "three\n", below=""), "flashinfer", ">=0.6.1", "launcher: three")
        self.patches.put("launcher", launcher, "flashinfer")

    def cutlass(self, slug: str, line: int, to: str, subject: str, base: dict[str, str] = BASE) -> None:
        text = patch_text(self.patches.edit(BUILDER, line, to, base), subject=f"builder: {subject}")
        self.patches.put(slug, text.replace(b"Origin:", b"Fixed-In: 4.5.0\nOrigin:") if slug == "cutlass-fix" else text)

    def release(self, version: str, change: dict[str, str] | None = None, cutlass: str = "4.2.1") -> Path:
        file = self.sdists / f"flashinfer_python-{version}.tar.gz"
        make_sdist(file, {**BASE, VERSION_H: version_h(cutlass), **(change or {})})
        return file

    def page(self, *links: str) -> str:
        """An index in a directory, with these links; its URL."""
        project = self.path / "index" / "flashinfer-python"
        project.mkdir(parents=True, exist_ok=True)
        (project / "index.html").write_text("\n".join(links))
        return (self.path / "index").as_uri()

    def link(self, file: Path, sha256: str, attributes: str = "") -> str:
        return f'<a href="{file.as_uri()}#sha256={sha256}" {attributes}>{file.name}</a>'

    @property
    def state(self) -> Path:
        return self.path / "state"

    def run(self, *words: str) -> Result:
        sources = [] if "--offline" in words or "--index-url" in words else ["--find-links", str(self.sdists)]
        return CliRunner().invoke(app, ["patch", "drift", *words, *sources])

    def json(self, *words: str) -> Any:
        result = self.run("--json", *words)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def labels(self, *words: str) -> dict[str, list[str]]:
        """By release, the states and fits of the patches in order."""
        return {
            row["version"]: [
                cell["state"] + (f", {cell['fit']}" if cell["state"] != cell["fit"] else "") + " offset" * cell["offset"]
                for cell in row["cells"]
            ]
            for row in self.json(*words)["releases"]
        }


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SM120KIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SM120KIT_CONFIG", os.devnull)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(retry, "PAUSE_SECONDS", 0.0)
    shelf = Shelf(tmp_path)
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SM120KIT_STATE", str(shelf.state))
    return shelf


def left_behind(shelf: Shelf) -> list[Path]:
    """Hidden and partial files in the state directory, and files at the top of ``downloads/``."""
    return list(shelf.state.rglob(".*")) + [path for path in (shelf.state / "downloads").glob("*") if path.is_file()]


def refusal(result: Result) -> tuple[type[BaseException], str]:
    """The class and message of the error that ended a command."""
    assert isinstance(result.exception, Sm120kitError), result
    assert result.exception.hint
    return type(result.exception), result.exception.message


# ---- states


def test_states_over_releases(shelf: Shelf) -> None:
    shelf.release("0.6.0")
    shelf.release("0.6.1", MOVED)
    shelf.release("0.6.2", FIXED)
    shelf.release("0.6.3", {**OTHER, LAUNCHER: changed(KERNEL, 3, "three\n")})
    shelf.release("0.6.10", OTHER, cutlass="4.5.0")
    assert shelf.labels() == {
        "0.6.0": ["applies", "applies", "not for this version, applies"],
        "0.6.1": ["applies offset", "applies offset", "applies"],
        "0.6.2": ["already upstream", "applies", "applies"],
        "0.6.3": ["conflicts", "conflicts", "already upstream"],
        "0.6.10": ["not for this version, conflicts", "not for this version, conflicts", "applies"],
    }
    output = shelf.run().stdout
    assert "builder.inl:7: hunk 1" in output, "a conflict has its line"
    assert "0.6.0 to 0.6.2" in output or "0.6.1 to 0.6.2" in output


def test_states_equal_those_of_status(shelf: Shelf) -> None:
    """The matrix imports a few files of each sdist; `patch status` works on the whole source."""
    changes = {"0.6.0": {}, "0.6.1": MOVED, "0.6.2": FIXED, "0.6.3": OTHER}
    for version, change in changes.items():
        shelf.release(version, change)
    rows = shelf.json()["releases"]
    workspace = Workspace.open(shelf.path / "other-state")
    for row in rows:
        pin = SdistPin("flashinfer", "flashinfer-python", row["version"], row["sha256"])
        checkout = sources.fetch(pin, workspace, Origin(str(shelf.sdists)))
        expected = patches.status(checkout, inside(), shelf.patches.root)
        assert [cell["state"] for cell in row["cells"]] == [str(status.state) for status in expected]
    assert {cell["state"] for row in rows for cell in row["cells"]} == {str(state) for state in PatchState}


def test_variants_are_not_tried_beside_each_other(shelf: Shelf) -> None:
    other = {**BASE, BUILDER: changed(KERNEL, 10, "TEN\n")}
    diff = shelf.patches.diff(other, {BUILDER: changed(other[BUILDER], 12, "twelve\n")})
    shelf.patches.put("cutlass-fix--4.5", patch_text(diff, versions="==4.5.*"))
    shelf.release("0.6.1")
    shelf.release("0.6.2", OTHER, cutlass="4.5.0")
    by_release = {row["version"]: {cell["slug"]: cell for cell in row["cells"]} for row in shelf.json("cutlass")["releases"]}
    assert by_release["0.6.1"]["cutlass-fix--4.5"]["variant"] == "cutlass-fix"
    assert by_release["0.6.2"]["cutlass-fix"]["variant"] == "cutlass-fix--4.5"
    assert by_release["0.6.2"]["cutlass-fix--4.5"]["state"] == "applies"
    assert by_release["0.6.1"]["cutlass-fix"]["state"] == "applies"
    assert "not for this version, cutlass-fix is" in shelf.run("cutlass").stdout


def test_summary_names_first_release_without_patch(shelf: Shelf) -> None:
    shelf.release("0.6.0", {LAUNCHER: changed(KERNEL, 3, "three\n")})
    shelf.release("0.6.1")
    shelf.release("0.6.2", {LAUNCHER: changed(KERNEL, 3, "three\n")})
    shelf.release("0.6.3", OTHER, cutlass="4.5.0")
    summaries = {each.pop("patch"): each for each in shelf.json()["patches"]}
    fix, launcher = summaries["cutlass/cutlass-fix"], summaries["flashinfer/launcher"]
    assert (fix["first"], fix["last"], fix["without"], fix["reason"]) == ("0.6.0", "0.6.2", "0.6.3", "Fixed-In: cutlass 4.5.0")
    assert (launcher["without"], launcher["reason"]) == ("0.6.2", "already upstream"), "0.6.0 precedes the defect"
    assert summaries["cutlass/next-line"]["without"] == ""


# ---- which releases


def test_pre_releases_and_yanked_ones_are_excluded(shelf: Shelf) -> None:
    good, pre, yanked, old = (shelf.release(version) for version in ("0.6.1", "0.6.2rc1", "0.6.3", "0.5.9"))
    (shelf.sdists / "flashinfer_python-x.tar.gz").write_bytes(b"")
    (shelf.sdists / "flashinfer_python-0.6.4.zip").write_bytes(b"")
    (shelf.sdists / "flashinfer_python_other-0.6.5.tar.gz").write_bytes(b"")
    files = {file: sources.index.file_sha256(file) for file in (good, pre, yanked, old)}
    links = (shelf.link(file, sha256, 'data-yanked="broken"' if file == yanked else "") for file, sha256 in files.items())
    url = shelf.page(*links)
    assert list(shelf.labels("--index-url", url)) == ["0.6.1"]
    assert list(shelf.labels("--index-url", url, "--all")) == ["0.6.1", "0.6.2rc1", "0.6.3"]
    assert list(shelf.labels("--index-url", url, "--since", "0.5", "flashinfer")) == ["0.5.9", "0.6.1"]
    assert list(shelf.labels("--mirror", str(shelf.sdists))) == ["0.6.1", "0.6.3"], "a directory does not list yanked releases"


def test_projects_limit_patches(shelf: Shelf) -> None:
    shelf.release("0.6.1")
    assert [cell["project"] for cell in shelf.json("flashinfer")["releases"][0]["cells"]] == ["flashinfer"]
    assert [each["patch"] for each in shelf.json("cutlass")["patches"]] == ["cutlass/cutlass-fix", "cutlass/next-line"]


def test_offline_uses_cached_sdists(shelf: Shelf) -> None:
    assert refusal(shelf.run("--offline"))[0] is OfflineMiss
    shelf.release("0.6.1")
    first = shelf.json()
    shelf.release("0.6.2")
    shutil.rmtree(shelf.state / "cache" / "drift")
    assert shelf.json("--offline") == first


# ---- stored states


def test_stored_states_need_no_git(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.release("0.6.1")
    first = shelf.json()
    monkeypatch.setenv("PATH", str(shelf.path))
    assert shelf.json() == first


def test_changed_patch_is_tried_again_without_its_sdist(shelf: Shelf) -> None:
    file = shelf.release("0.6.1", FIXED)
    url = shelf.page(shelf.link(file, sources.index.file_sha256(file)))
    assert shelf.labels("--index-url", url)["0.6.1"][0] == "already upstream"
    shutil.rmtree(shelf.state / "downloads")
    file.unlink()
    content = patch_text(shelf.patches.edit(BUILDER, 10, "TEN\n"), subject="builder: another")
    shelf.patches.put("cutlass-fix", content, listed=False)
    assert shelf.labels("--index-url", url)["0.6.1"][0] == "conflicts"


def test_cache_lists_and_cleans_states(shelf: Shelf) -> None:
    shelf.release("0.6.1")
    first = shelf.json()

    def entries() -> int:
        listed = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
        return int(next(kind["entries"] for kind in listed["kinds"] if kind["kind"] == "drift"))

    assert entries() == 2
    assert CliRunner().invoke(app, ["cache", "--clean", "drift"]).exit_code == 0
    assert entries() == 0
    assert shelf.json() == first


# ---- releases that cannot be tried


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-50]), "is damaged"),
        (lambda file: make_sdist(file, {"csrc/launcher.cu": KERNEL}), "version.h states no version"),
        (
            lambda file: shutil.copyfile(file.with_name("flashinfer_python-0.6.1.tar.gz"), file),
            "flashinfer-python 0.6.1 in PKG",
        ),
    ],
    ids=["damaged", "without CUTLASS", "another release"],
)
def test_bad_sdist_is_a_row_with_its_error(shelf: Shelf, damage: Any, message: str) -> None:
    shelf.release("0.6.1")
    damage(shelf.release("0.6.2"))
    result = shelf.run("--json")
    rows = json.loads(result.stdout)["releases"]
    assert result.exit_code == 1
    assert [bool(row["cells"]) for row in rows] == [True, False] and message in rows[1]["error"]
    assert message in shelf.run().stdout
    assert not left_behind(shelf)


def test_release_that_is_not_delivered_is_a_row_with_its_error(shelf: Shelf) -> None:
    good, gone, other = (shelf.release(version) for version in ("0.6.1", "0.6.2", "0.6.3"))
    unlisted = f'<a href="{shelf.release("0.6.4").as_uri()}">flashinfer_python-0.6.4.tar.gz</a>'
    url = shelf.page(
        shelf.link(good, sources.index.file_sha256(good)), shelf.link(gone, "1" * 64), shelf.link(other, "2" * 64), unlisted
    )
    gone.unlink()
    other.write_bytes(b"other content")
    result = shelf.run("--json", "--index-url", url)
    errors = {row["version"]: row["error"] for row in json.loads(result.stdout)["releases"]}
    assert result.exit_code == 1 and not errors["0.6.1"] and not errors["0.6.4"], "a local file needs no listed sha256"
    assert "does not exist" in errors["0.6.2"]
    assert f"pinned to sha256 {'2' * 64}" in errors["0.6.3"] and "delivered 13 bytes" in errors["0.6.3"]
    assert not left_behind(shelf)


# ---- bad input


def test_unknown_project_is_refused(shelf: Shelf) -> None:
    kind, message = refusal(shelf.run("flashinfr"))
    assert kind is NotFound and "did you mean 'flashinfer'?" in message
    assert "'sglang' is no project with a patch series" in refusal(shelf.run("sglang"))[1]


def test_no_releases_and_unreachable_index(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    none = "no sdist of flashinfer-python {} or newer is at any configured location"
    assert refusal(shelf.run()) == (FetchFailed, none.format("0.6.0"))
    shelf.release("0.6.1")
    assert refusal(shelf.run("--since", "9")) == (FetchFailed, none.format("9"))
    monkeypatch.delenv("PIP_NO_INDEX")
    kind, message = refusal(shelf.run("--index-url", "http://somebody:secret@127.0.0.1:9/simple"))
    assert kind is FetchFailed and "127.0.0.1:9" in message and "secret" not in message
    absent = f"the mirror {shelf.path}/absent is not a directory"
    assert refusal(shelf.run("--mirror", str(shelf.path / "absent"))) == (FetchFailed, absent)


def test_invalid_version_is_refused_first(shelf: Shelf) -> None:
    shelf.release("0.6.1")
    invalid = shelf.run("--since", "six")
    assert invalid.exit_code == 2 and "'six' is not a version" in invalid.stderr
    assert not shelf.state.exists()


# ---- signals


@pytest.fixture
def slow_git(shelf: Shelf) -> Iterator[Path]:
    """A git that stops at ``fast-import`` after it started; the marker that it writes."""
    marker, directory = shelf.path / "started", shelf.path / "bin"
    directory.mkdir()
    wrapper = directory / "git"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *fast-import*) touch {marker}; exec sleep 60;; esac\nexec {shutil.which("git")} "$@"\n'
    )
    wrapper.chmod(0o755)
    yield marker


def test_sigterm_leaves_nothing_behind(shelf: Shelf, slow_git: Path) -> None:
    shelf.release("0.6.1")
    argv = [sys.executable, "-m", "sm120kit", "patch", "drift", "--find-links", str(shelf.sdists)]
    environment = {**os.environ, "PATH": f"{slow_git.parent / 'bin'}:{os.environ['PATH']}"}
    child = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not slow_git.exists() and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 143, stderr
    assert not left_behind(shelf) and not list((shelf.state / "cache" / "drift").iterdir())
    assert shelf.labels() == {"0.6.1": ["applies", "applies", "applies"]}
