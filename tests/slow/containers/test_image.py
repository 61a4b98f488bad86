"""All stages of a small real image: build, checks, publish, delete, pull on a fresh host, checks again.

The image is that of ``small_image.py``. The tests run in order: each continues from the state of the previous test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import containers
import pytest
from packaging.utils import canonicalize_name
from small_image import CLOSURE, ImageHost, tampered

from sm120kit.core.errors import NotFound, NotVerified

SITE = "/opt/venv/lib/python3.11/site-packages"

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


def test_unknown_base_is_refused(image_host: ImageHost) -> None:
    assert "debian-12-python" in image_host.image("debian:bookworm", code=NotFound.exit_code).stderr


def test_image_is_not_tagged(image_host: ImageHost, image: str) -> None:
    assert image.startswith("sha256:") and image_host.tags() == set() and image_host.names() == set()


def test_publish_refuses_an_unverified_image(image_host: ImageHost, image: str, registry: tuple[str, Path]) -> None:
    assert "not an image that passed its checks" in image_host.run("publish", image, f"{registry[0]}/x/y", code=21).stderr
    assert not (image_host.directory / "images.json").exists()


INIT = f"{SITE}/flashinfer/__init__.py"
FAULTS = (
    ("files", f"echo '# changed' >> {SITE}/tqdm/utils.py"),
    ("files", f"touch {SITE}/added.py"),
    ("bytecode", f"cp {SITE}/idna/__pycache__/core.cpython-311.pyc {SITE}/idna/__pycache__/codec.cpython-311.pyc"),
    ("no_secrets", "echo x > /etc/pip.conf"),
    ("versions", f"sed -i 's/^Version: .*/Version: 9/' {SITE}/tabulate-*.dist-info/METADATA"),
    ("requirements", f"sed -i 's/^Version: .*/Version: 0.1/' {SITE}/sympy-*.dist-info/METADATA"),
    ("modules_load", f"for library in {SITE}/flashinfer/data/aot/*/*.so; do echo damaged > $library; done"),
    ("import", f"for file in {SITE}/flashinfer/__pycache__/__init__.*; do : > $file; done"),
    ("import", f"echo 'import warnings; warnings.warn(\"hello\")' >> {INIT}"),
    ("stderr", f"echo 'import sys; print(\"hello\", file=sys.stderr)' >> {INIT}"),
)


def test_each_check_detects_its_fault(image_host: ImageHost, image: str) -> None:
    """All faults in one image of the daemon, because an image per fault takes too long; they do not mask each other."""
    in_daemon, changed = tampered(image_host, image, " && ".join(command for _, command in FAULTS))
    report = json.loads(image_host.run("verify", "image", changed, "--json", code=1).stdout)
    failed = {check["name"] for check in report["checks"] if check["verdict"] == "failed"}
    assert {name for name, _ in FAULTS} | {"device_code"} <= failed, report
    assert {"size", "history", "user"} & failed == set()
    (files,) = (check["detail"] for check in report["checks"] if check["name"] == "files")
    assert (
        report["verified"] is None
        and "tqdm/utils.py is not the file of tqdm" in files
        and "added.py belongs to no wheel" in files
    )
    assert image_host.names() == set()
    image_host.client.images.remove(in_daemon, noprune=True)


def test_verified_image_is_tagged(image_host: ImageHost, image: str, verified: str) -> None:
    assert image_host.names() == {verified}
    report = json.loads(image_host.run("verify", "image", image, "--json").stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    not_run = {name for name, verdict in verdicts.items() if verdict == "not run"}
    assert not_run == {"kernels", "tactics"} and set(verdicts.values()) == {"passed", "not run"} and len(verdicts) == 20
    facts = report["facts"]
    assert facts["driver"].startswith("a stub") and facts["loaded"] == "fp4_quantization_120f"
    assert facts["answers compared"] == "512" and facts["archs"] == "sm_120f" and int(facts["kernels"]) >= 20
    labels = report["image"]["labels"]
    assert facts["commit"] == labels["sm120kit.commit"] == labels["org.opencontainers.image.revision"]
    actual = image_host.client.api.inspect_image(image)["Config"]["Labels"]
    assert actual["sm120kit.build-id"] == json.loads(CLOSURE.read_text())["sha256"]


@pytest.fixture(scope="module")
def published(image_host: ImageHost, verified: str, registry: tuple[str, Path]) -> dict[str, Any]:
    """The entry in the index. During the push the registry cannot write for some seconds, and responds with 500."""
    address, store = registry
    blocked = store / "docker"
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.write_text("not a directory")
    stderr = image_host.run("publish", verified, f"{address}/sm120kit/flashinfer", code=20).stderr
    assert not (image_host.directory / "images.json").exists(), stderr
    threading.Timer(3, blocked.unlink).start()
    image_host.run("publish", verified, f"{address}/sm120kit/flashinfer")
    (entry,) = json.loads((image_host.directory / "images.json").read_text())["images"]
    return dict(entry)


def test_published_image_is_listed_by_digest(image_host: ImageHost, verified: str, published: dict[str, Any]) -> None:
    assert published["verified"]["reference"] == verified and published["digest"].startswith("sha256:")
    again = image_host.run("publish", verified, published["repository"])
    assert again.stdout.strip() == f"{published['repository']}@{published['digest']}"
    assert "yes" in image_host.run("pull", "--check").stdout


def document(host: ImageHost, entry: dict[str, Any], kind: str) -> dict[str, Any]:
    return dict(json.loads((host.directory / entry["attested"][kind]["path"]).read_text()))


def test_sbom_lists_the_distributions_of_the_container(image_host: ImageHost, published: dict[str, Any], image: str) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions(path=[p])]))"
    code = f"import sysconfig; p = sysconfig.get_path('purelib'); {code}"
    output = image_host.client.containers.run(image, ["python3", "-c", code], network_mode="none", remove=True)
    installed = {(canonicalize_name(name), version) for name, version in json.loads(output)}
    parts = document(image_host, published, "sbom")["components"]
    wheels = {(part["name"], part["version"]): part for part in parts if part["type"] == "library"}
    assert installed == set(wheels)
    locked = {wheel["name"]: wheel["sha256"] for wheel in json.loads(CLOSURE.read_text())["wheels"]}
    hashes = {name: part["hashes"][0]["content"] for (name, _), part in wheels.items()}
    assert locked == {name: sha256 for name, sha256 in hashes.items() if name != "flashinfer-python"}


def test_pedigree_and_provenance_contain_the_patches(image_host: ImageHost, published: dict[str, Any]) -> None:
    labels = published["verified"]["image"]["labels"]
    parts = document(image_host, published, "sbom")["components"]
    (ours,) = (part for part in parts if part["name"] == "flashinfer-python")
    (cutlass,) = ours["components"]
    applied = {f"patches/{patch.partition('@')[0]}.patch" for patch in labels["sm120kit.patches"].split(",")}
    patches = [*ours["pedigree"]["patches"], *cutlass["pedigree"]["patches"]]
    assert {patch["diff"]["url"] for patch in patches} == applied
    definition = document(image_host, published, "statement")["predicate"]["buildDefinition"]
    dependencies = definition["resolvedDependencies"]
    inputs = {entry["name"]: entry["digest"]["sha256"] for entry in dependencies if "sha256" in entry["digest"]}
    for patch in patches:
        text = base64.b64decode(patch["diff"]["text"]["content"])
        assert text == (image_host.data / patch["diff"]["url"]).read_bytes()
        assert inputs[patch["diff"]["url"]] == hashlib.sha256(text).hexdigest()
    assert definition["externalParameters"]["buildId"] == labels["sm120kit.build-id"]
    assert definition["externalParameters"]["kernels"][0]["groups"] == ["tiny"]


@pytest.fixture(scope="module")
def fresh(image_host: ImageHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageHost]:
    """Another host with the index only."""
    root = tmp_path_factory.mktemp("f")
    with containers.dockerd() as running:
        yield ImageHost(root / "state", image_host.data, running.socket, image_host.directory)


def test_image_pulled_on_a_fresh_host_is_the_same(
    image_host: ImageHost, fresh: ImageHost, image: str, verified: str, published: dict[str, Any]
) -> None:
    assert fresh.run("pull", "flashinfer-0.6.6").stdout.strip() == verified
    pulled = fresh.client.images.get(verified)
    assert pulled.id == image and pulled.attrs["RootFS"] == image_host.client.images.get(image).attrs["RootFS"]
    assert fresh.run("verify", "image", verified).stdout.strip().endswith(verified)


def test_pull_removes_an_image_that_is_not_the_verified_one(
    image_host: ImageHost, fresh: ImageHost, image: str, published: dict[str, Any]
) -> None:
    """An attacker pushes a changed image with the same labels and lists it in the index."""
    changed, _ = tampered(image_host, image, f"echo '# changed' >> {SITE}/flashinfer/__init__.py")
    other = published["repository"] + "-forged"
    image_host.client.api.tag(changed, other, published["tag"])
    events = [json.loads(line) for line in image_host.client.api.push(other, tag=published["tag"]).splitlines()]
    (digest,) = (event["aux"]["Digest"] for event in events if "aux" in event)
    before = fresh.tags()
    for name, entry, message in (
        ("changed", published | {"repository": other, "digest": digest}, "not the image that was verified"),
        ("untested", published | {"verified": published["verified"] | {"checks": []}}, "did not pass its checks"),
        ("absent", published | {"digest": f"sha256:{'2' * 64}"}, "has no image sha256:2222"),
    ):
        (image_host.directory / f"{name}.json").write_text(json.dumps({"format": 1, "images": [entry]}))
        code = (NotFound if name == "absent" else NotVerified).exit_code
        assert message in fresh.run("pull", "flashinfer-0.6.6", "--index", f"{name}.json", code=code).stderr
    assert "no" in fresh.run("pull", "--check", "--index", "absent.json", code=1).stdout
    assert fresh.tags() == before and not fresh.client.images.list(name=other)


def test_pull_refuses_a_damaged_blob(fresh: ImageHost, published: dict[str, Any], registry: tuple[str, Path]) -> None:
    for local in fresh.client.images.list():
        fresh.client.images.remove(local.id, force=True)
    shutil.rmtree(fresh.state / "oci")
    blobs = sorted(registry[1].rglob("blobs/sha256/*/*/data"), key=lambda path: path.stat().st_size)
    with blobs[-1].open("r+b") as blob:
        blob.seek(4096)
        original = blob.read(7)
        blob.seek(4096)
        blob.write(b"damaged")
    fresh.run("pull", "flashinfer-0.6.6", code=21)
    assert fresh.tags() == set()
    with blobs[-1].open("r+b") as blob:
        blob.seek(4096)
        blob.write(original)
