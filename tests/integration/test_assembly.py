"""Images assembled from layers: the files of wheels, determinism, what is written again, damage and hostile wheels."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from small_assembly import CUDA_H, SmallImage
from small_engine import make_wheel

from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, CommandFailed, Mismatch, NotTrusted
from sm120kit.core.workspace import Workspace
from sm120kit.images import _rootfs, _wheel_layers, image_inputs
from sm120kit.images._bytecode import BytecodeCompiler, BytecodeWriter
from sm120kit.images._layers import LayerWriter
from sm120kit.images.oci import Layout
from sm120kit.kernels import driver_stub
from sm120kit.sources.source_records import LockedWheel

SITE = f"opt/venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture
def small(tmp_path: Path) -> SmallImage:
    return SmallImage(tmp_path)


def tree(layout: Layout, layers: tuple[str, ...]) -> dict[str, tarfile.TarInfo]:
    """The entries of an image; those of a higher layer replace those of lower ones."""
    entries = {}
    for layer in layers:
        with tarfile.open(layout.path(layer)) as archive:
            entries |= {member.name: member for member in archive}
    return entries


def content(layout: Layout, layers: tuple[str, ...], path: str) -> bytes:
    """A file of an image."""
    for layer in reversed(layers):
        with tarfile.open(layout.path(layer)) as archive:
            if path in archive.getnames():
                file = archive.extractfile(path)
                assert file is not None
                return file.read()
    raise KeyError(path)


def test_image_has_the_files_and_settings_of_its_inputs(small: SmallImage) -> None:
    image, ran = small.assemble()
    assert ran and image.user == "1000:1000" and image.platform == "linux/amd64"
    assert image.canonical_name.startswith("sm120kit/vllm:1.0-sm120kit.")
    manifest = small.layout.find(image.id)
    assert manifest is not None
    small.layout.verify(manifest.digest)
    config = small.layout.config(manifest.digest)
    settings = config["config"]
    assert settings["Env"] == [
        "PATH=/opt/venv/bin:/usr/bin:/bin",
        "HOME=/home/sm120kit",
        "USER=sm120kit",
        "CUDA_HOME=/opt/cuda",
        "LD_LIBRARY_PATH=/opt/cuda/lib",
        "NVIDIA_VISIBLE_DEVICES=all",
        'A=two "words" and $3',
    ]
    assert settings["Entrypoint"] == ["python", "/opt/sm120kit/serve.py", "vllm", "serve"] and "Cmd" not in settings
    assert settings["WorkingDir"] == "/home/sm120kit"
    check = {"Test": ["CMD", "python", "/opt/sm120kit/healthy.py"], "Interval": 30 * 10**9, "Timeout": 10**10}
    assert settings["Healthcheck"] == check | {"StartPeriod": 3600 * 10**9, "Retries": 3}
    assert len(config["history"]) == len(image.layers) == len(config["rootfs"]["diff_ids"])
    entries = tree(small.layout, image.layers)
    assert {member.mtime for member in entries.values()} == {315532800}
    assert entries["opt/venv/bin/python3"].linkname == "/usr/bin/python3" and entries["opt/venv/lib64"].linkname == "lib"
    assert "home = /usr/bin\n" in content(small.layout, image.layers, "opt/venv/pyvenv.cfg").decode()
    assert small.directory.name not in content(small.layout, image.layers, "opt/venv/bin/activate").decode()
    home = entries["home/sm120kit"]
    assert (home.uid, home.gid, home.mode) == (1000, 0, 0o775)
    cache = entries["home/sm120kit/.cache"]  # a volume that is mounted there gets its owner and mode
    assert (cache.uid, cache.gid, cache.mode, entries["root"].mode) == (1000, 0, 0o775, 0o711)
    assert b"sm120kit:x:1000:1000:" in content(small.layout, image.layers, "etc/passwd")
    assert content(small.layout, image.layers, "opt/venv/bin/serve").decode() == (
        "#!/opt/venv/bin/python\nimport sys\nfrom engine.cli import main\nif __name__ == '__main__':\n"
        "    sys.argv[0] = sys.argv[0].removesuffix('.exe')\n    sys.exit(main.run())\n"
    )
    assert entries["opt/venv/bin/serve"].mode == 0o755 and "opt/venv/share/engine.txt" in entries
    cached = sys.implementation.cache_tag
    assert f"{SITE}/engine/__pycache__/__init__.{cached}.pyc" in entries
    assert f"{SITE}/engine/__pycache__/old.{cached}.pyc" not in entries  # Python 2
    assert entries["opt/cuda/lib64/libcublas.so"].linkname == "libcublas.so.13"
    assert entries["opt/cuda/lib64/libnvrtc.alt.so"].linkname == "libnvrtc.alt.so.13"
    assert entries["opt/cuda/lib/libcudart.so.13"].linkname == f"/{SITE}/nvidia/cu13/lib/libcudart.so.13"
    assert {"opt/sm120kit/healthy.py", "opt/sm120kit/serve.py", "opt/sm120kit/help.txt"} <= {*entries}
    assert "opt/cuda/lib64/stubs/libcuda.so" in entries


def test_added_files_are_in_the_image_and_inputs_of_it(small: SmallImage) -> None:
    plain, _ = small.assemble()
    small.added = {"chat/template.jinja": "{{ messages }}\n", "start.sh": "#!/bin/sh\n"}
    image, ran = small.assemble()
    assert ran and image.canonical_name != plain.canonical_name and image.layers[:-1] == plain.layers[:-1]
    for path, text in small.added.items():
        assert content(small.layout, image.layers, f"opt/sm120kit/files/{path}").decode() == text
    assert "opt/sm120kit/files/start.sh" not in tree(small.layout, plain.layers)


def test_same_inputs_give_the_same_image_in_two_directories(tmp_path: Path) -> None:
    first, second = (SmallImage(tmp_path / name) for name in ("a", "much-longer-name"))
    for small in (first, second):
        small.directory.mkdir()
    assert first.assemble()[0] == second.assemble()[0]


def test_nothing_is_read_or_written_twice(small: SmallImage) -> None:
    image, _ = small.assemble()
    blobs = {path: path.stat().st_mtime_ns for path in (small.layout.directory / "blobs" / "sha256").iterdir()}
    small.read.clear()
    assert small.assemble() == (image, False) and small.read == []
    changed, ran = small.assemble(b"patched = 2\n")
    assert ran and {*small.read} == {"flashinfer-python"}
    assert len({*changed.layers} - {*image.layers}) == 1
    assert all(path.stat().st_mtime_ns == time for path, time in blobs.items())
    # Another engine shares what is equal.
    other = SmallImage(small.directory)
    other.files["engine"]["engine/__init__.py"] = b"version = 2\n"
    second, _ = other.assemble()
    assert "nvidia-cublas" not in other.read and len({*second.layers} & {*image.layers}) == len(image.layers) - 1


def test_files_as_released_are_a_layer_that_changed_patches_share(small: SmallImage) -> None:
    patched, again = small.assemble()[0], small.assemble(b"patched = 2\n")[0]
    ((before, after),) = (pair for pair in zip(patched.layers, again.layers, strict=True) if pair[0] != pair[1])
    cached = f"flashinfer/__pycache__/{{}}.{sys.implementation.cache_tag}.pyc"
    for layer in (before, after):
        files = {name for name, member in tree(small.layout, (layer,)).items() if member.isreg() and ".dist-info" not in name}
        assert files == {f"{SITE}/flashinfer/__init__.py", f"{SITE}/{cached.format('__init__')}"}
    lower = again.layers[again.layers.index(after) - 1]
    entries = tree(small.layout, (lower,))
    assert {name for name, member in entries.items() if member.isreg()} == {
        f"{SITE}/{name}" for name in (*small.released, cached.format("released"))
    }
    assert entries[f"{SITE}/flashinfer/data/bin/tool"].mode == 0o755

    for change in ({"flashinfer/data/gemm.cuh": b"changed\n"}, {"flashinfer/data/added.cuh": b"added\n"}):
        small.released |= change
        layers = small.assemble(b"patched = 2\n")[0].layers
        assert lower not in layers, change
        lower = next(layer for layer in layers if f"{SITE}/flashinfer/released.py" in tree(small.layout, (layer,)))


def test_patches_of_other_files_share_all_released_files_of_a_wheel_that_is_packed_again(small: SmallImage) -> None:
    small.files["other"] |= {"other/a.py": b"a = 1\n", "other/b.py": b"b = 1\n"}
    images = []
    for patched in ({"other/a.py": b"a = 2\n"}, {"other/b.py": b"b = 2\n"}, {"other/a.py": None}):
        small.patched = {"other": patched}
        images.append(small.assemble()[0])
    first, second, without = images
    assert len({*second.layers} - {*first.layers}) == 1
    texts = [[content(small.layout, image.layers, f"{SITE}/other/{name}.py") for name in "ab"] for image in images[:2]]
    assert texts == [[b"a = 2\n", b"b = 1\n"], [b"a = 1\n", b"b = 2\n"]]
    assert f"{SITE}/other/a.py" not in tree(small.layout, without.layers)


def test_layer_of_files_as_released_does_not_depend_on_earlier_images(small: SmallImage) -> None:
    """Files of a layer are in the order of the wheel: another order is another layer."""
    small.assemble()
    small.released = dict(reversed(small.released.items()))
    after_another, _ = small.assemble()
    small.state = "other-state"
    assert small.assemble()[0] == after_another


def test_files_as_released_are_written_again_if_their_layer_is_gone(small: SmallImage) -> None:
    image, _ = small.assemble()
    for layer in image.layers[-3:]:
        small.layout.path(layer).unlink()
    assert small.assemble() == (image, True)


def test_released_file_that_the_wheel_does_not_describe_is_in_the_upper_layer(small: SmallImage) -> None:
    """A file whose content RECORD does not determine is written with each wheel."""
    small.labels = {image_inputs.WRONG_RECORD: "flashinfer-python:flashinfer/data/*"}
    layers = small.assemble()[0].layers
    upper = next(layer for layer in layers if f"{SITE}/flashinfer/__init__.py" in tree(small.layout, (layer,)))
    assert f"{SITE}/flashinfer/data/gemm.cuh" in tree(small.layout, (upper,))


def test_files_unpacked_while_layers_are_written_are_those_of_the_layers(small: SmallImage) -> None:
    """Contents, modes, times and records are the same as when the layers are read."""
    image, _ = small.assemble()
    unpacked, written = small.workspace.root / "oci-unpacked", small.workspace.root / "written"
    unpacked.rename(written)
    _rootfs.layers(small.layout, small.layout.find(image.id).digest, small.workspace)
    own = image.layers[1:]  # the lowest is the base
    assert everything(unpacked, own) == everything(written, own)


def everything(unpacked: Path, layers: Sequence[str]) -> dict[str, tuple[int, float, bytes]]:
    """Modes, times and contents of the unpacked files of layers and of their records, by path."""
    found: dict[str, tuple[int, float, bytes]] = {}
    for layer in layers:
        directory = unpacked / layer.removeprefix("sha256:")
        assert directory.is_dir(), layer
        for path in directory.rglob("*"):
            status = path.lstat()
            link, file = path.is_symlink(), path.is_file()
            content = str(path.readlink()).encode() if link else path.read_bytes() if file else b""
            mtime = 0.0 if path.parent == directory else status.st_mtime  # the records and the root have none in the layer
            found[str(path.relative_to(unpacked))] = (status.st_mode, mtime, content)
    return found


def test_removed_layer_is_written_again_and_a_changed_one_is_detected(small: SmallImage) -> None:
    image, _ = small.assemble()
    small.layout.path(image.layers[2]).unlink()
    again, ran = small.assemble()
    assert (again, ran) == (image, True)
    path = small.layout.path(image.layers[2])
    path.write_bytes(path.read_bytes().replace(b"nvidia", b"NVIDIA"))
    manifest = small.layout.find(image.id)
    assert manifest is not None
    with pytest.raises(Mismatch):
        small.layout.verify(manifest.digest)


def test_winner_of_a_path_is_that_of_pip(small: SmallImage) -> None:
    """Pip installs in reverse order of names; what replaces files of a wheel that it requires is higher."""
    image, _ = small.assemble()
    assert content(small.layout, image.layers, f"{SITE}/shared/common.py") == b"shared = 1\n"
    small.requires = {"zlast": ["other"]}
    image, _ = small.assemble()
    assert content(small.layout, image.layers, f"{SITE}/shared/common.py") == b"shared = 'of zlast'\n"
    for layer in image.layers:
        with tarfile.open(small.layout.path(layer)) as archive:
            names = archive.getnames()
        assert len(names) == len({*names})


@pytest.mark.parametrize(
    ("files", "expected", "message"),
    [
        ({"../../../../../etc/passwd": b""}, NotTrusted, "not a path"),
        ({"engine-1.0.data/data/../../../etc/x": b""}, NotTrusted, "not a path"),
        ({"/etc/passwd": b""}, BadInput, "absolute"),
        ({"engine-1.0.data/scripts/python": b""}, NotTrusted, "part of the environment itself"),
        ({"engine-1.0.data/data/lib64/x": b""}, NotTrusted, "part of the environment itself"),
        ({"a": b"", "a/b": b""}, NotTrusted, "no directory"),
        ({"engine-1.0.data/nowhere/x": b""}, BadInput, "nowhere"),
        ({"engine-1.0.data": b""}, BadInput, "not a directory"),
        ({"engine-1.0.data/scripts": b""}, BadInput, "not a directory"),
        ({"engine-1.0.dist-info/entry_points.txt": b"[console_scripts]\n../../x = a:b\n"}, NotTrusted, "not a path"),
        ({"engine-1.0.dist-info/entry_points.txt": b"[console_scripts]\nx = no callable\n"}, BadInput, "callable"),
    ],
)  # fmt: skip
def test_hostile_wheel_is_refused(small: SmallImage, files: dict[str, bytes], expected: type[Exception], message: str) -> None:
    small.files["engine"] = files
    with pytest.raises(expected, match=message):
        small.assemble()
    assert small.layout.images() == [] and [*(small.layout.directory / "partial").iterdir()] == []


@pytest.mark.parametrize(("wrong_record", "refused"), [((), True), (("other/*",), True), (("engine.*",), False)])
def test_file_that_differs_from_record_is_refused_unless_the_recipe_lists_it(
    small: SmallImage, tmp_path: Path, wrong_record: tuple[str, ...], refused: bool
) -> None:
    make_wheel(tmp_path, "engine", "1.0", files={"engine.py": b"original\n"})
    path = tmp_path / "engine-1.0-py3-none-any.whl"
    changed = path.read_bytes().replace(b"original", b"replaced")
    import binascii

    crc = (binascii.crc32(data).to_bytes(4, "little") for data in (b"original\n", b"replaced\n"))
    path.write_bytes(changed.replace(next(crc), next(crc)))
    wheel = LockedWheel("engine", "1.0", path.name, file_sha256(path))
    with (
        small.layout.writer() as blob,
        pytest.raises(BadInput, match=r"engine\.py does not have the sha256 of its RECORD") if refused else nullcontext(),
    ):
        layer = LayerWriter(blob)
        bytecode = BytecodeWriter(BytecodeCompiler([sys.executable]), layer)
        _wheel_layers.install(wheel, path, layer, bytecode, wrong_record=wrong_record)


@pytest.mark.parametrize("entry", ["sha99=AAAA", "sha256", "shake_128=AAAA"])
def test_record_with_malformed_hashes_is_refused(small: SmallImage, tmp_path: Path, entry: str) -> None:
    info = "engine-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "engine-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n")
        archive.writestr(f"{info}/RECORD", f"{info}/WHEEL,{entry},1\n")
    path = tmp_path / "engine-1.0-py3-none-any.whl"
    wheel = LockedWheel("engine", "1.0", path.name, file_sha256(path))
    with small.layout.writer() as blob, pytest.raises(BadInput, match="cannot be installed"):
        layer = LayerWriter(blob)
        _wheel_layers.install(wheel, path, layer, BytecodeWriter(BytecodeCompiler([sys.executable]), layer))


def test_image_without_cuda_headers_is_refused(small: SmallImage) -> None:
    del small.files["nvidia-cuda-runtime"]["nvidia/cu13/include/cuda.h"]
    with pytest.raises(CommandFailed, match=r"no wheel .* has nvidia/cu13/include/cuda\.h"):
        small.assemble()


def test_base_whose_python_does_not_work(small: SmallImage) -> None:
    small.python = ("/bin/false",)
    with pytest.raises(CommandFailed, match="/bin/false is not a Python"):
        small.assemble()


def test_bytecode_is_that_of_compileall(tmp_path: Path) -> None:
    sources = {path.name: path.read_bytes() for path in Path(json.__file__).parent.glob("*.py")} | {"broken.py": b"def"}
    for name, source in sources.items():
        (tmp_path / "overlay").mkdir(exist_ok=True)
        (tmp_path / "overlay" / name).write_bytes(source)
    argv = [sys.executable, "-m", "compileall", "-qq", "-s", tmp_path / "overlay", "-p", "/", tmp_path / "overlay"]
    subprocess.run([*argv, "--invalidation-mode", "unchecked-hash"], check=False)
    compiler = BytecodeCompiler([sys.executable])
    for name, bytecode in zip(
        sources, compiler.compile([(f"/{name}", source) for name, source in sources.items()]), strict=True
    ):
        cached = tmp_path / "overlay" / compiler.python.cached_path(name).lstrip("/")
        assert bytecode == (cached.read_bytes() if name != "broken.py" else b""), name


def test_python_files_that_fill_memory_have_no_bytecode(small: SmallImage) -> None:
    small.files["engine"] = {"large.py": b"#" * (_wheel_layers.MAX_COMPILED_BYTES + 1), "small.py": b""}
    files = set()
    for layer in small.assemble()[0].layers:
        with tarfile.open(small.layout.path(layer)) as archive:
            files |= {*archive.getnames()}
    assert f"{SITE}/large.py" in files and not [path for path in files if "__pycache__/large" in path]
    assert [path for path in files if "__pycache__/small" in path]


def test_driver_stub_links_and_loads(tmp_path: Path) -> None:
    stub = tmp_path / "libcuda.so"
    stub.write_bytes(driver_stub.link_stub(CUDA_H.decode(), os.uname().machine))
    assert ctypes.CDLL(str(stub)).cuMemAlloc_v2() == 34
    (tmp_path / "main.c").write_text("int cuInit(unsigned); int main(void) { return cuInit(0); }\n")
    subprocess.run(["cc", "main.c", "-L.", "-lcuda", "-o", "main"], cwd=tmp_path, check=True)
    needed = subprocess.run(["readelf", "-d", "main"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "[libcuda.so.1]" in needed
    warnings = subprocess.run(["readelf", "-a", stub], capture_output=True, text=True).stderr
    assert warnings == ""


def test_files_left_out_are_in_no_layer(small: SmallImage) -> None:
    small.files["other"] |= {"other/cubins/a/x.cubin": b"x", "other/y.cubin": b"y", "other/cubins/keep.h": b"k"}
    complete = small.assemble()[0]
    small.labels = {image_inputs.LEFT_OUT: "other:other/cubins/*.cubin"}
    image, ran = small.assemble()
    entries, rest = ({*tree(small.layout, layers)} for layers in (complete.layers, image.layers))
    assert ran and entries - rest == {f"{SITE}/other/cubins/a", f"{SITE}/other/cubins/a/x.cubin"} and rest < entries
    assert len({*complete.layers} - {*image.layers}) == 1  # that of the wheel; all others are shared


def test_library_left_out_has_no_link_in_the_cuda_home(small: SmallImage) -> None:
    small.labels = {image_inputs.LEFT_OUT: "nvidia-cublas:nvidia/cu13/lib/libcublas.so.13"}
    entries = tree(small.layout, small.assemble()[0].layers)
    assert "opt/cuda/lib64/libcudart.so.13" in entries and not [path for path in entries if "libcublas" in path]


def test_file_left_out_replaces_no_file_of_another_wheel(small: SmallImage) -> None:
    name = f"{SITE}/shared/common.py"
    assert content(small.layout, small.assemble()[0].layers, name) == b"shared = 1\n"  # of other, which pip installs last
    small.labels = {image_inputs.LEFT_OUT: "other:shared/common.py"}
    image, _ = small.assemble()
    assert content(small.layout, image.layers, name) == b"shared = 'of zlast'\n"


def test_pattern_of_a_file_left_out_must_match(small: SmallImage) -> None:
    for entry in ("other:other/*.cubin", "absent:*"):
        small.labels = {image_inputs.LEFT_OUT: entry}
        name, pattern = entry.split(":")
        with pytest.raises(BadInput, match=re.escape(f"vllm-1.0: leave_out of {name}: no file of its wheel matches {pattern}")):
            small.assemble()


def test_large_file_that_a_wheel_has_twice_is_written_once(small: SmallImage) -> None:
    library = bytes(range(256)) * (_wheel_layers.LINKED_BYTES // 256)
    small.files["other"] |= {f"other/libx.so{end}": library for end in ("", ".1", ".1.2")} | {
        "other/small.so": b"1",
        "other/same.so": b"1",
    }
    image, _ = small.assemble()
    entries = {name.rpartition("/")[2]: entry for name, entry in tree(small.layout, image.layers).items() if "/other/" in name}
    assert sorted(name for name, entry in entries.items() if entry.islnk()) == ["libx.so.1", "libx.so.1.2"]
    assert content(small.layout, image.layers, entries["libx.so.1.2"].name) == library


def test_settings_of_the_base_are_kept_but_its_start_command(small: SmallImage) -> None:
    base = small.base()
    settings = {
        "Env": ["B=1", "HOME=/root"],
        "Cmd": ["bash"],
        "Entrypoint": ["/init"],
        "Labels": {"of": "base"},
        "StopSignal": "SIGINT",
    }
    image, _ = small.assemble(base=replace(base, config=base.config | {"config": settings}))
    manifest = small.layout.find(image.id)
    assert manifest is not None
    config = small.layout.config(manifest.digest)["config"]
    path = "PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert {"B=1", "HOME=/home/sm120kit", path} <= {*config["Env"]} and config["StopSignal"] == "SIGINT"
    assert "Cmd" not in config and config["Entrypoint"][0] == "python" and config["Labels"]["of"] == "base"


def test_state_is_not_needed_to_read_an_image(small: SmallImage) -> None:
    """A layout is complete in itself: another program, or another state directory, reads it."""
    image, _ = small.assemble()
    moved = Layout(small.layout.directory.rename(small.directory / "moved"))
    manifest = moved.find(image.id)
    assert manifest is not None and moved.image(manifest.digest) == image
    assert Workspace.open(small.directory / "state").root.is_dir()
