"""The OCI image layout and the layers in it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from sm120kit.core.errors import BadInput, Mismatch, NotFound, NotTrusted
from sm120kit.core.workspace import Workspace
from sm120kit.images import loading
from sm120kit.images._layers import LayerWriter
from sm120kit.images.oci import LAYER, Descriptor, Layout

CONFIG = {"architecture": "amd64", "os": "linux", "config": {"Labels": {"a": "b"}, "User": "1000:1000"}}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "oci")


def layer(layout: Layout, **files: str) -> Descriptor:
    with layout.writer() as blob:
        writer = LayerWriter(blob)
        for name, content in files.items():
            writer.file(f"opt/{name}", [content.encode()], len(content))
        return writer.finish()


def image(layout: Layout, *layers: Descriptor) -> Descriptor:
    return layout.add_image(layers, CONFIG)


def partial(layout: Layout) -> list[Path]:
    return list((layout.directory / "partial").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"os": None},
        {"architecture": ["amd64"]},
        {"history": 5},
        {"history": ["RUN x"]},
        {"config": [5]},
        *({"config": {key: 5}} for key in ("User", "WorkingDir", "Labels", "Env", "Entrypoint", "Cmd")),
        {"config": {"Labels": {"a": 5}}},
        {"config": {"Env": [5]}},
    ],
)
def test_config_of_another_form_is_refused(layout: Layout, change: dict[str, object]) -> None:
    blob = layer(layout, a="b")
    with pytest.raises(BadInput, match="of an image"):
        layout.add_image([blob], CONFIG | change)
    assert not layout.images()


def test_layer_is_a_deterministic_tar_file(tmp_path: Path) -> None:
    long_name = "/".join(["directory" * 5] * 8)

    def write(layout: Layout) -> Descriptor:
        with layout.writer() as blob:
            writer = LayerWriter(blob)
            writer.directory("home/sm120kit", mode=0o700, uid=1000, gid=1000)
            writer.file("usr/bin/tool", [b"#!", b"/bin/sh"], 9, mode=0o755)
            writer.hardlink("usr/bin/other", "usr/bin/tool", mode=0o755)
            writer.symlink("lib64", "usr/lib64")
            writer.file(long_name, [b""], 0)
            writer.file("opt/\udcff", [b"x"], 1)  # a name that is not UTF-8
            return writer.finish()

    first, second = (write(Layout(tmp_path / name)) for name in ("first", "second"))
    assert first == second and first.media_type == LAYER
    path = Layout(tmp_path / "first").path(first.digest)
    assert path.stat().st_size == first.size
    with tarfile.open(path) as archive:
        members = {member.name: member for member in archive}
        assert archive.extractfile("usr/bin/other").read() == b"#!/bin/sh"  # type: ignore[union-attr]
    assert list(members)[:2] == ["home", "home/sm120kit"]
    assert {member.mtime for member in members.values()} == {315532800}
    owned = members["home/sm120kit"]
    assert (owned.mode, owned.uid, owned.gid, owned.uname) == (0o700, 1000, 1000, "")
    assert members["usr"].mode == 0o755 and members["usr"].isdir()
    assert members["lib64"].linkname == "usr/lib64" and long_name in members and "opt/\udcff" in members


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../up", "a//b", "a/", ".", "", "a\0b", "opt/tool", "opt/tool/x", "opt/link/x"]
)
def test_layer_refuses_paths_that_leave_it_or_exist(layout: Layout, path: str) -> None:
    with layout.writer() as blob:
        writer = LayerWriter(blob)
        writer.file("opt/tool", [b""], 0)
        writer.symlink("opt/link", "/etc")
        with pytest.raises(NotTrusted):
            writer.file(path, [b""], 0)
    assert partial(layout) == []


def test_layer_refuses_a_file_of_another_size_and_a_link_to_nothing(layout: Layout) -> None:
    with layout.writer() as blob:
        with pytest.raises(NotTrusted, match="has 2 bytes, not 1"):
            LayerWriter(blob).file("file", [b"ab"], 1)
        with pytest.raises(NotTrusted, match="no file before it"):
            LayerWriter(blob).hardlink("one", "two")


def test_image_is_listed_tagged_and_described(layout: Layout) -> None:
    base, top = layer(layout, a="1"), layer(layout, b="2")
    manifest = image(layout, base, top)
    assert layout.images() == [(manifest, ())]
    layout.tag(manifest.digest, "sm120kit/vllm:1")
    layout.tag(manifest.digest, "sm120kit/vllm:2")
    assert layout.images() == [(manifest, ("sm120kit/vllm:1", "sm120kit/vllm:2"))]
    described = layout.image(manifest.digest)
    first_digits = described.id.removeprefix("sha256:")[:12]
    for reference in ("sm120kit/vllm:1", manifest.digest, described.id, first_digits, f"sha256:{first_digits}"):
        assert layout.find(reference) == manifest
    for reference in ("sm120kit/vllm:3", first_digits[:11], "0" * 12):
        assert layout.find(reference) is None
    assert described.layers == (base.digest, top.digest) and described.bytes == base.size + top.size
    assert (described.labels, described.user, described.platform) == ({"a": "b"}, "1000:1000", "linux/amd64")
    assert layout.layers(manifest.digest) == (base, top)
    other = image(layout, base)
    layout.tag(other.digest, "sm120kit/vllm:1")  # moves
    layout.untag("sm120kit/vllm:2")
    assert {one.digest: names for one, names in layout.images()} == {
        manifest.digest: (),
        other.digest: ("sm120kit/vllm:1",),
    }
    assert json.loads((layout.directory / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    with pytest.raises(NotFound):
        layout.tag(base.digest, "sm120kit/vllm:9")


def test_first_digits_of_several_images_are_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = image(layout, layer(layout, a="1")), image(layout, layer(layout, b="2"))
    ids = {each.digest: layout.image(each.digest).id for each in (one, other)}
    monkeypatch.setattr(layout, "manifest", lambda digest: {"config": {"digest": f"sha256:{'a' * 12}{ids[digest][7:59]}"}})
    with pytest.raises(BadInput, match="2 images begin with aaaaaaaaaaaa"):
        layout.find("a" * 12)


def test_removed_image_keeps_the_layers_of_others(layout: Layout) -> None:
    shared, own = layer(layout, a="1"), layer(layout, b="22")
    kept, removed = image(layout, shared), image(layout, shared, own)
    layout.tag(removed.digest, "sm120kit/vllm:1")
    assert layout.remove(removed.digest) >= own.size
    assert layout.images() == [(kept, ())]
    assert layout.has(shared.digest, shared.size) and not layout.has(own.digest) and not layout.has(removed.digest)
    layout.verify(kept.digest)


def test_damaged_images_can_be_removed_together_and_one_by_one(layout: Layout) -> None:
    shared, own = layer(layout, a="1"), layer(layout, b="22")
    first, second, sound = image(layout, shared), image(layout, own), image(layout, shared, own)
    for damaged in (first, second):
        layout.path(damaged.digest).write_bytes(b"damaged")
    config = layout.manifest(sound.digest)["config"]["digest"]
    assert layout.find(config) == sound
    with pytest.raises(Mismatch):
        layout.find("sha256:" + "0" * 64)
    layout.remove(sound.digest)
    assert {one.digest for one, _ in layout.images()} == {first.digest, second.digest}
    assert not layout.has(sound.digest) and layout.has(shared.digest), "a damaged image may have its layers"
    layout.remove(first.digest, second.digest)
    assert layout.images() == [] and not layout.has(first.digest) and not layout.has(second.digest)


def test_changed_or_missing_blobs_are_detected(layout: Layout) -> None:
    top = layer(layout, a="1")
    manifest = image(layout, top)
    layout.verify(manifest.digest)
    path = layout.path(top.digest)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(Mismatch, match="does not have the sha256"):
        layout.verify(manifest.digest)
    path.write_bytes(content[:-1])
    with pytest.raises(Mismatch, match="does not have 2560 bytes"):
        layout.verify(manifest.digest)
    with pytest.raises(Mismatch):
        image(layout, top, Descriptor(LAYER, top.digest, top.size))
    layout.path(manifest.digest).write_bytes(b"{}")
    with pytest.raises(Mismatch):
        layout.manifest(manifest.digest)
    (layout.directory / "index.json").write_text('{"manifests": [{"digest": "../../etc/passwd"}]}')
    with pytest.raises(Mismatch, match=r"index\.json"):
        layout.images()
    with pytest.raises(BadInput):
        layout.path("sha256:../../../etc/passwd")


def test_pipes_in_place_of_files_are_refused_at_once(layout: Layout) -> None:
    shared = layer(layout, a="1")
    made = image(layout, shared)
    for path in (layout.path(made.digest), layout.path(shared.digest), layout.directory / "index.json"):
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises((Mismatch, OSError)):
            layout.verify(made.digest)
            layout.images()
        path.unlink()
        path.write_bytes(content)
    layout.verify(made.digest)


def test_blob_without_commit_and_of_a_killed_process_is_removed(layout: Layout) -> None:
    with pytest.raises(RuntimeError), layout.writer() as blob:
        blob.write(b"half")
        raise RuntimeError
    assert partial(layout) == []
    program = f"""
import os, signal
from pathlib import Path
from sm120kit.images.oci import Layout
with Layout(Path({str(layout.directory)!r})).writer() as blob:
    blob.write(b"half" * 2**20)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert killed.returncode == -signal.SIGKILL and partial(layout) != []
    layer(layout, a="1")
    assert partial(layout) == []


def test_writers_and_tags_at_once(layout: Layout) -> None:
    def work(number: int) -> None:
        for turn in range(4):
            layout.tag(image(layout, layer(layout, shared="x"), layer(layout, own=f"{turn}")).digest, f"r:{number}-{turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for _, names in layout.images() for name in names) == [f"r:{a}-{b}" for a in range(4) for b in range(4)]
    assert len(layout.images()) == 4 and partial(layout) == []
    for manifest, _ in layout.images():
        layout.verify(manifest.digest)


def test_large_document_is_refused(layout: Layout) -> None:
    with layout.writer() as blob:
        for _ in range(5):
            blob.write(bytes(2**20))
        large = blob.commit(LAYER)
    with pytest.raises(Mismatch):
        layout.read(large.digest)
    assert io.BytesIO(layout.path(large.digest).read_bytes()).getbuffer().nbytes == large.size


def test_archive_has_an_entry_for_each_directory_before_its_files(layout: Layout, tmp_path: Path) -> None:
    manifest = image(layout, layer(layout, a="a")).digest
    loading.export(layout, manifest, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as archive:
        seen = set()
        for member in archive:
            above = Path(member.name).parent
            assert str(above) in {".", *seen}, member.name
            seen |= {member.name} if member.isdir() else set()
    assert seen == {"blobs", "blobs/sha256"}


def test_dash_streams_the_archive_to_stdout(tmp_path: Path) -> None:
    layout = Layout(Workspace.open(tmp_path / "state").root / "oci")
    manifest = image(layout, layer(layout, a="a")).digest
    loading.export(layout, manifest, tmp_path / "image.tar")
    argv = [sys.executable, "-m", "sm120kit", "image", "export", manifest, "-", "--state", str(tmp_path / "state")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == (tmp_path / "image.tar").read_bytes() and not (tmp_path / "-").exists()
