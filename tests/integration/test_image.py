"""A small real image through its whole life: context, build, checks, publish, delete, pull on a fresh host, checks again.

The image is that of ``small_image.py``. The tests run in order: each goes on where the one before ended.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import containers
import pytest
from small_image import CLOSURE, Place, imported, tampered

SITE = "/opt/venv/lib/python3.11/site-packages"

pytestmark = [
    pytest.mark.containers,
    pytest.mark.compiler,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


def test_without_a_daemon_the_context_is_ready(place: Place, base: str) -> None:
    absent = Place(place.state, place.data, f"unix://{place.folder}/nobody", place.folder)
    done = absent.image(base, code=60)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("the build context is ready: "))
    context = Path(line.partition(": ")[2])
    for name in ("tools", "locked", "ours"):
        wanted = {text.split()[0] for text in (context / name / "requirements.txt").read_text().splitlines()}
        assert len(list((context / name).glob("*.whl"))) == len(wanted) > 0
    assert "DOCKER_HOST" in done.stderr


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("debian:bookworm", "not named by digest"),
        ("debian@sha256:123", "not named by digest"),
        (f"sha256:{'0' * 64}", "is not here"),
    ],
)
def test_a_base_that_cannot_be_meant(place: Place, base: str, words: str) -> None:
    assert words in place.image(base, code=61).stderr


def test_a_base_that_its_registry_does_not_have(place: Place, registry: tuple[str, Path]) -> None:
    place.image(f"{registry[0]}/nothing/here@sha256:{'1' * 64}", code=61)


def test_the_daemon_is_killed_in_the_middle(place: Place, base: str, daemon: containers.Dockerd) -> None:
    words = place.argv("image", "flashinfer@0.6.6", "--kernels", "tiny", "--base", base, "--closure", CLOSURE)
    child = subprocess.Popen(words, env=place.environment, cwd=place.folder, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    installing = False
    for line in child.stderr:
        if installing and "Running in" in line:
            break
        installing = "install.sh locked" in line
    daemon.kill()
    rest = child.stderr.read()
    assert child.wait() == 60, rest
    daemon.stop()
    daemon.start()
    assert place.names() == {"base:test"}


def test_a_second_run_resumes_and_the_image_has_no_name(place: Place, image: str) -> None:
    assert image.startswith("sha256:") and place.names() == {"base:test"}
    assert "nothing to do" in place.image(place.client.images.get("base:test").id).stderr


def test_an_untested_image_is_not_published(place: Place, image: str, registry: tuple[str, Path]) -> None:
    assert "not an image that passed its checks" in place.run("publish", image, f"{registry[0]}/x/y", code=63).stderr
    assert not (place.folder / "images.json").exists()


INIT = f"{SITE}/flashinfer/__init__.py"
FAULTS = (
    ("files", f"echo '# changed' >> {SITE}/tqdm/utils.py"),
    ("files", f"touch {SITE}/added.py"),
    ("owners", f"chmod 777 {SITE}/numpy"),
    ("bytecode", f"cp {SITE}/idna/__pycache__/core.cpython-311.pyc {SITE}/idna/__pycache__/codec.cpython-311.pyc"),
    ("no_toolchain", "cp /bin/true /usr/bin/gcc"),
    ("no_secrets", "echo x > /etc/pip.conf"),
    ("versions", f"sed -i 's/^Version: .*/Version: 9/' {SITE}/tabulate-*.dist-info/METADATA"),
    ("requirements", f"rm -r {SITE}/idna-*.dist-info"),
    ("compiled_ahead", f"rm -r {SITE}/flashinfer/data/aot"),
    ("import", f"rm {SITE}/flashinfer/__pycache__/__init__.* && echo 'import warnings; warnings.warn(\"hello\")' >> {INIT}"),
    ("stderr", f"echo 'import sys; print(\"hello\", file=sys.stderr)' >> {INIT}"),
)


def test_every_check_finds_its_fault(place: Place, image: str) -> None:
    """All at once, for an image per fault would take long; they do not hide each other."""
    changed = tampered(place, image, " && ".join(command for _, command in FAULTS))
    report = json.loads(place.run("verify", "image", changed, "--json", code=1).stdout)
    failed = {check["name"] for check in report["checks"] if check["verdict"] == "failed"}
    assert {name for name, _ in FAULTS} | {"device_code"} <= failed, report
    assert {"size", "history", "base", "user"} & failed == set()
    (files,) = (check["detail"] for check in report["checks"] if check["name"] == "files")
    assert (
        report["verified"] is None
        and "tqdm/utils.py is not the file of tqdm" in files
        and "added.py belongs to no wheel" in files
    )
    assert place.names() == {"base:test"}
    place.client.images.remove(changed, noprune=True)


def test_an_image_of_somebody_else_is_refused(place: Place) -> None:
    assert "not one of ours" in place.run("verify", "image", "base:test", code=63).stderr


def test_checks_pass_and_then_it_has_a_name(place: Place, image: str, verified: str) -> None:
    assert place.names() == {"base:test", verified}
    report = json.loads(place.run("verify", "image", image, "--json").stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    not_run = {name for name, verdict in verdicts.items() if verdict == "not run"}
    assert not_run == {"kernels", "tactics"} and set(verdicts.values()) == {"passed", "not run"} and len(verdicts) == 21
    said = report["said"]
    assert said["driver"].startswith("a stand-in") and said["loaded"] == "fp4_quantization_120f"
    assert said["answers compared"] == "512" and said["archs"] == "sm_120f" and int(said["kernels"]) >= 20
    labels = report["image"]["labels"]
    assert said["commit"] == labels["sm120kit.commit"] == labels["org.opencontainers.image.revision"]
    said_by_daemon = place.client.api.inspect_image(image)["Config"]["Labels"]
    assert said_by_daemon["sm120kit.build-id"] == json.loads(CLOSURE.read_text())["sha256"]


def test_a_tampered_image_is_not_published(place: Place, image: str, verified: str, registry: tuple[str, Path]) -> None:
    changed = tampered(place, image, f"echo '# changed' >> {SITE}/flashinfer/__init__.py")
    place.client.api.tag(changed, *verified.rsplit(":", 1))
    assert "not an image that passed its checks" in place.run("publish", verified, f"{registry[0]}/x/y", code=63).stderr
    place.client.api.tag(image, *verified.rsplit(":", 1))


@pytest.fixture(scope="module")
def published(place: Place, verified: str, registry: tuple[str, Path]) -> dict[str, Any]:
    """The index's entry. While it is pushed the registry cannot write for some seconds, and answers 500."""
    address, store = registry
    blocked = store / "docker"
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.write_text("not a directory")
    said = place.run("publish", verified, f"{address}/sm120kit/flashinfer", code=65).stderr
    assert not (place.folder / "images.json").exists(), said
    threading.Timer(3, blocked.unlink).start()
    place.run("publish", verified, f"{address}/sm120kit/flashinfer")
    (entry,) = json.loads((place.folder / "images.json").read_text())["images"]
    return dict(entry)


def test_published_is_listed_by_digest(place: Place, verified: str, published: dict[str, Any]) -> None:
    assert published["verified"]["reference"] == verified and published["digest"].startswith("sha256:")
    again = place.run("publish", verified, published["repository"])
    assert again.stdout.strip() == f"{published['repository']}@{published['digest']}"
    assert "yes" in place.run("pull", "--check").stdout


def test_a_tag_is_never_moved(place: Place, verified: str, published: dict[str, Any]) -> None:
    other = published["repository"] + "-other"
    place.client.api.tag("base:test", other, published["tag"])
    place.client.api.push(other, tag=published["tag"])
    assert "tags are never moved" in place.run("publish", verified, other, "--index", "other.json", code=64).stderr
    assert not (place.folder / "other.json").exists()


@pytest.fixture(scope="module")
def fresh(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Another host: nothing is there but the index."""
    root = tmp_path_factory.mktemp("f")
    with containers.dockerd(root / "d") as running:
        yield Place(root / "state", place.data, running.socket, place.folder)


def test_pulled_on_a_fresh_host_it_is_the_same(
    place: Place, fresh: Place, image: str, verified: str, published: dict[str, Any]
) -> None:
    assert fresh.run("pull", "flashinfer-0.6.6").stdout.strip() == verified
    pulled = fresh.client.images.get(verified)
    assert pulled.attrs["RepoDigests"] == [f"{published['repository']}@{published['digest']}"]
    assert pulled.id == image and pulled.attrs["RootFS"] == place.client.images.get(image).attrs["RootFS"]
    assert fresh.run("verify", "image", verified).stdout.strip().endswith(verified)


def test_what_is_not_the_verified_image_is_not_kept(place: Place, fresh: Place, image: str, published: dict[str, Any]) -> None:
    """Somebody pushes a changed image with the same labels and points the index to it."""
    changed = tampered(place, image, f"echo '# changed' >> {SITE}/flashinfer/__init__.py")
    other = published["repository"] + "-evil"
    place.client.api.tag(changed, other, published["tag"])
    said = [json.loads(line) for line in place.client.api.push(other, tag=published["tag"]).splitlines()]
    (digest,) = (line["aux"]["Digest"] for line in said if "aux" in line)
    before = fresh.names()
    for name, entry, words in (
        ("changed", published | {"repository": other, "digest": digest}, "not the image that was verified"),
        ("untested", published | {"verified": published["verified"] | {"checks": []}}, "did not pass its checks"),
        ("absent", published | {"digest": f"sha256:{'2' * 64}"}, "manifest unknown"),
    ):
        (place.folder / f"{name}.json").write_text(json.dumps({"format": 1, "images": [entry]}))
        code = 61 if name == "absent" else 63
        assert words in fresh.run("pull", "flashinfer-0.6.6", "--index", f"{name}.json", code=code).stderr
    assert "no" in fresh.run("pull", "--check", "--index", "absent.json", code=1).stdout
    assert fresh.names() == before and not fresh.client.images.list(name=other)


def test_a_damaged_blob_is_refused(fresh: Place, published: dict[str, Any], registry: tuple[str, Path]) -> None:
    for one in fresh.client.images.list():
        fresh.client.images.remove(one.id, force=True)
    blobs = sorted(registry[1].rglob("blobs/sha256/*/*/data"), key=lambda path: path.stat().st_size)
    with blobs[-1].open("r+b") as blob:
        blob.seek(4096)
        sound = blob.read(7)
        blob.seek(4096)
        blob.write(b"damaged")
    fresh.run("pull", "flashinfer-0.6.6", code=21)
    assert fresh.names() == set()
    with blobs[-1].open("r+b") as blob:
        blob.seek(4096)
        blob.write(sound)


def test_the_daemons_disk_is_full(place: Place, debian: Path, tmp_path: Path) -> None:
    root = tmp_path / "d"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=450m", "tmpfs", root], check=True)
    try:
        with containers.dockerd(root) as running:
            small = Place(place.state, place.data, running.socket, place.folder)
            assert "full" in small.image(imported(small, debian), code=43).stderr
            assert small.names() == {"base:test"}
    finally:
        subprocess.run(["umount", "-l", root], check=False)
