"""A build is recognized only if every byte that decides it, and everything that the finished one left, is as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sm120kit import engines
from sm120kit.cli import app, build, build_output
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks, delivery
from sm120kit.images.oci import LAYER, Layout
from sm120kit.images.repeated_builds import inputs_of, recognized, remember

REQUEST = ("vllm", "kernels", "none")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Built-in data with a file of each kind, and a user's repository as the working directory."""
    built_in, own = tmp_path / "data", tmp_path / "own"
    for path in ("recipes/engines/a.toml", "recipes/engines/a.lock.json", "patches/vllm/series", "patches/vllm/a.patch"):
        _write(built_in / path)
    for path in ("cutlass_overrides/a.hpp", "image_programs/serve.py", "files/template.jinja"):
        _write(built_in / path)
    for path in ("recipes/b.toml", "patches/vllm/b.patch", "files/mine.json", "configurations/b.toml"):
        _write(own / path)
    (own / "sm120kit.toml").write_text("edition = 1\n")
    monkeypatch.setenv("SM120KIT_DATA", str(built_in))
    monkeypatch.chdir(own)
    return tmp_path


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)


def test_the_inputs_are_bytes_not_times(data: Path) -> None:
    before = inputs_of(REQUEST)
    assert before == inputs_of(REQUEST) != ""
    for path in data.rglob("*.toml"):
        os.utime(path, (1, 1))
    assert inputs_of(REQUEST) == before


def test_every_changed_added_or_removed_file_counts(data: Path) -> None:
    before = inputs_of(REQUEST)
    files = [path for path in data.rglob("*") if path.is_file() and path.name != "sm120kit.toml"]
    assert len(files) == 11
    for path in files:
        content, times = path.read_bytes(), path.stat()
        path.write_bytes(content[::-1])
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert inputs_of(REQUEST) != before, path
        path.unlink()
        assert inputs_of(REQUEST) != before, path
        path.write_bytes(content)
        added = path.with_name("zz")
        added.write_bytes(b"")
        assert inputs_of(REQUEST) != before, path
        added.unlink()
    assert inputs_of(REQUEST) == before


def test_request_variables_compilers_and_the_working_directory_count(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, tools = inputs_of(REQUEST), data / "tools"
    assert inputs_of(("vllm", "kernels", "quick")) != before
    for variable in ("SM120KIT_MIRROR", "CUDA_HOME", "CXX", "ANYTHING"):
        with monkeypatch.context() as changed:
            changed.setenv(variable, "/other")
            assert inputs_of(REQUEST) != before, variable
    with monkeypatch.context() as changed:
        changed.setenv("PWD", "/other")
        changed.chdir(data / "own" / "patches")
        assert inputs_of(REQUEST) == before, "the same repository"
        changed.chdir(data)
        assert inputs_of(REQUEST) != before, "without it"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    digests = set()
    for version in ("12.1", "12.2"):
        (tools / "c++").write_text(f"#!/bin/sh\necho c++ {version}\n")
        (tools / "c++").chmod(0o755)
        digests.add(inputs_of(REQUEST))
    assert len(digests) == 2


def test_distributions_count_by_their_versions(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, site = inputs_of(REQUEST), data / "site"
    monkeypatch.syspath_prepend(site)
    site.mkdir()
    assert inputs_of(REQUEST) == before
    (site / "cmake-4.0.dist-info").mkdir()
    installed = inputs_of(REQUEST)
    (site / "cmake-4.0.dist-info").rename(site / "cmake-4.1.dist-info")
    assert len({before, installed, inputs_of(REQUEST)}) == 3


@pytest.mark.parametrize("what", ["link", "fifo", "large"])
def test_what_cannot_be_read_is_unknown(data: Path, what: str) -> None:
    path = data / "own" / "files" / "odd"
    if what == "link":
        path.symlink_to(data / "data", target_is_directory=True)
    elif what == "fifo":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(2**27)
    assert inputs_of(REQUEST) == ""


def test_data_without_a_limit_is_unknown(data: Path) -> None:
    for number in range(5):
        with (data / "own" / "files" / str(number)).open("wb") as file:
            file.truncate(2**26)
    assert inputs_of(REQUEST) == ""


@pytest.mark.parametrize(
    ("options", "whole"),
    [([], True), (["--cache", "."], True), (["--cache", ".", "--cache-push"], False)]
    + [([*options], False) for options in (("--json",), ("--dry-run",), ("--to", "pack"), ("--patch", "x.patch"))],
)
def test_only_builds_that_end_with_the_image_are_recognized(
    data: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], whole: bool
) -> None:
    """Others print something else, or store wheels in a cache, which is not looked at."""
    ran: list[str] = []
    monkeypatch.setattr(build, "recognized", lambda inputs, *_: SimpleNamespace(reference="found") if inputs else None)
    monkeypatch.setattr(build_output, "run", lambda engine, *_: ran.append(engine))
    result = CliRunner().invoke(app, ["build", "vllm", "--state", str(data / "state"), *options])
    assert (result.exit_code, result.stdout, ran) == (0, "found\n" if whole else "", [] if whole else ["vllm"])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("engine", "remembered"), [("vllm", True), ("toy", False)])
def test_builds_of_an_engine_outside_are_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, remembered: bool, checked: bool
) -> None:
    """Its port and its help are in the image, and its code is not among the inputs, with or without checks of its own.

    Of an image that was there, checks that are run, as after a killed build, are printed.
    """
    monkeypatch.setattr(engines, "all_engines", lambda: (*engines.BUILT_IN, replace(engines.VLLM, name="toy")))
    context, verified = SimpleNamespace(reference="a", digest="b"), SimpleNamespace(reference="a")
    image = SimpleNamespace(context=context, image=SimpleNamespace(id="c", content="d"), ran=False)
    monkeypatch.setattr(delivery, "engine_image", lambda *_: image)
    workspace, printed = Workspace.open(tmp_path), list[object]()
    record = workspace.root / "images/verified/d.json"
    record.parent.mkdir(parents=True)
    record.touch()
    os.utime(record, (1, 1))

    def verify_once(*_: object) -> SimpleNamespace:
        if checked:
            record.write_text("{}")
        return SimpleNamespace(verified=verified)

    monkeypatch.setattr(checks, "verify_once", verify_once)
    monkeypatch.setattr(build_output, "show_report", lambda report, **_: printed.append(report))
    recipe = SimpleNamespace(engine=engine, name=f"{engine}-1.0")
    options = SimpleNamespace(workspace=workspace)
    built = build_output.deliver(SimpleNamespace(recipe=recipe, wheels={}), "", options, json=False)  # type: ignore[arg-type]
    assert (built is not None) == remembered and len(printed) == checked


class Finished:
    """A remembered build of an image with one layer, its records, its wheel and the wheel's copy."""

    def __init__(self, root: Path) -> None:
        self.workspace, self.output = Workspace.open(root / "state"), root / "wheelhouse"
        self.layout = Layout(self.workspace.root / "oci")
        layer = self.layout.add_blob(b"layer", LAYER)
        self.layer = self.layout.path(layer.digest)
        self.manifest = self.layout.add_image([layer], {"os": "linux", "architecture": "amd64"}).digest
        self.layout.tag(self.manifest, "sm120kit/vllm:1")
        self.records = [self.workspace.root / "images" / name for name in ("verified/a.json", "b/image.json")]
        self.wheel = self.workspace.root / "build" / "vllm" / "digest" / "a.whl"
        for path in (*self.records, self.wheel, self.output / self.wheel.name):
            _write(path)
            os.utime(path, (9, 9))
        remember("a" * 64, "sm120kit/vllm:1", self.records, [self.wheel], self.workspace)

    @property
    def found(self) -> str:
        """The name of the image of the recognized build."""
        build = recognized("a" * 64, self.output, self.workspace)
        return build.reference if build else ""


def _other_image(finished: Finished) -> None:
    other = finished.layout.add_image([], {"os": "linux", "architecture": "arm64"})
    finished.layout.tag(other.digest, "sm120kit/vllm:1")


def _config(finished: Finished) -> Path:
    return finished.layout.path(finished.layout.manifest(finished.manifest)["config"]["digest"])


FAULTS: dict[str, Callable[[Finished], object]] = {
    "the image was removed": lambda finished: finished.layout.remove(finished.manifest),
    "the name was removed": lambda finished: finished.layout.untag("sm120kit/vllm:1"),
    "the name is another image's": _other_image,
    "a layer is short": lambda finished: finished.layer.write_bytes(b"lay"),
    "a layer is missing": lambda finished: finished.layer.unlink(),
    "the config is damaged": lambda finished: _config(finished).write_bytes(b"{}"),
    "the manifest is damaged": lambda finished: finished.layout.path(finished.manifest).write_bytes(b"{}"),
    "the index is damaged": lambda finished: (finished.layout.directory / "index.json").write_bytes(b"["),
    "the checks were withdrawn": lambda finished: finished.records[0].unlink(),
    "the checks have another result": lambda finished: finished.records[0].write_text("other"),
    "the record of the image differs": lambda finished: finished.records[1].write_text("other"),
    "the wheel is missing": lambda finished: finished.wheel.unlink(),
    "the wheel is short": lambda finished: finished.wheel.write_bytes(b""),
    "the copy is missing": lambda finished: (finished.output / finished.wheel.name).unlink(),
    "the copy is another wheel": lambda finished: (finished.output / finished.wheel.name).write_text("a.whl"),
    "the record is damaged": lambda finished: next(finished.workspace.cache.glob("finished/*")).write_text("{"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_build_whose_results_changed_is_not_recognized(tmp_path: Path, fault: str) -> None:
    finished = Finished(tmp_path)
    assert finished.found == "sm120kit/vllm:1"
    FAULTS[fault](finished)
    assert finished.found == ""


def test_unknown_inputs_are_no_build(tmp_path: Path) -> None:
    finished = Finished(tmp_path)
    assert recognized("", finished.output, finished.workspace) is None
    assert recognized("b" * 64, finished.output, finished.workspace) is None
