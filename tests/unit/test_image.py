"""The inputs of images, the runner of checks, and the index; no daemon is needed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import layout_images
import pytest
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.cli.image import show_report
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, NotFound, NotVerified, RequirementMissing, ResourceUnavailable, SystemRefused
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import _base, checks, delivery, image_inputs, published_images
from sm120kit.images._layers import LayerWriter
from sm120kit.images.checks._suite_programs import RUNNER, required_suites
from sm120kit.images.dockerfile import export_dockerfile
from sm120kit.images.image_index import FORMAT, PublishedIndex, find_image, read_index
from sm120kit.images.image_records import (
    Check,
    CheckResult,
    Image,
    ImageContext,
    PublishedImage,
    VerifiedImage,
)
from sm120kit.images.oci import Descriptor, Layout
from sm120kit.recipes import bases
from sm120kit.recipes.recipe_records import Closure
from sm120kit.sources.origin import Origin
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel

BASE = f"debian@sha256:{'a' * 64}"
LABELS = {"sm120kit.build-id": "f" * 64}
ENGINE = {
    "kind": "vllm",
    "recipe": "vllm-1.0",
    "version": "1.0",
    "env": {"A": "1", "B": 'two "words" and $3'},
    "serve": ("vllm", "serve"),
}
ORIGIN = {
    "recipe": "flashinfer-0.6.6",
    "plan": "b" * 64,
    "commit": "c" * 40,
    "tree": "d" * 40,
    "archs": ["sm_120f"],
    "modules": ["fp4_quantization_120f"],
    "kernel_groups": ["quick"],
    "pin": {"project": "flashinfer"},
    "inside": [],
    "patches": [{"project": "cutlass", "slug": "one", "sha256": "e" * 64}],
}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Describe an image of small wheels; keywords replace its inputs."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    patched = wheels / "flashinfer_python-0.6.6+sm120kit.1-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(patched, "w") as archive:
        archive.writestr(zipfile.ZipInfo("flashinfer_python-0.6.6.dist-info/sm120kit.json"), json.dumps(ORIGIN))

    locked = [LockedWheel(name, "1.0", f"{name}-1.0-py3-none-any.whl", name[0] * 64) for name in ("idna", "nvidia-cublas")]

    def describe(state: str = "state", **changed: Any) -> tuple[ImageContext, dict[str, Any], dict[str, str]]:
        setup = (
            ENGINE
            | {"labels": LABELS}
            | {name: changed.pop(name) for name in [*changed] if name in image_inputs.ImageSetup.__dataclass_fields__}
        )
        inputs: dict[str, Any] = {"base": BASE, "ours": {patched: file_sha256(patched)}, "locked": locked}
        return image_inputs.describe(
            image_inputs.ImageSetup(**setup), **(inputs | changed), workspace=Workspace.open(tmp_path / state)
        )

    return describe


def test_labels_settings_and_name_follow_from_the_inputs(make: Any) -> None:
    described, settings, programs = make()
    assert described.base == BASE
    assert described.reference == f"sm120kit/vllm:1.0-sm120kit.{described.digest[:12]}"
    assert settings["Env"][-2:] == ["A=1", 'B=two "words" and $3'] and "HOME=/home/sm120kit" in settings["Env"]
    assert settings["Entrypoint"] == ["python", "/opt/sm120kit/serve.py", "vllm", "serve"] and settings["User"] == "1000:1000"
    assert settings["Healthcheck"]["Test"] == ["CMD", "python", "/opt/sm120kit/healthy.py"]
    assert {*programs} == {"healthy.py", "help.txt", "serve.py", "triton_ahead/record/sitecustomize.py"}
    labels = described.labels
    assert labels["sm120kit.recipe"] == "vllm-1.0" and labels["org.opencontainers.image.version"] == "1.0"
    assert labels["org.opencontainers.image.base.digest"] == f"sha256:{'a' * 64}"
    assert labels["org.opencontainers.image.created"] == "1980-01-01T00:00:00Z"
    assert labels["sm120kit.patches"] == "cutlass/one@eeeeeeeeeeee"
    assert labels["sm120kit.ours"].startswith("flashinfer-python==")
    assert labels["sm120kit.wheels"] == "idna==1.0,nvidia-cublas==1.0"


def test_installed_copy_of_sm120kit_describes_the_same_image(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, *_ = make(**ENGINE)
    shutil.copytree(data_root() / image_inputs.PROGRAMS, tmp_path / "installed" / image_inputs.PROGRAMS)
    (tmp_path / "installed" / "recipes").mkdir()
    (tmp_path / "installed" / image_inputs.PROGRAMS / "__pycache__").mkdir(exist_ok=True)  # pip compiles what it installs
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "installed"))
    assert make(state="other", **ENGINE)[0].digest == original.digest


def test_programs_of_images_download_nothing() -> None:
    for path in (data_root() / image_inputs.PROGRAMS).rglob("*.py"):
        text = path.read_text()
        assert text.count("://") == text.count("http://127.0.0.1:") + text.count('"file://'), path


def test_digest_depends_on_the_inputs_only(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*args: Any, **changed: Any) -> str:
        return str(make(*args, **changed)[0].digest)

    first = digest()
    assert digest("another-directory") == first
    changes = ({"base": f"debian@sha256:{'b' * 64}"}, {"labels": {}}, {"locked": []}, {"usage": "other"}, {"env": {"A": "2"}})
    for change in (*changes, {"serve": ("vllm", "run")}, {"b12x": {"kernels": []}}):
        assert digest(**change) != first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert digest() == first, "a variable of the build's environment is no input"


def test_wheel_without_origin_is_refused(make: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "idna-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("idna-1.0.dist-info/WHEEL", "Tag: py3-none-any")
    with pytest.raises(BadInput, match="not a wheel that sm120kit built"):
        make(ours={wheel: file_sha256(wheel)})


@pytest.mark.parametrize(
    ("origin", "absent"), [([], "recipe"), ({**ORIGIN, "patches": "none"}, "patches"), ({**ORIGIN, "pin": None}, "pin")]
)
def test_wheel_with_another_origin_is_refused(make: Any, tmp_path: Path, origin: object, absent: str) -> None:
    """A cache whose entries are not signed may have any file as ``sm120kit.json``."""
    wheel = tmp_path / "wheels" / "flashinfer_python-0.6.6+sm120kit.2-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flashinfer_python-0.6.6.dist-info/sm120kit.json", json.dumps(origin))
    with pytest.raises(BadInput, match=f"its sm120kit.json has no {absent}"):
        make(ours={wheel: file_sha256(wheel)})


def test_wheels_of_ours_are_not_hashed_again(make: Any, tmp_path: Path) -> None:
    (wheel,) = tmp_path.glob("wheels/flashinfer*")
    assert make(ours={wheel: "1" * 64})[0].ours[0].wheel.sha256 == "1" * 64


def test_suites_include_those_of_the_parents() -> None:
    assert required_suites("vllm") == ("base", "flashinfer", "engine", "vllm")
    for kind in ("toaster", "flashinfer"):
        with pytest.raises(NotFound, match=kind):
            required_suites(kind)


SUITE = """
import warnings
def check_good(expected): return {"fact": expected["word"]}
def check_bad(expected): assert False, "it is bad"
def check_broken(expected): return 1 / 0
def check_warns(expected): warnings.warn("odd")
def check_absent(expected): raise NotRun("no driver")
def check_leaves(expected): raise SystemExit(0)
"""


def test_runner_reports_every_result(tmp_path: Path) -> None:
    for name, program in RUNNER.items():
        shutil.copy(program, tmp_path / name)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "checks_small.py").write_text(SUITE)
    (tmp_path / "expected.json").write_text('{"word": "hello"}')
    done = subprocess.run(
        [sys.executable, tmp_path / "run.py", tmp_path / "expected.json", "small"], capture_output=True, text=True
    )
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    verdicts = {name: line["verdict"] for name, line in lines.items()}
    failed = dict.fromkeys(("bad", "broken", "warns", "leaves"), "failed")
    assert verdicts == {"good": "passed", "absent": "not run", **failed}
    assert lines["good"]["facts"] == {"fact": "hello"} and lines["bad"]["detail"] == "it is bad"
    assert "ZeroDivisionError" in lines["broken"]["detail"] and "odd" in lines["warns"]["detail"]


def verified(**changed: Any) -> VerifiedImage:
    image = Image("sha256:1", "content", "linux/amd64", (), {}, "1000", 1)
    record = VerifiedImage(image, "sm120kit/flashinfer:tag", "suite", (Check("base", "user", CheckResult.PASSED),), {})
    return dataclasses.replace(record, **changed)


@pytest.mark.parametrize(
    "results", [(), (Check("base", "user", CheckResult.FAILED),), (Check("base", "user", CheckResult.NOT_RUN),)]
)
def test_record_without_passed_checks_is_refused(results: tuple[Check, ...]) -> None:
    with pytest.raises(NotVerified, match="did not pass"):
        published_images.require_passed(verified(checks=results))
    published_images.require_passed(verified())


def test_slowest_check_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    timed = (("base", "user", 0.3), ("vllm", "backends", 81.4))
    passed = tuple(Check(suite, name, CheckResult.PASSED, seconds=seconds) for suite, name, seconds in timed)
    record = verified(checks=passed)
    show_report(checks.CheckReport(record.image, passed, {}, record), json=False)
    shown = capsys.readouterr()
    assert "2 of 2 checks passed; vllm/backends took longest, 81 s" in shown.err
    assert ["vllm/backends", "passed", "81.4"] in [line.split() for line in shown.out.splitlines()]


def test_index_is_read_back_and_searched(tmp_path: Path) -> None:
    path = tmp_path / "images.json"
    with pytest.raises(BadInput, match="does not exist"):
        read_index(path)
    entries = tuple(
        PublishedImage("host/x", tag, f"sha256:{'2' * 64}", "flashinfer-0.6.6", build * 32, verified())
        for tag, build in (("first", "ab"), ("second", "cd"))
    )
    write_record(path, PublishedIndex(FORMAT, entries))
    assert read_index(path).images == entries
    assert find_image("first", path, "linux/amd64") == entries[0]
    assert find_image("cdcdcdcd", path, "linux/amd64") == entries[1]
    for name, platform, message in (
        ("flashinfer@0.6.6", "linux/amd64", "2 images"),
        ("first", "linux/arm64", "no image 'first' for linux/arm64"),
        ("vllm", "linux/amd64", "no image 'vllm'"),
    ):
        with pytest.raises(NotFound, match=message):
            find_image(name, path, platform)


def test_index_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.json"
    with path.open("wb") as file:
        file.truncate(2**31 + 1)
    with pytest.raises(BadInput, match=str(path)) as refused:
        read_index(path)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not an index"), ("[]", "not an index"), ('{"format":9,"images":[]}', "format 9")]
)
def test_malformed_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "images.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_index(path)


def test_image_list_remote_shows_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    path = tmp_path / "images.json"
    image = Image("sha256:1", "content", "linux/amd64", (), {}, "1000", 1_234_000_000)
    results = (*tuple(Check("base", name, CheckResult.PASSED) for name in "abc"), Check("base", "d", CheckResult.NOT_RUN))
    entry = PublishedImage(
        "host/x", "tag", f"sha256:{'2' * 64}", "flashinfer-0.6.6", "ab" * 32, verified(image=image, checks=results)
    )
    write_record(path, PublishedIndex(FORMAT, (entry,)))
    monkeypatch.setenv("DOCKER_HOST", "unix:///absent")
    result = CliRunner().invoke(app, ["image", "list", "--remote", "--index", str(path)])
    assert result.exit_code == 0, result.output
    cells = ("host/x:tag", "222222222222", "flashinfer-0.6.6", "linux/amd64", "1.2 GB", "3 passed, 1 not run", "no")
    assert [cell for cell in cells if cell not in result.stdout] == []
    listed = CliRunner().invoke(app, ["image", "list", "--remote", "--json"], env={"SM120KIT_INDEX": str(path)})
    assert [image["digest"] for image in json.loads(listed.stdout)] == [entry.digest]
    absent = CliRunner().invoke(app, ["image", "list", "--remote", "--index", str(tmp_path / "absent")])
    assert isinstance(absent.exception, BadInput)


def test_disk_for_all_steps_of_a_build_is_required_before_the_first_download(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path)
    free = shutil.disk_usage(tmp_path).free
    wheel = LockedWheel("a", "1", "a-1-py3-none-any.whl", "a" * 64)
    closure = Closure("manylinux_2_35_x86_64", "3.11", (wheel,), "")
    workspace.cache.mkdir(parents=True, exist_ok=True)
    (workspace.cache / "wheel-sizes.json").write_text(json.dumps({"bytes": {wheel.sha256: free // 2}}))
    options = Options(workspace, origin=Origin(offline=True))
    with pytest.raises(ResourceUnavailable, match=r"the image of vllm-0\.33\.0 needs"):  # the wheel alone would fit
        delivery.prepare("", recipes.load_engine("vllm-0.33.0"), closure, options)
    assert not workspace.downloads.exists() and not (tmp_path / "oci-unpacked").exists()
    (workspace.downloads / wheel.sha256).mkdir(parents=True)
    (workspace.downloads / wheel.sha256 / wheel.filename).touch()
    packages = sum(package.size for package in bases.read_lock("debian-12", "x86_64"))
    assert delivery.missing_bytes("debian-12", closure, options) == 8 * packages, "no wheel is to be fetched"


@pytest.mark.parametrize(("machine", "written"), [("x86_64", True), ("aarch64", False)])
def test_layers_of_a_wheel_are_those_of_its_machine(machine: str, written: bool, tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path)
    wheel = LockedWheel("a", "1", "a-1-py3-none-any.whl", "a" * 64)
    layout_images.add_image(workspace, (1,), more={image_inputs.WHEELS: image_inputs.listed_wheels([wheel])}, machine="amd64")
    (workspace.downloads / wheel.sha256).mkdir(parents=True)
    (workspace.downloads / wheel.sha256 / wheel.filename).write_bytes(b"content")
    closure = Closure(f"manylinux_2_35_{machine}", "3.11", (wheel,), "")
    for each in ("x86_64", "aarch64"):
        write_atomic(_base.record_path(bases.load("debian-12"), each, workspace), b"{}")
    needed = delivery.missing_bytes("debian-12", closure, Options(workspace, origin=Origin(offline=True)))
    assert (needed == 0) is written


def test_kernels_of_an_image_for_another_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    closure = Closure("manylinux_2_35_x86_64", "3.11", (), "")
    recipe = recipes.load_engine("sglang-0.5.11-b12x")
    with pytest.raises(RequirementMissing, match="kernels of b12x in its image, which is not done in an emulator on aarch64"):
        delivery.prepare("", recipe, closure, Options(Workspace.open(tmp_path)))


def layer(layout: Layout, *members: tuple[str, bytes]) -> Descriptor:
    with layout.writer() as blob:
        written = LayerWriter(blob)
        for name, content in members:
            written.file(name, [content], len(content))
        return written.finish()


def image_of(layout: Layout, settings: dict[str, Any], *layers: Descriptor) -> str:
    config = {"os": "linux", "architecture": "amd64", "config": settings}
    return layout.add_image(layers, config).digest


def test_dockerfile_adds_the_layers_and_repeats_the_settings(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "oci")
    settings = {
        "Env": ['A=two "words" and $3\\'],
        "Labels": {"x": "$y"},
        "User": "1000:1000",
        "Entrypoint": ["a", "$b"],
        "Healthcheck": {"Test": ["CMD", "x"], "Interval": 30 * 10**9, "Retries": 3},
    }
    one, two = layer(layout, ("a", b"1")), layer(layout, ("a", b"2"))
    export_dockerfile(layout, image_of(layout, settings, one, two), tmp_path / "context")
    assert {path.name for path in (tmp_path / "context").iterdir()} == {"Dockerfile", "00.tar", "01.tar"}
    assert (tmp_path / "context" / "01.tar").read_bytes() == layout.path(two.digest).read_bytes()
    lines = (tmp_path / "context" / "Dockerfile").read_text().splitlines()
    assert lines[1:4] == ["FROM scratch", "ADD 00.tar /", "ADD 01.tar /"]
    assert {*lines[4:]} == {
        'LABEL "x"="\\$y"',
        'ENV A="two \\"words\\" and \\$3\\\\"',
        "USER 1000:1000",
        'ENTRYPOINT ["a", "$b"]',
        'HEALTHCHECK --interval=30000ms --retries=3 CMD ["x"]',
    }


def test_image_that_a_dockerfile_cannot_describe_is_refused(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "oci")
    lines = image_of(layout, {"Env": ["A=one\ntwo"]}, layer(layout, ("a", b"")))
    volume = image_of(layout, {"Volumes": {"/x": {}}}, layer(layout, ("a", b"")))
    for image, problem in ((lines, "one"), (volume, "Volumes")):
        with pytest.raises(BadInput, match=problem):
            export_dockerfile(layout, image, tmp_path / "context")
    assert not (tmp_path / "context").exists()
    (tmp_path / "context").mkdir()
    with pytest.raises(SystemRefused, match="exists"):
        export_dockerfile(layout, lines, tmp_path / "context")


def test_image_list_shows_tags_and_status(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "state")
    (_, current), (manifest, older), (untagged, _) = (
        layout_images.add_image(workspace, (seed,), f"{seed}" * 64, size=2**12) for seed in (1, 2, 3)
    )
    layout = Layout(workspace.root / "oci")
    path = checks.record_path(workspace, layout.image(manifest))
    write_record(path, dataclasses.replace(read_record(VerifiedImage, path), suite="0" * 64))
    image = layout.image(untagged)
    checks.record_path(workspace, image).unlink()
    layout.untag(image.labels["sm120kit.reference"])
    listed = CliRunner().invoke(app, ["image", "list", "--json", "--state", str(workspace.root)])
    assert {(*entry["tags"], entry["standing"]) for entry in json.loads(listed.stdout)} == {
        (current, "verified"),
        (older, "verified by older checks"),
        ("not verified",),
    }
