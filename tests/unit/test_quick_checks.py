"""Quick checks: of an image that differs from a checked one in Python files only."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import _rootfs, checks
from sm120kit.images.checks import ExpectedImage, _image_checks
from sm120kit.images.checks._suite_programs import RUNNER
from sm120kit.images.checks.quick import Baseline, find_baseline, left_out
from sm120kit.images.image_records import Check, CheckResult, Image, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import LAYER, Layout

SUITES = Path(checks.__file__).with_name("suites")
SITE = "/opt/venv/lib/python3.12/site-packages"
MODEL, PARSER, INIT = (f"{SITE}/vllm/{name}.py" for name in ("model", "parser", "__init__"))
IMAGE = Image("sha256:" + "1" * 64, "c" * 64, "linux/amd64", (), {"sm120kit.recipe": "vllm-7.0"}, "1000", 1)
EXPECTED = ExpectedImage("vllm", "flashinfer-1.0", "1.0", "c", "t", "p", ("sm_120f",), (), (), {"vllm": "7.0"})


def result(name: str) -> Check:
    suite, _, own = name.partition("/")
    return Check(suite, own, CheckResult.PASSED)


def baseline(changed: set[str]) -> Baseline:
    results = tuple(map(result, ("base/files", "engine/entrypoint", "vllm/arguments")))
    return Baseline(VerifiedImage(IMAGE, "x", "s", results, {}), frozenset(changed))


def test_checks_that_are_left_out_are_named_with_the_checked_image() -> None:
    left = [*baseline({MODEL, INIT}).left("engine/entrypoint", "flashinfer/device_code")]
    assert left_out([*left, result("base/files")]) == ["engine/entrypoint"]
    assert IMAGE.id in left[0].detail and "2 Python files" in left[0].detail and left[0].verdict is CheckResult.NOT_RUN


def test_changed_modules_are_named() -> None:
    paths = {MODEL, INIT, f"{SITE}/vllm/__main__.py", f"{SITE}/vllm/a-b.py", f"{SITE}/vllm/__pycache__/model.cpython-312.pyc"}
    assert baseline(paths).modules == ("vllm", "vllm.model")


# Images


FILES = {MODEL: "model\n", PARSER: "parser\n", f"{SITE}/vllm/_C.so": "elf", "/etc/passwd": "x\n"}


class Images:
    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.layout = workspace, Layout(workspace.root / "oci")

    def add(self, *layers: Mapping[str, str], recipe: str = "vllm-7.0") -> Image:
        blobs = []
        for files in layers:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                for name, text in files.items():
                    member = tarfile.TarInfo(name.lstrip("/"))
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
            with self.layout.writer() as blob:
                blob.write(packed.getvalue())
                blobs.append(blob.commit(LAYER))
        settings = {"Labels": {"sm120kit.recipe": recipe}, "User": "1000"}
        config = {"os": "linux", "architecture": "amd64", "config": settings, "history": []}
        manifest = self.layout.add_image(blobs, config)
        _rootfs.layers(self.layout, manifest.digest, self.workspace)
        return self.layout.image(manifest.digest)

    def verified(self, image: Image, suite: str = "s", results: tuple[Check, ...] = ()) -> Image:
        directory = self.workspace.root / "images/verified"
        directory.mkdir(parents=True, exist_ok=True)
        write_record(directory / f"{image.content}.json", VerifiedImage(image, "x", suite, results, {}))
        return image


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(Workspace.open(tmp_path / "state"))


def test_images_are_compared_by_the_files_of_the_layers_that_only_one_has(images: Images) -> None:
    base = {"/usr/bin/x": "x"}
    before = images.verified(images.add(base, FILES))
    rest = {path: text for path, text in FILES.items() if path != MODEL}
    info = {f"{SITE}/vllm-7.0+sm120kit.1.dist-info/METADATA": "Version: 7.0+sm120kit.1\n"}
    after = images.add(base, rest, {MODEL: "other\n", f"{SITE}/vllm/new.py": "new\n"} | info)
    found = find_baseline(after, "s", images.workspace)
    assert found is not None and found.verified.image == before
    assert found.changed == {MODEL, f"{SITE}/vllm/new.py", *info} and found.modules == ("vllm.model", "vllm.new")


@pytest.mark.parametrize("change", [f"{SITE}/vllm/_C.so", "/etc/passwd", f"{SITE}/vllm/table.json", "/opt/sm120kit/serve.py"])
def test_all_checks_are_run_if_another_file_than_python_differs(change: str, images: Images) -> None:
    images.verified(images.add(FILES))
    assert find_baseline(images.add({**FILES, change: "other"}), "s", images.workspace) is None
    assert find_baseline(images.add({**FILES, MODEL: "other"}), "s", images.workspace) is not None


@pytest.mark.parametrize("other", ["suite", "recipe", "quick", "image is gone", "layer is gone"])
def test_an_image_of_other_checks_is_no_baseline(other: str, images: Images) -> None:
    before = images.add(FILES, recipe="vllm-8.0" if other == "recipe" else "vllm-7.0")
    left = tuple(baseline({MODEL}).left("engine/entrypoint"))
    images.verified(before, "other" if other == "suite" else "s", left if other == "quick" else ())
    after = images.add({**FILES, MODEL: "other"})
    if other == "image is gone":
        manifest = images.layout.find(before.id)
        assert manifest is not None
        images.layout.remove(manifest.digest)
    if other == "layer is gone":
        digest = before.layers[0].removeprefix("sha256:")
        (images.workspace.root / "oci-unpacked" / digest).rename(images.workspace.root / "gone")
    assert find_baseline(after, "s", images.workspace) is None


CHECKS = """
QUICK = ("listed",)
BESIDE = ("program",)
def check_listed(expected): pass
def check_program(expected): raise SystemExit("it is run")
def check_module(expected): import absent_module
"""


def run_suite(tmp_path: Path, expected: Mapping[str, object], suite: str = "small") -> dict[str, dict[str, object]]:
    (tmp_path / suite).mkdir()
    for name, program in RUNNER.items():
        shutil.copy(program, tmp_path / name)
    own = SUITES / suite / f"checks_{suite}.py"
    (tmp_path / suite / f"checks_{suite}.py").write_text(own.read_text() if own.is_file() else CHECKS)
    for name, text in (("first", ""), ("second", ""), ("broken", "import absent_module")):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-B", "run.py", "expected.json", suite]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_only_quick_checks_are_run(tmp_path: Path) -> None:
    lines = run_suite(tmp_path, {"quick": "left to verify image"})
    assert {name: (line["verdict"], line["detail"]) for name, line in lines.items()} == {
        "listed": ("passed", ""),
        "program": ("not run", "left to verify image"),
        "module": ("not run", "left to verify image"),
    }


@pytest.mark.parametrize(("modules", "verdict"), [(["first", "second"], "passed"), (["first", "broken"], "failed")])
def test_changed_modules_are_imported(modules: list[str], verdict: str, tmp_path: Path) -> None:
    (line,) = run_suite(tmp_path, {"changed_modules": modules, "quick": "x"}, "changed").values()
    assert line["verdict"] == verdict and ("absent_module" in str(line["detail"])) == (verdict == "failed")


@pytest.mark.parametrize(("before", "verdict"), [("no module x", CheckResult.PASSED), ("other", CheckResult.FAILED)])
def test_an_import_that_fails_passes_only_if_it_failed_alike(
    before: str, verdict: CheckResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a module for other hardware, which a patch has not broken."""

    def inside(image: Image, *_: object) -> list[tuple[Check, Mapping[str, str]]]:
        assert image is IMAGE
        return [(Check(_image_checks.CHANGED, "imports", CheckResult.FAILED, before), {})]

    monkeypatch.setattr(_image_checks, "_inside", inside)
    failed = Check(_image_checks.CHANGED, "imports", CheckResult.FAILED, "no module x")
    others = (result("engine/backends"), Check("engine", "probe", CheckResult.FAILED, "no module x"))
    store: LocalImages = object()  # type: ignore[assignment]  # not used
    results = [(each, {}) for each in (failed, *others)]
    found = [check for check, _ in _image_checks._compared_imports(results, baseline({MODEL}), EXPECTED, store)]
    assert found[0].verdict is verdict and found[1:] == [*others]
    assert (IMAGE.id in found[0].detail) == (verdict is CheckResult.PASSED)
