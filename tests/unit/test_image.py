"""Build contexts, the runner of checks, and the index; no daemon is needed."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, Mismatch, NotFound, NotTrusted, NotVerified, RequirementMissing, ResourceUnavailable
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks, context, delivery, registry
from sm120kit.images.delivery import Builder, ImageRequest
from sm120kit.images.docker import builders
from sm120kit.images.index import FORMAT, PublishedIndex, find_image, read_index
from sm120kit.images.records import Check, CheckResult, Image, ImageContext, PublishedImage, VerifiedImage
from sm120kit.recipes.records import Closure
from sm120kit.sources.context import Options
from sm120kit.sources.origin import Origin
from sm120kit.sources.records import LockedWheel

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
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Create a build context from small files; keywords replace its inputs."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    patched = wheels / "flashinfer_python-0.6.6+sm120kit.1-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(patched, "w") as archive:
        archive.writestr(zipfile.ZipInfo("flashinfer_python-0.6.6.dist-info/sm120kit.json"), json.dumps(ORIGIN))

    def wheel(name: str, content: str) -> tuple[LockedWheel, Path]:
        path = wheels / f"{name}-1.0-py3-none-any.whl"
        path.write_text(content)
        return LockedWheel(name, "1.0", path.name, file_sha256(path)), path

    installer, pip = wheel("pip", "an installer")
    monkeypatch.setattr(context, "INSTALLER", installer)
    locked = [wheel("idna", "a wheel"), wheel("nvidia-cublas", "a big wheel")]

    def make_context(state: str = "state", **changed: Any) -> ImageContext:
        setup = {"kind": "flashinfer", "recipe": "flashinfer-0.6.6", "labels": LABELS, "env": {"ARCH": "12.0f"}}
        setup |= {name: changed.pop(name) for name in [*changed] if name in context.ImageSetup.__dataclass_fields__}
        inputs: dict[str, Any] = {"base": BASE, "ours": {patched: file_sha256(patched)}, "locked": locked, "installer": pip}
        workspace = Workspace.open(tmp_path / state)
        return context.make_context(context.ImageSetup(**setup), **(inputs | changed), workspace=workspace)

    return make_context


def test_context_contains_all_inputs_by_hash(make: Any) -> None:
    context = make()
    assert {path.name for path in context.directory.iterdir()} == {"Dockerfile", "tools", "cuda", "locked", "ours"}
    for directory, name in (("locked", "idna"), ("cuda", "nvidia-cublas")):
        text = (context.directory / directory / "requirements.txt").read_text()
        sha256 = file_sha256(context.directory / directory / f"{name}-1.0-py3-none-any.whl")
        assert text == f"{name}==1.0 --hash=sha256:{sha256}\n"
    assert (
        (context.directory / "ours" / "requirements.txt").read_text().startswith("flashinfer-python==0.6.6+sm120kit.1 --hash=")
    )
    assert context.arguments == {"BASE": BASE, "SOURCE_DATE_EPOCH": "315532800"}
    assert context.reference == f"sm120kit/flashinfer:0.6.6-sm120kit.{context.digest[:12]}"
    assert (context.directory / "Dockerfile").read_text().endswith('CMD ["python"]\nENV ARCH="12.0f"\n')
    labels = context.labels
    assert labels["org.opencontainers.image.base.digest"] == f"sha256:{'a' * 64}"
    assert labels["org.opencontainers.image.created"] == "1980-01-01T00:00:00Z"
    assert labels["sm120kit.patches"] == "cutlass/one@eeeeeeeeeeee" and labels["sm120kit.ours"].startswith(
        "flashinfer-python=="
    )
    assert labels["sm120kit.wheels"] == "idna==1.0,nvidia-cublas==1.0"


def test_installed_copy_of_sm120kit_makes_the_same_context(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make(**ENGINE)
    shutil.copytree(data_root() / "dockerfiles", tmp_path / "installed" / "dockerfiles")
    (tmp_path / "installed" / "recipes").mkdir()
    for name in ("engine", "tools"):  # pip compiles what it installs
        (tmp_path / "installed" / "dockerfiles" / name / "__pycache__").mkdir(exist_ok=True)
        (tmp_path / "installed" / "dockerfiles" / name / "__pycache__" / "again.cpython-311.pyc").write_bytes(b"\xa7\r\r\n")
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "installed"))
    assert make(state="other", **ENGINE).digest == original.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: (directory / "Dockerfile").write_text("FROM evil\n"),
        lambda directory: (directory / "tools/install.sh").unlink(),
        lambda directory: (directory / "locked/requirements.txt").open("a").write("evil==1.0\n"),
        lambda directory: (directory / "locked/evil-1.0-py3-none-any.whl").write_text("x"),
        lambda directory: replace_file(directory / "locked/idna-1.0-py3-none-any.whl", b"another"),
        lambda directory: replace_file(directory / "cuda/nvidia-cublas-1.0-py3-none-any.whl", b"A big wheel"),
        lambda directory: (directory / "ours/more").symlink_to("/etc/passwd"),
    ],
)
def test_changed_context_is_refused(make: Any, change: Any) -> None:
    context = make()
    change(context.directory)
    with pytest.raises(Mismatch, match=str(context.directory)) as caught:
        make()
    assert caught.value.hint.endswith(f"rm -r {context.directory.parent}")
    shutil.rmtree(context.directory.parent)
    assert make() == context


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file without writing to its hard links."""
    path.unlink()
    path.write_bytes(content)


def test_wheels_are_hard_links(make: Any, tmp_path: Path) -> None:
    directory = make().directory
    for name in ("locked/idna", "cuda/nvidia-cublas"):
        assert (directory / f"{name}-1.0-py3-none-any.whl").samefile(
            tmp_path / "wheels" / f"{Path(name).name}-1.0-py3-none-any.whl"
        )


def test_engine_context_has_environment_and_entrypoint_of_the_recipe(make: Any) -> None:
    context = make(**ENGINE)
    text = (context.directory / "Dockerfile").read_text()
    assert text.endswith(
        'ENV A="1" \\\n    B="two \\"words\\" and \\$3"\nENTRYPOINT ["python", "/opt/sm120kit/serve.py", "vllm", "serve"]\n'
    )
    files = {"cuda_home.sh", "healthy.py", "help.txt", "serve.py"}
    assert {path.name for path in (context.directory / "engine").iterdir()} == files
    assert make(**(ENGINE | {"usage": "other options"})).digest != context.digest
    assert context.reference.startswith("sm120kit/vllm:1.0-sm120kit.") and context.labels["sm120kit.recipe"] == "vllm-1.0"
    assert context.labels["org.opencontainers.image.version"] == "1.0"
    assert make(**(ENGINE | {"env": {"A": "2"}})).digest != context.digest
    assert make(**(ENGINE | {"serve": ("vllm", "run")})).digest != context.digest


def test_digest_depends_on_the_inputs_only(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    assert make("another-directory").digest == first.digest
    assert make(base=f"debian@sha256:{'b' * 64}").digest != first.digest
    assert make(labels={}).digest != first.digest
    assert make(locked=[]).digest != first.digest
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert make().digest != first.digest


def test_existing_context_is_reused(make: Any) -> None:
    file = make().directory / "Dockerfile"
    os.utime(file, (1, 1))
    assert make().directory / "Dockerfile" == file and file.stat().st_mtime == 1


@pytest.mark.parametrize(
    "base", ["debian", "debian:12", "debian@sha256:abc", f"sha256:{'A' * 64}", f"debian:sha256:{'a' * 64}", ""]
)
def test_base_without_digest_is_refused(make: Any, base: str) -> None:
    with pytest.raises(NotFound, match="not given by digest"):
        make(base=base)


def test_wheel_with_another_hash_is_refused(make: Any, tmp_path: Path) -> None:
    (wheel,) = tmp_path.glob("wheels/idna*")
    wheel.write_text("other bytes")
    with pytest.raises(NotTrusted, match="idna"):
        make()
    assert not list(tmp_path.glob("state/images/*"))


def test_wheel_without_origin_is_refused(make: Any, tmp_path: Path) -> None:
    (wheel,) = tmp_path.glob("wheels/idna*")
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
    assert make(ours={wheel: "1" * 64}).ours[0].wheel.sha256 == "1" * 64


def test_unknown_kind_is_refused(make: Any) -> None:
    with pytest.raises(NotFound, match="no Dockerfile for 'toaster'"):
        make(kind="toaster")


def test_dockerfiles_name_no_host_and_download_nothing() -> None:
    dockerfiles = Path(__file__).parents[2] / "dockerfiles"
    for path in sorted(path for path in dockerfiles.rglob("*") if path.is_file()):
        text = path.read_text()
        assert "# syntax" not in text and text.count("://") == text.count("http://127.0.0.1:"), path
        for word in ("git clone", "curl", "wget", "apt-get", "index-url"):
            assert word not in text, f"{path}: {word}"


def test_dockerfiles_set_a_user_and_copy_rarely_changed_files_first(make: Any) -> None:
    for setup in ({}, ENGINE):
        last = (make(**setup).directory / "Dockerfile").read_text().rpartition("\nFROM ")[2]
        assert last.startswith("${BASE} AS runtime\n") and last.count("\nUSER ") == 1 and "\nUSER 1000:1000\n" in last
        stages = re.findall(r"^COPY --from=(\w+) ", last, re.MULTILINE)
        assert [stage for stage in stages if stage != "toolkit"] == ["installer", "cuda", "locked", "ours"]
        assert "\nRUN " not in last and ("\nHEALTHCHECK " in last) == bool(setup)


def test_suites_include_those_of_the_parents() -> None:
    assert checks.suites("flashinfer") == ("base", "flashinfer")
    assert checks.suites("vllm") == ("base", "flashinfer", "engine", "vllm")
    with pytest.raises(NotFound, match="toaster"):
        checks.suites("toaster")


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
    for name in ("run.py", "driver_stub.py"):
        shutil.copy(Path(checks.__file__).parent / "suites" / name, tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "checks.py").write_text(SUITE)
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
        registry.require_passed(verified(checks=results))
    registry.require_passed(verified())


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
        with pytest.raises(BadInput, match=message):
            find_image(name, path, platform)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not an index"), ("[]", "not an index"), ('{"format":9,"images":[]}', "format 9")]
)
def test_malformed_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "images.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_index(path)


def test_context_stream_has_fixed_times_and_owners(tmp_path: Path) -> None:
    content = {
        "Dockerfile": b"FROM x\n",
        f"locked/{'long-name-' * 20}.whl": b"x" * 1000,
        "ours/empty": b"",
        "cuda/block": bytes(512),
    }
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    first = b"".join(builders.packed(tmp_path))
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        members = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        assert {name: file.read() for name, file in members.items() if file} == content
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert b"".join(builders.packed(tmp_path)) == first


@pytest.mark.parametrize(
    ("requirement", "content", "again"),
    [
        ("libs-base==4", "B" * 43, True),
        ("libs-base==4", "A" * 43, False),
        ("numpy", "B" * 43, False),
        ("libs-base; extra == 'x'", "B" * 43, False),
    ],
)
def test_wheel_that_replaces_files_of_a_required_wheel_is_installed_again(
    tmp_path: Path, requirement: str, content: str, again: bool
) -> None:
    for name, requires, sha256 in (("libs_base", "numpy>=2", "A" * 43), ("libs_cu13", requirement, content)):
        directory = tmp_path / "site" / f"{name}-4.dist-info"
        directory.mkdir(parents=True)
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4\nRequires-Dist: {requires}\n")
        (directory / "RECORD").write_text(f"dsl/lib.so,sha256={sha256},9\n{name}-4.dist-info/RECORD,,\n")
    (tmp_path / "site" / "dsl").mkdir()
    (tmp_path / "site" / "dsl" / "lib.so").touch()
    lines = "libs-base==4 --hash=sha256:1\nlibs-cu13==4 --hash=sha256:2\n"
    (tmp_path / "requirements.txt").write_text(lines)
    argv = [
        sys.executable,
        data_root() / "dockerfiles" / "tools" / "again.py",
        tmp_path / "site",
        tmp_path / "requirements.txt",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == (lines.splitlines(keepends=True)[1] if again else "")


def test_image_list_remote_shows_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from sm120kit.cli import app

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
    cells = ("host/x:tag", "222222222222", "flashinfer-0.6.6", "linux/amd64", "1.23 GB", "3 passed, 1 not run", "no")
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
        delivery.prepare(ImageRequest(), recipes.load_engine("vllm-0.33.0"), closure, options)
    assert not workspace.downloads.exists() and not (tmp_path / "bases").exists()
    (workspace.downloads / wheel.sha256).mkdir(parents=True)
    (workspace.downloads / wheel.sha256 / wheel.filename).touch()
    assert delivery.missing_bytes("debian@sha256:" + "5" * 64, closure, options) == 0, "nothing is to be fetched"


def test_kernels_of_an_image_for_another_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    closure = Closure("manylinux_2_35_x86_64", "3.11", (), "")
    recipe = recipes.load_engine("sglang-0.5.11-b12x")
    with pytest.raises(RequirementMissing, match="kernels of b12x in its image; this machine, aarch64, runs no program"):
        delivery.prepare(ImageRequest(), recipe, closure, Options(Workspace.open(tmp_path)))


@pytest.mark.parametrize("image_request", [ImageRequest(builder=Builder.DOCKER), ImageRequest(context_only=True)])
def test_dockerfile_of_a_recipe_with_kernels_to_compile_is_refused(image_request: ImageRequest, tmp_path: Path) -> None:
    recipe = recipes.load_engine("sglang-0.5.11-b12x")
    with pytest.raises(RequirementMissing, match="compiles kernels of b12x into its image, which only the builder layers does"):
        delivery.prepare(
            image_request, recipe, Closure("manylinux_2_35_x86_64", "3.11", (), ""), Options(Workspace.open(tmp_path))
        )
