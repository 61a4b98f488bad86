"""Results of checks that are taken over from another image: only where nothing that a check read differs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks, rootfs
from sm120kit.images.checks import ExpectedImage
from sm120kit.images.checks.taken_over import Baseline, CheckRun, CheckRuns, common_inputs, find_baseline, ran, write_runs
from sm120kit.images.image_records import Check, CheckResult, Image, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import LAYER, Layout

SUITES = Path(checks.__file__).with_name("suites")
SITE = "/opt/venv/lib/python3.12/site-packages"
MODEL, PARSER, INIT = (f"{SITE}/vllm/{name}.py" for name in ("model", "parser", "__init__"))
RUNS = (
    CheckRun("base/files", "", 1, (), ()),
    CheckRun("engine/backends", "", 1, (f"{SITE}/vllm", PARSER), (INIT,)),
    CheckRun("vllm/arguments", "", 1, (), ()),
    CheckRun("engine/probe", "engine", 1, (f"{SITE}/torch/x.py",), ()),
    CheckRun("vllm/command", "vllm", 1, (f"{SITE}/torch/x.py", "*sh"), ()),
)
IMAGE = Image("sha256:" + "1" * 64, "c" * 64, "linux/amd64", (), {"sm120kit.recipe": "vllm-7.0"}, "1000", 1)
EXPECTED = ExpectedImage("vllm", "flashinfer-1.0", "1.0", "c", "t", "p", ("sm_120f",), (), (), {"vllm": "7.0"})


def result(name: str) -> Check:
    suite, _, own = name.partition("/")
    return Check(suite, own, CheckResult.PASSED)


def baseline(changed: set[str], added: set[str] | None = None) -> Baseline:
    verified = VerifiedImage(IMAGE, "x", "s", tuple(result(run.check) for run in RUNS), {})
    return Baseline(verified, CheckRuns("i", RUNS), frozenset(changed), frozenset(), frozenset(added or ()))


@pytest.mark.parametrize(
    ("changed", "added", "taken"),
    [
        ({MODEL}, set(), {"engine/backends", "vllm/arguments", "engine/probe"}),
        ({PARSER}, set(), {"vllm/arguments", "engine/probe"}),
        ({INIT}, set(), {"engine/probe"}),
        ({f"{SITE}/vllm/new.py"}, {f"{SITE}/vllm"}, {"vllm/arguments", "engine/probe"}),
        ({f"{SITE}/vllm/deep/new.py"}, {f"{SITE}/vllm/deep"}, {"engine/backends", "vllm/arguments", "engine/probe"}),
        ({f"{SITE}/torch/x.py"}, set(), {"engine/backends", "vllm/arguments"}),
    ],
)
def test_result_is_taken_over_only_if_what_the_check_read_is_equal(changed: set[str], added: set[str], taken: set[str]) -> None:
    """Modules stay imported in a process; a program that could not be followed, and the comparison of all files, run again."""
    results = baseline(changed, added).taken_over()
    assert {*results} == taken
    assert all(IMAGE.id in check.detail and check.verdict is CheckResult.PASSED for check in results.values())
    assert ran(results.values()) == [] and ran([result("base/files")]) == ["base/files"]


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
        manifest = self.layout.add_image(blobs, [blob.digest for blob in blobs], config)
        rootfs.layers(self.layout, manifest.digest, self.workspace)
        return self.layout.image(manifest.digest)

    def verified(self, image: Image, suite: str = "s", inputs: str = "i") -> Image:
        directory = self.workspace.root / "images/verified"
        directory.mkdir(parents=True, exist_ok=True)
        write_record(directory / f"{image.content}.json", VerifiedImage(image, "x", suite, (), {}))
        write_runs(image, CheckRuns(inputs, RUNS), self.workspace)
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
    found = find_baseline(after, "i", "s", images.workspace)
    assert found is not None and found.verified.image == before
    assert (found.changed, found.added) == ({MODEL, f"{SITE}/vllm/new.py"}, {f"{SITE}/vllm"})
    assert found.metadata == {*info}


@pytest.mark.parametrize("change", [f"{SITE}/vllm/_C.so", "/etc/passwd", f"{SITE}/vllm/table.json", "/opt/sm120kit/serve.py"])
def test_nothing_is_taken_over_if_another_file_than_python_differs(change: str, images: Images) -> None:
    images.verified(images.add(FILES))
    assert find_baseline(images.add({**FILES, change: "other"}), "i", "s", images.workspace) is None
    assert find_baseline(images.add({**FILES, MODEL: "other"}), "i", "s", images.workspace) is not None


@pytest.mark.parametrize("other", ["suite", "inputs", "recipe", "image is gone", "layer is gone"])
def test_nothing_is_taken_over_from_an_image_of_other_checks(other: str, images: Images) -> None:
    before = images.add(FILES, recipe="vllm-8.0" if other == "recipe" else "vllm-7.0")
    images.verified(before, "other" if other == "suite" else "s", "other" if other == "inputs" else "i")
    after = images.add({**FILES, MODEL: "other"})
    if other == "image is gone":
        manifest = images.layout.find(before.id)
        assert manifest is not None
        images.layout.remove(manifest.digest)
    if other == "layer is gone":
        digest = before.layers[0].removeprefix("sha256:")
        (images.workspace.root / "oci-unpacked" / digest).rename(images.workspace.root / "gone")
    assert find_baseline(after, "i", "s", images.workspace) is None


def test_inputs_are_everything_but_files_and_local_versions() -> None:
    local = replace(EXPECTED, distributions={"vllm": "7.0+sm120kit.1"}, read_all=False, digests={"/x": "y"})
    digest = common_inputs(IMAGE, {"Labels": {"a": "b"}}, EXPECTED)
    assert common_inputs(IMAGE, {"Labels": {"a": "c"}}, local) == digest
    for other in (replace(EXPECTED, distributions={"vllm": "7.1"}), replace(EXPECTED, arguments={"a": ("--x",)})):
        assert common_inputs(IMAGE, {}, other) != digest
    assert common_inputs(IMAGE, {"Env": ["A=1"]}, EXPECTED) != digest


# What the checks record


CHECKS = """
import json, os, subprocess, sys
BESIDE = ()

def check_first(expected):
    import first

def check_data(expected):
    open(os.path.join(expected["site"], "data.json")).close()
    os.listdir(os.path.join(expected["site"], "listed"))

def check_child(expected):
    subprocess.run([sys.executable, "-c", "import second"], check=True)

def check_isolated(expected):
    subprocess.run([sys.executable, "-I", "-c", "import second"], check=True)

def check_cleared(expected):
    subprocess.run(["sh", "-c", "true"], env={}, check=True)
"""


def run_suite(tmp_path: Path, expected: Mapping[str, object], suite: str = "small") -> dict[str, dict[str, object]]:
    directory, venv = tmp_path / "checks", tmp_path / "venv"
    (directory / "recorder").mkdir(parents=True)
    for name in ("run.py", "driver_stub.py", "recorder.py"):
        (directory / name).write_bytes((SUITES / name).read_bytes())
    (directory / "recorder/sitecustomize.py").write_bytes((SUITES / "recorder.py").read_bytes())
    (directory / suite).mkdir()
    own = SUITES / suite / "checks.py"
    (directory / suite / "checks.py").write_text(own.read_text() if own.is_file() else CHECKS)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    for name in ("first.py", "second.py", "data.json"):
        (site / name).write_text("1\n")
    (site / "broken.py").write_text("import absent_module\n")
    (site / "listed").mkdir()
    (directory / "expected.json").write_text(json.dumps({"site": str(site), **expected}))
    argv = [venv / "bin/python", "-B", "run.py", "expected.json", suite]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=True)
    lines = [line for line in map(json.loads, done.stdout.splitlines()) if "name" in line]
    for line in lines:
        line["below"] = {path.removeprefix(f"{site}/") for key in ("reads", "imports") for path in line.get(key, ())}
    return {line["name"]: line for line in lines}


def test_checks_record_what_they_and_their_programs_read(tmp_path: Path) -> None:
    lines = run_suite(tmp_path, {"taken_over": ["small/absent"]})
    assert all(line["verdict"] == "passed" for line in lines.values())
    read = {name: line["below"] for name, line in lines.items()}
    assert "first.py" in read["first"] and {"data.json", "listed"} <= read["data"]  # type: ignore[operator]
    assert "second.py" in read["child"] and "first.py" not in read["child"]  # type: ignore[operator]
    unknown = {name for name, paths in read.items() if any(path.startswith("*") for path in paths)}  # type: ignore[attr-defined]
    assert unknown == {"isolated", "cleared"}


def test_checks_that_are_taken_over_are_not_run(tmp_path: Path) -> None:
    assert {*run_suite(tmp_path, {"taken_over": ["small/child", "small/isolated"]})} == {"first", "data", "cleared"}


@pytest.mark.parametrize(("modules", "verdict"), [(["first", "second"], "passed"), (["first", "broken"], "failed")])
def test_changed_modules_are_imported(modules: list[str], verdict: str, tmp_path: Path) -> None:
    (line,) = run_suite(tmp_path, {"changed_modules": modules}, "changed").values()
    assert line["verdict"] == verdict and ("absent_module" in str(line["detail"])) == (verdict == "failed")


@pytest.mark.parametrize(("before", "verdict"), [("no module x", CheckResult.PASSED), ("other", CheckResult.FAILED)])
def test_an_import_that_fails_passes_only_if_it_failed_alike(
    before: str, verdict: CheckResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a module for other hardware, which a patch has not broken."""

    def inside(image: Image, *_: object) -> list[tuple[Check, Mapping[str, str]]]:
        assert image is IMAGE
        return [(Check(checks.CHANGED, "imports", CheckResult.FAILED, before), {})]

    monkeypatch.setattr(checks, "_inside", inside)
    failed = Check(checks.CHANGED, "imports", CheckResult.FAILED, "no module x")
    others = (result("engine/backends"), Check("engine", "probe", CheckResult.FAILED, "no module x"))
    store: LocalImages = object()  # type: ignore[assignment]  # not used
    results = [(each, {}) for each in (failed, *others)]
    found = [check for check, _ in checks._compared_imports(results, baseline({MODEL}), EXPECTED, store)]
    assert found[0].verdict is verdict and found[1:] == [*others]
    assert (IMAGE.id in found[0].detail) == (verdict is CheckResult.PASSED)
