"""Build contexts, checks and the index, as far as no daemon is needed."""

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

from sm120kit import image, registry
from sm120kit.daemon import building
from sm120kit.errors import BadArtifact, BadIndex, HashMismatch, NoSuchImage, NotVerified, UnknownName
from sm120kit.records import Check, Image, ImageContext, LockedWheel, PublishedImage, Verdict, VerifiedImage
from sm120kit.verify import image as checks
from sm120kit.workspace import Workspace, data_root, file_sha256, write_record

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
    "patches": [{"project": "cutlass", "slug": "one", "sha256": "e" * 64}],
}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a context from small files; keywords replace what goes in."""
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
    monkeypatch.setattr(image, "INSTALLER", installer)
    locked = [wheel("idna", "a wheel"), wheel("nvidia-cublas", "a big wheel")]

    def make(state: str = "state", **changed: Any) -> ImageContext:
        setup = {"kind": "flashinfer", "recipe": "flashinfer-0.6.6", "labels": LABELS, "env": {"ARCH": "12.0f"}}
        setup |= {name: changed.pop(name) for name in [*changed] if name in image.Setup.__dataclass_fields__}
        inputs: dict[str, Any] = {"base": BASE, "ours": [patched], "locked": locked, "installer": pip}
        workspace = Workspace.open(tmp_path / state)
        return image.make_context(image.Setup(**setup), **(inputs | changed), workspace=workspace)

    return make


def test_a_context_holds_everything_by_hash(made: Any) -> None:
    context = made()
    assert {path.name for path in context.directory.iterdir()} == {"Dockerfile", "tools", "cuda", "locked", "ours"}
    for folder, name in (("locked", "idna"), ("cuda", "nvidia-cublas")):
        text = (context.directory / folder / "requirements.txt").read_text()
        sha256 = file_sha256(context.directory / folder / f"{name}-1.0-py3-none-any.whl")
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


def test_wheels_are_linked_not_copied(made: Any, tmp_path: Path) -> None:
    place = made().directory
    for name in ("locked/idna", "cuda/nvidia-cublas"):
        assert (place / f"{name}-1.0-py3-none-any.whl").samefile(
            tmp_path / "wheels" / f"{Path(name).name}-1.0-py3-none-any.whl"
        )


def test_an_engine_sets_and_starts_what_its_recipe_says(made: Any) -> None:
    context = made(**ENGINE)
    text = (context.directory / "Dockerfile").read_text()
    assert text.endswith('ENV A="1" \\\n    B="two \\"words\\" and \\$3"\nENTRYPOINT ["vllm", "serve"]\n')
    assert {path.name for path in (context.directory / "engine").iterdir()} == {"cuda_home.sh", "healthy.py"}
    assert context.reference.startswith("sm120kit/vllm:1.0-sm120kit.") and context.labels["sm120kit.recipe"] == "vllm-1.0"
    assert context.labels["org.opencontainers.image.version"] == "1.0"
    assert made(**(ENGINE | {"env": {"A": "2"}})).digest != context.digest
    assert made(**(ENGINE | {"serve": ("vllm", "run")})).digest != context.digest


def test_the_digest_is_of_what_goes_in(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made()
    assert made("another-directory").digest == first.digest
    assert made(base=f"debian@sha256:{'b' * 64}").digest != first.digest
    assert made(labels={}).digest != first.digest
    assert made(locked=[]).digest != first.digest
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert made().digest != first.digest


def test_a_context_that_is_there_is_left_alone(made: Any) -> None:
    file = made().directory / "Dockerfile"
    os.utime(file, (1, 1))
    assert made().directory / "Dockerfile" == file and file.stat().st_mtime == 1


@pytest.mark.parametrize(
    "base", ["debian", "debian:12", "debian@sha256:abc", f"sha256:{'A' * 64}", f"debian:sha256:{'a' * 64}", ""]
)
def test_a_base_that_can_move_is_refused(made: Any, base: str) -> None:
    with pytest.raises(NoSuchImage, match="not named by digest"):
        made(base=base)


def test_other_bytes_than_the_locked_are_refused(made: Any, tmp_path: Path) -> None:
    (wheel,) = tmp_path.glob("wheels/idna*")
    wheel.write_text("other bytes")
    with pytest.raises(HashMismatch, match="idna"):
        made()
    assert not list(tmp_path.glob("state/images/*"))


def test_a_wheel_that_does_not_say_what_it_is(made: Any, tmp_path: Path) -> None:
    (wheel,) = tmp_path.glob("wheels/idna*")
    with pytest.raises(BadArtifact, match="not a wheel that sm120kit built"):
        made(ours=[wheel])


def test_an_unknown_kind(made: Any) -> None:
    with pytest.raises(UnknownName, match="no Dockerfile for 'toaster'"):
        made(kind="toaster")


def test_no_dockerfile_names_a_place_or_fetches(made: Any) -> None:
    place = Path(__file__).parents[2] / "dockerfiles"
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        text = path.read_text()
        assert "# syntax" not in text and text.count("://") == text.count("http://127.0.0.1:"), path
        for word in ("git clone", "curl", "wget", "apt-get", "index-url"):
            assert word not in text, f"{path}: {word}"


def test_every_image_runs_as_a_user_and_copies_what_changes_least_first(made: Any) -> None:
    for setup in ({}, ENGINE):
        last = (made(**setup).directory / "Dockerfile").read_text().rpartition("\nFROM ")[2]
        assert last.startswith("${BASE} AS runtime\n") and last.count("\nUSER ") == 1 and "\nUSER 1000:1000\n" in last
        stages = re.findall(r"^COPY --from=(\w+) ", last, re.MULTILINE)
        assert [stage for stage in stages if stage != "toolkit"] == ["installer", "cuda", "locked", "ours"]
        assert "\nRUN " not in last and ("\nHEALTHCHECK " in last) == bool(setup)


def test_children_pass_their_parents_checks() -> None:
    assert checks.suites("flashinfer") == ("base", "flashinfer")
    assert checks.suites("vllm") == ("base", "flashinfer", "engine", "vllm")
    with pytest.raises(UnknownName, match="toaster"):
        checks.suites("toaster")


SUITE = """
import warnings
def check_good(expected): return {"found": expected["word"]}
def check_bad(expected): assert False, "it is bad"
def check_broken(expected): return 1 / 0
def check_warns(expected): warnings.warn("odd")
def check_absent(expected): raise NotRun("no driver")
def check_leaves(expected): raise SystemExit(0)
"""


def test_the_runner_hides_nothing(tmp_path: Path) -> None:
    for name in ("run.py", "standin.py"):
        shutil.copy(Path(__file__).parents[1] / "image" / name, tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "checks.py").write_text(SUITE)
    (tmp_path / "expected.json").write_text('{"word": "hello"}')
    done = subprocess.run(
        [sys.executable, tmp_path / "run.py", tmp_path / "expected.json", "one"], capture_output=True, text=True
    )
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    verdicts = {name: line["verdict"] for name, line in lines.items()}
    failed = dict.fromkeys(("bad", "broken", "warns", "leaves"), "failed")
    assert verdicts == {"good": "passed", "absent": "not run", **failed}
    assert lines["good"]["said"] == {"found": "hello"} and lines["bad"]["detail"] == "it is bad"
    assert "ZeroDivisionError" in lines["broken"]["detail"] and "odd" in lines["warns"]["detail"]


def verified(**changed: Any) -> VerifiedImage:
    found = Image("sha256:1", "content", "linux/amd64", (), {}, "1000", 1)
    record = VerifiedImage(found, "sm120kit/flashinfer:tag", "suite", (Check("base", "user", Verdict.PASSED),), {})
    return dataclasses.replace(record, **changed)


@pytest.mark.parametrize("list_of", [(), (Check("base", "user", Verdict.FAILED),), (Check("base", "user", Verdict.NOT_RUN),)])
def test_a_record_without_passed_checks_is_none(list_of: tuple[Check, ...]) -> None:
    with pytest.raises(NotVerified, match="did not pass"):
        registry.require_passed(verified(checks=list_of))
    registry.require_passed(verified())


def test_an_index_is_read_back_and_asked(tmp_path: Path) -> None:
    path = tmp_path / "images.json"
    assert registry.read_index(path).images == ()
    entries = tuple(
        PublishedImage("host/x", tag, "sha256:2", "flashinfer-0.6.6", build * 32, verified())
        for tag, build in (("one", "ab"), ("two", "cd"))
    )
    write_record(path, registry.Index(registry.FORMAT, entries))
    assert registry.read_index(path).images == entries
    assert registry.find("one", path, "linux/amd64") == entries[0]
    assert registry.find("cdcdcdcd", path, "linux/amd64") == entries[1]
    for name, platform, words in (
        ("flashinfer@0.6.6", "linux/amd64", "2 images"),
        ("one", "linux/arm64", "no image 'one' for linux/arm64"),
        ("vllm", "linux/amd64", "no image 'vllm'"),
    ):
        with pytest.raises(BadIndex, match=words):
            registry.find(name, path, platform)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not an index"), ("[]", "not an index"), ('{"format":9,"images":[]}', "format 9")]
)
def test_what_is_no_index(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "images.json"
    path.write_text(text)
    with pytest.raises(BadIndex, match=words):
        registry.read_index(path)


def test_a_context_goes_to_the_daemon_as_it_is_but_for_times_and_owners(tmp_path: Path) -> None:
    content = {
        "Dockerfile": b"FROM x\n",
        f"locked/{'long-name-' * 20}.whl": b"x" * 1000,
        "ours/empty": b"",
        "cuda/block": bytes(512),
    }
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    first = b"".join(building.packed(tmp_path))
    with tarfile.open(fileobj=io.BytesIO(first)) as archive:
        found = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        assert {name: file.read() for name, file in found.items() if file} == content
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert b"".join(building.packed(tmp_path)) == first


@pytest.mark.parametrize(
    ("needs", "content", "again"),
    [
        ("libs-base==4", "B" * 43, True),
        ("libs-base==4", "A" * 43, False),
        ("numpy", "B" * 43, False),
        ("libs-base; extra == 'x'", "B" * 43, False),
    ],
)
def test_what_replaces_files_of_a_wheel_that_it_requires_is_installed_again(
    tmp_path: Path, needs: str, content: str, again: bool
) -> None:
    for name, requires, sha256 in (("libs_base", "numpy>=2", "A" * 43), ("libs_cu13", needs, content)):
        place = tmp_path / "site" / f"{name}-4.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4\nRequires-Dist: {requires}\n")
        (place / "RECORD").write_text(f"dsl/lib.so,sha256={sha256},9\n{name}-4.dist-info/RECORD,,\n")
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
