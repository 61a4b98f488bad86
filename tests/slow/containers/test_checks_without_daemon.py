"""The checks of a small image have the same results with a container daemon and without.

The image has Debian's Python, a few real wheels, and a FlashInfer without modules.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import containers
import pytest
import small_flashinfer
from small_image import ImageHost, import_base, tampered

from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.workspace import Workspace
from sm120kit.images import assembly, existing_base, loading
from sm120kit.images import image_inputs as contexts
from sm120kit.images.docker import Daemon
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import CONFIG, LAYER, MANIFEST, Layout

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]

SITE = "/opt/venv/lib/python3.11/site-packages"
INIT = f"{SITE}/flashinfer/{{}}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageHost]:
    """A state directory and a daemon of these tests' own: the checked image gets a tag there."""
    directory = tmp_path_factory.mktemp("host")
    with containers.dockerd(tmp_path_factory.mktemp("d") / "d") as running:
        yield ImageHost(directory / "state", data_root(), running.socket, directory)


@pytest.fixture(scope="module")
def image(host: ImageHost, debian: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of the image in the daemon."""
    workspace = Workspace.open(host.state)
    wheels = small_flashinfer.wheels(workspace, tmp_path_factory.mktemp("wheels"))
    base = import_base(host, debian)
    setup = small_flashinfer.SETUP
    locked, store = dict(wheels.locked), LocalImages(workspace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", host.socket)
        context, settings, programs = contexts.describe(
            setup, base, {wheels.ours: file_sha256(wheels.ours)}, [*locked], workspace
        )
        files = locked | {context.ours[0].wheel: wheels.ours}
        with existing_base.image_base(existing_base.fetch(base, store.layout), store) as image_base:
            described = (settings, programs)
            built, _ = assembly.assemble(context, described, image_base, files.__getitem__, store.layout, workspace)
        loaded = loading.load(store.layout, loading.manifest_digest(store.layout, built.id), Daemon())
    shutil.rmtree(store.layout.directory)  # only the daemon has it
    return loaded.id


def copy_to_layout(host: ImageHost, image: str, layout: Layout, scratch: Path) -> str:
    """Copy an image of the daemon, config included, and return the id that it has in the layout."""
    path = scratch / "saved.tar"
    with path.open("wb") as file:
        for chunk in host.client.images.get(image).save(chunk_size=2**20):
            file.write(chunk)
    with tarfile.open(path) as archive:

        def member(name: str) -> Any:
            content = archive.extractfile(name)
            assert content is not None
            return content

        (saved,) = json.load(member("manifest.json"))
        config = layout.add_blob(member(saved["Config"]).read(), CONFIG)
        layers = []
        for name in saved["Layers"]:
            source = member(name)
            with layout.writer() as blob:
                while chunk := source.read(2**20):
                    blob.write(chunk)
                layers.append(blob.commit(LAYER))
    path.unlink()
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.as_json(),
        "layers": [layer.as_json() for layer in layers],
    }
    layout.add_manifest(json.dumps(document).encode())
    return config.digest


def without_daemon(host: ImageHost, state: Path) -> ImageHost:
    """A host that has the state directory and no daemon."""
    return ImageHost(state, host.data, f"unix://{host.directory}/absent", host.directory)


def results(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {f"{check['suite']}/{check['name']}": (check["verdict"], check["detail"]) for check in report["checks"]}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local") / "state"


@pytest.fixture(scope="module")
def copied(host: ImageHost, image: str, state: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    layout = LocalImages(Workspace.open(state)).layout
    return copy_to_layout(host, image, layout, tmp_path_factory.mktemp("saved"))


def test_image_is_described_as_the_daemon_describes_it(
    host: ImageHost, image: str, copied: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host.socket)
    daemon, store = Daemon(), LocalImages(Workspace.open(state))
    described = [dataclasses.replace(each.find(image), bytes=0) for each in (daemon, store)]
    assert described[0] == described[1] and copied == image
    assert daemon.settings(image) == store.settings(image) and daemon.history(image) == store.history(image)


def test_reports_are_equal(host: ImageHost, image: str, copied: str, state: Path) -> None:
    with_docker = json.loads(host.run("verify", "image", image, "--json").stdout)
    without = json.loads(without_daemon(host, state).run("verify", "image", copied, "--json").stdout)
    first, second = results(with_docker), results(without)
    assert (first.pop("base/base"), second.pop("base/base")[0]) == (("passed", ""), "not run")  # the base was not copied
    assert first == second
    facts = [report["facts"] for report in (with_docker, without)]
    assert [fact.pop("runtime") for fact in facts] == ["docker", "unshare"]
    assert [fact.pop("size") != "" for fact in facts] == [True, True]  # of files, and of layers
    assert facts[0] == facts[1]
    listed = json.loads(without_daemon(host, state).run("image", "list", "--json").stdout)
    assert [(entry["store"], entry["standing"], entry["tags"]) for entry in listed] == [
        ("state directory", "verified", [without["verified"]["reference"]])
    ]


@pytest.mark.parametrize("kind", ["unshare", "bubblewrap"])
def test_report_of_a_user_namespace_is_equal(host: ImageHost, image: str, copied: str, state: Path, kind: str) -> None:
    """The program is that of the command; only the choice of the runtime is limited."""
    program = f"""
import sys
from sm120kit.images import local_images
if {kind!r} == "bubblewrap":
    local_images._command = lambda *request: ["false"]
from sm120kit.cli import main
sys.argv = ["sm120kit", *sys.argv[1:]]
main()
"""
    absent = without_daemon(host, state)
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", "image", copied, "--json"],
        env=absent.environment,
        cwd=absent.directory,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with_docker = json.loads(host.run("verify", "image", image, "--json").stdout)
    report = json.loads(done.stdout)
    assert report["facts"]["runtime"] == kind
    first, second = results(with_docker), results(report)
    first.pop("base/base"), second.pop("base/base")
    assert first == second


FAULTS = (
    ("files", f"echo '# changed' >> {SITE}/tqdm/utils.py"),
    ("owners", f"chown 1000 {SITE}/markupsafe"),
    ("bytecode", f"cp {SITE}/idna/__pycache__/core.cpython-311.pyc {SITE}/idna/__pycache__/codec.cpython-311.pyc"),
    ("no_toolchain", "cp /bin/true /usr/bin/gcc"),
    ("no_secrets", "echo x > /etc/pip.conf"),
    ("versions", f"rm -r {SITE}/idna-*.dist-info"),
    ("import", f"rm {INIT.format('__pycache__/__init__.*')} && echo 'raise ValueError' >> {INIT.format('__init__.py')}"),
    ("user", "chown 0 /home/sm120kit"),
)


def test_faults_are_detected_as_with_docker(host: ImageHost, image: str, tmp_path: Path) -> None:
    """The layer with the faults removes files of lower layers."""
    changed = tampered(host, image, " && ".join(command for _, command in FAULTS))
    layout = LocalImages(Workspace.open(tmp_path / "state")).layout
    copied = copy_to_layout(host, changed, layout, tmp_path)
    with_docker = json.loads(host.run("verify", "image", changed, "--json", code=1).stdout)
    without = json.loads(without_daemon(host, tmp_path / "state").run("verify", "image", copied, "--json", code=1).stdout)
    first, second = results(with_docker), results(without)
    first.pop("base/base"), second.pop("base/base")
    assert {name: verdict for name, (verdict, _) in first.items()} == {name: verdict for name, (verdict, _) in second.items()}
    failed = {name.partition("/")[2] for name, (verdict, _) in second.items() if verdict == "failed"}
    assert {name for name, _ in FAULTS} <= failed
    assert without["verified"] is None and layout.images()[0][1] == ()
    host.client.images.remove(changed, noprune=True)


def test_daemon_is_used_for_what_the_state_directory_lacks(host: ImageHost, image: str, copied: str, state: Path) -> None:
    both = ImageHost(state, host.data, host.socket, host.directory)
    listed = json.loads(both.run("image", "list", "--json").stdout)
    assert sorted(entry["store"] for entry in listed if entry["image"]["id"] == image) == ["docker", "state directory"]
    assert "not built by sm120kit" in both.run("verify", "image", "base:test", code=21).stderr
    done = without_daemon(host, state).run("verify", "image", "base:test", code=60)
    assert "state directory has no image base:test" in done.stderr
    assert not [*(state / "scratch").iterdir()]
