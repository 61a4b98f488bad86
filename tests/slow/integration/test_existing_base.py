"""Existing images as bases, read through a registry's API or from the archive of a container daemon."""

from __future__ import annotations

import contextlib
import gzip
import io
import platform
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layers
import pytest
import zstandard
from python_base import ACCOUNTS, PYTHON, SETTINGS, VERSION, add_python_image, python_members
from registry_server import RegistryServer, registry_server
from small_assembly import SmallImage

from sm120kit import recipes
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput, NotFound, NotTrusted, RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _existing_base, delivery, loading
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.docker import Daemon
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Descriptor, Layout
from sm120kit.recipes import lockfile
from sm120kit.recipes.recipe_records import Closure
from sm120kit.sources.run_options import Options


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, Descriptor]:
    """An image with Python in a layout of its own."""
    layout = Layout(Workspace.open(tmp_path_factory.mktemp("source")).root / "oci")
    return layout, add_python_image(layout)


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryServer]:
    with registry_server() as running:
        yield running


@pytest.fixture(scope="module")
def reference(source: tuple[Layout, Descriptor], registry: RegistryServer) -> str:
    """The image in a registry, by digest."""
    with RegistryClient(f"{registry.address}/python") as client:
        return f"{registry.address}/python@{client.push(source[0], source[1].digest, 'slim')}"


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")


def closure(python: str = VERSION, glibc: str = "2_17") -> Closure:
    return Closure(f"manylinux_{glibc}_{platform.machine()}", python, (), "")


def test_image_on_an_existing_image(tmp_path: Path, reference: str, registry: RegistryServer) -> None:
    small = SmallImage(tmp_path)
    store = LocalImages(small.workspace)
    manifest = _existing_base.fetch(reference, store.layout)
    found = _existing_base.inspect(manifest, store)
    assert (found.python, found.interpreter, found.has_venv) == (VERSION, "/usr/bin/python3", True)
    _existing_base.require_suitable(reference, found, closure(), compiles=True)
    registry.requests.clear()
    assert _existing_base.fetch(reference, store.layout) == manifest and registry.requests == [], "fetched once"

    with _existing_base.image_base(manifest, store) as base:
        image, _ = small.assemble(base=base)
    below = store.find(reference)
    assert image.layers[: len(below.layers)] == below.layers
    # The same layers as with this machine's Python, which writes them without a container.
    expected = SmallImage(tmp_path / "expected", python=(str(PYTHON),))
    expected.directory.mkdir()
    known, _ = expected.assemble()
    assert image.layers[len(below.layers) :][:-1] == known.layers[1:-1], "all but base and accounts"
    done = store.run(image.id, ["/opt/venv/bin/python", "-c", "import engine; print(engine.__cached__, engine.version)"], {})
    assert "__pycache__" in done.stdout and done.stdout.endswith(" 1\n"), done


def test_interpreter_elsewhere(tmp_path: Path, source: tuple[Layout, Descriptor]) -> None:
    small = SmallImage(tmp_path)
    with _existing_base.image_base(source[1].digest, LocalImages(Workspace.open(source[0].directory.parent))) as base:
        import dataclasses

        image, _ = small.assemble(base=dataclasses.replace(small.base(), python=base.python, interpreter="/opt/bin/python3"))
    with tarfile.open(small.layout.path(image.layers[1])) as archive:
        assert archive.getmember("opt/venv/bin/python3").linkname == "/opt/bin/python3"
        settings = archive.extractfile("opt/venv/pyvenv.cfg")
        assert settings is not None
        assert "home = /opt/bin\n" in (text := settings.read().decode()) and f"executable = /opt/bin/python{VERSION}\n" in text


def test_what_a_base_lacks(source: tuple[Layout, Descriptor], tmp_path: Path) -> None:
    store = LocalImages(Workspace.open(source[0].directory.parent))
    found = _existing_base.inspect(source[1].digest, store)
    with pytest.raises(RequirementMissing, match=r"Python .*, the lock is for Python 3\.9; glibc .*, the wheels need 9\.99"):
        _existing_base.require_suitable("base", found, closure("3.9", "9_99"), compiles=True)
    bare = layers.add_image(store.layout, [layers.packed(*python_members()), layers.packed(*ACCOUNTS)], SETTINGS)
    found = _existing_base.inspect(bare.digest, store)
    _existing_base.require_suitable("base", found, closure(), compiles=False)
    with pytest.raises(RequirementMissing, match=r"no C\+\+ compiler .*; no headers of Python"):
        _existing_base.require_suitable("base", found, closure(), compiles=True)


def test_base_is_refused_before_anything_is_fetched(
    tmp_path: Path, registry: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "require_disk", lambda *_: None)
    layout = Layout(tmp_path / "source")
    manifest = layers.small_image(layout)
    with RegistryClient(f"{registry.address}/bare") as client:
        digest = client.push(layout, manifest.digest, "1")
    workspace = Workspace.open(tmp_path / "state")
    recipe = recipes.load("vllm-0.19.1")
    (locked,) = lockfile.read(data_root() / "recipes" / "engines" / f"{recipe.name}.lock.json").closures
    base = f"{registry.address}/bare@{digest}"
    with pytest.raises(RequirementMissing, match="the base has no Python 3 that works"):
        delivery.prepare(base, recipe, locked, Options(workspace))
    assert not workspace.downloads.exists()


def test_neither_registry_nor_daemon_has_it(tmp_path: Path, registry: RegistryServer) -> None:
    layout = Layout(tmp_path / "oci")
    with pytest.raises(NotFound):
        _existing_base.fetch(f"{registry.address}/python@sha256:{'0' * 64}", layout)
    assert layout.images() == []


class Archive(Daemon):
    """The archive of a daemon, as Docker 20.10 or 25 writes it."""

    def __init__(self, content: bytes, size: int) -> None:
        self.content, self.size = content, size

    def find(self, reference: str) -> Any:
        return type("Listed", (), {"bytes": self.size})

    @contextlib.contextmanager
    def saved(self, reference: str) -> Iterator[tarfile.TarFile]:
        with tarfile.open(fileobj=io.BytesIO(self.content), mode="r|") as archive:
            yield archive


def saved(layout: Layout, manifest: str, form: str) -> bytes:
    """An image in the form of ``docker save``."""
    import json

    config, listed = json.dumps(layout.config(manifest)).encode(), layout.layers(manifest)
    pack = {"classic": bytes, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}[form]
    names = [f"{number}/layer.tar" for number, _ in enumerate(listed)]
    members: list[layers.Member] = []
    for number, (name, layer) in enumerate(zip(names, listed, strict=True)):
        if form == "classic" and layer in listed[:number]:
            link = f"../{listed.index(layer)}/layer.tar"
            members.append((name, b"", {"type": tarfile.SYMTYPE, "linkname": link}))
        else:
            members.append((name, pack(layout.path(layer.digest).read_bytes()), {}))
    manifests = [{"Config": "config.json", "RepoTags": None, "Layers": names}]
    return layers.packed(*members, ("config.json", config, {}), ("manifest.json", json.dumps(manifests).encode(), {}))


@pytest.mark.parametrize("form", ["classic", "gzip", "zstd"])
def test_image_of_a_daemon(tmp_path: Path, form: str) -> None:
    theirs, ours = Layout(tmp_path / "theirs"), Layout(tmp_path / "ours")
    twice = layers.packed(("added", b"content", {}))
    image = theirs.image(layers.add_image(theirs, [twice, layers.packed(*ACCOUNTS), twice], SETTINGS).digest)
    manifest = theirs.find(image.id)
    assert manifest is not None
    content = saved(theirs, manifest.digest, form)
    found = ours.image(loading.read(ours, Archive(content, image.bytes), "base"))
    assert (found.content, found.layers) == (image.content, image.layers)


def test_damaged_image_of_a_daemon(tmp_path: Path) -> None:
    theirs, ours = Layout(tmp_path / "theirs"), Layout(tmp_path / "ours")
    manifest = layers.add_image(theirs, [layers.packed(*ACCOUNTS)], SETTINGS).digest
    content = saved(theirs, manifest, "classic")
    with pytest.raises(NotTrusted):
        loading.read(ours, Archive(content.replace(b"/root:", b"/other"), 1), "base")
    with pytest.raises(BadInput):
        loading.read(ours, Archive(layers.packed(("manifest.json", b"[]", {})), 1), "base")
    assert ours.images() == []
