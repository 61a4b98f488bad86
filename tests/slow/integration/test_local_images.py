"""Programs run in images of an OCI layout without a container daemon, in each kind of container that is permitted here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import layers
import pytest

from sm120kit.core.errors import Mismatch, NotTrusted, RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import local_images
from sm120kit.images.local_images import LocalImages

KINDS = ("unshare", "bubblewrap")


def limited_to(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only one kind of container."""
    if kind == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    if kind == "bubblewrap":
        monkeypatch.setattr(local_images, "_command", lambda *request: ["false"])


@pytest.fixture
def store(tmp_path: Path) -> LocalImages:
    return LocalImages(Workspace.open(tmp_path / "state"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    limited_to(request.param, monkeypatch)
    return str(request.param)


INSPECT = """
id -u; id -g; id -Gn; pwd; env; cat /tmp/checks/f greeting; touch written /tmp/written && ls
grep -E '^(Cap|NoNewPrivs|SigIgn)' /proc/self/status
ls /proc; ls /sys; ls /dev
"""


def test_program_is_the_images_user_and_alone(store: LocalImages, kind: str) -> None:
    image = store.find(layers.small_image(store.layout).digest)
    done = store.run(image.id, ["sh", "-c", INSPECT], {"checks/f": b"content\n"})
    lines = done.stdout.splitlines()
    assert (done.code, done.runtime, done.stderr) == (0, kind, "")
    assert lines[:4] == ["1000", "1000", "user", "/home/user"]
    assert {"PATH=/bin", "A=b=c", "HOME=/home/user", "content", "hello", "written"} <= {*lines}
    assert not any(line.startswith(("SM120KIT", "PYTEST", "DOCKER", "LANG")) for line in lines)
    status = dict(line.split(":\t") for line in lines if ":\t" in line)
    assert status.pop("NoNewPrivs") == "1" and {*status.values()} == {"0" * 16}, status
    processes = [line for line in lines if line.isdigit()][2:]
    assert len(processes) <= 4 and {"cpu", "null", "shm", "meminfo", "devices"} - {"cpu"} <= {*lines}


def test_image_cannot_be_changed(store: LocalImages, kind: str) -> None:
    image = store.find(layers.small_image(store.layout).digest)
    for path in ("/etc/added", "/bin/added", "/added", "/etc/passwd", "/sys/added", "/proc/added"):
        done = store.run(image.id, ["sh", "-c", f"echo changed > {path}"], {})
        assert done.code != 0 and ("Read-only" in done.stderr or "denied" in done.stderr or "nonexistent" in done.stderr), path
    store.run(image.id, ["sh", "-c", "echo changed > greeting"], {})
    assert store.run(image.id, ["cat", "greeting"], {}).stdout == "hello\n"


def test_network_is_a_loopback_only(store: LocalImages, kind: str) -> None:
    image = store.find(layers.small_image(store.layout).digest)
    assert store.run(image.id, ["sh", "-c", "ls /proc/self/net/dev_snmp6; cat /etc/hosts"], {}).stdout.split()[0] == "lo"
    state = store.run(image.id, ["cat", "/sys/class/net/lo/operstate", "/proc/net/fib_trie"], {}).stdout
    assert "127.0.0.1" in state or kind == "bubblewrap", state


def test_exit_codes(store: LocalImages, kind: str) -> None:
    image = store.find(layers.small_image(store.layout).digest)
    codes = [store.run(image.id, ["sh", "-c", command], {}).code for command in ("exit 3", "kill -9 $$", "kill $$")]
    assert codes == [3, 137, 143]
    assert store.run(image.id, ["missing"], {}).code in (1, 127)


HIGHER: list[layers.Member] = [
    ("etc/replaced", None, {}),
    ("etc/replaced/inside", b"now a directory\n", {}),
    ("opt", None, {}),
    ("opt/added", b"of the higher layer\n", {}),
]
LOWER: list[layers.Member] = [
    ("etc/replaced", b"a file\n", {}),
    ("opt", None, {}),
    ("opt/kept", b"of the lower layer\n", {}),
    ("opt/link", b"", {"type": b"1", "linkname": "opt/kept"}),
]


def test_layers_add_to_and_replace_files_of_lower_layers(store: LocalImages, kind: str) -> None:
    image = store.find(layers.small_image(store.layout, LOWER, HIGHER).digest)
    done = store.run(image.id, ["sh", "-c", "ls /opt; cat /opt/added /opt/link /etc/replaced/inside"], {})
    texts = ["of the higher layer", "of the lower layer", "now a directory"]
    assert done.stdout.splitlines() == ["added", "kept", "link", *texts]


def test_without_namespaces_the_error_names_each_reason(store: LocalImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        local_images, "_command", lambda *request: ["sh", "-c", "echo unshare: Operation not permitted >&2; exit 125"]
    )
    monkeypatch.setattr(local_images, "_bubblewrap", lambda *request: ["no-such-bwrap"])
    image = store.find(layers.small_image(store.layout).digest)
    with pytest.raises(RequirementMissing) as error:
        store.run(image.id, ["true"], {})
    assert "Operation not permitted" in error.value.message and "no-such-bwrap" in error.value.message
    assert "--security-opt" in error.value.hint and error.value.exit_code == 40


def test_changed_layer_is_refused(store: LocalImages) -> None:
    manifest = layers.small_image(store.layout)
    blob = store.layout.path(store.layout.layers(manifest.digest)[1].digest)
    content = blob.read_bytes()
    blob.write_bytes(content.replace(b"hello", b"HELLO"))
    with pytest.raises(Mismatch, match=blob.name):
        store.digests(manifest.digest)
    assert not [path for path in (store._workspace.root / "oci-unpacked").iterdir() if path.name == blob.name]
    blob.write_bytes(content)
    assert "/home/user/greeting" in store.digests(manifest.digest)


def test_files(store: LocalImages) -> None:
    image = store.find(layers.small_image(store.layout, LOWER, HIGHER).digest)
    assert {*store.files(image.id, "/opt")} == {"added", "kept", "link"}
    kept = store.file(image.id, "/opt/kept")
    assert kept and kept.read_text() == "of the lower layer\n"
    assert not store.file(image.id, "/opt/absent") and not store.file(image.id, "/opt/kept/below")
    plain = store.find(layers.small_image(store.layout, [("opt/a/b", b"1", {}), ("opt/c", b"2", {})]).digest)
    assert {name: path.read_bytes() for name, path in store.files(plain.id, "/opt/").items()} == {"a/b": b"1", "c": b"2"}
    assert store.file(plain.id, "opt") is None
    linked = store.find(layers.small_image(store.layout, [("opt/l", b"", {"type": b"2", "linkname": "/etc"})]).digest)
    with pytest.raises(NotTrusted, match="is a link"):
        store.files(linked.id, "/opt/")


def test_references(store: LocalImages) -> None:
    manifest = layers.small_image(store.layout, Labels={"a": "b"})
    image = store.find(manifest.digest)
    store.tag(image.id, "x:1")
    store.tag(image.id, "x:2")
    assert store.find("x:1") == store.find(image.id) == image and store.images("a") == [(image, ("x:1", "x:2"))]
    assert store.images("b") == [] and store.inspect("x:3") is None


def test_layer_that_an_image_has_twice_counts_at_its_highest_place(store: LocalImages, tmp_path: Path) -> None:
    first, second = layers.packed(("a", b"first", {})), layers.packed(("a", b"second", {}))
    image = store.find(layers.add_image(store.layout, [first, second, first], {}).digest)
    file = store.file(image.id, "a")
    assert file and file.read_bytes() == b"first"


def test_program_ends_with_the_command_that_runs_it(store: LocalImages) -> None:
    """Even if that is killed; its directory in the state is removed by the next command."""
    image = store.find(layers.small_image(store.layout).digest)
    seconds = f"300.{os.getpid()}"
    program = (
        "import sys; from pathlib import Path; from sm120kit.core.workspace import Workspace;"
        "from sm120kit.images.local_images import LocalImages;"
        "LocalImages(Workspace.open(Path(sys.argv[1]))).run(sys.argv[2], ['sleep', sys.argv[3]], {})"
    )
    state = store._workspace.root
    child = subprocess.Popen([sys.executable, "-c", program, state, image.id, seconds])

    def sleeping() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # ended meanwhile
                if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                    return True
        return False

    wait_until(sleeping)
    child.kill()
    child.wait()
    wait_until(lambda: not sleeping())
    Workspace.open(state)
    assert not [*(state / "scratch").iterdir()]


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)
